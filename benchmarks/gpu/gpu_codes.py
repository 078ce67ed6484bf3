"""Products of weights that stay codes, beside PyTorch's of bfloat16: parts of gpu_check.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from coded import HALVES
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.gpu_kernels import kernel_s
from benchmarks.gpu.gpu_measure import Row, Scale
from nanoengine.models.stored_codes import FORMATS, CodedRows, CodedWeight

TOKENS = (1, 8, 32, 2048)
CHECKED_ROWS = 64
# Outputs and inputs of Llama-3.1-8B's products. All formats multiply by the largest of a layer.
GATE_UP = (28672, 4096)
OTHERS = ((6144, 4096), (4096, 4096), (4096, 14336), (128256, 4096))
MOST_USED = "Q4_K"
# gpt-oss-20b: experts, those of a token, outputs of gate and up, inputs.
EXPERTS = (32, 4, 5760, 2880)


@dataclass(frozen=True)
class Bench:
    """Where it runs, and how fast memory is read there."""

    scale: Scale
    device: torch.device
    read_gb_per_s: float

    def measured(self, call: Callable[[], object], num_bytes: int, operations: float) -> Row:
        """The time of a call, the rate at which it reads `num_bytes`, and its operations."""
        seconds = kernel_s(call, self.device)
        rate = num_bytes / seconds / 1e9
        return {
            "ms": round(1000 * seconds, 4),
            "gb_per_s": round(rate, 1),
            "share_of_reads": round(rate / self.read_gb_per_s, 3),
            "tflop_per_s": round(operations / seconds / 1e12, 2),
        }


def coded_products(scale: Scale, read_gb_per_s: float) -> Iterator[Row]:
    """Each format in the largest shape, one in all shapes, then experts in MXFP4. A row says
    whether numbers have the bits of the package gguf, and whether those of a product are the same
    among few rows and many, which no GPU promises.
    """
    if scale.is_rehearsal:
        from quick_interpreter import speed_up

        speed_up()  # and bfloat16 is rounded
    bench = Bench(scale, torch.device(scale.device), read_gb_per_s)
    shapes = [(name, GATE_UP) for name in FORMATS] + [(MOST_USED, shape) for shape in OTHERS]
    for name, (outputs, inputs) in shapes:
        shape = (96, 512) if scale.is_rehearsal else (outputs, inputs)
        yield product_row(name, shape, bench)
        if scale.is_rehearsal and name != "Q4_0":
            break
    yield experts_row(bench)


def product_row(name: str, shape: tuple[int, int], bench: Bench) -> Row:
    """One weight, by tokens."""
    from nanoengine.kernels.triton_codes import TritonCodes  # after --device is known

    outputs, inputs = shape
    weight = CodedWeight((random_codes(name, outputs, inputs, bench.device),), torch.bfloat16)
    product = TritonCodes().pack(weight)
    checked = torch.arange(min(CHECKED_ROWS, outputs), device=bench.device)
    is_exact = torch.equal(product.gather_rows(checked), weight[: len(checked)].numbers())
    dense = torch.randn(shape, device=bench.device, dtype=torch.bfloat16)
    row: Row = {"format": name, "outputs": outputs, "inputs": inputs, "ok": is_exact}
    most = 16 if bench.scale.is_rehearsal else max(TOKENS)
    x = torch.randn((most, inputs), device=bench.device, dtype=torch.bfloat16)
    whole = product(x)
    for tokens in (tokens for tokens in TOKENS if tokens <= most):
        part, operations = x[:tokens], 2.0 * tokens * outputs * inputs
        coded, plain = partial(product, part), partial(functional.linear, part, dense)
        row[str(tokens)] = {
            "codes": bench.measured(coded, weight.nbytes, operations),
            "bfloat16": bench.measured(plain, dense.nbytes, operations),
            "bits_as_among_all": torch.equal(product(part), whole[:tokens]),
        }
    return row


def experts_row(bench: Bench) -> Row:
    """Gate and up of the experts of a layer, each token with its own choice of them."""
    from nanoengine.kernels.code_planes import planes_of
    from nanoengine.kernels.triton_codes import CodedExperts

    count, top_k, outputs, inputs = (4, 2, 96, 96) if bench.scale.is_rehearsal else EXPERTS
    rows = [random_codes("MXFP4", outputs, inputs, bench.device) for _ in range(count)]
    product = CodedExperts(planes_of(rows), None)
    dense = torch.randn((count, outputs, inputs), device=bench.device, dtype=torch.bfloat16)
    row: Row = {"experts": count, "top_k": top_k, "outputs": outputs, "inputs": inputs}
    for tokens in TOKENS[:2] if bench.scale.is_rehearsal else TOKENS:
        x = torch.randn((tokens, inputs), device=bench.device, dtype=torch.bfloat16)
        ids = torch.rand((tokens, count), device=bench.device).argsort(1)[:, :top_k]
        used = int(torch.bincount(ids.flatten()).count_nonzero())
        operations = 2.0 * tokens * top_k * outputs * inputs
        coded, plain = partial(chosen, product, x, ids, count), partial(grouped, x, ids, dense)
        row[str(tokens)] = {
            "used": used,
            "codes": bench.measured(coded, used * rows[0].held_bytes, operations),
            "bfloat16": bench.measured(plain, used * dense[0].nbytes, operations),
        }
    return row


def chosen(product: Any, x: Tensor, ids: Tensor, count: int) -> Tensor:
    """As triton_codes.CodedMixture multiplies."""
    from nanoengine.kernels.triton_codes import ChosenTiles

    result: Tensor = product(x, ChosenTiles.of(ids, count), ids.shape[1])
    return result


def grouped(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """As models.experts.GroupedExperts multiplies."""
    chosen, places = ids.flatten().sort(stable=True)
    experts = torch.arange(len(weights), device=x.device)
    ends = torch.searchsorted(chosen, experts, right=True).int()
    return functional.grouped_mm(x[places // ids.shape[1]], weights.mT, offs=ends)


def random_codes(name: str, outputs: int, inputs: int, device: torch.device) -> CodedRows:
    """Any codes, with scales of a size that weights have."""
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
