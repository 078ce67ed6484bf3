"""The experts of a layer, put together from the products of LayerOps."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from nanoengine.models.experts import Map, MixtureWeights, Router
from nanoengine.models.layer_ops import LayerOps, parts_of_expert
from nanoengine.models.products import MLP, Norm, Product, normed


def make_mixture(
    ops: LayerOps, weights: MixtureWeights, norm: Norm | None, activation: str
) -> Product:
    """The experts of a layer, on norm(x), with the shared one beside them.

    The norm is before the router, too, if that has none of its own.
    """
    before_experts: Map | None = None
    if norm is not None and weights.before_router is not None:
        before_experts, norm = partial(ops.rms_norm, norm=norm), None
    if weights.latent is not None:
        before_experts = ops.linear(weights.latent[0])
    mixture = ops.experts(weights, make_router(ops, weights, before_experts), activation)
    if weights.latent is not None:
        mixture = MLP(mixture, ops.whole(weights.latent[1]))
    if weights.shared is not None:
        shared = MLP(*parts_of_expert(ops, weights.shared, activation))
        mixture = _beside(ops, mixture, shared, weights.shared_gate)
    return normed(ops.rms_norm, norm, mixture)


def _beside(ops: LayerOps, mixture: Product, shared: Product, gate: Tensor | None) -> Product:
    """The sum of what experts give and the one to which every row goes. gate: as shared_gate."""
    product = None if gate is None else ops.router(gate)

    def run(x: Tensor) -> Tensor:
        gates = None if product is None else product(x)
        return ops.accumulate(mixture(x), shared(x), gates)

    return run


def make_router(ops: LayerOps, weights: MixtureWeights, before_experts: Map | None) -> Router:
    """Chooses the experts of rows. before_experts: what these see of x; None: x itself."""
    # `choose` lives as long as the layer, and the experts' weights must not: it holds no `weights`.
    product = ops.router(weights.router, weights.router_bias)
    before, routing = weights.before_router, weights.routing

    def choose(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        chosen = ops.route(routing, product(x if before is None else before(x)))
        return *chosen, x if before_experts is None else before_experts(x)

    return choose
