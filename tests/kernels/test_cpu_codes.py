"""Products of codes: the weights are those of the package gguf. The bits are those of its numbers,
or, where codes are multiplied as they are, nearer to them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from coded import every_e4m3, random_rows, random_weight
from marks import EMULATED, OURS, emulate, named, needs_compiler, use_our_products
from torch import Tensor

from nanoengine.errors import EngineError
from nanoengine.kernels import cpu_linear, packed_weight
from nanoengine.kernels.call_tape import CallTape
from nanoengine.kernels.cpu_kernels import CpuKernels
from nanoengine.kernels.cpu_linear import CpuLinear
from nanoengine.kernels.packed_product import PackedHead
from nanoengine.kernels.packed_weight import ADD, WeightArena
from nanoengine.models.stored_codes import FORMATS, CodedRows, CodedWeight, Weight, joined

pytestmark = [needs_compiler, pytest.mark.usefixtures("two_threads")]

F32, BF16 = torch.float32, torch.bfloat16
# (outputs, inputs): whole panels, less than one, and an odd number of half panels.
SHAPES = [(64, 256), (33, 512), (200, 768)]
# bfloat16 is done in C where this CPU lacks it: in pairs, and in matrix tiles.
MACHINES = ["float32", *(OURS or ["bfloat16"])]
ALL = frozenset(FORMATS)
# Multiplied as they are in vectors of bfloat16: those of up to 6 bits.
SUMMED = ALL - {"Q8_0", "INT8", "FP8", "NVFP4", "NF4"}


@pytest.fixture(scope="module", params=MACHINES)
def packer(build_folder: Path, request: pytest.FixtureRequest) -> CpuLinear:
    dtype = F32 if request.param == "float32" else BF16
    with pytest.MonkeyPatch.context() as patch:
        if request.param in EMULATED:
            emulate(patch, request.param)
        elif dtype is BF16:
            use_our_products(patch)
        return CpuLinear.load(CallTape(), build_folder, (), dtype, formats=ALL)


def normal(packer: CpuLinear, *shape: int, seed: int = 0) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(packer.dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    ints = torch.int16 if a.dtype == BF16 else torch.int32
    same: bool = a.dtype == b.dtype and torch.equal(a.view(ints), b.view(ints))
    return same


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_those_of_the_package(packer, name):
    for outputs, inputs in SHAPES:
        weight = random_weight(name, outputs, inputs, packer.dtype)
        rows = packer.pack(weight).gather_rows(torch.arange(outputs).flip(0))
        assert torch.equal(rows, weight.numbers().flip(0)), "and 0 may be -0"


def test_every_number_of_fp8(packer):
    """Also denormal and NaN, with scales at both ends. Intel's instruction rounds a denormal to a
    bfloat16 of 0, as products take it.
    """
    for scale in (1.0, -0.3, 2.0**-120, 2.0**118):
        rows, numbers = every_e4m3(scale)
        made = packer.pack(CodedWeight((rows,), packer.dtype)).gather_rows(torch.arange(8))
        assert made.isnan().sum() == 2
        want = numbers.to(packer.dtype)
        if packer.dtype is BF16:
            smallest = torch.finfo(BF16).tiny
            made, want = (each.where(~(each.abs() < smallest), 0.0) for each in (made, want))
        torch.testing.assert_close(made, want, rtol=0, atol=0, equal_nan=True)


def rows_at_both_ends() -> CodedRows:
    """Of MXFP4: down to where its smallest number is the smallest normal one, up to one that is no
    number, the last row.
    """
    rows = random_rows("MXFP4", 4, 32)
    rows.rows[:, 0] = torch.tensor([2, 26, 250, 255])
    return rows


def test_scales_of_mxfp4_at_both_ends(packer):
    weight = CodedWeight((rows_at_both_ends(),), packer.dtype)
    made = packer.pack(weight).gather_rows(torch.arange(4))
    assert torch.equal(made[:3], weight.numbers()[:3]) and made[0].any()
    assert made[3].isnan().all()


def sums_codes(packer: CpuLinear, name: str) -> bool:
    """Whether products are sums of codes, not of weights that were rounded to bfloat16."""
    [weight] = packer.pack(random_weight(name, 64, 256, packer.dtype)).weights
    return packer.dtype is BF16 and name in SUMMED and not weight.form.is_tiled


def size_of_terms(name: str, weight: CodedWeight, x: Tensor) -> Tensor:
    """What the terms of each sum come to without their signs, [rows, outputs]: a code's and its
    minimum's, which may be much larger than the weight.
    """
    numbers = weight.numbers().double()
    per_group = numbers.view(len(numbers), -1, 32)
    largest = per_group.abs().amax(2, keepdim=True).expand_as(per_group).flatten(1)
    return x.double().abs() @ (numbers.abs() + 4 * largest).T


@pytest.mark.parametrize("name", FORMATS)
def test_a_product_has_the_bits_of_one_of_numbers(packer, name):
    """Which is exact to float32 sums, whatever the number of rows and where a row lies. Where codes
    are summed, the weights are those of the file, which nothing rounds.
    """
    for outputs, inputs in SHAPES:
        weight = random_weight(name, outputs, inputs, packer.dtype)
        coded, x = packer.pack(weight), normal(packer, 300, inputs)
        if sums_codes(packer, name):
            want, numbers = coded.in_float(x), replace(weight, dtype=F32).numbers()
            size = size_of_terms(name, replace(weight, dtype=F32), x)
        else:
            numbers = weight.numbers()
            want = packer.pack(numbers).in_float(x)
            size = x.double().abs() @ numbers.double().abs().T
        exact = x.double() @ numbers.double().T
        assert ((want - exact).abs() <= size * 2**-20).all()
        few = ((7, 8), (9, 11), (3, 6), (8, 12), (20, 25), (2, 8), (30, 37), (40, 48), (50, 63))
        for first, last in ((0, 300), *few, (100, 170)):
            assert same_bits(coded.in_float(x[first:last]), want[first:last]), (first, last)


@pytest.mark.parametrize("name", ["Q2_K", "Q4_1", "Q5_K"])
def test_rows_may_be_wider_than_sums_of_all_their_groups(packer, name):
    """Of formats with minimums, which take such sums; of rows alone and of several."""
    weight = random_weight(name, 40, 1 << 17, packer.dtype)
    coded, x = packer.pack(weight), normal(packer, 13, 1 << 17)
    numbers = replace(weight, dtype=F32).numbers().double()
    made = coded.in_float(x)
    near = (made - x.double() @ numbers.T).abs() <= size_of_terms(name, weight, x) * 2**-20
    assert near.all() or not sums_codes(packer, name)
    assert all(
        same_bits(coded.in_float(x[r : r + n]), made[r : r + n]) for r, n in ((0, 1), (3, 7))
    )


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_that_picks_an_input_gives_its_weight(packer, name):
    """In float32, bit for bit. If codes are summed, the file's own; else as it was rounded."""
    dtype = F32 if sums_codes(packer, name) else packer.dtype
    weight, inputs = random_weight(name, 70, 512, packer.dtype), torch.arange(0, 512, 5)
    picks = torch.zeros(len(inputs), 512, dtype=packer.dtype)
    picks[torch.arange(len(inputs)), inputs] = 1
    made = packer.pack(weight).in_float(picks)
    assert torch.equal(made, replace(weight, dtype=dtype).numbers()[:, inputs].T.float())


@pytest.mark.parametrize("name", FORMATS)
def test_what_the_memory_held_before_does_not_matter(packer, name, monkeypatch):
    """Codes of several outputs share a word."""
    weight, x = random_weight(name, 128, 256, packer.dtype), normal(packer, 3, 256)
    want = packer.pack(weight)(x)
    allocate = WeightArena.allocate
    monkeypatch.setattr(
        WeightArena, "allocate", lambda arena, size: allocate(arena, size).fill_(0xFF)
    )
    assert same_bits(packer.pack(weight)(x), want)


@pytest.mark.parametrize(
    "name", named({name: name for name in ("", *FORMATS)}, "", "Q4_0", "Q6_K", "FP8")
)
def test_a_head_in_runs_has_the_bits_of_the_whole_one(packer, name):
    """Runs of 64 outputs, the last one of 8; rows of one block and of several."""
    dense = normal(packer, 520, 256, seed=2)
    weight = random_weight(name, 520, 256, packer.dtype) if name else dense
    head, x = PackedHead(packer.pack(weight, norm=(dense[0], 1e-5))), normal(packer, 700, 256)
    whole = head(x)
    assert head.num_runs == 9
    for runs in ([0], [8], [1, 2, 3, 7], [*range(9)]):
        asked = torch.zeros(520, dtype=torch.bool)
        for run in runs:
            asked[64 * run : 64 * run + 64] = True
        for rows in (1, 2, 5, 17, 40, 700):
            made = head.of_runs(x[:rows], torch.tensor(runs))
            assert same_bits(made[:, asked], whole[:rows, asked])
            assert (made[:, ~asked] == -torch.inf).all()


def test_a_run_outside_the_head_is_refused(packer):
    head = PackedHead(packer.pack(normal(packer, 130, 64)))
    for run in (-1, 3):
        with pytest.raises(EngineError, match="outside the 130 tokens"):
            head.of_runs(normal(packer, 1, 64), torch.tensor([0, run]))


def test_no_thread_moves_a_bit(packer):
    coded, x = packer.pack(random_weight("Q4_K", 300, 512, packer.dtype)), normal(packer, 40, 512)
    want = coded(x)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for rows in (1, 2, 3, 4, 5, 40):
            assert same_bits(coded(x[:rows]), want[:rows])


@pytest.mark.parametrize("rows", [1, 9, 40])
def test_what_is_fused_is_that_of_numbers(packer, rows):
    """Norm, silu of the gate, residual sum and bias. Where others are summed, Q8_0 has the bits."""
    dtype, norm = packer.dtype, (normal(packer, 512, seed=1), 1e-5)
    name = "Q8_0" if sums_codes(packer, "Q5_0") else "Q5_0"
    gate, up = (random_weight(name, 80, 512, dtype, seed) for seed in (0, 1))
    x, residual = normal(packer, rows, 512, seed=2), normal(packer, rows, 80, seed=3)
    coded = packer.pack_gate_up(gate, up, norm=norm)
    dense = packer.pack_gate_up(gate.numbers(), up.numbers(), norm=norm)
    assert same_bits(coded(x), dense(x))
    bias = normal(packer, 80, seed=4)
    sums = [residual.clone() for _ in range(2)]
    for weight, out in zip((gate, gate.numbers()), sums, strict=True):
        packer.pack(weight, bias, norm).multiply(x, out, ADD)
    assert same_bits(*sums) and not torch.equal(sums[0], residual)


def test_parts_of_several_formats_are_one_product(packer):
    """q, k and v of a Q4_K_M file, and one that is not coded."""
    coded = [random_weight(name, 32, 256, packer.dtype) for name in ("Q4_K", "Q4_K", "Q6_K")]
    weights: list[Weight] = [*coded, normal(packer, 8, 256)]
    together = joined(weights)
    assert isinstance(together, CodedWeight) and len(together.parts) == 3
    assert together.shape == (104, 256)
    numbers = torch.cat([*(each.numbers() for each in coded), weights[3]])
    assert torch.equal(together.numbers(), numbers)
    order = torch.cat((torch.arange(63, -1, -1), torch.arange(64, 104)))
    assert torch.equal(together.take(order).numbers(), numbers[order])
    assert torch.equal(together[50:100].numbers(), numbers[50:100])
    bias, norm = normal(packer, 104), (normal(packer, 256, seed=1), 1e-5)
    for rows in (1, 30):
        x = normal(packer, rows, 256, seed=5)
        got, want = (packer.pack(each, bias, norm)(x) for each in (together, numbers))
        if sums_codes(packer, "Q4_K"):
            parts = [
                packer.pack(w, b, norm)(x) for w, b in zip(weights, bias.split(32), strict=True)
            ]
            want = torch.cat(parts, dim=1)
        assert same_bits(got, want)


def test_gate_and_up_of_two_formats_are_not_packed_as_one(packer):
    gate, up = (random_weight(name, 32, 256, packer.dtype) for name in ("Q4_0", "Q4_1"))
    assert packer.pack_gate_up(gate, up) is None
    assert packer.pack_gate_up(gate, joined([gate, up])[32:]) is None


@pytest.mark.parametrize(
    "formats", named({"a few": {"MXFP4", "Q4_K", "Q8_0"}, "all": ALL}, "a few")
)
def test_a_smaller_vector_has_the_same_bits(build_folder, monkeypatch, formats):
    if not EMULATED and not cpu_linear.is_supported():
        pytest.skip("no AVX-512 to compare with")
    whole = CpuLinear.load(CallTape(), build_folder, (), F32, formats=ALL)
    monkeypatch.setattr(cpu_linear, "held_bits", packed_weight.held_bits)
    smaller = CpuLinear.load(
        CallTape(), build_folder, ("-march=haswell",), F32, formats=frozenset(formats)
    )
    both = whole, smaller
    for name in sorted(formats):
        weight = random_weight(name, 100, 512, F32)
        for rows in (1, 2, 7, 40):
            x = torch.randn(rows, 512)
            assert same_bits(*(packer.pack(weight)(x) for packer in both))
    ends = CodedWeight((rows_at_both_ends(),), F32)
    assert same_bits(*(packer.pack(ends).gather_rows(torch.arange(3)) for packer in both))


def test_a_library_of_some_formats_gives_their_bits_and_refuses_others(build_folder, monkeypatch):
    """IQ3_S and IQ1 have the functions of IQ4_XS and IQ2."""
    whole = CpuLinear.load(CallTape(), build_folder, (), F32, formats=ALL)
    monkeypatch.setattr(cpu_linear, "held_bits", packed_weight.held_bits)
    held = frozenset(("Q5_0", "IQ3_S", "IQ1"))
    part = CpuLinear.load(CallTape(), build_folder, (), F32, formats=held)
    for name in sorted(held):
        weight = random_weight(name, 100, 512, F32)
        for rows in (1, 2, 7, 40):
            x = torch.randn(rows, 512)
            assert same_bits(part.pack(weight)(x), whole.pack(weight)(x))
    for name in sorted(ALL - held):
        with pytest.raises(EngineError, match=rf"codes of {name}, and .* for IQ1, IQ3_S, Q5_0: "):
            part.pack(random_weight(name, 64, 256, F32))
    numbers = CpuLinear.load(CallTape(), build_folder, (), F32)
    with pytest.raises(EngineError, match=r"codes of Q5_0, and .* for numbers alone: "):
        numbers.pack(random_weight("Q5_0", 64, 256, F32))


def test_codes_take_the_bytes_of_the_file(packer):
    rows = random_rows("Q4_K", 128, 512)
    packed = packer.pack(CodedWeight((rows,), packer.dtype))
    assert packed.num_bytes == rows.rows.nbytes == 128 * 2 * 144


def test_the_norm_is_that_of_the_kernel(packer, kernels: CpuKernels):
    weight, norm = random_weight("Q4_1", 64, 96, packer.dtype), normal(packer, 96)
    x = normal(packer, 5, 96, seed=1)
    normed = torch.empty_like(x)
    kernels.rms_norm(x, norm, 1e-5, normed)
    assert same_bits(packer.pack(weight, norm=(norm, 1e-5))(x), packer.pack(weight)(normed))
