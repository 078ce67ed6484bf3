"""Every benchmark runs on a tiny model, and its figures say what the work was."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import reference, reference_logits
from driver import assert_all_free
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from benchmarks.main import main
from benchmarks.quantization import ROOT, TEXT, perplexity
from nanoengine import LLM, ConfigError, PromptTooLongError
from nanoengine.config.engine import EngineConfig
from nanoengine.loading.find_model import resolve_model
from nanoengine.loading.packaged import DEMO_MODEL as MODEL
from nanoengine.loading.packaged import packaged_gguf
from nanoengine.startup import probe
from nanoengine.text.tokenizer import Tokenizer

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


PROGRAM = [sys.executable, str(ROOT / "bench.py")]
SMALL = ("--kvcache-block-size", "8", "--kv-offload-gib", "0.01")


def test_offline(bench: Callable[..., Any]) -> None:
    arguments = ["--num-seqs", "3", "--min-input", "4", "--max-input", "9"]
    result = bench("offline", *arguments, "--min-output", "5", "--max-output", "5")
    assert result["workload"]["output_tokens"] == 15 and result["output_tokens_per_s"] > 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["offline", "--num-seqs", "1", "--min-input", "600", "--max-input", "600"],
        ["offload", "--num-seqs", "1", "--input-len", "600", *SMALL],
    ],
)
def test_what_no_request_can_be_has_no_speed(
    bench: Callable[..., Any], arguments: list[str]
) -> None:
    """The model has 512 positions."""
    with pytest.raises(PromptTooLongError, match="600"):
        bench(*arguments)


@pytest.mark.parametrize("number", ["0", "-1", "x"])
def test_counts_begin_with_1(
    bench: Callable[..., Any], capsys: pytest.CaptureFixture[str], number: str
) -> None:
    for arguments in (["offline", "--num-seqs"], ["offload", "--input-len"]):
        with pytest.raises(SystemExit):
            bench(*arguments, number)
        said = f"argument {arguments[1]}: must be an integer from 1 to 2147483647, got {number!r}"
        assert said in capsys.readouterr().err


def test_least_and_longest_are_checked_before_the_model_is_loaded() -> None:
    """Also where one of them is a default."""
    for work, model in (("offline", ["--model", "none"]), ("serve", [])):
        for arguments, said in (
            (
                ["--max-input", "32"],
                r"--min-input \d+ is above --max-input 32; lower --min-input, or",
            ),
            (["--min-output", "2000"], "--min-output 2000 is above --max-output"),
        ):
            with pytest.raises(ConfigError, match=said):
                main([work, *model, *arguments])


def test_an_error_is_one_line() -> None:
    command = [*PROGRAM, "offline", "--model", "none", "--min-output", "2000"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.startswith("error: --min-output 2000 is above")
    assert done.stderr.count("\n") == 1 and not done.stdout


def test_offload(bench: Callable[..., Any]) -> None:
    sizes = ["--input-len", "60", "--output-len", "5", "--num-gpu-blocks", "3"]
    result = bench("offload", *sizes, *SMALL)
    assert all(result[mode]["first_difference"] == [None] for mode in ("in_place", "stream"))
    assert result["stream"]["h2d_gb"] >= 0 and result["stream"]["peak_streamed"] == 1
    assert result["resident"]["peak_streamed"] == 0


@pytest.mark.breadth
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


def test_what_is_shared_crosses_the_link_once(bench: Callable[..., Any]) -> None:
    sizes = ["--input-len", "160", "--own-len", "3", "--num-seqs", "4", "--output-len", "5"]
    result = bench("sharing", *sizes, "--num-gpu-blocks", "8", *SMALL)
    alone = result["one question"]["link_mb_a_token"]
    for together in (result["questions"], result["samples"]):
        assert 0 < together["link_mb_a_token"] < 0.4 * alone


def test_preemption(bench: Callable[..., Any]) -> None:
    sizes = ["--input-len", "90", "--num-gpu-blocks", "4", "--rounds", "2"]
    result = bench("preempt", *sizes, *SMALL)
    for mode in ("in_place", "stream"):
        assert len(result[mode]["resume_s"]) == len(result[mode]["recompute_s"]) == 2
        assert result[mode]["recompute_to_resume"] > 0


def test_fairness(bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget of a step is set here: measured on a busy machine, it may be any."""
    really_budget = probe.stream_budget

    def budget(config: EngineConfig, *measured: Any) -> int | None:
        return really_budget(config, *measured) if config.stream_mib_per_step else 30

    monkeypatch.setattr(probe, "stream_budget", budget)
    sizes = ["--input-len", "400", "--num-gpu-blocks", "40", "--output-len", "20"]
    small = ["--max-num-batched-tokens", "128", "--kvcache-block-size", "4"]
    result = bench("fairness", *sizes, *small, "--kv-offload-gib", "0.01")
    assert result["arrival during a prefill"]["num_steps"] <= 2
    assert result["arrival during a prefill"]["prefill_left"] > 0
    assert result["no budget"]["streamed_part"] == 1.0
    assert 0.2 < result["budget"]["streamed_part"] < 0.4, "30 of some 100 blocks a step"


QUANT = ("quantization", "--input-len", "20", "--context", "9", "--max-text-tokens", "300")


def test_quantization(
    bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process for each row; here each is a call."""

    really_run = subprocess.run

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        if command[:2] != PROGRAM:
            return really_run(command, **options)
        capsys.readouterr()
        main(command[2:])
        return subprocess.CompletedProcess(command, 0, capsys.readouterr().out)

    monkeypatch.setattr(subprocess, "run", run)
    none, int8 = bench(*QUANT, "--methods", "none", "int8")["rows"]
    assert (none["method"], none["quantization"], int8["method"]) == ("none", "", "int8")
    assert "int8 (lossy)" in int8["quantization"]
    assert int8["weight_mib"] < none["weight_mib"] and int8["perplexity"] != none["perplexity"]
    for row in (none, int8):
        assert row["text_tokens"] == 300 and row["peak_mib"] > 0 < row["prefill_tokens_per_s"]
        assert row["decode_tokens_per_s_1"] > 0 < row["decode_tokens_per_s_8"]


def test_perplexity_is_transformers(tiny: Tiny) -> None:
    path, ids = tiny("llama"), [i * i * 7 % 256 for i in range(200)]
    losses = cross_entropy(reference_logits(reference(path), ids)[:-1], torch.tensor(ids[1:]))
    with LLM(path, dtype="float32", kvcache_block_size=8, num_gpu_blocks=30) as llm:
        for _ in range(2):  # and it leaves nothing behind
            assert perplexity(llm, ids) == pytest.approx(math.exp(losses), rel=1e-4)
            llm.llm_engine.kv.check()
        with pytest.raises(PromptTooLongError, match="300 tokens"):
            perplexity(llm, ids + ids[:100])
        assert_all_free(llm.llm_engine)


@pytest.fixture(scope="module")
def real_perplexity() -> float:
    """transformers' in fp32, its weights rounded to bfloat16 as ours are."""
    path = packaged_gguf(MODEL)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    ids = Tokenizer.from_folder(resolve_model(MODEL)).encode(TEXT.read_text(encoding="utf-8"))
    losses = cross_entropy(reference_logits(model, ids)[:-1], torch.tensor(ids[1:]))
    return math.exp(losses)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "method", "least", "most"),
    [
        ("float32", None, 0.999, 1.001),
        ("bfloat16", None, 0.99, 1.01),
        ("float32", "int8", 0.99, 1.01),
        ("bfloat16", "int8", 0.99, 1.01),
        ("float32", "gguf", 0.99, 1.01),
        ("bfloat16", "gguf", 0.99, 1.01),
    ],
)
def test_perplexity_of_the_real_model(
    real_perplexity: float, dtype: str, method: str | None, least: float, most: float
) -> None:
    settings = {"dtype": dtype, "quantization": method, "kv_cache_gib": 0.2}
    with LLM(MODEL, max_num_seqs=4, **settings) as llm:
        found = perplexity(llm, llm.tokenizer.encode(TEXT.read_text(encoding="utf-8")))
    print(f"{dtype} {method}: {found:.4f}, transformers fp32 {real_perplexity:.4f}")
    assert least < found / real_perplexity < most
