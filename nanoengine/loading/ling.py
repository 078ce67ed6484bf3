"""Ling 3.0: the settings in its config.json. kimi.py has the names of its tensors."""

from __future__ import annotations

from dataclasses import replace

from nanoengine.config.model import RecurrentConfig
from nanoengine.errors import UnsupportedModelError, shown
from nanoengine.loading.kimi import read_kimi
from nanoengine.loading.layer_kinds import FULL, RECURRENT
from nanoengine.text.checked_json import CheckedJson, positive

_BOUND, _IS_BOUNDED, _PART = "kda_lower_bound", "kda_safe_gate", "partial_rotary_factor"
_KEYS = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_attention_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
# Of a published model's experts: the limits of each layer, of which 0 is none.
_LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")


def with_lings_keys(content: CheckedJson) -> None:
    """Give the values of Ling's keys to those that are read. Raises UnsupportedModelError."""
    values = content.values
    for key, own in _KEYS.items():  # transformers writes these, and another head_dim
        values.setdefault(key, content.get(own))
    # What turns has a size of its own, qk_rope_head_dim.
    values.pop(_PART, None)
    if isinstance(rope := content.get("rope_parameters"), dict):
        values["rope_parameters"] = {key: rope[key] for key in rope if key != _PART}
    if content.get("layer_types") is None:
        values["layer_types"] = _layer_types(content)
    for key in _LIMITS:
        limits = content.get(key) or []
        if not isinstance(limits, list) or any(limits):
            _refuse(content, key, "limits of what experts multiply are not done here")


def _layer_types(content: CheckedJson) -> list[str]:
    """Those whose number is a multiple of the size of a group see all keys. What the others of an
    unfinished group are is not the same in transformers and in the code of published models.
    """
    size, num = content.size("layer_group_size"), content.size("num_hidden_layers")
    if num % size:
        _refuse(content, "layer_group_size", f"it must divide the {num} layers without layer_types")
    return [RECURRENT if i % size else FULL for i in range(1, num + 1)]


def read_ling(content: CheckedJson, num_layers: int) -> RecurrentConfig | None:
    """The layers with Kimi Delta Attention; None: there are none. Raises UnsupportedModelError, and
    CorruptModelError for a bound that is none.
    """
    rule, least = read_kimi(content, num_layers), 0.0
    if content.flag(_IS_BOUNDED):
        bound = content.get(_BOUND)
        is_number = isinstance(bound, (int, float)) and not isinstance(bound, bool)
        least = -positive(content.path, f"-{_BOUND}", -bound if is_number else bound)
    return rule and replace(rule, has_short_vectors=False, least_rate=least)


def _refuse(content: CheckedJson, key: str, why: str) -> None:
    raise UnsupportedModelError(f"{content.path}: {key!r} is {shown(content.get(key))}; {why}")
