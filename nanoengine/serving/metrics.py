"""Metrics: what /metrics shows, with vLLM's names after a prefix.

Gauges and counters are read from the engine's statistics when they are asked for; histograms grow
as requests end. Each server has a registry of its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from nanoengine.api.stats import EngineStats, TierUse
from nanoengine.outputs import RequestOutput
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
    "request_generation_tokens": ("tokens of the texts of a request", TOKENS),
}
LABELS = ("model_name", "engine")
ENGINE = "0"  # vLLM numbers its engines; here there is one


class Metrics:
    """Counts ended requests and writes everything in Prometheus' format."""

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

    def text(self, stats: EngineStats) -> bytes:
        """All metrics, with the engine's of this moment."""
        self._engine.stats = stats
        return generate_latest(self._registry)

    @contextmanager
    def counted(self, stream: TokenStream) -> Iterator[None]:
        """Counts a request when the block ends; one that has neither output nor error by then was
        aborted.
        """
        try:
            yield
        finally:
            if stream.output is not None:
                self._observe(stream.output)
            else:
                self._count_end("abort" if stream.error is None else "error")

    def gap_ended(self, seconds: float, num_tokens: int) -> None:
        """A stream got tokens so long after those before."""
        self._histograms["inter_token_latency_seconds"].observe(seconds / num_tokens)

    def _count_end(self, reason: str) -> None:
        self._ended.labels(**self._labels, finished_reason=reason).inc()

    def _observe(self, output: RequestOutput) -> None:
        for made in output.outputs:
            self._count_end(made.finish_reason or "abort")
        num_out = sum(len(made.token_ids) for made in output.outputs)
        values = _times(output) | {
            "request_prompt_tokens": len(output.prompt_token_ids),
            "request_generation_tokens": num_out,
        }
        for name, value in values.items():
            if value is not None:
                self._histograms[name].observe(value)


def _times(output: RequestOutput) -> dict[str, float | None]:
    """Seconds between the moments of a request; None where one was not reached."""
    metrics = output.metrics
    if metrics is None:
        return {}
    began, first, end = (
        metrics.first_scheduled_time,
        metrics.first_token_time,
        metrics.finished_time,
    )

    def between(start: float | None, stop: float | None) -> float | None:
        return None if start is None or stop is None else stop - start

    return {
        "time_to_first_token_seconds": metrics.ttft_s,
        "request_time_per_output_token_seconds": metrics.tpot_s,
        "e2e_request_latency_seconds": between(metrics.arrival_time, end),
        "request_queue_time_seconds": between(metrics.arrival_time, began),
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
        use, host = stats.device, stats.host
        yield self._gauge("num_requests_running", "requests in the steps", stats.num_running)
        yield self._gauge("num_requests_waiting", "requests in the queue", stats.num_waiting)
        text = "share of the device's KV blocks that requests hold, 0 to 1"
        yield self._gauge("kv_cache_usage_perc", text, use.num_used / use.num_blocks)
        config = GaugeMetricFamily(
            f"{self._prefix}:cache_config_info", "the KV cache", labels=[*LABELS, *self._config]
        )
        config.add_metric([*self._labels, *self._config.values()], 1.0)
        yield config
        yield self._steps(stats.step_sizes)
        yield self._blocks({"device": use} | ({} if host is None else {"host": host}))
        if host is not None:
            text = "share of the host's KV blocks that requests hold, 0 to 1"
            yield self._gauge(
                "kv_offload_cpu_cache_usage_perc", text, host.num_used / host.num_blocks
            )
        for name, text, value in _counters(stats):
            yield self._counter(name, text, value)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        made = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=LABELS)
        made.add_metric(self._labels, value)
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
        ("prefix_cache_queries", "prompt tokens looked up", stats.num_prompt_tokens),
        ("prefix_cache_hits", "those found on the device", on_device),
        ("external_prefix_cache_queries", "prompt tokens looked up", stats.num_prompt_tokens),
        ("external_prefix_cache_hits", "those found on the host", stats.num_host_cached_tokens),
        ("num_preemptions", "running requests that had to wait again", stats.num_preemptions),
        ("kv_offload_h2d_bytes", "KV copied to the device", stats.h2d_bytes),
        ("kv_offload_d2h_bytes", "KV copied to the host", stats.d2h_bytes),
        ("kv_offload_copies", "copies that a step needed", stats.num_copies),
        ("kv_offload_stalls", "those that a step waited for", stats.num_stalls),
        ("spec_decode_num_draft_tokens", "tokens guessed ahead", stats.num_guessed),
        ("spec_decode_num_accepted_tokens", "those that were right", stats.num_accepted),
    ]
