"""The weights of multi-head latent attention, in the order and the form that LatentAttention needs
(layers.py). Arithmetic on tensors; knows no checkpoint.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanoengine.config.model import LatentConfig

LATENT_NORM_EPS = 1e-6  # of its two norms, whatever config.json says of the others


def head_rows(shape: LatentConfig, num_heads: int) -> Tensor:
    """The order of the rows of the queries' weight: in each head the pairs of the rotation become
    two halves. int64 [num_heads x query_dim].
    """
    of_head = torch.cat((torch.arange(shape.nope_dim), shape.nope_dim + _turned(shape)))
    return (torch.arange(num_heads)[:, None] * shape.query_dim + of_head).flatten()


def latent_rows(shape: LatentConfig) -> Tensor:
    """The same of what makes the latent and the rotated key. int64 [row_dim]."""
    return torch.cat((torch.arange(shape.kv_rank), shape.kv_rank + _turned(shape)))


def _turned(shape: LatentConfig) -> Tensor:
    order = torch.arange(shape.rope_dim)
    return order.view(-1, 2).T.flatten() if shape.takes_turns else order


def absorbed(weights: Tensor, shape: LatentConfig) -> tuple[Tensor, Tensor]:
    """[heads, nope_dim + value_dim, kv_rank], which makes keys and values of latents -> what takes
    queries to rows, [heads, row_dim, nope_dim], and rows to values, [heads, value_dim, row_dim].
    """
    keys, values = weights.split_with_sizes([shape.nope_dim, shape.value_dim], dim=1)
    return _padded(keys, shape).transpose(1, 2).contiguous(), _padded(values, shape)


def held_share(shape: LatentConfig) -> float:
    """The bytes of what `absorbed` makes, by those of its weights: rows have zeros."""
    return shape.row_dim / shape.kv_rank


def _padded(weights: Tensor, shape: LatentConfig) -> Tensor:
    """[heads, n, kv_rank] -> [heads, n, row_dim], with zeros where a row is turned."""
    halves = weights.view(*weights.shape[:2], 2, -1)
    zeros = halves.new_zeros(*halves.shape[:3], shape.rope_dim // 2)
    return torch.cat((zeros, halves), dim=3).flatten(2)
