"""Attention by a flash kernel: runs the calls of a step and merges their results.

Each result comes with its log-sum-exp and is merged in fp32 (the split softmax of Dao et al., arXiv
2205.14135). The split of a context into chunks changes the rounding; the time of their arrival does
not. Knows only chunks and lengths, not pools or the schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from nanoengine.attention.flash_calls import KernelCall, Lengths, plan_calls
from nanoengine.attention.flash_kernels import FindKernels, FlashKernel, try_kernel
from nanoengine.config.attention import AttentionConfig
from nanoengine.context import ForwardContext, KVChunk, SoftmaxState, Spans


class FlashAttention:
    """Runs a flash kernel over the chunks of a layer and merges the results in fp32."""

    can_replay = False
    is_batch_invariant = False

    def __init__(self, scale: float, kernel: FlashKernel, device: torch.device) -> None:
        self.name = kernel.name
        self._scale = scale
        self._kernel = kernel
        self._state = MergedState.on(device)
        self._plans: list[_ChunkPlan] = []
        self._gathered = torch.empty(0, device=device)

    def reserve(self, lengths: tuple[tuple[int, int], ...]) -> bool:
        """False: it needs none."""
        return False

    def run(
        self, layer: int, q: Tensor, ctx: ForwardContext, sinks: Tensor | None = None
    ) -> Tensor:
        self._state.start(q, sinks)
        for position, chunk in enumerate(ctx.kv.read(layer)):
            for call in self._calls(position, chunk, ctx.lengths):
                queries = self._queries(q, call.rows)
                out, lse = self._kernel.attend(queries, chunk.k, chunk.v, call, self._scale)
                self._state.merge(call.rows, out, lse)
        return self._state.result(q.dtype)

    def _calls(self, position: int, chunk: KVChunk, lengths: Lengths) -> tuple[KernelCall, ...]:
        """The calls over chunk number `position` of this step, planned once for all layers."""
        if position < len(self._plans):
            plan = self._plans[position]
            # Identical objects have equal values, so a plan is only used for its own step.
            if plan.spans is chunk.spans and plan.lengths is lengths:
                return plan.calls
            del self._plans[position:]
        self._plans.append(_ChunkPlan(chunk.spans, lengths, plan_calls(chunk, lengths)))
        return self._plans[-1].calls

    def _queries(self, q: Tensor, rows: slice | Tensor) -> Tensor:
        if isinstance(rows, slice):
            return q[rows]
        if self._gathered.dtype != q.dtype:
            self._gathered = q.new_empty(0)
        room = self._gathered.resize_((len(rows), *q.shape[1:]))
        return torch.index_select(q, 0, rows, out=room)


@dataclass(frozen=True, slots=True)
class _ChunkPlan:
    spans: Spans
    lengths: Lengths
    calls: tuple[KernelCall, ...]


@dataclass(frozen=True, slots=True)
class MergedState(SoftmaxState):
    """Partial results so far, as a softmax over log-sum-exps, in buffers of one backend.

    The storage grows with the largest step and is kept; `scratch` is for merges.
    """

    scratch: tuple[Tensor, ...]
    # Finite, so that merging two rows without keys does not compute inf - inf.
    lowest: ClassVar[float] = torch.finfo(torch.float32).min

    @classmethod
    def on(cls, device: torch.device) -> Self:
        """A state without rows."""
        row_max, row_sum, acc, *scratch = (
            torch.empty(0, dtype=torch.float32, device=device) for _ in range(7)
        )
        return cls(row_max, row_sum, acc, tuple(scratch))

    def merge(self, rows: slice | Tensor, out: Tensor, lse: Tensor) -> None:
        """Merge what a kernel returned for `rows`; overwrites lse."""
        lse = lse.T.nan_to_num_(nan=torch.nan, posinf=-torch.inf, neginf=-torch.inf)
        new_max, *copies = self.scratch
        new_max.resize_(lse.shape)
        if isinstance(rows, slice):
            _merge(self.row_max[rows], self.row_sum[rows], self.acc[rows], out, lse, new_max)
            return
        parts = (self.row_max, self.row_sum, self.acc)
        for part, copy in zip(parts, copies, strict=True):
            torch.index_select(part, 0, rows, out=copy.resize_((len(rows), *part.shape[1:])))
        _merge(copies[0], copies[1], copies[2], out, lse, new_max)
        for part, copy in zip(parts, copies, strict=True):
            part.index_copy_(0, rows, copy)

    def result(self, dtype: torch.dtype) -> Tensor:
        """The attention output, a new tensor [tokens, heads, head_dim]."""
        out = torch.empty_like(self.acc, dtype=dtype)
        return torch.div(self.acc, self.row_sum.unsqueeze(-1), out=out)


def _merge(
    row_max: Tensor, row_sum: Tensor, acc: Tensor, out: Tensor, lse: Tensor, new_max: Tensor
) -> None:
    """Fold (out, lse [rows, heads]) into the rows, in place; lse and new_max are scratch."""
    torch.maximum(row_max, lse, out=new_max)
    decay = row_max.sub_(new_max).exp_()
    weight = lse.sub_(new_max).exp_()
    row_sum.mul_(decay).add_(weight)
    acc.mul_(decay.unsqueeze(-1)).addcmul_(out, weight.unsqueeze(-1))
    row_max.copy_(new_max)


def make_flash(
    find: FindKernels,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int,
    config: AttentionConfig,
) -> tuple[FlashAttention | None, str]:
    """The first kernel that passes a trial on the device, and reasons against those before it."""
    kernels, missing = find(device)
    refusals = [missing] if missing else []
    for kernel in kernels:
        refusal = try_kernel(kernel, device, dtype, block_size, config.head_dim)
        if not refusal:
            return FlashAttention(config.score_scale, kernel, device), "; ".join(refusals)
        refusals.append(f"{kernel.name}: {refusal}")
    return None, "; ".join(refusals)
