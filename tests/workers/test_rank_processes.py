"""Ranks as processes: the same log probabilities, and what a user sees when one of them dies or
the work is interrupted.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from descriptors import open_descriptors
from marks import needs_compiler
from quantised import quantised

from nanoengine import LLM, ConfigError, EngineError, SamplingParams
from nanoengine.workers import leading_rank

pytestmark = [needs_compiler, pytest.mark.usefixtures("threads_as_before")]

PROMPTS = [[5, 6, 7, 8] * 9, [9, 10, 11]]
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
SCORED = SamplingParams(temperature=0, max_tokens=8, logprobs=3)
Make = Callable[..., LLM]


@pytest.fixture
def make(tiny: Callable[[str], Path]) -> Iterator[Make]:
    """Makes engines of two ranks, and closes them."""
    made: list[LLM] = []

    def of_two(name: str = "llama", **settings: object) -> LLM:
        settings = {"num_gpu_blocks": 64, "kvcache_block_size": 8, "dtype": "bfloat16"} | settings
        made.append(LLM(tiny(name), tensor_parallel_size=2, num_threads=2, **settings))
        return made[-1]

    yield of_two
    for llm in made:
        llm.close()


def scores(llm: LLM) -> list[list[list[tuple[int, float]]]]:
    outputs = llm.generate(PROMPTS, SCORED, use_tqdm=False)
    return [
        [[(i, found.logprob) for i, found in each.items()] for each in o.outputs[0].logprobs or []]
        for o in outputs
    ]


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        *(
            pytest.param(name, marks=pytest.mark.breadth)
            for name in ("gemma4-shared", "olmo3", "qwen3.5")
        ),
    ],
)
def test_two_processes_have_the_bits_of_one(
    make: Make, pids: list[int], tiny: Callable[[str], Path], name: str
) -> None:
    settings = {"num_gpu_blocks": 64, "kvcache_block_size": 8, "dtype": "bfloat16"}
    with LLM(tiny(name), num_threads=1, **settings) as llm:
        expected = scores(llm)
    llm = make(name)
    assert scores(llm) == expected
    assert torch.distributed.is_initialized() is False
    llm.close()
    assert len(pids) == 1 and is_gone(pids[0])


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.breadth)]
)
def test_a_rank_that_dies_in_a_step_is_an_error_within_a_second(
    make: Make, pids: list[int], number: signal.Signals
) -> None:
    llm = make(enable_prefix_caching=False)
    scores(llm)
    died: list[float] = []

    def kill() -> None:
        time.sleep(0.2)
        died.append(time.monotonic())
        os.kill(pids[0], number)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(EngineError, match=f"worker 1 of 1 was .*{number.name}"):
        for _ in range(1000):
            llm.generate(PROMPTS, LONG, use_tqdm=False)
    took = time.monotonic() - died[0]
    killer.join()
    assert took < 20.0, took  # a second on an idle machine
    with pytest.raises(EngineError):
        llm.generate(PROMPTS, SCORED, use_tqdm=False)
    llm.close()
    assert is_gone(pids[0])


def test_an_interrupt_waits_for_the_end_of_a_step_and_the_engine_goes_on(make: Make) -> None:
    llm = make()
    expected = scores(llm)
    for delay in (0.02, 0.05, 0.11, 0.17):
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            while True:
                llm.generate(PROMPTS, LONG, use_tqdm=False)
        timer.join()
        assert scores(llm) == expected


def test_a_rank_that_finds_another_model_is_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leading_rank, "fingerprint", lambda parts: "another")
    with pytest.raises(EngineError, match="rank 1 of 2 found another model"):
        make()


def test_what_a_checkpoint_leaves_out_is_the_same_model_in_each_process(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """Names are kept as a set, whose order is another in each process."""
    folder = quantised(tiny("llama"), tmp_path / "awq", "awq", lambda name: "down_proj" in name)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    names = ["lm_head", "down_proj", *(f"vision.blocks.{number}" for number in range(20))]
    config["quantization_config"]["modules_to_not_convert"] = names
    path.write_text(json.dumps(config))
    settings = {"num_gpu_blocks": 64, "kvcache_block_size": 8, "dtype": "bfloat16"}
    with LLM(folder, num_threads=1, **settings) as llm:
        expected = scores(llm)
    with LLM(folder, tensor_parallel_size=2, num_threads=2, **settings) as llm:
        assert scores(llm) == expected


def test_gpus_that_are_not_there_are_refused_before_anything_starts(
    make: Make, pids: list[int]
) -> None:
    with pytest.raises(ConfigError, match=r"=2 from cuda:900 on needs 902 GPUs, .* sees \d"):
        make(device="cuda:900")
    assert not pids


@pytest.mark.breadth
def test_ranks_that_do_not_start_leave_nothing_open(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise EngineError("no process")

    monkeypatch.setattr(leading_rank, "WorkerProcesses", refuse)
    for _ in range(2):  # modules are imported in the first
        before = open_descriptors()
        with pytest.raises(EngineError, match="no process"):
            make()
    assert not open_descriptors() - before
