"""Weights in float32 whose numbers fit 16 bits are held so, and no bit of a product changes. Of 12
bits: test_bf12.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from marks import SMALLER, needs_compiler, smaller
from torch import Tensor

from nanoengine.kernels.call_tape import CallTape
from nanoengine.kernels.cpu_linear import CpuLinear, PackedGateUp
from nanoengine.kernels.packed_weight import ADD

pytestmark = [needs_compiler, pytest.mark.usefixtures("two_threads", "in_16_bits")]

# As this machine compiles it, with vectors of 8 lanes, and with those of 4 without fused steps.
BUILDS = {"native": (), **smaller("generic")}
if "avx2" in SMALLER:
    BUILDS["avx2"] = ("-march=haswell",)
SHAPES = [(64, 32), (33, 96), (200, 576), (70, 2048)]
WIDE = torch.tensor(1 / 3)  # fits no 16 bits


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.breadth] * (name != "native")) for name in BUILDS
    ],
)
def packer(build_folder: Path, request: pytest.FixtureRequest) -> CpuLinear:
    return CpuLinear.load(CallTape(), build_folder, BUILDS[request.param], torch.float32)


def stored(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Numbers of this dtype, some of them small ones without a leading 1, in float32."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    values[..., ::7] *= torch.finfo(dtype).tiny
    return values.to(dtype).float()


def widened(weight: Tensor) -> Tensor:
    """With a row more, which keeps all of it in 32 bits."""
    return torch.cat((weight, WIDE.expand(1, weight.shape[1])))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.contiguous().view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_and_its_rows_have_the_bits_of_32(packer, dtype):
    for outputs, inputs in SHAPES:
        weight = stored(dtype, outputs, inputs)
        narrow, wide = packer.pack(weight), packer.pack(widened(weight))
        assert 2 * narrow.num_bytes <= wide.num_bytes < 4.01 * (outputs + 64) * inputs
        order = torch.arange(outputs).flip(0)
        assert same_bits(narrow.gather_rows(order), weight.flip(0))
        for rows in (1, 2, 3, 4, 5, 8, 31, 130):
            x = torch.randn(rows, inputs)
            assert same_bits(narrow(x), wide(x)[:, :outputs]), (outputs, inputs, rows)


def test_what_is_fused_has_the_bits_of_32(packer):
    gate, up = (stored(torch.bfloat16, 40, 96, seed=seed) for seed in range(2))
    norm = torch.rand(96), 1e-5
    narrow = packer.pack_gate_up(gate, up, norm=norm)
    wide = packer.pack_gate_up(widened(gate), widened(up), norm=norm)
    down, bias = stored(torch.bfloat16, 50, 64, seed=2), torch.randn(50)
    narrow_down = packer.pack(down, bias)
    wide_down = packer.pack(widened(down), torch.cat((bias, WIDE[None])))
    for rows in (1, 2, 7, 33):
        x = torch.randn(rows, 96)
        assert same_bits(narrow(x), wide(x)[:, :40])
        sums = torch.randn(rows, 51)
        ours = sums[:, :50].clone()
        narrow_down.multiply(x[:, :64], ours, ADD)
        wide_down.multiply(x[:, :64], sums, ADD)
        assert same_bits(ours, sums[:, :50])


def test_numbers_that_are_none_fit_too(build_folder):
    packer = CpuLinear.load(CallTape(), build_folder, (), torch.float32)
    weight = stored(torch.bfloat16, 64, 96)
    weight[3, 5], weight[4, 7] = torch.nan, torch.inf
    packed = packer.pack(weight)
    assert packer.saved_bytes == 64 * 96 * 2
    assert same_bits(packed.gather_rows(torch.arange(64)), weight)


def test_saved_bytes_are_counted(build_folder):
    packer = CpuLinear.load(CallTape(), build_folder, (), torch.float32)
    packer.pack(stored(torch.bfloat16, 64, 96))
    assert packer.saved_bytes == 64 * 96 * 2


def test_what_does_not_fit_stays_in_32_bits(build_folder):
    """A number, a row of no whole groups; a gate that fits beside an up that does not."""
    packer = CpuLinear.load(CallTape(), build_folder, (), torch.float32)
    packer.pack(widened(stored(torch.bfloat16, 63, 96)))
    packer.pack(stored(torch.bfloat16, 64, 48))
    odd = stored(torch.bfloat16, 64, 96)
    odd[3, 5] = WIDE
    packer.pack(odd)
    odd = stored(torch.float16, 64, 96)
    odd[3, 5] = torch.nan
    packer.pack(odd)
    both = packer.pack_gate_up(stored(torch.float16, 63, 96), widened(odd[:62]))
    assert isinstance(both, PackedGateUp)
    assert packer.saved_bytes == 0
