"""`nanoengine plan` for several ranks: the bytes that an engine of as many reports on each of them,
and its errors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import needs_compiler, needs_no_gpu, use_our_products
from rank_threads import RankThreads
from tiny_models import TINY

from nanoengine import LLM, ConfigError
from nanoengine.cli.main import FAILED, main
from nanoengine.config.engine import GIB, make_config
from nanoengine.devices import cpu
from nanoengine.kernels import cpu_linear
from nanoengine.loading.model_config import read_model_config
from nanoengine.startup.forecast import Forecaster, Hardware
from nanoengine.startup.plan import MemoryPlan
from nanoengine.workers import following_rank, leading_rank

pytestmark = [needs_compiler, pytest.mark.usefixtures("threads_as_before")]
Tiny = Callable[[str], Path]
ON_CPU = ["--gpu-gib", "0", "--ram-gib", "1"]
THEIRS = "bfloat16 of PyTorch"
HEADS_OF_THREE = {"num_attention_heads": 6, "num_key_value_heads": 3}


@pytest.fixture
def held(in_16_bits: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Ranks are threads; the bytes of weights that each of them but the first reports."""
    found: list[int] = []
    load = following_rank.load_compute_parts

    def loaded(*args: Any) -> Any:
        parts = load(*args)
        found.append(parts.facts.weight_bytes)
        return parts

    monkeypatch.setattr(leading_rank, "WorkerProcesses", RankThreads)
    monkeypatch.setattr(following_rank, "load_compute_parts", loaded)
    yield found


@pytest.fixture
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Products are our own, or PyTorch's, as on a CPU without AVX512-BF16."""
    if request.param == "bfloat16":
        use_our_products(monkeypatch)
    if request.param == THEIRS:
        monkeypatch.setattr(cpu_linear, "is_supported", lambda: False)
        monkeypatch.setattr(cpu, "native_dtype", lambda: (torch.float32, ""))
        return "bfloat16"
    return str(request.param)


def planned(capsys: pytest.CaptureFixture[str], folder: Path, size: int, *flags: str) -> Any:
    flags = (*flags, "--tensor-parallel-size", str(size), "--json")
    assert main(["plan", str(folder), *flags]) == 0
    return json.loads(capsys.readouterr().out)


def reported(plan: MemoryPlan) -> dict[str, int]:
    """What a running rank holds, by the keys of the command."""
    kv = plan.kv
    return {
        "weights": plan.weight_bytes,
        "step": plan.activation_bytes,
        "kv": kv.num_blocks * kv.block_bytes,
        "ring": kv.ring_bytes,
        "states": kv.state_bytes,
        "host_kv": kv.num_host_blocks * kv.host_block_bytes,
    }


@pytest.mark.some(9)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", THEIRS], indirect=True)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3.5", "gemma4-shared", "qwen3-moe"])
def test_each_rank_holds_what_was_forecast(
    tiny: Tiny,
    held: list[int],
    capsys: pytest.CaptureFixture[str],
    name: str,
    size: int,
    dtype: str,
) -> None:
    """4 heads and 2 KV heads: with 4 ranks, two hold the KV of each."""
    flags = [*ON_CPU, "--dtype", dtype, "--kv-cache-gib", "0.02"]
    row = planned(capsys, tiny(name), size, *flags)
    with LLM(tiny(name), num_threads=size, **row["settings"]) as llm:
        assert llm.plan.ranks == size and len(held) == size - 1
        assert row["ranks"][0] == reported(llm.plan)
        assert sorted(each["weights"] for each in row["ranks"][1:]) == sorted(held)
        assert row["context"] == llm.plan.max_model_len
    assert row["together"] == {
        key: sum(each[key] for each in row["ranks"]) for key in row["ranks"][0]
    }
    assert row["together"]["kv"] <= 0.02 * GIB
    bar = row["memory"]["RAM"]
    assert bar["weights"] == row["together"]["weights"] and bar["kv"] == row["together"]["kv"]


def test_parts_may_be_of_several_sizes(
    tmp_path: Path, held: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """96 inner outputs are 2 units of 16 for each of 3 ranks; 64 outputs and 260 tokens are not."""
    settings = TINY["olmo2"].settings | HEADS_OF_THREE
    replace(TINY["olmo2"], settings=settings)(tmp_path)
    row = planned(capsys, tmp_path, 3, *ON_CPU, "--dtype", "float32", "--kv-cache-gib", "0.02")
    with LLM(tmp_path, num_threads=3, **row["settings"]) as llm:
        found = [llm.plan.weight_bytes, *held]
    assert sorted(each["weights"] for each in row["ranks"]) == sorted(found)
    assert row["ranks"][0]["weights"] == found[0] and len({*found}) > 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"], indirect=True)
def test_a_rank_holds_its_head_beside_all_embeddings(
    tmp_path: Path, held: list[int], dtype: str
) -> None:
    """Also where they are the same numbers: the head's products have them in another order."""
    found = []
    for is_tied in (False, True):
        folder = tmp_path / str(is_tied)
        folder.mkdir()
        settings = TINY["llama"].settings | {"tie_word_embeddings": is_tied}
        replace(TINY["llama"], settings=settings)(folder)
        with LLM(folder, tensor_parallel_size=2, dtype=dtype, num_gpu_blocks=8) as llm:
            found.append((llm.plan.weight_bytes, *held))
        held.clear()
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["llama", "qwen3.5"])
def test_who_cannot_be_divided_is_told_what_the_engine_says(
    tiny: Tiny, held: list[int], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size=3 does not divide") as refused:
        LLM(tiny(name), tensor_parallel_size=3, num_threads=1)
    assert main(["plan", str(tiny(name)), *ON_CPU, "--tensor-parallel-size", "3"]) == FAILED
    assert capsys.readouterr().err == f"error: {refused.value}\n"


@needs_no_gpu
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", "float32"),
        ("llama-tied", "float32"),
        ("gemma4-shared", "float32"),
        ("qwen3-moe", "bfloat16"),
    ],
)
def test_gpus_hold_what_was_forecast(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str
) -> None:
    """Ring and host pool, too: each rank has one of its own, kv_offload_gib is that of both."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from virtual_gpu import VirtualGpu
    from virtual_nccl import use_virtual_nccl

    settings: dict[str, Any] = {"tensor_parallel_size": 2, "num_gpu_blocks": 5}
    settings |= {"enable_cpu_offload": True, "kv_offload_gib": 0.01, "slot_tokens": 16}
    settings |= {"kvcache_block_size": 8, "dtype": dtype, "measure_speed": False}
    settings |= {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 128}
    settings |= {"device": "cuda", "attention_backend": "triton"}
    hardware = Hardware(GIB, GIB, 300.0, 25.0)
    model = read_model_config(tiny(name))
    made = Forecaster(make_config("m", settings), model, hardware).forecast(None)
    with VirtualGpu() as first:
        use_virtual_nccl(monkeypatch, [first, first.another()])
        with LLM(tiny(name), **settings) as llm:
            plan = llm.plan
    assert plan.kv.ring_bytes and plan.kv.num_host_blocks
    expected = replace(made.plan.kv, drafts_from=0)  # nobody drafts on a GPU unasked
    assert expected == plan.kv and reported(made.plan) == reported(plan)
    assert made.weights == (plan.weight_bytes,) * 2
