"""Metrics: what /metrics shows, with vLLM's names after a prefix.

Gauges and counters are read from the engine's statistics when they are asked for; histograms grow
with the deltas of streams and the ends of requests. As in vLLM, each completion of a request counts
for itself, but for the times of a request: those are its first completion's. Each server has a
registry of its own.
"""

from __future__ import annotations

import math
import time
from collections import Counter as Counts
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from nanoengine.api.stats import EngineStats, TierUse
from nanoengine.outputs import RequestOutput, StreamDelta
from nanoengine.serving.engine import TokenStream

SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
REQUEST_SECONDS = (
    *(0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS = (1, *(2**e for e in range(3, 15)))
TOKENS = tuple(k * 10.0**e for e in range(6) for k in (1, 2, 5))
HISTOGRAMS = {
    "time_to_first_token_seconds": ("from arrival to the first token", SECONDS),
    "inter_token_latency_seconds": ("between two tokens of a stream", SECONDS),
    "request_time_per_output_token_seconds": ("mean between tokens after the first", SECONDS),
    "e2e_request_latency_seconds": ("from arrival to the end", REQUEST_SECONDS),
    "request_queue_time_seconds": ("from arrival to the first step", REQUEST_SECONDS),
    "request_prefill_time_seconds": ("from the first step to the first token", REQUEST_SECONDS),
    "request_decode_time_seconds": ("from the first token to the end", REQUEST_SECONDS),
    "request_inference_time_seconds": ("from the first step to the end", REQUEST_SECONDS),
    "request_prompt_tokens": ("tokens of a prompt", TOKENS),
    "request_generation_tokens": ("tokens of a text", TOKENS),
}
LABELS = ("model_name", "engine")
NO_LABELS: Mapping[str, str] = {}
# Names of the share of a tier that is in use.
SHARES = {"device": "kv_cache_usage_perc", "host": "kv_offload_cpu_cache_usage_perc"}
ENGINE = "0"  # vLLM numbers its engines; here there is one


@dataclass(slots=True)
class _Open:
    """A request that has not ended. arrival: when it came. last: when each of its texts got its
    last tokens; sizes: how many each has; ended: those that have ended.
    """

    num_prompt: int
    arrival: float
    last: dict[int, float] = field(default_factory=dict)
    sizes: Counts[int] = field(default_factory=Counts)
    ended: set[int] = field(default_factory=set)


class Metrics:
    """Counts requests and writes everything in Prometheus' format."""

    def __init__(self, prefix: str, model: str, kv_config: Mapping[str, str]) -> None:
        """kv_config: sizes of the KV cache, by name."""
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": ENGINE}
        self._engine = _EngineMetrics(prefix, tuple(self._labels.values()), kv_config)
        self._registry.register(self._engine)
        self._histograms = {
            name: Histogram(
                f"{prefix}:{name}", text, LABELS, buckets=buckets, registry=self._registry
            ).labels(**self._labels)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self._ended = Counter(
            f"{prefix}:request_success",
            "requests that ended, by their reason",
            (*LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._open: dict[TokenStream, _Open] = {}

    def text(self, stats: EngineStats) -> bytes:
        """All metrics, with the engine's of this moment."""
        self._engine.stats = stats
        return generate_latest(self._registry)

    @contextmanager
    def counted(
        self, stream: TokenStream, num_prompt: int, num_texts: int, arrival: float
    ) -> Iterator[None]:
        """Counts a request's texts, those that have not ended before at the end of the block; if
        the request has neither output nor error by then, they were aborted. arrival: when it came.
        """
        asked = self._open[stream] = _Open(num_prompt, arrival)
        try:
            yield
        finally:
            del self._open[stream]
            if stream.output is not None:
                self._end_all(asked, stream.output)
            else:
                reason = "abort" if stream.error is None else "error"
                self._count_end(reason, num_texts - len(asked.ended))

    def came(self, stream: TokenStream, deltas: Sequence[StreamDelta]) -> None:
        """A stream got new deltas just now."""
        asked, now = self._open[stream], time.perf_counter()
        if not asked.last and any(delta.token_ids for delta in deltas):
            self._observe("time_to_first_token_seconds", now - asked.arrival)
        for delta in deltas:
            index, num_new = delta.index, len(delta.token_ids)
            asked.sizes[index] += num_new
            if index in asked.last:
                for _ in range(num_new):
                    gap = (now - asked.last[index]) / num_new
                    self._observe("inter_token_latency_seconds", gap)
            if num_new:
                asked.last[index] = now
            if delta.finish_reason is not None:
                self._end(asked, index, delta.finish_reason, asked.sizes[index])

    def _end_all(self, asked: _Open, output: RequestOutput) -> None:
        for made in output.outputs:
            if made.index not in asked.ended:
                self._end(asked, made.index, made.finish_reason or "abort", len(made.token_ids))
        times = _times(output)
        if asked.last:  # it was counted when it came
            times.pop("time_to_first_token_seconds", None)
        for name, value in times.items():
            self._observe(name, value)

    def _end(self, asked: _Open, index: int, reason: str, num_tokens: int) -> None:
        """A text has ended."""
        asked.ended.add(index)
        self._count_end(reason, 1)
        self._observe("request_prompt_tokens", asked.num_prompt)
        self._observe("request_generation_tokens", num_tokens)

    def _count_end(self, reason: str, num_texts: int) -> None:
        self._ended.labels(**self._labels, finished_reason=reason).inc(num_texts)

    def _observe(self, name: str, value: float | None) -> None:
        if value is not None:
            self._histograms[name].observe(value)


def _times(output: RequestOutput) -> dict[str, float | None]:
    """Seconds between the moments of a request; None where one was not reached."""
    metrics = output.metrics
    if metrics is None:
        return {}
    arrival, end = metrics.arrival_time, metrics.finished_time
    began, first = metrics.first_scheduled_time, metrics.first_token_time

    def between(start: float | None, stop: float | None) -> float | None:
        return None if start is None or stop is None else stop - start

    return {
        "time_to_first_token_seconds": metrics.ttft_s,
        "request_time_per_output_token_seconds": metrics.tpot_s,
        "e2e_request_latency_seconds": between(arrival, end),
        "request_queue_time_seconds": between(arrival, began),
        "request_prefill_time_seconds": between(began, first),
        "request_decode_time_seconds": between(first, end),
        "request_inference_time_seconds": between(began, end),
    }


class _EngineMetrics(Collector):
    """Shows EngineStats. stats: those of the moment when metrics are asked for."""

    def __init__(self, prefix: str, labels: tuple[str, ...], kv_config: Mapping[str, str]) -> None:
        self.stats: EngineStats | None = None
        self._prefix = prefix
        self._labels = labels
        self._start = time.time()
        self._config = kv_config

    def collect(self) -> Iterable[Metric]:
        """The metrics of this moment; none before there are statistics."""
        stats = self.stats
        if stats is None:
            return
        yield self._gauge("num_requests_running", "requests in the steps", stats.num_running)
        yield self._gauge("num_requests_waiting", "requests in the queue", stats.num_waiting)
        yield self._gauge("cache_config_info", "the KV cache", 1.0, self._config)
        yield self._steps(stats.step_sizes)
        tiers = {"device": stats.device} | ({} if stats.host is None else {"host": stats.host})
        yield self._blocks(tiers)
        for tier, use in tiers.items():
            text = f"share of the {tier}'s KV blocks that requests hold, 0 to 1"
            yield self._gauge(SHARES[tier], text, use.num_used / use.num_blocks)
        for name, text, value in _counters(stats):
            yield self._counter(name, text, value)

    def _gauge(
        self, name: str, text: str, value: float, more: Mapping[str, str] = NO_LABELS
    ) -> Metric:
        """more: labels and their values."""
        made = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=[*LABELS, *more])
        made.add_metric([*self._labels, *more.values()], value)
        return made

    def _counter(self, name: str, text: str, value: float) -> Metric:
        made = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=LABELS)
        made.add_metric(self._labels, value, created=self._start)
        return made

    def _steps(self, sizes: Mapping[int, int]) -> Metric:
        """A histogram of the tokens of steps."""
        made = HistogramMetricFamily(
            f"{self._prefix}:iteration_tokens_total", "tokens that a step computed", labels=LABELS
        )
        limits = {str(float(most)): most for most in STEP_TOKENS} | {"+Inf": math.inf}
        buckets = [
            (name, float(sum(count for size, count in sizes.items() if size <= most)))
            for name, most in limits.items()
        ]
        made.add_metric(self._labels, buckets, sum(size * count for size, count in sizes.items()))
        return made

    def _blocks(self, tiers: dict[str, TierUse]) -> Metric:
        made = GaugeMetricFamily(
            f"{self._prefix}:kv_blocks", "KV blocks", labels=[*LABELS, "tier", "state"]
        )
        for tier, use in tiers.items():
            states = {"used": use.num_used, "cached": use.num_cached, "free": use.num_free}
            for state, count in states.items():
                made.add_metric([*self._labels, tier, state], count)
        return made


def _counters(stats: EngineStats) -> list[tuple[str, str, float]]:
    """Name, meaning and value of what only grows."""
    on_device = stats.num_cached_tokens - stats.num_host_cached_tokens
    return [
        ("prompt_tokens", "tokens of prompts", stats.num_prompt_tokens),
        ("generation_tokens", "tokens generated", stats.num_output_tokens),
        ("prompt_tokens_cached", "prompt tokens that were cached", stats.num_cached_tokens),
        ("prefix_cache_queries", "prompt tokens looked up", stats.num_looked_up_tokens),
        ("prefix_cache_hits", "those found on the device", on_device),
        ("external_prefix_cache_queries", "prompt tokens looked up", stats.num_looked_up_tokens),
        ("external_prefix_cache_hits", "those found on the host", stats.num_host_cached_tokens),
        ("num_preemptions", "running requests that had to wait again", stats.num_preemptions),
        ("kv_offload_h2d_bytes", "KV copied to the device", stats.h2d_bytes),
        ("kv_offload_d2h_bytes", "KV copied to the host", stats.d2h_bytes),
        ("kv_offload_copies", "copies that a step needed", stats.num_copies),
        ("kv_offload_stalls", "those that a step waited for", stats.num_stalls),
        ("spec_decode_num_draft_tokens", "tokens guessed ahead", stats.num_guessed),
        ("spec_decode_num_accepted_tokens", "those that were right", stats.num_accepted),
    ]
