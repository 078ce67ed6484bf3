"""Activations of feed-forwards. Those without a gate compute over their argument, and return it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
# Where a feed-forward has the numbers of its xIELU, and the shape of each.
XIELU_SHAPES: dict[str, tuple[int, ...]] = {
    "act_fn.alpha_p": (1,),
    "act_fn.alpha_n": (1,),
    "act_fn.beta": (),
    "act_fn.eps": (),
}
PIECE = 1 << 20  # numbers of which xIELU, or GELU without a gate, are computed at once
PIECE_BYTES = 4 * 8 + 1  # that each of them takes meanwhile


def relu2(x: Tensor) -> Tensor:
    """relu(x) * x."""
    return x.relu_().square_()


def gelu(x: Tensor) -> Tensor:
    """GELU by its formula with tanh (arXiv 1606.08415), over x, contiguous. In double: the last
    elements of a vector go through other code.
    """
    for piece in torch.split(x.view(-1), PIECE):
        piece.copy_(functional.gelu(piece.double(), approximate="tanh"))
    return x


@dataclass(frozen=True, slots=True)
class Xielu:
    """xIELU (arXiv 2411.13010), with four numbers of each layer:

    beta x + alpha_p x^2 where x is above 0, else beta x + alpha_n (exp(min(x, eps)) - 1 - x)."""

    alpha_p: float
    alpha_n: float
    beta: float
    eps: float

    @classmethod
    def of(cls, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Xielu:
        """As a checkpoint has them: alphas are the softplus of what it has, one beta more."""
        up, down = (functional.softplus(alpha.double()).item() for alpha in (alpha_p, alpha_n))
        return cls(up, beta.item() + down, beta.item(), eps.item())

    def __call__(self, x: Tensor) -> Tensor:
        """Over x, contiguous. In double, as gelu."""
        for piece in torch.split(x.view(-1), PIECE):
            wide = piece.double()
            above = wide.square().mul_(self.alpha_p)
            below = wide.clamp(max=self.eps).expm1_().sub_(wide).mul_(self.alpha_n)
            is_above = wide > 0
            piece.copy_(above.where(is_above, below).add_(wide.mul_(self.beta)))
        return x


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [tokens, 2 * dim]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up of [tokens, 2 * dim]; GELU by its formula with tanh (arXiv 1606.08415)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    """gate * sigmoid(1.702 gate) * (up + 1) of [tokens, 2 * dim], clamped at 7: that of gpt-oss."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * SWIGLU_ALPHA))


# activation(gate) * up, by transformers' names of the activations; it has none for clamped_swiglu.
# relu2 has no gate: of [tokens, dim].
GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu_mul,
    "gelu_pytorch_tanh": gelu_mul,
    "clamped_swiglu": clamped_swiglu,
    "relu2": relu2,
}
