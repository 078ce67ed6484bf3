"""Reads the rotary embedding of a config.json, in both spellings of transformers:

`rope_theta` and `rope_scaling`, or `rope_parameters`. rope.py computes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from nanoengine.config.model import RopeConfig
from nanoengine.errors import CorruptModelError, UnsupportedModelError, shown
from nanoengine.models.rope import (
    ROPE_KINDS,
    longrope_attention_factor,
    rotary_pairs,
    yarn_attention_factor,
)
from nanoengine.text.checked_json import MAX_SIZE, CheckedJson, positive

QUERY_BETA = "llama_4_scaling_beta"
ORIGINAL = "original_max_position_embeddings"


def read_rope(
    content: CheckedJson,
    head_dim: int,
    may_be_partial: bool,
    max_model_len: int | None,
    scales_queries: bool = False,
) -> tuple[RopeConfig, int]:
    """The embedding, and the number of positions of a model with it; theta defaults to 10000.

    scales_queries: whether the architecture has RopeConfig's query_beta; others ignore that key.

    "yarn" gives a model `factor` times its original positions, if that is more than config.json
    has. Two kinds depend on max_model_len (None: all positions), for the whole run: "dynamic"
    stretches to it, also past max_position_embeddings; "longrope" uses its short divisors if
    max_model_len is within the original positions, else the long ones.
    Raises UnsupportedModelError for another kind, CorruptModelError for impossible numbers.
    """
    values = _scaling(content)
    rope, most = _read(content, values, "rope_theta", head_dim, may_be_partial, max_model_len)
    if scales_queries and values.get(QUERY_BETA):
        scaling = _Scaling(content, values, most, max_model_len)
        original = scaling.original(rope.original_max_position or None)
        beta = scaling.real(QUERY_BETA)
        rope = replace(rope, query_beta=beta, original_max_position=original)
    return rope, most


def read_ropes_by_kind(
    content: CheckedJson,
    head_dims: tuple[int, int],
    may_be_partial: bool,
    max_model_len: int | None,
) -> tuple[RopeConfig, RopeConfig, int]:
    """The embeddings of full-attention layers and of window layers, and the positions.

    `rope_parameters` holds one for each kind of layer; the older keys are `rope_theta` with
    `rope_scaling`, and `rope_local_base_freq`. head_dims: of the two kinds of layers. Raises as
    `read_rope` does.
    """
    both = _object(content, "rope_parameters", content.get("rope_parameters"))
    # Laguna's at the hub say once more, beside the two, what is in the first.
    if both.keys() - {"full_attention", "sliding_attention", ORIGINAL}:
        raise UnsupportedModelError(
            f"{content.path}: RoPE {shown(both)} is not supported; 'rope_parameters' must hold "
            "those of 'full_attention' and of 'sliding_attention'"
        )
    full, sliding = (
        _object(content, f"rope_parameters.{kind}", both.get(kind))
        for kind in ("full_attention", "sliding_attention")
    )
    full = full | _object(content, "rope_scaling", content.get("rope_scaling"))
    of_both = may_be_partial, max_model_len
    rope, max_position = _read(content, full, "rope_theta", head_dims[0], *of_both)
    local, _ = _read(content, sliding, "rope_local_base_freq", head_dims[1], *of_both)
    return rope, local, max_position


def with_one_theta(content: CheckedJson, num_layers: int, must_agree: bool) -> None:
    """Granite's theta of each layer, of which 0 is no RoPE, as `no_rope_layers` and one theta.

    must_agree: with the model's theta, as transformers turns Muse's layers by that one alone.
    Raises UnsupportedModelError for several thetas.
    """
    thetas = content.get("layer_rope_theta")
    if thetas is None:
        content.values["no_rope_layers"] = [1] * num_layers
        return
    is_list = isinstance(thetas, list) and len(thetas) == num_layers
    are_numbers = is_list and all(type(theta) in (int, float) for theta in thetas)
    if not are_numbers or len({theta for theta in thetas if theta}) > 1:
        raise UnsupportedModelError(
            f"{content.path}: 'layer_rope_theta' is {shown(thetas)}, which is not supported; it "
            f"must have one theta, or 0, for each of {num_layers} layers"
        )
    content.values["no_rope_layers"] = [int(theta != 0) for theta in thetas]
    scaling = _scaling(content)
    own = scaling.get("rope_theta") or content.get("rope_theta")
    if must_agree and any(thetas) and own != max(thetas):
        raise UnsupportedModelError(
            f"{content.path}: 'layer_rope_theta' has {max(thetas)}, and 'rope_parameters' "
            f"{shown(own)}; two thetas are not supported"
        )
    content.values["rope_parameters"] = scaling | {"rope_theta": max(thetas) or None}
    content.values.pop("rope_scaling", None)


def _scaling(content: CheckedJson) -> dict[str, Any]:
    """In the older spelling, if there is one."""
    key = "rope_scaling" if content.get("rope_scaling") else "rope_parameters"
    return _object(content, key, content.get(key))


def _object(content: CheckedJson, key: str, value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise CorruptModelError(f"{content.path}: {key!r} must be an object, not {shown(value)}")
    return value or {}


def _read(
    content: CheckedJson,
    values: dict[str, Any],
    theta_key: str,
    head_dim: int,
    may_be_partial: bool,
    max_model_len: int | None,
) -> tuple[RopeConfig, int]:
    """theta_key: key of config.json that gives theta if `values` has none."""
    scaling = _Scaling(content, values, content.size("max_position_embeddings"), max_model_len)
    kind = values.get("rope_type", values.get("type", "default"))
    if kind in ("su", "yarn") and "short_factor" in values:
        kind = "longrope"  # Phi-3's first checkpoints use the other names
    if kind == "deepseek_yarn":  # Sarvam's
        kind = "yarn"
    if kind == "mrope":  # Qwen2-VL's: positions of a token in a text are equal in all its sections
        kind = "default"
    if kind not in ROPE_KINDS or any(isinstance(value, dict) for value in values.values()):
        raise UnsupportedModelError(
            f"{content.path}: RoPE {shown(kind)} {shown(values)} is not supported; supported: "
            f"{', '.join(ROPE_KINDS)}, the same in all layers but for Gemma and LFM3"
        )
    theta = values.get("rope_theta")
    theta = content.real(theta_key, 10000.0) if theta is None else scaling.real("rope_theta")
    may_be_partial |= kind == "proportional"
    factor = _partial_rotary_factor(scaling, head_dim, may_be_partial)
    rope = RopeConfig(theta, kind, partial_rotary_factor=factor)
    return _READERS[kind](scaling, rope, 2 * rotary_pairs(rope, head_dim))


@dataclass(frozen=True, slots=True)
class _Scaling:
    """Numbers of a scaling, with the config's max_position and the engine's max_model_len."""

    content: CheckedJson
    values: dict[str, Any]
    max_position: int
    max_model_len: int | None

    def real(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        return positive(self.content.path, f"RoPE {key}", value)

    def original(self, default: int | None) -> int:
        """Positions of the training. config.json's own key overrides the one in the scaling."""
        outer, inner = self.content.get(ORIGINAL), self.values.get(ORIGINAL)
        value = outer if outer is not None else inner if inner is not None else default
        number = positive(self.content.path, f"RoPE {ORIGINAL}", value)
        if not 1 < number <= MAX_SIZE:
            self.corrupt(f"{ORIGINAL} {value} must be within 2 to {MAX_SIZE}")
        return int(number)

    def corrupt(self, what: str) -> NoReturn:
        raise CorruptModelError(f"{self.content.path}: RoPE {what}")


def _partial_rotary_factor(scaling: _Scaling, head_dim: int, may_be_partial: bool) -> float:
    key = "partial_rotary_factor"
    inner, outer = scaling.values.get(key), scaling.content.get(key)
    value = outer if inner is None else inner
    if value is None:
        return 1.0
    part = positive(scaling.content.path, f"RoPE {key}", value)
    if part != 1.0 and not may_be_partial:
        raise UnsupportedModelError(
            f"{scaling.content.path}: {key!r} is {value!r}, which is not supported for this "
            "architecture"
        )
    if part > 1 or int(head_dim * part) < 2:
        scaling.corrupt(f"{key} {value} rotates {int(head_dim * part)} of {head_dim} dimensions")
    if int(head_dim * part) % 2:
        raise UnsupportedModelError(
            f"{scaling.content.path}: {key!r} {value!r} rotates an odd number of dimensions"
        )
    return part


def _default(scaling: _Scaling, rope: RopeConfig, dim: int) -> tuple[RopeConfig, int]:
    return rope, scaling.max_position


def _linear(scaling: _Scaling, rope: RopeConfig, dim: int) -> tuple[RopeConfig, int]:
    return replace(rope, factor=scaling.real("factor")), scaling.max_position


def _proportional(scaling: _Scaling, rope: RopeConfig, dim: int) -> tuple[RopeConfig, int]:
    return replace(rope, factor=scaling.real("factor", 1.0)), scaling.max_position


def _llama3(scaling: _Scaling, rope: RopeConfig, dim: int) -> tuple[RopeConfig, int]:
    low, high = scaling.real("low_freq_factor"), scaling.real("high_freq_factor")
    if low >= high:
        scaling.corrupt(f"low_freq_factor {low} must be below high_freq_factor {high}")
    rope = replace(
        rope,
        factor=scaling.real("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=scaling.original(None),
    )
    return rope, scaling.max_position


def _dynamic(scaling: _Scaling, rope: RopeConfig, dim: int) -> tuple[RopeConfig, int]:
    if dim < 4:
        scaling.corrupt(f"of kind dynamic needs heads of 4 dimensions or more, not {dim}")
    length = max(scaling.max_position, scaling.max_model_len or 0)
    if scaling.values.get("alpha"):  # Hunyuan's: theta is larger by a fixed power of it
        theta = rope.theta * scaling.real("alpha") ** (dim / (dim - 2))
        return replace(rope, kind="default", theta=theta), length
    factor, original = scaling.real("factor"), scaling.max_position
    if factor < 1:
        scaling.corrupt(f"factor {factor} must be at least 1")
    rope = replace(rope, factor=factor, original_max_position=original, length=length)
    return rope, length


def _yarn(scaling: _Scaling, rope: RopeConfig, dim: int) -> tuple[RopeConfig, int]:
    factor, original = scaling.real("factor"), scaling.original(scaling.max_position)
    fast, slow = scaling.real("beta_fast", 32.0), scaling.real("beta_slow", 1.0)
    if fast < slow:
        scaling.corrupt(f"beta_fast {fast} must not be below beta_slow {slow}")
    if rope.theta <= 1:
        scaling.corrupt(f"rope_theta {rope.theta} must be above 1")
    truncate = scaling.values.get("truncate", True)
    if not isinstance(truncate, bool):
        scaling.corrupt(f"truncate is {shown(truncate)}, neither true nor false")
    attention_factor = yarn_attention_factor(factor)
    if scaling.values.get("mscale") and scaling.values.get("mscale_all_dim"):
        both = scaling.real("mscale"), scaling.real("mscale_all_dim")
        over, under = (yarn_attention_factor(factor, mscale) for mscale in both)
        attention_factor = over / under
    rope = replace(
        rope,
        factor=factor,
        original_max_position=original,
        attention_factor=scaling.real("attention_factor", attention_factor),
        beta_fast=fast,
        beta_slow=slow,
        truncate=truncate,
    )
    return rope, max(scaling.max_position, min(int(factor * original), MAX_SIZE))


def _longrope(scaling: _Scaling, rope: RopeConfig, dim: int) -> tuple[RopeConfig, int]:
    original = scaling.original(scaling.max_position)
    short, long = (_divisors(scaling, f"{which}_factor", dim // 2) for which in ("short", "long"))
    is_long = (scaling.max_model_len or scaling.max_position) > original
    factor = scaling.real("factor", scaling.max_position / original)
    rope = replace(
        rope,
        factor=factor,
        original_max_position=original,
        attention_factor=scaling.real(
            "attention_factor", longrope_attention_factor(factor, original)
        ),
        divisors=long if is_long else short,
    )
    return rope, scaling.max_position


def _divisors(scaling: _Scaling, key: str, size: int) -> tuple[float, ...]:
    listed = scaling.values.get(key)
    if not isinstance(listed, list) or len(listed) != size:
        what = f"{len(listed)} entries" if isinstance(listed, list) else shown(listed)
        scaling.corrupt(f"{key} must be a list of {size} numbers, not {what}")
    return tuple(positive(scaling.content.path, f"RoPE {key}", value) for value in listed)


_READERS: dict[str, Callable[[_Scaling, RopeConfig, int], tuple[RopeConfig, int]]] = {
    "default": _default,
    "linear": _linear,
    "proportional": _proportional,
    "llama3": _llama3,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
}
