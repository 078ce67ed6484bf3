"""Numbers of config.json that embeddings, products, sums and logits are multiplied by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from nanoengine.config.model import ModelConfig, Multipliers
from nanoengine.errors import CorruptModelError, shown
from nanoengine.text.checked_json import CheckedJson, positive

MAX_FACTOR = 1e4
GRANITE_FACTORS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
ONES = {
    "attention_in": "attention_in_multiplier",
    "attention_out": "attention_out_multiplier",
    "key": "key_multiplier",
    "ssm_in": "ssm_in_multiplier",
    "ssm_out": "ssm_out_multiplier",
}


def with_multipliers(config: ModelConfig, content: CheckedJson) -> ModelConfig:
    """A Falcon-H1 with its own; others stay. Raises CorruptModelError."""
    if not config.attends_beside:
        return config
    ones = {field: checked_factor(content, name, content.get(name)) for field, name in ONES.items()}
    gate, down = _listed(content, "mlp_multipliers", 2)
    ssm = tuple(_listed(content, "ssm_multipliers", 5))
    multipliers = Multipliers(**ones, ssm=ssm, gate=gate, down=down)
    return replace(
        config,
        multipliers=multipliers,
        factors=replace(config.factors, summands=multipliers.summands),
        query_pre_attn_scalar=config.head_dim / multipliers.scores**2,
    )


def with_granites_names(content: CheckedJson) -> None:
    """Give MiniCPM's factors those of Granite: of embeddings; of what is added to the residual
    stream, over the root of the number of layers; and of logits, which are divided by the width
    over that of the model on which its makers tuned. Raises CorruptModelError.
    """
    size, num_layers = content.size("hidden_size"), content.size("num_hidden_layers")
    depth, base = content.get("scale_depth"), content.get("dim_model_base")
    embeddings = checked_factor(content, "scale_emb", content.get("scale_emb"))
    root = num_layers**0.5
    summands = 1.0 if depth is None else checked_factor(content, "scale_depth", depth) / root
    logits = 1.0 if base is None else size / positive(content.path, "dim_model_base", base)
    content.values |= dict(zip(GRANITE_FACTORS, (embeddings, summands, logits), strict=True))


def _listed(content: CheckedJson, name: str, count: int) -> Iterator[float]:
    listed = content.get(name)
    if listed is None:
        listed = [1.0] * count
    if not isinstance(listed, list) or len(listed) != count:
        raise CorruptModelError(
            f"{content.path}: {name!r} is {shown(listed)}; it must be a list of {count} numbers"
        )
    return (checked_factor(content, name, value) for value in listed)


def checked_factor(content: CheckedJson, name: str, value: Any) -> float:
    """One number, 1 if it is missing. Raises CorruptModelError."""
    factor = 1.0 if value is None else positive(content.path, name, value)
    if not 1 / MAX_FACTOR <= factor <= MAX_FACTOR:
        raise CorruptModelError(
            f"{content.path}: {name!r} is {factor}, not within {1 / MAX_FACTOR} to {MAX_FACTOR}"
        )
    return factor
