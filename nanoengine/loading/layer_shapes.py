"""Reads the shapes of layers of a config.json in which they differ, Gemma 4's and Laguna's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nanoengine.config.model import LayerShape
from nanoengine.errors import CorruptModelError, UnsupportedModelError, shown
from nanoengine.text.checked_json import CheckedJson, whole

GLOBAL_HEAD_DIM = 512
HEADS = "num_attention_heads_per_layer"
OVERRIDES = {"head_dim", "num_key_value_heads"}


def read_shapes(content: CheckedJson, windows: Sequence[int | None]) -> tuple[LayerShape, ...]:
    """The shape of each layer; () if all are the same. windows: of each layer.

    Layers without a window have other heads, by keys of their own or by `per_layer_config`. The
    last `num_kv_shared_layers` read the keys and values of the last layer before them with a window
    if they have one, else of the last without.
    Raises CorruptModelError for impossible numbers, UnsupportedModelError for other settings.
    """
    num_layers, num_shared = len(windows), content.get("num_kv_shared_layers") or 0
    if type(num_shared) is not int or not 0 <= num_shared < num_layers:
        raise CorruptModelError(
            f"{content.path}: 'num_kv_shared_layers' is {shown(num_shared)}, not an integer within "
            f"0 to {num_layers - 1}"
        )
    if windows[-1] is not None:
        raise UnsupportedModelError(
            f"{content.path}: the last layer has a sliding window, which is not supported"
        )
    inner_size = content.size("intermediate_size")
    first_shared = num_layers - num_shared
    num_heads = content.size("num_attention_heads")
    shapes = [
        LayerShape(num_heads, *heads, inner_size, layer)
        for layer, heads in enumerate(_heads(content, windows))
    ]
    if content.flag("attention_k_eq_v"):
        shapes = [
            replace(shape, values_are_keys=window is None)
            for shape, window in zip(shapes, windows, strict=True)
        ]
    wide = inner_size * (1 + content.flag("use_double_wide_mlp"))
    for layer in range(first_shared, num_layers):
        is_full = windows[layer] is None
        alike = [i for i in range(first_shared) if (windows[i] is None) == is_full]
        if not alike or shapes[alike[-1]].kv_heads != shapes[layer].kv_heads:
            raise CorruptModelError(
                f"{content.path}: layer {layer} shares keys and values, but no layer before the "
                f"last {num_shared} is of its kind"
            )
        shapes[layer] = replace(shapes[layer], source=alike[-1], intermediate_size=wide)
    usual = [
        LayerShape(num_heads, *_usual(content), inner_size, layer) for layer in range(num_layers)
    ]
    return () if shapes == usual else tuple(shapes)


def read_head_counts(content: CheckedJson, num_layers: int) -> tuple[LayerShape, ...]:
    """The shape of each layer, whose heads a list counts; () if all are the same. Raises
    CorruptModelError.
    """
    usual, inner_size = content.size("num_attention_heads"), content.size("intermediate_size")
    listed = content.get(HEADS)
    if listed is None:
        return ()
    if not isinstance(listed, list) or len(listed) != num_layers:
        raise CorruptModelError(
            f"{content.path}: {HEADS!r} must have a number for each of {num_layers} layers, not "
            f"{shown(listed)}"
        )
    counts = [whole(content.path, f"{HEADS}.{i}", count) for i, count in enumerate(listed)]
    if all(count == usual for count in counts):
        return ()
    heads = _usual(content)
    return tuple(LayerShape(count, *heads, inner_size, i) for i, count in enumerate(counts))


def _usual(content: CheckedJson) -> tuple[int, int]:
    """KV heads and head_dim where nothing else is said."""
    return content.size("num_key_value_heads"), content.size("head_dim")


def _heads(content: CheckedJson, windows: Sequence[int | None]) -> list[tuple[int, int]]:
    """KV heads and head_dim of each layer."""
    usual = _usual(content)
    if "per_layer_config" in content.values:
        return _overridden(content, content.get("per_layer_config"), usual, len(windows))
    num, dim = usual[0], content.size("global_head_dim", GLOBAL_HEAD_DIM)
    if content.flag("attention_k_eq_v"):
        num = content.size("num_global_key_value_heads", num)
    return [(num, dim) if window is None else usual for window in windows]


def _overridden(
    content: CheckedJson, listed: Any, usual: tuple[int, int], num_layers: int
) -> list[tuple[int, int]]:
    heads = [usual] * num_layers
    listed = {} if listed is None else listed
    for layer, own in listed.items() if isinstance(listed, dict) else (("", listed),):
        index = int(layer) if str(layer).isdecimal() else num_layers
        if index >= num_layers or not isinstance(own, dict) or own.keys() - OVERRIDES:
            raise UnsupportedModelError(
                f"{content.path}: 'per_layer_config' of {shown(layer)} is {shown(own)}, which is "
                f"not supported; it may have {' and '.join(sorted(OVERRIDES))} of layers 0 to "
                f"{num_layers - 1}"
            )
        each = (own.get("num_key_value_heads", usual[0]), own.get("head_dim", usual[1]))
        num, dim = (whole(content.path, f"per_layer_config.{layer}", size) for size in each)
        heads[index] = num, dim
    return heads
