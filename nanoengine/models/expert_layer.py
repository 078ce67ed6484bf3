"""The experts of a layer, put together from the products of LayerOps."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from nanoengine.config.model import ExpertsConfig
from nanoengine.models.experts import (
    ExpertWeights,
    Map,
    MixtureWeights,
    Router,
    RouterWeights,
    SharedExpert,
)
from nanoengine.models.layer_ops import MLP, LayerOps, Norm, NormedProduct, Product
from nanoengine.models.ungated import relu2


def make_mixture(
    ops: LayerOps,
    config: ExpertsConfig,
    weights: MixtureWeights,
    norm: Norm | None,
    activation: str,
) -> Product:
    """The experts of a layer, on norm(x), with the shared one beside them.

    The norm is before the router, too, if that has none of its own.
    """
    before_experts = None
    if norm is not None and weights.before_router is not None:
        before_experts, norm = partial(ops.rms_norm, norm=norm), None
    router = make_router(ops, config, weights, before_experts)
    mixture = ops.experts(config, weights.experts, router, activation)
    if weights.shared is not None:
        gate = weights.shared_gate
        product = None if gate is None else ops.router(RouterWeights(gate))
        shared = MLP(*parts_of_expert(ops, weights.shared, activation))
        mixture = SharedExpert(mixture, shared, product, ops.accumulate)
    return mixture if norm is None else NormedProduct(ops, norm, mixture)


def make_router(
    ops: LayerOps, config: ExpertsConfig, weights: MixtureWeights, before_experts: Map | None
) -> Router:
    """Chooses the experts of rows. before_experts: what these see of x; None: x itself."""
    # Only these: `choose` lives as long as the layer, and the experts' weights must not.
    bias, scale, before = weights.choice_bias, weights.scale, weights.before_router
    product = ops.router(weights.router)

    def choose(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = product(x if before is None else before(x))
        chosen = ops.route(config, logits, bias, scale)
        return *chosen, x if before_experts is None else before_experts(x)

    return choose


def parts_of_expert(
    ops: LayerOps, weights: ExpertWeights, activation: str
) -> tuple[Product, Product]:
    """Gate and up, or up with relu2; and down."""
    if weights.gate is None:
        product = ops.linear(weights.up)
        return lambda x: ops.activated(product(x), relu2), ops.summand(weights.down)
    gate, up, down = weights.biases or (None, None, None)
    both = None if gate is None or up is None else (gate, up)
    gate_up = ops.gate_up(weights.gate, weights.up, both, None, activation)
    return gate_up, ops.summand(weights.down, down)
