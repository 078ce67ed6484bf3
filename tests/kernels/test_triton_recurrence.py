"""Recurrent layers in Triton, interpreted: transformers' numbers, PyTorch's path, and bits that do
not depend on how a text is cut or who else is in the step. The compiler makes code for GPUs that
are not here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compiled import compiled_by
from kernel_bounds import check_kernels
from marks import named, needs_no_gpu
from recurrent_layers import SHAPES, make_net, make_state, run_step, some_rows
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from triton.runtime.interpreter import GridExecutor

from nanoengine.config.model import RecurrentConfig
from nanoengine.context import ForwardContext, RecurrentState
from nanoengine.kernels.gpu_ops import GpuOps
from nanoengine.kernels.triton_recurrence import blocks_of
from nanoengine.models.delta_net import DeltaNet, KimiNet
from nanoengine.models.mamba import MambaNet
from nanoengine.models.rules import RecurrentNet, recurrence

pytestmark = needs_no_gpu
HELPER = Path(__file__).parents[1] / "helpers" / "compile_recurrence.py"
F32, BF16 = torch.float32, torch.bfloat16
DELTA = RecurrentConfig((0,), 2, 4, 20, 24, 4)
MAMBA = replace(DELTA, rule="mamba")
KIMI = RecurrentConfig((0,), 3, 3, 20, 20, 4, rule="kimi")
TOLERANCE = {F32: 2e-5, BF16: 0.03, torch.float16: 0.004}


@pytest.fixture(autouse=True)
def kernels_stay_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel touches memory beside the tensors that it was given."""
    check_kernels(monkeypatch)


def in_triton(x: Tensor, net: RecurrentNet, state: RecurrentState, ctx: ForwardContext) -> Tensor:
    """As engines call it on a GPU."""
    return GpuOps(None).recurrence(net)(x, state, ctx)


def assert_near(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


# -- transformers
# -----------------------------------------------------------------------------------------------


def parts_of(shape: RecurrentConfig) -> Iterator[slice]:
    """The columns of q, k, v (C, B, x), z and the gates."""
    keys, values = shape.num_key_heads * shape.key_dim, shape.value_size
    start = 0
    for size in (keys, keys, values, *shape.sizes[1:]):
        yield slice(start, start + size)
        start += size


def delta_of_transformers(net: DeltaNet, rows: Tensor, patch: pytest.MonkeyPatch) -> Tensor:
    """Its layer, which takes these rows for its hidden states and selects from them."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    shape, size = net.shape, rows.shape[1]
    layer = modeling.Qwen3_5GatedDeltaNet(
        SimpleNamespace(
            hidden_size=size,
            linear_num_value_heads=shape.num_value_heads,
            linear_num_key_heads=shape.num_key_heads,
            linear_key_head_dim=shape.key_dim,
            linear_value_head_dim=shape.value_dim,
            linear_conv_kernel_dim=shape.conv_size,
            hidden_act="silu",
            rms_norm_eps=net.eps,
            layer_types=["linear_attention"],
        ),
        0,
    )
    one_by_one = modeling.torch_recurrent_gated_delta_rule
    patch.setattr(modeling, "torch_chunk_gated_delta_rule", one_by_one)
    each = torch.eye(size).split_with_sizes(shape.sizes)
    weights = dict(zip(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), each, strict=True))
    weights = {f"{name}.weight": weight for name, weight in weights.items()}
    weights |= {
        "out_proj.weight": torch.eye(size, shape.value_size),
        "conv1d.weight": net.conv.T.unsqueeze(1),
        "A_log": (-net.decay).log(),
        "dt_bias": net.dt_bias,
        "norm.weight": net.norm,
    }
    return output_of(layer, weights, rows)[:, : shape.value_size]


def kimi_of_transformers(net: KimiNet, rows: Tensor, patch: pytest.MonkeyPatch) -> Tensor:
    """The same of Kimi Linear, whose rows have what its low-rank products give."""
    from transformers.models.kimi_linear import modeling_kimi_linear as modeling

    shape, size = net.shape, rows.shape[1]
    if shape.least_rate:
        return ling_of_transformers(net, rows)
    layer = modeling.KimiLinearDeltaAttention(
        SimpleNamespace(
            hidden_size=size,
            linear_num_heads=shape.num_value_heads,
            linear_head_dim=shape.key_dim,
            linear_conv_kernel_dim=shape.conv_size,
            hidden_act="silu",
            rms_norm_eps=net.eps,
            layer_types=["linear_attention"],
        ),
        0,
    )
    q, k, v, z, b, a = torch.eye(size).split_with_sizes(
        [shape.key_size, shape.key_size, shape.value_size, *shape.sizes[1:]]
    )
    for part, name, weight in ((layer.forget_gate, "f", a), (layer, "g", z)):
        setattr(part, f"{name}_a_proj", torch.nn.Linear(size, len(weight), bias=False))
        setattr(part, f"{name}_b_proj", torch.nn.Identity())
    state = {
        "q_proj.weight": q,
        "k_proj.weight": k,
        "v_proj.weight": v,
        "b_proj.weight": b,
        "g_a_proj.weight": z,
        "o_proj.weight": torch.eye(size, shape.value_size),
        "conv1d.weight": net.conv.T.unsqueeze(1),
        "forget_gate.f_a_proj.weight": a,
        "forget_gate.A_log": (-net.decay).log().view(1, 1, -1, 1),
        "forget_gate.dt_bias": net.dt_bias,
        "o_norm.weight": net.norm,
    }
    return output_of(layer, state, rows)[:, : shape.value_size]


def ling_of_transformers(net: KimiNet, rows: Tensor) -> Tensor:
    """The same of Ling 3.0, whose projections are one each."""
    from transformers.models.bailing_hybrid import modeling_bailing_hybrid as modeling

    shape, size = net.shape, rows.shape[1]
    layer = modeling.BailingHybridDeltaAttention(
        SimpleNamespace(
            hidden_size=size,
            linear_num_heads=shape.num_value_heads,
            linear_head_dim=shape.key_dim,
            linear_conv_kernel_dim=shape.conv_size,
            hidden_act="silu",
            rms_norm_eps=net.eps,
            kda_safe_gate=True,
            kda_lower_bound=shape.least_rate,
        ),
        0,
    )
    parts = torch.eye(size).split_with_sizes(
        [shape.key_size] * 2 + [shape.value_size, *shape.sizes[1:]]
    )
    names = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "forget_gate.f_proj")
    state = {f"{name}.weight": part for name, part in zip(names, parts, strict=True)}
    state |= {
        "o_proj.weight": torch.eye(size, shape.value_size),
        "conv1d.weight": net.conv.T.unsqueeze(1),
        "forget_gate.A_log": (-net.decay).log(),
        "forget_gate.dt_bias": net.dt_bias,
        "o_norm.weight": net.norm,
    }
    return output_of(layer, state, rows)[:, : shape.value_size]


def mamba_of_transformers(net: MambaNet, rows: Tensor, _: pytest.MonkeyPatch) -> Tensor:
    """The same of Mamba-2, whose projection gives z; x, B, C; dt."""
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

    shape, size = net.shape, rows.shape[1]
    layer = NemotronHMamba2Mixer(
        SimpleNamespace(
            hidden_size=size,
            mamba_num_heads=shape.num_value_heads,
            mamba_head_dim=shape.value_dim,
            ssm_state_size=shape.key_dim,
            n_groups=shape.num_key_heads,
            conv_kernel=shape.conv_size,
            use_conv_bias=True,
            use_bias=False,
            mamba_hidden_act="silu",
            chunk_size=16,
            time_step_min=0.0,
            layer_norm_epsilon=net.eps,
            use_mamba_kernels=True,
            layer_types=["mamba"],
        ),
        0,
        initialize_mixer_weights=False,
    )
    c, b, x, z, dt = parts_of(shape)
    all_rows, of_conv = torch.eye(size), torch.cat((net.conv, net.conv_bias[None]))
    of_conv = torch.cat([of_conv[:, part] for part in (x, b, c)], dim=1)
    weights = {
        "in_proj.weight": torch.cat([all_rows[part] for part in (z, x, b, c, dt)]),
        "out_proj.weight": torch.eye(size, shape.value_size),
        "conv1d.weight": of_conv[:-1].T.unsqueeze(1),
        "conv1d.bias": of_conv[-1],
        "A_log": (-net.decay).log(),
        "dt_bias": net.dt_bias,
        "D": net.skip,
        "norm.weight": net.norm,
    }
    return output_of(layer, weights, rows)[:, : shape.value_size]


def output_of(layer: torch.nn.Module, weights: dict[str, Tensor], rows: Tensor) -> Tensor:
    layer.load_state_dict(weights)
    layer.eval()
    with torch.inference_mode():
        output: Tensor = layer(rows.float()[None])[0]
    return output


LENGTHS = named({"40 tokens": 40, "1 token": 1, "300 tokens": 300}, "40 tokens", "1 token")


@pytest.mark.some(2)
@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize(
    "shape",
    named(
        {
            "delta": DELTA,
            "Kimi": KIMI,
            "Ling": replace(KIMI, least_rate=-4.0),
            "Mamba-2": MAMBA,
            "Mamba-2 in one group": replace(MAMBA, num_key_heads=1),
            "delta of 80 and 96": RecurrentConfig((0,), 1, 1, 80, 96, 4),
            "Mamba-2 of 80 and 96": RecurrentConfig((0,), 1, 1, 80, 96, 4, rule="mamba"),
        },
        "delta",
        "Mamba-2 in one group",
    ),
)
def test_the_numbers_are_those_of_transformers(
    monkeypatch: pytest.MonkeyPatch, shape: RecurrentConfig, num_tokens: int
) -> None:
    net = make_net(shape)
    (rows,) = some_rows(net, F32, num_tokens)
    (got,) = run_step(in_triton, net, make_state(shape, F32), [rows], [0], [3])
    kinds = {KimiNet: kimi_of_transformers, DeltaNet: delta_of_transformers}
    theirs = kinds.get(type(net), mamba_of_transformers)
    assert_near(got, theirs(net, rows, monkeypatch), F32)


# -- PyTorch
# -----------------------------------------------------------------------------------------------


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "dtype", [F32, BF16, pytest.param(torch.float16, marks=pytest.mark.breadth)], ids=str
)
@pytest.mark.parametrize(
    "shape",
    named(SHAPES, "Kimi of odd sizes", "Mamba-2 of odd sizes"),
)
def test_it_computes_what_pytorch_does(shape: RecurrentConfig, dtype: torch.dtype) -> None:
    """New sequences and others, prompts and decodes, in one step."""
    net = make_net(shape)
    x, done, slots = some_rows(net, dtype, 1, 9, 2, 1), (0, 0, 7, 9), (4, 1, 0, 3)
    found = []
    for rule in (in_triton, recurrence):
        state = make_state(shape, dtype)
        found.append([*run_step(rule, net, state, x, done, slots), state.inputs, state.memory])
    for ours, theirs in zip(*found, strict=True):
        assert_near(ours, theirs, dtype)


@pytest.mark.parametrize("projected", [-40.0, -17.0, -9.0, -3.0, 0.5, 19.0, 25.0])
def test_small_steps_are_exact(projected: float) -> None:
    """What Mamba-2 learns is in proportion to dt = log(1 + e^x), which float32 loses for small x if
    it is computed as that says.
    """
    net = make_net(MAMBA)
    assert isinstance(net, MambaNet)
    net = replace(net, dt_bias=torch.zeros(4), decay=torch.zeros(4), skip=torch.zeros(4))
    (rows,) = some_rows(net, F32, 1)
    rows[:, -4:] = projected
    state, other = make_state(MAMBA, F32), make_state(MAMBA, F32)
    run_step(in_triton, net, state, [rows], [0], [0])
    rows[:, -4:] = math.log(math.e - 1)  # dt is 1
    run_step(in_triton, net, other, [rows], [0], [0])
    step = max(projected, 0.0) + math.log1p(math.exp(-abs(projected)))
    torch.testing.assert_close(state.memory[0], other.memory[0] * step, atol=0, rtol=2e-6)


# -- bits
# -----------------------------------------------------------------------------------------------


@pytest.mark.some(1)
@pytest.mark.parametrize("dtype", [BF16, pytest.param(F32, marks=pytest.mark.breadth)], ids=str)
@pytest.mark.parametrize("shape", [DELTA, KIMI, MAMBA], ids=["delta", "Kimi", "Mamba-2"])
def test_bits_do_not_depend_on_cuts_or_mates(shape: RecurrentConfig, dtype: torch.dtype) -> None:
    """Poison lies in the slots of all who have none, and is still there."""
    net = make_net(shape)
    rows, mate = some_rows(net, dtype, 7, 4)
    whole = make_state(shape, dtype)
    (want,) = run_step(in_triton, net, whole, [rows], [0], [2])
    for cuts in ((1,) * 7, (4, 1, 2)):
        state, got, done = make_state(shape, dtype), [], 0
        for slot in (1, 3):
            state.inputs[slot], state.memory[slot] = torch.nan, torch.nan
        for count in cuts:
            parts = [mate[: 1 + done % 4], rows[done : done + count], mate[:1]]
            is_old = done % 2 * 9
            got.append(run_step(in_triton, net, state, parts, [is_old, done, 0], [4, 0, 2])[1])
            done += count
        assert torch.equal(torch.cat(got), want)
        assert torch.equal(state.memory[0], whole.memory[2])
        assert torch.equal(state.inputs[0], whole.inputs[2])
        assert all(each[[1, 3]].isnan().all() for each in (state.inputs, state.memory))


@pytest.mark.parametrize("shape", [DELTA, KIMI, MAMBA], ids=["delta", "Kimi", "Mamba-2"])
def test_padding_rows_read_and_change_no_state(shape: RecurrentConfig) -> None:
    """They share a slot, which holds poison; the bits of the others are as without them."""
    net = make_net(shape)
    x = [*some_rows(net, F32, 3, 1), *some_rows(net, F32, 1, 1, 1)]
    alone, padded = make_state(shape, F32), make_state(shape, F32)
    padded.inputs[4], padded.memory[4] = torch.nan, torch.nan
    want = run_step(in_triton, net, alone, x[:2], [0, 6], [1, 0])
    got = run_step(in_triton, net, padded, x, [0, 6, -1, -1, -1], [1, 0, 4, 4, 4])
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=False))
    assert all(rows.isfinite().all() for rows in got)
    for ours, theirs in ((padded.inputs, alone.inputs), (padded.memory, alone.memory)):
        assert torch.equal(ours[:2], theirs[:2]) and ours[4].isnan().all()


def test_a_step_is_three_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tokens and sequences it has: PyTorch's path takes a dozen for each token."""
    launch, launched = GridExecutor.__call__, []

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        launched.append(self.fn.__name__)
        return launch(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", counted)
    net, lengths = make_net(DELTA), (5, 1, 2, 1)
    rows = some_rows(net, F32, *lengths)
    run_step(in_triton, net, make_state(DELTA, F32), rows, [0, 3, 0, 7], [0, 1, 2, 3])
    assert launched == ["mix", "scan", "gated_norm"]


def test_a_program_holds_a_thousand_numbers() -> None:
    """Of heads that are narrower or wider, too, and a column at least."""
    shape = RecurrentConfig((0,), 1, 1, 128, 128, 4)
    assert blocks_of(shape) == (8, 16)
    assert blocks_of(replace(shape, key_dim=80, value_dim=96)) == (8, 12)
    assert blocks_of(replace(shape, key_dim=16, value_dim=75)) == (64, 2)
    assert blocks_of(replace(shape, key_dim=256)) == (4, 32)
    assert blocks_of(replace(shape, key_dim=2048)) == (1, 128)


# -- compiled, without a GPU
# -----------------------------------------------------------------------------------------------


@pytest.mark.breadth
@pytest.mark.parametrize(
    ("dtype", "capabilities"),
    [
        ("bfloat16", "90"),
        pytest.param("bfloat16", "80,89,120", marks=pytest.mark.breadth),
        pytest.param("float32", "90", marks=pytest.mark.breadth),
        pytest.param("float16", "80", marks=pytest.mark.breadth),
    ],
)
def test_it_compiles_for_a_gpu(dtype: str, capabilities: str) -> None:
    """A token's numbers are on their way while the ones before it are computed; nothing spills; a
    prompt and a decode are one and the same code.
    """
    made = compiled_by(HELPER, dtype, capabilities)
    assert {each["kernel"] for each in made} == {"mix", "scan", "gated_norm"}
    for each in made:
        assert not each["spilled"], each
        assert each["of_a_decode"] == each["of_a_prompt"], each
        if each["kernel"] == "scan":
            assert each["warps"] == 1 and each["copied_ahead"] >= 5, each
