"""Shard: which part of a model one rank of tensor parallelism holds. Arithmetic on shapes.

Every product is split by its outputs, and the ranks gather what each of them computed. An element
is one whole dot product on one rank, so it has the bits of one process. A split by inputs
(Megatron, arXiv 1909.08053) adds partial products in another order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

from nanoengine.config.model import ModelConfig
from nanoengine.errors import ConfigError
from nanoengine.models.architectures import ARCHITECTURES
from nanoengine.models.layer_ops import LayerOps
from nanoengine.models.stored_codes import Weight, joined

UNIT = 16  # outputs: where a size does not divide, ranks get multiples of it


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of rank `rank` of `size`."""

    rank: int
    size: int

    def check(self, model: ModelConfig) -> None:
        """Raise ConfigError if the heads of the model cannot be divided among the ranks."""
        if self.size > 1 and ARCHITECTURES[model.architecture].qk_norm == "all heads":
            raise ConfigError(
                f"tensor_parallel_size={self.size}: {model.architecture} norms q and k over all "
                "heads at once, of which a rank has a part; leave it at 1"
            )
        heads, kv_heads = model.num_heads, model.num_kv_heads
        refused = {
            "recurrent layers": model.recurrent_layers,
            "layers of different shapes": model.shapes,
        }
        for what, layers in refused.items():
            if self.size > 1 and layers:
                raise ConfigError(
                    f"tensor_parallel_size={self.size} cannot divide a model with {what} yet; "
                    "leave it out"
                )
        allowed = [
            size
            for size in range(1, heads + 1)
            if heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
        ]
        if self.size not in allowed:
            raise ConfigError(
                f"tensor_parallel_size={self.size} does not divide the model's {heads} heads and "
                f"{kv_heads} KV heads; it can be {', '.join(map(str, allowed))}"
            )

    def config(self, model: ModelConfig) -> ModelConfig:
        """The shape of this rank's part. Ranks share a KV head where there are more ranks."""
        experts = model.experts
        if experts is not None:
            experts = replace(experts, inner_size=self.widths(experts.inner_size)[self.rank])
        return replace(
            model,
            experts=experts,
            num_heads=model.num_heads // self.size,
            num_kv_heads=len(self._kv_heads(model)),
            intermediate_size=self.widths(model.intermediate_size)[self.rank],
        )

    def widths(self, num: int) -> list[int]:
        """How many of `num` outputs each rank computes."""
        if num % self.size == 0:
            return [num // self.size] * self.size
        units = -(-num // UNIT)
        ends = [min(num, UNIT * (units * rank // self.size)) for rank in range(self.size)] + [num]
        return [stop - start for start, stop in pairwise(ends)]

    def rows(self, name: str, model: ModelConfig) -> tuple[range, ...] | None:
        """The rows of a tensor of the model (as weight_shapes names it) that this rank holds; None:
        all of them.
        """
        if self.size == 1:
            return None
        if name.endswith(".sinks"):
            return (self._range(model.num_heads),)
        part, is_product, _ = name.rpartition("_proj.")
        part = part.rpartition(".")[2] if is_product else name.split(".")[0]
        if part in ("lm_head", "o", "down"):
            return (self._range(model.vocab_size if part == "lm_head" else model.hidden_size),)
        if part in ("gate", "up", "gate_up"):
            num = model.intermediate_size
            if model.experts is not None and ".mlp.shared_expert" in name:
                num = model.experts.shared_size
            elif model.experts is not None and ".mlp.experts." in name:
                num = model.experts.inner_size
            inner = self._range(num)
            return (inner, _moved(inner, num)) if part == "gate_up" else (inner,)
        if part not in ("q", "k", "v", "qkv"):
            return None
        size = model.head_dim
        q = self._range(model.num_heads * size)
        kv_heads = self._kv_heads(model)
        kv = range(kv_heads.start * size, kv_heads.stop * size)
        if part != "qkv":
            return (q,) if part == "q" else (kv,)
        num_q, num_kv = model.num_heads * size, model.num_kv_heads * size
        return q, _moved(kv, num_q), _moved(kv, num_q + num_kv)

    def take(self, name: str, tensor: Weight, model: ModelConfig) -> Weight:
        """This rank's rows of a whole tensor of the model."""
        rows = self.rows(name, model)
        if rows is None:
            return tensor
        parts = [tensor[each.start : each.stop] for each in rows]
        return parts[0] if len(parts) == 1 else joined(parts)

    def shapes(
        self, whole: Mapping[str, tuple[int, ...]], model: ModelConfig
    ) -> dict[str, tuple[int, ...]]:
        """The shapes of this rank's tensors. whole: those of the model."""
        shapes = dict(whole)
        for name, shape in whole.items():
            rows = self.rows(name, model)
            if rows is not None:
                shapes[name] = (sum(map(len, rows)), *shape[1:])
        return shapes

    def _range(self, num: int) -> range:
        widths = self.widths(num)
        start = sum(widths[: self.rank])
        return range(start, start + widths[self.rank])

    def _kv_heads(self, model: ModelConfig) -> range:
        num = model.num_kv_heads
        if num % self.size == 0:
            return self._range(num)
        head = self.rank * num // self.size
        return range(head, head + 1)


WHOLE = Shard(0, 1)  # one process


class Sharding(Protocol):
    """How tensor parallelism divides a model (workers.rank_setup.RankSharding)."""

    @property
    def shard(self) -> Shard:
        """The part of this process."""
        ...

    def sharded(self, ops: LayerOps, model: ModelConfig) -> LayerOps:
        """The operations of a rank. model: the shape of the whole model."""
        ...


def _moved(rows: range, by: int) -> range:
    return range(rows.start + by, rows.stop + by)
