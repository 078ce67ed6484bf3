"""Fewer threads compute while other programs use the cores, and no bit moves."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from driver import Driver, small_engine, token_ids
from marks import needs_compiler

from nanoengine import SamplingParams
from nanoengine.devices import free_cores
from nanoengine.devices.cpu import CpuDevice
from nanoengine.devices.free_cores import LONGEST_WINDOW_S, WINDOW_S, FreeCores

CORES = 4


class Machine:
    """A machine of CORES processors, as Linux's files and clocks show it."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root, self._now, self._own, self.nice = root, 100.0, 7.0, 0
        self._ticks = [[1000, 0, 0, 5000, 0, 0, 0, 0, 0, 0] for _ in range(CORES)]
        self._threads = {str(i): (0.0, 0.0) for i in range(CORES)}
        patch.setattr(time, "perf_counter", lambda: self._now)
        patch.setattr(time, "process_time", lambda: self._own)
        patch.setattr(os, "getpriority", lambda which, who: self.nice)
        patch.setattr(free_cores, "_TICK_S", 0.01)
        patch.setattr(free_cores, "usable_cores", lambda: frozenset(range(CORES)))
        self.write()

    def run(self, threads: int, hogs: float, seconds: float = 1.1, niced: float = 0.0) -> None:
        """Ours compute all the time; what `hogs` others cannot have of free cores they take of
        ours, at most half of each.
        """
        self._now += seconds
        wanted = max(0.0, hogs - (CORES - threads))
        waits = [min(0.5, max(0.0, wanted - i)) for i in range(threads)]
        self._own += seconds * (threads - sum(waits))
        busy = threads + hogs - wanted
        for row in self._ticks:
            row[0] += int(100 * seconds * busy / CORES)
            row[1] += int(100 * seconds * niced / CORES)
        for i, waited in enumerate(waits):
            before = self._threads[str(i)]
            self._threads[str(i)] = before[0] + seconds * (1 - waited), before[1] + seconds * waited
        self.write()

    def write(self) -> None:
        (self.root / "proc").mkdir(exist_ok=True)
        lines = [f"cpu{i} {' '.join(map(str, row))}" for i, row in enumerate(self._ticks)]
        other = f"cpu{CORES} {int(100 * self._now)} 0 0 0 0 0 0 0 0 0"  # not ours
        stat = "\n".join(["cpu 1 1 1 1 1 1 1 1 1 1", *lines, other, "intr 5 6", "ctxt 7"])
        (self.root / "proc/stat").write_text(stat)
        for name, (ran, waited) in self._threads.items():
            task = self.root / "proc/self/task" / name
            task.mkdir(parents=True, exist_ok=True)
            (task / "schedstat").write_text(f"{int(ran * 1e9)} {int(waited * 1e9)} 3\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def followed(machine: Machine, cores: FreeCores, hogs: float, niced: float = 0.0) -> list[int]:
    """The number of threads in each of six windows."""
    seen = []
    for _ in range(6):
        machine.run(cores.num_threads, hogs, niced=niced)
        seen.append(cores.look())
    return seen


def test_threads_give_way_and_come_back(machine: Machine) -> None:
    cores = FreeCores(CORES, machine.root)
    assert followed(machine, cores, 0) == [4] * 6
    assert followed(machine, cores, 1) == [3] * 6
    assert followed(machine, cores, 2) == [2] * 6
    assert followed(machine, cores, 9)[-1] == 1, "one is left"
    assert followed(machine, cores, 0) == [2, 3, 4, 4, 4, 4]


@pytest.mark.parametrize(("own", "expected"), [(0, [3, 4, 4, 4, 4, 4]), (5, [2] * 6)])
def test_a_program_that_gives_way_takes_no_thread(
    machine: Machine, own: int, expected: list[int]
) -> None:
    """Unless this process gives way, too."""
    cores = FreeCores(CORES, machine.root)
    followed(machine, cores, 2)
    machine.nice = own
    assert followed(machine, cores, 0, niced=2) == expected


def test_a_little_of_a_core_takes_no_thread(machine: Machine) -> None:
    """As a server's threads do that send tokens."""
    cores = FreeCores(CORES, machine.root)
    assert followed(machine, cores, 0.3) == [4] * 6


def test_windows(machine: Machine) -> None:
    cores = FreeCores(CORES, machine.root)
    machine.run(4, 1, WINDOW_S / 2)
    assert cores.look() == 4, "too short"
    machine.run(4, 1, LONGEST_WINDOW_S)
    assert cores.look() == 4, "nothing ran for most of it"
    machine.run(4, 1)
    assert cores.look() == 3


def test_without_the_figures_of_processors_the_number_stays(machine: Machine) -> None:
    (machine.root / "proc/stat").unlink()
    cores = FreeCores(CORES, machine.root)
    assert followed(machine, cores, 2) == [4] * 6


def test_without_the_figures_of_a_thread_the_others_count(machine: Machine) -> None:
    cores = FreeCores(CORES, machine.root)
    machine.run(CORES, 2)
    (machine.root / "proc/self/task/0/schedstat").unlink()
    assert cores.look() == 3


@pytest.mark.usefixtures("threads_as_before")
@pytest.mark.parametrize(("asked", "variable"), [(2, ""), (None, "2")])
def test_a_number_that_was_set_stays(
    monkeypatch: pytest.MonkeyPatch, asked: int | None, variable: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", variable)

    def give_way(self: FreeCores) -> int:
        self.num_threads = 1
        return 1

    monkeypatch.setattr(FreeCores, "look", give_way)
    device = CpuDevice(asked)
    device.follow_free_cores()
    device.begin_step()
    assert torch.get_num_threads() == 2


@needs_compiler
@pytest.mark.usefixtures("threads_as_before")
def test_a_number_that_changes_in_every_step_moves_no_bit(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[5, 6, 7], [*range(5, 60)], [9] * 33]
    params = [SamplingParams(temperature=0.7, seed=i, max_tokens=9) for i in range(3)]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("nanoengine.devices.cpu.default_threads", lambda: 3)
    found = []
    for numbers in ([3], [1, 3, 2, 2], [2]):
        following = itertools.cycle(numbers)

        def look(self: FreeCores, following: itertools.cycle[int] = following) -> int:
            self.num_threads = next(following)
            return self.num_threads

        monkeypatch.setattr(FreeCores, "look", look)
        driver = Driver(small_engine(tiny("llama"), dtype="float32"))
        found.append((token_ids(driver.run(prompts, params)), driver.logits))
        assert torch.get_num_threads() in numbers
        driver.engine.close()
    for ids, logits in found[1:]:
        assert ids == found[0][0]
        for name, rows in logits.items():
            assert all(map(torch.equal, rows, found[0][1][name])), name
