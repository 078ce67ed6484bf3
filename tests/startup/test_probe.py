"""The step that start-up runs to see how much memory the largest one holds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanoengine import LLM, SamplingParams
from nanoengine.config.engine import GIB, LEAST_SAMPLED
from nanoengine.devices.cpu import CpuDevice
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.model_runner import ModelRunner
from nanoengine.kv.kv_cache import HybridKVCacheManager
from nanoengine.sequence import ScheduledBatch
from nanoengine.startup import probe


def test_the_largest_step_is_run_and_its_memory_planned_for(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that counts memory; every request of it samples, as often as a step may."""
    batches: list[ScheduledBatch] = []
    launch = ModelRunner.launch

    def launched(runner: ModelRunner, batch: ScheduledBatch) -> object:
        batches.append(batch)
        found = launch(runner, batch)
        assert len(found.tokens) == LEAST_SAMPLED // 7 * 7
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
    monkeypatch.setattr(probe, "BUDGET_S", 60.0)
    monkeypatch.setattr(probe.WaitingShare, "now", lambda self: 0.0)
    settings = {"device": "cpu", "dtype": "float32", "kvcache_block_size": 8, "num_gpu_blocks": 4}
    streams = {"enable_cpu_offload": True, "offload_mode": "stream", "kv_offload_gib": 0.01}
    made = LLMEngine(tiny("llama"), max_model_len=72, **settings, **streams)
    _first, resident, *_, streamed = moved
    assert resident == 0 and 10 * 8 < streamed <= 10 * 8 + 1
    made.close()


TIERS = {
    "device": "cpu",
    "dtype": "float32",
    "kvcache_block_size": 8,
    "num_gpu_blocks": 4,
    "offload_mode": "stream",
    "kv_offload_gib": 0.01,
}


@pytest.fixture
def num_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts the steps of the probe; the list has a number for each engine that was started."""
    found: list[int] = []
    step, measure = probe._step, probe.measure_decode

    def counted(*args: Any) -> float:
        found[-1] += 1
        return step(*args)

    def measured(*args: Any) -> Any:
        found.append(0)
        return measure(*args)

    monkeypatch.setattr(probe, "_step", counted)
    monkeypatch.setattr(probe, "measure_decode", measured)
    yield found


def test_without_time_it_measures_each_size_once(
    whole_probe: None,
    tiny: Callable[[str], Path],
    num_steps: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe.WaitingShare, "now", lambda self: 0.0)
    for seconds in (60.0, 0.0):
        monkeypatch.setattr(probe, "BUDGET_S", seconds)
        made = LLMEngine(tiny("llama"), **TIERS)
        assert made.plan.decode_tokens_per_s > 0 and made.plan.stream_blocks_per_step
        made.close()
    assert num_steps == [1 + 3 * 3 * 10, 1 + 3]


def test_what_only_the_first_step_takes_is_no_speed(
    whole_probe: None, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is far over the budget; by the clock of this test others take a millisecond."""
    left, now, launch = [0.5], [0.0], ModelRunner.launch

    def launched(runner: ModelRunner, batch: ScheduledBatch) -> object:
        now[0] += left.pop() if left else 0.001
        return launch(runner, batch)

    def looked_at() -> float:
        now[0] += 1e-4  # who waits for a time waits a thousand looks
        return now[0]

    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=looked_at))
    monkeypatch.setattr(ModelRunner, "launch", launched)
    monkeypatch.setattr(probe.WaitingShare, "now", lambda self: 0.0)
    monkeypatch.setattr(probe, "BUDGET_S", 0.1)
    with LLM(tiny("llama"), **TIERS) as llm:
        assert not left and 0.001 < llm.llm_engine.decode_costs.step_s < 0.01


@pytest.mark.slow
def test_it_predicts_what_requests_get() -> None:
    """Within a factor of two, KV on both tiers; in turns, the best of each, as it may be busy."""
    text, params = [5] * 1500, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    settings = {"enable_cpu_offload": True, "num_gpu_blocks": 3, "kv_offload_gib": 0.24}
    with LLM("smollm2-135m", device="cpu", speculative="off", **settings) as llm:
        engine, predicted, found = llm.llm_engine, [], []
        for _ in range(3):
            waiting = probe.WaitingShare()
            engine.kv.reset_prefix_cache()
            costs = probe.measure_decode(engine.runner, engine.kv, engine.device, 6, waiting)
            assert costs is not None
            predicted.append(costs.tokens_per_s(num_blocks=6, device_blocks=3))
            times = [0.0]
            for _ in llm.stream(text, params):
                times.append(time.perf_counter())
            found.append(11 / (times[-1] - times[-12]))
    assert 0.5 < max(predicted) / max(found) < 2


def test_it_says_what_it_does_and_can_be_left_out(
    whole_probe: None,
    tiny: Callable[[str], Path],
    num_steps: list[int],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe.WaitingShare, "now", lambda self: 0.0)
    caplog.set_level(logging.INFO, "nanoengine")
    made = LLMEngine(tiny("llama"), **TIERS)
    assert "measuring decode steps for about 1 s (measure_speed=False leaves" in caplog.text
    assert "tok/s" in str(made.plan) and len(num_steps) == 1
    made.close()
    caplog.clear()
    made = LLMEngine(tiny("llama"), measure_speed=False, **TIERS)
    plan = made.plan
    assert not caplog.text and len(num_steps) == 1 and made.decode_costs is None
    assert "tok/s" not in str(plan) and not plan.copy_gb_per_s
    assert plan.stream_blocks_per_step == (32 << 20) // plan.kv.host_block_bytes
    made.kv.memory.offload.host.fill(0.0)  # all of it is allocated
    made.close()


@pytest.mark.parametrize(("share", "is_slowed"), [(0.05, False), (0.3, True)])
def test_on_a_busy_machine_a_speed_is_a_lower_bound(
    whole_probe: None,
    tiny: Callable[[str], Path],
    share: float,
    is_slowed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe.WaitingShare, "now", lambda self: share)
    made = LLMEngine(tiny("llama"), **TIERS)
    words = "tok/s or more" if is_slowed else "decodes at about"
    assert words in str(made.plan) and made.plan.is_slowed == is_slowed
    assert ("other programs used the processor" in str(made.plan)) == is_slowed
    made.close()


def test_on_a_busy_machine_it_gives_up_when_the_time_is_over(
    whole_probe: None,
    tiny: Callable[[str], Path],
    num_steps: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe.WaitingShare, "now", lambda self: 0.3)
    monkeypatch.setattr(probe, "BUDGET_S", 0.0)
    made = LLMEngine(tiny("llama"), **TIERS)
    assert num_steps == [1] and made.decode_costs is None
    assert "speed        not measured, as other programs use the processor" in str(made.plan)
    assert made.plan.stream_blocks_per_step == (32 << 20) // made.plan.kv.host_block_bytes
    made.close()


def test_where_others_take_the_processor_no_step_is_begun(
    whole_probe: None,
    tiny: Callable[[str], Path],
    num_steps: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe.WaitingShare, "now", lambda self: 0.6)
    made = LLMEngine(tiny("llama"), **TIERS)
    assert num_steps == [] and "speed        not measured" in str(made.plan)
    made.close()


def test_nobody_counts_the_memory_of_a_host() -> None:
    assert CpuDevice().peak_bytes_of(lambda: torch.empty(10)) is None
