"""Products of rows rounded to 8 bits: exact where nothing is rounded, else as near as the codes."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch
from coded import random_rows, random_weight
from marks import HAS_TILES, SMALLER, named, needs_compiler, use_tiles
from torch import Tensor

from nanoengine.kernels import cpu_linear, packed_weight
from nanoengine.kernels.c_build import cpu_flags
from nanoengine.kernels.call_tape import CallTape
from nanoengine.kernels.cpu_kernels import CpuKernels
from nanoengine.kernels.cpu_linear import CpuLinear, is_supported
from nanoengine.kernels.packed_experts import PackedApart, PackedExpert, PackedExperts
from nanoengine.kernels.packed_product import PackedHead
from nanoengine.kernels.packed_weight import ADD, INTEGER_FORMATS
from nanoengine.models.stored_codes import FORMATS, CodedRows, CodedWeight

pytestmark = [needs_compiler, pytest.mark.usefixtures("two_threads")]

F32, BF16 = torch.float32, torch.bfloat16
# (outputs, inputs): whole panels, less than one, and an odd number of half panels.
SHAPES = [(64, 256), (33, 512), (200, 768)]
IN_TILES = "Q4_0", "Q4_K", "Q8_0"  # of default tests
# What bytes are multiplied with: this CPU's best, pairs in 16 bits, and numbers one by one.
BUILDS: dict[str, tuple[str, ...]] = {"native": (), **SMALLER}
if platform.machine() == "x86_64":
    BUILDS = {"native": (), "plain": SMALLER["generic"]}
    if {b"avx512_vnni", b"avx_vnni"}.intersection(cpu_flags().split()):
        BUILDS["no dot product"] = ("-mno-avx512vnni", "-mno-avxvnni")
    if "avx2" in SMALLER:
        BUILDS["AVX2"] = ("-march=haswell",)
ALIKE = [build for build in BUILDS if build != "plain"]  # in all bits


def load(
    folder: Path,
    build: str = "native",
    dtype: torch.dtype = F32,
    formats: frozenset[str] = frozenset(FORMATS),
) -> CpuLinear:
    flags = BUILDS[build]
    return CpuLinear.load(CallTape(), folder, flags, dtype, formats=formats, rounds_rows=True)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(build, marks=[pytest.mark.breadth] * (build != "native")) for build in BUILDS
    ],
)
def packer(build_folder: Path, request: pytest.FixtureRequest) -> CpuLinear:
    return load(build_folder, request.param)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole_rows(rows: int, inputs: int) -> Tensor:
    """Rows that lose nothing: in each group integers up to 127, times a power of two."""
    generator = torch.Generator().manual_seed(rows)
    groups = torch.randint(-127, 128, (rows, inputs // 32, 32), generator=generator).float()
    groups[..., 5] = 127
    powers = torch.randint(-9, 9, (rows, inputs // 32, 1), generator=generator)
    groups[:, 1], powers[:, 1] = 0, 0
    return (groups * 2.0**powers).flatten(1)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("name", sorted(INTEGER_FORMATS))
def test_codes_are_multiplied_exactly(packer: CpuLinear, name: str) -> None:
    for outputs, inputs in SHAPES:
        weight, x = random_weight(name, outputs, inputs, F32), whole_rows(300, inputs)
        numbers, product = weight.numbers().double(), packer.pack(weight)
        got = product(x)
        # The minima and the codes' part cancel, so what is off is measured by both.
        size = x.double().abs() @ (numbers.abs() + numbers.abs().amax(1, True)).T
        assert ((got - x.double() @ numbers.T).abs() <= size * 2**-20).all()
        for first, last in ((7, 8), (9, 11), (3, 6), (20, 25), (100, 240)):
            assert same_bits(product(x[first:last]), got[first:last]), (first, last)


@pytest.mark.parametrize("name", sorted(INTEGER_FORMATS))
def test_an_input_is_rounded_to_the_nearest_code(packer: CpuLinear, name: str) -> None:
    weight, x = random_weight(name, 96, 512, F32), normal(40, 512)
    numbers = weight.numbers().double()
    groups = x.view(40, -1, 32)
    most = groups.abs().amax(2, keepdim=True)
    codes = (groups.double() * (127 / most).double()).round()
    want = (codes * (most / 127).double()).flatten(1) @ numbers.T
    size = x.double().abs() @ (numbers.abs() + numbers.abs().amax(1, True)).T
    assert ((packer.pack(weight)(x) - want).abs() <= size * 2**-20).all()


def test_no_thread_moves_a_bit(packer: CpuLinear) -> None:
    product, x = packer.pack(random_weight("Q4_K", 300, 512, F32)), normal(400, 512)
    want = product(x)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in (1, 2, 33, 150, 400):
            assert same_bits(product(x[:rows]), want[:rows])


@pytest.mark.parametrize("rows", [1, 9, 200])
def test_what_is_fused_is_as_one_by_one(packer: CpuLinear, kernels: CpuKernels, rows: int) -> None:
    """Norm, bias, residual sum; and silu of the gate. Rows of `x` have strides."""
    weight, norm, bias = random_weight("Q5_0", 80, 256, F32), normal(256, seed=1), normal(80)
    x, out = normal(rows, 300, seed=2)[:, :256], normal(rows, 80, seed=3)
    normed, fused = torch.empty(rows, 256), out.clone()
    product = packer.pack(weight, bias, (norm, 1e-5))
    product.multiply(x, fused, ADD)
    kernels.rms_norm(x, norm, 1e-5, normed)
    want = out + packer.pack(weight, bias)(normed)
    torch.testing.assert_close(fused, want, rtol=0, atol=0.05 * float(want.std()))
    other = random_weight("Q5_0", 80, 256, F32)
    gated = packer.pack_gate_up(weight, other)
    assert gated is not None
    gate, up = (packer.pack(each)(x) for each in (weight, other))
    torch.testing.assert_close(gated(x), torch.nn.functional.silu(gate) * up, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dtype", "of_norm"), [(F32, F32), (BF16, BF16), (BF16, F32)], ids=str)
def test_norm_and_rounding_are_those_of_the_two(
    build_folder: Path, kernels: CpuKernels, dtype: torch.dtype, of_norm: torch.dtype
) -> None:
    if dtype is BF16 and not is_supported():
        pytest.skip("no AVX512-BF16 here")
    packer, weight = load(build_folder, dtype=dtype), random_weight("Q4_1", 64, 96, dtype)
    norm, x = normal(96).to(of_norm), normal(5, 96, seed=1).to(dtype)
    normed = torch.empty_like(x)
    kernels.rms_norm(x, norm, 1e-5, normed)
    assert same_bits(packer.pack(weight, norm=(norm, 1e-5))(x), packer.pack(weight)(normed))


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_row_stays_visible_and_alone(packer: CpuLinear, broken: float) -> None:
    x, product = normal(6, 256), packer.pack(random_weight("Q4_0", 64, 256, F32))
    want = product(x)
    x[2, 77] = broken
    got = product(x)
    assert got[2].isnan().all()
    others = torch.tensor([0, 1, 3, 4, 5])
    assert same_bits(got[others], want[others])


def test_zeros_and_the_least_numbers_give_zeros(packer: CpuLinear) -> None:
    product = packer.pack(random_weight("Q4_0", 64, 256, F32))
    x = torch.zeros(3, 256)
    x[1] = 1e-40
    x[2, :32] = 1e-31
    assert (product(x) == 0).all()


@pytest.mark.parametrize("name", sorted(set(FORMATS) - INTEGER_FORMATS))
def test_codes_that_are_no_integers_are_multiplied_as_numbers(
    build_folder: Path, name: str
) -> None:
    exact = CpuLinear.load(CallTape(), build_folder, (), F32, formats=frozenset(FORMATS))
    weight, x = random_weight(name, 64, 256, F32), normal(7, 256)
    got, want = load(build_folder).pack(weight), exact.pack(weight)
    for rows in (1, 2, 4, 7):
        assert same_bits(got(x[:rows]), want(x[:rows])), rows


@pytest.mark.breadth
@pytest.mark.skipif(len(ALIKE) < 2, reason="this CPU multiplies bytes in one way")
def test_every_instruction_gives_the_same_bits(build_folder: Path) -> None:
    builds = [load(build_folder, build) for build in ALIKE]
    for name in sorted(INTEGER_FORMATS):
        weight = random_weight(name, 100, 512, F32)
        for rows in (1, 2, 7, 16, 37):
            x = normal(rows, 512)
            first, *others = (packer.pack(weight)(x) for packer in builds)
            assert all(same_bits(first, other) for other in others)


def packed_expert(
    packer: CpuLinear,
    gate: CodedRows,
    up: CodedRows,
    down: CodedRows | Tensor,
    kernels: CpuKernels | None = None,
) -> PackedExpert:
    """kernels: of what gates codes of two formats."""
    made = packer.pack(CodedWeight((down,), F32))
    gated = packer.pack_gate_up(CodedWeight((gate,), F32), CodedWeight((up,), F32))
    if gated is not None:
        return gated, made
    both = packer.pack(CodedWeight((gate, up), F32))
    assert kernels is not None

    def gated(gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        kernels.gate_mul(gate_up, "silu", out)
        return out

    return PackedApart(both, gated, "silu"), made


@pytest.mark.parametrize("of_up", ["Q4_0", "Q8_0"])
def test_experts_are_as_one_by_one(
    packer: CpuLinear, of_up: str, build_folder: Path, request: pytest.FixtureRequest
) -> None:
    """Gate and up are one weight, or two."""
    kernels = CpuKernels.load(build_folder, BUILDS[request.node.callspec.params["packer"]])
    hidden, inner, count, top_k = 96, 64, 9, 3
    experts = [
        (
            random_rows("Q4_0", inner, hidden, seed),
            random_rows(of_up, inner, hidden, seed + 50),
            random_rows("Q8_0", hidden, inner, seed + 90),
        )
        for seed in range(count)
    ]
    x, logits = normal(300, hidden), normal(300, count, seed=1)
    weights, ids = torch.topk(logits.softmax(1), top_k)
    packed = PackedExperts(
        packer.workspace,
        lambda rows: (ids[: len(rows)], weights[: len(rows)], rows),
        [packed_expert(packer, *expert, kernels=kernels) for expert in experts],
        None,
    )
    want = torch.zeros(300, hidden)
    for choice in range(top_k):
        for number, expert in enumerate(experts):
            rows = (ids[:, choice] == number).nonzero()[:, 0]
            gated, down = packed_expert(packer, *expert, kernels=kernels)
            want[rows] += down(gated(x[rows])) * weights[rows, choice, None]
    for tokens in (1, 2, 33, 300):
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert same_bits(packed(x[:tokens]), want[:tokens]), (tokens, threads)


def test_small_experts_of_many_rows_are_as_one_by_one(build_folder: Path) -> None:
    """Too few products for several threads, and rows of more than one block."""
    packer, rows, hidden, inner = load(build_folder), 40, 64, 24
    gate, up = (random_rows("Q4_0", inner, hidden, seed) for seed in range(2))
    x, down = normal(rows, hidden), normal(hidden, inner, seed=1)
    ids, weights = torch.zeros(rows, 1, dtype=torch.int64), torch.ones(rows, 1)
    packed = PackedExperts(
        packer.workspace,
        lambda rows: (ids, weights, rows),
        [packed_expert(packer, gate, up, down)],
        None,
    )
    gated = packer.pack_gate_up(CodedWeight((gate,), F32), CodedWeight((up,), F32))
    assert gated is not None
    want = packer.pack(down)(gated(x))
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert same_bits(packed(x), want), threads


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_rows_of_an_embedding_are_the_numbers(
    build_folder: Path, dtype: torch.dtype, name: str
) -> None:
    if dtype is BF16 and not is_supported():
        pytest.skip("no AVX512-BF16 here")
    weight = random_weight(name, 70, 512, dtype)
    rows = load(build_folder, dtype=dtype).pack(weight).gather_rows(torch.arange(70))
    assert torch.equal(rows, weight.numbers())


def test_bfloat16_rows_are_rounded_alike(build_folder: Path) -> None:
    if not is_supported():
        pytest.skip("no AVX512-BF16")
    packer, exact = load(build_folder, dtype=BF16), load(build_folder)
    weight, x = random_weight("Q4_K", 64, 512, BF16), normal(9, 512).to(BF16)
    assert same_bits(packer.pack(weight).in_float(x), exact.pack(weight)(x.float()))


@pytest.mark.parametrize("name", named({name: name for name in sorted(INTEGER_FORMATS)}, *IN_TILES))
def test_matrix_tiles_give_the_bits_of_vectors(
    build_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Many rows are multiplied in tiles, few in vectors."""
    use_tiles(monkeypatch)
    formats = frozenset(FORMATS)
    if not HAS_TILES and name in IN_TILES:  # no other default test has this library
        monkeypatch.setattr(cpu_linear, "held_bits", packed_weight.held_bits)
        formats = frozenset(IN_TILES)
    packer = load(build_folder, dtype=BF16, formats=formats)
    for outputs, inputs in SHAPES:
        product = packer.pack(random_weight(name, outputs, inputs, BF16))
        x = normal(150, inputs).to(BF16)
        few = torch.cat([product.in_float(rows) for rows in x.split(9)])
        for rows in (16, 31, 150):
            assert same_bits(product.in_float(x[:rows]), few[:rows]), (outputs, rows)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K"])
def test_a_head_in_runs_has_the_bits_of_the_whole_one(build_folder: Path, name: str) -> None:
    weight = random_weight(name, 200, 512, F32)
    head, x = PackedHead(load(build_folder).pack(weight)), normal(300, 512)
    for rows in (1, 5, 300):
        made, whole = head.of_runs(x[:rows], torch.tensor([1, 3])), head(x[:rows])
        assert same_bits(made[:, 64:128], whole[:, 64:128])
        assert same_bits(made[:, 192:], whole[:, 192:])
        assert (made[:, :64] == -torch.inf).all() and (made[:, 128:192] == -torch.inf).all()
