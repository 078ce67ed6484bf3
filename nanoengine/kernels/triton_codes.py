"""Products with weights that stay codes on a GPU (triton_code_kernels.py).

Few rows multiply exact codes, and scales multiply sums (triton_few_rows.py). More rows multiply
the numbers of CodedRows.numbers, rounded to the dtype of the activations; many, by cuBLAS. But
for these an output is a sum over the inputs in spans that the weight's shape alone decides:
within a span in order, then the spans in order. What the hardware does within one dot, NVIDIA
does not say.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.nn import functional
from triton.runtime.jit import JITFunction

from nanoengine.kernels.chosen_tiles import MOST_ROWS, ChosenTiles
from nanoengine.kernels.code_planes import AS_IQ4_XS, OF_256, CodePlanes, planes_of
from nanoengine.kernels.triton_code_kernels import gather, merge, product, unpack
from nanoengine.kernels.triton_few_rows import few_rows
from nanoengine.kernels.triton_launch import FUSED, power_of_two
from nanoengine.models.experts import CodedExpert, Map, Router, add_up
from nanoengine.models.stored_codes import FORMATS, CodedRows, CodedWeight

BLOCK_K = 64
_GATHERED = 256  # inputs of an embedding's row that a program makes
_LEAST_ROWS = 16  # of a tile of `product`, but of experts
# The constants below were the best of a sweep (benchmarks/results/gpu/h200_codes.json), of other
# formats and experts those of the nearest format in it.
MOST_FEW = 64  # rows up to which few_rows multiplies
# For more rows the numbers of _SLAB outputs at a time are unpacked. Those of _SLOW take longer to
# unpack than to multiply: `product` would unpack them again for each tile of rows.
MOST_MULTIPLIED, MOST_MULTIPLIED_SLOWLY = 128, 64
_SLOW = (*OF_256, "NVFP4", "NF4")
_SLAB = 4096
# By rows of a tile: outputs and warps of a program, groups of 64 inputs a step, and steps that are
# loaded ahead.
_OF_64 = {8: (64, 2, 1, 4), 16: (128, 4, 1, 4), 32: (128, 4, 1, 4), 64: (128, 8, 1, 4)}
_OF_256 = {8: (64, 2, 4, 3), 16: (64, 2, 4, 2), 32: (64, 4, 4, 2), 64: (64, 4, 4, 2)}
_FEW = dict.fromkeys(FORMATS, _OF_64) | dict.fromkeys(OF_256, _OF_256)
# Fifth bits lie in steps of 256, too. 64 outputs of these would not fit the registers.
_FEW |= dict.fromkeys(("Q5_0", "Q5_1"), _OF_256 | {64: (32, 2, 4, 2)})
_FEW |= dict.fromkeys(AS_IQ4_XS, _OF_256 | {64: (32, 4, 4, 2)})
MOST_IN_PARTS = 64  # rows of a result, up to which the spans are programs of their own
# Spans are made until there are so many programs for few rows, or spans; none is shorter than
# _LEAST_SPAN inputs.
_PROGRAMS, _MOST_SPANS, _LEAST_SPAN = 2048, 8, 512
_NO_TILES = (None, None, None, None)


class CodedProduct:
    """x @ weight.T + bias of a weight whose rows are codes, or some of them: float32 sums, rounded
    once. Made by `TritonCodes.pack`.
    """

    def __init__(
        self, parts: tuple[CodePlanes | Tensor, ...], bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        sizes = [part.outputs if isinstance(part, CodePlanes) else len(part) for part in parts]
        biases = [None] * len(parts) if bias is None else torch.split(bias, sizes)
        self._parts = list(zip(parts, sizes, biases, strict=True))
        self._outputs, self._dtype = sum(sizes), dtype

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, inputs] -> [tokens, outputs], in the dtype of x."""
        return self._multiply(x, x.dtype)

    def in_float(self, x: Tensor) -> Tensor:
        """The same, and the float32 sums themselves."""
        return self._multiply(x, torch.float32)

    def gather_rows(self, token_ids: Tensor) -> Tensor:
        """Rows of the weight itself, [n, inputs], in its dtype; int64 [n]. For embeddings."""
        ((planes, _, _),) = self._parts
        if isinstance(planes, Tensor):
            return torch.embedding(planes, token_ids)
        out = planes.codes.new_empty(len(token_ids), planes.inputs, dtype=self._dtype)
        grid = (len(token_ids), triton.cdiv(planes.inputs, _GATHERED))
        gather[grid](
            token_ids, out, *planes.tensors, planes.inputs, planes.stride, planes.format, _GATHERED,
            **FUSED, num_warps=1,
        )  # fmt: skip
        return out

    def _multiply(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        out = x.new_empty(len(x), self._outputs, dtype=dtype)
        column = 0
        for part, size, bias in self._parts:
            to = out[:, column : column + size]
            if isinstance(part, CodePlanes):
                multiply(x, part, bias, to)
            else:
                to.copy_(functional.linear(x, part, bias))
            column += size
        return out


class CodedExperts:
    """The products of a layer's experts: rows go through those that they chose."""

    def __init__(self, planes: CodePlanes, biases: Tensor | None) -> None:
        """biases: [experts, outputs]."""
        self._planes, self._biases = planes, biases

    def __call__(self, x: Tensor, tiles: ChosenTiles, each: int) -> Tensor:
        """[rows, inputs] -> [choices, outputs]; a row of x makes `each` choices in a row."""
        out = x.new_empty(len(x) * each, self._planes.outputs)
        multiply_few(x, self._planes, self._biases, out, tiles, each)
        return out


class TritonCodes:
    """Packs weights for the GPU that they lie on."""

    def pack(self, weight: CodedWeight, bias: Tensor | None = None) -> CodedProduct:
        """weight: [outputs, inputs], on the GPU; bias: [outputs]."""
        parts = tuple(
            planes_of([part]) if isinstance(part, CodedRows) else part for part in weight.parts
        )
        return CodedProduct(parts, bias, weight.dtype)

    def experts(
        self, router: Router, weights: list[CodedExpert], gated: Map, gather: Map | None
    ) -> Map:
        """GroupedExperts of codes: a product for gate and up of all experts, and one for down.
        weights: of all, in the same formats and shapes; the others as there.
        """
        biases = list(zip(*(each.biases for each in weights if each.biases), strict=True))
        of_gate_up, of_down = (torch.stack(each) for each in biases) if biases else (None, None)
        gate_up = CodedExperts(planes_of([each.gate_up for each in weights]), of_gate_up)
        down = CodedExperts(planes_of([each.down for each in weights]), of_down)
        count = len(weights)

        def run(x: Tensor) -> Tensor:
            ids, shares, x = router(x)
            tiles = ChosenTiles.of(ids, count)
            inner = gated(gate_up(x, tiles, ids.shape[1]))
            if gather is not None:
                inner = gather(inner)
            return add_up(down(inner, tiles, 1).view(*ids.shape, -1), shares)

        return run


def multiply(x: Tensor, planes: CodePlanes, bias: Tensor | None, out: Tensor) -> None:
    """out = x @ weight.T + bias; x and out may have strides between rows."""
    if not len(x):
        return
    most = MOST_MULTIPLIED_SLOWLY if planes.format in _SLOW else MOST_MULTIPLIED
    if len(x) > most and out.dtype is x.dtype:
        multiply_unpacked(x, planes, bias, out)
        return
    multiply_few(x, planes, bias, out)


def multiply_few(
    x: Tensor,
    planes: CodePlanes,
    bias: Tensor | None,
    out: Tensor,
    tiles: ChosenTiles | None = None,
    each: int = 0,
) -> None:
    """As `multiply`, without a number of a weight in memory; tiles, each: as of CodedExperts."""
    _, num_spans = spans_of(planes.outputs, planes.inputs)
    rows = len(x) if tiles is None else tiles.rows
    is_few = planes.codes.dtype is torch.int16 and rows <= MOST_FEW
    run = launch_few if is_few else launch
    if num_spans == 1 or len(out) > MOST_IN_PARTS:
        run(x, planes, bias, out, tiles, each)
        return
    parts = x.new_empty(num_spans, len(out), planes.outputs, dtype=torch.float32)
    run(x, planes, bias, parts, tiles, each)
    step = min(1024, power_of_two(planes.outputs))
    merge[(len(out), triton.cdiv(planes.outputs, step))](
        parts, out, len(out), planes.outputs, out.stride(0), num_spans, step, **FUSED, num_warps=4
    )


def multiply_unpacked(x: Tensor, planes: CodePlanes, bias: Tensor | None, out: Tensor) -> None:
    """As `multiply`: the numbers of some outputs at a time go to memory, and cuBLAS multiplies."""
    width = min(_SLAB, planes.outputs)
    slab = x.new_empty(planes.inputs, width)
    grid = (triton.cdiv(width, 64), triton.cdiv(planes.inputs, BLOCK_K))
    for first in range(0, planes.outputs, width):
        last = min(first + width, planes.outputs)
        unpack[grid](
            slab, *planes.tensors, first, last, planes.inputs, planes.stride, width,
            planes.format, 64, BLOCK_K, **FUSED, num_warps=4,
        )  # fmt: skip
        weights, to = slab[:, : last - first], out[:, first:last]
        if bias is None:
            torch.mm(x, weights, out=to)
        else:
            torch.addmm(bias[first:last], x, weights, out=to)


def launch_few(
    x: Tensor,
    planes: CodePlanes,
    bias: Tensor | None,
    out: Tensor,
    tiles: ChosenTiles | None = None,
    each: int = 0,
) -> None:
    """As `launch`, of up to MOST_FEW rows of a tile, and codes in lanes."""
    outputs, inputs = planes.outputs, planes.inputs
    span, num_spans = spans_of(outputs, inputs)
    rows = max(8, power_of_two(len(x))) if tiles is None else tiles.rows
    width, warps, groups, stages = _FEW[planes.format][rows]
    stages = _stages(stages, x)
    is_part = out.dim() == 3
    num_tiles = 1 if tiles is None else len(tiles.experts)
    is_packed = has_ptx(x.device) and x.dtype is torch.bfloat16
    grid = (triton.cdiv(outputs, width), num_tiles, num_spans if is_part else 1)
    few_rows[grid](
        x, out, bias, *planes.tensors, *(_NO_TILES if tiles is None else tiles.tensors),
        out.shape[-2], outputs, inputs, planes.stride, x.stride(0), out.stride(-2), span, num_spans,
        planes.format, rows, width, groups, stages, each, is_packed, inputs % (64 * groups) == 0,
        is_part, **FUSED, num_warps=warps,
    )  # fmt: skip


def has_ptx(device: torch.device) -> bool:
    """Whether kernels are compiled for NVIDIA's GPUs, whose assembler few_rows has lines of."""
    is_compiled = isinstance(few_rows, JITFunction)  # not interpreted
    return is_compiled and torch.version.hip is None and device.type != "xpu"


def launch(
    x: Tensor,
    planes: CodePlanes,
    bias: Tensor | None,
    out: Tensor,
    tiles: ChosenTiles | None = None,
    each: int = 0,
) -> None:
    """out as of `multiply_few`, or float32 [spans, rows of it, outputs], its parts."""
    is_part = out.dim() == 3
    tokens, outputs, inputs = out.shape[-2], planes.outputs, planes.inputs
    span, num_spans = spans_of(outputs, inputs)
    rows = _tile_rows(tokens) if tiles is None else tiles.rows
    num_tiles = triton.cdiv(tokens, rows) if tiles is None else len(tiles.experts)
    width = 128 if rows == MOST_ROWS else 64
    grid = (num_tiles, triton.cdiv(outputs, width), num_spans if is_part else 1)
    product[grid](
        x, out, bias, *planes.tensors, *(_NO_TILES if tiles is None else tiles.tensors),
        tokens, outputs, inputs, planes.stride, x.stride(0), out.stride(-2), span, num_spans,
        planes.format, rows, width, BLOCK_K, each, inputs % BLOCK_K == 0, is_part,
        **FUSED, num_warps=width // 16, num_stages=_stages(3, x),
    )  # fmt: skip


def _stages(of_16_bits: int, x: Tensor) -> int:
    """Steps that are loaded ahead. Rows in float32 take twice the shared memory; GPUs of some kinds
    have 99 KiB.
    """
    return of_16_bits - (x.dtype is torch.float32)


def spans_of(outputs: int, inputs: int) -> tuple[int, int]:
    """The inputs of a span, and how many spans there are: the same for every number of rows."""
    wanted = min(_PROGRAMS // triton.cdiv(outputs, 64), _MOST_SPANS, inputs // _LEAST_SPAN)
    span = triton.cdiv(triton.cdiv(inputs, max(1, wanted)), 256) * 256
    return span, triton.cdiv(inputs, span)


def _tile_rows(tokens: int) -> int:
    return min(MOST_ROWS, max(_LEAST_ROWS, power_of_two(tokens)))
