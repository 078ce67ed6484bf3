"""The kernels of triton_codes.py: codes become numbers in the tile that is multiplied."""

from __future__ import annotations

import triton
import triton.language as tl

from nanoengine.kernels.triton_code_numbers import _numbers


@triton.jit
def choose(
    ids, experts, starts, ends, places, choices, tiles,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The tensors of ChosenTiles: a program makes STEP places, and STEP tiles."""
    own = tl.program_id(0) * STEP + tl.arange(0, STEP)
    expert = tl.arange(0, EXPERTS)
    mine = tl.load(ids + own, mask=own < choices, other=0)[:, None]
    before, counts = tl.zeros([STEP], tl.int32), tl.zeros([EXPERTS], tl.int32)
    for first in range(0, choices, STEP):
        other = first + tl.arange(0, STEP)
        theirs = tl.load(ids + other, mask=other < choices, other=EXPERTS)[None, :]
        is_before = (theirs < mine) | (theirs == mine) & (other[None, :] < own[:, None])
        before += tl.sum(is_before.to(tl.int32), 1)
        counts += tl.sum((theirs == expert[:, None]).to(tl.int32), 1)
    tl.store(places + before, own.to(tl.int64), mask=own < choices)
    num_tiles, last = (counts + ROWS - 1) // ROWS, tl.cumsum(counts, 0)
    tile_ends = tl.cumsum(num_tiles, 0)
    index = own[:, None] - (tile_ends - num_tiles)[None, :]
    is_its = (index >= 0) & (index < num_tiles[None, :])  # of one expert, or none
    found = tl.sum(tl.where(is_its, expert[None, :] + 1, 0), 1) - 1
    start = tl.sum(tl.where(is_its, (last - counts)[None, :] + index * ROWS, 0), 1)
    end = tl.sum(tl.where(is_its, last[None, :], 0), 1)
    is_tile = own < tiles
    tl.store(experts + own, found.to(tl.int64), mask=is_tile)
    tl.store(starts + own, start.to(tl.int64), mask=is_tile)
    tl.store(ends + own, end.to(tl.int64), mask=is_tile)


@triton.jit
def _chosen_rows(tile, tiles, ROWS: tl.constexpr, EACH: tl.constexpr):
    """The rows of a tile: of x, of out, which are there, and their expert. A row of out is a
    choice, of which each row of x makes EACH; tiles: of ChosenTiles.
    """
    experts, starts, ends, places = tiles
    index = tl.load(starts + tile) + tl.arange(0, ROWS)
    is_row = index < tl.load(ends + tile)
    place = tl.load(places + index, mask=is_row, other=0)
    return place // EACH, place, is_row, tl.load(experts + tile)


@triton.jit
def _bias(bias, n, is_output, span):
    """What the sum of the first span begins with."""
    is_first = n * 0 + span == 0  # a block: the interpreter takes no scalar here
    return tl.load(bias + n, mask=is_output & is_first, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["tokens", "num_spans"])  # one code for steps of one size
def product(
    x,
    out,
    bias,
    codes,
    high,
    halves,
    scales,
    experts,
    starts,
    ends,
    places,
    tokens,
    outputs,
    inputs,
    stride,
    x_row,
    out_row,
    span,
    num_spans,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    K: tl.constexpr,
    EACH: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_PART: tl.constexpr,
):
    """ROWS rows of x times OUTPUTS outputs. tokens: rows of out. IS_PART: one span, float32 [spans,
    tokens, outputs]. EACH: the choices of each row of x; 0: there are no experts.
    """
    first, last = 0, num_spans
    if IS_PART:
        first = tl.program_id(2)
        last = first + 1
    if EACH:
        tiles = experts, starts, ends, places
        x_at, out_at, is_row, expert = _chosen_rows(tl.program_id(0), tiles, ROWS, EACH)
        if expert < 0:  # a tile beyond those that rows fill
            last = first
        if bias is not None:  # such a tile reads that of the first, for no row
            bias += tl.maximum(expert, 0) * outputs
    else:
        x_at = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        out_at, is_row, expert = x_at, x_at < tokens, 0
    planes = codes, high, halves, scales
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = n < outputs
    x += x_at[None, :] * x_row
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    if bias is not None:
        total += _bias(bias, n, is_output, first)[:, None]
    d = tl.arange(0, K)
    for number in range(first, last):
        part = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for k in range(number * span, tl.minimum(number * span + span, inputs), K):
            left = inputs - k
            if IS_EVEN:
                left = K
            at = expert, inputs, k, left
            weights = _numbers(planes, n, n < stride, at, stride, FORMAT, K)
            mask = is_row[None, :] & (d < left)[:, None]
            values = tl.load(x + (k + d)[:, None], mask=mask, other=0.0)
            part = tl.dot(weights.to(values.dtype), values, part, input_precision="ieee")
        total += part
    if IS_PART:
        out += tl.program_id(2).to(tl.int64) * tokens * outputs
    to = out + out_at[None, :] * out_row + n[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=is_output[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["tokens", "num_spans"])
def merge(parts, out, tokens, outputs, out_row, num_spans, STEP: tl.constexpr):
    """The sum of the parts of one row, in order."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * STEP + tl.arange(0, STEP)
    mask = n < outputs
    parts += row * outputs + n
    total = tl.zeros([STEP], tl.float32)
    for _ in range(num_spans):
        total += tl.load(parts, mask=mask, other=0.0)
        parts += tl.cast(tokens, tl.int64) * outputs
    tl.store(out + row * out_row + n, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gather(
    ids, out, codes, high, halves, scales, inputs, stride, FORMAT: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """K inputs of the row of one token."""
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * K
    n = tl.load(ids + token) + tl.arange(0, 1)
    k = first + tl.arange(0, K)
    planes = codes, high, halves, scales
    at = 0, inputs, first, inputs - first
    weights = _numbers(planes, n, n >= 0, at, stride, FORMAT, K)
    to = out + token * inputs + k[None, :]
    tl.store(to, weights.to(out.dtype.element_ty), mask=(k < inputs)[None, :])


@triton.jit
def unpack(
    out, codes, high, halves, scales, first, last, inputs, stride, out_row,
    FORMAT: tl.constexpr, OUTPUTS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Outputs first to last, [inputs, outputs]: K inputs of OUTPUTS of them."""
    at = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    n, k = first + at, tl.program_id(1) * K
    planes, left = (codes, high, halves, scales), inputs - k
    weights = _numbers(planes, n, n < stride, (0, inputs, k, left), stride, FORMAT, K)
    inner = tl.arange(0, K)[None, :]
    to = out + (k + inner).to(tl.int64) * out_row + at[:, None]
    mask = (n < last)[:, None] & (inner < left)
    tl.store(to, weights.to(out.dtype.element_ty), mask=mask)
