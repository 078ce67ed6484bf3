"""Packed products against float64 and their own arithmetic; the law that a batch moves no bit."""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from coded import random_rows, random_weight
from marks import BUILDS, SMALLER, needs_compiler, use_our_products, use_tiles
from torch import Tensor

from nanoengine.config.model import ExpertsConfig
from nanoengine.errors import EngineError
from nanoengine.kernels import c_build, cpu_linear
from nanoengine.kernels.c_build import KernelBuildError
from nanoengine.kernels.call_tape import CallTape
from nanoengine.kernels.cpu_linear import CpuLinear
from nanoengine.kernels.cpu_ops import PackedOps
from nanoengine.kernels.packed_experts import PackedExperts
from nanoengine.kernels.packed_weight import ADD, STORE, WeightArena
from nanoengine.models.expert_layer import make_router
from nanoengine.models.experts import (
    Experts,
    ExpertWeights,
    MixtureWeights,
    Routing,
    route,
)
from nanoengine.models.layer_ops import TorchOps
from nanoengine.models.stored_codes import FORMATS, CodedWeight, joined

pytestmark = [needs_compiler, pytest.mark.usefixtures("two_threads")]

# (outputs, inputs): a whole panel, parts of one, several; k odd, short, of whole matrix tiles (32),
# and of several chunks.
ALL = frozenset(FORMATS)
SHAPES = [(64, 32), (1, 1), (33, 7), (31, 2), (200, 61), (576, 576), (70, 4101), (97, 2048)]


@pytest.fixture(scope="module", params=BUILDS)
def packer(build_folder: Path, request: pytest.FixtureRequest) -> CpuLinear:
    """As this machine compiles it, and as one without matrix tiles would."""
    with pytest.MonkeyPatch.context() as patch:
        use_our_products(patch)
        return CpuLinear.load(CallTape(), build_folder, BUILDS[request.param])


@pytest.fixture(params=[61, 96])
def k(request: pytest.FixtureRequest) -> int:
    """Odd, and of three matrix tiles."""
    return int(request.param)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Also of NaN and of zeros with a sign."""
    ints = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    same: bool = (
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(ints), b.view(ints))
    )
    return same


def exact(x: Tensor, weight: Tensor) -> Tensor:
    return x.double() @ weight.double().T


def assert_rounded(got: Tensor, want: Tensor, inputs: int) -> None:
    """Half a step of bfloat16, and what a float32 sum of `inputs` unit terms may be off."""
    error = (got.double() - want).abs()
    assert (error <= want.abs() * 2**-8 + inputs * 2**-21).all(), error.max()


def in_chains(x: Tensor, weight: Tensor) -> Tensor:
    """The arithmetic of VDPBF16PS (Intel SDM): one chain of fused steps, the odd k of a pair first.

    A step in float64 rounded to float32 is a fused one but for ties, which are too rare to be seen.
    """
    acc = torch.zeros(len(x), len(weight))
    for even in range(0, x.shape[1], 2):
        for k in (even + 1, even):
            if k < x.shape[1]:
                term = x[:, k, None].double() * weight[None, :, k].double()
                acc = (acc.double() + term).float()
    return acc


@pytest.mark.parametrize("outputs, inputs", SHAPES)
def test_against_float64(packer, outputs, inputs):
    weight = normal(outputs, inputs)
    linear = packer.pack(weight)
    for tokens in (1, 2, 3, 4, 5, 6, 7, 13, 64):
        x = normal(tokens, inputs, seed=tokens)
        assert_rounded(linear(x), exact(x, weight), inputs)


def in_tiles(x: Tensor, weight: Tensor) -> Tensor:
    """The arithmetic of TDPBF16PS (Intel SDM): for every 32 values of k the sum of two chains of
    fused steps, over even k and over odd k; see in_chains.
    """
    acc = torch.zeros(len(x), len(weight))
    for begin in range(0, x.shape[1], 32):
        chains = [torch.zeros_like(acc), torch.zeros_like(acc)]
        for k in range(begin, begin + 32):
            term = x[:, k, None].double() * weight[None, :, k].double()
            chains[k % 2] = (chains[k % 2].double() + term).float()
        acc += chains[0] + chains[1]
    return acc


def test_every_number_of_rows(packer, k):
    weight = normal(150, k)
    linear, x = packer.pack(weight), normal(70, k, seed=1)
    want = exact(x, weight)
    for tokens in range(71):
        out = linear(x[:tokens])
        assert out.shape == (tokens, 150)
        assert_rounded(out, want[:tokens], k)


@pytest.mark.parametrize(
    "tokens, outputs, inputs",
    [(1000, 200, 600), (500, 40, 2500), (1000, 200, 608), (500, 40, 2560)],
)
def test_many_row_blocks(packer, tokens, outputs, inputs):
    weight, x = normal(outputs, inputs), normal(tokens, inputs, seed=1)
    assert_rounded(packer.pack(weight)(x), exact(x, weight), inputs)


@pytest.mark.parametrize("outputs, inputs", [(33, 32), (200, 96), (65, 1280)])
def test_sums_in_matrix_tiles(build_folder, monkeypatch, outputs, inputs):
    use_tiles(monkeypatch)
    weight, x = normal(outputs, inputs), normal(37, inputs, seed=1)
    linear = CpuLinear.load(CallTape(), build_folder).pack(weight)
    want = in_tiles(x, weight)
    assert same_bits(linear.in_float(x), want)
    assert same_bits(linear(x), want.bfloat16())


@pytest.mark.parametrize("outputs, inputs", [(33, 7), (200, 61), (65, 300)])
def test_sums_are_one_chain_in_order(packer, outputs, inputs):
    weight, x = normal(outputs, inputs), normal(9, inputs, seed=1)
    linear, want = packer.pack(weight), in_chains(x, weight)
    assert same_bits(linear.in_float(x), want)
    assert same_bits(linear(x), want.bfloat16())


@pytest.mark.parametrize(
    "outputs, inputs", [(33, 7), (200, 61), (576, 576), (130, 2500), (130, 2560)]
)
def test_batches_and_threads_move_no_bit(packer, outputs, inputs):
    linear, x = packer.pack(normal(outputs, inputs)), normal(800, inputs, seed=1)
    want = linear.in_float(x)
    rng = random.Random(0)
    for tokens in [1, 1, 1, 5, 6, 7, 800, *(rng.randint(1, 300) for _ in range(12))]:
        torch.set_num_threads(rng.choice([1, 2, 3]))
        first = rng.randint(0, 800 - tokens)
        rows = slice(first, first + tokens)
        assert same_bits(linear.in_float(x[rows]), want[rows])


@pytest.mark.parametrize("outputs, inputs", [(33, 96), (40, 61)])
def test_no_number_of_rows_moves_a_bit(packer, outputs, inputs):
    linear, x = packer.pack(normal(outputs, inputs)), normal(2048, inputs, seed=1)
    want = linear.in_float(x)
    for tokens in [*range(1, 70), 95, 96, 97, 383, 384, 385, 767, 769, 1023, 2047]:
        torch.set_num_threads(1 + tokens % 2)
        assert same_bits(linear.in_float(x[:tokens]), want[:tokens]), tokens
        assert same_bits(linear.in_float(x[-tokens:]), want[-tokens:]), tokens


def test_fused_steps_move_no_bit_either(packer, k):
    gate_up = packer.pack_gate_up(
        normal(100, k), normal(100, k, seed=1), norm=(normal(k, seed=2), 1e-5)
    )
    x = normal(1500, k, seed=3)
    want = gate_up(x)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for first, last in ((0, 1), (7, 8), (3, 70), (0, 1400), (1499, 1500)):
            assert same_bits(gate_up(x[first:last]), want[first:last])


@pytest.mark.parametrize("outputs", [64, 33, 200])
def test_bias_is_added_before_the_one_rounding(packer, k, outputs):
    weight, bias, x = normal(outputs, k), normal(outputs, seed=1), normal(9, k, seed=2)
    linear = packer.pack(weight, bias)
    want = packer.pack(weight).in_float(x) + bias.float()
    assert same_bits(linear.in_float(x), want)
    assert same_bits(linear(x), want.bfloat16())


@pytest.mark.parametrize("outputs, tokens", [(64, 1), (33, 7), (200, 64), (576, 300)])
def test_adding_is_a_product_and_a_sum(packer, k, outputs, tokens):
    linear, x = packer.pack(normal(outputs, k)), normal(tokens, k, seed=1)
    residual = normal(tokens, outputs, seed=2)
    want = residual + linear(x)
    linear.multiply(x, residual, ADD)
    assert same_bits(residual, want)


@pytest.mark.parametrize(
    ("with_bias", "activation"),
    [(False, "silu"), (True, "silu"), (True, "gelu_pytorch_tanh"), (True, "clamped_swiglu")],
)
@pytest.mark.parametrize("outputs, tokens", [(32, 1), (16, 7), (37, 7), (100, 300)])
def test_gate_up_is_two_products_and_their_gating(
    packer, k, kernels, outputs, tokens, with_bias, activation
):
    gate, up, x = normal(outputs, k), normal(outputs, k, seed=1), normal(tokens, k, seed=2)
    if activation == "clamped_swiglu":
        x *= 2  # some far beyond 7
    bias = normal(2 * outputs, seed=3) if with_bias else None
    gate_bias, up_bias = (None, None) if bias is None else bias.chunk(2)
    products = packer.pack(gate, gate_bias)(x), packer.pack(up, up_bias)(x)
    want = torch.empty(tokens, outputs, dtype=torch.bfloat16)
    kernels.gate_mul(torch.cat(products, dim=1), activation, want)
    assert same_bits(packer.pack_gate_up(gate, up, bias, None, activation)(x), want)


def test_silu_of_extreme_gates(packer, kernels):
    gate_up = packer.pack_gate_up(*torch.eye(18).bfloat16().split(9))
    values = [0.0, -0.0, -200.0, 200.0, -88.0, 3e38, -3e38, 0.1, 1e-30]
    x = torch.tensor([[*values, *[2.0] * 9]]).bfloat16()
    want = torch.empty(1, 9, dtype=torch.bfloat16)
    kernels.gate_mul(x, "silu", want)
    assert torch.equal(gate_up(x), want)


@pytest.mark.parametrize("norm_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens, inputs", [(1, 576), (9, 61), (20, 2500), (700, 61), (700, 96)])
def test_norm_is_the_kernel_then_the_product(packer, kernels, tokens, inputs, norm_dtype):
    weight, norm_weight = normal(100, inputs), normal(inputs, seed=1).to(norm_dtype) + 1
    x = normal(tokens, 3 * inputs, seed=2)[:, inputs : 2 * inputs]
    normed = torch.empty(tokens, inputs, dtype=torch.bfloat16)
    kernels.rms_norm(x, norm_weight, 1e-5, normed)
    want = packer.pack(weight).in_float(normed)
    assert same_bits(packer.pack(weight, norm=(norm_weight, 1e-5)).in_float(x), want)


def test_rows_may_lie_apart(packer, k):
    """And what lies between them is not read, not even with k odd: it may be NaN."""
    linear, x = packer.pack(normal(40, k)), normal(9, k, seed=1)
    apart = torch.full((9, k + 19), torch.nan, dtype=torch.bfloat16)
    apart[:, 5 : 5 + k] = x
    residual = torch.full((9, 100), 7.0, dtype=torch.bfloat16)
    want = residual[:, 20:60] + linear(x)
    linear.multiply(apart[:, 5 : 5 + k], residual[:, 20:60], ADD)
    assert same_bits(residual[:, 20:60].contiguous(), want)
    residual[:, 20:60] = 7.0
    assert (residual == 7.0).all()


@pytest.mark.parametrize("code_format", ["", "Q4_0", "Q5_0"])
def test_rows_of_outputs_may_lie_pages_apart(build_folder, monkeypatch, code_format):
    """Many such rows are written one by one in matrix tiles."""
    use_tiles(monkeypatch)
    packer = CpuLinear.load(CallTape(), build_folder, formats=ALL if code_format else frozenset())
    outputs, inputs, tokens = 330, 1280, 40
    weight = normal(outputs, inputs)
    if code_format:
        weight = random_weight(code_format, outputs, inputs, torch.bfloat16)
    linear, x = packer.pack(weight), normal(tokens, inputs, seed=1)
    apart, start = torch.ones(2, tokens, 2048).bfloat16(), normal(tokens, outputs, seed=2)
    linear.multiply(x, apart[0, :, :outputs], STORE)
    assert same_bits(apart[0, :, :outputs], linear(x))
    apart[1, :, :outputs] = start
    linear.multiply(x, apart[1, :, :outputs], ADD)
    assert same_bits(apart[1, :, :outputs], start + linear(x))
    assert (apart[:, :, outputs:] == 1).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row(packer, k, bad):
    weight, x = normal(70, k).abs(), normal(8, k, seed=1)
    linear = packer.pack(weight)
    clean = linear(x)
    x[3, k - 1] = bad
    out = linear(x)
    torch.testing.assert_close(out[3], torch.full((70,), bad).bfloat16(), equal_nan=True)
    others = [0, 1, 2, 4, 5, 6, 7]
    assert same_bits(out[others], clean[others])


def test_a_broken_weight_spoils_its_output_alone(packer, k):
    weight, x = normal(70, k), normal(8, k, seed=1)
    clean = packer.pack(weight)(x)
    weight[65, 3] = torch.nan
    out = packer.pack(weight)(x)
    assert out[:, 65].isnan().all()
    others = [n for n in range(70) if n != 65]
    assert same_bits(out[:, others], clean[:, others])


def test_large_sums_overflow_to_infinity(packer):
    linear = packer.pack(torch.full((1, 2), 3e38).bfloat16())
    assert linear(torch.tensor([[2.0, 2.0]]).bfloat16()).item() == torch.inf


@pytest.mark.parametrize("outputs, inputs", SHAPES)
def test_gather_rows_gives_the_weight_back(packer, outputs, inputs):
    weight = normal(outputs, inputs)
    weight[0, 0] = 1e-40  # a denormal: products flush it, a copy does not
    linear = packer.pack(weight)
    assert same_bits(linear.gather_rows(torch.arange(outputs)), weight)
    ids = torch.randint(outputs, (300,), generator=torch.Generator().manual_seed(0))
    assert same_bits(linear.gather_rows(ids), weight[ids])
    assert linear.gather_rows(ids[:0]).shape == (0, inputs)


@pytest.mark.parametrize("bad", [-1, 40, 2**40])
def test_gather_rows_refuses_other_ids(packer, bad):
    linear = packer.pack(normal(40, 8))
    with pytest.raises(EngineError, match="outside the 40 rows"):
        linear.gather_rows(torch.tensor([0, bad]))
    with pytest.raises(EngineError, match="int32"):
        linear.gather_rows(torch.tensor([0], dtype=torch.int32))


def test_a_weight_of_strided_rows(packer):
    weight, x = normal(61, 40).T, normal(3, 61, seed=1)
    assert same_bits(packer.pack(weight)(x), packer.pack(weight.contiguous())(x))


def test_two_callers_at_once(packer, k):
    linear = packer.pack(normal(300, k), norm=(normal(k), 1e-5))
    batches = [normal(tokens, k, seed=tokens) for tokens in (1, 700)]
    want = [linear(x) for x in batches]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(10):
            assert all(map(same_bits, pool.map(linear, batches), want))


def test_wrong_activations_are_refused(packer):
    linear = packer.pack(normal(40, 61))
    for x in (normal(3, 60), normal(3, 61).float(), normal(61, 3).T):
        with pytest.raises(EngineError, match="rows of 61 values"):
            linear(x)
    residuals = normal(2, 40), normal(3, 41), normal(3, 40).float(), normal(40, 3).T
    for residual in residuals:
        with pytest.raises(EngineError, match="added to bfloat16 rows of 40"):
            linear.multiply(normal(3, 61), residual, ADD)


def test_wrong_weights_are_refused(packer):
    weight = normal(40, 61)
    with pytest.raises(EngineError, match="float32"):
        packer.pack(weight.float())
    with pytest.raises(EngineError, match=r"shape \(40,\): got .* shape \(41,\)"):
        packer.pack(weight, bias=normal(41))
    with pytest.raises(EngineError, match=r"shape \(61,\)"):
        packer.pack(weight, norm=(normal(40), 1e-5))
    with pytest.raises(EngineError, match=r"bfloat16 .* got torch.float16"):
        packer.pack(weight, norm=(normal(61).half(), 1e-5))
    with pytest.raises(EngineError, match=r"shape \(40, 61\): got .* shape \(40, 60\)"):
        packer.pack_gate_up(weight, weight[:, :60])
    with pytest.raises(EngineError, match=r"shape \(0, 61\)"):
        packer.pack(weight[:0])


@pytest.mark.usefixtures("our_products")
def test_the_arena_hands_out_memory_once(build_folder):
    path, flags = cpu_linear.products_source(torch.float32, frozenset(), rounds_rows=False)
    arena = WeightArena(c_build.load_library(path, build_folder, flags))
    sizes = [1, 100, 40 << 20, 30 << 20, 70 << 20, 7]
    parts = [arena.allocate(size) for size in sizes]
    assert [len(part) for part in parts] == sizes
    starts = [part.data_ptr() for part in parts]
    assert all(start % 64 == 0 for start in starts)
    spans = sorted(zip(starts, sizes, strict=True))
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
    for part, value in zip(parts[:2], (1, 2), strict=True):
        part.fill_(value)
    assert parts[0].eq(1).all()


@pytest.mark.usefixtures("our_products")
def test_both_sources_share_a_folder(build_folder):
    path, flags = cpu_linear.products_source(torch.float32, frozenset(), rounds_rows=False)
    attention = c_build.build_library(build_folder)
    linear = c_build.build_library(build_folder, flags, path)
    assert attention != linear
    assert attention.parent == linear.parent == build_folder


def test_another_cpu_is_told_so(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_linear, "cpu_flags", lambda: b"flags\t\t: fpu avx512f avx512_bf16x")
    assert not cpu_linear.is_supported()
    with pytest.raises(KernelBuildError, match="no AVX512-BF16: set dtype"):
        CpuLinear.load(CallTape(), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.breadth
def test_a_compiler_that_does_not_know_the_cpu(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_linear, "cpu_flags", lambda: b"flags\t\t: fpu avx512_bf16")
    with pytest.raises(KernelBuildError, match="compiler knows no AVX512-BF16"):
        CpuLinear.load(CallTape(), tmp_path, SMALLER["generic"])


@pytest.mark.parametrize("hidden, inner, count, top_k", [(96, 64, 6, 3), (61, 40, 9, 2)])
def test_experts_in_one_call_are_as_one_by_one(packer, kernels, hidden, inner, count, top_k):
    """Of whole matrix tiles, and of odd sizes: the bits of each expert's products by themselves."""
    compare_experts(packer, kernels, hidden, inner, count, top_k)


@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", "clamped_swiglu"])
def test_experts_with_biases_in_one_call_are_as_one_by_one(packer, kernels, activation):
    """And with other activations; of odd sizes."""
    weights = some_experts(packer, 61, 40, 9)
    for seed, expert in enumerate(weights):
        biases = tuple(normal(size, seed=seed) for size in (80, 61))
        weights[seed] = replace(expert, biases=biases)
    compare_experts(packer, kernels, 61, 40, 9, 2, weights, activation=activation)


@pytest.mark.parametrize("hidden, inner", [(96, 64), (61, 40)])
def test_experts_without_a_gate_in_one_call_are_as_one_by_one(packer, kernels, hidden, inner):
    weights = [replace(expert, gate=None) for expert in some_experts(packer, hidden, inner, 9)]
    compare_experts(packer, kernels, hidden, inner, 9, 2, weights, activation="relu2")


@pytest.mark.parametrize("formats", [("Q4_K", "Q6_K"), ("Q8_0", "Q4_0")], ids="-".join)
def test_experts_of_codes_without_a_gate_in_one_call(build_folder, kernels, formats):
    packer = CpuLinear.load(CallTape(), build_folder, dtype=torch.float32, formats=ALL)
    coded = coded_experts((formats[0], *formats), 5, 256, 512, torch.float32)
    weights = [replace(expert, gate=None) for expert in coded]
    compare_experts(packer, kernels, 512, 256, 5, 2, weights, activation="relu2")


def test_experts_of_mxfp4_with_biases_in_one_call(build_folder, kernels):
    """As gpt-oss has them."""
    packer = CpuLinear.load(CallTape(), build_folder, dtype=torch.float32, formats=ALL)
    weights = coded_experts(("MXFP4",) * 3, 5, 64, 96, torch.float32)
    for seed, expert in enumerate(weights):
        biases = tuple(normal(size, seed=seed).float() for size in (128, 96))
        weights[seed] = replace(expert, biases=biases)
    compare_experts(packer, kernels, 96, 64, 5, 2, weights, activation="clamped_swiglu")


def test_experts_in_one_call_in_float32(build_folder, kernels):
    packer = CpuLinear.load(CallTape(), build_folder, dtype=torch.float32)
    compare_experts(packer, kernels, 61, 40, 9, 2)


ROUTES = {
    "softmax": ExpertsConfig(6, 3, 1, True),
    "of DeepSeek-V2": ExpertsConfig(
        160, 6, 1, False, scaling=1.5, num_groups=8, top_groups=3, group_best=1
    ),
    "of DeepSeek-V3": ExpertsConfig(24, 4, 1, True, (), "sigmoid", 2.5, 4, 2),
    "sigmoid": ExpertsConfig(300, 8, 1, False, (), "sigmoid"),
}


@pytest.mark.parametrize("config", ROUTES.values(), ids=ROUTES)
def test_rows_go_where_pytorch_sends_them(packer: CpuLinear, config: ExpertsConfig) -> None:
    """Ties to the first; a row's bits do not depend on the others; a NaN names experts that are."""
    generator = torch.Generator().manual_seed(config.count)
    logits = torch.randn(90, config.count, generator=generator) * 3
    logits[3], logits[4, ::2] = 0, 1
    choice_bias = torch.randn(config.count, generator=generator)
    scales = torch.rand(config.count, generator=generator)
    for bias, scale in ((None, scales), (choice_bias, None)):
        routing = Routing(config, bias, scale)
        ids, weights = packer.route(routing, logits)
        wanted, their_weights = route(routing, logits)
        assert torch.equal(ids, wanted)
        torch.testing.assert_close(weights, their_weights)
        for row in (3, 89):
            its, alone = packer.route(routing, logits[row : row + 1])
            assert torch.equal(its[0], ids[row]) and same_bits(alone[0], weights[row])
    logits[5] = torch.nan
    ids, weights = packer.route(Routing(config), logits)
    assert ids.min() >= 0 and ids.max() < config.count and weights[5].isnan().all()


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "formats",
    [
        ("Q4_0", "Q4_0", "Q8_0"),
        ("Q4_K", "Q4_K", "Q6_K"),
        ("Q5_0", "Q5_0", "Q5_0"),
        ("Q4_K", "Q6_K", "Q6_K"),
        ("Q5_0", "Q4_0", "Q8_0"),
    ],
    ids="-".join,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_of_codes_in_one_call_are_as_one_by_one(
    build_folder, kernels, monkeypatch, formats, dtype
):
    if dtype is torch.bfloat16:
        use_our_products(monkeypatch)
    packer = CpuLinear.load(CallTape(), build_folder, dtype=dtype, formats=ALL)
    weights = coded_experts(formats, 9, 256, 512, dtype)
    compare_experts(packer, kernels, 512, 256, 9, 2, weights)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "clamped_swiglu"])
def test_gate_and_up_of_two_formats_in_one_call(build_folder, kernels, activation):
    """With biases; sizes that no vector fills."""
    packer = CpuLinear.load(CallTape(), build_folder, dtype=torch.float32, formats=ALL)
    weights = coded_experts(("Q4_0", "Q8_0", "Q4_0"), 5, 32, 96, torch.float32)
    for seed, expert in enumerate(weights):
        biases = tuple(normal(size, seed=seed).float() for size in (64, 96))
        weights[seed] = replace(expert, biases=biases)
    compare_experts(packer, kernels, 96, 32, 5, 2, weights, activation=activation)


def test_experts_with_rows_of_mixed_formats_go_one_by_one(build_folder, kernels):
    packer = CpuLinear.load(CallTape(), build_folder, dtype=torch.float32, formats=ALL)
    weights = coded_experts(("Q4_0", "Q8_0", "Q4_0"), 3, 64, 96, torch.float32)
    weights[1] = replace(weights[1], up=joined([weights[1].up[:32], weights[1].gate[:32]]))
    compare_experts(packer, kernels, 96, 64, 3, 2, weights, Experts)


def coded_experts(formats, count, inner, hidden, dtype):
    shapes = (inner, hidden), (inner, hidden), (hidden, inner)
    return [
        ExpertWeights(
            *(
                CodedWeight((random_rows(name, *shape, 3 * seed + at),), dtype)
                for at, (name, shape) in enumerate(zip(formats, shapes, strict=True))
            )
        )
        for seed in range(count)
    ]


def some_experts(packer, hidden, inner, count):
    gates, ups, downs = (
        normal(count, inner, hidden, seed=seed).to(packer.dtype) for seed in range(3)
    )
    return [ExpertWeights(*each, d.T) for *each, d in zip(gates, ups, downs, strict=True)]


def compare_experts(
    packer,
    kernels,
    hidden,
    inner,
    count,
    top_k,
    weights=None,
    kind=PackedExperts,
    activation="silu",
):
    def normal(*shape, seed):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(packer.dtype)

    weights = weights or some_experts(packer, hidden, inner, count)
    router = normal(count, hidden, seed=3) / 10
    router[1] -= 100  # to which no row goes
    config = ExpertsConfig(count, top_k, inner, renormalises=True)
    ops = PackedOps(kernels, packer)
    mixture = MixtureWeights(router, Routing(config), weights)
    chosen = make_router(ops, mixture, None)
    one_by_one, packed = (
        make(mixture, chosen, activation) for make in (partial(TorchOps.experts, ops), ops.experts)
    )
    assert isinstance(packed, kind)
    x = normal(700, hidden, seed=4).abs()
    want = one_by_one(x)
    for tokens in (700, 1, 2, 7, 33, 300):
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert same_bits(packed(x[:tokens]), want[:tokens]), (tokens, threads)
            assert same_bits(packed(x[-tokens:]), want[-tokens:]), (tokens, threads)
    if kind is Experts:
        return
    with pytest.raises(EngineError, match=r"packed experts take contiguous .*float.* rows"):
        packed(normal(3, 2 * hidden, seed=5)[:, :hidden])
