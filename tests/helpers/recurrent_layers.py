"""Recurrent layers with random weights, states and rows, and one step of them without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from nanoengine.config.model import AnyRecurrent, RecurrentConfig, ShortConvConfig
from nanoengine.context import ForwardContext, RecurrentState, StepRows
from nanoengine.models.delta_net import DeltaNet, KimiNet
from nanoengine.models.mamba import MambaNet
from nanoengine.models.rules import RecurrentNet
from nanoengine.models.short_conv import ShortConvNet

CPU = torch.device("cpu")
SHAPES: dict[str, AnyRecurrent] = {
    "as in Qwen": RecurrentConfig((0,), 1, 3, 128, 128, 4),
    "odd sizes": RecurrentConfig((0,), 2, 4, 12, 75, 3),
    "OLMo Hybrid": RecurrentConfig((0,), 2, 2, 96, 192, 4, doubles_steps=True),
    "Kimi": RecurrentConfig((0,), 2, 2, 128, 128, 4, rule="kimi"),
    "Kimi of odd sizes": RecurrentConfig((0,), 3, 3, 12, 75, 3, rule="kimi"),
    "Ling": RecurrentConfig((0,), 2, 2, 128, 128, 4, rule="kimi", least_rate=-5.0),
    "Ling of odd sizes": RecurrentConfig((0,), 3, 3, 12, 75, 3, rule="kimi", least_rate=-2.5),
    "Mamba-2": RecurrentConfig((0,), 1, 3, 128, 64, 4, rule="mamba"),
    "Mamba-2 of odd sizes": RecurrentConfig((0,), 2, 4, 12, 75, 3, rule="mamba"),
    "Falcon-H1": RecurrentConfig((0,), 1, 3, 128, 64, 4, rule="mamba", norm="none"),
    "a norm before the gate": RecurrentConfig(
        (0,), 2, 4, 12, 75, 3, rule="mamba", norm="before gate"
    ),
    "short convolution": ShortConvConfig((0,), 2048, 3),
    "short convolution of odd sizes": ShortConvConfig((0,), 75, 4, has_bias=True),
    "LFM3": ShortConvConfig((0,), 75, 7),
}
Rule = Callable[[Tensor, RecurrentNet, RecurrentState, ForwardContext], Tensor]


def make_net(shape: AnyRecurrent, device: torch.device = CPU) -> RecurrentNet:
    """A layer between its projections; float32."""
    generator = torch.Generator().manual_seed(1)

    def random_of(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).to(device)

    conv = random_of(shape.conv_size, shape.channels)
    if isinstance(shape, ShortConvConfig):
        return ShortConvNet(shape, conv, random_of(shape.channels) if shape.has_bias else None)
    heads = shape.num_value_heads
    decay, dt_bias = -random_of(heads).exp() / 8, random_of(shape.num_decays)
    if shape.rule != "mamba":
        kind = KimiNet if shape.rule == "kimi" else DeltaNet
        step_by = 2.0 if shape.doubles_steps else 1.0
        return kind(shape, conv, decay, dt_bias, random_of(shape.value_dim), 1e-6, step_by)
    bias, skip, norm = (random_of(n) for n in (shape.channels, heads, shape.value_size))
    factors = (1.0, 1.0) if shape.norm == "after gate" else (0.7, 1.3)
    return MambaNet(shape, conv, bias, decay, dt_bias, skip, norm, 1e-6, *factors)


def make_state(
    shape: AnyRecurrent, dtype: torch.dtype, slots: int = 5, device: torch.device = CPU
) -> RecurrentState:
    """Slots of noise: what a new sequence finds there must not matter."""
    generator = torch.Generator().manual_seed(2)
    inputs, memory = (torch.randn(slots, *each, generator=generator) for each in shape.state_shapes)
    return RecurrentState(inputs.to(device, dtype), memory.to(device), torch.empty(0))


def context_of(
    lengths: Sequence[int], done: Sequence[int], device: torch.device = CPU
) -> ForwardContext:
    """A step of sequences with so many rows, of which `done` tokens were computed before: minus as
    many as it has rows: they are padding, without keys.
    """
    both, nothing = zip(lengths, done, strict=True), cast(Any, None)
    rows = StepRows([0], [0], [(num, num + before) for num, before in both])
    return ForwardContext.lay_out(
        rows,
        nothing,
        nothing,
        lambda values, dtype: torch.tensor(values, dtype=dtype, device=device),
    )


def in_slots(state: RecurrentState, slots: Sequence[int]) -> RecurrentState:
    """The state, whose sequences have these slots."""
    return replace(state, slots=torch.tensor(slots, device=state.memory.device))


def run_step(
    rule: Rule,
    net: RecurrentNet,
    state: RecurrentState,
    x: Sequence[Tensor],
    done: Sequence[int],
    slots: Sequence[int],
) -> list[Tensor]:
    """The rows of each sequence; done: as in context_of."""
    lengths = [len(rows) for rows in x]
    ctx = context_of(lengths, done, state.memory.device)
    return list(torch.split(rule(torch.cat(list(x)), net, in_slots(state, slots), ctx), lengths))


def some_rows(net: RecurrentNet, dtype: torch.dtype, *lengths: int) -> list[Tensor]:
    """What the projections give, of sequences of so many tokens."""
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randn(n, sum(net.shape.sizes), generator=generator) for n in lengths]
    return [each.to(net.conv.device, dtype) for each in rows]
