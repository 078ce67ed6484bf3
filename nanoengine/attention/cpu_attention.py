"""Attention by the C kernel of kernels/cpu_attend.h."""

from __future__ import annotations

import torch
from torch import Tensor

from nanoengine.config.attention import AttentionConfig
from nanoengine.context import ForwardContext, SoftmaxState
from nanoengine.kernels.cpu_kernels import CpuKernels, MassBuffers, Workspace


class CpuAttention:
    """The C kernel of cpu_attend.h: reads each KV byte once for all query heads of its group."""

    can_replay = True
    is_batch_invariant = True

    def __init__(self, config: AttentionConfig, kernels: CpuKernels) -> None:
        self.name = f"C kernel ({kernels.isa})"
        self._config = config
        self._kernels = kernels
        self._workspace = Workspace()

    def reserve(self, lengths: tuple[tuple[int, int], ...]) -> bool:
        """False: it needs none."""
        return False

    def run(
        self, layer: int, q: Tensor, ctx: ForwardContext, sinks: Tensor | None = None
    ) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype)
        tokens, heads, head_dim = q.shape
        state = SoftmaxState(
            self._workspace.buffer("row_max", (tokens, heads), torch.float32),
            self._workspace.buffer("row_sum", (tokens, heads), torch.float32),
            self._workspace.buffer("acc", (tokens, heads, head_dim), torch.float32),
        )
        window = self._config.window(layer)
        mass = None if window is not None else self._mass_buffers(q, ctx)
        for number, chunk in enumerate(ctx.kv.read(layer)):
            self._kernels.attend(
                q,
                chunk,
                ctx.query_start,
                ctx.kv_lens,
                state,
                self._config.score_scale,
                number == 0,
                out if chunk.is_last else None,
                window,
                mass,
                sinks,
                self._config.softcap,
            )
        return out

    def _mass_buffers(self, q: Tensor, ctx: ForwardContext) -> MassBuffers | None:
        if ctx.block_mass is None:
            return None
        shape = (2, *q.shape[:2], ctx.block_mass.shape[1])
        kept = self._workspace.buffer("block_states", shape, torch.float32)
        return MassBuffers(ctx.block_mass, kept)
