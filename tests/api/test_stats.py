"""llm.stats() and llm.block_map(): the blocks of both tiers add up, and what is counted is what
happened.
"""

from __future__ import annotations

import asyncio
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from driver import host_gib

from nanoengine import LLM, AsyncLLM, EngineClosedError, SamplingParams
from nanoengine.api import progress
from nanoengine.api.block_map import RequestBlocks
from nanoengine.api.stats import EngineStats
from nanoengine.engine.output_processor import Totals
from nanoengine.outputs import RequestMetrics
from nanoengine.sequence import Sequence

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SETTINGS = {"dtype": "float32", "num_threads": 1, "kvcache_block_size": 8, "device": "cpu"}


def offload(path: Path, mode: str) -> dict[str, object]:
    gib = host_gib(path, 40, 8)
    return SETTINGS | {"num_gpu_blocks": 6, "offload_mode": mode, "kv_offload_gib": gib}


def check(stats: EngineStats) -> None:
    for tier in (stats.device, *([stats.host] if stats.host else [])):
        assert tier.num_used + tier.num_cached + tier.num_free == tier.num_blocks
        assert min(tier.num_used, tier.num_cached, tier.num_free) >= 0


@pytest.mark.parametrize("mode", ["stream", "in_place"])
def test_both_tiers(tiny: Callable[[str], Path], mode: str) -> None:
    path = tiny("llama")
    with LLM(path, **offload(path, mode)) as llm:
        new = llm.stats()
        check(new)
        assert (new.device.num_free, new.host.num_free) == (6, new.host.num_blocks)
        assert new.num_prompt_tokens == new.h2d_bytes == new.d2h_bytes == new.hit_rate == 0
        with llm.stream([5] * 80, GREEDY) as stream:
            next(stream)
            at_work = llm.stats()
            check(at_work)
            assert (at_work.num_running, at_work.num_waiting) == (1, 0)
            assert at_work.device.num_used > 0 < at_work.host.num_used
            assert at_work.d2h_bytes > 0 and bool(at_work.h2d_bytes) == (mode == "stream")
        idle = llm.stats()
        check(idle)
        assert idle.num_running == idle.device.num_used == idle.host.num_used == 0
        assert idle.host.num_cached > 0 == idle.num_cached_tokens
        (output,) = llm.generate([5] * 80, GREEDY, use_tqdm=False)
        hit = llm.stats()
        assert hit.num_cached_tokens == output.num_cached_tokens > 0
        assert hit.hit_rate == output.num_cached_tokens / 160
        text = str(hit)
        assert text.startswith("requests     0 running, 0 waiting\nKV in RAM    0 of 6 blocks in u")
        assert f"KV offload   0 of {hit.host.num_blocks} blocks" in text
        assert f"{hit.d2h_bytes / 1e6:.1f} MB back" in text
        assert f"{hit.num_cached_tokens} of 160 prompt tokens were found" in text
        assert llm.reset_prefix_cache()
        assert llm.stats().device.num_free == 6


def count(blocks: RequestBlocks, *places: str) -> int:
    return sum(number for place, number in blocks.runs if place in places)


@pytest.mark.parametrize("mode", ["stream", "in_place"])
def test_where_the_blocks_of_requests_lie(tiny: Callable[[str], Path], mode: str) -> None:
    """The map counts what the tiers' own counts say. A prompt of 10 blocks where 6 are on the
    device.
    """
    path = tiny("llama")
    with LLM(path, **offload(path, mode)) as llm:
        assert llm.block_map().requests == ()
        with llm.stream([5] * 80, GREEDY) as stream:
            next(stream)
            at_work = llm.block_map()
        assert llm.block_map().requests == ()
    (blocks,) = at_work.requests
    assert (blocks.status, blocks.num_prompt_tokens, blocks.num_computed) == ("running", 80, 80)
    assert blocks.is_streamed is (mode == "stream")
    assert sum(number for _, number in blocks.runs) == 10
    assert blocks.runs[0][0] in ("device", "both") and count(blocks, "host") > 0
    use, host = at_work.stats.device, at_work.stats.host
    assert count(blocks, "device", "both", "moving") == use.num_used <= 6
    assert count(blocks, "both", "moving", "host") == host.num_used
    assert (at_work.block_size, at_work.block_bytes) == (8, 8 * 3 * 2 * 2 * 16 * 4)


def test_blocks_on_their_way(tiny: Callable[[str], Path]) -> None:
    """A copy to the host that has not ended shows as such; the check of a block's copies is that of
    the reads.
    """
    path = tiny("llama")
    with LLM(path, **offload(path, "stream")) as llm:
        llm.generate([5] * 80, GREEDY, use_tqdm=False)
        stream = llm.stream([5] * 40, GREEDY)  # finds blocks on the host, which go to the device
        next(stream)
        stored = llm.llm_engine.kv.memory.offload.stored
        ended = llm.block_map().requests[0]
        stored.host = {slot: [SimpleNamespace(is_done=lambda: False)] for slot in stored.host}
        begun = llm.block_map().requests[0]
        stored.host = {}
        stream.close()
    assert count(ended, "moving") == 0 < count(ended, "both")
    assert count(begun, "moving") == count(ended, "both")


def test_one_tier_and_a_closed_engine(tiny: Callable[[str], Path]) -> None:
    with LLM(tiny("llama"), num_gpu_blocks=6, **SETTINGS) as llm:
        llm.generate([5] * 20, GREEDY, use_tqdm=False)
        stats = llm.stats()
        assert stats.host is None and "KV offload" not in str(stats) and "copies" not in str(stats)
        assert stats.num_prompt_tokens == 20 and stats.step_sizes == {20: 1, 1: 3}
        assert repr(llm) == f"<LLM {str(tiny('llama'))!r} on cpu, 1 thread, up to 48 tokens>"
    with pytest.raises(EngineClosedError):
        llm.stats()


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_prompt_counts_once_for_its_completions_and_beams(
    tiny: Callable[[str], Path], is_cached: bool
) -> None:
    """None of its own tokens is a hit; what all of them generate counts."""
    caching = {"enable_prefix_caching": is_cached, "num_gpu_blocks": 40}
    with LLM(tiny("llama"), **SETTINGS, **caching) as llm:
        three = replace(GREEDY, n=3, temperature=1.0)
        (several,) = llm.generate([[7] * 40], three, use_tqdm=False)
        llm.beam_search([[6] * 40], beam_width=4, max_tokens=5, ignore_eos=True, use_tqdm=False)
        stats = llm.stats()
        assert stats.num_prompt_tokens == 80 and stats.num_cached_tokens == 0
        assert stats.num_looked_up_tokens == 80 * is_cached and stats.hit_rate == 0
        assert stats.num_output_tokens == 3 * 4 + 1 + 4 * 4
        llm.generate([[7] * 40], replace(three, prompt_logprobs=0), use_tqdm=False)
        assert llm.stats().num_looked_up_tokens == 80 * is_cached  # its tokens are scored
        (again,) = llm.generate([[7] * 40], three, use_tqdm=False)
        stats = llm.stats()
        assert stats.num_cached_tokens == again.num_cached_tokens == 39 * is_cached
        assert stats.num_looked_up_tokens == 120 * is_cached and stats.num_prompt_tokens == 160
    metrics = several.metrics
    assert metrics is not None and metrics.num_tokens == 12 and metrics.num_completions == 3


def test_the_times_of_a_request_are_those_of_all_its_completions() -> None:
    first = RequestMetrics(1.0, 2.0, 3.0, 7.0, num_tokens=5, h2d_bytes=10, num_stalls=2)
    second = RequestMetrics(1.0, 2.5, 3.5, 9.0, num_tokens=7, h2d_bytes=5, num_stalls=1)
    both = first.plus(second)
    assert both == RequestMetrics(
        1.0, 2.0, 3.0, 9.0, num_tokens=12, h2d_bytes=15, num_stalls=2, num_completions=2
    )
    assert (first.tpot_s, both.tpot_s) == (1.0, 1.2)
    unfinished = first.plus(RequestMetrics(1.0))
    assert (unfinished.first_token_time, unfinished.num_tokens) == (3.0, 5)
    assert RequestMetrics(1.0, 2.0, 3.0, 7.0, num_tokens=1).tpot_s is None


def test_of_an_async_engine(tiny: Callable[[str], Path]) -> None:
    async def stats() -> EngineStats:
        async with AsyncLLM(tiny("llama"), num_gpu_blocks=6, **SETTINGS) as llm:
            assert repr(llm).startswith("<AsyncLLM ")
            async for _ in llm.generate([5] * 20, GREEDY):
                check(await llm.stats())
            return await llm.stats()

    assert asyncio.run(stats()).num_prompt_tokens == 20


@pytest.fixture
def notebook_without_widgets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules as a notebook's kernel sees them that has no ipywidgets."""
    shell = SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "ipykernel.zmqshell", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    for name in ("tqdm.auto", "tqdm.autonotebook", "tqdm.notebook"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    progress._bar_class.cache_clear()
    yield
    progress._bar_class.cache_clear()


def test_a_bar_in_a_notebook_without_widgets_is_text_and_warns_of_nothing(
    notebook_without_widgets: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings(record=True) as warned:  # tqdm would catch one that raises
        warnings.simplefilter("always")
        with progress.progress_bar("requests", 2, True) as bar:
            bar.update(2)
    assert warned == []
    assert "requests: 100%" in capsys.readouterr().err


def test_a_bar_shows_how_much_of_the_prompts_is_read(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of those that have not ended, while there is more to read."""
    monkeypatch.setattr(progress, "READ_EVERY_S", 0.0)
    few = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "enable_prefix_caching": False}
    with LLM(tiny("llama"), dtype="float32", num_gpu_blocks=40, **few) as llm:
        llm.generate([[5] * 8, [6] * 100], {"max_tokens": 2, "temperature": 0})
    shown = re.findall(r"(\d+) of (\d+) tokens of prompts read(; in)?", capsys.readouterr().err)
    assert shown[0][1:] == ("108", "") and shown[-1][1:] == ("100", "; in")
    assert [int(done) for done, *_ in shown] == sorted(int(done) for done, *_ in shown)
    assert all(0 < int(done) < int(total) for done, total, _ in shown)


def test_requests_that_wait_are_not_looked_through(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server with thousands of them reads its metrics as fast as an idle one."""
    with LLM(tiny("llama"), max_num_seqs=2, num_gpu_blocks=40, **SETTINGS) as llm:
        for i in range(20):
            llm.llm_engine.add_request([i + 3] * 8, GREEDY)
        llm.llm_engine.step()
        looked_at: list[object] = []
        add = Totals.add

        def noted(totals: Totals, seqs: Iterable[Sequence]) -> Totals:
            looked_at.extend(seqs := [*seqs])
            return add(totals, seqs)

        monkeypatch.setattr(Totals, "add", noted)
        stats = llm.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_output_tokens) == (2, 18, 2)
        assert len(looked_at) <= 3
