"""The experts of a layer, put together from the products of LayerOps."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from nanoengine.config.model import ExpertsConfig
from nanoengine.models.experts import (
    Map,
    MixtureWeights,
    Router,
    RouterWeights,
    SharedExpert,
)
from nanoengine.models.layer_ops import MLP, LayerOps, Norm, NormedProduct, Product, parts_of_expert


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
    product, before = ops.router(weights.router), weights.before_router

    def choose(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = product(x if before is None else before(x))
        chosen = ops.route(config, logits, weights.choice_bias, weights.scale)
        return *chosen, x if before_experts is None else before_experts(x)

    return choose
