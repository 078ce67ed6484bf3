"""CudaGraphs: the layers of a decode step as one CUDA graph; or, where attention waits for copies,
what lies between two attentions as one each.

The GPU's counterpart of CallTape. Work of a kind that was seen before is captured, and replayed
from then on; what differs is copied into the tensors of the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanoengine.context import StepInputs

SIZES = (1, 2, 4, *range(8, 129, 8), *range(144, 257, 16))
PIECE_ROWS = 64  # every layer keeps a result of its own for each size up to this one
Bridge = Callable[[Tensor, Tensor], Tensor]


class CudaGraphs:
    """Owns the graphs of an engine; they share one memory pool, as only one runs at a time."""

    def __init__(self) -> None:
        self._graphs: dict[object, _Graph | None] = {}
        # By rows: the residual streams of `begin`, and the attended values of all pieces.
        self._residuals: dict[int, Tensor] = {}
        self._attended: dict[int, Tensor] = {}
        self._pool: Any = None

    def run(self, inputs: StepInputs, forward: Callable[[], Tensor]) -> Tensor:
        """forward(), which reads `inputs` and nothing else that changes.

        The first step of a kind runs as it is, as that may compile kernels; the second is captured.
        """
        key = inputs.layout, tuple((t.shape, t.dtype) for t in inputs.tensors)
        return self._run(key, inputs.tensors, forward)

    def begin(self, x: Tensor) -> Tensor:
        """The residual stream of a step that is no graph itself: if it has few enough rows it moves
        to where the bridges of `piece` are replayed on.
        """
        if len(x) > PIECE_ROWS:
            return x
        size = graph_size(len(x))
        if size not in self._residuals:
            self._residuals[size] = x.new_zeros(size, x.shape[1])
        return self._residuals[size][: len(x)].copy_(x)

    def piece(self, bridge: Bridge) -> Bridge:
        """The bridge, a graph for each size where its residual stream is one of `begin`.

        Rows that only pad are whatever was there: no row depends on another.
        """

        def run(residual: Tensor, attended: Tensor) -> Tensor:
            num_rows = len(residual)
            size = graph_size(num_rows)
            whole = self._residuals.get(size)
            if whole is None or whole.data_ptr() != residual.data_ptr():
                return bridge(residual, attended)
            if size not in self._attended:
                self._attended[size] = attended.new_zeros(size, attended.shape[1])
            static = self._attended[size]
            static[:num_rows].copy_(attended)
            return self._run((bridge, size), (), lambda: bridge(whole, static))[:num_rows]

        return run

    def _run(
        self, key: object, inputs: tuple[Tensor, ...], forward: Callable[[], Tensor]
    ) -> Tensor:
        if key not in self._graphs:
            self._graphs[key] = None
            return forward()
        graph = self._graphs[key]
        if graph is None:
            graph = self._graphs[key] = self._capture(inputs, forward)
        if inputs:
            torch._foreach_copy_(graph.inputs, inputs)
        graph.graph.replay()
        return graph.result

    def _capture(self, inputs: tuple[Tensor, ...], forward: Callable[[], Tensor]) -> _Graph:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Another thread may be taking host memory just then.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = forward()
        return _Graph(graph, inputs, result)


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    result: Tensor


def graph_size(num_rows: int) -> int:
    """The least size of a captured step with room for so many rows; past the largest, as many."""
    return next((size for size in SIZES if size >= num_rows), num_rows)
