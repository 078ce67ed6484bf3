"""Reads an assistant: the settings in its config.json, fitted to the model that it guesses for, and
its tensors. The assistants of Gemma 4 are the only ones that there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from nanoengine.config.model import GIVEN, AssistantConfig, ModelConfig
from nanoengine.errors import ConfigError, CorruptModelError, UnsupportedModelError, shown
from nanoengine.loading.checkpoint import COMPUTED_BUFFERS, CheckpointReader, check_names
from nanoengine.loading.model_config import config_json, config_of
from nanoengine.loading.wrappers import text_config
from nanoengine.models.assistant import ORDERING, Assistant, assistant_shapes
from nanoengine.models.layer_ops import LayerOps
from nanoengine.models.products import Ends
from nanoengine.models.stored_codes import numbers_of

# The classes of config.json, and what transformers calls the layers of each.
CLASSES = {
    "Gemma4AssistantForCausalLM": ("gemma4_text", "Gemma4ForCausalLM"),
    "Gemma4UnifiedAssistantForCausalLM": ("gemma4_unified_text", "Gemma4UnifiedForCausalLM"),
}
ASSISTED = frozenset(architecture for _, architecture in CLASSES.values())
# What assistants do not have, by key: the value that the key must have, if it is there.
_WITHOUT: Mapping[str, object] = {
    "enable_moe_block": False,
    "hidden_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
}


def read_assistant(folder: Path, model: ModelConfig) -> AssistantConfig:
    """The assistant in `folder`, for `model`. Raises ConfigError if it is none or is another
    model's, CorruptModelError and UnsupportedModelError as read_model_config does.
    """
    content = config_json(folder)
    named = content.get("architectures")
    known = [name for name in named if name in CLASSES] if isinstance(named, list) else []
    if not known or model.architecture not in ASSISTED:
        raise ConfigError(
            f"draft_model must be an assistant of a Gemma 4, such as "
            f"google/gemma-4-E4B-it-assistant for google/gemma-4-E4B-it; {folder} is "
            f"{shown(named)} for {model.architecture}; leave it out"
        )
    outer, inner = content.values, text_config(content.values)
    kind, architecture = CLASSES[known[0]]
    if inner is None or inner.get("model_type", kind) != kind:
        raise CorruptModelError(f"{content.path}: 'text_config' must be that of a {kind}")
    for key, value in _WITHOUT.items():
        if inner.get(key) not in (None, value):
            raise UnsupportedModelError(
                f"{content.path}: {key!r} of an assistant is {shown(inner[key])}, not {value!r}"
            )
    # All its layers read KV, and none of them that of another layer of its own.
    content.values = {**inner, **_WITHOUT, "num_kv_shared_layers": 0, "attention_k_eq_v": False}
    if inner.get("attention_k_eq_v") and "per_layer_config" not in inner:
        content.values["attention_k_eq_v"] = True
    layers = config_of(content, architecture, known[0], None)
    content.values = outer
    hidden_size = content.size("backbone_hidden_size", 1536)
    if (hidden_size, layers.vocab_size) != (model.hidden_size, model.vocab_size):
        raise ConfigError(
            f"{folder} guesses for a model of hidden size {hidden_size} with {layers.vocab_size} "
            f"tokens, and this one has {model.hidden_size} and {model.vocab_size}; take the "
            "assistant of this model as draft_model"
        )
    config = AssistantConfig(_reading(layers, model, folder), hidden_size)
    return config if not content.flag("use_ordered_embeddings") else _with_centroids(config, folder)


def _with_centroids(config: AssistantConfig, folder: Path) -> AssistantConfig:
    content = config_json(folder)
    count = content.size("num_centroids", 2048)
    num_open = content.size("centroid_intermediate_top_k", 32, limit=count)
    if config.layers.vocab_size % count:
        raise CorruptModelError(
            f"{content.path}: 'num_centroids' is {count}, which does not divide the "
            f"{config.layers.vocab_size} tokens"
        )
    return replace(config, num_centroids=count, num_open=num_open)


def _reading(layers: ModelConfig, model: ModelConfig, folder: Path) -> ModelConfig:
    """Its layers, each of which reads what the last layer of its kind in `model` stores."""
    storing = {model.window(layer) is not None: layer for layer in model.kv_layers}
    shapes, given = [], []
    for index in range(layers.num_layers):
        shape, source = layers.shape(index), storing.get(layers.window(index) is not None)
        if source is None or model.shape(source).kv_heads != shape.kv_heads:
            found = "none" if source is None else model.shape(source).kv_heads
            raise ConfigError(
                f"{folder}: layer {index} reads KV heads of {shape.kv_heads} (number, size), and "
                f"this model stores {found} there; take the assistant of this model as draft_model"
            )
        shapes.append(replace(shape, source=GIVEN))
        given.append(model.attention_layers.index(source))
    return replace(
        layers,
        shapes=tuple(shapes),
        given_kv=tuple(given),
        final_logit_softcap=None,
        tie_word_embeddings=True,
    )


def load_assistant(
    folder: Path,
    model: ModelConfig,
    ends: Ends,
    device: torch.device,
    dtype: torch.dtype,
    ops: LayerOps,
) -> tuple[Assistant, int]:
    """The assistant in `folder`, and the bytes of its weights, which are numbers of `dtype`. ends:
    of the model, whose config is `model`. Raises as read_assistant, and ModelLoadErrors.
    """
    config = read_assistant(folder, model)
    shapes = assistant_shapes(config)
    num_bytes = 0
    with CheckpointReader(folder) as reader:
        check_names(shapes, reader, (*COMPUTED_BUFFERS, "lm_head.weight", ORDERING))

        def source(name: str) -> torch.Tensor:
            nonlocal num_bytes
            stored = numbers_of(reader.numbers(name, dtype))
            made = stored.to(device, dtype, copy=True)
            num_bytes += made.nbytes
            return made

        ordering = _ordering(reader, config) if config.num_centroids else None
        assistant = Assistant(config, source, device, ops, ends, ordering)
    return assistant, num_bytes


def _ordering(reader: CheckpointReader, config: AssistantConfig) -> torch.Tensor:
    """Its tokens, group by group. Raises CorruptModelError if it does not have each once."""
    vocab_size = config.layers.vocab_size
    ordering = reader.integers(ORDERING) if ORDERING in reader.names() else torch.empty(0)
    if not torch.equal(ordering.sort().values, torch.arange(vocab_size)):
        raise CorruptModelError(
            f"{reader.folder}: {ORDERING!r} must have each of the {vocab_size} tokens once"
        )
    return ordering
