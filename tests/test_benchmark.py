"""Every benchmark runs on a tiny model, and its figures say what the work was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanoengine.benchmark import main

Tiny = Callable[[str], Path]


@pytest.fixture
def bench(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    def run(*arguments: str) -> dict[str, Any]:
        json_path = tmp_path / "result.json"
        common = ["--model", str(tiny("llama")), "--dtype", "float32", "--json", str(json_path)]
        main([*arguments, *common])
        result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert json.loads(json_path.read_text()) == result
        assert result["versions"]["torch"] and result["workload"]["seed"] == 0
        return result

    return run


SMALL = ("--kvcache-block-size", "8", "--kv-offload-gib", "0.01")


def test_offline(bench: Callable[..., Any]) -> None:
    arguments = ["--num-seqs", "3", "--min-input", "4", "--max-input", "9"]
    result = bench("offline", *arguments, "--min-output", "5", "--max-output", "5")
    assert result["workload"]["output_tokens"] == 15 and result["output_tokens_per_s"] > 0


def test_offload(bench: Callable[..., Any]) -> None:
    sizes = ["--input-len", "60", "--output-len", "5", "--num-gpu-blocks", "3"]
    result = bench("offload", *sizes, *SMALL)
    assert all(result[mode]["first_difference"] == [None] for mode in ("in_place", "stream"))
    assert result["stream"]["h2d_gb"] >= 0 and result["stream"]["peak_streamed"] == 1
    assert result["resident"]["peak_streamed"] == 0


def test_scaling(bench: Callable[..., Any]) -> None:
    tiny_budget = ["--kv-cache-gib", "0.01"]
    result = bench(
        "scaling", "--batches", "1", "3", "--contexts", "40", "200", "9000", *tiny_budget
    )
    rows = {(row["batch"], row["context"]): row for row in result["rows"]}
    assert len(rows) == 6 and result["limits"]["read_gb_per_s"] > 0
    assert rows[3, 200]["tokens_per_s"] > 0 and 0 < rows[3, 200]["share_of_read"] < 1
    assert rows[3, 9000]["tokens_per_s"] is None, "more than the KV budget holds"


def test_shared_prefix(bench: Callable[..., Any]) -> None:
    sizes = ["--input-len", "64", "--own-len", "3", "--num-seqs", "4", "--output-len", "3"]
    result = bench("prefix", *sizes, "--num-gpu-blocks", "10", *SMALL)
    for mode in ("resident", "in_place", "stream"):
        assert result[mode]["cold"]["cached_tokens"] == 3 * 64, "all but the first found it"
        assert result[mode]["warm"]["cached_tokens"] == 4 * 64
    assert result["resident"]["warm"]["host_cached_tokens"] == 0
    assert result["stream"]["warm"]["host_cached_tokens"] > 0


def test_preemption(bench: Callable[..., Any]) -> None:
    sizes = ["--input-len", "90", "--num-gpu-blocks", "4", "--rounds", "2"]
    result = bench("preempt", *sizes, *SMALL)
    for mode in ("in_place", "stream"):
        assert len(result[mode]["resume_s"]) == len(result[mode]["recompute_s"]) == 2
        assert result[mode]["recompute_to_resume"] > 0


def test_fairness(bench: Callable[..., Any]) -> None:
    sizes = ["--input-len", "400", "--num-gpu-blocks", "40", "--output-len", "6"]
    small = ["--max-num-batched-tokens", "128", "--kvcache-block-size", "4"]
    result = bench("fairness", *sizes, *small, "--kv-offload-gib", "0.01")
    assert result["arrival during a prefill"]["num_steps"] <= 2
    assert result["arrival during a prefill"]["prefill_left"] > 0
    assert result["no budget"]["streamed_part"] == 1.0 >= result["budget"]["streamed_part"] > 0
