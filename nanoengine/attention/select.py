"""Chooses the attention backend: the one asked for, or the first in ORDER that can be used."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nanoengine.attention.cpu_attention import CpuAttention
from nanoengine.attention.flash_attention import (
    flash_attn_kernels,
    make_flash,
    sdpa_kernels,
    varlen_kernels,
)
from nanoengine.attention.torch_attention import TorchAttention
from nanoengine.config import ATTENTION_LIMITS, AttentionConfig
from nanoengine.context import AttentionBackend
from nanoengine.errors import ConfigError
from nanoengine.kernels.cpu_kernels import CpuKernels

Found = tuple[AttentionBackend | None, str]  # a backend, and the reasons against others
# The first backend that works is used; on a CPU "sdpa" only on request.
# On a GPU, backends proved by a GPU run come first.
ORDER = {"cuda": ("triton", "flash-attn", "varlen", "sdpa", "torch"), "cpu": ("c", "torch", "sdpa")}


def make_attention(
    wanted: str,
    kernels: CpuKernels | None,
    no_kernels: str,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int,
    config: AttentionConfig,
) -> AttentionBackend:
    """The backend of EngineConfig.attention_backend; for "auto" the first that works.

    Its name also gives the reasons against the backends before it in ORDER. no_kernels: the reason
    for having no C kernel. block_size: tokens of a KV block.
    Raises ConfigError if the requested backend cannot be used.
    """
    asked = device, dtype, block_size, config
    finders: dict[str, Callable[[], Found]] = {
        "flash-attn": lambda: make_flash(flash_attn_kernels, *asked),
        "varlen": lambda: make_flash(varlen_kernels, *asked),
        "triton": lambda: _make_triton(dtype, device, config),
        "sdpa": lambda: make_flash(sdpa_kernels, *asked),
        "c": lambda: (CpuAttention(config, kernels), "") if kernels else (None, no_kernels),
        "torch": lambda: (TorchAttention(config), ""),
    }
    order = ORDER[device.type]
    if wanted not in ("auto", *order):
        raise ConfigError(
            f"attention_backend={wanted!r} is not for device={device.type!r}, which has "
            f"{', '.join(order)}"
        )
    refusals: list[str] = []
    unmet_by: dict[str, list[str]] = {}
    backend: AttentionBackend | None = None
    for name in order if wanted == "auto" else (wanted,):
        unmet = ATTENTION_LIMITS[name].unmet(str(dtype).removeprefix("torch."), block_size, config)
        if unmet:
            unmet_by.setdefault(unmet, []).append(name)
            continue
        backend, refusal = finders[name]()
        refusals += [refusal] if refusal else []
        if backend is not None:
            break
    needs = (
        f"{' and '.join(names)} need{'s' * (len(names) == 1)} {limit}"
        for limit, names in unmet_by.items()
    )
    reasons = "; ".join([*needs, *refusals])
    if backend is None:
        raise ConfigError(
            f"attention_backend={wanted!r} cannot be used: {reasons}; change that, or leave it at "
            '"auto"'
        )
    backend.name += f" ({reasons})" if reasons else ""
    return backend


def _make_triton(dtype: torch.dtype, device: torch.device, config: AttentionConfig) -> Found:
    try:
        from nanoengine.attention.triton_attention import (
            TritonAttention,  # imports triton, which comes with PyTorch for GPUs
        )
    except ImportError as error:
        return None, f"Triton: {error}"
    return TritonAttention(config, dtype, device), ""
