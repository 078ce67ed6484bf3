"""/metrics and the log's line: the figures are those of the engine and of the requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from driver import fail_copies, host_gib
from live_server import LiveServer, live_server, until
from paced_engine import stepping_as_read, stepping_to_begin
from prometheus_client.parser import text_string_to_metric_families

from nanoengine.api.stats import EngineStats, TierUse
from nanoengine.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamDelta
from nanoengine.serving import report
from nanoengine.serving.metrics import Metrics
from nanoengine.serving.openai_keys import COMPLETIONS
from nanoengine.serving.report import line

PROMPT = [5 + i for i in range(40)]
pytestmark = pytest.mark.usefixtures("threads_as_before")


def figures(server: LiveServer) -> dict[str, dict[tuple[str, ...], float]]:
    """Name -> values of the labels beside model and engine -> value."""
    status, headers, data = server.ask("GET", "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain")
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(data.decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("model_name"), labels.pop("engine")) == ("tiny", "0")
            found.setdefault(sample.name, {})[tuple(labels.values())] = sample.value
    return found


def offload(path: Path) -> dict[str, Any]:
    gib = host_gib(path, 40, 8)
    return {"num_gpu_blocks": 8, "offload_mode": "stream", "kv_offload_gib": gib}


@pytest.fixture(scope="module")
def server(tiny: Callable[[str], Path]) -> Iterator[LiveServer]:
    settings = offload(tiny("llama")) | {"speculative": "ngram:2"}
    with live_server(tiny("llama"), settings, metrics_prefix="vllm") as made:
        yield made
        made.wait_until_idle()


def test_what_requests_did_is_counted(server: LiveServer) -> None:
    before = figures(server)
    assert before["vllm:generation_tokens_total"] == {(): 0}
    asked = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    server.post(COMPLETIONS, **asked)
    with stepping_as_read(server.engine):  # so that there are gaps between its tokens
        server.stream(COMPLETIONS, **asked)
    server.post(COMPLETIONS, **asked | {"max_tokens": 1, "n": 2, "temperature": 1})
    _, whole = server.post(COMPLETIONS, **asked | {"max_tokens": 1})
    cached = whole["usage"]["prompt_tokens_details"]["cached_tokens"]
    after = figures(server)

    def value(name: str, *labels: str) -> float:
        return after[f"vllm:{name}"][labels]

    assert value("num_requests_running") == value("num_requests_waiting") == 0
    assert value("kv_cache_usage_perc") == 0
    assert value("generation_tokens_total") == 60 + 60 + 2 + 1
    assert value("prompt_tokens_total") == 4 * len(PROMPT)
    assert value("prefix_cache_queries_total") == 4 * len(PROMPT)
    assert value("prompt_tokens_cached_total") >= cached > 0
    hits = value("prefix_cache_hits_total") + value("external_prefix_cache_hits_total")
    assert hits == value("prompt_tokens_cached_total")
    assert value("request_success_total", "length") == 5
    assert value("kv_offload_d2h_bytes_total") > 0 < value("kv_offload_h2d_bytes_total")
    assert value("kv_offload_copies_total") >= value("kv_offload_stalls_total")
    drafts = value("spec_decode_num_draft_tokens_total")
    assert drafts >= value("spec_decode_num_accepted_tokens_total")
    blocks = {state: value("kv_blocks", state, "device") for state in ("used", "cached", "free")}
    assert sum(blocks.values()) == 8 and blocks["used"] == 0
    assert ("free", "host") in after["vllm:kv_blocks"]
    info = next(iter(after["vllm:cache_config_info"]))
    assert {"8", str(server.service.facts.max_model_len)} <= set(info)
    for name, count in (
        ("time_to_first_token_seconds", 4),
        ("e2e_request_latency_seconds", 4),
        ("request_queue_time_seconds", 4),
        ("request_prompt_tokens", 5),
        ("request_generation_tokens", 5),
        ("request_time_per_output_token_seconds", 2),
    ):
        assert value(f"{name}_count") == count, name
    assert value("request_prompt_tokens_sum") == 5 * len(PROMPT)
    assert value("request_generation_tokens_sum") == 123
    assert 0 < value("inter_token_latency_seconds_count") < 60
    sizes = server.on_engine(lambda llm: llm.stats().step_sizes)
    steps = after["vllm:iteration_tokens_total_bucket"]
    assert value("iteration_tokens_total_count") == steps["+Inf",] == sum(sizes.values())
    assert value("iteration_tokens_total_sum") == sum(k * n for k, n in sizes.items())
    assert steps["1.0",] == sizes[1] and steps["8.0",] == sum(n for k, n in sizes.items() if k <= 8)


def test_a_client_that_leaves_is_counted_as_an_abort(server: LiveServer) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    before = figures(server)["vllm:time_to_first_token_seconds_count"][()]
    asked |= {"n": 4, "temperature": 1}
    with stepping_to_begin(server.engine):
        with server.connect(COMPLETIONS, **asked, stream=True) as link:
            assert link.recv(100)
        server.wait_until_idle()
    after = figures(server)
    assert after["vllm:request_success_total"]["abort",] == 4
    assert after["vllm:time_to_first_token_seconds_count"][()] == before + 1


class Stream:
    """What Metrics sees of a TokenStream."""

    output: Any = None
    error: Any = None


def delta(index: int, num_tokens: int, reason: str | None = None) -> StreamDelta:
    return StreamDelta(0, index, "a", (1,) * num_tokens, reason)


def values(metrics: Metrics, name: str) -> dict[str, float]:
    """The samples of a histogram or a counter, without buckets: by a part of a name or a reason."""
    families = text_string_to_metric_families(metrics.text(stats(step_sizes={})).decode())
    (family,) = (each for each in families if each.name == f"nanoengine:{name}")
    return {
        sample.labels.get("finished_reason", sample.name.rpartition("_")[2]): sample.value
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_created"))
    }


def test_each_completion_of_a_stream_is_counted_for_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of one that is aborted: its first token, its gaps, and what had ended before."""
    now = 100.0
    monkeypatch.setattr("nanoengine.serving.metrics.time.perf_counter", lambda: now)
    metrics, stream = Metrics("nanoengine", "m", {"a": "b"}), Stream()
    with metrics.counted(stream, num_prompt=7, num_texts=3, arrival=98.0):
        metrics.came(stream, [delta(0, 1), delta(1, 1)])
        assert values(metrics, "time_to_first_token_seconds") == {"count": 1, "sum": 2}
        now = 101.0
        metrics.came(stream, [delta(0, 1), delta(1, 2)])
        assert values(metrics, "inter_token_latency_seconds") == {"count": 3, "sum": 2}
        now = 104.0
        metrics.came(stream, [delta(1, 1, "length"), delta(0, 0)])
        assert values(metrics, "inter_token_latency_seconds") == {"count": 4, "sum": 5}
        assert values(metrics, "request_success") == {"length": 1}
        assert values(metrics, "request_generation_tokens") == {"count": 1, "sum": 4}
    assert values(metrics, "time_to_first_token_seconds") == {"count": 1, "sum": 2}
    assert values(metrics, "request_success") == {"length": 1, "abort": 2}
    assert values(metrics, "request_prompt_tokens") == {"count": 1, "sum": 7}


def test_each_text_of_a_whole_answer_is_counted() -> None:
    metrics, stream = Metrics("nanoengine", "m", {"a": "b"}), Stream()
    with metrics.counted(stream, num_prompt=7, num_texts=2, arrival=0.0):
        made = [CompletionOutput(i, "", [1] * (i + 2), "stop") for i in range(2)]
        times = RequestMetrics(1.0, 2.0, 5.0, 6.0, num_tokens=2)
        stream.output = RequestOutput(0, None, [1] * 7, made, metrics=times)
    assert values(metrics, "request_success") == {"stop": 2}
    assert values(metrics, "request_generation_tokens") == {"count": 2, "sum": 5}
    assert values(metrics, "request_prompt_tokens") == {"count": 2, "sum": 14}
    assert values(metrics, "time_to_first_token_seconds") == {"count": 1, "sum": 4}
    assert values(metrics, "e2e_request_latency_seconds") == {"count": 1, "sum": 5}


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_request_that_fails_is_counted_as_an_error(
    tiny: Callable[[str], Path], is_stream: bool
) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    with live_server(tiny("llama"), offload(tiny("llama"))) as server:
        server.on_engine(lambda llm: fail_copies(llm.llm_engine.device.h2d, set(range(10_000))))
        server.ask("POST", COMPLETIONS, asked | {"stream": is_stream})
        assert figures(server)["nanoengine:request_success_total"] == {("error",): 1}
        server.wait_until_idle()


def stats(**changes: Any) -> EngineStats:
    use = TierUse(num_blocks=10, num_used=5, num_cached=1, num_free=4)
    values: dict[str, Any] = dict.fromkeys(EngineStats.__slots__, 0)
    return EngineStats(**values | {"tiers": ("a", "b"), "device": use, "host": None} | changes)


def test_the_line_of_the_log() -> None:
    before = stats(num_prompt_tokens=100, num_output_tokens=10, num_cached_tokens=30)
    now = stats(
        num_looked_up_tokens=200,
        **{"num_prompt_tokens": 300, "num_output_tokens": 60, "num_running": 2, "num_waiting": 1},
        **{"num_cached_tokens": 80, "num_preemptions": 3},
    )
    assert line(before, now, 10.0) == (
        "Avg prompt throughput: 20.0 tokens/s, Avg generation throughput: 5.0 tokens/s, "
        "Running: 2 reqs, Waiting: 1 reqs, Preemptions: 3, KV cache usage: 50.0%, "
        "Prefix cache hit rate: 25.0%"
    )
    host = TierUse(num_blocks=4, num_used=1, num_cached=0, num_free=3)
    offloaded = stats(host=host, h2d_bytes=20_000_000, d2h_bytes=5_000_000, num_stalls=2)
    assert line(before, offloaded, 10.0).endswith(
        ", Host KV usage: 25.0%, Copies: 2.0 MB/s in, 0.5 MB/s out, 2 waited for"
    )


def test_the_log_is_silent_without_work(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(report, "INTERVAL_S", 0.05)
    with caplog.at_level(logging.INFO, "nanoengine"), live_server(tiny("llama")) as server:
        assert not lines_of(caplog)
        server.post(COMPLETIONS, prompt="a", max_tokens=300, temperature=0, ignore_eos=True)
        until(lambda: lines_of(caplog))
        count = len(lines_of(caplog))
        time.sleep(0.3)
        assert len(lines_of(caplog)) <= count + 1


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [record.getMessage() for record in caplog.records]
    return [text for text in texts if text.startswith("Avg prompt")]
