"""How host KV is stored: Int8Codec in 8 bits, lossy; Bf12Codec so that loads read 12 bits, exactly.
Knows tensors, no blocks and no streams.

What belongs to a token is stored together, so consecutive blocks are one copy, and the new part of
a block can be stored by itself. Poisoned bytes decode to NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from nanoengine.errors import ConfigError

SCALE_BYTES = 4
TINY = torch.finfo(torch.float32).tiny  # the smallest scale: a row of zeros gets codes of zero
# Elements converted at a time. On a CPU below 1 << 15, from where PyTorch would start threads on a
# copy worker; on a GPU to limit temporary memory (20 bytes an element while storing).
CPU_ELEMENTS, GPU_ELEMENTS = (1 << 15) - 1, 1 << 22

HEADER, OTHERS = 16, 14  # bytes behind the codes of a token in 12 bits: two, and other exponents
ZERO, OTHER = 14, 15  # codes of an exponent of 0, and of one that is among the others
WHOLE = 255  # instead of the number of others: the codes are all exponents


class KVCodec(Protocol):
    """How host blocks are stored. If a tensor is on a GPU, work is queued on the current stream and
    the host does not wait.
    """

    name: ClassVar[str]  # the value of kv_offload_dtype
    is_lossy: ClassVar[bool]
    dtype: ClassVar[torch.dtype]  # of a byte, as host blocks are stored
    poison: ClassVar[int]  # marks memory without KV

    def host_block(self, block: Sequence[int]) -> tuple[int, ...]:
        """The shape of a block [parts, block_size, kv_heads, head_dim] on the host, in bytes.

        Raises ConfigError if such blocks cannot be stored.
        """
        ...

    def read_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Bytes that a load reads for K or V of one token."""
        ...

    def encode(self, dst: Tensor, src: Tensor) -> None:
        """Store blocks or tokens `src` in host memory `dst`, both contiguous."""
        ...

    def decode(self, dst: Tensor, src: Tensor) -> None:
        """The inverse: from host memory `src` to `dst`, both contiguous."""
        ...


def make_codec(name: str | None) -> KVCodec | None:
    """The codec of a value of kv_offload_dtype."""
    codecs: dict[str | None, KVCodec] = {"int8": Int8Codec(), "bf12": Bf12Codec()}
    return codecs.get(name)


def encoded(codec: KVCodec, block: Tensor) -> Tensor:
    """`block` [parts, block_size, kv_heads, head_dim], on the CPU, as it is on the host."""
    stored = torch.empty(codec.host_block(block.shape), dtype=codec.dtype)
    codec.encode(stored, block)
    return stored


@dataclass(frozen=True, slots=True)
class Int8Codec:
    """Symmetric int8 for each token and KV head; lossy. A row, K or V of one token and one head, is
    head_dim codes and then a scale (fp32): x is about code x scale, scale = max abs(row) / 127.

    The error of an element is at most half a scale plus the rounding to its dtype. A row that is
    not finite comes back with a NaN.
    """

    name: ClassVar[str] = "int8"
    is_lossy: ClassVar[bool] = True
    dtype: ClassVar[torch.dtype] = torch.int8
    poison: ClassVar[int] = -1

    def host_block(self, block: Sequence[int]) -> tuple[int, ...]:
        """[parts, block_size, kv_heads, head_dim + 4]."""
        *rows, head_dim = block
        if head_dim % SCALE_BYTES:
            raise ConfigError(
                f'kv_offload_dtype="int8" needs a head_dim that is a multiple of {SCALE_BYTES}, '
                f"the model's is {head_dim}; leave kv_offload_dtype out"
            )
        return *rows, head_dim + SCALE_BYTES

    def read_bytes(self, kv_heads: int, head_dim: int) -> int:
        """All of it."""
        return kv_heads * (head_dim + SCALE_BYTES)

    @staticmethod
    def encode(dst: Tensor, src: Tensor) -> None:
        """Quantise `src` [..., head_dim] to `dst` [..., head_dim + 4], both contiguous."""
        rows, codes = _rows(src), _rows(dst)
        head_dim = rows.shape[1]
        is_on_gpu = src.device.type != "cpu"
        for part in _parts(len(rows), head_dim, is_on_gpu):
            values = rows[part].float()
            scale = values.abs().amax(-1, keepdim=True).div_(127).clamp_min_(TINY)
            target = codes[part]
            staged = torch.empty_like(target, device=src.device) if is_on_gpu else target
            staged[:, head_dim:].view(torch.float32).copy_(scale)
            staged[:, :head_dim] = (values / scale).round_()
            if is_on_gpu:
                target.copy_(staged, non_blocking=True)

    @staticmethod
    def decode(dst: Tensor, src: Tensor) -> None:
        """The inverse: `src` [..., head_dim + 4] to `dst` [..., head_dim], both contiguous."""
        rows, codes = _rows(dst), _rows(src)
        head_dim = rows.shape[1]
        for part in _parts(len(rows), head_dim, dst.device.type != "cpu"):
            staged = codes[part].to(dst.device, non_blocking=True)
            scale = staged[:, head_dim:].view(torch.float32)
            torch.mul(staged[:, :head_dim], scale, out=rows[part])


@dataclass(frozen=True, slots=True)
class Bf12Codec:
    """bfloat16 of which loads read 12 bits and a little, with the same bits. K or V of a token, all
    heads together, are `size` numbers x[i], with exponents e[i]:

        size        of each number its sign and the 7 bits of its mantissa
        size / 2    two codes each, of x[2j] below x[2j + 1]
        HEADER      the largest exponent, the number of others, OTHERS exponents
        size / 2    e[2j + 1], which are read only if the token is whole

    A code below ZERO is how far an exponent is below the largest, ZERO is an exponent of 0 and
    OTHER the next one of the others. A token with too many others is whole: its codes are e[2j].

    A GPU reads host memory by a kernel, which knows what it needs of a token; a copy could not.
    """

    name: ClassVar[str] = "bf12"
    is_lossy: ClassVar[bool] = False
    dtype: ClassVar[torch.dtype] = torch.uint8
    poison: ClassVar[int] = 255

    def host_block(self, block: Sequence[int]) -> tuple[int, ...]:
        """[parts, block_size, 2 x kv_heads x head_dim + 16]."""
        parts, block_size, kv_heads, head_dim = block
        if kv_heads * head_dim % 2:
            raise ConfigError(
                f'kv_offload_dtype="bf12" needs an even number of numbers a token, the model has '
                f"{kv_heads} x {head_dim}; leave kv_offload_dtype out"
            )
        return parts, block_size, 2 * kv_heads * head_dim + HEADER

    def read_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Of a token that is not whole."""
        return kv_heads * head_dim * 3 // 2 + HEADER

    def encode(self, dst: Tensor, src: Tensor) -> None:
        """`src` [..., kv_heads, head_dim] in bfloat16, `dst` [..., bytes of a token]."""
        rows = _rows(dst)
        size = (rows.shape[1] - HEADER) // 2
        bits = src.view(torch.int16).view(-1, size)
        for part in _parts(len(rows), size, src.device.type != "cpu"):
            rows[part].copy_(_pack_tokens(bits[part]), non_blocking=True)

    def decode(self, dst: Tensor, src: Tensor) -> None:
        """`src` [..., bytes of a token], `dst` [..., kv_heads, head_dim] in bfloat16."""
        if dst.device.type != "cpu":
            from nanoengine.devices.triton_bf12 import unpack_bf12  # comes with a GPU's PyTorch

            unpack_bf12(dst, src, HEADER=HEADER, ZERO=ZERO, OTHER=OTHER, WHOLE=WHOLE)
            return
        rows = _rows(src)
        size = (rows.shape[1] - HEADER) // 2
        bits = dst.view(torch.int16).view(-1, size)
        for part in _parts(len(rows), size, on_gpu=False):
            bits[part] = _unpack_tokens(rows[part], size)


def _pack_tokens(bits: Tensor) -> Tensor:
    """bfloat16 numbers as int16 [tokens, size] -> uint8 [tokens, 2 x size + HEADER]."""
    exponents = (bits >> 7).to(torch.uint8)
    largest = exponents.amax(1, keepdim=True)
    codes = largest - exponents
    codes = torch.where(codes < ZERO, codes, OTHER)
    codes = torch.where(exponents == 0, ZERO, codes)
    is_other = codes == OTHER
    place = is_other.cumsum(1, dtype=torch.int16)  # 1 is the first
    count = place[:, -1:].clone()
    is_whole = count > OTHERS
    # Those that have no place go to one more, which is dropped.
    place = torch.where(is_other, place - 1, OTHERS).clamp_max_(OTHERS).long()
    others = exponents.new_zeros((len(bits), OTHERS + 1)).scatter_(1, place, exponents)
    codes = torch.where(is_whole, exponents[:, ::2], codes[:, ::2] | codes[:, 1::2] << 4)
    numbers = torch.where(is_whole, WHOLE, count)
    signs = ((bits >> 8) & 0x80 | bits & 0x7F).to(torch.uint8)
    tail = numbers.to(torch.uint8), others[:, :OTHERS], exponents[:, 1::2]
    return torch.cat((signs, codes, largest, *tail), 1)


def _unpack_tokens(rows: Tensor, size: int) -> Tensor:
    """uint8 [tokens, 2 x size + HEADER] -> bfloat16 numbers as int16 [tokens, size]."""
    half = size // 2
    parts = rows.split_with_sizes((size, half, 1, 1, OTHERS, half), 1)
    signs, packed, largest, count, others, odd = parts
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
    is_other = codes == OTHER
    place = is_other.cumsum(1).sub_(1).clamp_(0, OTHERS - 1)
    exponents = torch.where(is_other, others.gather(1, place), largest - codes)
    exponents = torch.where(codes == ZERO, 0, exponents)
    whole = torch.stack((packed, odd), -1).flatten(1)
    exponents = torch.where(count == WHOLE, whole, exponents).to(torch.int16)
    low = signs.to(torch.int16)
    return (low & 0x80) << 8 | exponents << 7 | low & 0x7F


def _rows(tensor: Tensor) -> Tensor:
    return tensor.view(-1, tensor.shape[-1])


def _parts(num_rows: int, head_dim: int, on_gpu: bool) -> list[slice]:
    """Slices of the rows; each is converted in one go."""
    step = max(1, (GPU_ELEMENTS if on_gpu else CPU_ELEMENTS) // head_dim)
    return [slice(first, first + step) for first in range(0, num_rows, step)]
