"""Tensor parallelism on GPUs made of the CPU: two ranks as threads (virtual_nccl.py). What one GPU
finds, two find, bit by bit, whatever is replayed, streamed or late; a rank that dies is an error.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import answer, host_gib, small_engine
from kernel_bounds import check_kernels
from marks import needs_no_gpu
from mtp_models import watch_head, with_head
from plain_products import use_plain_products, use_plain_softplus, use_plain_tiles
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton", reason="Triton is not installed")

from virtual_gpu import VirtualGpu
from virtual_nccl import VirtualNccl, use_virtual_nccl

from nanoengine import ConfigError, EngineError, SamplingParams
from nanoengine.config.engine import EngineConfig
from nanoengine.devices.device import Device
from nanoengine.devices.gpu import GpuDevice
from nanoengine.engine import llm_engine
from nanoengine.engine.draft_length import PayingDrafts
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.kernels.cuda_graph import CudaGraphs
from nanoengine.kernels.gpu_ops import GpuOps
from nanoengine.kernels.triton_codes import TritonCodes
from nanoengine.models.decoder import Decoder
from nanoengine.models.products import Product
from nanoengine.outputs import RequestOutput
from nanoengine.startup import probe
from nanoengine.startup.parts import make_engine_device
from nanoengine.workers import following_rank, leading_rank, rank_setup

pytestmark = needs_no_gpu
Tiny = Callable[[str], Path]
BLOCK = 8
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=2)
RESIDENT: dict[str, Any] = {"num_gpu_blocks": 32}
STREAMED: dict[str, Any] = {
    "num_gpu_blocks": 5,
    "enable_cpu_offload": True,
    "slot_tokens": 2 * BLOCK,
    "ring_slots": 2,
    "stream_mib_per_step": 1000.0,
}
# Steps of all kinds: with stores and loads, streamed, and whole ones beside stores under way.
MIXED = STREAMED | {"num_gpu_blocks": 9}
WAYS: dict[str, dict[str, Any]] = {
    "resident": RESIDENT,
    "streamed": STREAMED,
    "mixed": MIXED,
    "checked": STREAMED | {"debug_kv": True, "debug_copy_delay_ms": 0.1},
    "eager": STREAMED | {"enforce_eager": True},
    "chunks": {"num_gpu_blocks": 18, "max_num_batched_tokens": 16, "decode_reserve_blocks": 0},
    "guesses": RESIDENT | {"speculative": "ngram:3"},
    "drafts": STREAMED | {"speculative": "resident:3"},
    "int8 KV": STREAMED | {"kv_offload_dtype": "int8"},
}
CODES = {"codes": RESIDENT | {"quantization": "int8"}}
# Biases and clamped gates; shared experts with a gate and without; a router with a norm of its own;
# norms over all heads.
MIXTURES = ("gpt-oss", "qwen3.5-moe", "deepseek-v3", "gemma4-moe", "olmoe")
Found = list[tuple[list[int], list[list[tuple[int, float]]]]]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[VirtualGpu]]:
    """Two, of which the test's thread has the first, whose kernels stay inside their tensors.
    Products give every output by itself.
    """
    check_kernels(monkeypatch)
    use_plain_products(monkeypatch)
    use_plain_softplus(monkeypatch)
    monkeypatch.setattr(PayingDrafts, "choose", lambda self: 3)
    monkeypatch.setattr(probe, "NUM_WARMUPS", 0)
    monkeypatch.setattr(probe, "NUM_BLOCKS", 2)
    with VirtualGpu() as first:
        yield [first, first.another()]


def engine(folder: Path, size: int, **settings: Any) -> LLMEngine:
    """A step takes a while, so one measures no speed if it is not asked to."""
    defaults = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "max_model_len": 128}
    defaults |= {"measure_speed": False, "device": "cuda", "tensor_parallel_size": size}
    if "enable_cpu_offload" in settings:
        defaults["kv_offload_gib"] = host_gib(folder, 24, BLOCK)
    return small_engine(folder, True, **(defaults | settings))


def prompt(num_tokens: int) -> list[int]:
    return [(num_tokens * 31 + n) % 256 for n in range(num_tokens)]


def numbers(outputs: list[RequestOutput]) -> Found:
    """Ids and log probabilities, as they are."""
    found: Found = []
    for output in outputs:
        assert not output.error
        scores = [*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ())]
        each = [[(i, known.logprob) for i, known in (of or {}).items()] for of in scores]
        found.append((output.outputs[0].token_ids, each))
    return found


def run(folder: Path, size: int, longest: int = 47, **settings: Any) -> Found:
    """What two requests find, and a third that begins as one of them did."""
    made = engine(folder, size, **settings)
    prompts = [prompt(1), prompt(longest)]
    outputs = answer(made, prompts, [PARAMS, replace(PARAMS, temperature=0.8)])
    outputs += answer(made, [[*prompts[1][:20], 7]], [PARAMS])
    made.close()
    return numbers(outputs)


@functools.cache
def of_one(folder: Path, is_plain: bool) -> Found:
    """What one GPU finds in steps of all kinds, and so in any. is_plain: with plain tiles."""
    return run(folder, 1, **MIXED)


def assert_near(found: Found, expected: Found) -> None:
    """The same tokens with nearly the same log probabilities."""
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert [i for i, _ in a] == [i for i, _ in b]
            assert [x for _, x in a] == pytest.approx([x for _, x in b], abs=1e-4)


@pytest.mark.breadth
@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("qwen3.5", "resident"),
        ("olmo3", "streamed"),
        ("gemma4-shared", "resident"),
        ("gemma4", "streamed"),
        ("qwen3.5", "streamed"),
        *(("llama", way) for way in WAYS if way != "mixed"),
    ],
)
def test_two_gpus_have_the_bits_of_one(
    gpus: list[VirtualGpu], monkeypatch: pytest.MonkeyPatch, tiny: Tiny, name: str, way: str
) -> None:
    """Every call is queued on the stream that computes; both ranks replay the same. Tiles of a rank
    may have fewer rows; plain ones take long, and default tests do without.
    """
    settings = WAYS[way]
    is_plain = name != "llama" or way not in ("resident", "streamed")
    if is_plain:
        use_plain_tiles(monkeypatch)
    # Codes of KV that was on the host are other numbers.
    expected = run(tiny(name), 1, **settings) if way == "int8 KV" else of_one(tiny(name), is_plain)
    before = [len(gpu.graphs) for gpu in gpus]
    calls = use_virtual_nccl(monkeypatch, gpus)
    found = run(tiny(name), 2, **settings)
    assert found == expected
    replays = [
        [graph.num_replays for graph in gpu.graphs[num:]]
        for gpu, num in zip(gpus, before, strict=True)
    ]
    assert replays[0] == replays[1]
    # Beside the gather that ranks record when they meet.
    assert (sum(replays[0][1:]) > 0) == (way != "eager")
    streams = {(rank, stream) for rank, _, stream in calls}
    assert streams == {(0, gpus[0].current), (1, gpus[1].current)}


def test_a_part_has_the_numbers_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """What PyTorch and NumPy compute otherwise on a CPU: a softplus of half the heads, a product of
    tiles with half the rows.
    """
    from triton.runtime import interpreter

    use_plain_softplus(monkeypatch)
    use_plain_tiles(monkeypatch)
    x = torch.linspace(-5, 5, 200).view(25, 8).sin() * 5
    of_parts = [functional.softplus(part.contiguous()) for part in x.chunk(4, dim=1)]
    assert torch.equal(functional.softplus(x), torch.cat(of_parts, dim=1))
    assert torch.allclose(functional.softplus(x), x.exp().log1p())

    def times(rows: Tensor, tile: Tensor) -> Tensor:
        each = rows, tile, torch.zeros(len(rows), tile.shape[1])
        a, b, total = (interpreter.TensorHandle(x.numpy(), interpreter.tl.float32) for x in each)
        found = interpreter.interpreter_builder.create_dot(a, b, total, None, 0)
        return torch.from_numpy(found.data)

    rows, tile = torch.randn(128, 32), torch.randn(32, 128)
    whole = times(rows, tile)
    assert torch.allclose(whole, rows @ tile, atol=1e-4)
    assert all(torch.equal(whole[:num], times(rows[:num], tile)) for num in (16, 32, 64))


@pytest.mark.breadth
@pytest.mark.parametrize("way", ["resident", "streamed"])
def test_two_gpus_guess_by_the_model_s_own_head(
    gpus: list[VirtualGpu],
    monkeypatch: pytest.MonkeyPatch,
    tiny: Tiny,
    tmp_path: Path,
    way: str,
) -> None:
    """What the head of one says, those of two say."""
    folder = with_head(tiny("qwen3.5"), tmp_path)
    settings = WAYS[way] | {"speculative": "mtp:3"}
    if way == "streamed":
        settings["kv_offload_gib"] = 0.01
    found, said = [], []
    for size in (1, 2):
        if size == 2:
            use_virtual_nccl(monkeypatch, gpus)
        made = engine(folder, size, **settings)
        heard = watch_head(made)
        found.append(numbers(answer(made, [prompt(1), prompt(47)], [PARAMS, PARAMS])))
        said.append([(*where, logits.tolist()) for *where, logits in heard])
        made.close()
    assert found[0] == found[1]
    assert said[0] == said[1] and len(said[0]) > 10


@pytest.mark.breadth
@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_with_late_copies_replays_what_the_other_does(
    gpus: list[VirtualGpu], monkeypatch: pytest.MonkeyPatch, tiny: Tiny, late: int
) -> None:
    """One rank's copies take long. The host of rank 1 never waits: its stores are never done."""
    expected = of_one(tiny("llama"), is_plain=False)
    before = len(gpus[0].graphs)

    def slow(config: EngineConfig) -> Device:
        return make_engine_device(replace(config, debug_copy_delay_ms=100.0))

    monkeypatch.setattr((llm_engine, following_rank)[late], "make_engine_device", slow)
    awaited: list[object] = []
    wait = following_rank._await_stores
    monkeypatch.setattr(
        following_rank, "_await_stores", lambda kv: (awaited.append(kv), wait(kv))[1]
    )
    use_virtual_nccl(monkeypatch, gpus)
    assert run(tiny("llama"), 2, **MIXED) == expected
    replays = [[graph.num_replays for graph in gpu.graphs] for gpu in gpus]
    assert replays[0][before:] == replays[1] and sum(replays[1]) > 10
    assert bool(awaited) == bool(late)


@pytest.mark.breadth
def test_no_host_waits_but_for_tokens(
    gpus: list[VirtualGpu], monkeypatch: pytest.MonkeyPatch, tiny: Tiny
) -> None:
    """Rank 0 as often as one process does, the other never; and before what is captured."""
    waits: Counter[tuple[int | None, str]] = Counter()
    wait, synchronize = GpuDevice._await_event, GpuDevice.synchronize

    def waiting(self: GpuDevice, event: Any) -> None:
        waits[self.torch_device.index, "event"] += 1
        wait(self, event)

    def synchronizing(self: GpuDevice) -> None:
        index = self.torch_device.index
        waits[index, "all"] += 1
        num = waits[index, "event"]
        synchronize(self)
        waits[index, "event"] = num

    monkeypatch.setattr(GpuDevice, "_await_event", waiting)
    monkeypatch.setattr(GpuDevice, "synchronize", synchronizing)

    def num_waits(size: int) -> list[int]:
        made = engine(tiny("llama"), size, **STREAMED)
        waits.clear()
        before = [len(gpu.graphs) for gpu in gpus]
        for gpu in gpus:
            gpu.strict = True
        answer(made, [prompt(1), prompt(47)], [replace(PARAMS, prompt_logprobs=None)] * 2)
        for gpu in gpus:
            gpu.strict = False
        captured = [len(gpu.graphs) - num for gpu, num in zip(gpus, before, strict=True)]
        before_captures = captured if size > 1 else [0, 0]
        assert [waits[rank, "all"] for rank in range(2)] == before_captures
        found = [waits[rank, "event"] for rank in range(size)]
        made.close()
        return found

    [alone] = num_waits(1)
    use_virtual_nccl(monkeypatch, gpus)
    assert num_waits(2) == [alone, 0] and alone > 5


def test_a_rank_that_dies_is_an_error_and_no_hang(
    gpus: list[VirtualGpu], monkeypatch: pytest.MonkeyPatch, tiny: Tiny
) -> None:
    """The other one's GPU waits for ever, and its host looks for the tokens."""
    forward = Decoder.forward
    dies = threading.Event()

    def fail(self: Decoder, ctx: Any) -> Any:
        if dies.is_set() and gpus[0]._here() is gpus[1]:
            raise MemoryError("no memory")
        return forward(self, ctx)

    monkeypatch.setattr(Decoder, "forward", fail)
    use_virtual_nccl(monkeypatch, gpus)
    made = engine(tiny("llama"), 2, **RESIDENT)
    answer(made, [prompt(9)], [PARAMS])
    dies.set()
    with pytest.raises(EngineError, match=r"a rank has failed: MemoryError\('no memory'\)"):
        answer(made, [prompt(9)], [PARAMS])
    assert gpus[0].is_stuck.is_set()
    with pytest.raises(EngineError, match="a rank has failed"):
        answer(made, [prompt(9)], [PARAMS])
    made.close()


@pytest.mark.breadth
def test_memory_is_planned_for_the_fullest_gpu(
    gpus: list[VirtualGpu], monkeypatch: pytest.MonkeyPatch, tiny: Tiny
) -> None:
    """Each GPU has its own: what others hold of one counts once. All ranks run the largest step."""
    use_virtual_nccl(monkeypatch, gpus)
    settings: dict[str, Any] = {"max_num_seqs": 32, "max_model_len": 512, "num_gpu_blocks": None}
    settings["gpu_memory_utilization"] = 1.0
    blocks, held = [], 1 << 20
    for taken in ((0, 0), (held, 0), (0, held)):
        for gpu, num_bytes in zip(gpus, taken, strict=True):
            # Graphs of the engine before are still there.
            gpu.memory_bytes = gpu.allocated + (6 << 20) - num_bytes
        made = engine(tiny("llama"), 2, **settings)
        kv = made.plan.kv
        blocks.append(kv.num_blocks)
        assert made.plan.device_bytes == max(gpu.memory_bytes for gpu in gpus)
        assert made.plan.ram_bytes < 0.6 * made.device.host_memory()
        if taken[1]:
            answer(made, [prompt(40)], [replace(PARAMS, max_tokens=2)])
        made.close()
    for num in blocks[1:]:
        assert (blocks[0] - num) * kv.block_bytes == pytest.approx(held, rel=0.15)
        assert num > 100


def test_the_plan_tells_of_each_link_and_promises_no_bits(
    gpus: list[VirtualGpu], monkeypatch: pytest.MonkeyPatch, tiny: Tiny
) -> None:
    use_virtual_nccl(monkeypatch, gpus)
    monkeypatch.setattr(probe, "is_taken", lambda waiting: False)
    costs = probe.DecodeCosts(1.0, 1.0, 1.0)
    monkeypatch.setattr(probe, "measure_decode", lambda *_: costs)
    made = engine(tiny("llama"), 2, **(STREAMED | {"measure_speed": True}))
    plan, of_two = made.plan, made.plan.kv.block_bytes
    assert len(plan.link_gb_per_s) == 2 and min(plan.link_gb_per_s) > 0
    assert "together, the slowest at" in str(plan)
    assert "2 processes, each on a GPU of its own from this one on; figures are" in str(plan)
    assert "equal up to near ties in any batch and for any number of ranks" in str(plan)
    made.close()
    made = engine(tiny("llama"), 1, **STREAMED)
    assert made.plan.kv.block_bytes == 2 * of_two and "ranks" not in str(made.plan)
    made.close()


def test_ranks_begin_with_the_gpu_that_is_named(
    gpus: list[VirtualGpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_setup, "check_nccl", lambda: None)
    assert rank_setup.devices_of_ranks("auto", 2) == ("cuda:0", "cuda:1")
    gpus[0].another()
    assert rank_setup.devices_of_ranks("cuda:1", 2) == ("cuda:1", "cuda:2")
    assert rank_setup.devices_of_ranks("cpu", 2) == ("cpu", "cpu")


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        ("cuda", 3, "tensor_parallel_size=3 from cuda:0 on needs 3 GPUs, .* sees 2"),
        ("cuda:1", 2, "tensor_parallel_size=2 from cuda:1 on needs 3 GPUs, .* sees 2"),
        ("xpu", 2, "is for CPUs and for CUDA GPUs, and the device is xpu"),
        ("cuda", 2, "needs PyTorch with NCCL, and torch .* has none"),
    ],
)
def test_what_is_missing_is_said_before_a_process_starts(
    gpus: list[VirtualGpu],
    monkeypatch: pytest.MonkeyPatch,
    tiny: Tiny,
    name: str,
    size: int,
    said: str,
) -> None:
    monkeypatch.setattr(leading_rank, "WorkerProcesses", None)  # nobody may call it
    with pytest.raises(ConfigError, match=said):
        engine(tiny("llama"), size, device=name)


@pytest.mark.breadth
@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("qwen3-moe", "resident"),
        ("qwen3-moe", "streamed"),
        ("qwen3-moe", "eager"),
        ("gpt-oss", "codes"),
        *((name, "resident") for name in MIXTURES),
    ],
)
def test_mixtures_have_the_bits_of_one_gpu(
    gpus: list[VirtualGpu], monkeypatch: pytest.MonkeyPatch, tiny: Tiny, name: str, way: str
) -> None:
    """With graphs that hold their gathers; and rank 0 alone chooses experts, whatever the other
    one's router says.
    """
    if name == "deepseek-v3":  # the heads of a rank are the rows of its tiles
        use_plain_tiles(monkeypatch)
    mixtures: list[object] = []
    coded, router = TritonCodes.experts, GpuOps.router

    def kept(self: TritonCodes, *args: Any) -> Any:
        mixtures.append(args)
        return coded(self, *args)

    def turned(self: GpuOps, weight: Tensor, bias: Tensor | None = None) -> Product:
        product = router(self, weight, bias)
        is_choice = len(weight) > 1  # else the gate of a shared expert
        return lambda x: product(x) * (-1 if is_choice and gpus[0]._here() is gpus[1] else 1)

    monkeypatch.setattr(TritonCodes, "experts", kept)
    settings = (WAYS | CODES)[way] | {"dtype": "float32" if way == "codes" else "bfloat16"}
    settings["longest"] = 47 if way == "streamed" else 23
    expected = run(tiny(name), 1, **settings)
    monkeypatch.setattr(GpuOps, "router", turned)
    use_virtual_nccl(monkeypatch, gpus)
    before = len(gpus[0].graphs)
    found = run(tiny(name), 2, **settings)
    if way == "codes":  # Triton's interpreter multiplies all outputs of codes at once
        assert_near(found, expected)
    else:
        assert found == expected
    replays = [[graph.num_replays for graph in gpu.graphs] for gpu in gpus]
    assert replays[0][before:] == replays[1]
    assert (sum(replays[1][1:]) > 0) == (way != "eager")
    assert bool(mixtures) == (way == "codes")


def test_graphs_go_before_the_communicator(
    gpus: list[VirtualGpu], monkeypatch: pytest.MonkeyPatch, tiny: Tiny
) -> None:
    """NCCL's own end waits for them."""
    ends: list[tuple[str, int]] = []

    def forget(self: CudaGraphs) -> None:
        ends.append(("graphs", gpus.index(gpus[0]._here())))
        self._graphs.clear()

    monkeypatch.setattr(CudaGraphs, "forget_steps", forget)
    monkeypatch.setattr(VirtualNccl, "abort", lambda self: ends.append(("nccl", self._rank)))
    use_virtual_nccl(monkeypatch, gpus)
    engine(tiny("llama"), 2, **RESIDENT).close()
    assert ends == [("graphs", 1), ("nccl", 1), ("graphs", 0), ("nccl", 0)]
