"""Weights in bfloat16 held in 12 bits: no bit of them, and of a product, is another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from marks import SMALLER, needs_compiler, smaller, use_our_products, use_tiles
from torch import Tensor

from nanoengine.kernels.call_tape import CallTape
from nanoengine.kernels.cpu_linear import CpuLinear, is_supported
from nanoengine.kernels.packed_product import PackedHead, PackedLinear, PackedProduct
from nanoengine.kernels.packed_weight import ADD

pytestmark = [needs_compiler, pytest.mark.usefixtures("two_threads")]

# (outputs, inputs): one panel, parts of one, an odd number of them, more than a chunk of k; so
# with tiles.
SHAPES = [(64, 32), (33, 96), (200, 576), (70, 2080), (40, 2784)]
ROWS = (1, 2, 5, 6, 7, 12, 13, 18, 33, 64, 150, 192, 200)


@pytest.fixture(scope="module", params=["vectors", "float32", "tiles", *smaller("avx2")])
def packer(build_folder: Path, request: pytest.FixtureRequest) -> CpuLinear:
    """As machines without and with matrix tiles compile it. In float32 weights that fit bfloat16
    are held so, too, also with AVX2.
    """
    with pytest.MonkeyPatch.context() as patch:
        is_float32 = request.param in ("float32", "avx2")
        if not is_float32 or is_supported():
            (use_tiles if request.param == "tiles" else use_our_products)(patch)
        dtype = torch.float32 if is_float32 else torch.bfloat16
        flags = () if request.param == "tiles" else ("-U__AMX_TILE__",)
        flags += SMALLER["avx2"] if request.param == "avx2" else ()
        made = CpuLinear.load(CallTape(), build_folder, flags, dtype)
    if not made.holds_12_bits:
        pytest.skip("neither AVX512-VBMI2 nor AVX2 alone, which take numbers in 12 bits apart")
    return made


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Any bits, among them those of what is no number: of as many upper bytes as there are."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, shape, generator=generator).short().view(torch.bfloat16)


def with_others(*shape: int, seed: int = 0) -> Tensor:
    """Some blocks of one size, and some with a few weights, or many, of other sizes."""
    weight = normal(*shape, seed=seed)
    weight[3::64, 5::32] = noise(*weight[3::64, 5::32].shape, seed=seed)
    weight[1::8, 16:32] = noise(*weight[1::8, 16:32].shape, seed=seed + 1)
    return weight


WEIGHTS = {"normal": normal, "others": with_others}


def numbers(packer: CpuLinear, weight: Tensor) -> Tensor:
    """In the dtype of activations."""
    return weight.to(packer.dtype)


def reference_of(packer: CpuLinear, weight: Tensor) -> PackedLinear:
    """The same rows, and after them as many that leave nothing to save."""
    whole = torch.cat((weight, noise(max(128, len(weight)), weight.shape[1]).nan_to_num()))
    packed = packer.pack(numbers(packer, whole))
    assert bits_of(packed, whole) >= 16
    return packed


def same_bits(a: Tensor, b: Tensor) -> bool:
    ints = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return torch.equal(a.contiguous().view(ints), b.contiguous().view(ints))


def bits_of(packed: PackedProduct, weight: Tensor) -> float:
    return 8 * packed.num_bytes / weight.numel()


@pytest.mark.parametrize("outputs, inputs", SHAPES)
@pytest.mark.parametrize("name", WEIGHTS)
def test_rows_are_the_numbers(packer, name, outputs, inputs):
    weight = numbers(packer, WEIGHTS[name](outputs, inputs))
    packed = packer.pack(weight)
    assert bits_of(packed, weight) < 15 * (outputs // 64 + 1) * 64 / outputs
    order = torch.arange(outputs).flip(0)
    assert same_bits(packed.gather_rows(order), weight.flip(0))


def test_they_take_12_bits_and_the_tables(packer):
    weight = numbers(packer, normal(1024, 1024))
    assert 12 < bits_of(packer.pack(weight), weight) < 12.3
    one = torch.ones_like(weight)
    assert 12 < bits_of(packer.pack(one), one) < 12.2


@pytest.mark.parametrize("outputs, inputs", SHAPES)
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_product_has_the_bits_of_16(packer, name, outputs, inputs):
    """What is no number is left out: the bits that it gives are the machine's."""
    weight = WEIGHTS[name](outputs, inputs).nan_to_num()
    packed, reference = packer.pack(numbers(packer, weight)), reference_of(packer, weight)
    assert packed.num_bytes < 0.95 * 2 * -(-outputs // 64) * 64 * inputs
    for rows in ROWS:
        x = numbers(packer, normal(rows, inputs, seed=rows)) / 3
        assert same_bits(packed.in_float(x), reference.in_float(x)[:, :outputs]), rows
    x, residual = (numbers(packer, normal(13, n, seed=1)) for n in (inputs, outputs))
    want = (residual.float() + reference(x)[:, :outputs].float()).to(packer.dtype)
    packed.multiply(x, residual, ADD)
    assert same_bits(residual, want)


def test_gate_and_up_take_turns(packer):
    gate, up, extra = with_others(40, 96, seed=2).nan_to_num(), normal(40, 96), noise(128, 96)
    norm = torch.rand(96), 1e-5
    one = packer.pack_gate_up(numbers(packer, gate), numbers(packer, up), norm=norm)
    parts = (numbers(packer, torch.cat((part, extra.nan_to_num()))) for part in (gate, up))
    two = packer.pack_gate_up(*parts, norm=norm)
    assert one.num_bytes < 0.95 * 2 * 128 * 96 and two.num_bytes >= 2 * 336 * 96
    for rows in (1, 7, 40):
        x = numbers(packer, normal(rows, 96, seed=rows))
        assert same_bits(one(x), two(x)[:, :40])


def test_panels_of_a_head(packer):
    head = PackedHead(packer.pack(numbers(packer, normal(300, 64))))
    x = numbers(packer, normal(2, 64, seed=1))
    found = head.of_runs(x, torch.tensor([0, 4]))
    assert same_bits(found[:, :64], head(x)[:, :64])
    assert same_bits(found[:, 256:], head(x)[:, 256:])
    assert found[:, 64:256].isneginf().all()


def test_threads_move_no_bit(packer):
    weight = numbers(packer, with_others(1000, 256).nan_to_num())
    packed = packer.pack(weight)
    for rows in (1, 40, 250):
        x = numbers(packer, normal(rows, 256, seed=rows))
        by_two = packed(x)
        torch.set_num_threads(1)
        assert same_bits(packer.pack(weight)(x), by_two)
        torch.set_num_threads(2)


def test_what_saves_little_stays_in_16_bits(packer):
    for weight in (noise(128, 64), normal(128, 48)):  # 48: rows of no whole steps
        assert packer.pack(numbers(packer, weight)).num_bytes >= 16 * weight.numel() // 8
    before = packer.saved_bytes
    packed = packer.pack(numbers(packer, normal(256, 64)))
    assert packer.saved_bytes - before == 256 * 64 * packer.dtype.itemsize - packed.num_bytes
