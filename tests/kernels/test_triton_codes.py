"""Codes on a GPU, interpreted: weights have the bits of CodedRows.numbers (those of a GGUF file by
the package gguf), and products are theirs. The compiler makes code for GPUs that are not here.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from coded import every_e4m3, random_rows, random_weight
from compiled import compiled_by
from kernel_bounds import check_kernels
from marks import needs_no_gpu
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from inline_ptx import create_inline_asm
from triton.runtime import interpreter

from nanoengine.kernels import chosen_tiles, triton_codes
from nanoengine.kernels.chosen_tiles import ChosenTiles
from nanoengine.kernels.code_planes import OF_256, planes_of
from nanoengine.kernels.triton_codes import CodedExperts, CodedProduct, TritonCodes
from nanoengine.models.stored_codes import FORMATS, CodedWeight, Weight, joined

pytestmark = needs_no_gpu
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
HELPER = Path(__file__).parents[1] / "helpers" / "compile_codes.py"


@pytest.fixture(autouse=True)
def kernels_stay_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel touches memory beside the tensors that it was given."""
    check_kernels(monkeypatch)


def normal(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pack(weight: Weight, bias: Tensor | None = None) -> CodedProduct:
    assert isinstance(weight, CodedWeight)
    return TritonCodes().pack(weight, bias)


def assert_product(got: Tensor, x: Tensor, numbers: Tensor, bias: Tensor | None = None) -> None:
    """Within the roundings of float32 sums, and of the result."""
    exact = x.double() @ numbers.double().T
    size = x.double().abs() @ numbers.double().abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    allowed = size * 2**-21 + exact.abs() * torch.finfo(got.dtype).eps * 0.51
    assert ((got.double() - exact).abs() <= allowed).all()


@pytest.fixture
def plain_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number of a dot is a sum of its own, in order: NumPy's differ with the shape."""

    def dot(_: Any, a: Any, b: Any, total: Any, *others: Any) -> Any:
        sums = (a.data[:, :, None] * b.data[None]).cumsum(1)[:, -1]
        return interpreter.TensorHandle(sums + total.data, total.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@pytest.mark.some(8)
@pytest.mark.parametrize("dtype", [BF16, pytest.param(F16, marks=pytest.mark.breadth)], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_the_numbers_of_the_codes(name: str, dtype: torch.dtype) -> None:
    """Also rounded; two programs for a row, of which one is not full; in lanes and in words."""
    order = torch.tensor([18, 0, 7])
    for each in (F32, dtype):
        for inputs in {32: (320, 352), 64: (320,), 256: (512,)}[FORMATS[name][0]]:
            weight = random_weight(name, 19, inputs, each)
            assert torch.equal(pack(weight).gather_rows(order), weight.numbers()[order])


def test_scales_at_both_ends() -> None:
    """MXFP4's smallest power of two, which is denormal, and one that is no number."""
    rows = random_rows("MXFP4", 2, 32)
    rows.rows[:, 0] = torch.tensor([0, 255])
    made = pack(CodedWeight((rows,), F32)).gather_rows(torch.arange(2))
    assert torch.equal(made[:1], CodedWeight((rows,), F32)[:1].numbers()) and made[0].any()
    assert made[1].isnan().all()


def test_every_number_of_fp8() -> None:
    """Also denormal and NaN."""
    rows, numbers = every_e4m3(-0.3)
    made = pack(CodedWeight((rows,), F32)).gather_rows(torch.arange(8))
    assert made.isnan().sum() == 2
    torch.testing.assert_close(made, numbers, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["FP8", "NVFP4"])
def test_a_nan_in_lanes_is_the_nan_of_its_output(name: str) -> None:
    """Its block is NaN there."""
    rows = random_rows(name, 4, 128)
    rows.rows[2, 0 if name == "NVFP4" else 4] = 127
    weight = CodedWeight((rows,), F32)
    product, x = pack(weight), normal(3, 128)
    assert weight.numbers().isnan().any(1).tolist() == [False, False, True, False]
    assert product(x).isnan().any(0).tolist() == [False, False, True, False]
    assert product.gather_rows(torch.arange(4)).isnan().any(1).tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("name", FORMATS)
def test_planes_take_the_bytes_that_are_counted(name: str) -> None:
    rows = random_rows(name, 48, 512)
    planes = [plane for plane in planes_of([rows]).tensors if plane is not None]
    assert sum(plane.nbytes for plane in planes) == rows.held_bytes
    assert rows.held_bytes == rows.rows.nbytes + (48 * 16 if name == "MXFP4" else 0)


@pytest.fixture
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights are split, too, and more than 8 rows go through the spans one by one."""
    monkeypatch.setattr(triton_codes, "_LEAST_SPAN", 256)
    monkeypatch.setattr(triton_codes, "MOST_IN_PARTS", 8)


@pytest.mark.usefixtures("short_spans")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.breadth] * (name not in ("Q5_1", "Q6_K", "INT8")))
        for name in FORMATS
    ],
)
def test_a_product_is_that_of_the_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans of inputs in parallel and one after the other, a tile that is not full, a bias; of
    words, and of lanes, which many rows multiply so.
    """
    monkeypatch.setattr(triton_codes, "MOST_FEW", 0)
    outputs, is_short = 40, FORMATS[name][0] == 32
    for dtype, inputs in ((F32, 544 if is_short else 768), (BF16, 576 if is_short else 768)):
        assert triton_codes.spans_of(outputs, inputs)[1] > 1
        check_product(random_weight(name, outputs, inputs, dtype))


def check_product(weight: Any, numbers: Tensor | None = None) -> None:
    """Of 3 and 9 rows; numbers: if they are not those of the weight."""
    outputs, inputs = weight.shape
    bias = normal(outputs, dtype=weight.dtype)
    product = pack(weight, bias)
    numbers = weight.numbers() if numbers is None else numbers
    for rows in (3, 9):
        x = normal(rows, inputs, dtype=weight.dtype, seed=rows)
        got = product(x)
        assert got.dtype is weight.dtype
        assert_product(got, x, numbers, bias)
        assert_product(product.in_float(x), x, numbers, bias)


@pytest.mark.usefixtures("short_spans")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.breadth] * (name not in ("Q4_0", "Q6_K", "IQ2")))
        for name in FORMATS
    ],
)
def test_few_rows_multiply_numbers_that_are_not_rounded(name: str) -> None:
    """Scales multiply sums; levels of NF4 are rounded."""
    rows = random_rows(name, 40, 768 if name in OF_256 else 576)
    numbers = rows.numbers(F32)
    for dtype in (F32, BF16):
        if name == "NF4":
            scales = rows.rows.view(40, -1, 36)[..., :4].contiguous().view(F32)
            levels = (numbers.view(40, -1, 64) / scales).to(dtype).float()
            check_product(CodedWeight((rows,), dtype), (levels * scales).view(40, -1))
        else:
            check_product(CodedWeight((rows,), dtype), numbers)


@pytest.mark.parametrize("name", FORMATS)
def test_packed_codes_are_the_same_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does with two codes at a time, and the interpreter with one."""
    product = pack(random_weight(name, 40, 256, BF16))
    x = normal(5, 256, dtype=BF16)
    want = product.in_float(x)
    calls = Mock(side_effect=create_inline_asm)
    monkeypatch.setattr(
        interpreter.InterpreterBuilder, "create_inline_asm", lambda *args: calls(*args)
    )
    monkeypatch.setattr(triton_codes, "JITFunction", object)
    assert torch.equal(product.in_float(x), want) and calls.called


@pytest.mark.parametrize("name", ["Q4_0", "Q6_K"])
def test_many_rows_multiply_unpacked_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several slabs, of which the last one is not full."""
    monkeypatch.setattr(triton_codes, "MOST_FEW", 0)
    monkeypatch.setattr(triton_codes, "MOST_MULTIPLIED", 2)
    monkeypatch.setattr(triton_codes, "MOST_MULTIPLIED_SLOWLY", 2)
    monkeypatch.setattr(triton_codes, "_SLAB", 32)
    for dtype in (F32, BF16):
        check_product(random_weight(name, 40, 768 if name == "Q6_K" else 544, dtype))


@pytest.mark.usefixtures("plain_dot", "short_spans")
@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K"])
def test_a_row_has_the_same_bits_among_few_rows(name: str) -> None:
    """In tiles of all sizes."""
    product = pack(random_weight(name, 40, 768, F32))
    x = normal(64, 768)
    want = product(x)
    for first, last in ((0, 1), (7, 9), (20, 30), (30, 50)):
        assert torch.equal(product(x[first:last]), want[first:last])


@pytest.mark.usefixtures("plain_dot", "short_spans")
def test_a_row_has_the_same_bits_among_any_rows() -> None:
    product = pack(random_weight("Q4_0", 70, 544, F32))
    x = normal(70, 544)
    want = product(x)
    for first, last in ((0, 1), (7, 9), (60, 70)):
        assert torch.equal(product(x[first:last]), want[first:last])
    strided = torch.cat((x, x), 1)[:9, :544]
    assert strided.stride(0) == 1088 and torch.equal(product(strided), want[:9])
    assert not len(product(x[:0]))


def test_parts_of_several_formats_are_one_product() -> None:
    """q, k and v of a Q4_K_M file, and one that is not coded."""
    coded = [random_weight(name, 32, 256, F32) for name in ("Q4_K", "Q4_K", "Q6_K")]
    together = joined([*coded, normal(8, 256)])
    assert isinstance(together, CodedWeight) and len(together.parts) == 3
    bias, x = normal(104, seed=1), normal(4, 256, seed=2)
    assert_product(pack(together, bias)(x), x, together.numbers(), bias)


@pytest.mark.some(2)
@pytest.mark.usefixtures("plain_dot", "short_spans")
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 2), (9, 3)])
@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("MXFP4", 96),  # by `product`, the others by `few_rows`
        ("Q4_K", 512),
        *(pytest.param(name, 512, marks=pytest.mark.breadth) for name in FORMATS if name != "Q4_K"),
    ],
)
def test_rows_go_through_the_experts_that_they_chose(
    name: str, inputs: int, tokens: int, top_k: int
) -> None:
    """Each choice has the bits of that expert's product alone; of 512 inputs in two spans."""
    count = 5
    rows = [random_rows(name, 16, inputs, seed) for seed in range(count)]
    biases = [normal(16, seed=seed) for seed in range(count)]
    ids = torch.stack([torch.randperm(count - 1)[:top_k] for _ in range(tokens)])
    tiles = ChosenTiles.of(ids, count)  # and nobody chose the last one
    x = normal(tokens, inputs)
    made = CodedExperts(planes_of(rows), torch.stack(biases))(x, tiles, top_k)
    again = CodedExperts(planes_of(rows), None)(x.repeat_interleave(top_k, 0), tiles, 1)
    for choice, expert in enumerate(ids.flatten().tolist()):
        row, weight = x[choice // top_k, None], CodedWeight((rows[expert],), F32)
        assert torch.equal(made[choice, None], pack(weight, biases[expert])(row))
        assert torch.equal(again[choice, None], pack(weight)(row))


@pytest.mark.parametrize("compared", [0, 40])
def test_tiles_hold_rows_of_one_expert_each(compared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is chosen, there are as many tiles: a graph holds them."""
    monkeypatch.setattr(chosen_tiles, "MOST_COMPARED", compared)
    for ids in (torch.zeros(40, 1).long(), torch.arange(40)[:, None] % 4):
        tiles = ChosenTiles.of(ids, 5)
        assert tiles.rows == 16 and len(tiles.experts) == 7
        seen = []
        for expert, start, end in zip(tiles.experts, tiles.starts, tiles.ends, strict=True):
            assert start < end <= 40 if expert >= 0 else start == end == 0
            held = tiles.places[start : min(int(end), int(start) + 16)]
            assert (ids[held] == expert).all()
            seen += held.tolist()
        assert sorted(seen) == list(range(40))


# -- compiled, without a GPU -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("formats", "capabilities"),
    [
        pytest.param("Q4_0", "89", marks=pytest.mark.breadth),
        *(
            pytest.param(",".join(formats), "80,89,90,120", marks=pytest.mark.slow)
            for formats in ([*FORMATS][first : first + 6] for first in range(0, len(FORMATS), 6))
        ),
    ],
)
def test_all_compile_for_a_gpu(formats: str, capabilities: str) -> None:
    """The interpreter takes what the compiler refuses. Codes and rows are copied ahead of the loop
    (else a step waits for memory), tensor cores multiply, numbers are rounded to the nearest, and
    it fits the shared memory of a card of that kind.
    """
    made = compiled_by(HELPER, formats, capabilities, "bfloat16")
    kernels = [each["kernel"] for each in made]
    few = "few_rows", "merge"
    one_each = [*few, *few, "product", "unpack", "choose", *few, "gather"]
    assert kernels == one_each * len(formats.split(",")) * len(capabilities.split(","))
    most = {80: 163, 89: 99, 90: 227, 120: 99}
    # A few words: of 128 rows such that are read once a span; of few rows, on sm_120 alone.
    spilled = Counter(product=64, few_rows=32)
    for each in made:
        assert each["shared"] <= most[each["capability"]] << 10, each
        assert not each["flushed"] and each["spilled"] <= spilled[each["kernel"]], each
        # few_rows has exact numbers, and `choose` has indices.
        assert each["rounded"] or each["kernel"] in ("few_rows", "choose"), each
        if each["kernel"] in ("product", "few_rows"):
            assert each["tensor_cores"] and each["copied_ahead"] >= 2, each


@pytest.mark.parametrize(
    "formats",
    [
        pytest.param("Q8_0", marks=pytest.mark.breadth),
        *(
            pytest.param(",".join(formats), marks=pytest.mark.slow)
            for formats in ([*FORMATS][first : first + 6] for first in range(0, len(FORMATS), 6))
        ),
    ],
)
def test_float32_fits_a_gpu_too(formats: str) -> None:
    """Of a GeForce, which has 99 KiB of shared memory."""
    for each in compiled_by(HELPER, formats, "86", "float32"):
        assert each["shared"] <= 99 << 10, each


def test_only_nvidias_gpus_get_lines_of_their_assembler(monkeypatch: pytest.MonkeyPatch) -> None:
    here = torch.device("cuda")
    assert not triton_codes.has_ptx(here), "it is interpreted"
    monkeypatch.setattr(triton_codes, "JITFunction", object)
    monkeypatch.setattr(torch.version, "hip", None)
    assert triton_codes.has_ptx(here) and not triton_codes.has_ptx(torch.device("xpu"))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not triton_codes.has_ptx(here)
