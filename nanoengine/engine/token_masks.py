"""Keeps tokens that a request's grammar forbids from being sampled. Knows no grammar itself."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from nanoengine.devices.device import Device
from nanoengine.sequence import ScheduledBatch

ALL = 0xFF  # eight tokens that may be chosen


def step_masks(batch: ScheduledBatch) -> dict[int, bytes]:
    """The mask of each row that a batch samples, by row. A row after a guess that the grammar
    forbids has none: the guess is wrong, so the row's token is not used.
    """
    masks: dict[int, bytes] = {}
    row = 0
    for item in batch.items:
        if item.samples and item.seq.grammar is not None:
            masks |= enumerate(item.seq.grammar.masks(item.guesses), row)
        row += item.num_samples
    return masks


def masked(logits: Tensor, masks: Mapping[int, bytes], device: Device) -> Tensor:
    """Logits, [n, vocab], with -inf at tokens that a row's mask forbids; without masks the same
    tensor. masks: by row, a bit for each token id, the lowest first.
    """
    if not masks:
        return logits
    num_rows, vocab = logits.shape
    num_bytes = -(-vocab // 8)
    packed = np.full((num_rows, num_bytes), ALL, np.uint8)
    for row, mask in masks.items():
        packed[row] = np.frombuffer(mask, np.uint8, num_bytes)
    bits = device.tensor([1 << bit for bit in range(8)], torch.uint8)
    forbidden = (device.tensor(packed, torch.uint8).unsqueeze(2) & bits) == 0
    return logits.masked_fill(forbidden.flatten(1)[:, :vocab], -torch.inf)
