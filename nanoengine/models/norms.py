"""The norms of a model, made of the tensors of a checkpoint as the rows in architectures.py say."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nanoengine.config.model import ModelConfig
from nanoengine.models.architectures import ARCHITECTURES
from nanoengine.models.products import Norm
from nanoengine.models.recurrent_builder import TensorSource
from nanoengine.models.stored_codes import numbers_of


class Norms:
    """Takes their tensors from the source by name.

    The residual stream is held divided by config.factors.summands; norms of it see no difference
    but in their eps.
    """

    def __init__(self, config: ModelConfig, source: TensorSource, device: torch.device) -> None:
        self._config, self._source, self._device = config, source, device
        self._architecture = ARCHITECTURES[config.architecture]

    def named(self, name: str) -> Norm:
        """Of the residual stream."""
        return self._stored(name, self._architecture.norm_offset)

    def last(self) -> Norm:
        """Before the output head."""
        offset = self._architecture.last_norm_offset
        return self._stored(
            "model.norm", self._architecture.norm_offset if offset is None else offset
        )

    def if_any(self, prefix: str, name: str) -> Norm | None:
        """The same; None without a name."""
        return self.named(prefix + name) if name else None

    def behind(self, prefix: str, name: str) -> Norm | None:
        """Of what is added to the residual stream, which is not divided as the stream is; None
        without a name.
        """
        norm, config = self.if_any(prefix, name), self._config
        eps = config.norm_after_eps or config.rms_norm_eps
        return None if norm is None else replace(norm, eps=eps)

    def unit(self, size: int) -> Norm:
        """Without a weight, of what is not divided."""
        return Norm(torch.ones(size, device=self._device), self._config.rms_norm_eps)

    def of_heads(self, prefix: str, head_dim: int, order: Tensor | None) -> tuple[Norm, ...]:
        """Of q, k and v, as far as the model has them. order: as of `of_head`."""
        architecture = self._architecture
        if not (architecture.qk_norm and self._config.has_qk_norm):
            return ()
        if not architecture.norms_of_heads:
            return self.unit(head_dim), self.unit(head_dim)
        q, k = (self.of_head(prefix + name, order) for name in architecture.norms_of_heads)
        if not architecture.v_norm:
            return q, k
        return q, k, replace(k, weight=torch.ones_like(k.weight))

    def of_head(self, name: str, order: Tensor | None) -> Norm:
        """Of one head, or of several. order: of the numbers of a head, None: as stored."""
        norm = self.named(name)
        if order is None:
            return norm
        heads = norm.weight.view(-1, len(order))
        return replace(norm, weight=heads[:, order.to(norm.weight.device)].flatten())

    def of_router(self, layer: str) -> Norm:
        """Before a router with one of its own, divided by the root of its size."""
        weight = numbers_of(self._source(layer + "router.scale")).float()
        return Norm(weight * self._config.hidden_size**-0.5, self._config.rms_norm_eps)

    def _stored(self, name: str, offset: float | None) -> Norm:
        architecture = self._architecture
        if not architecture.has_norm_weights:
            return self.unit(self._config.hidden_size)
        weight = numbers_of(self._source(f"{name}.weight"))
        bias = numbers_of(self._source(f"{name}.bias")) if architecture.norm_bias else None
        if offset is not None and architecture.layer_norm:  # PyTorch wants the dtype of x
            weight = weight + offset
        elif offset is not None:  # a small weight would be lost beside it in 16 bits
            weight = weight.float() + offset
        return Norm(weight, self._config.rms_norm_eps / self._config.factors.summands**2, bias)
