"""Draws a token from each row of logits on a GPU: `draw` of models/draw.py, without a sort.

The race is one pass over the logits, a program for each piece of a row; a second kernel takes the
fastest of the pieces' winners. Where top_k or top_p leaves tokens out, a row's likeliest tokens are
collected first, so many that all which are kept are among them. The last one that is kept is then
searched in these: four bits at a time the largest logit from which on there are enough.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.kernels.triton_launch import FUSED, power_of_two
from nanoengine.models.draw import Draws

PIECE = 4096  # tokens of a program; a row that is searched for its last token has one
COUNTED = 512  # tokens that are counted together
COLLECTED = 8192  # of a row, at most; rows that need more are searched whole
DEPTHS = 8  # to which tokens are counted: 2, 4, ... below the largest of logits / temperature; all
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
NOTHING: tl.constexpr = tl.constexpr(-3e38)  # below every finite logit, and finite itself
LEAST: tl.constexpr = tl.constexpr(-(1 << 31))
MOST: tl.constexpr = tl.constexpr((1 << 31) - 1)


def draw(logits: Tensor, draws: Draws) -> Tensor:
    """As draw.draw, of logits whose rows are contiguous. No row's token depends on other rows."""
    rows, vocab = logits.shape
    rules, stride = draws.rules.contiguous(), logits.stride(0)
    assert rules.dtype is torch.float64 and rules.shape == (6, rows) and logits.stride(1) == 1
    pieces = triton.cdiv(vocab, PIECE)
    width = power_of_two(pieces)
    kept = None
    if draws.is_cut or draws.has_floor:
        kept = _last_kept(logits, rules, pieces, width)
    winners = logits.new_empty((3, rows, pieces), dtype=torch.float32)
    race[(rows, pieces)](
        logits, stride, rules, kept, winners, rows, vocab, pieces, PIECE, **FUSED, num_warps=4
    )
    out = logits.new_empty(rows, dtype=torch.int64)
    fastest[(rows,)](rules, winners, out, rows, vocab, pieces, width, **FUSED, num_warps=1)
    return out


def _last_kept(logits: Tensor, rules: Tensor, pieces: int, width: int) -> Tensor:
    """Of each row the rank and the number of the last token that top_k and top_p keep, and the
    bits of the least logit that min_p keeps: int32 [3, rows].
    """
    (rows, vocab), stride = logits.shape, logits.stride(0)
    most = min(COLLECTED, power_of_two(vocab))
    tops = logits.new_empty((rows, pieces), dtype=torch.float32)
    counts = logits.new_empty((2, rows, pieces, DEPTHS), dtype=torch.float32)
    about = logits.new_empty((3, rows), dtype=torch.float32)
    some = logits.new_empty((2, rows, most), dtype=torch.float32)
    kept = logits.new_empty((3, rows), dtype=torch.int32)
    grid = rows, pieces
    largest[grid](logits, stride, tops, vocab, pieces, PIECE, **FUSED, num_warps=4)
    count[grid](
        logits, stride, rules, tops, counts, rows, vocab, pieces,
        PIECE, COUNTED, DEPTHS, width, **FUSED, num_warps=4,
    )  # fmt: skip
    collect[grid](
        logits, stride, rules, tops, counts, about, some, rows, vocab, pieces,
        PIECE, most, DEPTHS, width, **FUSED, num_warps=4,
    )  # fmt: skip
    last_kept[(rows,)](
        logits, stride, rules, about, some, kept, rows, vocab, COUNTED, most, **FUSED, num_warps=8
    )
    return kept


@triton.jit
def _load(logits, row, stride, tokens, count):
    """float32, -inf behind the last token."""
    at = logits + row.to(tl.int64) * stride + tokens
    return tl.load(at, mask=tokens < count, other=float("-inf")).to(tl.float32)


@triton.jit
def _rank(x):
    """Integers in the order of float32, 0 for both zeros. Where a number ends with bits of 0, as
    bfloat16 does, so does its rank.
    """
    return _turned(x.to(tl.int32, bitcast=True))


@triton.jit
def _turned(bits):
    """Ranks of the bits of float32, and bits of ranks."""
    return tl.where(bits < 0, LEAST - bits, bits)


@triton.jit
def _is_kept(rank, places, least, last):
    """Whether tokens come no later than that in place `last`, whose rank is `least`."""
    return (rank > least) | ((rank == least) & (places <= last))


@triton.jit
def _rules(rules, row, rows, vocab):
    """Temperature, top_k (0: none), top_p and min_p of a row, and whether the first two cut it."""
    temperature = tl.load(rules + row).to(tl.float32)
    top_k = tl.load(rules + rows + row).to(tl.float32)
    top_k = tl.where(top_k < vocab, top_k, 0.0)
    top_p = tl.load(rules + 2 * rows + row).to(tl.float32)
    min_p = tl.load(rules + 3 * rows + row).to(tl.float32)
    return temperature, top_k, top_p, min_p, (top_k > 0) | (top_p < 1)


@triton.jit
def _top_of(tops, row, pieces, WIDTH: tl.constexpr):
    """The largest logit of a row."""
    n = tl.arange(0, WIDTH)
    return tl.max(tl.load(tops + row * pieces + n, mask=n < pieces, other=NOTHING), 0)


@triton.jit
def _floors(top, temperature, DEPTHS: tl.constexpr):
    """The least logits of each depth."""
    depth = tl.arange(0, DEPTHS)
    floors = top - temperature * (2 << depth).to(tl.float32)
    return tl.where(depth == DEPTHS - 1, float("-inf"), floors)


@triton.jit
def largest(logits, stride, tops, vocab, pieces, PIECE: tl.constexpr):
    """The largest logit of each piece of a row."""
    row, piece = tl.program_id(0), tl.program_id(1)
    x = _load(logits, row, stride, piece * PIECE + tl.arange(0, PIECE), vocab)
    tl.store(tops + row * pieces + piece, tl.maximum(tl.max(x, 0), NOTHING))


@triton.jit(do_not_specialize=["rows"])
def count(
    logits, stride, rules, tops, counts, rows, vocab, pieces,
    PIECE: tl.constexpr, COUNTED: tl.constexpr, DEPTHS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """How many tokens of a piece reach each depth, and their mass."""
    row, piece = tl.program_id(0), tl.program_id(1)
    temperature, _, _, _, is_cut = _rules(rules, row, rows, vocab)
    if is_cut:
        top, scale = _top_of(tops, row, pieces, WIDTH), LOG2E / temperature
        floors = _floors(top, temperature, DEPTHS)
        numbers = tl.zeros([DEPTHS, COUNTED], tl.float32)  # a thread has all depths of its tokens
        masses = numbers
        end = tl.minimum((piece + 1) * PIECE, vocab)
        for first in range(piece * PIECE, end, COUNTED):
            tokens = first + tl.arange(0, COUNTED)
            x = _load(logits, row, stride, tokens, end)
            is_in = (x[None, :] >= floors[:, None]) & (tokens < end)[None, :]
            numbers += tl.where(is_in, 1.0, 0.0)
            masses += tl.where(is_in, tl.exp2((x - top) * scale)[None, :], 0.0)
        at = counts + (row * pieces + piece) * DEPTHS + tl.arange(0, DEPTHS)
        tl.store(at, tl.sum(numbers, 1))
        tl.store(at + rows * pieces * DEPTHS, tl.sum(masses, 1))


@triton.jit(do_not_specialize=["rows"])
def collect(
    logits, stride, rules, tops, counts, about, some, rows, vocab, pieces,
    PIECE: tl.constexpr, COLLECTED: tl.constexpr, DEPTHS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Of each row the largest logit, the mass of all and the number of its likeliest tokens; and
    these in order, logits and numbers. Where they would be too many, the number is `vocab`.
    """
    row, piece = tl.program_id(0), tl.program_id(1)
    temperature, top_k, top_p, _, is_cut = _rules(rules, row, rows, vocab)
    top = _top_of(tops, row, pieces, WIDTH)
    tl.store(about + row, top)  # all pieces the same
    if is_cut:
        n, depth = tl.arange(0, WIDTH)[:, None], tl.arange(0, DEPTHS)[None, :]
        at = counts + (row * pieces + n) * DEPTHS + depth
        numbers = tl.load(at, mask=n < pieces, other=0.0)
        masses = tl.sum(tl.load(at + rows * pieces * DEPTHS, mask=n < pieces, other=0.0), 0)
        whole = tl.max(masses, 0)
        # With top_k, top_p is a share of what that keeps.
        together = tl.sum(numbers, 0)
        is_enough = tl.where(top_k > 0, together >= top_k, masses >= top_p * whole)
        depths = tl.arange(0, DEPTHS)
        chosen = depths == tl.min(tl.where(is_enough, depths, DEPTHS - 1), 0)
        total = tl.sum(tl.where(chosen, together, 0.0), 0)
        total = tl.where(total <= COLLECTED, total, vocab)
        tl.store(about + rows + row, whole)
        tl.store(about + 2 * rows + row, total)
        if total <= COLLECTED:
            floors = _floors(top, temperature, DEPTHS)
            floor = tl.max(tl.where(chosen, floors, float("-inf")), 0)
            is_before = (n < piece) & chosen[None, :]
            before = tl.sum(tl.sum(tl.where(is_before, numbers, 0.0), 0), 0).to(tl.int32)
            tokens = piece * PIECE + tl.arange(0, PIECE)
            x = _load(logits, row, stride, tokens, vocab)
            is_in = (x >= floor) & (tokens < vocab)
            place = before + tl.cumsum(is_in.to(tl.int32), 0) - 1
            to = some + row.to(tl.int64) * COLLECTED + place
            tl.store(to, x, mask=is_in)
            to += rows.to(tl.int64) * COLLECTED
            tl.store(to, tokens.to(tl.float32, bitcast=True), mask=is_in)


@triton.jit
def _measure(
    x, row, stride, number, top, scale, from_ranks, least, last,
    BY_MASS: tl.constexpr, WIDTH: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """How many kept tokens have a rank from each of `from_ranks` [WIDTH] on, or their mass."""
    total = tl.zeros([WIDTH, COUNTED], tl.float32)
    for first in range(0, number, COUNTED):
        places = first + tl.arange(0, COUNTED)
        logits = _load(x, row, stride, places, number)
        rank = _rank(logits)
        is_in = (places < number) & _is_kept(rank, places, least, last)
        each = tl.where(is_in, tl.exp2((logits - top) * scale) if BY_MASS else 1.0, 0.0)
        reaches = rank[None, :] >= from_ranks[:, None]
        total += tl.where(reaches, each[None, :], 0.0)
    return tl.sum(total, 1)


@triton.jit
def _place_of(x, row, stride, number, of_rank, which, COUNTED: tl.constexpr):
    """The place of the `which`-th of this rank, counted from 1; MOST where there are fewer."""
    before, found = 0.0, MOST
    for first in range(0, number, COUNTED):
        places = first + tl.arange(0, COUNTED)
        is_one = (_rank(_load(x, row, stride, places, number)) == of_rank) & (places < number)
        seen = before + tl.cumsum(is_one.to(tl.float32), 0)
        found = tl.minimum(found, tl.min(tl.where(is_one & (seen >= which), places, MOST), 0))
        before += tl.sum(is_one.to(tl.float32), 0)
    return found


@triton.jit
def _cut(
    x, row, stride, number, top, scale, need, least, last,
    BY_MASS: tl.constexpr, COUNTED: tl.constexpr, NUM_ROUNDS: tl.constexpr,
):  # fmt: skip
    """The rank and the place of the last token that is needed of those kept so far, likelier ones
    first and of equals the first: with those before it there are `need`, or their mass is that.
    """
    digits, one = tl.arange(0, 16), tl.arange(0, 1)
    found = tl.full([], LEAST, tl.int32)
    of_all = _measure(
        x, row, stride, number, top, scale, found + one, least, last, BY_MASS, 1, COUNTED
    )
    need = tl.minimum(need, tl.max(of_all, 0))  # which another order of sums may just miss
    for turn in range(NUM_ROUNDS):
        higher = found + (
            digits << (28 - 4 * turn)
        )  # the upper half of the first digits: from 0 on
        enough = _measure(
            x, row, stride, number, top, scale, higher, least, last, BY_MASS, 16, COUNTED
        )
        found = tl.max(tl.where(enough >= need, higher, found), 0)
    above = _measure(
        x, row, stride, number, top, scale, found + 1 + one, least, last, BY_MASS, 1, COUNTED
    )
    each = 1.0
    if BY_MASS:
        each = tl.exp2((_turned(found).to(tl.float32, bitcast=True) - top) * scale)
    which = tl.maximum(tl.ceil((need - tl.max(above, 0)) / each), 1.0)
    place = _place_of(x, row, stride, number, found, which, COUNTED)
    return found, tl.where(found == least, tl.minimum(place, last), place)


@triton.jit
def _cuts(
    x, row, stride, number, top, scale, top_k, top_p, mass,
    COUNTED: tl.constexpr, NUM_ROUNDS: tl.constexpr,
):  # fmt: skip
    """The rank and the place of the last token that top_k and then top_p keep. NUM_ROUNDS: four
    bits of a rank each, from the highest on; the others are 0.
    """
    least, last = tl.full([], LEAST, tl.int32), tl.full([], MOST, tl.int32)
    if top_k > 0:
        least, last = _cut(
            x, row, stride, number, top, scale, top_k, least, last, False, COUNTED, NUM_ROUNDS
        )
        first = LEAST + tl.arange(0, 1)
        masses = _measure(x, row, stride, number, top, scale, first, least, last, True, 1, COUNTED)
        mass = tl.max(masses, 0)
    if top_p < 1:
        need = top_p * mass
        least, last = _cut(
            x, row, stride, number, top, scale, need, least, last, True, COUNTED, NUM_ROUNDS
        )
    return least, last


@triton.jit(do_not_specialize=["rows"])
def last_kept(
    logits, stride, rules, about, some, kept, rows, vocab,
    COUNTED: tl.constexpr, COLLECTED: tl.constexpr,
):  # fmt: skip
    """As _last_kept, a row for each program."""
    NUM_ROUNDS: tl.constexpr = 4 if logits.dtype.element_ty == tl.bfloat16 else 8
    row = tl.program_id(0)
    temperature, top_k, top_p, min_p, is_cut = _rules(rules, row, rows, vocab)
    top, scale = tl.load(about + row), LOG2E / temperature
    least, last = tl.full([], LEAST, tl.int32), tl.full([], MOST, tl.int32)
    if is_cut:
        mass, number = tl.load(about + rows + row), tl.load(about + 2 * rows + row).to(tl.int32)
        if number <= COLLECTED:
            least, last = _cuts(
                some, row, COLLECTED, number, top, scale, top_k, top_p, mass, COUNTED, NUM_ROUNDS
            )
            place = tl.maximum(tl.minimum(last, number - 1), 0)
            at = some + (rows + row).to(tl.int64) * COLLECTED + place
            last = tl.load(at).to(tl.int32, bitcast=True)
        else:
            least, last = _cuts(
                logits, row, stride, number, top, scale, top_k, top_p, mass, COUNTED, NUM_ROUNDS
            )
    floor = tl.where(min_p > 0, top + temperature * tl.log(min_p), float("-inf"))
    tl.store(kept + row, least)
    tl.store(kept + rows + row, last)
    tl.store(kept + 2 * rows + row, floor.to(tl.int32, bitcast=True))


@triton.jit
def _mixed(bits):
    """A permutation of 32 bits: Wellons's lowbias32."""
    bits = (bits ^ bits >> 16) * 0x7FEB352D
    bits = (bits ^ bits >> 15) * 0x846CA68B
    return bits ^ bits >> 16


@triton.jit
def _exponentials(tokens, first, second):
    """As draw.exponentials; to some 1e-7 of each. -log(1 - u) by the exponent of 1 - u, and by
    2 artanh of what is left, in which a small u stands by itself.
    """
    bits = _mixed(_mixed(tokens.to(tl.uint32) ^ first) ^ second) >> 1
    u = tl.minimum((bits.to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.99999994)
    rest = 1.0 - u
    exponent = (rest.to(tl.int32, bitcast=True) - 0x3F3504F3) >> 23  # what is left: around 1
    left = (rest.to(tl.int32, bitcast=True) - (exponent << 23)).to(tl.float32, bitcast=True)
    s = tl.where(exponent == 0, u, 1.0 - left) / (1.0 + left)
    z = s * s
    p = ((z * 0.11111111 + 0.14285715) * z + 0.2) * z + 0.33333334
    return 2.0 * (s + s * z * p) - exponent.to(tl.float32) * 0.6931472


@triton.jit(do_not_specialize=["rows"])
def race(logits, stride, rules, kept, winners, rows, vocab, pieces, PIECE: tl.constexpr):
    """The fastest token of a piece of a row: the piece's largest logit, the token's speed beside
    that, and the token.
    """
    row, piece = tl.program_id(0), tl.program_id(1)
    tokens = piece * PIECE + tl.arange(0, PIECE)
    x = _load(logits, row, stride, tokens, vocab)
    scale = LOG2E / tl.load(rules + row).to(tl.float32)
    first = tl.load(rules + 4 * rows + row).to(tl.int64).to(tl.uint32)
    second = tl.load(rules + 5 * rows + row).to(tl.int64).to(tl.uint32)
    runs = tokens < vocab
    if kept is not None:
        least, last = tl.load(kept + row), tl.load(kept + rows + row)
        floor = tl.load(kept + 2 * rows + row).to(tl.float32, bitcast=True)
        runs = runs & _is_kept(_rank(x), tokens, least, last) & (x >= floor)
    most = tl.maximum(tl.max(x, 0), NOTHING)
    speed = tl.exp2((x - most) * scale) / _exponentials(tokens, first, second)
    speed = tl.where(runs & (speed >= 0), speed, -1.0)  # NaN is none
    best, winner = tl.max(speed, 0, return_indices=True)
    at = winners + row * pieces + piece
    tl.store(at, most)
    tl.store(at + rows * pieces, best)
    tl.store(at + 2 * rows * pieces, (piece * PIECE + winner).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["rows"])
def fastest(rules, winners, out, rows, vocab, pieces, WIDTH: tl.constexpr):
    """The fastest of the winners of all pieces of a row."""
    row, n = tl.program_id(0), tl.arange(0, WIDTH)
    scale = LOG2E / tl.load(rules + row).to(tl.float32)
    at = winners + row * pieces + n
    most = tl.load(at, mask=n < pieces, other=NOTHING)
    speed = tl.load(at + rows * pieces, mask=n < pieces, other=-1.0)
    speed = tl.where(speed >= 0, speed * tl.exp2((most - tl.max(most, 0)) * scale), -1.0)
    _, piece = tl.max(speed, 0, return_indices=True)
    token = tl.load(winners + (2 * rows + row) * pieces + piece).to(tl.int32, bitcast=True)
    tl.store(out + row, tl.minimum(token, vocab - 1).to(tl.int64))
