"""The rules of recurrent layers: what each is made of, and the call that runs any of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nanoengine.config.model import AnyRecurrent, Multipliers, ShortConvConfig
from nanoengine.context import ForwardContext, RecurrentState
from nanoengine.models.delta_net import DeltaNet, KimiNet, gated_delta
from nanoengine.models.mamba import MambaNet, flat_rows, mamba
from nanoengine.models.short_conv import ShortConvNet, short_conv

RecurrentNet = DeltaNet | MambaNet | ShortConvNet


def recurrence(x: Tensor, net: RecurrentNet, state: RecurrentState, ctx: ForwardContext) -> Tensor:
    """[tokens, sum(shape.sizes)] -> [tokens, shape.value_size]. Replaces the state."""
    if isinstance(net, DeltaNet):
        return gated_delta(x, net, state, ctx)
    if isinstance(net, MambaNet):
        return mamba(x, net, state, ctx)
    return short_conv(x, net, state, ctx)


def make_net(
    shape: AnyRecurrent,
    convs: Sequence[str],
    tensor: Callable[[str], Tensor],
    eps: float,
    multipliers: Multipliers,
) -> RecurrentNet:
    """convs: what the names of convolutions begin with, one behind the other. tensor: gives one of
    a layer by its name there. eps: of the norm behind the rule. What is convolved is multiplied by
    way of the convolution, what the rule gives by way of the norm.
    """

    def wide(name: str) -> Tensor:
        return tensor(name).float()

    conv = torch.cat([wide(f"{part}conv1d.weight") for part in convs]).squeeze(1)
    if isinstance(shape, ShortConvConfig):
        bias = wide("conv1d.bias") if shape.has_bias else None
        return ShortConvNet(shape, conv.T.contiguous(), bias)
    decay, dt_bias = -wide("A_log").exp(), wide("dt_bias")
    if shape.rule != "mamba":
        delta, norm = KimiNet if shape.rule == "kimi" else DeltaNet, wide("norm.weight")
        step_by = 2.0 if shape.doubles_steps else 1.0
        return delta(shape, conv.T.contiguous(), decay, dt_bias, norm, eps, step_by)
    order = flat_rows(torch.arange(shape.channels), shape).to(conv.device)
    keys = shape.key_size
    gate_by, *of_mixed, step_by = multipliers.projected
    factors = torch.tensor(of_mixed).repeat_interleave(torch.tensor([shape.value_size, keys, keys]))
    conv = (conv * factors.to(conv.device)[:, None])[order].T.contiguous()
    has_norm = shape.norm != "none"
    norm = wide("norm.weight") if has_norm else torch.ones(shape.value_size, device=conv.device)
    return MambaNet(
        *(shape, conv, wide("conv1d.bias")[order], decay, dt_bias, wide("D")),
        *(norm * multipliers.mixed, eps, gate_by, step_by),
    )
