"""The RoPE of a GGUF file as `rope_scaling` of a Hugging Face configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nanoengine.errors import UnsupportedModelError
from nanoengine.loading.gguf.latent import score_factors
from nanoengine.loading.gguf.metadata import Metadata
from nanoengine.models.rope import yarn_attention_factor

TEMPERATURE = "attention.temperature_scale"  # of queries, by their position
WITH_LOG_MULTIPLIER = ("deepseek2", "mistral3")
ROPE_FREQS = "rope_freqs.weight"
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = frozenset({ROPE_FREQS, _LONG_FACTORS, _SHORT_FACTORS})


def original_length(metadata: Metadata) -> int:
    """Positions of the training, before scaling."""
    length = metadata.number("context_length")
    return metadata.number("rope.scaling.original_context_length", length)


def scaling_factor(metadata: Metadata) -> float:
    """Files of 2023 have the other key. To llama.cpp 0 is no factor."""
    return metadata.real("rope.scaling.factor", metadata.real("rope.scale_linear", 0.0)) or 1.0


def rope_scaling(
    metadata: Metadata, stored: Mapping[str, Any], theta: float, head_dim: int
) -> dict[str, Any] | None:
    """`rope_scaling` of config.json, None without one. stored: the file's tensors, by name.

    Raises CorruptModelError and UnsupportedModelError.
    """
    factor = scaling_factor(metadata)
    unsaid = "none" if factor == 1.0 else "linear"
    kind = metadata.get(f"{metadata.architecture}.rope.scaling.type", str, unsaid)
    attention_factor = metadata.real("rope.scaling.attn_factor", 1.0)
    has_multiplier = metadata.architecture in WITH_LOG_MULTIPLIER
    refused = () if has_multiplier else ("rope.scaling.yarn_log_multiplier",)
    for key in ("rope.scaling.yarn_ext_factor", *refused):
        if metadata.has(f"{metadata.architecture}.{key}"):
            raise UnsupportedModelError(f"{metadata.path}: {key!r} is set and not supported")
    given = stored.keys() & ROPE_TENSORS
    if kind in ("none", "longrope") and given == {_LONG_FACTORS, _SHORT_FACTORS}:
        return {
            "rope_type": "longrope",
            "long_factor": _factors(stored[_LONG_FACTORS]),
            "short_factor": _factors(stored[_SHORT_FACTORS]),
            "attention_factor": attention_factor,
            "original_max_position_embeddings": original_length(metadata),
        }
    if kind == "yarn" and not given and (attention_factor == 1.0 or not has_multiplier):
        return _yarn_scaling(metadata, attention_factor)
    if attention_factor == 1.0 and not metadata.real(TEMPERATURE, 0.0):
        if kind == "none" and given == {ROPE_FREQS}:
            return _llama3_scaling(metadata.path, stored[ROPE_FREQS], theta, head_dim)
        if kind == "none" and not given:
            return None
        if kind == "linear" and not given:
            return {"rope_type": "linear", "factor": factor}
    raise UnsupportedModelError(
        f"{metadata.path}: RoPE scaling {kind!r} with attention factor {attention_factor} and "
        f"tensors {sorted(given)} is not supported; supported: none, linear, llama3, yarn, longrope"
    )


def _factors(stored: Any) -> list[float]:
    return [float(str(value)) for value in np.array(stored.data, dtype=np.float32).reshape(-1)]


def _yarn_scaling(metadata: Metadata, attention_factor: float) -> dict[str, Any]:
    """llama.cpp multiplies YaRN's own attention factor with the one in the file."""
    factor = metadata.real("rope.scaling.factor")
    # No key says that gpt-oss was trained with a ramp between whole pairs.
    exact = {"truncate": False} if metadata.architecture == "gpt-oss" else {}
    factors = {"attention_factor": yarn_attention_factor(factor) * attention_factor}
    if metadata.architecture == "deepseek2":
        factors = score_factors(metadata)
    if metadata.architecture == "mistral3":
        factors |= _mistral_factors(metadata)
    return (
        exact
        | factors
        | {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original_length(metadata),
            "beta_fast": metadata.real("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": metadata.real("rope.scaling.yarn_beta_slow", 1.0),
        }
    )


def _mistral_factors(metadata: Metadata) -> dict[str, Any]:
    """Keys of Ministral 3's YaRN scaling: of the rotation, and of queries."""
    length = original_length(metadata)
    if metadata.number("attention.temperature_length", length) != length:
        raise UnsupportedModelError(
            f"{metadata.path}: 'mistral3.attention.temperature_length' is not the {length} of "
            "'mistral3.rope.scaling.original_context_length', which is not supported"
        )
    factors: dict[str, Any] = {"llama_4_scaling_beta": metadata.real(TEMPERATURE, 0.0)}
    multiplier = metadata.real("rope.scaling.yarn_log_multiplier", 0.0)
    if multiplier:
        factors |= {"attention_factor": None, "mscale": 1.0, "mscale_all_dim": multiplier}
    return factors


def _llama3_scaling(path: Path, freqs: Any, theta: float, head_dim: int) -> dict[str, Any]:
    """llama.cpp stores Llama 3's rule as one divisor per frequency; find the rule they come
    from."""
    divisors = np.array(freqs.data, dtype=np.float64).reshape(-1)
    factor = float(divisors.max())
    low, high, original = 1.0, 4.0, 8192  # the same in every Llama 3
    # [head_dim / 2]: 1 for short waves, `factor` for long ones, blended between.
    turns = original * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - blend) / factor + blend)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise UnsupportedModelError(f"{path}: {ROPE_FREQS!r} does not follow Llama 3's rule")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
