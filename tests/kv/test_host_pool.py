"""Host memory comes in segments, in the background; no copy spans two, and a shortage is named."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from driver import Driver, expected, host_gib, token_ids
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoengine import SamplingParams
from nanoengine.devices.cpu import CpuDevice
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.errors import OutOfMemoryError
from nanoengine.kv import host_pool
from nanoengine.kv.host_pool import HostPool, segment_sizes

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
GIB, MIB = 1 << 30, 1 << 20


class SlowDevice(CpuDevice):
    """Hands out memory only while the gate is open; fails at segment `fails_at`."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__(2)
        self.gate = threading.Event()
        self.fails_at, self.num_taken = fails_at, 0

    def empty_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.gate.wait()
        if self.num_taken == self.fails_at:
            raise MemoryError("no more")
        self.num_taken += 1
        return super().empty_host(shape, dtype)


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of two blocks of the pools below (64 bytes a block)."""
    monkeypatch.setattr(host_pool, "LARGEST_SEGMENT", 150)
    monkeypatch.setattr(host_pool, "SMALLEST_SEGMENT", 150)


def make_pool(device: CpuDevice, num_blocks: int = 7) -> HostPool:
    """2 layers, blocks of [2, 2, 1, 2] fp32."""
    return HostPool(device, num_blocks, [(2, 2, 1, 2)] * 2, torch.float32)


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 5000), st.sampled_from([1 << 10, 5898240, 100 * MIB, 3 * GIB]))
def test_segments_hold_all_blocks_and_are_not_rounded_up_to_twice_the_size(
    n: int, size: int
) -> None:
    sizes = segment_sizes(n, size)
    assert sum(sizes) == n and min(sizes) > 0
    assert sizes == sorted(sizes, reverse=True)
    taken = sum(1 << (blocks * size - 1).bit_length() for blocks in sizes)  # rounded up to 2^k
    assert max(sizes) == 1 or max(sizes) * size <= GIB
    if size < 10 * MIB and n * size > GIB:
        assert taken <= 1.15 * n * size


def test_every_slot_lies_in_one_segment(small_segments: None) -> None:
    pool = make_pool(CpuDevice(2))
    assert pool.num_segments == 4
    assert [pool.locate(slot) for slot in range(7)] == [(slot // 2, slot % 2) for slot in range(7)]
    pool.close()


def test_no_copy_spans_two_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "LARGEST_SEGMENT", 200)
    monkeypatch.setattr(host_pool, "SMALLEST_SEGMENT", 100)
    pool = make_pool(CpuDevice(2), 10)
    assert [pool.locate(slot)[0] for slot in range(10)] == [0] * 3 + [1] * 3 + [2] * 3 + [3]
    for slot in range(10):
        for layer in range(2):
            pool.block(layer, slot).fill_(10 * layer + slot)
    slots = [1, 2, 3, 4, 9, 0]
    runs = [
        (slots[run.at], pool.blocks(1, run)[:, 0, 0, 0, 0].tolist()) for run in pool.runs(slots)
    ]
    assert runs == [([1, 2], [11, 12]), ([3, 4], [13, 14]), ([9], [19]), ([0], [10])]
    assert list(pool.slots(1, (0, 2))) == [3, 5]
    pool.close()


def test_start_up_does_not_wait_and_readers_wait_for_their_segment(small_segments: None) -> None:
    device = SlowDevice()
    pool = make_pool(device)
    read = threading.Thread(target=lambda: pool.block(0, 3).fill_(1.0))
    read.start()
    read.join(0.05)
    assert read.is_alive() and device.num_taken == 0
    device.gate.set()
    read.join(60)
    assert not read.is_alive() and pool.block(0, 3).sum() == 8
    pool.close()


def test_closing_takes_no_more_segments(
    small_segments: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SlowDevice()
    pool = make_pool(device)
    end = pool._segments.end

    def ending(error: Exception) -> None:
        end(error)
        device.gate.set()

    monkeypatch.setattr(pool._segments, "end", ending)
    pool.close()
    assert device.num_taken <= 1
    with pytest.raises(OutOfMemoryError):
        pool.block(0, 0)


def test_a_shortage_names_the_setting(small_segments: None) -> None:
    device = SlowDevice(fails_at=2)
    device.gate.set()
    pool = make_pool(device)
    pool.block(0, 3)
    with pytest.raises(OutOfMemoryError, match=r"blocks 4 to 5 of 7 .*no more.*kv_offload_gib"):
        pool.block(0, 4)
    with pytest.raises(OutOfMemoryError, match="kv_offload_gib"):
        pool.block(1, 6)
    pool.close()


@pytest.mark.parametrize("mode", ["stream", "in_place"])
def test_an_engine_over_many_segments_gives_the_same_tokens(
    tiny: Callable[[str], Path], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny("qwen3")
    settings = {
        "kvcache_block_size": 4,
        "num_gpu_blocks": 4,
        "enable_cpu_offload": True,
        "offload_mode": mode,
        "kv_offload_gib": host_gib(path, 60, 4),
        "slot_tokens": 20,
        "debug_kv": True,
        "dtype": "float32",
        "device": "cpu",
    }
    segment_bytes = int(host_gib(path, 3, 4) * GIB)  # three blocks, so that runs cross segments
    monkeypatch.setattr(host_pool, "LARGEST_SEGMENT", segment_bytes)
    monkeypatch.setattr(host_pool, "SMALLEST_SEGMENT", segment_bytes)
    driver = Driver(LLMEngine(path, **settings))
    rng = random.Random(3)
    prompts = [[rng.randrange(256) for _ in range(n)] for n in (70, 41, 9)]
    assert driver.engine.kv.memory.offload.host.num_segments == 20
    assert token_ids(driver.run(prompts, GREEDY)) == [expected(path, p, 6) for p in prompts]
    audit, h2d_bytes = driver.audit, driver.engine.kv.counters.h2d_bytes
    assert audit.h2d_bytes <= h2d_bytes <= audit.h2d_bytes + audit.between_bytes
    driver.engine.close()


def test_more_than_the_machine_has_is_refused_at_once(tiny: Callable[[str], Path]) -> None:
    with pytest.raises(OutOfMemoryError, match=r"asks for 900000.* available; lower kv_"):
        LLMEngine(tiny("qwen3"), device="cpu", enable_cpu_offload=True, kv_offload_gib=900_000)
