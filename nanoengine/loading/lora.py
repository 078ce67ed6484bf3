"""Reads a LoRA adapter (arXiv 2106.09685) as peft saves it, and adds it to weights as they are
loaded: W becomes W + scale * B A, in float32. With DoRA (arXiv 2402.09353) each row of that gets a
length of its own. Norms, biases, embeddings and the head may be in an adapter whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoengine.config.model import ModelConfig
from nanoengine.errors import ConfigError, UnsupportedModelError, WeightMismatchError, shown
from nanoengine.loading.checkpoint import NUM_SHOWN, CheckpointReader, Part
from nanoengine.loading.find_model import given_path
from nanoengine.loading.hub import hub_folder, is_hub_id
from nanoengine.loading.wrappers import text_names
from nanoengine.models.make_codes import ENDS
from nanoengine.models.stored_codes import Weight, numbers_of
from nanoengine.text.checked_json import CheckedJson, has_file, positive

CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
EXPERT = ".experts."
MERGE = "merge the adapter with peft's merge_and_unload()"
OF_NEMOTRON = "backbone."  # what its files have where transformers has "model."
# Keys of CONFIG that change what an adapter does, in ways not done here.
REFUSED = (
    *("fan_in_fan_out", "target_parameters", "trainable_token_indices", "layer_replication"),
    *("alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config"),
)
# Beginnings of `init_lora_weights` that change the model, too: such an adapter fits no other.
CHANGE_THE_MODEL = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Ends of names, and what a tensor is in a Change.
PARTS = {
    ".lora_A.weight": "low",
    ".lora_B.weight": "high",
    ".lora_embedding_A": "low",
    ".lora_embedding_B": "high",
    ".lora_magnitude_vector": "lengths",
    ".lora_magnitude_vector.weight": "lengths",
}
WRAPS = re.compile(r"\.(?:base_layer|modules_to_save(?:\.default)?)(?=\.)")


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of a weight: whole, or it, plus scale * high @ low, [outputs, rank] and
    [rank, inputs]; then rows of these lengths, [outputs]. is_turned: of embeddings, whose sum is
    the transpose.
    """

    low: Tensor | None = None
    high: Tensor | None = None
    lengths: Tensor | None = None
    whole: Tensor | None = None
    scale: float = 1.0
    is_turned: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""
        if self.low is None or self.high is None:
            return () if self.whole is None else tuple(self.whole.shape)
        both = len(self.high), self.low.shape[1]
        return both[::-1] if self.is_turned else both

    def of(self, weight: Tensor, rows: slice) -> Tensor:
        """The changed weight, float32, of which `weight` is these rows."""
        made = (weight if self.whole is None else self.whole[rows]).float()
        if self.low is None or self.high is None:
            return made
        if self.is_turned:
            made = made + self.scale * (self.low.float().T[rows] @ self.high.float().T)
        else:
            made = made + self.scale * (self.high[rows].float() @ self.low.float())
        if self.lengths is None:
            return made
        factors: Tensor = self.lengths[rows].float() / torch.linalg.vector_norm(made, dim=1)
        return made * factors[:, None]


@dataclass(frozen=True, slots=True)
class Found:
    """A weight that an adapter changes: its name in the model alone, that of the stored tensor
    ("": there is none), and its shape.
    """

    name: str
    stored: str
    shape: tuple[int, ...]


class LoraAdapter:
    """The changes of an adapter, by the names of weights."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if `folder` has no adapter, other ModelLoadErrors for one that cannot
        be added.
        """
        if not has_file(folder / CONFIG):
            raise ConfigError(
                f"lora must be the folder of an adapter, or its hub id; {folder} has no {CONFIG}; "
                "give the folder into which peft saved it"
            )
        self.folder = folder
        self._content = CheckedJson(folder / CONFIG)
        self._check_kind()
        with CheckpointReader(folder) as reader:
            self._changes = self._read(reader)

    def _check_kind(self) -> None:
        content, kind = self._content, self._content.get("peft_type")
        if kind != "LORA":
            raise UnsupportedModelError(
                f"{content.path}: 'peft_type' is {shown(kind)}; only LORA is supported"
            )
        start = content.get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(CHANGE_THE_MODEL):
            raise UnsupportedModelError(
                f"{content.path}: 'init_lora_weights' is {shown(start)}, which changes the model, "
                "too; save the adapter with path_initial_model_for_weight_conversion, or merge it"
            )
        for key in REFUSED:
            if content.get(key):
                raise UnsupportedModelError(
                    f"{content.path}: {key!r} is {shown(content.get(key))}, which is not "
                    f"supported; {MERGE}"
                )

    def _read(self, reader: CheckpointReader) -> dict[str, Change]:
        """By name, as the model's classes call them in transformers."""
        found: dict[str, dict[str, Any]] = {}
        for name in sorted(reader.names()):
            end = next((end for end in PARTS if name.endswith(end)), "")
            is_whole = not end and not re.search(r"\.(?:lora_|token_adapter)", name)
            is_named = name.startswith(PREFIX) and "." in name.removeprefix(PREFIX)
            if not is_named or not (end or is_whole):
                raise UnsupportedModelError(
                    f"{reader.folder}: tensor {shown(name)} of the adapter is not supported; "
                    f"{MERGE}"
                )
            base = WRAPS.sub("", name.removeprefix(PREFIX))
            module = base.removesuffix(end) + ".weight" if end else base
            parts = found.setdefault(module, {})
            parts[PARTS.get(end, "whole")] = reader.numbers(name, torch.float32).clone()
            if end.startswith(".lora_embedding"):
                parts["is_turned"] = True
        return {name: self._change(name, parts) for name, parts in found.items()}

    def _change(self, name: str, parts: Mapping[str, Any]) -> Change:
        change = Change(**parts)
        if change.whole is not None and change.low is None and change.high is None:
            return change
        low, high, lengths = change.low, change.high, change.lengths
        are_matrices = low is not None and high is not None and low.dim() == high.dim() == 2
        if low is None or high is None or not are_matrices or not high.shape[1] == len(low) > 0:
            raise WeightMismatchError(
                f"{self.folder}: the adapter has no lora_A of [rank, inputs] with a lora_B of "
                f"[outputs, rank] for {shown(name)}"
            )
        if (lengths is not None) != self._content.flag("use_dora"):
            raise WeightMismatchError(
                f"{self.folder}: 'use_dora' is {shown(lengths is None)}, and {shown(name)} has "
                f"{'no' if lengths is None else 'a'} lora_magnitude_vector"
            )
        if lengths is not None and (change.is_turned or lengths.shape != high.shape[:1]):
            raise UnsupportedModelError(
                f"{self.folder}: DoRA of {shown(name)} is not supported; {MERGE}"
            )
        rank = len(low)
        root = math.sqrt(rank) if self._content.flag("use_rslora") else rank
        return replace(change, scale=self._alpha(name.removesuffix(".weight")) / root)

    def _alpha(self, module: str) -> float:
        """Of `alpha_pattern`, by whole parts of a module's name, else `lora_alpha`."""
        path, patterns = self._content.path, self._content.get("alpha_pattern") or {}
        if not isinstance(patterns, dict):
            raise UnsupportedModelError(f"{path}: 'alpha_pattern' is {shown(patterns)}, no object")
        for pattern, alpha in patterns.items():
            if not re.fullmatch(r"\^?[\w.]+\$?", pattern):
                raise UnsupportedModelError(
                    f"{path}: 'alpha_pattern' has {shown(pattern)}; only names of modules are "
                    "supported"
                )
            if f".{module}".endswith("." + pattern.strip("^$")):
                return positive(path, "alpha_pattern", alpha)
        return self._content.real("lora_alpha", 8.0)

    def find(self, reader: CheckpointReader, config: ModelConfig) -> dict[str, Found]:
        """By its own names, the weights that `reader` has under these names now. Those of layers
        for images are left out, as the model's are.
        """
        names = {name: name for name in self._changes}
        if config.wrapper:
            texts = {its: name for name, its in text_names(self._changes).items()}
            of_images = {_first_part(name) for name in reader.others}
            names = {
                name: texts.get(name, name)
                for name in names
                if name in texts or _first_part(name) not in of_images
            }
        found, there = {}, reader.names()
        for its, own in names.items():
            name = own if own in there else OF_NEMOTRON + own.removeprefix("model.")
            whole = reader.part(name).stored if name in there else ""
            is_whole = bool(whole) and reader.part(name) == Part(whole)
            shape = reader.shape(name) if is_whole else ()
            found[its] = Found(own, whole if is_whole else "", shape)
        return found

    def checked(self, found: Mapping[str, Found], config: ModelConfig) -> dict[str, Change]:
        """The changes by the names of stored tensors. Raises WeightMismatchError if there are
        others than those of the model, UnsupportedModelError for tied embeddings.
        """
        if config.tie_word_embeddings and {each.name for each in found.values()} & set(ENDS):
            raise UnsupportedModelError(
                f"{self.folder}: the adapter changes the embeddings or the head, and the model "
                f"ties them, which is not supported; {MERGE}"
            )
        if not found:
            raise WeightMismatchError(f"{self.folder}: the adapter changes no weight of this model")
        missing = sorted(each.name for each in found.values() if not each.stored)
        self._check(missing, "which the model has not")
        wrong = [
            f"{each.name} is {list(each.shape)}, and {list(self._changes[its].shape)} in the "
            "adapter"
            for its, each in found.items()
            if each.shape != self._changes[its].shape
        ]
        self._check(wrong, "whose shapes differ")
        return {each.stored: self._changes[its] for its, each in found.items()}

    def _check(self, wrong: list[str], what: str) -> None:
        if wrong:
            base = shown(self._content.get("base_model_name_or_path"))
            more = "; ..." if len(wrong) > NUM_SHOWN else ""
            raise WeightMismatchError(
                f"{self.folder}: the adapter changes {len(wrong)} tensors {what}: "
                f"{'; '.join(wrong[:NUM_SHOWN])}{more}; it was trained on {base}"
            )

    def forms(self, forms: Mapping[str, str]) -> dict[str, str]:
        """StoredWeights' forms, where each weight that the adapter changes is numbers. It is known
        by its name, or by that of its module, where the model calls others otherwise.
        """
        modules = {name.split(".")[-2] for name in self._changes if name not in forms}
        return {
            name: "F32"
            if name in self._changes or (name.split(".")[-2] in modules and EXPERT not in name)
            else form
            for name, form in forms.items()
        }

    def describe(self, changes: Iterable[Change], tokenizer: str | None) -> str:
        """For the plan. tokenizer: that was asked for."""
        ranks = sorted({len(change.low) for change in changes if change.low is not None})
        listed = ", ".join(map(str, ranks)) or "none"
        has_own = tokenizer is None and has_file(self.folder / "tokenizer.json")
        own = "; its tokenizer is not taken: give that folder as tokenizer, too" if has_own else ""
        return f"with the LoRA adapter {self.folder} (rank {listed}{own})"


def _first_part(name: str) -> str:
    """Of a tensor's name: what it is called in a model for images, as "vision_tower"."""
    return name.removeprefix("model.").partition(".")[0]


def adapter_folder(name: str) -> Path:
    """A folder, or that of a hub id, which is downloaded once into the hub's cache."""
    path = given_path(name)
    return hub_folder(name) if not path.is_dir() and is_hub_id(name) else path


def read_adapter(name: str) -> LoraAdapter:
    """The adapter in `adapter_folder`."""
    return LoraAdapter(adapter_folder(name))


def changed(part: Part, weight: Weight, changes: Mapping[str, Change]) -> Weight:
    """A weight of a checkpoint, of which it is `part`, with its change, which makes numbers of
    codes; itself if there is none. Raises UnsupportedModelError for an entry of a tensor for all
    experts.
    """
    change = changes.get(part.stored)
    if change is None:
        return weight
    if part != Part(part.stored, rows=part.rows):
        raise UnsupportedModelError(
            f"an adapter that changes {part.stored!r} is not supported; {MERGE}"
        )
    return change.of(numbers_of(weight), slice(*part.rows))
