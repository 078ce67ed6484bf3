"""Activations of feed-forwards without a gate. Each computes over its argument, and returns it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

# Where a feed-forward has its numbers, and the shape of each.
XIELU_SHAPES: dict[str, tuple[int, ...]] = {
    "act_fn.alpha_p": (1,),
    "act_fn.alpha_n": (1,),
    "act_fn.beta": (),
    "act_fn.eps": (),
}
PIECE = 1 << 20  # numbers that are computed at once
BYTES = 4 * 8 + 1  # that each of them takes meanwhile


def relu2(x: Tensor) -> Tensor:
    """relu(x) * x."""
    return x.relu_().square_()


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
        """Over x, contiguous, and x. In double: the last elements of a vector go through other code
        than the first.
        """
        for piece in torch.split(x.view(-1), PIECE):
            wide = piece.double()
            above = wide.square().mul_(self.alpha_p)
            below = wide.clamp(max=self.eps).expm1_().sub_(wide).mul_(self.alpha_n)
            is_above = wide > 0
            piece.copy_(above.where(is_above, below).add_(wide.mul_(self.beta)))
        return x
