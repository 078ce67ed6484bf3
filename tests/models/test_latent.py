"""Latent attention: a token is one row a layer, its key and its value, on both tiers and on the way
between them.

Logits and ids of whole and chunked prompts are tested with the other architectures' (TINY).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import STREAMED, Driver, assert_greedy, assert_logits_are_transformers, small_engine

from nanoengine import SamplingParams

PROMPT = [i * 7 % 256 for i in range(77)]
IN_PLACE = STREAMED | {"offload_mode": "in_place"}
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
Tiny = Callable[[str], Path]


def numbers_of_a_token(path: Path) -> tuple[int, int]:
    """Layers, and numbers in a row of each, as config.json has them."""
    said = json.loads((path / "config.json").read_text())
    return said["num_hidden_layers"], said["kv_lora_rank"] + said["qk_rope_head_dim"]


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_row_is_held_and_moved_once(tiny: Tiny, backend: str) -> None:
    """The same bits wherever it lies, transformers' logits, and bytes as the row has numbers."""
    path = tiny("deepseek-v3-dense")
    layers, numbers = numbers_of_a_token(path)
    found = []
    for settings in ({}, IN_PLACE, STREAMED):
        given: dict[str, Any] = settings | {"attention_backend": backend}
        engine = small_engine(path, max_num_batched_tokens=24, max_num_seqs=4, **given)
        driver, kv = Driver(engine), engine.kv
        outputs = driver.run([PROMPT], GREEDY)
        assert_greedy(path, [PROMPT], outputs, 5)
        assert_logits_are_transformers(driver, path, outputs)
        found.append(torch.stack(driver.logits[outputs[0].request_id]))
        token_bytes = layers * numbers * 4
        assert kv.spec.block_bytes == kv.spec.host_block_bytes == 8 * token_bytes
        assert sum(pool.nbytes for pool in kv.memory.pool) == kv.spec.num_blocks * 8 * token_bytes
        moved = kv.counters
        if settings:
            assert moved.d2h_bytes == driver.audit.d2h_bytes
            assert moved.d2h_bytes // token_bytes in range(8, len(PROMPT) + 5)
        if settings is STREAMED:
            assert moved.h2d_bytes == driver.audit.h2d_bytes > 10 * 8 * token_bytes
        engine.close()
    assert all(torch.equal(other, found[0]) for other in found[1:])


def test_a_row_on_the_host_in_8_bits(tiny: Tiny) -> None:
    """One scale of 4 bytes beside its codes."""
    path = tiny("deepseek-v3-dense")
    layers, numbers = numbers_of_a_token(path)
    engine = small_engine(path, **STREAMED, kv_offload_dtype="int8")
    outputs = Driver(engine).run([PROMPT], GREEDY)
    token_bytes = layers * (numbers + 4)
    assert engine.kv.spec.host_block_bytes == 8 * token_bytes
    assert engine.kv.counters.fill_bytes % (8 * token_bytes) == 0 < engine.kv.counters.fill_bytes
    assert len(outputs[0].outputs[0].token_ids) == 5
    engine.close()
