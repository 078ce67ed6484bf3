"""Chooses the attention backend of an engine: the first in ORDER that this machine and this model
support, or the one that was asked for.
"""

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

Found = tuple[AttentionBackend | None, str]  # a backend, and why others were not taken
# The first that serves is taken; on a CPU "sdpa" only if it is asked for.
# On a GPU first what a GPU run has proved.
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
    """The backend that EngineConfig.attention_backend wants; of "auto" the first that serves.

    Its name says what was taken and, of what comes before it, why not. no_kernels: why there is no
    C kernel. block_size: tokens of a KV block.
    Raises ConfigError where the one that is wanted cannot serve.
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
            TritonAttention,  # what PyTorch for a GPU brings
        )
    except ImportError as error:
        return None, f"Triton: {error}"
    return TritonAttention(config, dtype, device), ""
