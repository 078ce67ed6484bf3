"""Times gathers between two processes: `python -m benchmarks.gathers [--json FILE]`.

Prints the median and the least microseconds of a gather of float32 columns, half of them from each
of the two, over shared memory and over gloo; and of one memcpy of as many bytes as the result has.
Each process computes on one thread, so two cores with nothing else to do are needed.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.ending import exit_on_sigterm
from nanoengine.workers.gloo_group import GlooGroup
from nanoengine.workers.group import Group
from nanoengine.workers.shared_memory_group import SharedMemoryGroup, make_region

SHAPES = ((1, 2048), (32, 2048), (32, 8192), (2048, 2048))
BYTES = 256 << 20  # gathered in a round, or MOST gathers
MOST, LEAST = 2000, 20
ROUNDS = 5

Figures = dict[str, dict[str, list[float]]]


def main() -> None:
    """Be rank 0 and start rank 1, or be rank 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--second", nargs=2, metavar=("FD", "STORE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    exit_on_sigterm()
    torch.set_num_threads(1)
    if args.second:
        run(1, int(args.second[0]), Path(args.second[1]))
        return
    fd = make_region(2)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        command = [sys.executable, "-m", "benchmarks.gathers", "--second", str(fd), str(store)]
        with subprocess.Popen(command, pass_fds=[fd]) as second:
            try:
                figures = run(0, fd, store)
            finally:
                second.terminate()
    print_table(figures)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


def run(rank: int, fd: int, store: Path) -> Figures:
    """Microseconds of every gather, by name and shape; both ranks make the same calls."""
    gloo = GlooGroup(store, rank, 2)
    shared = SharedMemoryGroup(fd, rank, 2)
    os.close(fd)
    figures: Figures = {}
    for _ in range(ROUNDS):
        for rows, columns in SHAPES:
            part = torch.randn(rows, columns // 2)
            count = min(max(BYTES // (rows * columns * 4), LEAST), MOST)
            shape = f"[{rows}, {columns}]"
            calls = {
                "shared memory": gather_of(shared, part),
                "gloo": gather_of(gloo, part),
                "memcpy": memcpy_of(part),
            }
            for name, call in calls.items():
                shared.gather(torch.zeros(1, 1), (1, 1))  # begin together
                taken = times_us(call, count)
                figures.setdefault(name, {}).setdefault(shape, []).extend(taken)
    shared.close()
    gloo.close()
    return {
        name: {shape: [statistics.median(us), min(us)] for shape, us in shapes.items()}
        for name, shapes in figures.items()
    }


def gather_of(group: Group, part: Tensor) -> Callable[[], object]:
    """A call that gathers two parts of this shape."""
    widths = (part.shape[1], part.shape[1])
    return lambda: group.gather(part, widths)


def memcpy_of(part: Tensor) -> Callable[[], object]:
    """A call that copies as many bytes as two parts have."""
    given, out = torch.cat((part, part)), torch.empty(2 * part.shape[0], part.shape[1])
    return lambda: ctypes.memmove(out.data_ptr(), given.data_ptr(), given.nbytes)


def times_us(call: Callable[[], object], count: int) -> list[float]:
    """Microseconds of each call."""
    times = [time.perf_counter_ns()]
    for _ in range(count):
        call()
        times.append(time.perf_counter_ns())
    return [(after - before) / 1000 for before, after in itertools.pairwise(times)]


def print_table(figures: Figures) -> None:
    """A line for each shape: median and least microseconds."""
    print(f"{'gathered fp32':16}" + "".join(f"{name + ', us':>24}" for name in figures))
    for rows, columns in SHAPES:
        shape = f"[{rows}, {columns}]"
        pairs = (shapes[shape] for shapes in figures.values())
        print(f"{shape:16}" + "".join(f"{median:14,.1f} ({least:,.1f})" for median, least in pairs))


if __name__ == "__main__":
    main()
