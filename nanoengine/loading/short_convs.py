"""LFM2, dense or with experts, and LFM3: the settings in config.json, and where tensors are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from nanoengine.config.model import ModelConfig, ShortConvConfig
from nanoengine.loading.checkpoint import Part
from nanoengine.loading.layer_kinds import (
    ATTENTION_KINDS,
    CONV,
    FULL,
    layers_of_kind,
    read_conv_size,
)
from nanoengine.models.architecture import Architecture
from nanoengine.models.architectures import ARCHITECTURES
from nanoengine.text.checked_json import CheckedJson, whole

ATTENTION = "full_attn_idxs"
ADJUSTS = "block_auto_adjust_ff_dim"
_PARTS = {
    "conv.in_proj": "linear_attn.in_proj",
    "conv.conv": "linear_attn.conv1d",
    "conv.out_proj": "linear_attn.out_proj",
    "self_attn.out_proj": "self_attn.o_proj",
    "self_attn.gate_proj": "self_attn.g_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}


def read_short_convs(
    content: CheckedJson, architecture: Architecture, num_layers: int
) -> ShortConvConfig | None:
    """The layers with a convolution: by `layer_types`; without it, all but `full_attn_idxs`. None
    if all have attention. Raises UnsupportedModelError.
    """
    key, listed, attention = "layer_types", content.get("layer_types"), content.get(ATTENTION)
    if listed is None and attention is not None:
        have = attention if isinstance(attention, list) else ()
        key, listed = ATTENTION, [FULL if i in have else CONV for i in range(num_layers)]
    layers: tuple[int, ...] = ()
    if listed is not None:
        others = ATTENTION_KINDS if architecture.windows else (FULL,)
        layers = layers_of_kind(content, key, listed, num_layers, CONV, others)
    channels, conv_size = content.size("hidden_size"), read_conv_size(content, "conv_L_cache")
    has_bias = content.flag("conv_bias")
    return ShortConvConfig(layers, channels, conv_size, has_bias) if layers else None


def read_adjusted_size(content: CheckedJson) -> int:
    """Of a dense feed-forward. Some files say that theirs is two thirds of it, then times a factor
    and up to the next multiple. Raises CorruptModelError.
    """
    size = content.size("intermediate_size")
    if not content.flag(ADJUSTS):
        return size
    unit = content.size("block_multiple_of")
    size = int(content.real("block_ffn_dim_multiplier") * int(2 * size / 3))
    size = unit * -(-size // unit)
    return whole(content.path, f"intermediate_size, adjusted by {ADJUSTS}", size)


def short_conv_parts(model: ModelConfig, names: Iterable[str]) -> Iterator[tuple[str, Part]]:
    """Where tensors lie that `weight_shapes` has other names for, but those of experts."""
    if ARCHITECTURES[model.architecture].hybrid != "convs":
        return
    for name in names:
        if name == "model.embedding_norm.weight":
            yield "model.norm.weight", Part(name)
        match = re.fullmatch(r"(model\.layers\.\d+)\.(\w+\.\w+)\.(weight|bias)", name)
        if match and match[2] in _PARTS:
            yield f"{match[1]}.{_PARTS[match[2]]}.{match[3]}", Part(name)
