"""Rank 1 of a group, in a process of its own: `python second_rank.py KIND WHERE`.

Answers gathers by doubling what it got, in passes that are replayed; ends when one fails.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import Tensor

from nanoengine.context import ReplayKey
from nanoengine.errors import EngineError
from nanoengine.kernels.call_tape import CallTape
from nanoengine.workers.gloo_group import GlooGroup
from nanoengine.workers.group import Group
from nanoengine.workers.shared_memory_group import SharedMemoryGroup

WIDTHS = (3, 2)


def double_first(whole: Tensor, out: Tensor) -> None:
    out.numpy()[...] = whole.numpy()[:, :2] * 2


def serve(group: Group, tape: CallTape) -> None:
    part = torch.zeros(2, 2)

    def forward() -> Tensor:
        whole, out = group.gather(part, WIDTHS), torch.empty(2, 2)
        tape.call(double_first, (whole, out))
        return out

    while True:
        part = tape.replay(ReplayKey((part,), ()), forward)


def main() -> None:
    torch.set_num_threads(1)
    kind, where = sys.argv[1:]
    tape = CallTape()
    if kind == "gloo":
        group: Group = GlooGroup(Path(where), 1, 2)
    else:
        group = SharedMemoryGroup(int(where), 1, 2, tape)
        os.close(int(where))
    try:
        serve(group, tape)
    except EngineError as error:
        print(error, flush=True)
    group.close()


if __name__ == "__main__":
    main()
