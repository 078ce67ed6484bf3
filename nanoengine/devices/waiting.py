"""How long this process's threads wait for a processor that other programs use."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

TASKS = Path("/proc/self/task")
MAX_SHARE = 0.1  # beyond it a measured speed is a lower bound, and not what to expect


class WaitingShare:
    """The share of the time since it was made in which a thread was ready to run and did not."""

    def __init__(self, tasks: Path = TASKS) -> None:
        """tasks: Linux's folder of this process's threads. Without one the load average counts."""
        self._tasks = tasks
        self._begun = time.perf_counter()
        self._before = seconds_of_threads(tasks)

    def is_long(self) -> bool:
        """Whether so far it is too large for a speed that was measured meanwhile."""
        return self.now() > MAX_SHARE

    def now(self) -> float:
        """The share of the thread that waited most, 0 to 1."""
        elapsed = time.perf_counter() - self._begun
        waited = [
            seconds - self._before.get(name, (0.0, 0.0))[1]
            for name, (_, seconds) in seconds_of_threads(self._tasks).items()
        ]
        if waited and elapsed > 0:
            return min(1.0, max(waited) / elapsed)
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        return max(0.0, 1 - (os.cpu_count() or 1) / load) if load else 0.0


def seconds_of_threads(tasks: Path) -> dict[str, tuple[float, float]]:
    """For how long each thread ran, and waited for a processor, so far: the first two figures of
    its schedstat. tasks: as of WaitingShare.
    """
    found = {}
    for task in tasks.iterdir() if tasks.is_dir() else ():
        with suppress(OSError, ValueError):  # no such file, or the thread has ended
            ran, waited, _ = map(int, (task / "schedstat").read_text().split())
            found[task.name] = ran / 1e9, waited / 1e9
    return found
