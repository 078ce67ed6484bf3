"""Weights as the codes of a file, which kernels multiply with as they are.

Knows which formats there are, and no kernel. What has no kernel for them takes their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# The formats by name, each with the weights and the bytes of a block: those of GGUF files
# (llama.cpp's ggml-common.h), packed integers, whose blocks are a float16 scale and zero, and codes
# in the order of Q4_0 and Q8_0: a weight is scale * (code - zero); FP8 (E4M3): a float32 scale and
# codes; NVFP4: four scales in FP8, a float32 for all of them, see `nvfp4_rows`, and two groups of
# codes in the order of MXFP4; NF4: a float32 scale and two such groups; and what IQ1 to IQ3 of GGUF
# files become (loading/gguf/grids.py): blocks of IQ4_XS or Q3_K whose codes say a level.
FORMATS = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "MXFP4": (32, 17),
    "INT4": (32, 20),
    "INT8": (32, 36),
    "FP8": (32, 36),
    "NVFP4": (64, 40),
    "NF4": (64, 36),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "IQ3_XXS": (256, 136),
    "IQ3_S": (256, 136),
    "IQ2": (256, 110),
    "IQ1": (256, 110),
}
_OF_OTHERS = ("INT4", "INT8", "FP8", "NVFP4", "NF4", "IQ2", "IQ1")
# The format of each type of a GGUF file, whose NVFP4 is another.
OF_GGUF: Mapping[str, str] = {
    **{name: name for name in FORMATS if name not in _OF_OTHERS},
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S"), "IQ2"),
    **dict.fromkeys(("IQ1_S", "IQ1_M"), "IQ1"),
    **dict.fromkeys(("TQ1_0", "TQ2_0"), "Q2_K"),
}
# Bytes of a block in memory: kernels hold the scale of MXFP4 in 16 bits.
HELD_BYTES = {name: num_bytes for name, (_, num_bytes) in FORMATS.items()} | {"MXFP4": 18}
INTEGERS = {"INT4": 4, "INT8": 8}  # the bits of a code; INT8's are signed
# In the metadata of a safetensors file: JSON, the format of each tensor that is codes.
CODES_KEY = "codes"
# Ends of the names of matrices: those whose product is in fp32, and is never quantised; and those
# that are multiplied as numbers even if they are stored as codes.
ROUTERS = (
    "mlp.gate.weight",
    "block_sparse_moe.gate.weight",
    "expert_gate.weight",
    "mixer.gate.weight",
)
TAKEN_APART = ("self_attn.kv_b_proj.weight",)  # by latent attention
NEVER_CODES = (*ROUTERS, *TAKEN_APART)
FP8_SCALES = 2.0**119  # kernels multiply by 256 x scale: below this it is no infinity
# Of NVFP4's float32: within them no weight is denormal or infinite.
WHOLE_SCALES = 2.0**-64, 2.0**64
NVFP4_GROUP = 16  # inputs that share a scale
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Of bitsandbytes: quantiles of a normal distribution, as float32.
NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_ODD = (1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0)
_IQ3_XXS, _IQ3_S, _IQ2 = (*_ODD, 15.5), (*_ODD, 15.0), (1.0, 3.125, 5.375, 7.5)
# By code, in multiples of the scale (llama.cpp's ggml-common.h): what a grid may have, above 0 and
# below; and in IQ1 -1, 0 and 1, an eighth above or below. No grid has the fourth of IQ2 and IQ1.
LEVELS: Mapping[str, tuple[float, ...]] = {
    "IQ3_XXS": (*_IQ3_XXS, *(-x for x in _IQ3_XXS)),
    "IQ3_S": (*_IQ3_S, *(-x for x in _IQ3_S)),
    "IQ2": (*_IQ2, *(-x for x in _IQ2)),
    "IQ1": (-0.875, 0.125, 1.125, 2.125, -1.125, -0.125, 0.875, 1.875),
}
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class CodedRows:
    """Rows of a weight. rows: uint8 [outputs, bytes of a row]; format: a key of FORMATS."""

    format: str
    rows: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        weights, num_bytes = FORMATS[self.format]
        return len(self.rows), self.rows.shape[1] // num_bytes * weights

    @property
    def held_bytes(self) -> int:
        """Bytes in memory."""
        return self.rows.nbytes // FORMATS[self.format][1] * HELD_BYTES[self.format]

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """[outputs, inputs]; those of a GGUF file by the package gguf."""
        made = _OWN.get(self.format, _of_gguf)
        pieces = torch.split(self.rows, _ROWS_AT_ONCE)
        return torch.cat([made(self.format, piece).to(dtype) for piece in pieces])


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A weight of which some rows are codes. parts: rows that lie one after the other, with as many
    inputs each; dtype: that of its numbers.
    """

    parts: tuple[CodedRows | Tensor, ...]
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def formats(self) -> tuple[str, ...]:
        """The format of each part that is codes."""
        return tuple(part.format for part in self.parts if isinstance(part, CodedRows))

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(
            part.held_bytes if isinstance(part, CodedRows) else part.nbytes for part in self.parts
        )

    def numbers(self) -> Tensor:
        """All of it, [outputs, inputs]."""
        return torch.cat(
            [
                part.numbers(self.dtype) if isinstance(part, CodedRows) else part
                for part in self.parts
            ]
        )

    def take(self, order: Tensor) -> CodedWeight:
        """The rows in another order, int64 [outputs]. No row changes from part to part."""
        taken: list[CodedRows | Tensor] = []
        for part in self.parts:
            rows = _rows(part)
            first = sum(before.shape[0] for before in taken)
            here = order[first : first + len(rows)] - first
            taken.append(_like(part, rows[here.to(rows.device)]))
        return replace(self, parts=tuple(taken))

    def to(self, device: torch.device) -> CodedWeight:
        """The same on a device."""
        return replace(
            self, parts=tuple(_like(part, _rows(part).to(device)) for part in self.parts)
        )

    def __getitem__(self, rows: slice) -> CodedWeight:
        """These rows."""
        first, last, _ = rows.indices(self.shape[0])
        parts: list[CodedRows | Tensor] = []
        for part in self.parts:
            piece = _rows(part)[max(first, 0) : max(last, 0)]
            if len(piece):
                parts.append(_like(part, piece))
            first, last = first - len(_rows(part)), last - len(_rows(part))
        return replace(self, parts=tuple(parts))


Weight = Tensor | CodedWeight


def joined(weights: list[Weight]) -> Weight:
    """Weights end to end; codes of one format become one part."""
    if all(isinstance(weight, Tensor) for weight in weights):
        return torch.cat([weight for weight in weights if isinstance(weight, Tensor)])
    parts: list[CodedRows | Tensor] = []
    for weight in weights:
        for part in weight.parts if isinstance(weight, CodedWeight) else (weight,):
            last = parts[-1] if parts else None
            if format_of(last) == format_of(part) and last is not None:
                parts[-1] = _like(part, torch.cat((_rows(last), _rows(part))))
            else:
                parts.append(part)
    return CodedWeight(tuple(parts), weights[0].dtype)


def columns(weight: Weight, cut: range) -> Weight:
    """These inputs of all its rows. Codes stay codes where no block is cut."""
    if isinstance(weight, Tensor):
        return weight[:, cut.start : cut.stop]
    parts: list[CodedRows | Tensor] = []
    for part in weight.parts:
        if isinstance(part, CodedRows):
            size, num_bytes = FORMATS[part.format]
            if cut.start % size or cut.stop % size:
                return columns(weight.numbers(), cut)
            cut_here = range(cut.start // size * num_bytes, cut.stop // size * num_bytes)
        else:
            cut_here = cut
        parts.append(_like(part, _rows(part)[:, cut_here.start : cut_here.stop]))
    return replace(weight, parts=tuple(parts))


def halves(weight: Weight) -> list[Weight]:
    """The first half of its rows, and the second."""
    half = weight.shape[0] // 2
    return [weight[:half], weight[half:]]


def in_order(weight: Weight, order: Tensor) -> Weight:
    """Its rows in another order, int64 [outputs]; see CodedWeight.take."""
    return (
        weight.take(order) if isinstance(weight, CodedWeight) else weight[order.to(weight.device)]
    )


def numbers_of(weight: Weight) -> Tensor:
    """A weight as numbers, whatever it is."""
    return weight.numbers() if isinstance(weight, CodedWeight) else weight


def integer_rows(codes: Tensor, zeros: Tensor, scales: Tensor, bits: int) -> CodedRows:
    """Packed integers as blocks. codes, from 0: [outputs, blocks, 32]; zeros, scales: [outputs,
    blocks]; scales are float16.
    """
    middle = 128 if bits == 8 else 0
    kept = (codes - middle).to(torch.int8).view(torch.uint8)
    if bits == 4:
        first, last = kept.chunk(2, dim=2)
        kept = first | last << 4
    halves = torch.stack((scales, (zeros - middle).half()), dim=2).view(torch.uint8)
    return CodedRows(f"INT{bits}", torch.cat((halves, kept), dim=2).flatten(1))


def fp8_rows(codes: Tensor, scales: Tensor) -> CodedRows:
    """FP8 as blocks. codes: float8_e4m3fn [outputs, inputs]; scales: float32 [outputs, blocks],
    of a size below FP8_SCALES.
    """
    kept = codes.view(torch.uint8).view(*scales.shape, -1)
    held = scales.contiguous().view(torch.uint8).view(*scales.shape, -1)
    return CodedRows("FP8", torch.cat((held, kept), dim=2).flatten(1))


def nvfp4_rows(codes: Tensor, scales: Tensor, whole: Tensor) -> CodedRows:
    """NVFP4 as blocks. codes: uint8 [outputs, inputs / 2], two a byte, the lower half first;
    scales: float8_e4m3fn [outputs, inputs / 16]; whole: float32 [outputs], which multiplies the
    scales of an output, or as -w divides them by w; w within WHOLE_SCALES.
    """
    outputs, blocks = len(codes), scales.shape[1] // 4
    groups = _in_groups(torch.stack((codes & 15, codes >> 4), dim=2).view(outputs, blocks, 64))
    held = scales.view(torch.uint8).view(outputs, blocks, 4)
    wholes = whole[:, None].expand(outputs, blocks).contiguous().view(torch.uint8)
    return CodedRows("NVFP4", torch.cat((held, wholes.view_as(held), groups), dim=2).flatten(1))


def nf4_rows(codes: Tensor, scales: Tensor) -> CodedRows:
    """NF4 as blocks. codes: uint8 [outputs, inputs]; scales: float32 [outputs, inputs / 64]."""
    groups = _in_groups(codes.view(*scales.shape, 64))
    held = scales[..., None].contiguous().view(torch.uint8)
    return CodedRows("NF4", torch.cat((held, groups), dim=2).flatten(1))


def _in_groups(codes: Tensor) -> Tensor:
    """Codes of 4 bits in bytes, uint8 [..., 64] -> [..., 32]: of 32, the first 16 are the lower
    halves.
    """
    halves = codes.view(*codes.shape[:-1], 2, 2, 16)
    return torch.flatten(halves[..., 0, :] | halves[..., 1, :] << 4, -2)


def _of_groups(held: Tensor) -> Tensor:
    """The codes again, uint8 [..., 64]."""
    groups = held.reshape(*held.shape[:-1], 2, 16)
    return torch.cat((groups & 15, groups >> 4), dim=-1).flatten(-2)


def nvfp4_numbers(codes: Tensor, scales: Tensor, whole: Tensor) -> Tensor:
    """float32 [outputs, inputs]; arguments as of `nvfp4_rows`, but whole: [outputs or 1, 1], or of
    the shape of scales; w: any number above 0.
    """
    values = torch.tensor([*_E2M1, *(-x for x in _E2M1)], device=codes.device)
    of_byte = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=1)
    made = torch.embedding(of_byte, codes.int()).view(*scales.shape, NVFP4_GROUP)
    wide = scales.float()
    wide = torch.where(whole < 0, wide / -whole, wide * whole)
    return made.mul_(wide[..., None]).flatten(1)


def _of_integers(name: str, rows: Tensor) -> Tensor:
    """What `integer_rows` made, as float32 [outputs, inputs]."""
    blocks = rows.view(len(rows), -1, FORMATS[name][1])
    scales, zeros = blocks[..., :4].contiguous().view(torch.float16).float().unbind(2)
    codes = blocks[..., 4:]
    codes = torch.cat((codes & 15, codes >> 4), 2) if name == "INT4" else codes.view(torch.int8)
    return ((codes.float() - zeros[..., None]) * scales[..., None]).flatten(1)


def _of_fp8(name: str, rows: Tensor) -> Tensor:
    """What `fp8_rows` made, as float32 [outputs, inputs]."""
    blocks = rows.view(len(rows), -1, FORMATS[name][1])
    scales = blocks[..., :4].contiguous().view(torch.float32)
    return (blocks[..., 4:].view(torch.float8_e4m3fn).float() * scales).flatten(1)


def _of_nvfp4(name: str, rows: Tensor) -> Tensor:
    """What `nvfp4_rows` made, as float32 [outputs, inputs]."""
    blocks = rows.view(len(rows), -1, FORMATS[name][1])
    scales = blocks[..., :4].contiguous().view(torch.float8_e4m3fn).flatten(1)
    whole = blocks[..., 4:8].contiguous().view(torch.float32).flatten(1).repeat_interleave(4, 1)
    values = _of_groups(blocks[..., 8:]).view(len(rows), -1, 2)
    return nvfp4_numbers(values[..., 0] | values[..., 1] << 4, scales, whole)


def _of_gguf(name: str, rows: Tensor) -> Tensor:
    """Blocks of a GGUF file as float32 [outputs, inputs]."""
    import gguf  # 0.3 s to import, and needed only where no kernel reads codes

    kind = gguf.GGMLQuantizationType[name]
    return torch.from_numpy(gguf.quants.dequantize(rows.cpu().numpy(), kind)).to(rows.device)


def _of_levels(name: str, rows: Tensor) -> Tensor:
    """Blocks of IQ4_XS or Q3_K whose codes say one of LEVELS, as float32 [outputs, inputs]."""
    blocks = rows.reshape(-1, FORMATS[name][1])  # rows may be parts of longer ones
    parts = [2, 2, 4, 128] if name.startswith("IQ3") else [32, 32, 32, 8, 4, 2]
    fields = torch.split(blocks, parts, dim=1)
    if len(parts) == 4:
        halves, high, low, held = fields
        codes = _planes(held.reshape(-1, 8, 1, 16), 4, 2)
        scales = _planes(low.reshape(-1, 4, 1, 1), 4, 2)
        scales |= _planes(high.reshape(-1, 2, 1, 1), 2, 4) << 4
    else:
        third, early, late, low, high, halves = fields
        codes = torch.cat((_planes(early[:, None], 2, 4), _planes(late[:, None], 2, 4)), dim=1)
        codes |= _planes(third[:, None], 1, 8) << 2
        scales = _planes(low[:, None], 4, 2) | _planes(high[:, None], 2, 4) << 4
    d = halves.contiguous().view(torch.float16).float() * (scales.float() - 32)
    numbers = torch.tensor(LEVELS[name], device=rows.device)[codes.int()]
    return (numbers.view(*d.shape, -1) * d[..., None]).view(len(rows), -1)


def _planes(held: Tensor, bits: int, count: int) -> Tensor:
    """Fields of bytes, uint8 [blocks, ..., 1, n] -> [blocks, all]: the lowest ones of n, then the
    next.
    """
    shifts = torch.arange(0, bits * count, bits, dtype=torch.uint8, device=held.device)[:, None]
    return torch.flatten(held >> shifts & (1 << bits) - 1, 1)


def _of_nf4(name: str, rows: Tensor) -> Tensor:
    """What `nf4_rows` made, as float32 [outputs, inputs]."""
    blocks = rows.view(len(rows), -1, FORMATS[name][1])
    scales = blocks[..., :4].contiguous().view(torch.float32)
    levels = torch.tensor(NF4_LEVELS, device=rows.device)
    return (levels[_of_groups(blocks[..., 4:]).int()] * scales).flatten(1)


_OWN: Mapping[str, Callable[[str, Tensor], Tensor]] = {
    "INT4": _of_integers,
    "INT8": _of_integers,
    "FP8": _of_fp8,
    "NVFP4": _of_nvfp4,
    "NF4": _of_nf4,
    **dict.fromkeys(LEVELS, _of_levels),
}


def _rows(part: CodedRows | Tensor) -> Tensor:
    return part.rows if isinstance(part, CodedRows) else part


def _like(part: CodedRows | Tensor, rows: Tensor) -> CodedRows | Tensor:
    return replace(part, rows=rows) if isinstance(part, CodedRows) else rows


def format_of(part: CodedRows | Tensor | None) -> str:
    """A key of FORMATS; "" for numbers."""
    return part.format if isinstance(part, CodedRows) else ""
