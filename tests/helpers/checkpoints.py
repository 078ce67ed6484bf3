"""transformers' own answers for a checkpoint.

Needs no pytest, so that gpu_check.py can use it, too.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

# Before the libraries that read them at import.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
import xxhash
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)


def load_reference(path: Path) -> PreTrainedModel:
    """transformers' model of the checkpoint at `path`: fp32, eval, its plainest attention."""
    is_of_text = type(AutoConfig.from_pretrained(path)) in MODEL_FOR_CAUSAL_LM_MAPPING
    kind = AutoModelForCausalLM if is_of_text else AutoModelForImageTextToText
    model = kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@functools.cache
def reference(path: Path) -> PreTrainedModel:
    """The same as one object for the whole session: nobody changes it. Its weights lie in memory of
    their own: transformers leaves them in the mapped file, where they change with it.
    """
    model = load_reference(path)
    for weight in chain(model.parameters(), model.buffers()):
        weight.data = weight.data.clone()
    AS_LOADED[path] = (model, _digest(model))
    return model


# Each shared model, and what its bytes were.
AS_LOADED: dict[Path, tuple[PreTrainedModel, str]] = {}


def changed_references() -> list[Path]:
    """The checkpoints whose shared model has other bytes than before; each change is named once."""
    found = []
    for path, (model, before) in AS_LOADED.items():
        if (now := _digest(model)) != before:
            AS_LOADED[path] = (model, now)
            found.append(path)
    return found


def _digest(model: PreTrainedModel) -> str:
    """Not of what a forward pass may change: the angles of dynamic RoPE are in no checkpoint."""
    total = xxhash.xxh3_64()
    for tensor in model.state_dict().values():
        total.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """Logits [len(ids), vocab] of one forward pass over `ids`."""
    return model(torch.tensor([list(ids)]), use_cache=False).logits[0]


def reference_greedy(
    model: PreTrainedModel, ids: Sequence[int], n: int, guess: Sequence[int] = ()
) -> list[int]:
    """The `n` tokens greedy decoding adds to `ids`; no token ends it.

    Every token is chosen by a forward pass over everything before it: there is no cache that could
    be wrong. guess: what the tokens may be. Those that are right share one pass; the answer is the
    same with any guess.
    """
    tokens = list(ids)
    while (done := len(tokens) - len(ids)) < n:
        ahead = list(guess[done : n - 1])
        logits = reference_logits(model, tokens + ahead)[len(tokens) - 1 :]
        for choice in logits.argmax(-1).tolist():
            tokens.append(choice)
            if not ahead or ahead.pop(0) != choice:
                break
    return tokens[len(ids) :]


class GGUFValue:
    """A metadata field of a GGUF file that is not there."""

    def __init__(self, value: Any) -> None:
        self.value, self.types = value, [None] * (2 if isinstance(value, list) else 1)

    def contents(self) -> Any:
        return self.value
