"""Two functions of flash-attn as nano-vllm calls them, for a machine without flash-attn: prompts by
PyTorch's SDPA, decode steps by our Triton kernels, which a CUDA graph can hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from nanoengine.config.attention import AttentionConfig
from nanoengine.context import ForwardContext, KVChunk


class OneChunk:
    """A KV cache of one chunk, for attention alone (context.KVCache, as far as it is read)."""

    def __init__(self, chunk: KVChunk) -> None:
        self._chunk = chunk

    def read(self, layer: int) -> Iterator[KVChunk]:
        yield self._chunk


class StandIn:
    """Keeps between the layers of a forward pass what is the same for all of them."""

    def __init__(self) -> None:
        self._starts: tuple[Tensor, list[int]] | None = None
        self._first_pool = 0  # the address of the KV of the first layer
        self._step: tuple[Any, ForwardContext, KVChunk] | None = None

    def varlen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        softmax_scale: float,
        causal: bool,
        block_table: Tensor | None,
        **_: object,
    ) -> Tensor:
        """flash_attn_varlen_func of whole prompts, laid end to end. A prompt that begins in the
        cache has a block table: NotImplementedError.
        """
        if block_table is not None or not causal:
            raise NotImplementedError("the stand-in for flash-attn computes whole prompts only")
        if self._starts is None or self._starts[0] is not cu_seqlens_q:
            self._starts = cu_seqlens_q, cu_seqlens_q.tolist()
        out = torch.empty_like(q)
        for first, last in pairwise(self._starts[1]):
            of_heads = [x[first:last].transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
            found = torch.nn.functional.scaled_dot_product_attention(
                of_heads[0], of_heads[1], of_heads[2],
                is_causal=True, scale=softmax_scale, enable_gqa=True,
            )  # fmt: skip
            out[first:last] = found[0].transpose(0, 1)
        return out

    def with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        cache_seqlens: Tensor,
        block_table: Tensor,
        softmax_scale: float,
        **_: object,
    ) -> Tensor:
        """flash_attn_with_kvcache of one query for each sequence: q [n, 1, heads, head_dim], caches
        [blocks, block_size, kv_heads, head_dim]. Sequences of length 0 are padding.
        """
        self._first_pool = self._first_pool or k_cache.data_ptr()
        is_first = k_cache.data_ptr() == self._first_pool
        if self._step is None or is_first:
            self._step = _decode_step(q, k_cache, cache_seqlens, block_table, softmax_scale)
        backend, ctx, chunk = self._step
        kv: Any = OneChunk(replace(chunk, k=k_cache, v=v_cache))
        out: Tensor = backend.run(0 if is_first else 1, q[:, 0], replace(ctx, kv=kv))
        return out.unsqueeze(1)


def _decode_step(
    q: Tensor, k_cache: Tensor, kv_lens: Tensor, table: Tensor, scale: float
) -> tuple[Any, ForwardContext, KVChunk]:
    """What the layers of a decode step share. Its numbers are tensors, so that a graph that was
    captured of it computes them anew.
    """
    from nanoengine.attention.triton_attention import TritonAttention

    num, size = len(q), k_cache.shape[1]
    backend = TritonAttention(AttentionConfig(q.shape[-1], scale), q.dtype, q.device)
    index = torch.arange(num + 1, dtype=torch.int32, device=q.device)
    num_blocks = ((kv_lens + size - 1) // size).to(torch.int32)
    spans = tuple((i, 0, ()) for i in range(num))
    chunk = KVChunk(
        k_cache, k_cache, index[:num], torch.zeros_like(num_blocks), num_blocks, table, spans, True
    )
    lengths = ((1, table.shape[1] * size),) * num
    none = torch.empty(0, dtype=torch.int64, device=q.device)
    unused: Any = None
    ctx = ForwardContext(none, none, index, kv_lens, lengths, none, unused, backend)
    return backend, ctx, chunk


_STAND_IN = StandIn()
flash_attn_varlen_func = _STAND_IN.varlen
flash_attn_with_kvcache = _STAND_IN.with_kvcache
