"""Kimi Linear: the settings in its config.json, and where its tensors are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from nanoengine.config.model import ModelConfig, RecurrentConfig
from nanoengine.errors import UnsupportedModelError, shown
from nanoengine.loading.checkpoint import Part
from nanoengine.loading.layer_kinds import (
    FULL,
    MAX_STATE_DIM,
    RECURRENT,
    read_conv_size,
    recurrent_layers,
)
from nanoengine.models.architectures import ARCHITECTURES
from nanoengine.text.checked_json import CheckedJson

_LINEAR, _FULL_LAYERS, _KIMI_LAYERS = "linear_attn_config", "full_attn_layers", "kda_layers"
# Keys within the first one, each with the one that is read.
_LINEAR_KEYS = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
# Names in a layer whose attention is Kimi's; Ling's projections of decays and gates are one each.
_PARTS = {
    **{f"{name}_proj": f"in_proj_{name}" for name in ("q", "k", "v", "b", "f_a", "g_a")},
    **{"f_proj": "in_proj_a", "g_proj": "in_proj_z"},
    **{name: name for name in ("f_b_proj", "g_b_proj", "q_conv1d", "k_conv1d", "v_conv1d")},
    **{"A_log": "A_log", "dt_bias": "dt_bias", "o_norm": "norm", "o_proj": "out_proj"},
}


def with_usual_keys(content: CheckedJson) -> None:
    """Give the values of `linear_attn_config` to the keys that are read. No layer turns: what is
    said of RoPE goes. Raises UnsupportedModelError.
    """
    values, linear = content.values, content.get(_LINEAR) or {}
    if not isinstance(linear, dict):
        raise UnsupportedModelError(
            f"{content.path}: {_LINEAR!r} is {shown(linear)}, and must be an object"
        )
    values.update({key: linear[old] for old, key in _LINEAR_KEYS.items() if old in linear})
    for key in ("rope_scaling", "rope_parameters"):
        values.pop(key, None)
    values["rope_interleave"] = False
    if content.get("layer_types") is None:
        values["layer_types"] = _layer_types(content, linear)


def _layer_types(content: CheckedJson, linear: dict[str, Any]) -> list[str]:
    """By the layers that are listed, counted from 1; without them, as in transformers."""
    num = content.size("num_hidden_layers")
    full, kimi = linear.get(_FULL_LAYERS), linear.get(_KIMI_LAYERS)
    if full is None or kimi is None:
        return [FULL if i and i % 4 == 0 else RECURRENT for i in range(num)]
    both = [*full, *kimi] if isinstance(full, list) and isinstance(kimi, list) else []
    if any(type(i) is not int for i in both) or sorted(both) != [*range(1, num + 1)]:
        raise UnsupportedModelError(
            f"{content.path}: {_FULL_LAYERS!r} {shown(full)} and {_KIMI_LAYERS!r} {shown(kimi)} "
            f"must be lists that have each of the {num} layers once, counted from 1"
        )
    return [FULL if i in full else RECURRENT for i in range(1, num + 1)]


def read_kimi(content: CheckedJson, num_layers: int) -> RecurrentConfig | None:
    """The layers with Kimi Delta Attention; None: there are none. Raises UnsupportedModelError."""
    layers = recurrent_layers(content, num_layers)
    heads = content.size("linear_num_heads")
    dim = content.size("linear_head_dim", limit=MAX_STATE_DIM)
    conv_size = read_conv_size(content, "linear_conv_kernel_dim")
    rule = RecurrentConfig(
        *(layers, heads, heads, dim, dim, conv_size), rule="kimi", has_short_vectors=True
    )
    return rule if layers else None


def kimi_parts(model: ModelConfig, names: Iterable[str]) -> Iterator[tuple[str, Part]]:
    """Where tensors lie that `weight_shapes` has other names for, but those of experts.

    In transformers 5 one tensor has the three convolutions, and a part of the layer its decays.
    """
    if ARCHITECTURES[model.architecture].hybrid not in ("kimi", "ling"):
        return
    for name in names:
        match = re.fullmatch(r"(model\.layers\.(\d+)\.)(self_attn|block_sparse_moe)\.(.+)", name)
        if not match:
            continue
        layer, index, block, rest = match.groups()
        part, dot, end = rest.removeprefix("forget_gate.").partition(".")
        if block == "block_sparse_moe":
            if part not in ("experts", "gate"):  # transformers saves a dense one there, too
                yield f"{layer}mlp.{rest}", Part(name)
        elif int(index) not in model.recurrent_layers:
            continue
        elif part == "conv1d":
            yield from parts_of_convolution(model, f"{layer}linear_attn.", name)
        elif part in _PARTS:
            is_flat = part == "A_log"  # it has three dimensions of 1
            yield f"{layer}linear_attn.{_PARTS[part]}{dot}{end}", Part(name, is_flat=is_flat)


def parts_of_convolution(model: ModelConfig, prefix: str, name: str) -> Iterator[tuple[str, Part]]:
    """Those of q, k and v within the one tensor that transformers 5 has. prefix: of their names."""
    assert isinstance(model.recurrent, RecurrentConfig)
    q, k = model.recurrent.key_size, 2 * model.recurrent.key_size
    for kind, first, last in (("q", 0, q), ("k", q, k), ("v", k, None)):
        yield f"{prefix}{kind}_conv1d.weight", Part(name, rows=(first, last, 1))
