"""nanoengine plan: what it prints, its statuses, and that it reads no weights."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import quantised
import torch
from gguf import GGMLQuantizationType as QuantType
from gguf_model import GGUFModel
from tiny_model import LLAMA_8B

from nanoengine import LLM
from nanoengine.cli import measure
from nanoengine.cli.main import FAILED, MISUSED, main, make_parser
from nanoengine.cli.measure import machine_name
from nanoengine.devices.cpu import default_threads, native_dtype
from nanoengine.kernels.call_tape import CallTape
from nanoengine.kernels.cpu_linear import CpuLinear
from nanoengine.loading.model_config import read_model_config
from nanoengine.startup import parts, probe
from nanoengine.startup.machine_speed import MachineSpeed, remember_speed, remembered_speed

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


def test_the_command_is_one_for_a_shell(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = folder.rename(folder.parent / "Müller's model")
    assert main(["plan", str(model), *GPU_24]) == 0
    command = capsys.readouterr().out.splitlines()[-1].removeprefix("command ")
    assert shlex.split(command)[:3] == ["nanoengine", "chat", str(model)]


def test_the_command_is_one_that_the_parser_takes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "tokenizer.json").write_text("{}")
    model = folder.rename(folder.parent / "my model")
    asked = ["--tokenizer", str(model), "--no-enable-prefix-caching", "--num-gpu-blocks", "9"]
    assert main(["plan", str(model), *GPU_24, *asked]) == 0
    command = capsys.readouterr().out.splitlines()[-1].removeprefix("command ")
    args = make_parser()[0].parse_args(shlex.split(command)[1:])
    assert (args.model, args.tokenizer) == (str(model), str(model))
    assert not args.enable_prefix_caching and args.num_gpu_blocks == 9


def test_letters_that_a_terminal_lacks_are_question_marks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = folder.rename(folder.parent / "Grün 模型")
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="latin-1"))
    assert main(["plan", str(model), *GPU_24]) == 0
    assert "Grün ??: LlamaForCausalLM" in out.getvalue().decode("latin-1")


TWO = ["--tensor-parallel-size", "2"]


def test_what_each_rank_holds_and_all_together(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--gpu-gib", "12", "--ram-gib", "32", "--context", "100000", *TWO]
    assert main(["plan", str(folder), *flags, "--link-gbps", "25,12.5"]) == 0
    out = capsys.readouterr().out
    assert "32 layers, 14.96 GiB of weights in bfloat16" in out
    assert "ranks     2 processes, each on a GPU of its own; the RAM is shared\n" in out
    found = {
        name: [float(gib) for gib in re.findall(r"([\d.]+) GiB", line)]
        for name, line in re.findall(r"^(each|together|fits) +(.*)$", out, re.MULTILINE)
    }
    assert found["together"] == pytest.approx([2 * gib for gib in found["each"]], abs=0.02)
    weights, step, kv, ring, on_host = found["each"]
    assert weights == pytest.approx(14.96 / 2 + 128256 * 4096 / 2**30, abs=0.01)
    gpu, ram = found["fits"]
    kept = 12 * 0.1 + 0.5
    assert weights + step + kv + ring + kept + gpu == pytest.approx(12, abs=0.03)
    assert 2 * on_host + ram == pytest.approx(32, abs=0.02)
    assert "links     copies at 37.5 GB/s together, the slowest at 12.5\n" in out
    assert "gathers between ranks take no time" in out and "--link-gbps" not in out
    assert "LLM(" in out and "tensor_parallel_size=2" in out
    rows = [
        plan(capsys, folder, *flags, "--link-gbps", link) for link in ("25,12.5", "12.5", "25,25")
    ]
    speeds = [row["tokens_per_s"] for row in rows]
    assert speeds[0] == speeds[1] == pytest.approx(speeds[2] / 2, rel=0.01)
    assert rows[0]["links_gb_per_s"] == [25, 12.5] and rows[0]["link_gb_per_s"] == 12.5


def test_a_context_out_of_reach_of_ranks_names_the_ram_of_all(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--gpu-gib", "12", *TWO, "--context", "90000"]
    row = plan(capsys, folder, *few, "--ram-gib", "3", status=FAILED)
    need = re.search(r"it fits with --ram-gib (\d+)", row["refusal"])
    assert need
    assert plan(capsys, folder, *few, "--ram-gib", need[1])["refusal"] is None
    assert main(["plan", str(folder), "--gpu-gib", "6", "--ram-gib", "3", *TWO]) == FAILED
    assert "the weights of a rank take 7.97 GiB in bfloat16, the GPU" in capsys.readouterr().err


def test_a_link_for_each_rank(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder), *GPU_24, *TWO, "--link-gbps", "1,2,3"]) == MISUSED
    assert "has 3 speeds for --tensor-parallel-size 2; give one" in capsys.readouterr().err


def test_gpus_that_are_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two, of which the first is larger; another is like them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda at=0: (0, (48 - 24 * at) << 30))
    for size, gib in (1, 48), (2, 24), (4, 24):
        row = plan(capsys, folder, "--ram-gib", "4", "--tensor-parallel-size", str(size))
        assert row["memory"]["GPU"]["bytes"] == gib << 30
        said = f"{size} GPUs, and 2 can be seen here (--gpu-gib)"
        assert (said in row["assumed"]) == (size > 2)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--device", "cuda"], "no such GPU can be seen here; give --gpu-gib to plan for one"),
        (["--device", "cuda:1"], "device='cuda:1' was asked for"),
        (["--device", "cuda", "--gpu-gib", "0"], "device='cuda' contradicts --gpu-gib 0; leave"),
        (["--device", "cpu", "--gpu-gib", "24"], "device='cpu' contradicts --gpu-gib 24; leave"),
    ],
)
def test_a_device_that_the_machine_lacks_is_refused(
    flags: list[str],
    said: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["plan", str(folder), *flags]) == MISUSED
    out, err = capsys.readouterr()
    assert out == "" and said in err
    assert plan(capsys, folder, *GPU_24, "--device", "cuda", "--context", "9000")


def test_a_cpu_that_is_asked_for_has_no_gpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine that has one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda at=0: (0, 48 << 30))
    for device, name in ("cpu", "cpu"), ("cuda", "cuda"), ("auto", "cuda"):
        row = plan(capsys, folder, "--ram-gib", "80", "--device", device, "--context", "900")
        assert row["device"] == name


def test_json_holds_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = plan(capsys, folder, *GPU_24, "--context", "100000", "--link-gbps", "50")
    assert row["settings"]["enable_cpu_offload"] is True and row["refusal"] is None
    assert row["memory"]["GPU"]["bytes"] == 24 << 30 and row["memory"]["RAM"]["kv"] > 6 << 30
    assert row["link_gb_per_s"] == 50 and row["limit"] == "link"
    slow = plan(capsys, folder, *GPU_24, "--context", "100000", "--link-gbps", "25")
    assert row["tokens_per_s"] == pytest.approx(2 * slow["tokens_per_s"], rel=0.01)


@pytest.mark.parametrize(
    "flags",
    [
        "--dtype float16",
        "--attention-backend triton",
        "--attention-backend c --dtype float32 --activation-dtype int8",
        "--load-format gguf",
        "--tokenizer no-such-folder",
        "--chat-template no-such-file",
    ],
)
def test_what_the_engine_refuses_is_no_plan(
    flags: str, tiny: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny("llama"))
    for command in (["plan", model], ["run", model, "a prompt", "--quiet"]):
        assert main([*command, *flags.split()]) == FAILED
    planned, ran = capsys.readouterr().err.splitlines()
    assert planned == ran and planned.startswith("error: ")


@pytest.mark.usefixtures("fresh_cache")
@pytest.mark.parametrize(
    "flags", ["--quantization int8", "--dtype float32 --activation-dtype int8"]
)
def test_codes_that_need_a_compiler_are_no_plan_without_one(
    flags: str,
    tiny: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    path = str(quantised.mixed_gguf(tiny("llama"), tmp_path / "codes" / "model.gguf", "llama"))
    for command in (["plan", path], ["run", path, "a prompt", "--quiet"]):
        assert main([*command, *flags.split()]) == FAILED
    *_, planned, ran = capsys.readouterr().err.splitlines()
    assert planned == ran and "needs our C kernels on a CPU: no C compiler" in planned


def test_an_mtp_head_that_the_files_lack_is_no_plan(
    tiny: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny("qwen3.5"))
    for command in (["plan", model], ["run", model, "a prompt", "--quiet"]):
        assert main([*command, "--speculative", "mtp:1"]) == FAILED
    planned, ran = capsys.readouterr().err.splitlines()
    assert planned == ran and "came without it: it has no tensor mtp.fc.weight" in planned


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--attention-backend c", "'c' is not for device='cuda', which has triton"),
        ("--attention-backend varlen --device xpu", "'varlen' is not for device='xpu'"),
        ("--attention-backend flash-attn --dtype float32", "needs bfloat16 or float16, not float"),
        ("--activation-dtype int8", "activation_dtype='int8' is for a CPU; leave it out on cuda"),
    ],
)
def test_what_a_gpu_elsewhere_refuses_is_no_plan(
    flags: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(folder), *GPU_24, *flags.split()]) == FAILED
    assert said in capsys.readouterr().err


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


def test_a_context_above_max_model_len_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [str(folder), *GPU_24, "--max-model-len", "4000", "--context"]
    assert main(["plan", *flags, "5000"]) == MISUSED
    assert "--context 5000 is above max_model_len=4000; lower" in capsys.readouterr().err
    assert plan(capsys, *flags, "3000")["settings"]["max_model_len"] == 4000


def test_kv_offload_on_a_cpu_is_left_out_by_name(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--gpu-gib", "0", "--ram-gib", "80", "--context", "1000"]
    row = plan(capsys, folder, *flags, "--kv-offload-gib", "2")
    assert "KV offload is left out: a CPU has one memory" in row["assumed"]
    assert "KV offload" not in str(plan(capsys, folder, *flags)["assumed"])


def test_weights_that_do_not_fit_name_what_does(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(folder), "--gpu-gib", "12", "--ram-gib", "16"]) == FAILED
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "the weights take 14.96 GiB in bfloat16" in err
    assert "take --quantization int8 (lossy; " in err
    assert main(["plan", str(folder), "--gpu-gib", "2", "--ram-gib", "16"]) == FAILED
    assert (
        "take the model in 4 bits (GGUF, AWQ or GPTQ), or a smaller one, or a larger GPU"
        in capsys.readouterr().err
    )
    quantised = ["--gpu-gib", "12", "--ram-gib", "16", "--quantization", "int8"]
    assert plan(capsys, folder, *quantised)["settings"]["quantization"] == "int8"


def test_a_machine_without_a_gpu_has_one_bar(
    tiny: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    row = plan(capsys, tiny("llama"), "--gpu-gib", "0", "--ram-gib", "1")
    assert list(row["memory"]) == ["RAM"] and row["settings"] == {} and row["device"] == "cpu"


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3", "gemma3", "phi3", "qwen3-moe"])
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
            "states": 0,
            "snapshots": 0,
        }
        assert llm.plan.max_model_len == row["context"]


@pytest.mark.usefixtures("fresh_cache")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_a_compiler_weights_are_numbers_and_the_plan_says_so(
    tiny: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    dtype: str,
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    path = GGUFModel(tiny("llama")).write(tmp_path / "model.gguf")
    row = plan(capsys, path, "--gpu-gib", "0", "--ram-gib", "1", "--dtype", dtype)
    assert "PyTorch computes, several times slower than" in row["assumed"][-1]
    with LLM(path, dtype=dtype, num_threads=1) as llm:
        assert row["memory"]["RAM"]["weights"] == llm.plan.weight_bytes
        assert row["memory"]["RAM"]["step"] == llm.plan.activation_bytes
    assert "PyTorch" not in str(plan(capsys, path, "--gpu-gib", "1", "--ram-gib", "1")["assumed"])


@pytest.mark.parametrize(("gpu", "ranks"), [("0", 1), ("0", 2), ("1", 1)])
def test_snapshots_of_states_are_in_the_bar_of_the_ram(
    tiny: Callable[[str], Path], capsys: pytest.CaptureFixture[str], gpu: str, ranks: int
) -> None:
    """Of all ranks: a sixteenth of the RAM, less what is no whole snapshot."""
    flags = ["--gpu-gib", gpu, "--ram-gib", "1", "--tensor-parallel-size", str(ranks)]
    row = plan(capsys, tiny("falcon-h1"), *flags, "--dtype", "bfloat16")
    assert 0.9 < row["memory"]["RAM"]["snapshots"] / (1 << 26) <= 1


def test_of_experts_a_token_reads_those_it_goes_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Qwen3-30B-A3B, whose model card says 30.5B parameters in total and 3.3B activated."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert (
        main(["plan", str(tmp_path), "--dtype", "bfloat16", "--gpu-gib", "0", "--ram-gib", "80"])
        == 0
    )
    out = capsys.readouterr().out
    stored, active = re.findall(r"([\d.]+) GiB of weights \(([\d.]+) GiB for a token\)", out)[0]
    assert float(stored) * 2**29 == pytest.approx(30.5e9, rel=0.01)
    assert float(active) * 2**29 == pytest.approx(3.3e9, rel=0.02)


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
    monkeypatch.setattr(
        parts, "find_kernels", lambda *_, **__: (None, "")
    )  # else compiled once more
    with LLM(path, dtype="bfloat16", num_threads=1) as llm:
        assert row["memory"]["RAM"]["weights"] == llm.plan.weight_bytes
        assert row["longest"] == llm.plan.max_model_len


def test_experts_on_a_gpu_run_in_bfloat16_or_as_codes(
    tiny: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of these, whose 48 inputs are no whole blocks, no codes are made."""
    folder, gpu = str(tiny("mixtral")), ["--gpu-gib", "1", "--ram-gib", "1"]
    for flags in ((), ("--quantization", "int8")):
        assert main(["plan", folder, *gpu, "--dtype", "float32", *flags]) == FAILED
        assert 'bfloat16 only; set dtype="bfloat16" or quant' in capsys.readouterr().err
    assert main(["plan", folder, *gpu, *flags]) == 0


def test_a_model_that_is_no_gguf_has_no_codes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for machine in (GPU_24, ["--gpu-gib", "0", "--ram-gib", "80"]):
        assert main(["plan", str(folder), *machine, "--quantization", "gguf"]) == FAILED
        said = "quantization='gguf': no weight is codes of a GGUF; leave it out"
        assert said in capsys.readouterr().err


def test_codes_on_a_gpu_take_the_bytes_of_the_file(
    tiny: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, saved = GGUFModel(tiny("llama-tied")), 0.0
    for name, values in model.tensors.items():
        if values.ndim == 2:
            is_ffn = "ffn_" in name
            model.types[name] = QuantType.Q4_1 if is_ffn else QuantType.Q8_0
            saved += values.size * (2 - (20 if is_ffn else 34) / 32)
    flags = [model.write(tmp_path / "m.gguf"), "--gpu-gib", "1", "--ram-gib", "1"]
    plain, coded, asked = (
        plan(capsys, *flags, *more)["memory"]["GPU"]["weights"]
        for more in (("--quantization", "none"), (), ("--quantization", "gguf"))
    )
    assert plain - coded == pytest.approx(saved, abs=1) and coded == asked
    for method, said in ("gguf", "codes of a GGUF"), ("none", "bfloat16"):
        assert main(["plan", *map(str, flags), "--quantization", method]) == 0
        assert f"GiB of weights in {said}, 512 positions" in capsys.readouterr().out


def test_fewer_bits_are_named(
    tiny: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--gpu-gib", "1", "--ram-gib", "1", "--quantization", "int8"]
    assert main(["plan", str(tiny("llama")), *flags]) == 0
    assert "of weights in bfloat16 and int8, 512 positions" in capsys.readouterr().out


MEASURED = MachineSpeed("", "2026-11-22", 20.0, 10.0, 0.0, 100.0, False)
HERE = ["--ram-gib", "1", "--context", "200"]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, fresh_cache: Path) -> MachineSpeed:
    """This machine, without a GPU, as it was measured."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return replace(MEASURED, machine=machine_name("", default_threads()))


def test_what_was_measured_here_takes_the_place_of_the_assumptions(
    here: MachineSpeed, tiny: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny("llama")
    assumed = plan(capsys, folder, *HERE)
    assert assumed["measured"] is None and assumed["read_gb_per_s"] == 20
    remember_speed(here)
    row = plan(capsys, folder, *HERE)
    assert row["measured"] == asdict(here) and "--read-gbps" not in str(row["assumed"])
    ram, shape = row["memory"]["RAM"], read_model_config(folder)
    weights = ram["weights"] - shape.vocab_size * shape.hidden_size * 2
    kv = 200 * shape.kv_bytes_per_token(2)
    if native_dtype()[0] is torch.float32:
        weights, kv = weights - shape.vocab_size * shape.hidden_size * 2, 2 * kv
    step_s = weights / 20e9 + kv / 10e9 + shape.num_layers * 100e-6
    assert row["tokens_per_s"] == pytest.approx(1 / step_s, rel=0.01)
    assert main(["plan", str(folder), *HERE]) == 0
    out = capsys.readouterr().out
    assert "measured  on this machine on 2026-11-22: weights are read at 20 GB/s, KV at 10" in out
    assert "other programs" not in out
    remember_speed(replace(here, is_slowed=True))
    assert main(["plan", str(folder), *HERE]) == 0
    assert "so this machine may be faster" in capsys.readouterr().out
    for other in (["--gpu-gib", "24"], ["--read-gbps", "30"], ["--num-threads", "77"]):
        assert plan(capsys, folder, *HERE, *other)["measured"] is None


def test_measure_runs_steps_and_remembers_them(
    here: MachineSpeed,
    tiny: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of smaller shapes than a user's, on a machine that may be busy."""
    monkeypatch.setattr(probe, "is_taken", lambda waiting: False)
    monkeypatch.setattr(probe, "BUDGET_S", 60.0)
    monkeypatch.setattr(probe, "NUM_ROUNDS", 1)
    small = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 1}
    small |= {"num_key_value_heads": 1, "vocab_size": 128}
    monkeypatch.setattr(measure, "THIN", measure.THIN | small | {"num_hidden_layers": 4})
    monkeypatch.setattr(measure, "WIDE", measure.WIDE | small | {"intermediate_size": 1024})
    assert main(["plan", str(tiny("llama")), *HERE, "--measure", "--json"]) == 0
    out, err = capsys.readouterr()
    row = json.loads(out)
    assert err == "measuring decode steps on this machine ...\n"
    assert row["measured"]["machine"] == here.machine and row["measured"]["read_gb_per_s"] > 0
    dtype, share = native_dtype()[0], row["measured"]["held_share"]
    holds_12_bits = CpuLinear.load(CallTape(), dtype=dtype).holds_12_bits
    # Random numbers in float32 fit no bfloat16.
    assert (0.7 < share < 0.9) if holds_12_bits and dtype is torch.bfloat16 else share == 1
    assert plan(capsys, tiny("llama"), *HERE)["measured"] == row["measured"]


@pytest.mark.parametrize("flags", [["--gpu-gib", "24"], ["--read-gbps", "3"]])
def test_measure_is_of_this_machine_alone(
    here: MachineSpeed, flags: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(folder), "--measure", *flags]) == MISUSED
    assert "--measure measures this machine" in capsys.readouterr().err


def test_a_busy_machine_is_not_measured(
    here: MachineSpeed,
    tiny: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    monkeypatch.setattr(measure, "THIN", measure.THIN | small)
    monkeypatch.setattr(probe, "is_taken", lambda waiting: True)
    assert main(["plan", str(tiny("llama")), *HERE, "--measure"]) == FAILED
    assert "measured while other programs use the processor" in capsys.readouterr().err
    assert remembered_speed(here.machine) is None
