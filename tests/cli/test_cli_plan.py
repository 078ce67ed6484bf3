"""nanoengine plan: what it prints, its statuses, and that it reads no weights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf_model import GGUFModel

from nanoengine import LLM
from nanoengine.cli.main import FAILED, main
from nanoengine.startup import parts

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
}
GPU_24 = ["--gpu-gib", "24", "--ram-gib", "32"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A config.json and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def plan(
    capsys: pytest.CaptureFixture[str], model: Path | str, *flags: str, status: int = 0
) -> Any:
    assert main(["plan", str(model), *flags, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_two_bars_and_the_settings_that_reach_the_context(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(folder), *GPU_24, "--context", "100000"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and max(map(len, out.splitlines()[1:5])) < 160
    bars = re.findall(r"^(GPU|RAM) +([\d.]+) GiB \[([WSKRx.]{60})\]$", out, re.MULTILINE)
    assert [(name, gib) for name, gib, _ in bars] == [("GPU", "24.0"), ("RAM", "32.0")]
    assert re.fullmatch(r"W{36,38}S+K+R+x+\.*", bars[0][2]) and bars[1][2].startswith("KKKKKKKKKK")
    assert "longest   131,072 tokens" in out and "100,000 tokens; the link's speed" in out
    assert "assumed   GPU memory is read at 300 GB/s (--read-gbps)" in out
    settings = "max_model_len=100000, enable_cpu_offload=True, kv_offload_gib="
    assert f"LLM('{folder}', {settings}" in out
    assert "--max-model-len 100000 --enable-cpu-offload --kv-offload-gib " in out


def test_json_holds_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = plan(capsys, folder, *GPU_24, "--context", "100000", "--link-gbps", "50")
    assert row["settings"]["enable_cpu_offload"] is True and row["refusal"] is None
    assert row["memory"]["GPU"]["bytes"] == 24 << 30 and row["memory"]["RAM"]["kv"] > 6 << 30
    assert row["link_gb_per_s"] == 50 and row["limit"] == "link"
    slow = plan(capsys, folder, *GPU_24, "--context", "100000", "--link-gbps", "25")
    assert row["tokens_per_s"] == pytest.approx(2 * slow["tokens_per_s"], rel=0.01)


def test_a_context_out_of_reach_says_why_and_fails(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--gpu-gib", "24", "--ram-gib", "4"]
    row = plan(capsys, folder, *few, "--context", "90000", status=FAILED)
    assert row["context"] == row["longest"] < 90000
    need = re.search(r"it fits with --ram-gib (\d+), or with .*int8", row["refusal"])
    assert need
    enough = ["--gpu-gib", "24", "--ram-gib", need[1]]
    assert plan(capsys, folder, *enough, "--context", "90000")["refusal"] is None
    rounded = [*few, "--enable-cpu-offload", "--kv-offload-dtype", "int8"]
    assert plan(capsys, folder, *rounded, "--context", "90000")["refusal"] is None
    row = plan(capsys, folder, *GPU_24, "--context", "131073", status=FAILED)
    assert "the model has 131,072 positions" in row["refusal"]


def test_weights_that_do_not_fit_name_what_does(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(folder), "--gpu-gib", "8", "--ram-gib", "16"]) == FAILED
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "the weights take 14.96 GiB in bfloat16" in err
    assert "--quantization int4" in err and "--quantization int8" not in err
    assert main(["plan", str(folder), "--gpu-gib", "2", "--ram-gib", "16"]) == FAILED
    assert "take a smaller model, or a larger GPU (--gpu-gib)" in capsys.readouterr().err
    quantised = ["--gpu-gib", "8", "--ram-gib", "16", "--quantization", "int4"]
    assert plan(capsys, folder, *quantised)["settings"]["quantization"] == "int4"


def test_a_machine_without_a_gpu_has_one_bar(
    tiny: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    row = plan(capsys, tiny("llama"), "--gpu-gib", "0", "--ram-gib", "1")
    assert list(row["memory"]) == ["RAM"] and row["settings"] == {} and row["device"] == "cpu"


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3", "gemma3", "phi3"])
def test_bytes_are_those_of_the_loaded_model(
    name: str, tiny: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--gpu-gib", "0", "--dtype", "float32", "--ram-gib", "1"]
    row = plan(capsys, tiny(name), *flags, "--kv-cache-gib", "0.01")
    with LLM(tiny(name), num_threads=1, **row["settings"]) as llm:
        kv = llm.plan.kv
        assert row["memory"]["RAM"] == {
            "bytes": 1 << 30,
            "weights": llm.plan.weight_bytes,
            "step": llm.plan.activation_bytes,
            "kv": kv.num_blocks * kv.block_bytes,
            "ring": 0,
        }
        assert llm.plan.max_model_len == row["context"]


def test_a_gguf_is_planned_from_its_metadata_and_not_converted(
    tiny: Callable[[str], Path],
    tmp_path: Path,
    fresh_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = GGUFModel(tiny("llama")).write(tmp_path / "model.gguf")
    row = plan(capsys, path, "--gpu-gib", "0", "--dtype", "bfloat16")
    assert [*fresh_cache.iterdir()] == []
    monkeypatch.setattr(parts, "find_kernels", lambda _: (None, ""))  # else compiled once more
    with LLM(path, dtype="bfloat16", num_threads=1) as llm:
        assert row["memory"]["RAM"]["weights"] == llm.plan.weight_bytes
        assert row["longest"] == llm.plan.max_model_len
