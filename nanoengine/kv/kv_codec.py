"""Int8Codec: stores host KV in 8 bits. Knows tensors, no blocks and no streams.

    row         head_dim codes (int8), then one scale (fp32, its 4 bytes), for K or V of one token
                and one KV head: x is about code x scale, scale = max abs(row) / 127

The scale is stored beside its codes, so consecutive blocks are still one copy. A row of -1 bytes
decodes to NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanoengine.errors import ConfigError

SCALE_BYTES = 4
TINY = torch.finfo(torch.float32).tiny  # the smallest scale: a row of zeros gets codes of zero
# Elements converted at a time. On a CPU below 1 << 15, from where PyTorch would start threads on a
# copy worker; on a GPU to limit temporary memory (20 bytes an element while storing).
CPU_ELEMENTS, GPU_ELEMENTS = (1 << 15) - 1, 1 << 22


@dataclass(frozen=True, slots=True)
class Int8Codec:
    """Symmetric int8 for each token and KV head; lossy. The error of an element is at most half a
    scale plus the rounding to its dtype. A row that is not finite comes back with a NaN.

    If a tensor is on a GPU, work is queued on the current stream and the host does not wait.
    """

    dtype = torch.int8
    poison = -1

    @staticmethod
    def row_size(head_dim: int) -> int:
        """Bytes of a row. Raises ConfigError if its scale would not be aligned."""
        if head_dim % SCALE_BYTES:
            raise ConfigError(
                f'kv_offload_dtype="int8" needs a head_dim that is a multiple of {SCALE_BYTES}, '
                f"the model's is {head_dim}; leave kv_offload_dtype out"
            )
        return head_dim + SCALE_BYTES

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

    @classmethod
    def encoded(cls, block: Tensor) -> Tensor:
        """`block` [..., head_dim], on the CPU, as it is on the host: [..., head_dim + 4]."""
        shape = *block.shape[:-1], cls.row_size(block.shape[-1])
        codes = torch.empty(shape, dtype=cls.dtype)
        cls.encode(codes, block)
        return codes

    @staticmethod
    def decode(dst: Tensor, src: Tensor) -> None:
        """The inverse: `src` [..., head_dim + 4] to `dst` [..., head_dim], both contiguous."""
        rows, codes = _rows(dst), _rows(src)
        head_dim = rows.shape[1]
        for part in _parts(len(rows), head_dim, dst.device.type != "cpu"):
            staged = codes[part].to(dst.device, non_blocking=True)
            scale = staged[:, head_dim:].view(torch.float32)
            torch.mul(staged[:, :head_dim], scale, out=rows[part])


def _rows(tensor: Tensor) -> Tensor:
    return tensor.view(-1, tensor.shape[-1])


def _parts(num_rows: int, head_dim: int, on_gpu: bool) -> list[slice]:
    """Slices of the rows; each is converted in one go."""
    step = max(1, (GPU_ELEMENTS if on_gpu else CPU_ELEMENTS) // head_dim)
    return [slice(first, first + step) for first in range(0, num_rows, step)]
