"""Which layers see all keys, have a sliding window or are recurrent: from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoengine.errors import UnsupportedModelError, shown
from nanoengine.models.architectures import ARCHITECTURES
from nanoengine.text.checked_json import CheckedJson

MAX_STATE_DIM, MAX_CONV_SIZE = 1024, 64  # of recurrent layers
FULL, SLIDING, RECURRENT = "full_attention", "sliding_attention", "linear_attention"
POSITIONS, MTP_LAYERS = "max_position_embeddings", "num_nextn_predict_layers"
ATTENTION_KINDS, CONV = (FULL, SLIDING), "conv"


def layer_windows(
    architecture: str, settings: Mapping[str, Any], num_layers: int, where: object
) -> tuple[int | None, ...]:
    """The sliding window of each layer, () if no layer has one, as transformers reads config.json.

    settings: the content of config.json. where: its path, for errors. Raises UnsupportedModelError
    for settings with which transformers would not run.
    """
    rule = ARCHITECTURES[architecture].windows
    row = ARCHITECTURES[architecture]
    if row.hybrid not in ("", "apart") and not rule:
        return ()
    if rule == "pattern":
        others = {"convs": (CONV,), "delta": (RECURRENT,)}.get(row.hybrid, ())
        return _windows_by_pattern(settings, num_layers, where, (*ATTENTION_KINDS, *others))
    if not rule or (rule == "layer_types" and not settings.get("use_sliding_window")):
        window, first = None, num_layers
    else:
        window, first = settings.get("sliding_window", 4096), 0
    if rule == "layer_types" and window is not None:
        first = settings.get("max_window_layers", 28)
    if window is not None and (type(window) is not int or window < 1 or type(first) is not int):
        raise UnsupportedModelError(f"{where}: a 'sliding_window' of {window!r} is not supported")
    kinds: Any = [SLIDING if window and i >= first else FULL for i in range(num_layers)]
    listed = settings.get("layer_types")
    if listed is not None and listed != kinds:
        are_kinds, positions = _are_layer_types(listed, num_layers), settings.get(POSITIONS)
        if are_kinds and window and type(positions) is int and window >= positions:
            return ()  # whichever layers have it, it hides nothing (Ministral 8B)
        if rule != "layer_types" or not window or not are_kinds:
            raise UnsupportedModelError(
                f"{where}: 'layer_types' {shown(listed)} with a 'sliding_window' of {window} is "
                "not supported"
            )
        kinds = listed
    windows = tuple(window if kind == SLIDING else None for kind in kinds)
    return windows if any(windows) else ()


def _windows_by_pattern(
    settings: Mapping[str, Any], num_layers: int, where: object, kinds: tuple[str, ...]
) -> tuple[int | None, ...]:
    """By `layer_types`; without it, in all layers except every `sliding_window_pattern`-th. kinds:
    those that layers may be.
    """
    window: Any = settings.get("sliding_window")
    listed: Any = settings.get("layer_types")
    interval, more = settings.get("sliding_window_pattern"), settings.get(MTP_LAYERS)
    if isinstance(listed, list) and type(more) is int and len(listed) == num_layers + more:
        listed = listed[:num_layers]  # the others are of MTP heads (EXAONE 4.5)
    if listed is None and type(interval) is int and interval > 0:
        listed = [SLIDING if (i + 1) % interval else FULL for i in range(num_layers)]
    has_window = type(window) is int and window > 0
    if not _are_layer_types(listed, num_layers, kinds) or (SLIDING in listed and not has_window):
        raise UnsupportedModelError(
            f"{where}: 'layer_types' {listed!r} for {num_layers} layers with a 'sliding_window' of "
            f"{window!r} and a 'sliding_window_pattern' of {interval!r} is not supported"
        )
    return tuple(window if k == SLIDING else None for k in listed) if SLIDING in listed else ()


def recurrent_layers(
    content: CheckedJson, num_layers: int, has_windows: bool = False
) -> tuple[int, ...]:
    """The layers without attention: by `layer_types`; without it, all but every
    `full_attention_interval`-th. has_windows: whether others may have one. Raises as
    `layers_of_kind`.
    """
    listed, interval = content.get("layer_types"), content.get("full_attention_interval")
    if listed is None and type(interval) is int and interval > 0:
        listed = [RECURRENT if (i + 1) % interval else FULL for i in range(num_layers)]
    others = (FULL, SLIDING) if has_windows else (FULL,)
    return layers_of_kind(content, "layer_types", listed, num_layers, RECURRENT, others)


def layers_of_kind(
    content: CheckedJson,
    key: str,
    listed: object,
    num_layers: int,
    kind: str,
    others: tuple[str, ...] = (FULL,),
) -> tuple[int, ...]:
    """The layers of this kind, where the others have attention, of the kinds `others`. listed: the
    kinds of all, by `key` of config.json. Raises UnsupportedModelError.
    """
    kinds = listed if isinstance(listed, list) and len(listed) == num_layers else []
    known = *others, kind
    if FULL not in kinds or any(each not in known for each in kinds):
        raise UnsupportedModelError(
            f"{content.path}: {key!r} {shown(content.get(key))} for {num_layers} layers is not "
            f"supported; each must be {' or '.join(map(repr, known))}, and one at least the first "
            "of these"
        )
    return tuple(i for i, each in enumerate(kinds) if each == kind)


def read_heads(content: CheckedJson, keys: str, values: str) -> tuple[int, int]:
    """Key and value heads of a recurrent layer, by these keys. Raises UnsupportedModelError."""
    num_keys, num_values = content.size(keys), content.size(values)
    if num_values % num_keys:
        raise UnsupportedModelError(
            f"{content.path}: {values!r} is {num_values}, and must be a multiple of {keys!r}, "
            f"which is {num_keys}"
        )
    return num_keys, num_values


def read_conv_size(content: CheckedJson, key: str) -> int:
    """Tokens that a convolution sees, by this key of config.json. Raises UnsupportedModelError."""
    size = content.size(key, limit=MAX_CONV_SIZE)
    if size < 2:
        raise UnsupportedModelError(f"{content.path}: {key!r} is {size}; the least is 2")
    return size


def _are_layer_types(
    listed: object, num_layers: int, kinds: tuple[str, ...] = ATTENTION_KINDS
) -> bool:
    if not isinstance(listed, list) or len(listed) != num_layers:
        return False
    return all(kind in kinds for kind in listed)
