"""The parts of recurrent layers, made of the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoengine.config.model import AnyRecurrent, ModelConfig, RecurrentConfig, ShortConvConfig
from nanoengine.models.architectures import ARCHITECTURES
from nanoengine.models.delta_net import KimiNet, flat_projections
from nanoengine.models.layer_ops import LayerOps
from nanoengine.models.layers import KimiLayer, MixerBeside, RecurrentLayer
from nanoengine.models.mamba import flat_rows
from nanoengine.models.products import Product, Tiles
from nanoengine.models.rules import RecurrentNet, make_net
from nanoengine.models.stored_codes import Weight, in_order, joined, numbers_of
from nanoengine.models.weight_shapes import conv_parts

TensorSource = Callable[[str], Weight]


@dataclass(frozen=True, slots=True)
class Projection:
    """Of what a norm gives, to what attention or a recurrent layer takes."""

    weight: Weight
    bias: Tensor | None = None


def bias_of(config: ModelConfig, source: TensorSource, prefix: str, name: str) -> Tensor:
    """The bias of a projection, times its factor."""
    bias, factor = numbers_of(source(f"{prefix}{name}_proj.bias")), config.multipliers.of_bias(name)
    return bias if factor == 1 else bias * factor


def make_recurrent(
    ops: LayerOps, config: ModelConfig, index: int, source: TensorSource
) -> tuple[Projection, RecurrentLayer, Product]:
    """What layer `index` has in place of attention, or beside it: its projection, its rule, and the
    product of what that gives. source: gives a tensor by its name in there.
    """
    shape = config.recurrent
    assert shape is not None
    tiles = None
    if isinstance(shape, RecurrentConfig) and shape.out_tiles > 1:
        tiles = Tiles(shape.out_tiles, shape.value_dim)
    architecture, multipliers = ARCHITECTURES[config.architecture], config.multipliers
    convs, eps = conv_parts(architecture), architecture.rule_eps or config.rms_norm_eps
    net = make_net(shape, convs, lambda name: numbers_of(source(name)), eps, multipliers)
    rule = _rule(ops, shape.layers.index(index), net, source)
    bias = bias_of(config, source, "", "in") if shape.has_bias else None
    if bias is not None and isinstance(shape, RecurrentConfig):
        bias = bias[flat_rows(torch.arange(len(bias)), shape).to(bias.device)]
    out_bias = bias_of(config, source, "", "out") if shape.has_out_bias else None
    out = ops.summand(source("out_proj.weight"), out_bias, tiles)
    return Projection(_projections(shape, architecture.projections, source), bias), rule, out


def _rule(ops: LayerOps, among: int, net: RecurrentNet, source: TensorSource) -> RecurrentLayer:
    """among: of the recurrent layers."""
    if not isinstance(net, KimiNet) or not net.shape.has_short_vectors:
        return RecurrentLayer(ops, among, net)
    decays, gate = (ops.linear(source(f"{name}_b_proj.weight")) for name in "fg")
    return KimiLayer(ops, among, net, decays, gate)


def _projections(shape: AnyRecurrent, names: tuple[str, ...], source: TensorSource) -> Weight:
    if isinstance(shape, ShortConvConfig):
        return source("in_proj.weight")
    if shape.rule == "mamba":
        whole = source("in_proj.weight")
        return in_order(whole, flat_rows(torch.arange(whole.shape[0]), shape))
    stored = [source(f"in_proj_{name}.weight") for name in names]
    counts = [weight.shape[0] for weight in stored]
    rows = torch.split(torch.arange(sum(counts)), counts)
    order = torch.cat(flat_projections(dict(zip(names, rows, strict=True)), shape))
    return in_order(joined(stored), order.flatten())


def put_beside(
    ops: LayerOps, qkv: Projection, own: Projection, mixer: RecurrentLayer, out: Product
) -> tuple[Projection, MixerBeside]:
    """A mixer beside attention, and one projection for both."""
    widths, biases = [each.weight.shape[0] for each in (qkv, own)], [qkv.bias, own.bias]
    given = [bias for bias in biases if bias is not None]
    if len(given) == 1:  # the other's is zeros
        zeros = [given[0].new_zeros(width) for width in widths]
        given = [zero if bias is None else bias for bias, zero in zip(biases, zeros, strict=True)]
    bias = torch.cat(given) if given else None
    whole = Projection(joined([qkv.weight, own.weight]), bias)
    return whole, MixerBeside(ops, widths[0], mixer, out)
