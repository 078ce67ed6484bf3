"""Nemotron-H: a layer of the checkpoint is one thing: a Mamba-2 mixer, attention, a feed-forward or
experts.

A mixer and the feed-forward or experts behind it are one layer here; some mixers have none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from nanoengine.config.model import ModelConfig, RecurrentConfig
from nanoengine.errors import UnsupportedModelError, shown
from nanoengine.loading.checkpoint import Part
from nanoengine.loading.layer_kinds import MAX_CONV_SIZE, MAX_STATE_DIM
from nanoengine.models.architectures import ARCHITECTURES
from nanoengine.text.checked_json import CheckedJson

MAMBA, ATTENTION, MLP, EXPERTS = "M", "*", "-", "E"
_KINDS = {
    "linear_attention": MAMBA,
    "mamba": MAMBA,
    "full_attention": ATTENTION,
    "attention": ATTENTION,
    "mlp": MLP,
    "moe": EXPERTS,
}
_ENDS = {
    "embeddings": "model.embed_tokens",
    "embed_tokens": "model.embed_tokens",
    "norm_f": "model.norm",
}


def read_pattern(content: CheckedJson) -> list[str]:
    """The mixers, with what is behind them: "M", "M-" or "ME", "*", "*-" or "*E".

    Raises UnsupportedModelError.
    """
    listed, pattern = content.get("layers_block_type"), content.get("hybrid_override_pattern")
    if isinstance(listed, list) and all(isinstance(kind, str) for kind in listed):
        pattern = "".join(_KINDS.get(kind, "?") for kind in listed)
    if not isinstance(pattern, str) or not re.fullmatch(r"([M*][-E]?)+", pattern):
        raise UnsupportedModelError(
            f"{content.path}: layers {shown(listed or pattern)} are not supported; a feed-forward "
            "or experts must follow a Mamba or attention layer"
        )
    if ATTENTION not in pattern:
        raise UnsupportedModelError(
            f"{content.path}: no layer has attention, which is not supported"
        )
    return re.findall("[M*][-E]?", pattern)


def read_mamba(content: CheckedJson, mixers: list[str]) -> RecurrentConfig | None:
    """The recurrent layers; None if all have attention."""
    mamba = RecurrentConfig(
        layers=tuple(i for i, mixer in enumerate(mixers) if mixer[0] == MAMBA),
        num_key_heads=content.size("n_groups"),
        num_value_heads=content.size("mamba_num_heads"),
        key_dim=content.size("ssm_state_size", limit=MAX_STATE_DIM),
        value_dim=content.size("mamba_head_dim", limit=MAX_STATE_DIM),
        conv_size=content.size("conv_kernel", limit=MAX_CONV_SIZE),
        rule="mamba",
    )
    if mamba.num_value_heads % mamba.num_key_heads or mamba.conv_size < 2:
        raise UnsupportedModelError(
            f"{content.path}: {mamba.num_value_heads} Mamba heads, {mamba.num_key_heads} groups "
            f"and a convolution of {mamba.conv_size}; heads must be a multiple of groups, and the "
            "convolution 2 at least"
        )
    return mamba if mamba.layers else None


def mixer_parts(model: ModelConfig, names: Iterable[str]) -> dict[str, Part]:
    """Where the tensors lie, by the names in `weight_shapes`. names: of all tensors."""
    if not ARCHITECTURES[model.architecture].pattern:
        return {}
    places: list[tuple[int, str, str]] = []  # of each stored layer: the layer, its part, its norm
    for layer in range(model.num_layers):
        kind = "linear_attn" if layer in model.recurrent_layers else "self_attn"
        places.append((layer, kind, "input_layernorm"))
        if layer not in model.bare_layers:
            places.append((layer, "mlp", "post_attention_layernorm"))
    found = {}
    for name in names:
        if match := re.fullmatch(r"(?:backbone|model)\.(\w+)\.weight", name):
            if match[1] in _ENDS:
                found[f"{_ENDS[match[1]]}.weight"] = Part(name)
            continue
        match = re.fullmatch(r"(?:backbone|model)\.layers\.(\d+)\.(norm|mixer)\.(.+)", name)
        if match and int(match[1]) < len(places):
            layer, part, norm = places[int(match[1])]
            its = norm if match[2] == "norm" else part
            found[f"model.layers.{layer}.{its}.{match[3]}"] = Part(name)
    return {name: part for name, part in found.items() if name != part.stored}
