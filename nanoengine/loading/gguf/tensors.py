"""What a tensor of a GGUF becomes: Hugging Face's name, the order of its rows, its numbers.

llama.cpp's converters (its folder conversion/) change some tensors on the way in; here is the way
back. Reads no weight.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from nanoengine.errors import CorruptModelError, UnsupportedModelError
from nanoengine.loading.gguf.mamba import KEPT_IN_FP32, MAMBA_NAMES
from nanoengine.loading.gguf.metadata import Metadata
from nanoengine.loading.gguf.names import GLOBAL_NAMES, WHOLE_NAMES, layer_names
from nanoengine.loading.gguf.rope_scaling import ROPE_TENSORS
from nanoengine.models.activations import XIELU_SHAPES
from nanoengine.models.architecture import CHOICE_BIAS, ExpertNames
from nanoengine.models.architectures import ARCHITECTURES
from nanoengine.models.families import OUT_IS_TILED
from nanoengine.models.stored_codes import FORMATS

Order = npt.NDArray[np.intp]
Config = Mapping[str, Any]  # the content of config.json

# Row order of q and k in a GGUF of these is llama.cpp's (pairs side by side), not Hugging Face's
# (halves).
PERMUTED = frozenset(
    {
        *("arcee", "granite", "granitehybrid", "granitemoe", "llama", "mistral3", "muse-glimmer"),
        *("minicpm", "smollm3"),
    }
)
# In these the value heads of recurrent layers take turns among the key heads that they belong to;
# Hugging Face has those of a key head together (conversion/qwen.py).
TILED = frozenset({"qwen35", "qwen35moe"})

# Tensors with an entry for each expert, by Hugging Face's place in ExpertNames.parts; the last
# holds the first two, one after the other.
_EXPERT_PARTS = {
    "ffn_gate_exps": (0,),
    "ffn_up_exps": (1,),
    "ffn_down_exps": (2,),
    "ffn_gate_up_exps": (0, 1),
}
_SHARED_PARTS = {"ffn_gate_shexp": "gate", "ffn_up_shexp": "up", "ffn_down_shexp": "down"}
_ROUTER, _SHARED_GATE, _CHOICE_BIAS = "ffn_gate_inp", "ffn_gate_inp_shexp", "exp_probs_b"
NORMS_OF_HEADS = ("attn_q_norm", "attn_k_norm")
CONVOLUTIONS = ("conv1d.weight", "conv.conv.weight")  # a file has [channels, taps]
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9]\d{0,4})\.([a-z0-9_.]+?)(?:\.(weight|bias))?")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor under its Hugging Face name, in a stored one; or rows of it, of which those in one
    list come one below the other.

    data: [rows, bytes of a row] if quantised. rows: which to read, in this order; None: as stored.
    change: of rows in float32. dtype: in which it is written; "": see convert_gguf. code_format: of
    one that stays codes.
    """

    name: str
    shape: tuple[int, ...]
    data: npt.NDArray[Any]
    quant_type: Any
    rows: Order | None = None
    change: Callable[[Tensor], Tensor] | None = None
    dtype: str = ""
    code_format: str = ""

    @property
    def written(self) -> tuple[str, tuple[int, ...], int]:
        """Dtype, shape and bytes in a safetensors file."""
        if self.code_format:
            weights, num_bytes = FORMATS[self.code_format]
            shape = (self.shape[0], self.shape[1] // weights * num_bytes)
            return "U8", shape, math.prod(shape)
        size = {"BF16": 2, "F16": 2, "F32": 4}[self.dtype]
        return self.dtype, self.shape, size * math.prod(self.shape)


def hf_tensors(
    metadata: Metadata, config: Config, stored: Mapping[str, Any]
) -> Iterator[GgufTensor]:
    """All tensors of the model. stored: those of the file, by name.

    Of layers that only draft the first one is taken, if the architecture has one; what has no place
    in it is left out. Raises UnsupportedModelError for one that has no
    place in the model, CorruptModelError for one of another size than its heads have.
    """
    architecture = ARCHITECTURES[config["architectures"][0]]
    num_layers = config["num_hidden_layers"]
    for name, tensor in stored.items():
        if name in ROPE_TENSORS:  # config.json has what it says
            continue
        match, index = _LAYER_TENSOR.fullmatch(name), -1
        if match is None:
            found = _of_name(metadata, config, tensor, GLOBAL_NAMES.get(name))
        else:
            index, part = int(match[1]), match[2]
            is_said = architecture.latent and part == "attn_v_b"  # with the keys
            is_said |= not architecture.norms_of_heads and part in NORMS_OF_HEADS  # in config.json
            if is_said or index >= num_layers + bool(architecture.mtp):
                continue
            layer = _Layer(metadata, config, f"model.layers.{index}.", part, match[3])
            found = layer.becomes(tensor, stored)
        if not found and index != num_layers:  # which is the head for multi-token prediction
            raise UnsupportedModelError(
                f"{metadata.path}: tensor {name!r} has no place in {config['architectures'][0]}"
            )
        yield from map(_with_taps, found)
    if architecture.activation == "xielu":
        yield from _of_activations(metadata, config["num_hidden_layers"])


def _with_taps(tensor: GgufTensor) -> GgufTensor:
    """At Hugging Face a convolution is [channels, 1, taps]."""
    if not tensor.name.endswith(CONVOLUTIONS):
        return tensor
    channels, *taps = tensor.shape
    return replace(tensor, shape=(channels, 1, *taps))


def _of_activations(metadata: Metadata, num_layers: int) -> Iterator[GgufTensor]:
    """What a file has as lists in its metadata."""
    from gguf import GGMLQuantizationType  # 0.3 s, seldom needed

    for name, shape in XIELU_SHAPES.items():
        values = metadata.reals(f"xielu.{name.removeprefix('act_fn.')}", num_layers)
        for layer, value in enumerate(np.array(values, dtype=np.float32)[:, None]):
            whole = f"model.layers.{layer}.mlp.{name}"
            yield GgufTensor(whole, shape, value, GGMLQuantizationType.F32, dtype="F32")


def _of_name(
    metadata: Metadata, config: Config, stored: Any, name: str | None, rows: Order | None = None
) -> list[GgufTensor]:
    """The stored tensor as a whole; [] without a name."""
    if name is None:
        return []
    # llama.cpp stores the number that a norm multiplies with.
    architecture = ARCHITECTURES[config["architectures"][0]]
    offset = architecture.norm_offset or 0.0
    if name == "model.norm.weight" and architecture.last_norm_offset is not None:
        offset = architecture.last_norm_offset
    is_moved = offset and name.endswith("norm.weight")
    change = (lambda values: values - offset) if is_moved else None
    return [GgufTensor(name, _shape(stored), stored.data, stored.tensor_type, rows, change)]


@dataclass(frozen=True, slots=True)
class _Layer:
    """A tensor of a layer: `prefix` is Hugging Face's, `part` and `kind` are of the file's name."""

    metadata: Metadata
    config: Config
    prefix: str
    part: str
    kind: str | None

    def becomes(self, tensor: Any, stored: Mapping[str, Any]) -> list[GgufTensor]:
        """What the tensor is at Hugging Face; [] if it has no place there. stored: all of them."""
        architecture = ARCHITECTURES[self.config["architectures"][0]]
        if architecture.latent and self.part == "attn_k_b":
            return self.of_keys_and_values(tensor, stored)
        found: list[GgufTensor] = []
        if architecture.hybrid in ("apart", "mixers", "beside"):
            found = self.of_mamba(tensor)
        elif architecture.hybrid in ("kimi", "ling"):
            found = self.of_kimi(tensor)
        elif architecture.hybrid == "delta":
            found = self.of_recurrence(tensor)
        if not found and architecture.experts is not None:
            found = self.of_experts(tensor, architecture.experts)
        return found or self.of_decoder(tensor)

    def of_decoder(self, stored: Any) -> list[GgufTensor]:
        """What all architectures have, and attention sinks; [] for others."""
        architecture = self.metadata.architecture
        whole = WHOLE_NAMES.get(".".join(filter(None, (self.part, self.kind))))
        if whole is not None:
            return _of_name(self.metadata, self.config, stored, f"{self.prefix}{whole}")
        name = layer_names(architecture).get(self.part)
        if name is None or self.kind is None:
            return []
        rows = None
        if architecture in PERMUTED and self.part in ("attn_q", "attn_k"):
            heads = "num_attention_heads" if self.part == "attn_q" else "num_key_value_heads"
            sizes = self.config[heads], self.config["head_dim"]
            rows = _half_order(self.metadata.path, stored, *sizes)
        return _of_name(
            self.metadata, self.config, stored, f"{self.prefix}{name}.{self.kind}", rows
        )

    def of_experts(self, stored: Any, names: ExpertNames) -> list[GgufTensor]:
        """Routers and experts; [] for others."""
        architecture = ARCHITECTURES[self.config["architectures"][0]]
        place = "mixer" if architecture.hybrid == "apart" else names.block
        block = self.prefix + f"{place}." * bool(place)
        # Granite 4's has halves of one tensor, which may be of several formats here.
        beside = f"{self.prefix}mlp." if architecture.hybrid == "mixers" else block
        if self.part in _EXPERT_PARTS and len(stored.shape) == (2 if self.kind == "bias" else 3):
            parts = [names.parts[place] for place in _EXPERT_PARTS[self.part]]
            return _by_expert(f"{block}experts.", parts, str(self.kind), stored)
        if self.part == _ROUTER:
            made = _of_name(self.metadata, self.config, stored, f"{block}gate.{self.kind}")
            return [replace(each, dtype="F32" * names.exact_router) for each in made]
        name = None
        if self.part in _SHARED_PARTS and names.shared:
            name = f"{beside}{names.shared}.{_SHARED_PARTS[self.part]}_proj.{self.kind}"
        elif self.part == _SHARED_GATE and names.has_shared_gate:
            gate = (1, math.prod(_shape(stored)))
            whole = stored.data.reshape(1, -1)
            name = f"{block}{names.shared}_gate.weight"
            return [GgufTensor(name, gate, whole, stored.tensor_type)]
        elif self.part == _CHOICE_BIAS and names.has_choice_bias:
            name, whole = f"{block}gate.{CHOICE_BIAS}", stored.data.reshape(-1)  # ERNIE's: [1, n]
            return [GgufTensor(name, whole.shape, whole, stored.tensor_type, dtype="F32")]
        return _of_name(self.metadata, self.config, stored, name)

    def of_keys_and_values(self, keys: Any, stored: Mapping[str, Any]) -> list[GgufTensor]:
        """What makes keys and values of latents, head by head, where a file has the two apart: keys
        [heads, kv_rank, n], values [heads, n, kv_rank].
        """
        values = stored.get(keys.name.replace("attn_k_b", "attn_v_b"))
        heads, rank = self.config["num_attention_heads"], self.config["kv_lora_rank"]
        nope_dim, value_dim = self.config["qk_nope_head_dim"], self.config["v_head_dim"]
        shapes = _shape(keys), None if values is None else _shape(values)
        wanted = (heads, rank, nope_dim), (heads, value_dim, rank)
        if values is None or shapes != wanted:
            raise CorruptModelError(
                f"{self.metadata.path}: tensor {keys.name!r} and that of values have the shapes "
                f"{shapes}, not {wanted} as its heads say"
            )
        whole = f"{self.prefix}self_attn.kv_b_proj.weight"
        rows: list[GgufTensor] = []
        for k, v in zip(keys.data, values.data, strict=True):
            rows.append(GgufTensor(whole, (nope_dim, rank), k, keys.tensor_type, change=Tensor.t))
            rows.append(GgufTensor(whole, (value_dim, rank), v, values.tensor_type))
        return rows

    def of_mamba(self, stored: Any) -> list[GgufTensor]:
        """A Mamba-2 layer; [] for others."""
        name = MAMBA_NAMES.get(".".join(filter(None, (self.part, self.kind))))
        if name is None:
            return []
        shape = _shape(stored)
        if not name.endswith(("proj.weight", "conv1d.weight")):
            shape = (math.prod(shape),)
        is_whole = ARCHITECTURES[self.config["architectures"][0]].hybrid == "apart"
        return [
            GgufTensor(
                f"{self.prefix}{'mixer' if is_whole else 'mamba'}.{name}",
                shape,
                stored.data,
                stored.tensor_type,
                change=_log_of_negative if name == "A_log" else None,
                dtype="F32" * (name in KEPT_IN_FP32),
            )
        ]

    def of_kimi(self, stored: Any) -> list[GgufTensor]:
        """What Kimi's rule takes its decays from, and its convolutions, whose dimensions of 1 are
        others; [] for the rest.
        """
        whole, kind = f"{self.prefix}self_attn.", stored.tensor_type
        shape = tuple(size for size in _shape(stored) if size != 1)
        if self.part == "ssm_a":
            rates, count = stored.data.reshape(-1), (math.prod(shape),)
            name, is_ling = f"{whole}A_log", self.metadata.architecture == "bailingmoe3"
            change = Tensor.log if is_ling else _log_of_negative  # Ling's are the rates as they are
            return [GgufTensor(name, count, rates, kind, change=change, dtype="F32")]
        if self.part == "ssm_dt":
            return _of_name(self.metadata, self.config, stored, f"{whole}dt_bias")
        if not self.part.startswith("ssm_conv1d_"):
            return []
        name = f"{whole}{self.part[-1]}_conv1d.weight"
        return [GgufTensor(name, shape, stored.data.reshape(shape[0], -1), kind)]

    def of_recurrence(self, stored: Any) -> list[GgufTensor]:
        """The gated delta rule; [] for others."""
        make = _RECURRENT.get(self.part)
        if make is None:
            return []
        order = _HeadOrder.of(self.config, self.metadata.architecture in TILED)
        num_rows, *columns = _shape(stored)
        return [
            GgufTensor(
                f"{self.prefix}linear_attn.{name}",
                (len(rows), *columns),
                stored.data,
                stored.tensor_type,
                None if np.array_equal(rows, np.arange(num_rows)) else rows,
                change,
            )
            for name, rows, change in make(order, stored, self.metadata.path)
        ]


@dataclass(frozen=True, slots=True)
class _HeadOrder:
    """The heads of a gated delta rule. value_heads: for each of Hugging Face's, its place in the
    file. moves_columns: of the output projection.
    """

    key_heads: int
    key_dim: int
    value_dim: int
    value_heads: Order
    moves_columns: bool

    @classmethod
    def of(cls, config: Config, is_tiled: bool) -> _HeadOrder:
        keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        heads = np.arange(values)
        return cls(
            keys,
            config["linear_key_head_dim"],
            config["linear_value_head_dim"],
            heads.reshape(-1, keys).T.reshape(-1) if is_tiled else heads,
            is_tiled and not config.get(OUT_IS_TILED),
        )

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return len(self.value_heads) // self.key_heads

    def values(self) -> Order:
        """Rows of all value heads."""
        return _blocks(self.value_heads, self.value_dim)

    def channels(self) -> Order:
        """Rows of all q, k and v."""
        keys = 2 * self.key_heads * self.key_dim
        return np.concatenate((np.arange(keys), keys + self.values()))


_Parts = list[tuple[str, Order, Callable[[Tensor], Tensor] | None]]


def _whole(name: str, rows_of: Callable[[_HeadOrder], Order]) -> Callable[..., _Parts]:
    def make(order: _HeadOrder, stored: Any, path: Path) -> _Parts:
        rows = rows_of(order)
        _check_rows(path, stored, len(rows))
        return [(name, rows, _log_of_negative if name == "A_log" else None)]

    return make


def _out(order: _HeadOrder, stored: Any, path: Path) -> _Parts:
    """Its columns are of value heads, so they move after it is dequantised, if at all."""
    columns = order.values()
    if int(stored.shape[0]) != len(columns):
        raise CorruptModelError(
            f"{path}: tensor {stored.name!r} has {stored.shape[0]} columns, not {len(columns)}"
        )
    change = partial(_columns, columns) if order.moves_columns else None
    return [("out_proj.weight", np.arange(int(stored.shape[-1])), change)]


def _grouped(order: _HeadOrder, stored: Any, path: Path, sizes: Sequence[int]) -> list[Order]:
    """The rows of each kind, where a key head has `sizes` of the kinds one after the other."""
    _check_rows(path, stored, order.key_heads * sum(sizes))
    places = np.arange(order.key_heads * sum(sizes)).reshape(order.key_heads, -1)
    return [part.reshape(-1) for part in np.split(places, np.cumsum(sizes)[:-1], axis=1)]


def _both(order: _HeadOrder, stored: Any, path: Path) -> _Parts:
    """b and a of Qwen3-Next."""
    b, a = _grouped(order, stored, path, [order.group] * 2)
    return [("in_proj_b.weight", b, None), ("in_proj_a.weight", a, None)]


def _all(order: _HeadOrder, stored: Any, path: Path) -> _Parts:
    """q, k, v and z of Qwen3-Next, as llama.cpp's first converter for it stored them."""
    values = order.group * order.value_dim
    sizes = [order.key_dim, order.key_dim, values, values]
    *channels, z = _grouped(order, stored, path, sizes)
    return [
        ("in_proj_qkv.weight", np.concatenate(channels), None),
        ("in_proj_z.weight", z, None),
    ]


_RECURRENT: dict[str, Callable[[_HeadOrder, Any, Path], _Parts]] = {
    "attn_qkv": _whole("in_proj_qkv.weight", _HeadOrder.channels),
    "attn_gate": _whole("in_proj_z.weight", _HeadOrder.values),
    "ssm_alpha": _whole("in_proj_a.weight", lambda order: order.value_heads),
    "ssm_beta": _whole("in_proj_b.weight", lambda order: order.value_heads),
    "ssm_ba": _both,
    "ssm_in": _all,
    "ssm_conv1d": _whole("conv1d.weight", _HeadOrder.channels),
    "ssm_a": _whole("A_log", lambda order: order.value_heads),
    "ssm_dt": _whole("dt_bias", lambda order: order.value_heads),
    "ssm_norm": _whole("norm.weight", lambda order: np.arange(order.value_dim)),
    "ssm_out": _out,
}


def _by_expert(prefix: str, parts: Sequence[str], kind: str, stored: Any) -> list[GgufTensor]:
    """The entries of a tensor [experts, rows, columns] or [experts, rows], each of which holds
    `parts` one after the other.
    """
    count, rows, *columns = _shape(stored)
    each = rows // len(parts)
    return [
        GgufTensor(
            f"{prefix}{expert}.{part}.{kind}",
            (each, *columns),
            stored.data[expert][place * each : (place + 1) * each],
            stored.tensor_type,
        )
        for expert in range(count)
        for place, part in enumerate(parts)
    ]


def _half_order(path: Path, stored: Any, num_heads: int, head_dim: int) -> Order:
    """Stored rows in Hugging Face's order: in each head the even rows, then the odd ones.

    llama.cpp's converter lays the two halves of a head side by side, because its RoPE turns
    neighbours.
    """
    num_rows = int(stored.shape[-1])
    if num_rows != num_heads * head_dim or head_dim % 2:
        raise CorruptModelError(
            f"{path}: tensor {stored.name!r} has {num_rows} rows, "
            f"not {num_heads} heads of {head_dim}"
        )
    pairs = np.arange(num_rows).reshape(num_heads, head_dim // 2, 2)
    return pairs.swapaxes(1, 2).reshape(-1)


def _blocks(places: Order, size: int) -> Order:
    """The rows of blocks of `size` rows."""
    return (places[:, None] * size + np.arange(size)).reshape(-1)


def _check_rows(path: Path, stored: Any, num_rows: int) -> None:
    if int(stored.shape[-1]) != num_rows:
        raise CorruptModelError(
            f"{path}: tensor {stored.name!r} has {int(stored.shape[-1])} rows, not {num_rows} as "
            "its heads say"
        )


def _shape(stored: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(stored.shape))


def _columns(order: Order, values: Tensor) -> Tensor:
    return values[:, order]


def _log_of_negative(values: Tensor) -> Tensor:
    """llama.cpp stores the rate itself, -exp(A_log)."""
    return values.neg().log()
