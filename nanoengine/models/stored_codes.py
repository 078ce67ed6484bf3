"""Weights as the codes of a GGUF file, which kernels multiply with as they are.

Knows which formats there are, and no kernel. What has no kernel for them takes their numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

# The formats by name, each with the weights and the bytes of a block (llama.cpp's ggml-common.h).
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
}
# In the metadata of a safetensors file: JSON, the format of each tensor that is codes.
CODES_KEY = "codes"
# Ends of the names of matrices: those whose product is in fp32, and is never quantised; and those
# that are multiplied as numbers even if they are stored as codes.
ROUTERS = ("mlp.gate.weight", "block_sparse_moe.gate.weight", "expert_gate.weight")
NEVER_CODES = (
    *ROUTERS,
    *(f"linear_attn.in_proj_{name}.weight" for name in ("qkv", "z", "b", "a", "qkvz", "ba")),
    "linear_attn.out_proj.weight",
)
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class CodedRows:
    """Rows of a weight. rows: uint8 [outputs, bytes of a row]; format: a key of FORMATS."""

    format: str
    rows: Tensor

    @property
    def num_inputs(self) -> int:
        """Weights of a row."""
        weights, num_bytes = FORMATS[self.format]
        return self.rows.shape[1] // num_bytes * weights

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """[outputs, inputs], by the package gguf."""
        import gguf  # 0.3 s to import, and needed only where no kernel reads codes

        kind = gguf.GGMLQuantizationType[self.format]
        pieces = [
            torch.from_numpy(gguf.quants.dequantize(piece.numpy(), kind)).to(dtype)
            for piece in torch.split(self.rows, _ROWS_AT_ONCE)
        ]
        return torch.cat(pieces)


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
        first = self.parts[0]
        inputs = first.num_inputs if isinstance(first, CodedRows) else first.shape[1]
        return sum(len(_rows(part)) for part in self.parts), inputs

    @property
    def formats(self) -> tuple[str, ...]:
        """The format of each part that is codes."""
        return tuple(part.format for part in self.parts if isinstance(part, CodedRows))

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return sum(_rows(part).nbytes for part in self.parts)

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
            first = sum(len(_rows(before)) for before in taken)
            taken.append(_like(part, rows[order[first : first + len(rows)] - first]))
        return replace(self, parts=tuple(taken))

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
            if _format(last) == _format(part) and last is not None:
                parts[-1] = _like(part, torch.cat((_rows(last), _rows(part))))
            else:
                parts.append(part)
    return CodedWeight(tuple(parts), weights[0].dtype)


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


def _rows(part: CodedRows | Tensor) -> Tensor:
    return part.rows if isinstance(part, CodedRows) else part


def _like(part: CodedRows | Tensor, rows: Tensor) -> CodedRows | Tensor:
    return replace(part, rows=rows) if isinstance(part, CodedRows) else rows


def _format(part: CodedRows | Tensor | None) -> str:
    return part.format if isinstance(part, CodedRows) else ""
