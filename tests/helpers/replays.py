"""What a call tape replays."""

from __future__ import annotations

import pytest
from torch import Tensor

from nanoengine.kernels.call_tape import _Pass


def watch_replays(patch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each pass that is replayed from here on."""
    seen: list[int] = []
    replay = _Pass.replay

    def watched(this: _Pass, tensors: list[Tensor]) -> Tensor:
        seen.append(len(tensors[0]))
        return replay(this, tensors)

    patch.setattr(_Pass, "replay", watched)
    return seen
