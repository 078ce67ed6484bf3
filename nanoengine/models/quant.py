"""Weight-only quantisation on a GPU: fewer bits for a weight, products by PyTorch's operators.

Lossy. Owns the two schemes and the packed weights. Knows no layer and no model: it gets one weight
at a time while a model loads, and counts what it did. On a CPU weights become codes of our own
kernels (make_codes.py).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional

from nanoengine.errors import ConfigError

GROUPS = (128, 64, 32)  # inputs that share a scale and a zero in int4, the largest that divides
# For more tokens it is faster to unpack the weight for each product.
FEW_TOKENS_INT8 = 16
INT8_INPUTS = 32
INT4_OUTPUTS = 16
_CUDA_TILE = 16  # inputs of a tile of the packed int4 layout on CUDA, which takes 2, 4 or 8 at once
# Elements unpacked at a time, and quantised at a time (in float32).
_PIECE = 1 << 22
_TRIAL_SHAPE = (128, 128)


def quantise_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[outputs, inputs] -> int8 codes of that shape and scales [outputs] in the weight's dtype.

    weight is about codes * scale, off by half a scale at most: scale = max|row| / 127, rounded
    before the codes are chosen.
    """
    wide = weight.float()
    scales = _positive(wide.abs().amax(1) / 127, weight.dtype)
    codes = (wide / scales.float().unsqueeze(1)).round_().clamp_(-127, 127)
    return codes.to(torch.int8), scales


def quantise_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """[outputs, inputs] -> uint8 codes 0 to 15 of that shape, scales and zeros
    [inputs / group, outputs, 2] in the weight's dtype.

    weight is about (code - 8) * scale + zero; scale = (max - min) / 15 of the group. The error is
    half a scale at most, plus the rounding of the zero, which may be hundreds of scales.
    """
    wide = weight.float().reshape(len(weight), -1, group)
    low, high = wide.amin(2), wide.amax(2)
    scales = _positive((high - low) / 15, weight.dtype)
    zeros = (low + 8 * scales.float()).to(weight.dtype)
    steps = (wide - zeros.float().unsqueeze(2)) / scales.float().unsqueeze(2)
    codes = steps.round_().clamp_(-8, 7).add_(8).to(torch.uint8).flatten(1)
    return codes, torch.stack((scales.T, zeros.T), dim=2).contiguous()


def _positive(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded; 1 where all weights are 0."""
    rounded = scales.to(dtype)
    return torch.where(rounded == 0, torch.ones_like(rounded), rounded)


class Int8Weight:
    """x @ weight.T of an int8 weight with a scale for each output."""

    def __init__(self, weight: Tensor) -> None:
        """weight: [outputs, inputs]; float32, bfloat16 or float16."""
        pieces = [quantise_int8(piece) for piece in _pieces(weight)]
        self._codes = torch.cat([codes for codes, _ in pieces])
        self._scales = torch.cat([scales for _, scales in pieces])
        self.num_bytes = self._codes.nbytes + self._scales.nbytes

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Whether the operator gives right results for this shape."""
        return weight.shape[1] % INT8_INPUTS == 0

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, inputs] -> [tokens, outputs], in the weight's dtype."""
        x = x.contiguous()
        if len(x) <= FEW_TOKENS_INT8:
            return torch._weight_int8pack_mm(x, self._codes, self._scales)
        # bfloat16 holds whole numbers up to 127 exactly.
        parts = [functional.linear(x, codes.to(x.dtype)) for codes in _pieces(self._codes)]
        return _joined(parts).mul_(self._scales)


class Int4Weight:
    """x @ weight.T of an int4 weight with a scale and a zero for each group of inputs."""

    def __init__(self, pieces: Iterable[tuple[Tensor, Tensor]]) -> None:
        """pieces: results of `quantise_int4`, some outputs of the weight at a time, in bfloat16."""
        packed, both = [], []
        for codes, scales_zeros in pieces:
            packed.append(pack_int4(codes))
            both.append(scales_zeros)
        self._packed, self._scales_zeros = torch.cat(packed), torch.cat(both, dim=1)
        self.group = codes.shape[1] // len(self._scales_zeros)
        self.num_bytes = self._packed.nbytes + self._scales_zeros.nbytes

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Whether the operator gives right results for this shape."""
        outputs, inputs = weight.shape
        return outputs % INT4_OUTPUTS == 0 and inputs % GROUPS[-1] == 0

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, inputs] -> [tokens, outputs], in the weight's dtype."""
        return torch._weight_int4pack_mm(
            x.contiguous(), self._packed, self.group, self._scales_zeros
        )


def pack_int4(codes: Tensor) -> Tensor:
    """uint8 codes [outputs, inputs] -> the operator's layout."""
    tiles = next(n for n in (8, 4, 2) if codes.shape[1] % (n * _CUDA_TILE) == 0)
    pairs = codes[:, ::2] << 4 | codes[:, 1::2]
    return torch._convert_weight_to_int4pack(pairs.contiguous(), tiles)


class Quantizer:
    """Quantises the weights of one model while they are loaded, and counts them."""

    def __init__(self, method: str, device: torch.device, dtype: torch.dtype) -> None:
        """method: see EngineConfig. Raises ConfigError if its operator does not work here."""
        self._method = method
        self._dtype = dtype
        if method != "int8" and dtype is not torch.bfloat16:
            raise ConfigError(
                f'quantization="{method}" computes in bfloat16 on {device.type}, got {dtype}; '
                'set dtype="bfloat16" or quantization="int8"'
            )
        self._groups: set[int] = set()
        self._num_quantised = self._num_left = 0
        self._saved_bytes = 0
        self._try(device)

    def product(self, weight: Tensor) -> Int8Weight | Int4Weight | None:
        """x -> x @ weight.T with the weight quantised; None if no operator takes its shape."""
        packed = self._pack(weight)
        if packed is None:
            self._num_left += 1
            return None
        self._num_quantised += 1
        self._saved_bytes += weight.nbytes - packed.num_bytes
        if isinstance(packed, Int4Weight):
            self._groups.add(packed.group)
        return packed

    def saved_bytes(self) -> int:
        """Bytes saved by all weights so far. Raises ConfigError if none was quantised."""
        if not self._num_quantised:
            raise ConfigError(
                f"quantization={self._method!r}: no weight of the layers has a shape for it; leave "
                "it out"
            )
        return self._saved_bytes

    def __str__(self) -> str:
        """A line for the plan."""
        dtype = str(self._dtype).removeprefix("torch.")
        scheme = "a scale for each output"
        if self._method != "int8":
            groups = " or ".join(map(str, sorted(self._groups)))
            scheme = f"a scale and a zero for {groups} inputs"
        left = f"; {self._num_left} of other shapes left in {dtype}" if self._num_left else ""
        return (
            f"{self._method} (lossy): {self._num_quantised} weights, {scheme}{left}; embeddings, "
            f"output head and norms in {dtype}"
        )

    def _pack(self, weight: Tensor) -> Int8Weight | Int4Weight | None:
        if self._method == "int8":
            return Int8Weight(weight) if Int8Weight.takes(weight) else None
        if not Int4Weight.takes(weight):
            return None
        group = next(group for group in GROUPS if weight.shape[1] % group == 0)
        return Int4Weight(quantise_int4(piece, group) for piece in _pieces(weight))

    def _try(self, device: torch.device) -> None:
        """Multiply by the identity, which must give the weight; its 16 values are exact codes."""
        outputs, inputs = _TRIAL_SHAPE
        row = torch.arange(inputs, device=device) % 16 / 8 - 1
        weight = row.expand(outputs, inputs).to(self._dtype)
        try:
            packed = self._pack(weight)
            assert packed is not None
            found = packed(torch.eye(inputs, dtype=self._dtype, device=device)[:8]).T
            reason = "its product is wrong"
        except (RuntimeError, AttributeError) as error:
            found, reason = torch.zeros(outputs, 8), str(error).splitlines()[0]
        if not torch.allclose(found.float().cpu(), weight[:, :8].float().cpu(), atol=0.01):
            raise ConfigError(
                f"quantization={self._method!r} does not work with PyTorch {torch.__version__} on "
                f"{device.type} in {self._dtype}: {reason}; leave it out"
            )


def _pieces(weight: Tensor) -> tuple[Tensor, ...]:
    """Rows of a weight, a few MiB at a time; a multiple of 64, which packed layouts require."""
    return torch.split(weight, max(64, _PIECE // weight.shape[1] // 64 * 64))


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
