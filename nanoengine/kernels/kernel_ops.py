"""LayerOps whose small operators are kernels: what CPUs and GPUs share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from torch import Tensor

from nanoengine.context import KVTarget, ReplayKey
from nanoengine.kernels.call_tape import CallTape
from nanoengine.kernels.cuda_graph import CudaGraphs
from nanoengine.models.activations import relu2
from nanoengine.models.layer_ops import LayerOps
from nanoengine.models.products import Norm, Product


class Kernels(Protocol):
    """Small operators of one call each, documented in CpuKernels."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None: ...
    def gate_mul(self, gate_up: Tensor, activation: str, out: Tensor) -> None: ...
    def rope_store(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, target: KVTarget
    ) -> None: ...


class KernelOps(LayerOps):
    """Fused kernels: one call each instead of five to eight small PyTorch operators."""

    def __init__(self, kernels: Kernels, recorder: CallTape | CudaGraphs | None) -> None:
        """recorder: replays steps; None: no step is replayed."""
        self._kernels = kernels
        self._recorder = recorder

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        out = x.new_empty(x.shape)
        self._kernels.rms_norm(x, norm.weight, norm.eps, out)
        return out

    def rotate_and_store(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, target: KVTarget
    ) -> Tensor:
        self._kernels.rope_store(q, k, v, cos, sin, target)
        return q

    def gated(self, activation: str) -> Product:
        if activation == "relu2":
            return partial(self.activated, activation=relu2)

        def gated(gate_up: Tensor) -> Tensor:
            out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
            self._kernels.gate_mul(gate_up, activation, out)
            return out

        return gated

    def replay(self, key: ReplayKey, forward: Callable[[], Tensor]) -> Tensor:
        return forward() if self._recorder is None else self._recorder.replay(key, forward)
