"""The harness of `bench.py compare`, with peers that are small scripts in place of interpreters.

A fake peer is started like a real one, `PYTHON peers.py KIND WORK.json`, and answers as told.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_model import GGUFModel
from marks import needs_compiler

from benchmarks import compare as benchmark_compare
from benchmarks import gguf_files, peers
from benchmarks import limits as benchmark_limits
from benchmarks import main as benchmark
from benchmarks.compare import (
    WORKS,
    Kind,
    Peer,
    make_rows,
    make_work,
    run_rounds,
)
from benchmarks.limits import (
    Limits,
    Model,
    decode_steps,
    measure_limits,
    share_of_limits,
)
from nanoengine import LLM, SamplingParams
from nanoengine.config.model import ExpertsConfig, ModelConfig, RecurrentConfig, RopeConfig
from nanoengine.errors import ConfigError
from nanoengine.loading.find_model import read_config_of

FAKE = """
import json, os, sys, time
script, kind, task = sys.argv[1:]
work = json.load(open(task))
log = {log!r}
with open(log, "a") as file:
    print({name!r}, file=file)
call = open(log).read().split().count({name!r}) - 1

def answer(seconds, outputs=None, version="1"):
    print(json.dumps({{"event": "first token"}}))
    outputs = outputs or [[7] * n for n in work["max_tokens"]]
    run = {{"seconds": seconds, "input_tokens": [len(p) for p in work["prompts"]],
           "num_cached": [0] * len(outputs), "outputs": outputs}}
    parts = {{name: run for name in work["parts"]}}
    print(json.dumps({{"version": version, "peak_memory_mib": 10.0 + call, "parts": parts}}))

{body}
"""
KIND = Kind("output_tokens_per_s", (2, 3, 3, 4, 4))
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=1000,
    hidden_size=8,
    intermediate_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    rms_norm_eps=1e-5,
    max_position=512,
    tie_word_embeddings=True,
    rope=RopeConfig(10000.0),
)
LAYERS = 2 * (2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 16)  # q and o, k and v, MLP
HEAD = 8 * 1000
MODEL = Model(CONFIG, 0, Limits(10.0, matmul_gflop_per_s=100.0, int8_gflop_per_s=400.0))

MakeFake = Callable[..., str]


@pytest.fixture
def fake(tmp_path: Path) -> MakeFake:
    """A function from a name and the body of a fake engine to its "interpreter"."""

    def make(name: str, body: str) -> str:
        source = tmp_path / f"{name}.py"
        source.write_text(FAKE.format(log=str(tmp_path / "log"), name=name, body=body))
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I "{source}" "$@"\n')
        program.chmod(0o755)
        return str(program)

    return make


def peer(name: str, python: str, **more: Any) -> Peer:
    return Peer(name, name, python, "", **more)


def work(kind: Kind = KIND) -> peers.Work:
    args = argparse.Namespace(seed=0, num_threads=1, dtype="bfloat16", weights="numbers")
    return make_work(kind, args, CONFIG.vocab_size)


def rows_of(
    several: list[Peer], rounds: int = 1, kind: Kind = KIND, **more: Any
) -> list[dict[str, Any]]:
    runs = run_rounds(several, work(kind), rounds, timeout_s=60, **more)
    return make_rows(kind, kind.parts[0], several, runs, MODEL)


def test_engines_take_turns(fake: MakeFake, tmp_path: Path) -> None:
    several = [peer(n, fake(n, "answer(1)")) for n in ("nanoengine", "vllm", "openvino")]
    rows_of(several, rounds=2)
    assert (tmp_path / "log").read_text().split() == [p.name for p in several] * 2


def test_a_discarded_round_runs_first_and_is_not_counted(fake: MakeFake, tmp_path: Path) -> None:
    ours = peer("nanoengine", fake("nanoengine", "answer([9, 1, 2][call])"))
    (row,) = rows_of([ours], rounds=2, discard=True)
    assert (tmp_path / "log").read_text().split() == ["nanoengine"] * 3
    assert row["rounds"] == [8.0, 4.0]


def test_medians_ratios_and_their_spread(fake: MakeFake) -> None:
    ours = peer("nanoengine", fake("nanoengine", "answer([1, 2, 4][call])"))
    other = peer("vllm", fake("vllm", "answer([4, 4, 2][call])"))
    mine, theirs = rows_of([ours, other], rounds=3)
    # 8 tokens each.
    assert mine["output_tokens_per_s"] == {"median": 4.0, "min": 2.0, "max": 8.0}
    assert theirs["rounds"] == [2.0, 2.0, 4.0]
    assert theirs["ratio"] == {"median": 2.0, "min": 0.5, "max": 4.0}
    assert "ratio" not in mine
    assert theirs["note"] == "2 of 2 first tokens equal"
    assert (theirs["input_tokens"], theirs["output_tokens"]) == (6, 8)
    assert theirs["peak_memory_mib"] == 12  # the largest
    assert theirs["version"] == "1"


def test_for_seconds_the_ratio_is_turned(fake: MakeFake) -> None:
    several = [
        peer("nanoengine", fake("nanoengine", "answer(2)")),
        peer("vllm", fake("vllm", "answer(3)")),
    ]
    _, theirs = rows_of(several, kind=Kind("seconds", KIND.shape))
    assert theirs["seconds"]["median"] == 3.0
    assert theirs["ratio"]["median"] == 1.5


def test_rows_of_8_bits_have_their_own_limit(fake: MakeFake) -> None:
    python = fake("nanoengine", "answer(0.5)")
    coded = [peer("nanoengine", python, weights="q4_0", activations=each) for each in ("", "int8")]
    exact, rounding = (rows_of([each])[0]["share_of_matmul"] for each in coded)
    assert rounding == pytest.approx(exact / 4, rel=2e-3) and exact > 0


def test_prefill_counts_prompt_tokens(fake: MakeFake) -> None:
    (row,) = rows_of(
        [peer("nanoengine", fake("nanoengine", "answer(0.5)"))],
        kind=Kind("input_tokens_per_s", KIND.shape),
    )
    assert row["input_tokens_per_s"]["median"] == 12.0


def test_a_start_is_timed_from_outside(fake: MakeFake) -> None:
    """What a worker says about its own seconds does not count; a slow start does."""
    ours = peer("nanoengine", fake("nanoengine", "answer(1000)"))
    other = peer("vllm", fake("vllm", "time.sleep(0.7)\nanswer(1000)\ntime.sleep(0.7)"))
    kind = Kind("seconds", KIND.shape, is_warm=False)
    mine, theirs = rows_of([ours, other], kind=kind)
    took, slow = mine["seconds"]["median"], theirs["seconds"]["median"]
    assert took < 100 and 0.7 <= slow < 100
    assert theirs["ratio"]["median"] == pytest.approx(slow / took, rel=0.02)
    assert "share_of_limit" not in mine


@pytest.mark.parametrize(
    ("outputs", "theirs"),
    [
        ("[[7, 7, 7, 7], [7, 7, 7]]", "6 in and 7 out there"),
        ("[[7, 7, 7], [7, 7, 7, 7, 7]]", "6 in and 8 out there"),  # the same sum
    ],
)
def test_no_ratio_where_token_counts_differ(fake: MakeFake, outputs: str, theirs: str) -> None:
    several = [
        peer("nanoengine", fake("nanoengine", "answer(1)")),
        peer("vllm", fake("vllm", f"answer(1, {outputs})")),
    ]
    row = rows_of(several)[1]
    assert "ratio" not in row
    assert row["note"] == f"no ratio: token counts differ, 6 in and 8 out here, {theirs}"


def test_counts_that_differ_in_a_later_round_count(fake: MakeFake) -> None:
    several = [
        peer("nanoengine", fake("nanoengine", "answer(1)")),
        peer("vllm", fake("vllm", "answer(1, [None, [[7], [7]]][call])")),
    ]
    assert "token counts differ" in rows_of(several, rounds=2)[1]["note"]


def test_no_ratio_at_another_precision(fake: MakeFake) -> None:
    python = fake("vllm", "answer(1, [[7] * 4, [8] * 4])")
    several = [
        peer("nanoengine", fake("nanoengine", "answer(1)")),
        peer("vllm", python, weights="Q4_1"),
        peer("openvino", python, weights="F16", kv="default"),
        peer("llama.cpp", python, weights="F16"),
    ]
    _, small, cached, equal = rows_of(several)
    of_small = "weights Q4_1, KV bf16, activations of 8 bits"
    for row, precision in ((small, of_small), (cached, "weights F16, KV u8")):
        assert "ratio" not in row
        assert row["precision"] == precision
        assert row["note"] == "no ratio: not at equal precision; 1 of 2 first tokens equal"
    assert equal["ratio"]["median"] == 1.0


def test_codes_are_compared_with_the_same_codes(fake: MakeFake) -> None:
    python = fake("peer", "answer(1)")

    def with_file(name: str, kind: str, weights: str = "Q4_0", kv: str = "bf16") -> Peer:
        return Peer(name, kind, python, "", weights, kv).with_kv("f32")

    several = [
        with_file("nanoengine", "nanoengine"),
        with_file("llama.cpp Q4_0", "llama.cpp"),
        with_file("openvino Q4_0, KV bf16", "openvino"),
        with_file("openvino Q4_0, KV u8", "openvino", kv="default"),
        with_file("llama.cpp Q4_1", "llama.cpp", "Q4_1"),
        with_file("vllm", "vllm", "BF16"),
    ]
    rows = rows_of(several)
    compared = [row["engine"] for row in rows if "ratio" in row]
    assert compared == ["llama.cpp Q4_0", "openvino Q4_0, KV f32"]
    assert [row["precision"] for row in rows[:4]] == [
        "weights Q4_0, KV f32",
        "weights Q4_0, KV f32, activations of 8 bits",
        "weights Q4_0, KV f32",
        "weights Q4_0, KV u8, activations of 8 bits",
    ]


def test_a_peer_that_rounds_stands_beside_ours_that_does(fake: MakeFake) -> None:
    """And beside the exact one, whose figure is another here."""

    def with_file(kind: str, seconds: int, activations: str = "") -> Peer:
        name, python = kind + activations, fake(kind + activations, f"answer({seconds})")
        return Peer(name, kind, python, "", "Q4_0", "bf16", activations)

    several = [
        with_file("nanoengine", 4),
        with_file("nanoengine", 1, "int8"),
        with_file("llama.cpp", 2),
        with_file("openvino", 8),
        with_file("openvino", 4, "int8"),
    ]
    rows = {row["engine"]: row for row in rows_of(several)}
    assert {name: row["ratio"]["median"] for name, row in rows.items() if "ratio" in row} == {
        "llama.cpp": 2.0,
        "openvino": 2.0,
        "openvinoint8": 4.0,
    }
    assert rows["llama.cpp"]["ratio_to_exact"]["median"] == 0.5
    assert "ratio_to_exact" not in rows["openvino"]


def test_our_weights_are_those_of_the_file(tmp_path: Path) -> None:
    file = small_gguf(tmp_path / "a.gguf", gguf.LlamaFileType.MOSTLY_Q4_1)
    assert benchmark_compare.own_peer(str(file), "stored", "f32").weights == "Q4_1"
    assert benchmark_compare.own_peer(str(file), "numbers", "f32").weights == "BF16"
    with pytest.raises(ConfigError, match="is no GGUF"):
        benchmark_compare.own_peer(str(tmp_path), "stored", "f32")


def test_random_weights_of_a_shape_are_a_model(
    tiny: Callable[[str], Path], fresh_cache: Path, tmp_path: Path
) -> None:
    source = GGUFModel(tiny("llama"))  # PyPI's reader takes 2 s for the words of a real one
    source.settings["llama.vocab_size"] = len(source.tokens)
    for kind in ("key", "value"):
        source.settings[f"llama.attention.{kind}_length"] = 32
    source.write(tmp_path / "source.gguf")
    file, shape = tmp_path / "a.gguf", gguf_files.Shape(1, 64, 2, 32, 96, num_kv_heads=1)
    gguf_files.write_random(shape, tmp_path / "source.gguf", file, "Q4_0")
    assert gguf_files.weights_of(file) == "Q4_0"
    with LLM(file, max_model_len=32, num_gpu_blocks=1) as llm:
        (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 2
    config = read_config_of(file)
    sizes = (config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size)
    assert sizes == (2, 1, 32, 96)
    down = next(t for t in gguf.GGUFReader(file).tensors if t.name == "blk.0.ffn_down.weight")
    values = gguf.quants.dequantize(down.data, down.tensor_type)
    assert values.shape == (64, 96)
    assert 0.018 < values.std() < 0.022


def test_a_crash_is_told_and_the_others_go_on(fake: MakeFake, tmp_path: Path) -> None:
    crash = "print('x' * 5000 + 'out of luck', file=sys.stderr)\nsys.exit(3)"
    several = [
        peer("nanoengine", fake("nanoengine", "answer(1)")),
        peer("vllm", fake("vllm", crash)),
        peer("openvino", fake("openvino", "answer(2)")),
    ]
    mine, crashed, other = rows_of(several, rounds=2)
    assert crashed["error"].startswith("vllm ended with 3, its last words:\nxxx")
    assert crashed["error"].endswith("out of luck")
    assert len(crashed["error"]) < 2100
    assert len(mine["rounds"]) == len(other["rounds"]) == 2
    assert other["ratio"]["median"] == 2.0
    assert (tmp_path / "log").read_text().split().count("vllm") == 1


def test_our_own_crash_leaves_the_peers_figures(fake: MakeFake) -> None:
    several = [
        peer("nanoengine", fake("nanoengine", "sys.exit('broken')")),
        peer("vllm", fake("vllm", "answer(2)")),
    ]
    mine, theirs = rows_of(several)
    assert mine["error"].endswith("broken")
    assert theirs["output_tokens_per_s"]["median"] == 4.0
    assert theirs["note"] == "no ratio: nanoengine failed"


@pytest.mark.parametrize("body", ["", 'print(\'{"event": "first token"}\')', "print('no json')"])
def test_a_worker_that_says_nothing_has_failed(fake: MakeFake, body: str) -> None:
    (row,) = rows_of([peer("nanoengine", fake("nanoengine", body))])
    assert row["error"] == "nanoengine ended with 0, its last words:\n(none)"


def test_a_worker_that_hangs_is_stopped(fake: MakeFake) -> None:
    body = "print('waiting', file=sys.stderr, flush=True)\ntime.sleep(600)"
    hanging = peer("nanoengine", fake("nanoengine", body))
    for timeout_s in (1.0, 4.0, 60.0):  # a busy machine may need longer to start it
        runs = run_rounds([hanging], work(), 1, timeout_s=timeout_s)
        said = f"nanoengine took more than {timeout_s:g} s, its last words:\n"
        assert runs["nanoengine"] in (f"{said}waiting", f"{said}(none)")
        if runs["nanoengine"].endswith("waiting"):
            return
    pytest.fail(f"it did not start: {runs}")


def test_a_run_that_is_ended_leaves_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; print('{}', flush=True); time.sleep(20)"],
        stdout=subprocess.PIPE,
        text=True,
    )

    def ended(lines: Iterable[str], start: float) -> object:
        raise SystemExit  # as SIGTERM does

    monkeypatch.setattr(benchmark_compare, "_read", ended)
    with pytest.raises(SystemExit):
        benchmark_compare._listen(process, 0.0, 600.0)
    assert process.returncode == -signal.SIGKILL


def test_a_foreign_interpreter_sees_none_of_our_packages(
    fake: MakeFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    (row,) = rows_of(
        [peer("vllm", fake("vllm", "answer(1, version=os.environ.get('PYTHONPATH', 'none'))"))]
    )
    assert row["version"] == "none"


def test_prompts_are_a_function_of_seed_and_sizes() -> None:
    first, second = work(WORKS["prefix"]), work(WORKS["prefix"])
    assert first == second
    assert len(first.prompts) == 16
    assert {len(prompt) for prompt in first.prompts} == {2048 + 32}
    assert len({tuple(prompt[:2048]) for prompt in first.prompts}) == 1
    assert len({tuple(prompt[2048:]) for prompt in first.prompts}) == 16
    assert first.parts == ["cold", "warm"]
    assert first.prefix_caching
    assert not work().prefix_caching
    assert all(prompt != first.prompts[0][:64] for prompt in first.warm_up)


def test_the_works_are_those_of_the_table() -> None:
    offline = work(WORKS["offline"])
    assert len(offline.prompts) == 32
    assert all(64 <= len(prompt) <= 512 for prompt in offline.prompts)
    assert all(64 <= count <= 256 for count in offline.max_tokens)
    sizes = {
        name: (len(w.prompts), len(w.prompts[0]), w.max_tokens[0])
        for name, w in ((name, work(WORKS[name])) for name in ("single", "prefill", "long"))
    }
    assert sizes == {"single": (1, 128, 256), "prefill": (1, 4096, 1), "long": (1, 8000, 32)}
    assert work(WORKS["startup"]).warm_up == []
    sampled = work(WORKS["sampled"])
    assert sampled.prompts == offline.prompts and sampled.max_tokens == offline.max_tokens
    assert sampled.sampling["top_k"] == 20 and not offline.sampling


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("vlm=python", "no peer is called 'vlm': give transformers, vllm=PYTHON"),
        ("vlm=python", "did you mean 'vllm'?"),
        ("nanoengine", "no peer is called 'nanoengine'"),
        ("", "no peer is called ''"),
        ("vllm", "--peer 'vllm': give vllm=PYTHON"),
        ("vllm=", "give vllm=PYTHON"),
        ("vllm=a,b", "give vllm=PYTHON"),
        ("llama.cpp=python", "give llama.cpp=PYTHON,GGUF"),
        ("openvino=,x.gguf", "give openvino=PYTHON,GGUF"),
        ("vllm=/no/such/python", "no program '/no/such/python'"),
        (f"llama.cpp={sys.executable},none.gguf", "there is no file 'none.gguf'"),
        (f"llama.cpp={sys.executable},{__file__}", "does not say what its weights are"),
    ],
)
def test_a_bad_peer_is_a_clear_error(
    text: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        benchmark.main(["compare", "--work", "single", "--peer", text])
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert "argument --peer: " in message
    assert expected in message


def test_peers_with_a_file_are_named_by_its_weights(tmp_path: Path) -> None:
    file = small_gguf(tmp_path / "a.gguf", gguf.LlamaFileType.MOSTLY_Q4_1)
    (llama,) = benchmark_compare.parse_peer(f"llama.cpp={sys.executable},{file}")
    assert (llama.name, llama.weights, llama.model) == ("llama.cpp Q4_1", "Q4_1", str(file))
    names = [p.name for p in benchmark_compare.parse_peer(f"openvino={sys.executable},{file}")]
    exact, default = "openvino Q4_1, KV bf16", "openvino Q4_1, KV u8"
    assert names == [exact, default, f"{exact}, activations of 8 bits"]
    (ours,) = benchmark_compare.parse_peer("transformers")
    assert ours.python == sys.executable


def test_decode_steps_of_unequal_requests() -> None:
    """3 tokens of 5 and 2 of 10: one step with both, one with the first alone."""
    kv = CONFIG.kv_bytes_per_token(2)
    attention = 4 * 2 * 4 * 2
    weights = LAYERS + HEAD
    assert decode_steps(MODEL, [(5, 3), (10, 2)]) == [
        (2 * weights + (6 + 11) * kv, 2 * 2 * weights + (6 + 11) * attention),
        (2 * weights + 7 * kv, 2 * weights + 7 * attention),
    ]
    assert decode_steps(MODEL, [(5, 1)]) == decode_steps(MODEL, []) == []


def test_a_step_reads_the_experts_of_one_token_and_no_kv_of_recurrent_layers() -> None:
    """The first layer has attention and experts; the second a recurrent state, which is no matrix,
    and a feed-forward.
    """
    experts = ExpertsConfig(count=4, top_k=2, inner_size=6, renormalises=True, dense_layers=(1,))
    rule = RecurrentConfig(
        (1,), num_key_heads=1, num_value_heads=2, key_dim=4, value_dim=4, conv_size=4
    )
    hybrid = replace(CONFIG, architecture="Qwen3_5MoeForCausalLM", experts=experts, recurrent=rule)
    attention = 3 * 8 * 8 + 2 * 8 * 4  # q twice as wide, k and v, o
    of_experts = 8 * 4 + 8 + 2 * 3 * 8 * 6  # the router, a gate, and two of four
    recurrent = (
        8 * (4 + 4 + 8) + 8 * 8 + 2 * 8 * 2 + 8 * 8
    )  # q k v, gate, two vectors of heads, out
    ((num_bytes, flop),) = decode_steps(Model(hybrid, 0, MODEL.limits), [(5, 2)])
    weights = attention + of_experts + recurrent + 3 * 8 * 16 + HEAD
    assert num_bytes == 2 * weights + 6 * 2 * 2 * 2 * 2  # K and V, heads, head_dim, bytes
    assert flop == 2 * weights + 6 * 4 * 4 * 2


def test_a_layer_with_a_window_reads_and_computes_no_more() -> None:
    """CONFIG has two layers, with 2 heads of KV and 4 of queries, of 2 numbers each."""
    limits, sizes = MODEL.limits, (2 * 2 * 2, 4 * 4 * 2)  # bytes of K and V as 1; FLOP of a pair
    windows = replace(CONFIG, windows=(3, None))
    ((plain, flop),) = decode_steps(Model(CONFIG, 0, limits, kv_bytes=1), [(5, 2)] * 2)
    ((num_bytes, less),) = decode_steps(Model(windows, 0, limits, kv_bytes=1), [(5, 2)] * 2)
    assert (plain - num_bytes, flop - less) == (2 * (6 - 3) * sizes[0], 2 * (6 - 3) * sizes[1])
    # Of the 4 shared tokens of a context of 6, a window of 3 has passed 3.
    ((shared, _),) = decode_steps(Model(windows, 4, limits, kv_bytes=1), [(5, 2)] * 2)
    assert num_bytes - shared == (1 + 4) * sizes[0]
    run = {"input_tokens": [6], "num_cached": [2], "outputs": [[1]], "seconds": 1.0}
    made = [share_of_limits([run], Model(each, 0, limits))["gflop"] for each in (CONFIG, windows)]
    pairs = (3 + 4 + 5 + 6) - 4 * 3
    assert 1e9 * (made[0] - made[1]) == pytest.approx(pairs * sizes[1], abs=10)


def test_a_shared_beginning_is_read_once_a_step() -> None:
    shared = Model(CONFIG, 4, MODEL.limits)
    (apart,), (together,) = (decode_steps(m, [(5, 2)] * 3) for m in (MODEL, shared))
    assert apart[0] - together[0] == 2 * 4 * CONFIG.kv_bytes_per_token(2)
    assert apart[1] == together[1]


def test_the_share_of_the_limit() -> None:
    """A prompt of 6 of which 2 were cached, one token: prefill alone, of 4 tokens. Three of them
    need no output of the last layer's attention, and no feed-forward.
    """
    run = {"input_tokens": [6], "num_cached": [2], "outputs": [[1]]}
    flop = (
        4 * 2 * LAYERS - 3 * 2 * (8 * 8 + 3 * 8 * 16) + 2 * HEAD + (3 + 4 + 5 + 6) * 4 * 2 * 4 * 2
    )
    runs = [run | {"seconds": seconds} for seconds in (9e-6, 4e-6, 1e-6)]
    row = share_of_limits(runs, MODEL)
    assert row["least_s"] == pytest.approx(flop / 100e9, rel=1e-3)
    assert row["share_of_limit"] == pytest.approx(flop / 100e9 / 4e-6, rel=1e-3)  # the median
    assert row["share_of_limit"] == row["share_of_matmul"]
    assert (row["decode_steps"], row["share_of_read"]) == (0, 0.0)
    of_integers = share_of_limits(runs, replace(MODEL, rounds_activations=True))
    assert of_integers["least_s"] == pytest.approx(flop / 400e9, rel=1e-3)


def test_reading_bounds_a_decode_step_of_one_request() -> None:
    run = {"input_tokens": [4], "num_cached": [4], "outputs": [[1, 1, 1]], "seconds": 1.0}
    steps = decode_steps(MODEL, [(4, 3)])
    least_s = 2 * HEAD / 100e9 + sum(num_bytes / 10e9 for num_bytes, _ in steps)
    row = share_of_limits([run], MODEL)
    assert row["least_s"] == pytest.approx(least_s, rel=1e-3)
    assert row["share_of_read"] == pytest.approx(sum(b for b, _ in steps) / 10e9, rel=1e-3)


def test_limits_are_measured_and_threads_left_alone() -> None:
    before = torch.get_num_threads()
    limits = measure_limits(1, num_bytes=8 << 20, size=128)
    assert 0.1 < limits.read_gb_per_s < 10_000
    assert 0.1 < limits.matmul_gflop_per_s <= limits.int8_gflop_per_s < 1_000_000
    assert torch.get_num_threads() == before


@needs_compiler
def test_float32_is_bounded_by_fused_steps_not_by_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 32 x 32 a product mostly waits to be called."""
    small = partial(measure_limits, 1, num_bytes=8 << 20, size=32, dtype=torch.float32)
    limits = small()
    monkeypatch.setattr(benchmark_limits, "_fused_s", lambda flop, num_threads: math.inf)
    assert limits.matmul_gflop_per_s > 2 * small().matmul_gflop_per_s


def small_gguf(path: Path, kind: gguf.LlamaFileType) -> Path:
    """A matrix in Q8_0, a vector, a text, a list and a file type."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(kind)
    writer.add_string("general.name", "small")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    values = np.random.default_rng(0).standard_normal((4, 64), dtype=np.float32)
    stored = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("matrix", stored, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("vector", values[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("dtype", "kind"), [("bf16", "BF16"), ("f16", "F16")])
def test_write_gguf_keeps_the_numbers_that_bf16_has(
    tmp_path: Path, dtype: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = small_gguf(tmp_path / "q8.gguf", gguf.LlamaFileType.MOSTLY_Q8_0)
    out = tmp_path / "out.gguf"
    benchmark.main(["write-gguf", "--dtype", dtype, "--source", str(source), str(out)])
    assert json.loads(capsys.readouterr().out)["bytes"] == out.stat().st_size
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(out)
    assert after.fields["general.file_type"].contents() == gguf.LlamaFileType[f"MOSTLY_{kind}"]
    for name in ("general.architecture", "general.name", "tokenizer.ggml.tokens"):
        assert after.fields[name].contents() == before.fields[name].contents()
    assert [t.tensor_type.name for t in after.tensors] == [kind, "F32"]
    for old, new in zip(before.tensors, after.tensors, strict=True):
        values = np.array(gguf.quants.dequantize(old.data, old.tensor_type))
        expected = torch.from_numpy(values).bfloat16().float().numpy()
        np.testing.assert_array_equal(
            gguf.quants.dequantize(new.data, new.tensor_type).reshape(expected.shape), expected
        )


def test_write_gguf_copies_what_is_stored(tmp_path: Path) -> None:
    source = small_gguf(tmp_path / "q8.gguf", gguf.LlamaFileType.MOSTLY_Q8_0)
    out = tmp_path / "out.gguf"
    benchmark.main(["write-gguf", "--dtype", "stored", "--source", str(source), str(out)])
    assert out.read_bytes() == source.read_bytes()


def test_a_workers_peak_memory_is_its_own() -> None:
    """getrusage would give a process the peak of the one that started it."""
    ballast = np.ones(400 << 20, dtype=np.uint8)
    code = "import runpy; print(runpy.run_path(__import__('sys').argv[1])['peak_memory_mib']())"
    command = [sys.executable, "-I", "-c", code, peers.__file__]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    peak = float(ran.stdout)
    assert 1 < peak < 200 < ballast.nbytes / (1 << 20)


def test_nanoengine_beside_a_peer_from_the_command_line(
    tiny: Callable[[str], Path],
    fake: MakeFake,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The real worker of nanoengine, tiny; a fake vLLM; a peer that cannot do this work."""
    monkeypatch.setattr(
        benchmark_compare, "measure_limits", lambda num_threads, dtype: Limits(1000.0, 1e6, 1e6)
    )
    file = small_gguf(tmp_path / "a.gguf", gguf.LlamaFileType.MOSTLY_BF16)
    benchmark.main(
        [
            *("compare", "--work", "prefix", "--rehearsal", "--rounds", "1", "--num-threads", "1"),
            *("--model", str(tiny("llama")), "--json", str(tmp_path / "out.json")),
            *("--peer", f"vllm={fake('vllm', 'answer(100)')}"),
            *("--peer", f"llama.cpp={sys.executable},{file}"),
        ]
    )
    result = json.loads((tmp_path / "out.json").read_text())
    assert json.loads(capsys.readouterr().out) == result
    cold, fake_cold, warm, fake_warm, unable = result["rows"]
    assert [row["part"] for row in (cold, fake_cold, warm, fake_warm)] == [
        *("cold", "cold", "warm", "warm")
    ]
    # 2 requests of 256 + 2 tokens, 4 out.
    assert (cold["input_tokens"], cold["output_tokens"]) == (516, 8)
    assert (cold["cached_tokens"] > 0, warm["cached_tokens"]) == (True, 2 * 256)
    assert fake_cold["ratio"]["median"] > 1
    assert result["best_peer"] == {"cold": "vllm", "warm": "vllm"}
    assert 0 < cold["share_of_limit"] < 1
    assert unable == {"engine": "llama.cpp BF16", "note": "not run: cannot do this work"}
    assert result["machine"]["read_gb_per_s"] == 1000.0
    assert result["versions"]["torch"] == torch.__version__
