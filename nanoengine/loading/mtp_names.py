"""The head for multi-token prediction in a checkpoint: who has one, and what its tensors are called
there. `weight_shapes` names them as DeepSeek-V3 does, as one more layer.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import replace

from nanoengine.config.model import ModelConfig
from nanoengine.errors import ConfigError, WeightMismatchError
from nanoengine.loading.assistant import ASSISTED
from nanoengine.loading.checkpoint import Part
from nanoengine.models.architecture import MTP_JOIN, MTP_NORMS
from nanoengine.models.architectures import ARCHITECTURES

# Qwen's names of what is beside the layer.
_QWEN = {
    "mtp.fc.": MTP_JOIN,
    "mtp.pre_fc_norm_embedding.": MTP_NORMS[0],
    "mtp.pre_fc_norm_hidden.": MTP_NORMS[1],
    "mtp.norm.": MTP_NORMS[2],
}
_QWEN_LAYER = "mtp.layers.0."
HELPER = "give its assistant as draft_model, such as google/gemma-4-E4B-it-assistant"
INSTEAD = 'take speculative="ngram:4", which looks up what repeats, or leave it out'


def with_mtp(model: ModelConfig) -> ModelConfig:
    """The model with its head. Raises ConfigError if its architecture has none."""
    if not ARCHITECTURES[model.architecture].mtp:
        instead = HELPER if model.architecture in ASSISTED else INSTEAD
        having = sorted(name for name, each in ARCHITECTURES.items() if each.mtp)
        raise ConfigError(
            f'speculative="mtp:K" guesses by an MTP head, and {model.architecture} has '
            f"none ({', '.join(having)} have one); {instead}"
        )
    return replace(model, has_mtp=True)


def mtp_parts(model: ModelConfig, names: Iterable[str]) -> dict[str, Part]:
    """Where the tensors of the head lie, by the names in `weight_shapes`, if the checkpoint has
    other names for them. names: of all its tensors.
    """
    prefix = f"model.layers.{model.num_layers}."
    if ARCHITECTURES[model.architecture].mtp != "mtp" or not model.has_mtp:
        return {}
    found = {}
    for name in names:
        if name.startswith(_QWEN_LAYER):
            found[prefix + name.removeprefix(_QWEN_LAYER)] = Part(name)
        for theirs, ours in _QWEN.items():
            if name.startswith(theirs):
                found[f"{prefix}{ours}.{name.removeprefix(theirs)}"] = Part(name)
    return found


def check_has_mtp(model: ModelConfig, names: Container[str], checkpoint: object) -> None:
    """Raise WeightMismatchError if the head is asked for and the checkpoint, whose tensors have
    these names, came without it.
    """
    join = f"model.layers.{model.num_layers}.{MTP_JOIN}.weight"
    if model.has_mtp and join not in names:
        of_qwen = ARCHITECTURES[model.architecture].mtp == "mtp"
        raise WeightMismatchError(
            f'speculative="mtp:K" guesses by the MTP head, and {checkpoint} came '
            f"without it: it has no tensor {'mtp.fc.weight' if of_qwen else join}; {INSTEAD}"
        )
