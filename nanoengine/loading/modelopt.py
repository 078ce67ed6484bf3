"""How NVIDIA's ModelOpt says what it quantised: in config.json's `quantization_config`, or in a
file beside it. Its weights are read by fp8.py and nvfp4.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoengine.text.checked_json import read_json_if_any

FILE = "hf_quant_config.json"
FP8 = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")
NVFP4 = ("NVFP4", "W4A16_NVFP4")
MIXED = "MIXED_PRECISION"  # with the algorithm of each layer in LAYERS
LAYERS, ALGORITHM, INNER = "quantized_layers", "quant_algo", "quantization"
_METHOD, _KEY = "modelopt", "quantization_config"


def quantization_of(folder: Path, content: Mapping[str, Any]) -> Any:
    """The `quantization_config` of a config.json, which may be anything, or what ModelOpt's file
    beside it says; None without weights that are quantised. Its older form, an object in the
    object, becomes the newer one.
    """
    said = content.get(_KEY)
    if said is None:
        said = read_json_if_any(folder / FILE)
        said = said if isinstance(said.get(INNER), dict) else None
    inner = said.get(INNER) if isinstance(said, dict) else None
    if isinstance(said, dict) and isinstance(inner, dict):
        said = {"quant_method": _METHOD} | said | inner
    is_of_kv_alone = _is_of_modelopt(said) and isinstance(said, dict) and not said.get(ALGORITHM)
    return None if is_of_kv_alone else said


def algorithms(config: object) -> set[str]:
    """Those of ModelOpt in a `quantization_config`, of all layers or some; none in another's."""
    if not isinstance(config, dict) or not _is_of_modelopt(config):
        return set()
    said, layers = _upper(config.get(ALGORITHM)), config.get(LAYERS)
    if said != MIXED or not isinstance(layers, dict):
        return {said}
    each = (layer if isinstance(layer, dict) else {} for layer in layers.values())
    return {_upper(layer.get(ALGORITHM)) for layer in each}


def _upper(name: object) -> str:
    return name.upper() if isinstance(name, str) else ""


def _is_of_modelopt(config: object) -> bool:
    """Whether it says so, or names no method and an algorithm of ModelOpt (Nemotron-H in FP8)."""
    if not isinstance(config, dict):
        return False
    method = config.get("quant_method")
    if method is None:
        return _upper(config.get(ALGORITHM)) in (*FP8, *NVFP4, MIXED)
    return isinstance(method, str) and method.startswith(_METHOD)
