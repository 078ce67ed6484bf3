"""Products of weights that stay codes, beside PyTorch's of bfloat16: parts of gpu_check.py."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.gpu_measure import Row, Scale
from nanoengine.models.activations import GATED
from nanoengine.models.experts import CodedExpert, ExpertWeights, GroupedExperts, Map
from nanoengine.models.stored_codes import FORMATS, CodedRows, CodedWeight, Weight

TOKENS = (1, 8, 32, 64, 2048)
CHECKED_ROWS = 64
# Outputs and inputs of Llama-3.1-8B's products. All formats multiply by the largest of a layer.
GATE_UP = (28672, 4096)
OTHERS = ((4096, 4096), (4096, 14336))
COMPILED = (512, 4096)  # in whose shape kernels are compiled: the code is the same
MOST_USED = "Q4_K"
NUM_CALLS = 8  # in a graph; of experts each has other choices, so the L2 cache holds few of them
# The norm of the difference from numbers that are not rounded, over the norm: each rounding to
# bfloat16 is 0.0017. And of a layer of experts, from one of bfloat16.
MOST_ERROR, MOST_ERROR_OF_EXPERTS = 0.004, 0.02


@dataclass(frozen=True)
class Mixture:
    """The experts of a layer."""

    model: str
    format: str
    count: int
    top_k: int
    hidden: int
    inner: int


MIXTURES = (
    Mixture("gpt-oss-20b", "MXFP4", 32, 4, 2880, 2880),
    Mixture("Qwen3-30B-A3B", "Q4_K", 128, 8, 2048, 768),
    Mixture("Qwen3-30B-A3B", "Q6_K", 128, 8, 2048, 768),
)
TINY = Mixture("tiny", "MXFP4", 4, 2, 128, 64)


@dataclass(frozen=True)
class Bench:
    """Where it runs, and how fast memory is read there."""

    scale: Scale
    device: torch.device
    read_gb_per_s: float

    def measured(
        self, calls: Sequence[Callable[[], object]], num_bytes: int, operations: float
    ) -> Row:
        """The time of one of these calls, the rate at which it reads `num_bytes`, and its
        operations.
        """
        seconds = graph_s(calls, self.device)
        rate = num_bytes / seconds / 1e9
        return {
            "ms": round(1000 * seconds, 4),
            "gb_per_s": round(rate, 1),
            "share_of_reads": round(rate / self.read_gb_per_s, 3),
            "tflop_per_s": round(operations / seconds / 1e12, 2),
        }

    def normal(self, *shape: int) -> Tensor:
        """Values of a normal distribution, bfloat16."""
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)


def coded_products(scale: Scale, read_gb_per_s: float) -> Iterator[Row]:
    """Each format in the largest shape, one in all shapes, then the experts of layers. A row says
    whether numbers have the bits of the package gguf, and how far products are from theirs.
    """
    if scale.is_rehearsal:
        from quick_interpreter import speed_up

        speed_up()  # and bfloat16 is rounded
    bench = Bench(scale, torch.device(scale.device), read_gb_per_s)
    shapes = [(name, GATE_UP) for name in FORMATS] + [(MOST_USED, shape) for shape in OTHERS]
    mixtures: Sequence[Mixture] = MIXTURES
    if scale.is_rehearsal:
        shapes, mixtures = [("Q4_0", (96, 512)), ("Q4_1", (96, 512))], (TINY,)
    else:
        compile_all(bench)
    for shape in dict.fromkeys(shape for _, shape in shapes):
        yield numbers_row(shape, bench)
    for name, shape in shapes:
        yield product_row(name, shape, bench)
    for mixture in mixtures:
        yield experts_row(mixture, bench)


def compile_all(bench: Bench) -> None:
    """Has all kernels compiled beside each other, into the cache of Triton."""
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawning) as pool:
        jobs = [pool.submit(product_row, name, COMPILED, bench, False) for name in FORMATS]
        for mixture in MIXTURES:
            small = replace(mixture, hidden=1024, inner=min(1024, mixture.inner))
            jobs.append(pool.submit(experts_row, small, bench, False))
        for job in jobs:
            job.result()


def numbers_row(shape: tuple[int, int], bench: Bench) -> Row:
    """PyTorch's product of bfloat16, by tokens."""
    dense = bench.normal(*shape)
    row: Row = {"format": "bfloat16", "outputs": shape[0], "inputs": shape[1], "ok": True}
    for tokens in tokens_of(bench):
        call = partial(functional.linear, bench.normal(tokens, shape[1]), dense)
        operations = 2.0 * tokens * dense.numel()
        row[str(tokens)] = bench.measured([call] * NUM_CALLS, dense.nbytes, operations)
    return row


def product_row(name: str, shape: tuple[int, int], bench: Bench, is_measured: bool = True) -> Row:
    """One weight, by tokens."""
    from nanoengine.kernels.triton_codes import TritonCodes  # after --device is known

    outputs, inputs = shape
    rows = random_codes(name, outputs, inputs, bench.device)
    weight = CodedWeight((rows,), torch.bfloat16)
    product = TritonCodes().pack(weight)
    checked = torch.arange(min(CHECKED_ROWS, outputs), device=bench.device)
    is_exact = torch.equal(product.gather_rows(checked), weight[: len(checked)].numbers())
    everything = torch.arange(outputs, device=bench.device)
    numbers = TritonCodes().pack(CodedWeight((rows,), torch.float32)).gather_rows(everything)
    row: Row = {"format": name, "outputs": outputs, "inputs": inputs}
    errors = []
    for tokens in tokens_of(bench):
        x = bench.normal(tokens, inputs)
        errors.append(relative_error(product(x), x.float() @ numbers.T))
        if is_measured:
            calls, operations = [partial(product, x)] * NUM_CALLS, 2.0 * tokens * numbers.numel()
            row[str(tokens)] = bench.measured(calls, weight.nbytes, operations)
    row["relative_errors"] = errors
    row["ok"] = is_exact and max(errors) < MOST_ERROR
    return row


class Choices:
    """A router that gives the choices which it is told."""

    ids: Tensor
    shares: Tensor

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.ids, self.shares, x

    def through(self, experts: Map, x: Tensor, ids: Tensor) -> Tensor:
        """What these experts make of rows with these choices."""
        self.ids = ids
        return experts(x)


def experts_row(mixture: Mixture, bench: Bench, is_measured: bool = True) -> Row:
    """All experts of a layer but the router, by tokens; each token with its own choice of them."""
    from nanoengine.kernels.triton_codes import TritonCodes

    weights = [random_expert(mixture, bench.device) for _ in range(mixture.count)]
    coded = [made for each in weights if (made := CodedExpert.of(each)) is not None]
    router, gated = Choices(), GATED["silu"]
    ours = TritonCodes().experts(router, coded, gated, None)
    numbers = (dense(each) for each in weights)
    theirs = GroupedExperts(router, numbers, mixture.count, gated, None)
    row: Row = {"model": mixture.model, "format": mixture.format, "experts": mixture.count}
    expert_bytes = sum(rows.held_bytes for rows in (coded[0].gate_up, coded[0].down))
    expert_numbers = 3 * mixture.hidden * mixture.inner
    errors = []
    for tokens in tokens_of(bench)[:4]:
        x, ids = bench.normal(tokens, mixture.hidden), choices_of(tokens, mixture, bench.device)
        router.shares = torch.full(ids[0].shape, 1 / mixture.top_k, device=bench.device)
        want = router.through(theirs, x, ids[0])
        errors.append(relative_error(router.through(ours, x, ids[0]), want.float()))
        if not is_measured:
            continue
        used = sum(len(set(each.flatten().tolist())) for each in ids) / len(ids)
        operations = 2.0 * tokens * mixture.top_k * expert_numbers

        def all_of(run: Map, x: Tensor = x, ids: list[Tensor] = ids) -> list[Callable[[], object]]:
            return [partial(router.through, run, x, each) for each in ids]

        found: Row = {"used": round(used, 1)}
        found["codes"] = bench.measured(all_of(ours), round(used * expert_bytes), operations)
        if not theirs.host_waits:
            num_bytes = round(used * expert_numbers * 2)
            found["bfloat16"] = bench.measured(all_of(theirs), num_bytes, operations)
        row[str(tokens)] = found
    row["relative_errors"] = errors
    row["ok"] = max(errors) < MOST_ERROR_OF_EXPERTS
    return row


def random_expert(mixture: Mixture, device: torch.device) -> ExpertWeights:
    """Gate, up and down as codes."""
    hidden, inner, name = mixture.hidden, mixture.inner, mixture.format
    gate, up, down = (
        CodedWeight((random_codes(name, *shape, device),), torch.bfloat16)
        for shape in ((inner, hidden), (inner, hidden), (hidden, inner))
    )
    return ExpertWeights(gate, up, down)


def dense(expert: ExpertWeights) -> ExpertWeights:
    """The same as the numbers that the kernels make, which other rows hold to those of gguf."""
    from nanoengine.kernels.triton_codes import TritonCodes

    def numbers(weight: Weight | None) -> Tensor:
        assert isinstance(weight, CodedWeight)
        (rows,) = (part for part in weight.parts if isinstance(part, CodedRows))
        every = torch.arange(len(rows.rows), device=rows.rows.device)
        return TritonCodes().pack(weight).gather_rows(every)

    return ExpertWeights(numbers(expert.gate), numbers(expert.up), numbers(expert.down))


def choices_of(tokens: int, mixture: Mixture, device: torch.device) -> list[Tensor]:
    """Experts of each token, int64 [tokens, top_k], NUM_CALLS times."""
    scores = torch.rand((NUM_CALLS, tokens, mixture.count), device=device)
    return list(scores.argsort(2)[..., : mixture.top_k].contiguous().unbind())


def tokens_of(bench: Bench) -> tuple[int, ...]:
    """Rows of x."""
    return TOKENS[:2] if bench.scale.is_rehearsal else TOKENS


def relative_error(got: Tensor, want: Tensor) -> float:
    """The norm of the difference over the norm."""
    return round(float((got.float() - want).norm() / want.norm()), 5)


def graph_s(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Seconds of one of the calls, which a GPU replays as one graph; on a CPU, of the first."""
    for call in dict.fromkeys(calls):
        call()
    if device.type == "cpu":
        start = time.perf_counter()
        calls[0]()
        return time.perf_counter() - start
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times: list[float] = []
    for _ in range(5):
        first, last = (torch.Event(device, enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
    return min(times) / len(calls) / 1000


def random_codes(name: str, outputs: int, inputs: int, device: torch.device) -> CodedRows:
    """Any codes, with scales of a size that weights have."""
    from coded import HALVES  # imports gguf

    weights, num_bytes = FORMATS[name]
    blocks = torch.randint(
        256, (outputs, inputs // weights, num_bytes), dtype=torch.uint8, device=device
    )
    places: dict[int, float] = dict.fromkeys(HALVES[name], 2.0**-10)
    if name.startswith("INT"):
        places[2] = 8.0
    for at, value in places.items():
        half = torch.tensor([value], dtype=torch.float16, device=device).view(torch.uint8)
        blocks[..., at : at + 2] = half
    if name == "MXFP4":
        blocks[..., 0] = 119
    if name == "FP8":
        blocks[blocks & 127 == 127] -= 1  # NaN
    if name in ("FP8", "NF4"):
        blocks[..., :4] = torch.tensor([2.0**-10], device=device).view(torch.uint8)
    if name == "NVFP4":
        blocks[..., :4] &= 63  # no NaN
        blocks[..., 4:8] = torch.tensor([2.0**-8], device=device).view(torch.uint8)
    return CodedRows(name, blocks.flatten(1))
