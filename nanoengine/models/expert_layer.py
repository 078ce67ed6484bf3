"""The experts of a layer, put together from the products of LayerOps."""

from __future__ import annotations

from torch import Tensor

from nanoengine.config.model import ExpertsConfig
from nanoengine.models.experts import (
    Experts,
    ExpertWeights,
    MixtureWeights,
    Router,
    RouterWeights,
    SharedExpert,
)
from nanoengine.models.layer_ops import MLP, LayerOps, Norm, NormedProduct, Product


def make_experts(
    ops: LayerOps,
    config: ExpertsConfig,
    weights: MixtureWeights,
    norm: Norm | None,
    activation: str,
) -> Product:
    """LayerOps.experts of the products of `ops`."""
    each = [_expert(ops, expert, activation) for expert in weights.experts]
    before = norm_of_experts(ops, weights, norm)
    experts = Experts(make_router(ops, config, weights), each, before)
    return finish_experts(ops, experts, weights, norm, activation)


def make_router(ops: LayerOps, config: ExpertsConfig, weights: MixtureWeights) -> Router:
    """Chooses the experts of rows."""
    product, before = ops.router(weights.router), weights.before_router

    def choose(x: Tensor) -> tuple[Tensor, Tensor]:
        logits = product(x if before is None else before(x))
        return ops.route(config, logits, weights.choice_bias, weights.scale)

    return choose


def norm_of_experts(ops: LayerOps, weights: MixtureWeights, norm: Norm | None) -> Product | None:
    """The norm that the experts alone see; None: what is before them is also before the router."""
    if norm is None or weights.before_router is None:
        return None
    return lambda x: ops.rms_norm(x, norm)


def finish_experts(
    ops: LayerOps, experts: Product, weights: MixtureWeights, norm: Norm | None, activation: str
) -> Product:
    """The experts of a layer, with the norm before them and the shared one beside them."""
    if weights.shared is not None:
        gate = weights.shared_gate
        product = None if gate is None else ops.router(RouterWeights(gate))
        shared = _expert(ops, weights.shared, activation)
        experts = SharedExpert(experts, shared, product, ops.accumulate)
    if norm is None or weights.before_router is not None:
        return experts
    return NormedProduct(ops, norm, experts)


def _expert(ops: LayerOps, weights: ExpertWeights, activation: str) -> Product:
    gate, up, down = weights.biases or (None, None, None)
    both = None if gate is None or up is None else (gate, up)
    gate_up = ops.gate_up(weights.gate, weights.up, both, None, activation)
    return MLP(gate_up, ops.summand(weights.down, down))
