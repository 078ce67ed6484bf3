"""Which tokens a draft is chosen among, where reading the whole output head is dear.

Of the 535 MB that a step of Gemma 3 270M reads, 335 are its head. What follows is mostly frequent,
or stood in the text lately. After FR-Spec (arXiv 2502.14856), which keeps the frequent alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from math import prod

import torch
from torch import Tensor

from nanoengine.config.model import ModelConfig
from nanoengine.devices.device import Device
from nanoengine.models.layer_ops import RUN
from nanoengine.models.weight_shapes import weight_shapes
from nanoengine.sequence import Sequence

NUM_RUNS = 512  # 32,768 tokens
FREQUENT_RUNS = 128  # the first of a vocabulary: merges come in the order of frequency
LEAST_TIMES = 3  # as large is a vocabulary, or all of it is read
LEAST_SHARE = 0.2  # of a model's weights that its head is, or all of it is read
RECENT_TOKENS = 8192  # that are looked at
MOST_SEQUENCES = 4  # more of them share one read of the head, and need more tokens


def has_large_head(config: ModelConfig) -> bool:
    """Whether fewer tokens make a draft by all layers cheaper than wrong drafts make it dear."""
    head = config.vocab_size * config.hidden_size
    return head >= LEAST_SHARE * sum(map(prod, weight_shapes(config).values()))


class DraftVocabulary:
    """Tells drafters what to ask of a head that has `num_runs` (see layer_ops.PartedHead)."""

    def __init__(self, num_runs: int, device: Device) -> None:
        self._is_large = num_runs >= LEAST_TIMES * NUM_RUNS
        self._device = device

    def runs(self, seqs: Iterable[Sequence]) -> Tensor | None:
        """The runs to choose drafts of these sequences among, int64 [n], ascending; None: all, as
        where few tokens are allowed, which may be any.
        """
        distinct = dict.fromkeys(seqs)
        is_limited = any(seq.grammar or seq.request.params.allowed_token_ids for seq in distinct)
        if not self._is_large or is_limited or not 0 < len(distinct) <= MOST_SEQUENCES:
            return None
        return self._device.tensor(likely_runs([*distinct]), torch.int64)


def likely_runs(seqs: Seq[Sequence]) -> list[int]:
    """At most NUM_RUNS, ascending: frequent ones, and those of the newest tokens of each."""
    runs = set(range(FREQUENT_RUNS))
    for seq in seqs:
        most = len(runs) + (NUM_RUNS - FREQUENT_RUNS) // len(seqs)
        for token in reversed(seq.token_ids[-RECENT_TOKENS:]):
            runs.add(token // RUN)
            if len(runs) == most:
                break
    return sorted(runs)
