"""The step that start-up runs to see how much memory the largest one holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nanoengine.config import GIB
from nanoengine.devices.cpu import CpuDevice
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.model_runner import ModelRunner
from nanoengine.kv.kv_cache import HybridKVCacheManager
from nanoengine.sequence import ScheduledBatch


def test_the_largest_step_is_run_and_its_memory_planned_for(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that counts memory; every request of it samples."""
    batches: list[ScheduledBatch] = []
    launch = ModelRunner.launch

    def launched(runner: ModelRunner, batch: ScheduledBatch) -> object:
        batches.append(batch)
        found = launch(runner, batch)
        assert len(found.tokens) == 7
        return found

    def peak_bytes_of(device: CpuDevice, work: Callable[[], object]) -> int:
        work()
        return 5 << 20

    monkeypatch.setattr(ModelRunner, "launch", launched)
    monkeypatch.setattr(CpuDevice, "peak_bytes_of", peak_bytes_of)
    monkeypatch.setattr(CpuDevice, "computes_later", True)
    settings = {"device": "cpu", "dtype": "float32", "kvcache_block_size": 8}
    made = LLMEngine(tiny("llama"), max_num_seqs=7, max_num_batched_tokens=60, **settings)
    assert [item.num_tokens for item in batches[0].items] == [12, *[8] * 6]
    assert made.plan.activation_bytes == 5 << 20
    made.close()
    given = LLMEngine(tiny("llama"), kv_cache_gib=0.01, **settings)
    assert len(batches) == 1 and given.plan.activation_bytes != 5 << 20
    assert given.plan.kv.num_blocks * given.plan.kv.block_bytes <= 0.01 * GIB
    given.close()


def test_the_probe_reads_what_it_fills(
    whole_probe: None, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 9 blocks on the host all but the one that is written are streamed in each of 10 steps."""
    moved: list[float] = []
    reset = HybridKVCacheManager.reset_counters

    def reset_counters(kv: HybridKVCacheManager) -> None:
        moved.append(kv.counters.h2d_bytes / kv.spec.block_bytes)
        reset(kv)

    monkeypatch.setattr(HybridKVCacheManager, "reset_counters", reset_counters)
    settings = {"device": "cpu", "dtype": "float32", "kvcache_block_size": 8, "num_gpu_blocks": 4}
    streams = {"enable_cpu_offload": True, "offload_mode": "stream", "kv_offload_gib": 0.01}
    made = LLMEngine(tiny("llama"), max_model_len=72, **settings, **streams)
    resident, *_, streamed = moved
    assert resident == 0 and 10 * 8 < streamed <= 10 * 8 + 1
    made.close()


def test_nobody_counts_the_memory_of_a_host() -> None:
    assert CpuDevice().peak_bytes_of(lambda: torch.empty(10)) is None
