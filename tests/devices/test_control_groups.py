"""What the control groups of a machine leave to a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoengine.config.engine import GIB
from nanoengine.devices.cpu import available_memory, default_threads

MIB = 1 << 20
MEMINFO = "MemTotal:       33554432 kB\nMemAvailable:   16777216 kB\n"  # 16 GiB of 32


def group(folder: Path, version: int, limit: str, used: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cached}\nactive_file 7\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 16 GiB available, and no control groups."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    return tmp_path


def test_without_control_groups_the_machine_s_memory_counts(root: Path) -> None:
    assert available_memory(root) == 16 * GIB
    (root / "proc/self/cgroup").write_text("0::/user.slice\n")
    assert available_memory(root) == 16 * GIB


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_s_limit_counts_less_what_is_used_and_not_cached(
    root: Path, version: int
) -> None:
    """Its own group is the root of what it sees, whatever path the host has for it."""
    listed = {1: "5:cpu,memory:/docker/abc\n1:cpu:/x\n0::/\n", 2: "0::/../../host/path\n"}[version]
    base = root / {1: "sys/fs/cgroup/memory", 2: "sys/fs/cgroup"}[version]
    (root / "proc/self/cgroup").write_text(listed)
    group(base, version, str(4 * GIB), 3 * GIB, GIB // 2)
    assert available_memory(root) == 1.5 * GIB
    group(base, version, str(4 * GIB), 5 * GIB)
    assert available_memory(root) == 0
    group(base, version, str(64 * GIB), 0)
    assert available_memory(root) == 16 * GIB


@pytest.mark.parametrize("version", [1, 2])
def test_the_smallest_limit_from_the_process_s_group_to_the_root_counts(
    root: Path, version: int
) -> None:
    unlimited = {1: "9223372036854771712", 2: "max"}[version]
    base = root / {1: "sys/fs/cgroup/memory", 2: "sys/fs/cgroup"}[version]
    (root / "proc/self/cgroup").write_text({1: "4:memory:/a/b/c\n", 2: "0::/a/b/c\n"}[version])
    group(base / "a/b/c", version, str(8 * GIB), GIB)
    group(base / "a/b", version, unlimited, 2 * GIB)
    group(base / "a", version, str(6 * GIB), 2 * GIB)
    group(base / "z", version, str(MIB), 0)
    assert available_memory(root) == 4 * GIB
    group(base / "a/b/c", version, str(3 * GIB), GIB)
    assert available_memory(root) == 2 * GIB


@pytest.fixture
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {*range(16)}, raising=False)


def limit_time(folder: Path, version: int, quota: str, period: str = "100000") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if version == 2:
        (folder / "cpu.max").write_text(f"{quota} {period}\n")
    else:
        (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n".replace("max", "-1"))
        (folder / "cpu.cfs_period_us").write_text(f"{period}\n")


@pytest.mark.usefixtures("sixteen_cores")
@pytest.mark.parametrize("version", [1, 2])
def test_there_are_as_many_threads_as_the_smallest_limit_allows(
    root: Path, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert default_threads(root) == 16
    base = root / {1: "sys/fs/cgroup/cpu", 2: "sys/fs/cgroup"}[version]
    listed = {1: "7:cpu,cpuacct:/a/b\n3:memory:/z\n", 2: "0::/a/b\n"}[version]
    (root / "proc/self/cgroup").write_text(listed)
    limit_time(base / "a/b", version, "max")
    assert default_threads(root) == 16
    limit_time(base / "a", version, "650000")
    limit_time(base / "z", version, "100000")
    assert default_threads(root) == 6
    limit_time(base / "a/b", version, "5000", "10000")
    assert default_threads(root) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert default_threads(root) == 3
