"""A replayed pass gives the bits that the pass itself gives; and when none is replayed."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import Driver
from marks import needs_compiler
from replays import watch_replays
from shadow import HeldDevice
from torch import Tensor

from nanoengine import SamplingParams
from nanoengine.context import ReplayKey
from nanoengine.devices.cpu import CpuDevice
from nanoengine.devices.stream_check import CheckedDevice
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.errors import EngineError
from nanoengine.kernels.c_build import SOURCE, KernelBuildError, load_library
from nanoengine.kernels.call_tape import CallTape
from nanoengine.kernels.cpu_kernels import CpuKernels
from nanoengine.kernels.cpu_linear import CpuLinear
from nanoengine.kv.kv_memory import KVMemory
from nanoengine.kv.kv_spec import KVSpec
from nanoengine.kv.offload import OffloadEngine, TransferRun
from nanoengine.kv.step_kv import StepKV
from nanoengine.kv.step_plan import (
    DEVICE,
    Load,
    Part,
    SequenceSpan,
    SlotWrite,
    StepPlan,
    StepTransfers,
    Store,
)

PROMPTS = [[7 + i, *range(5, 5 + length)] for i, length in enumerate((3, 40, 17, 90, 1))]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (40, 30, 60, 20, 50)
]

# Steps of the whole probe are recorded and replayed, too.
pytestmark = pytest.mark.usefixtures("whole_probe")


def logits_of(folder: Path, dtype: str = "bfloat16", **options: object) -> list[Tensor]:
    """Of each prompt, queued at once with others that end before it and after it."""
    settings = {"dtype": dtype, "kv_cache_gib": 0.01, "kvcache_block_size": 16}
    if options:
        settings |= {"kv_cache_gib": None, "kv_offload_gib": 0.01, "stream_mib_per_step": 1e6}
    driver = Driver(LLMEngine(folder, **settings | options))
    outputs = driver.run(PROMPTS, PARAMS)
    driver.engine.close()
    return [torch.stack(driver.logits[output.request_id]) for output in outputs]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """See `watch_replays`."""
    return watch_replays(monkeypatch)


@needs_compiler
@pytest.mark.usefixtures("our_products")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "bfloat16") for name in ("llama", "qwen3", "smollm3", "mistral-window")),
        ("qwen3-window", "bfloat16"),
        ("gemma2", "bfloat16"),
        ("gemma3", "float32"),
        ("gemma3", "bfloat16"),
        ("qwen3.5", "bfloat16"),
        ("qwen3.5-moe", "bfloat16"),
        ("gpt-oss", "bfloat16"),
        *((name, "bfloat16") for name in ("gemma4", "gemma4-moe", "gemma4-shared")),
        ("glm4-moe-lite", "float32"),
        *(
            pytest.param(name, "bfloat16", marks=pytest.mark.breadth)
            for name in ("olmoe", "mixtral", "olmo2", "qwen3-next", "qwen2-moe")
        ),
    ],
)
def test_replayed_decoding_moves_no_bit(
    tiny: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    replays: list[int],
    name: str,
    dtype: str,
) -> None:
    taped = logits_of(tiny(name), dtype)
    assert len(replays) > 30 and set(replays) >= {1, 2, 3, 4}
    monkeypatch.setattr(CallTape, "replay", lambda self, key, forward: forward())
    count = len(replays)
    for mine, plain in zip(taped, logits_of(tiny(name), dtype), strict=True):
        assert torch.equal(mine, plain)
    assert len(replays) == count


def test_nothing_is_replayed_with_pytorch_s_products(
    tiny: Callable[[str], Path], replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_products(*_: Any, **__: Any) -> None:
        raise KernelBuildError("no compiler")

    monkeypatch.setattr(CpuLinear, "load", no_products)
    driver = Driver(LLMEngine(tiny("llama"), kv_cache_gib=0.01, dtype="float32"))
    driver.run(PROMPTS[:2])
    driver.engine.close()
    assert not replays


@needs_compiler
@pytest.mark.usefixtures("our_products")
@pytest.mark.parametrize(
    ("mode", "name"),
    [("in_place", "llama"), ("stream", "llama"), ("in_place", "qwen3-window")],
)
def test_steps_that_move_kv_are_not_replayed(
    tiny: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    replays: list[int],
    mode: str,
    name: str,
) -> None:
    """In place, most steps store and load nothing; streamed, those of few sequences that fit."""
    options = {"enable_cpu_offload": True, "offload_mode": mode, "num_gpu_blocks": 5}
    options["measure_speed"] = False  # its steps would be replayed, too
    options["speculative"] = "off"  # logits are recorded row by row
    if mode == "stream":
        options["ring_slots"] = 2  # fewer than there are layers: the last fill waits for a reader
    taped = logits_of(tiny(name), **options)
    assert len(replays) > 5
    monkeypatch.setattr(CallTape, "replay", lambda self, key, forward: forward())
    for mine, plain in zip(taped, logits_of(tiny(name), **options), strict=True):
        assert torch.equal(mine, plain)


def by_numpy(given: Tensor, out: Tensor) -> None:
    out.numpy()[...] = given.numpy() * 2


def by_torch(given: Tensor, out: Tensor) -> None:
    torch.mul(given, 2, out=out)


@pytest.mark.parametrize(
    ("double", "beside"), [(by_numpy, False), (by_torch, False), (by_numpy, True)]
)
def test_a_pass_is_replayed_until_shapes_change(
    double: Callable[[Tensor, Tensor], None], beside: bool
) -> None:
    """And never if PyTorch computes beside the calls: that would be missing from the tape."""
    tape, passes = CallTape(), []

    def run(*values: float) -> list[float]:
        given = torch.tensor(values)

        def forward() -> Tensor:
            passes.append(values)
            out = torch.empty(given.shape)
            tape.call(double, (given, out))
            return out.add_(0) if beside else out

        return tape.replay(ReplayKey((given,), ()), forward).tolist()

    batches = [(1.0, 2.0), (3.0, 4.0), (5.0,), (6.0, 7.0), (8.0, 9.0)]
    assert [run(*values) for values in batches] == [[2 * v for v in values] for values in batches]
    again = {(3.0, 4.0), (8.0, 9.0)} if not beside else set()
    assert passes == [values for values in batches if values not in again]


def test_a_failing_call_is_told_and_forgotten() -> None:
    tape, statuses = CallTape(), iter([0, -1, -1, 0])
    given, made = torch.zeros(1), []

    def forward() -> Tensor:
        made.append(1)
        tape.call(lambda: next(statuses), ())
        return given

    one, two = ReplayKey((given,), ()), ReplayKey((given,), (0,))
    tape.replay(one, forward)
    with pytest.raises(EngineError, match="out of memory: lower the batch"):
        tape.replay(one, forward)  # replayed
    with pytest.raises(EngineError, match="out of memory"):
        tape.replay(two, forward)
    tape.replay(two, forward)
    assert len(made) == 3


@needs_compiler
def test_neighbouring_calls_of_c_are_one_until_one_fails(tmp_path: Path) -> None:
    tape, rmdir = CallTape(load_library(SOURCE)), ctypes.CDLL(None).rmdir
    folders = [tmp_path / name for name in "abc"]
    beside: list[list[bool]] = []

    def look() -> None:
        beside.append([folder.exists() for folder in folders])

    def forward() -> Tensor:
        for folder in folders[:2]:
            tape.call(rmdir, bytes(folder))
        tape.call(look, ())
        tape.call(rmdir, bytes(folders[2]))
        return torch.empty(0)

    def run(*there: Path) -> None:
        for folder in there:
            folder.mkdir()
        tape.replay(ReplayKey((), ()), forward)

    run(*folders)  # recorded
    run(*folders)  # replayed
    assert beside == [[False, False, True]] * 2
    assert not any(folder.exists() for folder in folders)
    with pytest.raises(EngineError, match="out of memory"):
        run(*folders[1:])
    assert folders[1].exists() and len(beside) == 2  # the first call failed, no other was made
    (two, one) = [len(args[0]) for function, args in tape._last.steps if function is not look]
    assert two == 2 * one


@needs_compiler
def test_sums_and_gates_are_replayed_in_one_call_of_c() -> None:
    kernels = CpuKernels.load()
    x, both, out = torch.zeros(1, 16), torch.ones(1, 32), torch.empty(1, 16)
    gate, sigmoid_of_1 = both[:, :16].view(1, 1, 16), 1 / (1 + math.exp(-1))

    def forward() -> Tensor:
        kernels.gate_mul(both, "silu", out)
        kernels.sigmoid_mul(out, gate, out)
        kernels.add(x, out)
        return x

    for times in (1, 2, 3):
        kernels.tape.replay(ReplayKey((), ()), forward)
        assert len(kernels.tape._last.steps) == 1
        torch.testing.assert_close(x, torch.full((1, 16), times * sigmoid_of_1**2))


def test_a_step_is_still_only_once_stores_before_it_are_done() -> None:
    """Of what it reads and writes; other slots may be on their way."""
    device = HeldDevice()
    spec = KVSpec(((1, 3),) * 2, 4, 4, torch.float32, 6, 2, 2)
    engine = OffloadEngine(device, torch.zeros(2, 4, 2, 4, 1, 3), spec)
    TransferRun(engine, StepTransfers(stores=(Store(0, 5, 0, 4),))).finish()
    assert not engine.are_stored((0,), [])
    assert not engine.are_stored((1,), [(0, (4, 5))])
    assert engine.are_stored((1,), [(0, (4,))])
    device.synchronize()
    assert engine.are_stored((0,), [(0, (4, 5))])
    engine.close()


@pytest.mark.parametrize(
    "moved",
    [
        {"stores": (Store(0, 5, 0, 4),)},
        {"loads": (Load(5, 0, 4),)},
        {"fills": ((5,),)},
    ],
)
def test_a_step_that_moves_kv_is_not_replayed(moved: dict[str, Any]) -> None:
    device = CpuDevice(1)
    memory = KVMemory(KVSpec(((1, 3),) * 2, 4, 4, torch.float32, 6, 2, 2), device)
    plain = StepPlan(1, 0, (SlotWrite(0, 1, 0, 1),), (1,), ())
    assert StepKV.open(plain, memory).replay_key() is not None
    moving = replace(plain, transfers=StepTransfers(**moved))
    assert StepKV.open(moving, memory).replay_key() is None
    memory.close()


def test_a_checking_device_is_told_of_every_access() -> None:
    """So its steps are never made again from a tape."""
    plan = StepPlan(
        1, 0, (SlotWrite(0, 1, 0, 1),), (1,), (Part(DEVICE, (SequenceSpan(0, 0, (1,)),)),)
    )
    for device, is_replayed in ((CpuDevice(1), True), (CheckedDevice(CpuDevice(1)), False)):
        memory = KVMemory(KVSpec(((1, 3),) * 2, 4, 4, torch.float32), device)
        step = StepKV.open(plan, memory)
        assert (step.replay_key() is not None) == is_replayed
        memory.close()


@pytest.mark.parametrize("is_decode, fills", [(True, ((5,),)), (True, ()), (False, ((5,),))])
def test_a_core_is_left_to_copies_while_a_decode_step_streams(
    two_threads: None, is_decode: bool, fills: tuple[tuple[int, ...], ...]
) -> None:
    spec = KVSpec(((1, 3),), 4, 4, torch.float32, 6, 2, 2)
    device = CpuDevice(2, copy_workers=True)
    engine = OffloadEngine(device, torch.zeros(1, 4, 2, 4, 1, 3), spec)
    run = TransferRun(engine, StepTransfers(fills=fills, is_decode=is_decode))
    assert torch.get_num_threads() == (1 if is_decode and fills else 2)
    run.finish()
    assert torch.get_num_threads() == 2
    engine.close()
