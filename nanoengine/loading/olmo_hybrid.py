"""OLMo Hybrid: where its tensors are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from nanoengine.config.model import ModelConfig
from nanoengine.loading.checkpoint import Part
from nanoengine.loading.kimi import parts_of_convolution

# Of a layer without attention: its norms, as they are called at the hub, and its parts.
_NAMES = {
    "attention_layer_norm": "input_layernorm",
    "feedforward_layer_norm": "post_attention_layernorm",
    **{f"linear_attn.{name}_proj": f"linear_attn.in_proj_{name}" for name in "qkvba"},
    "linear_attn.g_proj": "linear_attn.in_proj_z",
    "linear_attn.o_proj": "linear_attn.out_proj",
    "linear_attn.o_norm": "linear_attn.norm",
}


def olmo_hybrid_parts(model: ModelConfig, names: Iterable[str]) -> Iterator[tuple[str, Part]]:
    """Where tensors lie that `weight_shapes` has other names for."""
    if model.architecture != "OlmoHybridForCausalLM":
        return
    for name in names:
        match = re.fullmatch(r"(model\.layers\.\d+\.)(.+)\.weight", name)
        if not match:
            continue
        layer, part = match.groups()
        if part == "linear_attn.conv1d":
            yield from parts_of_convolution(model, f"{layer}linear_attn.", name)
        elif part in _NAMES:
            yield f"{layer}{_NAMES[part]}.weight", Part(name)
