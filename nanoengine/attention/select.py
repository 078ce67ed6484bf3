"""Chooses the attention backend: the one asked for, or the first in ORDER that can be used."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from nanoengine.attention.ascend_kernel import ascend_kernels
from nanoengine.attention.cpu_attention import CpuAttention
from nanoengine.attention.flash_attention import make_flash
from nanoengine.attention.flash_kernels import flash_attn_kernels, sdpa_kernels, varlen_kernels
from nanoengine.attention.torch_attention import TorchAttention
from nanoengine.config.attention import ATTENTION_LIMITS, AttentionConfig
from nanoengine.context import AttentionBackend
from nanoengine.errors import ConfigError
from nanoengine.kernels.cpu_kernels import CpuKernels

Found = tuple[AttentionBackend | None, str]  # a backend, and the reasons against others
# The first backend that works is used; on a CPU "sdpa" only on request.
# On a GPU, backends proved by a GPU run come first.
ORDER = {
    "cuda": ("triton", "flash-attn", "varlen", "sdpa", "torch"),
    "xpu": ("triton", "sdpa", "torch"),
    "npu": ("ascend", "sdpa", "torch"),
    "cpu": ("c", "torch", "sdpa"),
}
FLASH_KERNELS = {
    "flash-attn": flash_attn_kernels,
    "varlen": varlen_kernels,
    "ascend": ascend_kernels,
    "sdpa": sdpa_kernels,
}


@dataclass(frozen=True, slots=True)
class AttentionSetup:
    """What a backend must compute, and where.

    dtype: of q, k and v; block_size: tokens of a KV block; config: the model's attention. kernels:
    the C kernels; no_kernels: the reason for having none. checked_rows: most rows with which a step
    checks the guesses of a sequence.
    """

    device: torch.device
    dtype: torch.dtype
    block_size: int
    config: AttentionConfig
    kernels: CpuKernels | None = None
    no_kernels: str = ""
    checked_rows: int = 1


def make_attention(wanted: str, setup: AttentionSetup) -> tuple[AttentionBackend, str]:
    """The backend of EngineConfig.attention_backend, for "auto" the first that works; and the
    reasons against those before it in ORDER.

    Raises ConfigError if the requested backend cannot be used.
    """
    kind = setup.device.type
    check_attention(wanted, kind, setup.dtype, setup.block_size, setup.config)
    order = ORDER[kind] if wanted == "auto" else (wanted,)
    backend, reasons = _first_that_works(order, setup)
    if backend is None:
        raise _unusable(wanted, reasons)
    return backend, reasons


def check_attention(
    wanted: str, kind: str, dtype: torch.dtype, block_size: int, config: AttentionConfig
) -> None:
    """Raise ConfigError for a backend that devices of this kind ("cuda", "cpu") do not have, or
    that does not do what it is asked for. The machine may lack its kernels all the same.
    """
    if wanted == "auto":
        return
    if wanted not in ORDER[kind]:
        raise ConfigError(
            f"attention_backend={wanted!r} is not for device={kind!r}, which has "
            f"{', '.join(ORDER[kind])}"
        )
    name = str(dtype).removeprefix("torch.")
    if unmet := ATTENTION_LIMITS[wanted].unmet(name, block_size, config):
        raise _unusable(wanted, f"{wanted} needs {unmet}")


def _unusable(wanted: str, reasons: str) -> ConfigError:
    return ConfigError(
        f"attention_backend={wanted!r} cannot be used: {reasons}; change that, or leave it at "
        '"auto"'
    )


def _first_that_works(names: Iterable[str], setup: AttentionSetup) -> Found:
    dtype = str(setup.dtype).removeprefix("torch.")
    refusals: list[str] = []
    unmet_by: dict[str, list[str]] = {}
    backend: AttentionBackend | None = None
    for name in names:
        unmet = ATTENTION_LIMITS[name].unmet(dtype, setup.block_size, setup.config)
        if unmet:
            unmet_by.setdefault(unmet, []).append(name)
            continue
        backend, refusal = _find(name, setup)
        refusals += [refusal] if refusal else []
        if backend is not None:
            break
    needs = (
        f"{' and '.join(names)} need{'s' * (len(names) == 1)} {limit}"
        for limit, names in unmet_by.items()
    )
    return backend, "; ".join([*needs, *refusals])


def _find(name: str, setup: AttentionSetup) -> Found:
    """The backend of this name, if the machine has what it needs."""
    if name == "c":
        if setup.kernels is None:
            return None, f'{setup.no_kernels}, or set attention_backend="sdpa"'
        return CpuAttention(setup.config, setup.kernels), ""
    if name == "torch":
        return TorchAttention(setup.config), ""
    if name == "triton":
        return _make_triton(setup)
    return make_flash(
        FLASH_KERNELS[name], setup.device, setup.dtype, setup.block_size, setup.config
    )


def _make_triton(setup: AttentionSetup) -> Found:
    try:
        from nanoengine.attention.triton_attention import (
            TritonAttention,  # imports triton, which comes with PyTorch for GPUs
        )
    except ImportError as error:
        return None, f"Triton: {error}"
    made = TritonAttention(setup.config, setup.dtype, setup.device, setup.checked_rows)
    return (None, made.lack) if made.lack else (made, "")
