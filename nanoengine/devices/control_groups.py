"""What control groups (a container's limits) leave to this process: memory and processor time.

Linux, both versions of control groups. A limit of a parent holds, too. `root` is the folder of the
system's files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

# By version of control groups: the folder, the files of a group's limit and use, and the key of the
# part of the use that the system can reclaim.
_MEMORY = {
    1: (
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
    2: ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
}
_PROCESSORS = {1: "sys/fs/cgroup/cpu", 2: "sys/fs/cgroup"}


def memory_left(root: Path = Path("/")) -> Iterator[int]:
    """Bytes that each limit leaves."""
    for version, group in _groups(root, "memory"):
        top, *files = _MEMORY[version]
        left = _left(root / top / group, *files)
        if left is not None:
            yield left


def processors(root: Path = Path("/")) -> Iterator[float]:
    """Processors whose time each limit allows: 1.5 is 150 ms in 100 ms."""
    for version, group in _groups(root, "cpu"):
        folder = root / _PROCESSORS[version] / group
        try:
            if version == 2:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            else:
                names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                quota, period = (int((folder / name).read_text()) for name in names)
        except (OSError, ValueError):  # no such file, or "max"
            continue
        if quota > 0 and period > 0:
            yield quota / period


def _groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """The version and the path of the process's group and of its parents, from the top on."""
    try:
        lines = (root / "proc/self/cgroup").read_text(errors="replace").splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and controller not in controllers.split(","):
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            yield 1 if controllers else 2, Path(*parts[:depth])


def _left(folder: Path, limit: str, used: str, cache: str) -> int | None:
    """Bytes that a group may still take, its caches included; None without a limit."""
    try:
        most, current = (int((folder / name).read_text()) for name in (limit, used))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, most - current + int(stat[cache]))
    except (OSError, ValueError, KeyError):  # no such file, or "max"
        return None
