"""Runs one ScheduledBatch: builds the ForwardContext, calls the model, samples.

Knows the model, the sampler and the KV manager's attention face; decides nothing about who runs.
"""

from __future__ import annotations

from typing import Protocol

import torch

from nanoengine.config import ModelConfig
from nanoengine.context import AttentionBackend, ForwardContext, KVCache
from nanoengine.models import Decoder
from nanoengine.sampler import Sampler
from nanoengine.sequence import ScheduledBatch


class StepCache(Protocol):
    """The KV manager, as far as the runner knows it."""

    def begin(self, batch: ScheduledBatch) -> KVCache: ...


class ModelRunner:
    """ScheduledBatch -> ForwardContext -> logits -> tokens."""

    def __init__(
        self, model: Decoder, attention: AttentionBackend, kv: StepCache, device: torch.device
    ) -> None:
        self._model = model
        self._attention = attention
        self._kv = kv
        self._device = device
        self._sampler = Sampler()

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch) -> list[int]:
        """One token for each item of the batch that samples, in order."""
        ctx = self.context(batch)
        hidden = self._model.forward(ctx)
        seqs = [item.seq for item in batch.items if item.samples]
        if not seqs:
            return []
        return self._sampler.sample(self._model.logits(hidden[ctx.logit_rows]), seqs)

    def context(self, batch: ScheduledBatch) -> ForwardContext:
        """The forward context of a batch whose sequences hold their blocks."""
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
        return ForwardContext(
            token_ids=self._tensor(token_ids, torch.int64),
            positions=self._tensor(positions, torch.int64),
            query_start=self._tensor(starts, torch.int32),
            kv_lens=self._tensor(kv_lens, torch.int32),
            logit_rows=self._tensor(logit_rows, torch.int64),
            max_query_len=max(item.num_tokens for item in batch.items),
            kv=self._kv.begin(batch),
            attention=self._attention,
        )

    def _tensor(self, values: list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)


def activation_bytes(config: ModelConfig, num_tokens: int, num_seqs: int, element_size: int) -> int:
    """Upper bound of a step's temporary memory, from shapes alone (for a device that is not
    profiled).

    Per token: residual stream and norm (fp32 and model dtype), the widest of qkv + attention state
    and gate_up; per sequence: logits in the model's dtype and in fp32 and fp64 for sampling.
    """
    heads = config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    stream = config.hidden_size * (3 * element_size + 8)
    attention = (heads + 2 * kv_heads) * (2 * element_size + 8) + heads * (4 + element_size)
    feed_forward = config.intermediate_size * 4 * element_size
    per_token = stream + max(attention, feed_forward)
    return num_tokens * per_token + num_seqs * config.vocab_size * (element_size + 24)
