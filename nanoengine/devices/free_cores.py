"""How many threads should compute: fewer where other programs use some of the processors.

The threads of a step wait for the last of them. One that shares its core with another program is
off it half of the time, and all the others wait for it meanwhile.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nanoengine.devices.waiting import seconds_of_threads

WINDOW_S = 1.0
LONGEST_WINDOW_S = 4.0  # a longer one was idle, and says nothing
# A thread competes for its core if it ran this share of the time and waited that one.
MIN_RAN, MAX_WAITED = 0.2, 0.35
# Of a core that others may use of the one that a thread is added for.
MAX_TAKEN = 0.5
_TICK_S = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01


@dataclass(frozen=True)
class Usage:
    """Seconds so far. all_s: of the processors that this process may use, by every program but
    those that gave way to others (nice); own_s: by this process; threads: (ran, waited for a core)
    of each of its threads.
    """

    at: float
    all_s: float
    own_s: float
    threads: Mapping[str, tuple[float, float]]


class FreeCores:
    """Chooses the number of threads, from how long they waited and what others used."""

    def __init__(self, most: int, root: Path = Path("/")) -> None:
        """most: threads on an idle machine. root: folder of Linux's files; without them, always
        `most`.
        """
        self.num_threads = self._most = most
        self._root = root
        self._cores = usable_cores()
        self._before = read_usage(root, self._cores)

    def look(self) -> int:
        """The number of threads from now on; looks at most every WINDOW_S."""
        before = self._before
        if before is None or time.perf_counter() - before.at < WINDOW_S:
            return self.num_threads
        self._before = now = read_usage(self._root, self._cores)
        if now is not None and now.at - before.at < LONGEST_WINDOW_S:
            self.num_threads = self._next(before, now)
        return self.num_threads

    def _next(self, before: Usage, now: Usage) -> int:
        elapsed, current = now.at - before.at, self.num_threads
        if _competes(before, now):
            return max(1, current - 1)
        others = (now.all_s - before.all_s - (now.own_s - before.own_s)) / elapsed
        has_room = len(self._cores) - others >= current + 1 - MAX_TAKEN
        return min(self._most, current + 1) if has_room else current


def _competes(before: Usage, now: Usage) -> bool:
    """Whether a thread that computes waited for its core."""
    elapsed = now.at - before.at
    return any(
        ran - before.threads[name][0] > MIN_RAN * elapsed
        and waited - before.threads[name][1] > MAX_WAITED * elapsed
        for name, (ran, waited) in now.threads.items()
        if name in before.threads
    )


def usable_cores() -> frozenset[int]:
    """The processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def read_usage(root: Path, cores: frozenset[int]) -> Usage | None:
    """What was used so far; None where the system does not say so."""
    at, own_s = time.perf_counter(), time.process_time()
    threads = seconds_of_threads(root / "proc/self/task")
    try:
        lines = (root / "proc/stat").read_text().splitlines()
        ticks = sum(_busy_ticks(line, cores) for line in lines)
    except (OSError, ValueError):
        return None
    return Usage(at, ticks * _TICK_S, own_s, threads)


def _busy_ticks(line: str, cores: frozenset[int]) -> int:
    """Of a line in /proc/stat (proc(5)): of one of these processors its user, system, irq and
    softirq time; the time of what gave way only if this process gives way, too.
    """
    name, *figures = line.split()
    if not name.startswith("cpu") or name == "cpu" or int(name[3:]) not in cores:
        return 0
    user, nice, system, _, _, irq, softirq, *_ = map(int, figures)
    gives_way = os.getpriority(os.PRIO_PROCESS, 0) > 0
    return user + system + irq + softirq + nice * gives_way
