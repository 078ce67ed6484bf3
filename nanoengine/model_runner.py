"""Runs one ScheduledBatch: builds the ForwardContext, calls the model, samples.

Knows the model, the sampler and the KV manager's attention face; decides nothing about who runs.
"""

from __future__ import annotations

from typing import Protocol

import torch

from nanoengine.context import AttentionBackend, ForwardContext, KVCache
from nanoengine.device import Device
from nanoengine.models import Decoder
from nanoengine.sampler import Sampler
from nanoengine.sequence import ScheduledBatch


class StepCache(KVCache, Protocol):
    """The KV cache of one step, laid out for `num_rows` sequences."""

    @property
    def num_rows(self) -> int: ...
    def end(self) -> None: ...


class StepCaches(Protocol):
    """The KV manager, as far as the runner knows it."""

    def begin(self, batch: ScheduledBatch) -> StepCache: ...


class ModelRunner:
    """ScheduledBatch -> ForwardContext -> logits -> tokens."""

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        kv: StepCaches,
        sampler: Sampler,
        device: Device,
    ) -> None:
        self._model = model
        self._attention = attention
        self._kv = kv
        self._sampler = sampler
        self._device = device

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch) -> list[int]:
        """One token for each item of the batch that samples, in order."""
        kv = self._kv.begin(batch)
        try:
            ctx = self.context(batch, kv, kv.num_rows)
            hidden = self._model.forward(ctx)
        finally:
            kv.end()
        seqs = [item.seq for item in batch.items if item.samples]
        if not seqs:
            return []
        return self._sampler.sample(self._model.logits(hidden[ctx.logit_rows]), seqs)

    def context(self, batch: ScheduledBatch, kv: KVCache, num_rows: int = 0) -> ForwardContext:
        """The forward context of a batch, over the KV cache of its step.

        num_rows: at least so many sequences; those past the real ones have a token, and no keys.
        """
        token_ids: list[int] = []
        positions: list[int] = []
        starts, kv_lens, logit_rows = [0], [], []
        for item in batch.items:
            begin = item.seq.num_computed
            end = begin + item.num_tokens
            token_ids += item.seq.token_ids[begin:end]
            positions += range(begin, end)
            starts.append(len(token_ids))
            kv_lens.append(end)
            if item.samples:
                logit_rows.append(len(token_ids) - 1)
        lengths = [*zip((item.num_tokens for item in batch.items), kv_lens, strict=True)]
        for _ in range(len(lengths), num_rows):
            lengths.append((1, 0))
            token_ids.append(0)
            positions.append(0)
            starts.append(len(token_ids))
            kv_lens.append(0)
        return ForwardContext(
            token_ids=self._tensor(token_ids, torch.int64),
            positions=self._tensor(positions, torch.int64),
            query_start=self._tensor(starts, torch.int32),
            kv_lens=self._tensor(kv_lens, torch.int32),
            lengths=tuple(lengths),
            logit_rows=self._tensor(logit_rows, torch.int64),
            kv=kv,
            attention=self._attention,
        )

    def _tensor(self, values: list[int], dtype: torch.dtype) -> torch.Tensor:
        return self._device.tensor(values, dtype)
