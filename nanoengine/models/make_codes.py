"""Makes codes of weights that are numbers, as they are loaded: "int8" and "int4" on a CPU. Lossy.

Knows which weights become codes of which format, and no kernel; the formats are those of GGUF files
(stored_codes.py). A block of 32 inputs comes from itself alone, so no cut between rows moves a bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanoengine.models.stored_codes import FORMATS, ROUTERS, CodedRows, blocks_of

METHODS = ("int8", "int4")
EMBEDDINGS = "model.embed_tokens.weight"
ENDS = (EMBEDDINGS, "lm_head.weight")
# Small matrices in layers whose errors weigh much: routers, and what the decays of a recurrent
# layer come from.
_AS_THEY_ARE = (*ROUTERS, *(f"linear_attn.in_proj_{name}.weight" for name in ("b", "a", "ba")))
# In "int4", those of layers that take 8 bits: a few percent of the weights, a sixth of the loss.
_IN_8_BITS = ("v_proj.weight",)
_BLOCK, _HALF_MAX = 32, torch.finfo(torch.float16).max
_PIECE = 1 << 17  # weights at a time, which stay in a cache
_TOP = 15
# Where a grid begins and ends in a block's span, before least squares move it. The last ones are
# those of files in 4 bits, of which a block uses fewer codes.
_GRIDS = (
    *((0.0, 1.0), (0.08, 1.0), (0.0, 0.92), (0.05, 0.95)),
    *((0.0, _TOP / steps) for steps in (14, 13, 12, 11)),
)


def made_format(method: str, name: str, shape: tuple[int, ...]) -> str:
    """What a weight of this name and shape becomes, a key of FORMATS; "": it stays numbers.

    method: one of METHODS. shape: of the whole weight or of some of its rows.
    """
    if len(shape) != 2 or shape[1] % _BLOCK or name.endswith(_AS_THEY_ARE):
        return ""
    if name in ENDS:
        return "Q8_0"
    if ".layers." not in name:
        return ""
    return "Q8_0" if method == "int8" or name.endswith(_IN_8_BITS) else "Q4_1"


def coded(code_format: str, weight: Tensor) -> CodedRows | None:
    """weight, [outputs, inputs], as Q8_0 or Q4_1; None where scales would not be finite."""
    if not weight.abs().max() <= _HALF_MAX:
        return None
    make = {"Q8_0": _q8_0, "Q4_1": _q4_1}[code_format]
    outputs, inputs = weight.shape
    rows = torch.empty(outputs, inputs // _BLOCK * FORMATS[code_format][1], dtype=torch.uint8)
    num_rows = max(1, _PIECE // inputs)
    for source, target in zip(
        torch.split(weight, num_rows), torch.split(rows, num_rows), strict=True
    ):
        blocks = source.float().reshape(-1, _BLOCK).T.contiguous()
        target.copy_(make(blocks).view(target.shape))
    return CodedRows(code_format, rows)


def _q8_0(x: Tensor) -> Tensor:
    """[32, blocks] -> uint8 [blocks, 34]: a code is the nearest, the scale max abs / 127."""
    scales = (x.abs().amax(0) / 127).half()
    codes = (x * _inverse(scales.float())).round_().clamp_(-127, 127)
    return blocks_of(scales[:, None], codes.T.to(torch.int8).view(torch.uint8), 8)


def _q4_1(x: Tensor) -> Tensor:
    """[32, blocks] -> uint8 [blocks, 20]: the better of the grid that spans a block and of the one
    that a search finds.
    """
    low, span = x.amin(0), x.amax(0) - x.amin(0)
    plain = _on_grid(x, span / _TOP, low)
    found = _on_grid(x, *_search(x, low, span))
    is_better = found[2] < plain[2]
    halves = torch.where(is_better, found[0], plain[0])
    codes = torch.where(is_better, found[1], plain[1])
    return blocks_of(halves.T, codes.T.to(torch.uint8), 4)


def _search(x: Tensor, low: Tensor, span: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and minimum of each block of [32, blocks] with the least squared error of those
    tried: for the nearest codes of a grid, least squares give a better one; once more for the best.

    llama.cpp's make_qkx2_quants takes such steps, too; there codes count by their sizes.
    """
    total, most = x.sum(0), torch.full_like(low, -1.0)
    scale, minimum = span / _TOP, low
    for grid in (*_GRIDS, None):
        begun = scale, minimum  # the best so far
        if grid is not None:
            begun = span * ((grid[1] - grid[0]) / _TOP), low + span * grid[0]
        codes = _codes(x, *begun)
        sums = codes.sum(0)
        spread = torch.linalg.vecdot(codes, codes, dim=0) - sums.square() / _BLOCK
        shared = torch.linalg.vecdot(codes, x, dim=0) - sums * total / _BLOCK
        fitted = shared * _inverse(spread)
        explained = shared * fitted  # of the squares around the mean; the rest is the error
        is_better = explained > most
        most = torch.where(is_better, explained, most)
        scale = torch.where(is_better, fitted, scale)
        minimum = torch.where(is_better, (total - fitted * sums) / _BLOCK, minimum)
    return scale, minimum


def _on_grid(x: Tensor, scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scale and minimum as float16 [2, blocks], the nearest codes, and the squared error."""
    halves = torch.stack((scale, minimum)).half()
    scale, minimum = halves.float()
    codes = _codes(x, scale, minimum)
    return halves, codes, torch.addcmul(minimum, codes, scale).sub_(x).square_().sum(0)


def _codes(x: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    inverse = _inverse(scale)
    return torch.addcmul(-minimum * inverse, x, inverse).round_().clamp_(0, _TOP)


def _inverse(x: Tensor) -> Tensor:
    """1 / x; 0 of 0."""
    return torch.where(x == 0, x, 1 / x)
