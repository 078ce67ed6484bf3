"""Reads what `draft_model` names: the assistant of a Gemma 4, or a model with KV of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nanoengine.config.engine import EngineConfig
from nanoengine.config.model import AssistantConfig, ModelConfig
from nanoengine.errors import ConfigError, shown
from nanoengine.loading.assistant import CLASSES, read_assistant
from nanoengine.loading.find_model import config_folder
from nanoengine.loading.model_config import config_json, read_model_config
from nanoengine.text.checked_json import has_file
from nanoengine.text.tokenizer_files import read_backend


def is_assistant(folder: Path) -> bool:
    """Whether config.json names the class of an assistant."""
    named = config_json(folder).get("architectures")
    return isinstance(named, list) and any(name in CLASSES for name in named)


def read_draft_model(settings: EngineConfig, model: ModelConfig) -> AssistantConfig | ModelConfig:
    """The shape of what `draft_model` names, for `model`; reads no weights. Raises as
    read_assistant, and ConfigError for a pair that cannot share blocks.
    """
    with config_folder(str(settings.draft_model)) as folder:
        if is_assistant(folder):
            return read_assistant(folder, model)
        draft = read_model_config(folder)
    check_pair(draft, model, str(settings.draft_model))
    return draft


def settings_of_draft(config: EngineConfig) -> EngineConfig:
    """Those that a draft model is loaded with: it has adapters and guesses of nobody, and its
    weights stay what they are.
    """
    return replace(
        config,
        model=str(config.draft_model),
        tokenizer=None,
        load_format="dummy" if config.load_format == "dummy" else "auto",
        max_model_len=None,
        quantization=None,
        activation_dtype=None,
        lora=None,
        draft_model=None,
        speculative="off",
        prefix_cache_file=None,
    )


def check_pair(draft: ModelConfig, model: ModelConfig, name: str) -> None:
    """Raise ConfigError if KV of `draft`, which is called `name`, cannot lie beside the model's."""
    for which, each in ((f"draft_model {shown(name)}", draft), ("the model", model)):
        kinds = {
            "recurrent layers": each.recurrent is not None,
            "latent attention": each.latent is not None,
            "inputs of each layer": each is draft and each.layer_input_size > 0,
        }
        for kind in (kind for kind, has_it in kinds.items() if has_it):
            raise ConfigError(
                f"{which} ({each.architecture}) has {kind}, with which no draft model works here; "
                'leave draft_model out, or take speculative="ngram:4"'
            )


def check_vocabularies(folder: Path, draft: Path) -> None:
    """Raise ConfigError if a token is another text in the folder of the draft model. Tokens that
    one of the two lacks are not compared; a folder without tokenizer.json is believed.
    """
    paths = [each / "tokenizer.json" for each in (folder, draft)]
    if not all(map(has_file, paths)) or paths[0].read_bytes() == paths[1].read_bytes():
        return
    ours, theirs = (_texts(path) for path in paths)
    for token in sorted(ours.keys() & theirs.keys()):
        if ours[token] != theirs[token]:
            raise ConfigError(
                f"{draft} has another vocabulary than {folder}: token {token} is "
                f"{shown(theirs[token])} there and {shown(ours[token])} here; take a smaller model "
                "of the same family as draft_model, or leave it out"
            )


def _texts(path: Path) -> dict[int, str]:
    return {token: text for text, token in read_backend(path).get_vocab().items()}
