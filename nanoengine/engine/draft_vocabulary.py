"""Which tokens a draft is chosen among, where the output head is a large part of the model.

A step of Gemma 3 270M reads 535 MB; 335 are its output head. The next token is mostly a frequent
one, or one of the recent text. After FR-Spec (arXiv 2502.14856), which keeps frequent ones only.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from math import prod

import torch
from torch import Tensor

from nanoengine.config.model import ModelConfig
from nanoengine.devices.device import Device
from nanoengine.models.products import RUN
from nanoengine.models.weight_shapes import weight_shapes
from nanoengine.sequence import Sequence

NUM_RUNS = 512  # 32,768 tokens
FREQUENT_RUNS = 128  # the first ones of a vocabulary, whose merges are in order of frequency
LEAST_TIMES = 3  # a vocabulary of fewer than so many times NUM_RUNS is read whole
LEAST_SHARE = 0.2  # an output head that is less of the model's weights is read whole
RECENT_TOKENS = 8192  # newest tokens of a sequence whose runs are added
MOST_SEQUENCES = 4  # more of them share one read of the whole head


def has_large_head(config: ModelConfig) -> bool:
    """Whether the output head is so large that drafts gain by reading only a part of it."""
    head = config.vocab_size * config.hidden_size
    return head >= LEAST_SHARE * sum(map(prod, weight_shapes(config).values()))


class DraftVocabulary:
    """Chooses the runs of an output head that drafts read. num_runs: see products.PartedHead."""

    def __init__(self, num_runs: int, device: Device) -> None:
        self._is_large = num_runs >= LEAST_TIMES * NUM_RUNS
        self._device = device

    def runs(self, seqs: Iterable[Sequence]) -> Tensor | None:
        """The runs to choose drafts of these sequences among, int64 [n], ascending. None: all; a
        request that allows few tokens may need any run.
        """
        distinct = dict.fromkeys(seqs)
        is_limited = any(seq.grammar or seq.request.params.allowed_token_ids for seq in distinct)
        if not self._is_large or is_limited or not 0 < len(distinct) <= MOST_SEQUENCES:
            return None
        return self._device.tensor(likely_runs([*distinct]), torch.int64)


def likely_runs(seqs: Seq[Sequence]) -> list[int]:
    """At most NUM_RUNS runs, ascending: frequent ones, and those of each sequence's new tokens."""
    runs = set(range(FREQUENT_RUNS))
    for seq in seqs:
        most = len(runs) + (NUM_RUNS - FREQUENT_RUNS) // len(seqs)
        for token in reversed(seq.token_ids[-RECENT_TOKENS:]):
            runs.add(token // RUN)
            if len(runs) == most:
                break
    return sorted(runs)
