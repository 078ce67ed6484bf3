"""Guesses the next tokens of a sequence; one forward pass then checks them.

Prompt lookup (Saxena 2023): texts repeat themselves, so the tokens that followed an earlier
occurrence of the last tokens are likely to follow again. A guess needs no draft model; a wrong one
costs its rows in the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

LONGEST, SHORTEST = 4, 2  # tokens that must repeat


class PromptLookup:
    """Finds earlier occurrences of the end of one growing sequence."""

    def __init__(self) -> None:
        self._tokens: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._num_tokens = 0

    def guess(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """Up to `most` tokens that followed the last occurrence of the longest repeated suffix;
        none if no two tokens repeat. token_ids must only grow from call to call.
        """
        tokens, num = self._grown(token_ids), len(token_ids)
        if most < 1 or num <= SHORTEST:
            return ()
        ends = np.flatnonzero(tokens[: num - 1] == tokens[num - 1])
        found = None
        for length in range(2, LONGEST + 1):
            ends = ends[ends >= length - 1] if length <= num else ends[:0]
            ends = ends[tokens[ends - length + 1] == tokens[num - length]] if len(ends) else ends
            if not len(ends):
                break
            found = int(ends[-1])
        if found is None:
            return ()
        return tuple(tokens[found + 1 : found + 1 + most].tolist())

    def _grown(self, token_ids: Sequence[int]) -> npt.NDArray[np.int32]:
        """All tokens as an array; copies new ones into a buffer that doubles when it is full."""
        num = len(token_ids)
        if num > len(self._tokens):
            room = np.empty(2 * num, np.int32)
            room[: self._num_tokens] = self._tokens[: self._num_tokens]
            self._tokens = room
        self._tokens[self._num_tokens : num] = token_ids[self._num_tokens :]
        self._num_tokens = num
        return self._tokens[:num]
