"""Decode with transformers' offloaded cache, and ours beside it: a part of gpu_check.py."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers

from benchmarks.gpu.gpu_measure import Row, Scale, capped, card, offloaded, running, time_decode
from benchmarks.gpu.gpu_rows import free_memory
from nanoengine.loading.model_config import read_model_config

NUM_WARMUPS, NUM_STEPS = 3, 6


def offloaded_cache(folder: Path, scale: Scale, link_gb_per_s: float) -> Iterator[Row]:
    """Decode steps of transformers with its offloaded cache, and ours, each with the device memory
    of a small card. Both begin with random KV, so no prompt is computed.

    Their cache copies a layer to the device and all of it back in each step; link bytes follow from
    the sizes of its tensors.
    """
    size = read_model_config(folder).kv_bytes_per_token(2)
    with capped(scale):
        contexts = scale.decode_contexts[:2]
        settings = offloaded(scale, max(contexts), size) | card(scale)
        with running(folder, scale, max_model_len=max(contexts) + 256, **settings) as made:
            ours = {n: time_decode(made, [n], NUM_STEPS) for n in contexts}
        with their_streams(scale):
            model = their_model(folder, scale)
            for context, (step_s, moved) in ours.items():
                seconds, there = their_decode(model, scale, context)
                free_memory()
                yield {
                    "context": context,
                    "transformers": transformers.__version__,
                    "transformers_tokens_per_s": round(1 / seconds, 2),
                    "transformers_h2d_gb": round(there / 1e9, 3),
                    "transformers_d2h_gb": round(there / 1e9, 3),
                    "transformers_share_of_link": round(there / seconds / 1e9 / link_gb_per_s, 3),
                    "tokens_per_s": round(1 / step_s, 2),
                    "h2d_gb": round(moved / 1e9, 3),
                    "share_of_link": round(moved / step_s / 1e9 / link_gb_per_s, 3),
                    "ratio": round(seconds / step_s, 2),
                }


def their_model(folder: Path, scale: Scale) -> Any:
    """transformers' model of these shapes with random weights, made on the device."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model_class: Any = transformers.AutoModelForCausalLM
    with torch.device(scale.device):
        model = model_class.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.eval()


@torch.inference_mode()
def their_decode(model: Any, scale: Scale, context: int) -> tuple[float, int]:
    """Seconds of a decode step with the offloaded cache, and bytes that it copies each way. Ends at
    `context` tokens, so that no pinned tensor grows past a power of two, to which torch rounds.
    """
    cache = filled_cache(model.config, scale, context - NUM_WARMUPS - NUM_STEPS)
    token = torch.zeros((1, 1), dtype=torch.int64, device=scale.device)
    start = 0.0
    for step in range(NUM_WARMUPS + NUM_STEPS):
        if step == NUM_WARMUPS:
            start = time.perf_counter()
        output = model(token, past_key_values=cache, use_cache=True, logits_to_keep=1)
        token = output.logits.argmax(-1)
        token.item()  # generate() looks at each token, too
    seconds = (time.perf_counter() - start) / NUM_STEPS
    return seconds, sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def filled_cache(config: Any, scale: Scale, num_tokens: int) -> Any:
    """An offloaded cache with random KV of so many tokens, as it is between two steps: all layers
    on the host, and the first on its way.
    """
    cache_class: Any = transformers.DynamicCache
    cache = cache_class(config=config, offloading=True)
    shape = (1, config.num_key_value_heads, num_tokens, config.head_dim)
    states = torch.randn(shape, dtype=torch.bfloat16, device=scale.device)
    for layer in cache.layers:
        layer.lazy_initialization(states, states)
        layer.keys, layer.values = states, states
        layer.offload()
    cache.prefetch(0, False)
    return cache


class NoStream:
    """A stream where there is no GPU: nothing waits."""

    def __enter__(self) -> NoStream:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing was entered."""

    def wait_stream(self, _: object) -> None:
        """What was queued is done."""


@contextmanager
def their_streams(scale: Scale) -> Iterator[None]:
    """In a rehearsal the offloaded cache, which needs streams, gets some that do nothing."""
    if not scale.is_rehearsal:
        yield
        return
    with (
        mock.patch("torch.Stream", NoStream),
        mock.patch("torch.cuda.default_stream", lambda _: NoStream()),
    ):
        yield
