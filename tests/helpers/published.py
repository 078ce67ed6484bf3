"""Configurations as they are published, and the sizes of the models that they make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from nanoengine.config.model import ModelConfig
from nanoengine.loading.model_config import read_model_config
from nanoengine.models.shard import WHOLE
from nanoengine.startup.weight_bytes import WeightBytes, WeightForm, weight_bytes


def read_published(folder: Path, published: dict[str, Any], **changes: Any) -> ModelConfig:
    """changes: of its keys; "left out": it has none such."""
    whole = published | changes
    text = json.dumps({key: value for key, value in whole.items() if value != "left out"})
    (folder / "config.json").write_text(text)
    return read_model_config(folder)


def bytes_in_bf16(config: ModelConfig) -> WeightBytes:
    """Two of each number."""
    return weight_bytes(config, WHOLE, WeightForm(torch.bfloat16, {}, False, False, packs=True))
