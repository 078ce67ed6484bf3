"""CudaGraphs: the layers of a decode step as one CUDA graph; where attention waits for copies,
everything between two attentions as one graph.

The GPU's counterpart of CallTape. Work is captured when it occurs for the second time, and replayed
from then on: what differs is copied into the tensors that it was captured with. Other vendors have
the same (find_graphs).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanoengine.context import ReplayKey
from nanoengine.devices.collector import paused
from nanoengine.devices.gpu import VendorGraphs
from nanoengine.models.layer_ops import AfterAttention

SIZES = (1, 2, 4, *range(8, 129, 8), *range(144, 257, 16))
PIECE_ROWS = 64  # every layer keeps a result of its own for each size up to this one


class CudaGraphs:
    """Owns the graphs of an engine. Whole passes share one memory pool and pieces another, as of
    each only one runs at a time; but a whole pass may run between two pieces of another.
    """

    def __init__(self, vendor: VendorGraphs, settle: Callable[[], None] | None) -> None:
        """settle: waits for queued work before a capture, which does so, too, but for ever where a
        rank has died; None: there is no other rank.
        """
        self._vendor = vendor
        self._settle = settle
        self._graphs: dict[object, _Graph | None] = {}
        # By rows: the static buffers of residual streams; by shape: of the layers' attended values.
        self._residuals: dict[int, Tensor] = {}
        self._attended: dict[tuple[int, int], Tensor] = {}
        self._pools: dict[bool, Any] = {}  # of whole passes: True

    def replay(self, key: ReplayKey, forward: Callable[[], Tensor]) -> Tensor:
        """As LayerOps.replay; forward() reads the tensors of `key` and nothing else that changes.

        The first step of a key runs forward(), which may compile kernels; the second is captured.
        """
        shapes = tuple((t.shape, t.dtype) for t in key.tensors)
        return self._replay((key.layout, shapes), key.tensors, forward)

    def to_static_buffer(self, x: Tensor) -> Tensor:
        """A copy of x in the buffer that graphs of `piece` read; x itself above PIECE_ROWS rows."""
        if len(x) > PIECE_ROWS:
            return x
        size = graph_size(len(x))
        if size not in self._residuals:
            self._residuals[size] = x.new_zeros(size, x.shape[1])
        return self._residuals[size][: len(x)].copy_(x)

    def piece(self, after_attention: AfterAttention) -> AfterAttention:
        """after_attention, replayed as a graph for each size where x is in a static buffer.

        Rows that only pad hold old values: no row depends on another.
        """

        def run(x: Tensor, attended: Tensor) -> Tensor:
            num_rows = len(x)
            size = graph_size(num_rows)
            whole = self._residuals.get(size)
            if whole is None or whole.data_ptr() != x.data_ptr():
                return after_attention(x, attended)
            shape = size, attended.shape[1]
            if shape not in self._attended:
                self._attended[shape] = attended.new_zeros(shape)
            static = self._attended[shape]
            static[:num_rows].copy_(attended)
            key = (after_attention, size)
            return self._replay(key, (), lambda: after_attention(whole, static))[:num_rows]

        return run

    def forget_steps(self) -> None:
        """As LayerOps.forget_steps; a graph that runs ends first. None may outlive the ranks'
        communicator, or memory that it writes.
        """
        self._graphs.clear()
        self._pools.clear()

    def _replay(
        self, key: object, tensors: tuple[Tensor, ...], forward: Callable[[], Tensor]
    ) -> Tensor:
        if key not in self._graphs:
            self._graphs[key] = None
            return forward()
        graph = self._graphs[key]
        if graph is None:
            graph = self._graphs[key] = self._capture(tensors, forward)
        if tensors:
            torch._foreach_copy_(graph.tensors, tensors)
        graph.graph.replay()
        return graph.result

    def _capture(self, tensors: tuple[Tensor, ...], forward: Callable[[], Tensor]) -> _Graph:
        is_whole = bool(tensors)
        if is_whole not in self._pools:
            self._pools[is_whole] = self._vendor.new_pool()
        if self._settle is not None:
            self._settle()
        graph = self._vendor.new()
        # A graph of a closed engine that the collector frees meanwhile would spoil this one.
        with paused(), self._vendor.capture(graph, self._pools[is_whole]):
            result = forward()
        return _Graph(graph, tensors, result)


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: Any
    tensors: tuple[Tensor, ...]
    result: Tensor


def graph_size(num_rows: int) -> int:
    """The smallest of SIZES for so many rows; num_rows itself if it is larger than all."""
    return next((size for size in SIZES if size >= num_rows), num_rows)
