"""Attention backends that run anywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from marks import needs_compiler

from nanoengine.attention.cpu_attention import CpuAttention
from nanoengine.attention.torch_attention import TorchAttention
from nanoengine.config.attention import AttentionConfig
from nanoengine.context import AttentionBackend
from nanoengine.kernels.cpu_kernels import CpuKernels


@pytest.fixture(params=[pytest.param("C", marks=needs_compiler), "torch", "triton"])
def make(
    request: pytest.FixtureRequest, build_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[AttentionConfig], AttentionBackend]:
    """Each of them in turn; Triton's with the PARTITION of the file of tests."""
    if request.param == "C":
        kernels = CpuKernels.load(build_folder)
        return lambda config: CpuAttention(config, kernels)
    if request.param == "torch":
        return TorchAttention
    triton_attention = pytest.importorskip("nanoengine.attention.triton_attention")
    monkeypatch.setattr(triton_attention, "PARTITION", request.module.PARTITION)
    cpu = torch.device("cpu")
    return lambda config: triton_attention.TritonAttention(config, torch.float32, cpu)
