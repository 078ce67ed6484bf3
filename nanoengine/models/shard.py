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

from nanoengine.config.model import AnyRecurrent, ModelConfig, RecurrentConfig, ShortConvConfig
from nanoengine.errors import ConfigError
from nanoengine.models.architectures import ARCHITECTURES
from nanoengine.models.layer_ops import LayerOps
from nanoengine.models.stored_codes import Weight, columns, joined

EMBEDDINGS_OF_LAYERS = "model.embed_tokens_per_layer.weight"
UNIT = 16  # outputs: where a size does not divide, ranks get multiples of it if there is one each


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of rank `rank` of `size`."""

    rank: int
    size: int

    def check(self, model: ModelConfig) -> None:
        """Raise ConfigError if the heads of the model cannot be divided among the ranks."""
        shapes = [model.shape(layer) for layer in model.attention_layers]
        divided = sorted({shape.num_heads for shape in shapes})
        shared = sorted({shape.num_kv_heads for shape in shapes})
        num_heads, num_kv = (" or ".join(map(str, counts)) for counts in (divided, shared))
        of_what = f"{num_heads} heads and {num_kv} KV heads"
        recurrent = model.recurrent
        if isinstance(recurrent, ShortConvConfig):
            divided = [*divided, recurrent.channels]
            of_what += f", or the {recurrent.channels} channels of its convolutions"
        elif recurrent is not None:
            num, num_keys = recurrent.num_value_heads, recurrent.num_key_heads
            divided = [*divided, num]
            if recurrent.rule != "mamba" or recurrent.norm == "none":
                shared = [*shared, num_keys]
            else:  # a norm is of the heads of a key head
                divided.append(num_keys)
            of_what += f", or the {num} heads and {num_keys} key heads of its recurrent layers"
        allowed = [
            size
            for size in range(1, max(divided) + 1)
            if all(num % size == 0 for num in divided)
            and all(num % size == 0 or size % num == 0 for num in shared)
        ]
        if self.size not in allowed:
            raise ConfigError(
                f"tensor_parallel_size={self.size} does not divide the model's {of_what}; it can "
                f"be {', '.join(map(str, allowed))}"
            )

    def config(self, model: ModelConfig) -> ModelConfig:
        """The shape of this rank's part. Ranks share a KV head where there are more ranks."""
        experts = model.experts
        if experts is not None:
            experts = replace(experts, inner_size=self._width(experts.inner_size))
        shapes = tuple(
            replace(
                shape,
                num_heads=shape.num_heads // self.size,
                num_kv_heads=len(self.heads(shape.num_kv_heads)),
                intermediate_size=self._width(shape.intermediate_size),
            )
            for shape in model.shapes
        )
        return replace(
            model,
            experts=experts,
            recurrent=self._recurrent(model.recurrent),
            shapes=shapes,
            num_heads=model.num_heads // self.size,
            num_kv_heads=len(self.heads(model.num_kv_heads)),
            intermediate_size=self._width(model.intermediate_size),
        )

    def _recurrent(self, whole: AnyRecurrent | None) -> AnyRecurrent | None:
        if isinstance(whole, ShortConvConfig):
            return replace(whole, channels=self._width(whole.channels))
        return whole and replace(
            whole,
            num_key_heads=len(self.heads(whole.num_key_heads)),
            num_value_heads=len(self.heads(whole.num_value_heads)),
        )

    def widths(self, num: int) -> list[int]:
        """How many of `num` outputs each rank computes."""
        if num % self.size == 0:
            return [num // self.size] * self.size
        unit = UNIT if num > UNIT * (self.size - 1) else 1
        units = -(-num // unit)
        ends = [min(num, unit * (units * rank // self.size)) for rank in range(self.size)] + [num]
        return [stop - start for start, stop in pairwise(ends)]

    def part(self, num: int) -> range:
        """Which of `num` outputs this rank computes."""
        widths = self.widths(num)
        start = sum(widths[: self.rank])
        return range(start, start + widths[self.rank])

    def heads(self, num: int) -> range:
        """Which of `num` heads this rank has. Ranks share one where there are more ranks."""
        if num % self.size == 0:
            return self.part(num)
        head = self.rank * num // self.size
        return range(head, head + 1)

    def layers(self, num: int) -> range:
        """Of which of `num` layers this rank makes the inputs (models.layers.LayerInputs)."""
        return range(num * self.rank // self.size, num * (self.rank + 1) // self.size)

    def rows(self, name: str, model: ModelConfig) -> tuple[range, ...] | None:
        """This rank's rows of a tensor, as weight_shapes names it; None: all of them."""
        layer, part = _layer_of(name)
        kind = part.rpartition(".")[2]
        if self.size == 1:
            return None
        if ".linear_attn." in name and kind != "out_proj" and model.recurrent is not None:
            return self._recurrent_rows(kind, model.recurrent)
        match kind:
            case "lm_head":
                return (self.part(model.vocab_size),)
            case "down_proj" if part.startswith("mlp.experts."):
                return (self.part(model.expert_width),)
            case "o_proj" | "down_proj" | "out_proj" | "per_layer_projection" | "eh_proj":
                return (self.part(model.hidden_size),)
            case "fc2_latent_proj":
                return (self.part(model.hidden_size),)
            case "gate_proj" | "up_proj":
                return (self.part(_inner_size(part, layer, model)),)
            case "gate_up_proj":
                num = _inner_size(part, layer, model)
                return self.part(num), _moved(self.part(num), num)
            case "q_b_proj" | "kv_b_proj" | "q_proj" if model.latent is not None:
                dim = model.latent.kv_dim if kind == "kv_b_proj" else model.latent.query_dim
                return (_times(self.heads(model.num_heads), dim),)
            case "g_proj" if ARCHITECTURES[model.architecture].head_gate:
                return (self.heads(model.shape(layer).num_heads),)
            case "q_proj" | "k_proj" | "v_proj" | "qkv_proj" | "g_proj":
                return self._head_rows(kind, layer, model)
            case "sinks":
                return (self.heads(model.shape(layer).num_heads),)
            case "per_layer_input_gate":
                return (self.part(model.layer_input_size),)
            case "per_layer_model_projection":
                return (self._input_columns(model),)
        return None

    def _head_rows(self, kind: str, layer: int, model: ModelConfig) -> tuple[range, ...]:
        """Of q, k, v or all of them, or of a gate."""
        num_heads, (num_kv, dim) = model.shape(layer).num_heads, model.shape(layer).kv_heads
        kv = _times(self.heads(num_kv), dim)
        if kind in ("k_proj", "v_proj"):
            return (kv,)
        has_gate = ARCHITECTURES[model.architecture].output_gate
        q = _times(self.heads(num_heads), dim * (1 + has_gate))
        if kind in ("q_proj", "g_proj"):
            return (q,)
        num_q, num_kv = num_heads * dim, num_kv * dim
        return q, _moved(kv, num_q), _moved(kv, num_q + num_kv)

    def _recurrent_rows(self, kind: str, recurrent: AnyRecurrent) -> tuple[range, ...] | None:
        """Of what a recurrent layer has before its last projection."""
        if isinstance(recurrent, ShortConvConfig):  # B, C and x of its channels
            mine, num = self.part(recurrent.channels), recurrent.channels
            return tuple(_moved(mine, num * i) for i in range(3 if kind == "in_proj" else 1))
        if recurrent.rule == "kimi":
            return self._kimi_rows(kind, recurrent)
        rows = self._delta_rows if recurrent.rule == "delta" else self._mamba_rows
        return rows(kind, recurrent)

    def _kimi_rows(self, kind: str, kimi: RecurrentConfig) -> tuple[range, ...] | None:
        """Of what a layer has before its rule: every rank makes both short vectors, if any."""
        heads = self.heads(kimi.num_value_heads)
        match kind:
            case "f_b_proj" | "in_proj_a" | "dt_bias":
                return (_times(heads, kimi.key_dim),)
            case "g_b_proj":
                return (_times(heads, kimi.value_dim),)
        return self._delta_rows(kind, kimi)

    def _delta_rows(self, kind: str, delta: RecurrentConfig) -> tuple[range, ...] | None:
        """Of what a recurrent layer has before its rule."""
        num_keys, num_values = delta.num_key_heads, delta.num_value_heads
        keys, values = self.heads(num_keys), self.heads(num_values)
        if kind in ("in_proj_b", "in_proj_a", "A_log", "dt_bias"):
            return (values,)
        v = _times(values, delta.value_dim)
        if kind in ("in_proj_z", "in_proj_v", "v_conv1d"):
            return (v,)
        if kind in ("in_proj_q", "in_proj_k", "q_conv1d", "k_conv1d"):
            return (_times(keys, delta.key_dim),)
        if kind in ("in_proj_qkv", "conv1d"):
            q, size = _times(keys, delta.key_dim), num_keys * delta.key_dim
            return q, _moved(q, size), _moved(v, 2 * size)
        group = num_values // num_keys  # value heads that a key head serves
        mine = range(values.start % group, values.start % group + len(values) // len(keys))
        if kind == "in_proj_ba":  # for each key head: b and a of its value heads
            return tuple(_moved(mine, (2 * head + at) * group) for head in keys for at in range(2))
        if kind != "in_proj_qkvz":
            return None
        v, size = _times(mine, delta.value_dim), group * delta.value_dim
        ends = 2 * delta.key_dim  # of q and k; then v and z of its value heads
        return tuple(
            _moved(rows, head * (ends + 2 * size))
            for head in keys
            for rows in (range(ends), _moved(v, ends), _moved(v, ends + size))
        )

    def _mamba_rows(self, kind: str, mamba: RecurrentConfig) -> tuple[range, ...]:
        """Of what a layer has before and in its rule: z; x, B, C; dt. A norm is of whole groups."""
        values, inner = self.heads(mamba.num_value_heads), mamba.value_size
        if kind in ("A_log", "dt_bias", "D"):
            return (values,)
        v = _times(values, mamba.value_dim)
        if kind == "norm":
            return (v,)
        k, size = _times(self.heads(mamba.num_key_heads), mamba.key_dim), mamba.key_dim
        mixed = v, _moved(k, inner), _moved(k, inner + size * mamba.num_key_heads)
        if kind == "conv1d":
            return mixed
        moved = (_moved(rows, inner) for rows in mixed)
        return v, *moved, _moved(values, inner + mamba.channels)

    def take(self, name: str, tensor: Weight, model: ModelConfig) -> Weight:
        """This rank's rows of a whole tensor of the model, or columns of EMBEDDINGS_OF_LAYERS."""
        if name == EMBEDDINGS_OF_LAYERS and self.size > 1:
            return columns(tensor, self._input_columns(model))
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
        if EMBEDDINGS_OF_LAYERS in whole:
            shapes[EMBEDDINGS_OF_LAYERS] = (model.vocab_size, len(self._input_columns(model)))
        return shapes

    def _input_columns(self, model: ModelConfig) -> range:
        """Of the inputs of all layers, those that this rank makes."""
        return _times(self.layers(model.num_layers), model.layer_input_size)

    def _width(self, num: int) -> int:
        return self.widths(num)[self.rank]


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


def _layer_of(name: str) -> tuple[int, str]:
    """The layer of a tensor (0: it is of none), and its name there, without its last part."""
    part = name.removesuffix(".weight").removesuffix(".bias")
    if not part.startswith("model.layers."):
        return 0, part
    _, _, layer, part = part.split(".", 3)
    return int(layer), part


def _inner_size(part: str, layer: int, model: ModelConfig) -> int:
    """Outputs of a gate of a feed-forward or of an expert."""
    if model.experts is not None and part.startswith("mlp.shared_"):
        return model.experts.shared_size
    if model.experts is not None and part.startswith("mlp.experts."):
        return model.experts.inner_size
    return model.shape(layer).intermediate_size


def _times(items: range, size: int) -> range:
    """The rows of these, each of which has `size`."""
    return range(items.start * size, items.stop * size)


def _moved(rows: range, by: int) -> range:
    return range(rows.start + by, rows.stop + by)
