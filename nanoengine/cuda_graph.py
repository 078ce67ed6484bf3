"""CudaGraphs: the layers of a decode step, launched as one CUDA graph instead of kernel by kernel.

The GPU's counterpart of CallTape. A step of a kind that was seen before is captured, and replayed
from then on; what differs between two steps of a kind is copied into the tensors of the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanoengine.context import StepInputs

SIZES = (1, 2, 4, *range(8, 129, 8), *range(144, 257, 16))


class CudaGraphs:
    """Owns the graphs of an engine; they share one memory pool, as only one runs at a time."""

    def __init__(self) -> None:
        self._graphs: dict[object, _Graph | None] = {}
        self._pool: Any = None

    def run(self, inputs: StepInputs, forward: Callable[[], Tensor]) -> Tensor:
        """forward(), which reads `inputs` and nothing else that changes.

        The first step of a kind runs as it is, as that may compile kernels; the second is captured.
        """
        key = inputs.layout, tuple((t.shape, t.dtype) for t in inputs.tensors)
        if key not in self._graphs:
            self._graphs[key] = None
            return forward()
        graph = self._graphs[key]
        if graph is None:
            graph = self._graphs[key] = self._capture(inputs, forward)
        torch._foreach_copy_(graph.inputs, inputs.tensors)
        graph.graph.replay()
        return graph.result

    def _capture(self, inputs: StepInputs, forward: Callable[[], Tensor]) -> _Graph:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = forward()
        return _Graph(graph, inputs.tensors, result)


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    result: Tensor


def graph_size(num_rows: int) -> int:
    """The least size of a captured step with room for so many rows; past the largest, as many."""
    return next((size for size in SIZES if size >= num_rows), num_rows)
