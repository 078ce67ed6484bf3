"""Groups whose ranks are processes, as they are in an engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from marks import needs_compiler
from second_rank import WIDTHS

from nanoengine.errors import EngineError
from nanoengine.workers.gloo_group import GlooGroup
from nanoengine.workers.group import Group
from nanoengine.workers.shared_memory_group import SharedMemoryGroup, make_region

ROOT = Path(__file__).parents[2]
SECOND = ROOT / "tests" / "helpers" / "second_rank.py"
PATIENCE_S = 60.0
BOTH = [pytest.param("gloo"), pytest.param("shared memory", marks=needs_compiler)]


@contextmanager
def two_processes(kind: str) -> Iterator[tuple[Group, subprocess.Popen[str]]]:
    """Rank 0, and the process of rank 1, which has met it."""
    with tempfile.TemporaryDirectory() as folder:
        store, fd = Path(folder) / "store", make_region(2) if kind != "gloo" else -1
        command = [sys.executable, str(SECOND), kind]
        command.append(str(store) if kind == "gloo" else str(fd))
        passed = () if kind == "gloo" else (fd,)
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with subprocess.Popen(
            command, pass_fds=passed, stdout=subprocess.PIPE, text=True, env=environment
        ) as second:
            try:
                if kind == "gloo":
                    group: Group = GlooGroup(store, 0, 2)
                else:
                    group = SharedMemoryGroup(fd, 0, 2, timeout_s=PATIENCE_S)
                    os.close(fd)
                yield group, second
                group.close()
            finally:
                second.kill()


def gathered(group: Group, value: float) -> list[list[float]]:
    return group.gather(torch.full((2, 3), value), WIDTHS).tolist()


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", BOTH)
def test_processes_gather_until_one_aborts(kind: str) -> None:
    """The other one gives twice what it got before; over shared memory it replays."""
    before = 0.0
    with two_processes(kind) as (group, second):
        for value in (1.0, 2.0, 3.0, 4.0):
            assert gathered(group, value) == [[value] * 3 + [2 * before] * 2] * 2
            before = value
        group.abort()
        assert "group of ranks has ended" in second.communicate(timeout=PATIENCE_S)[0]
        assert second.returncode == 0


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", BOTH)
def test_a_rank_that_dies_ends_the_wait_for_it(kind: str) -> None:
    with two_processes(kind) as (group, second):
        gathered(group, 1.0)
        second.send_signal(signal.SIGSTOP)  # perhaps with its next part already given
        killer = threading.Timer(0.2, second.kill)
        watcher = threading.Thread(target=lambda: (second.wait(), group.abort()))
        begin = time.perf_counter()
        killer.start()
        if kind != "gloo":  # which sees it without help
            watcher.start()
        with pytest.raises(EngineError, match="has ended"):
            for _ in range(3):
                gathered(group, 1.0)
        assert 0.15 < time.perf_counter() - begin < PATIENCE_S / 2
        killer.join()
        if kind != "gloo":
            watcher.join()


USERS = """
import sys, tempfile, threading, torch
from pathlib import Path
import torch.distributed as dist
from nanoengine.workers.gloo_group import GlooGroup

def users_own():
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(folder + "/users", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    ones = torch.ones(2)
    dist.all_reduce(ones)
    assert ones.tolist() == [1, 1]

def ours(place):
    groups = [None, None]
    def meet(rank):
        groups[rank] = GlooGroup(Path(place), rank, 2)
    threads = [threading.Thread(target=meet, args=(rank,)) for rank in (0, 1)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    def both():
        one = threading.Thread(target=lambda: groups[1].gather(torch.zeros(1, 1), (1, 1)))
        one.start()
        assert groups[0].gather(torch.ones(1, 1), (1, 1)).tolist() == [[1, 0]]
        one.join()
    both()
    return both

with tempfile.TemporaryDirectory() as folder:
    if sys.argv[1] == "before":
        users_own()
    both = ours(folder + "/store")
    assert dist.is_initialized() == (sys.argv[1] == "before")
    if sys.argv[1] == "after":
        users_own()
        both()
    dist.destroy_process_group()
    both()
print("well")
"""


@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.breadth)])
def test_a_user_s_own_process_group_is_left_alone(when: str) -> None:
    command = [sys.executable, "-c", USERS, when]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "well\n", done.stderr
