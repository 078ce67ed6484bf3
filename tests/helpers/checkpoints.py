"""transformers' own answers for a checkpoint.

Needs no pytest, so that gpu_check.py can use it, too.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Before the libraries that read them at import.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


@functools.cache
def reference(path: Path) -> PreTrainedModel:
    """transformers' model of the checkpoint at `path`: fp32, eval, its plainest attention.

    One object per path for the whole session: nobody changes it.
    """
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


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
