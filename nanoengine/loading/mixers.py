"""Models with Mamba-2 layers.

Nemotron-H: a layer of the checkpoint is one thing: a Mamba-2 mixer, attention, a feed-forward or
experts. A mixer and what of the last two is behind it are one layer here; some mixers have none.
Granite 4: a layer is a mixer and a feed-forward, or experts with one beside them.
Bamba: a layer is a mixer and a feed-forward.
Falcon-H1: a layer is a Mamba-2 mixer, attention beside it, and a feed-forward.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from nanoengine.config.model import ModelConfig, RecurrentConfig
from nanoengine.errors import CorruptModelError, UnsupportedModelError, shown
from nanoengine.loading.checkpoint import Part
from nanoengine.loading.layer_kinds import MAX_STATE_DIM, read_conv_size, read_heads
from nanoengine.models.architecture import Architecture
from nanoengine.models.architectures import ARCHITECTURES
from nanoengine.models.families import GRANITE_EXPERTS
from nanoengine.text.checked_json import CheckedJson

MAMBA, ATTENTION, MLP, EXPERTS = "M", "*", "-", "E"
BOTH = "M*-"  # a layer of Falcon-H1
_KINDS = {
    "linear_attention": MAMBA,
    "mamba": MAMBA,
    "full_attention": ATTENTION,
    "attention": ATTENTION,
    "mlp": MLP,
    "moe": EXPERTS,
}
# Keys of config.json: key heads, value heads, their sizes, and the convolution's.
_KEYS = ("n_groups", "mamba_num_heads", "ssm_state_size", "mamba_head_dim", "conv_kernel")
_NEWER = ("mamba_n_groups", "mamba_n_heads", "mamba_d_state", "mamba_d_head", "mamba_d_conv")
_WITH_ATTENTION = "attn_layer_indices"
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
    return _with_attention(content, re.findall("[M*][-E]?", pattern))


def read_mixers(content: CheckedJson, architecture: Architecture, num_layers: int) -> list[str]:
    """The same of Granite 4, with experts behind all or none, and of Bamba, which lists layers with
    attention. Raises UnsupportedModelError.
    """
    indices = content.get(_WITH_ATTENTION)
    listed = content.get("layer_types") or content.get("layers_block_type")
    if _WITH_ATTENTION in architecture.reads and isinstance(indices, list):
        listed = ["attention" if i in indices else "mamba" for i in range(num_layers)]
    names = listed if isinstance(listed, list) else []
    kinds = [_KINDS.get(name, "?") if isinstance(name, str) else "?" for name in names]
    if len(kinds) != num_layers or {*kinds} - {MAMBA, ATTENTION}:
        raise UnsupportedModelError(
            f"{content.path}: 'layer_types' {shown(listed)} for {num_layers} layers is not "
            "supported; each must be 'mamba' or 'attention'"
        )
    behind = EXPERTS if content.get("num_local_experts") else MLP
    return _with_attention(content, [kind + behind for kind in kinds])


def _with_attention(content: CheckedJson, mixers: list[str]) -> list[str]:
    if any(mixer[0] == ATTENTION for mixer in mixers):
        return mixers
    raise UnsupportedModelError(f"{content.path}: no layer has attention, which is not supported")


def read_mamba(
    content: CheckedJson, mixers: list[str], architecture: Architecture
) -> RecurrentConfig | None:
    """The recurrent layers; None if all have attention."""
    layers = tuple(i for i, mixer in enumerate(mixers) if mixer[0] == MAMBA)
    if not layers:
        return None
    groups, heads, state, head_dim, conv = _KEYS if architecture.hybrid == "apart" else _NEWER
    num_key_heads, num_value_heads = read_heads(content, groups, heads)
    if content.get(head_dim) == "auto":
        content.values[head_dim] = _mamba_size(content, architecture) // num_value_heads
    mamba = RecurrentConfig(
        layers=layers,
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=content.size(state, limit=MAX_STATE_DIM),
        value_dim=content.size(head_dim, limit=MAX_STATE_DIM),
        conv_size=read_conv_size(content, conv),
        rule="mamba",
        norm=_norm(content, architecture),
        has_bias=content.flag("mamba_proj_bias"),
        has_out_bias=content.flag("projectors_bias"),
    )
    is_beside = architecture.hybrid == "beside"
    if is_beside and mamba.value_size != _mamba_size(content, architecture):
        raise CorruptModelError(
            f"{content.path}: {mamba.num_value_heads} Mamba heads of {mamba.value_dim} are not the "
            f"{_mamba_size(content, architecture)} numbers of 'mamba_d_ssm' or 'mamba_expand'"
        )
    return mamba


def _mamba_size(content: CheckedJson, architecture: Architecture) -> int:
    """Of all heads of a mixer."""
    if architecture.hybrid == "beside" and content.get("mamba_d_ssm") is not None:
        return content.size("mamba_d_ssm")
    return content.size("mamba_expand") * content.size("hidden_size")


def _norm(content: CheckedJson, architecture: Architecture) -> str:
    """As of RecurrentConfig."""
    if architecture.hybrid != "beside":
        return "after gate"
    if not content.flag("mamba_rms_norm"):
        return "none"
    return "before gate" if content.flag("mamba_norm_before_gate") else "after gate"


def read_inner_size(content: CheckedJson, architecture: Architecture) -> int:
    """Of a feed-forward; Granite 4's without experts is what would be beside them."""
    experts = architecture.experts
    if architecture.hybrid == "mixers" and experts and content.get("num_local_experts") == 0:
        return content.size(experts.shared_size)
    return content.size("intermediate_size")


def eps_key(architecture: Architecture) -> str:
    """The key of config.json: some have names of their own."""
    if architecture.hybrid == "convs":
        return "norm_eps"
    return "layer_norm_epsilon" if architecture.hybrid == "apart" else "rms_norm_eps"


def mixer_parts(model: ModelConfig, names: Iterable[str]) -> dict[str, Part]:
    """Where the tensors lie, by the names in `weight_shapes`. names: of all tensors."""
    architecture = ARCHITECTURES[model.architecture]
    if architecture.experts is GRANITE_EXPERTS:
        return dict(_granites_parts(model, names))
    if architecture.hybrid in ("beside", "mixers"):
        return dict(_falcons_parts(names))
    if architecture.hybrid != "apart":
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


def _granites_parts(model: ModelConfig, names: Iterable[str]) -> Iterator[tuple[str, Part]]:
    """A feed-forward has one tensor for gate and up. It stands beside the experts, or alone."""
    experts, place, inner = model.experts, "mlp", model.intermediate_size
    if experts is not None:
        place, inner = "mlp.shared_expert", experts.shared_size
    blocks = r"mamba|shared_mlp|block_sparse_moe(?=\.shared_expert)"
    for name in names:
        match = re.fullmatch(rf"(model\.layers\.\d+)\.({blocks})\.(.+)", name)
        if not match:
            continue
        layer, block, rest = match.groups()
        if block == "block_sparse_moe":  # of a GGUF
            yield f"{layer}.mlp.{rest}", Part(name)
        elif block == "mamba":
            yield f"{layer}.linear_attn.{rest}", Part(name)
        elif rest == "output_linear.weight":
            yield f"{layer}.{place}.down_proj.weight", Part(name)
        elif rest == "input_linear.weight":
            yield f"{layer}.{place}.gate_proj.weight", Part(name, rows=(0, inner, 1))
            yield f"{layer}.{place}.up_proj.weight", Part(name, rows=(inner, None, 1))


def _falcons_parts(names: Iterable[str]) -> Iterator[tuple[str, Part]]:
    """Bamba's, too."""
    parts = {"mamba": "linear_attn", "feed_forward": "mlp"}
    for name in names:
        if name == "model.final_layernorm.weight":
            yield "model.norm.weight", Part(name)
        match = re.fullmatch(r"(model\.layers\.\d+)\.(mamba|feed_forward)\.(.+)", name)
        if match:
            yield f"{match[1]}.{parts[match[2]]}.{match[3]}", Part(name)
