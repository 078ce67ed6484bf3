"""Worker processes: each way in which one can end, and what the driver says and leaves behind."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import worker_entries as entries
from descriptors import open_descriptors

import nanoengine
from nanoengine.errors import (
    ConfigError,
    EngineClosedError,
    EngineError,
    ForkedProcessError,
    ModelLoadError,
)
from nanoengine.workers import channel, processes, worker_handle
from nanoengine.workers.processes import WorkerProcesses

# Of the watching threads, which should never end so.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
START_S = 60.0  # on a busy machine
SOON_S = 20.0  # of what takes milliseconds: less than START_S, and no pause of a machine
ECHO = "worker_entries:echo"
Start = Callable[..., WorkerProcesses]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts workers; whatever a test does, they are ended."""
    made: list[WorkerProcesses] = []

    def started(
        entry: str = ECHO, count: int = 2, hello: dict[str, Any] | None = None, **more: Any
    ) -> WorkerProcesses:
        made.append(WorkerProcesses(entry, count, hello or {}, **more))
        return made[-1]

    yield started
    for group in made:
        group.close()


def ready(group: WorkerProcesses) -> WorkerProcesses:
    """The same, once it answers."""
    group.send(entries.ECHO, b"ready")
    replies = group.receive(START_S)
    assert replies == [b"%d:ready" % (rank + 1) for rank in range(len(group.pids))]
    return group


def is_gone(pid: int) -> bool:
    """Whether nothing of a child of this process is left, not even its exit status."""
    return not Path(f"/proc/{pid}").exists()


def until(holds: Callable[[], bool], within_s: float) -> bool:
    """Whether it comes true in that time."""
    end = time.monotonic() + within_s
    while not holds() and time.monotonic() < end:
        time.sleep(0.002)
    return holds()


def all_gone(group: WorkerProcesses, within_s: float = SOON_S) -> bool:
    return until(lambda: all(is_gone(pid) for pid in group.pids), within_s)


def test_replies_come_in_order_of_rank(start: Start) -> None:
    group = ready(start(count=3))
    for body in (b"", b"x", os.urandom(3_000_000)):
        group.send(entries.ECHO, body)
        assert group.receive(START_S) == [b"%d:" % rank + body for rank in (1, 2, 3)]
    group.send(entries.ECHO, b"a")
    group.send(entries.ECHO, b"b")
    assert [group.receive(10)[0], group.receive(10)[0]] == [b"1:a", b"1:b"]


def test_what_a_worker_is(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of its own, no torch unless its entry wants it, the paths of the driver but for
    those that mean the working directory, no terminal.
    """
    monkeypatch.setattr(sys, "path", ["", "relative", *sys.path])
    group = start(count=1)
    group.send(entries.FACTS, json.dumps(["nanoengine"]).encode())
    facts = json.loads(group.receive(START_S)[0])
    assert facts["pid"] == facts["group"] == group.pids[0]
    assert not facts["has_torch"]
    assert facts["path"] == [entry for entry in sys.path if os.path.isabs(entry)]
    assert facts["origins"] == [sys.modules["nanoengine"].__file__]
    assert facts["optimize"] == sys.flags.optimize
    assert facts["stdin"] == os.devnull
    assert not facts["inheritable"]


def test_descriptors_are_passed_on_under_their_numbers(start: Start) -> None:
    out, into = os.pipe()
    try:
        group = start(count=2, hello={"fds": [into], "bad": [1, 2]}, fds=[into])
        group.send(entries.FACTS, b"[]")
        group.receive(START_S)
        assert os.read(out, 10) == b"xx"
    finally:
        os.close(out)
        os.close(into)


def test_the_drivers_side_imports_no_torch() -> None:
    script = "import nanoengine.workers.processes, sys; print('torch' in sys.modules)"
    path = os.environ | {"PYTHONPATH": str(Path(nanoengine.__file__).parents[1])}
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, env=path, stdout=subprocess.PIPE, check=True)
    assert ran.stdout.strip() == b"False"


@pytest.mark.parametrize("means", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_worker_that_is_killed_while_it_answers(start: Start, means: signal.Signals) -> None:
    group = ready(start())
    group.send(entries.DIE, str(int(means)).encode())
    begin = time.monotonic()
    with pytest.raises(EngineError) as raised:
        group.receive(START_S)
    assert time.monotonic() - begin < SOON_S
    text = str(raised.value)
    assert f"worker 1 of 2 was killed by {means.name}" in text
    assert ("(out of memory?)" in text) == (means is signal.SIGKILL)
    assert "of this worker" in text
    assert ("Fatal Python error: Segmentation fault" in text) == (means is signal.SIGSEGV)
    assert 10 < text.count("\n") <= worker_handle.LAST_LINES
    assert all_gone(group)
    for call in (group.check, lambda: group.send(entries.ECHO), lambda: group.receive(1)):
        with pytest.raises(EngineError, match="was killed by"):
            call()


def test_a_worker_that_is_killed_while_idle(start: Start) -> None:
    """The driver hears of it without asking, and only then are the others killed."""
    died = threading.Event()
    alive: list[bool] = []

    def on_death() -> None:
        alive.append(not is_gone(group.pids[0]))
        died.set()

    group = ready(start(on_death=on_death))
    os.kill(group.pids[1], signal.SIGKILL)
    assert died.wait(SOON_S)
    assert all_gone(group)
    assert alive == [True]
    with pytest.raises(EngineError, match=r"worker 2 of 2 was killed by SIGKILL .*; no output"):
        group.check()


def test_a_death_is_waited_for_when_there_are_signs_of_it(start: Start) -> None:
    group = ready(start())
    group.check(within_s=0.05)
    timer = threading.Timer(0.1, os.kill, (group.pids[0], signal.SIGKILL))
    timer.start()
    try:
        with pytest.raises(EngineError, match="SIGKILL"):
            group.check(within_s=START_S)
    finally:
        timer.join()


def test_workers_end_also_if_what_is_done_then_fails(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    def on_death() -> None:
        raise ZeroDivisionError("while waking others")

    group = ready(start(on_death=on_death))
    with caplog.at_level(logging.ERROR, logger="nanoengine"):
        os.kill(group.pids[0], signal.SIGKILL)
        assert all_gone(group)
    assert "while waking others" in caplog.text


@pytest.mark.some(1)
@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.1])
def test_a_worker_that_is_killed_while_it_starts(start: Start, delay_s: float) -> None:
    with pytest.raises(EngineError, match="worker 1 of 2 was killed by SIGKILL"):
        group = start()
        time.sleep(delay_s)
        os.kill(group.pids[0], signal.SIGKILL)
        ready(group)
    gc.collect()
    assert nobody_watches()


def nobody_watches() -> bool:
    """Whether the watching threads end."""
    watching = "nanoengine-worker-watch"
    return until(lambda: all(t.name != watching for t in threading.enumerate()), SOON_S)


def test_an_exception_in_a_worker(start: Start) -> None:
    group = ready(start())
    group.send(entries.RAISE, b"some reason")
    with pytest.raises(EngineError) as raised:
        group.receive(START_S)
    assert str(raised.value) == "worker 1 of 2 failed: ZeroDivisionError: some reason"
    assert "in _raise" in str(raised.value.__cause__)
    assert all_gone(group)


def test_an_error_of_ours_keeps_its_class(start: Start) -> None:
    group = ready(start(hello={"bad": [2]}))
    group.send(entries.OURS, b"the folder is empty")
    with pytest.raises(ModelLoadError, match="worker 2 of 2: the folder is empty") as raised:
        group.receive(START_S)
    assert "in _ours" in str(raised.value.__cause__)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ("worker_entries:raises_at_once", "ValueError: no such thing"),
        ("worker_entries:nothing", "AttributeError: .*nothing"),
        ("no_such_module:main", "ModuleNotFoundError: .*no_such_module"),
    ],
)
def test_a_worker_that_fails_while_it_starts(start: Start, entry: str, text: str) -> None:
    with pytest.raises(EngineError, match=f"worker . of 2 failed: {text}"):
        start(entry).receive(START_S)


def test_a_worker_that_is_stopped_is_an_error_after_its_time(start: Start) -> None:
    group = ready(start())
    os.kill(group.pids[1], signal.SIGSTOP)
    group.send(entries.ECHO)
    first = group._team.workers[0]
    assert until(lambda: bool(first.replies), START_S)  # whose machine may be slow, too
    begin = time.monotonic()
    with pytest.raises(EngineError, match=r"worker 2 of 2 was silent for 0\.3 s"):
        group.receive(0.3)
    assert 0.3 <= time.monotonic() - begin < SOON_S
    assert all_gone(group)


def test_what_came_in_time_is_read_also_later(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where this process was stopped, and its workers were not."""
    group = ready(start())
    go_on, take_in = threading.Event(), worker_handle.WorkerHandle.take_in

    def late(worker: worker_handle.WorkerHandle) -> Any:
        assert go_on.wait(START_S)
        return take_in(worker)

    monkeypatch.setattr(worker_handle.WorkerHandle, "take_in", late)
    group.send(entries.ECHO)
    channels = [worker.channel for worker in group._team.workers]
    assert until(lambda: all(each.has_news() for each in channels), START_S)
    timer = threading.Timer(0.3, go_on.set)
    timer.start()
    assert group.receive(0.05) == [b"1:", b"2:"]
    timer.join()


def test_what_is_being_taken_in_has_come(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between what the watching thread has read and what it keeps there is no silence."""
    group = ready(start(count=1))
    has_come, read = threading.Event(), channel.Channel.read

    def slow(each: channel.Channel) -> bool:
        has_sent = read(each)
        has_come.set()
        time.sleep(0.3)
        return has_sent

    monkeypatch.setattr(channel.Channel, "read", slow)
    group.send(entries.ECHO)
    assert has_come.wait(START_S)
    assert group.receive(0.05) == [b"1:"]


def test_a_worker_that_shows_progress_is_waited_for(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on with each sign of progress."""
    group = ready(start())
    now, take = [0.0], worker_handle.WorkerHandle._take

    def ticking(worker: worker_handle.WorkerHandle, kind: int, body: bytes) -> None:
        now[0] += 0.5
        take(worker, kind, body)

    with monkeypatch.context() as patch:
        patch.setattr(worker_handle.WorkerHandle, "_take", ticking)
        for module in (processes, worker_handle):
            patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
        group.send(entries.TALK, b"9")
        assert group.receive(1.2) == [b"done", b"2:9"]
    assert now[0] > 3 * 1.2
    group.send(entries.SLEEP, b"60")
    with pytest.raises(EngineError, match="worker 1 of 2 was silent"):
        group.receive(0.3)


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (entries.TOO_LONG, "claims 1073741825 bytes, the limit is 1073741824"),
        (b"\0\0\0\0\x63", "its kind is 99"),
        (b"\x02\0\0\0\x04[]", "a damaged message between processes"),
        (b"\x02\0\0\0\x04{}", "a damaged message between processes"),
    ],
)
def test_a_worker_that_sends_a_damaged_message(start: Start, sent: bytes, text: str) -> None:
    group = ready(start())
    with pytest.raises(EngineError, match=f"worker 1 of 2 sent .*{text}"):
        group.send(entries.GARBAGE, sent)  # raises if the answer is there before the call returns
        group.receive(START_S)
    assert all_gone(group)


@pytest.mark.parametrize(
    ("sent", "text"),
    [(entries.TOO_LONG, "claims 1073741825 bytes"), (b"\0\0\0\0\xff", "KeyError: 255")],
)
def test_a_worker_that_gets_a_damaged_message(start: Start, sent: bytes, text: str) -> None:
    group = ready(start(hello={"bad": [1, 2]}))
    os.write(group._team.workers[1].channel.fileno(), sent)
    with pytest.raises(EngineError, match=f"worker 2 of 2.*{text}"):
        group.receive(START_S)
    assert all_gone(group)


def test_a_worker_that_ends_unasked(start: Start) -> None:
    group = ready(start())
    group.send(entries.RETURN)
    with pytest.raises(EngineError, match="worker 1 of 2 ended with exit code 0; no output"):
        group.receive(START_S)


def test_a_worker_without_a_connection_that_does_not_end(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that hangs in the system while it ends."""
    group = ready(start())
    with monkeypatch.context() as patch:
        patch.setattr(worker_handle.WorkerHandle, "has_ended", lambda self, within_s: False)
        os.kill(group.pids[0], signal.SIGKILL)
        with pytest.raises(EngineError, match="worker 1 of 2 closed its connection; no output"):
            group.receive(START_S)
    group.close()
    assert all_gone(group)


def test_a_message_beyond_the_limit_harms_nobody(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = ready(start())
    monkeypatch.setattr(channel, "MAX_BYTES", 1000)
    with pytest.raises(EngineError, match="has 1001 bytes, the limit is 1000"):
        group.send(entries.ECHO, b"x" * 1001)
    ready(group)


def test_a_worker_that_hears_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    group = start("worker_entries:deaf")
    group.receive(START_S)
    monkeypatch.setattr(processes, "SEND_S", 0.3)
    begin = time.monotonic()
    with pytest.raises(EngineError, match=r"worker 1 of 2 has not taken a message for 0\.3 s"):
        group.send(entries.ECHO, b"x" * 10_000_000)
    assert time.monotonic() - begin < SOON_S
    assert all_gone(group)


def test_closing_kills_who_does_not_stop(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    group = start("worker_entries:deaf")
    group.receive(START_S)
    monkeypatch.setattr(processes, "STOP_S", 0.3)
    begin = time.monotonic()
    group.close()
    assert 0.6 <= time.monotonic() - begin < SOON_S
    assert all_gone(group, 0)


def test_a_closed_group_says_so(start: Start) -> None:
    group = ready(start())
    group.close()
    assert all_gone(group, 0)
    group.close()
    for call in (group.check, lambda: group.send(entries.ECHO), lambda: group.receive(1)):
        with pytest.raises(EngineClosedError, match="were closed"):
            call()


@pytest.mark.breadth
def test_a_group_that_nobody_holds_is_closed(start: Start) -> None:
    before = open_descriptors()
    group = ready(WorkerProcesses(ECHO, 2, {}))
    pids = group.pids
    knot: list[Any] = [group]
    knot.append(knot)
    del group, knot
    gc.collect()
    assert all(is_gone(pid) for pid in pids)
    assert nobody_watches()
    assert not open_descriptors() - before


def test_a_group_may_be_freed_by_its_own_thread() -> None:
    """The garbage collector runs on any thread, so it may close a group on the one that watches."""
    before = open_descriptors()
    group = ready(WorkerProcesses(ECHO, 2, {}))
    pids = group.pids
    group._team._on_death = group.close
    os.kill(pids[0], signal.SIGKILL)
    assert until(lambda: all(is_gone(pid) for pid in pids), SOON_S)
    assert nobody_watches()
    assert not open_descriptors() - before


@pytest.mark.breadth
@pytest.mark.parametrize("executable", ["", None])
def test_a_python_inside_another_program(
    monkeypatch: pytest.MonkeyPatch, executable: str | None
) -> None:
    before = open_descriptors()
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(ConfigError, match=r"sys\.executable") as raised:
        WorkerProcesses(ECHO, 2, {})
    assert not open_descriptors() - before, raised  # whose traceback holds what was made


def test_a_frozen_program_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(ConfigError, match="part of another program"):
        WorkerProcesses(ECHO, 2, {})


def test_a_python_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(ConfigError, match=r"cannot start a worker process.*/no/such/python"):
        WorkerProcesses(ECHO, 2, {})


def test_who_started_ends_if_another_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    before, started = open_descriptors(), []
    start = worker_handle._start

    def second_fails(*arguments: Any) -> Any:
        if started:
            raise ConfigError("no more processes")
        started.append(start(*arguments))
        return started[0]

    monkeypatch.setattr(worker_handle, "_start", second_fails)
    with pytest.raises(ConfigError, match="no more processes") as raised:
        WorkerProcesses(ECHO, 2, {})
    assert is_gone(started[0].pid), raised  # whose traceback holds what was made
    assert not open_descriptors() - before


def test_a_program_that_is_no_python(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(EngineError, match=r"worker . of 2 ended with exit code 0; no output"):
        start().receive(START_S)


def test_the_thread_that_started_them_may_end(start: Start) -> None:
    made: list[WorkerProcesses] = []
    thread = threading.Thread(target=lambda: made.append(ready(start())))
    thread.start()
    thread.join()
    time.sleep(0.3)
    ready(made[0])


def test_two_groups_at_once(start: Start) -> None:
    one, two = start(), start()
    ready(two)
    ready(one)
    os.kill(one.pids[0], signal.SIGKILL)
    assert all_gone(one)
    ready(two)


def test_groups_in_coroutines() -> None:
    async def use() -> list[bytes]:
        group = WorkerProcesses(ECHO, 1, {})
        try:
            group.send(entries.ECHO, b"hi")
            return await asyncio.to_thread(group.receive, START_S)
        finally:
            group.close()

    async def both() -> list[list[bytes]]:
        return await asyncio.gather(use(), use())

    assert asyncio.run(both()) == [[b"1:hi"], [b"1:hi"]]


def test_a_fork_of_the_user_cannot_use_or_end_them(start: Start) -> None:
    group = ready(start())
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            group.close()
            for call in (group.check, lambda: group.send(entries.ECHO), lambda: group.receive(1)):
                with pytest.raises(ForkedProcessError):
                    call()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    ready(group)


def test_an_interrupt_loses_no_reply(start: Start) -> None:
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        group = ready(start())
        os.kill(group.pids[0], signal.SIGSTOP)
        group.send(entries.ECHO, b"x")
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            group.receive(START_S)
        os.kill(group.pids[0], signal.SIGCONT)
        assert group.receive(START_S) == [b"1:x", b"2:x"]
        ready(group)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_without_pidfds_a_death_is_seen_at_the_socket(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    group = ready(start())
    os.kill(group.pids[0], signal.SIGKILL)
    with pytest.raises(EngineError, match="SIGKILL"):
        group.check(within_s=SOON_S)
    assert all_gone(group)


def test_a_death_is_seen_while_a_child_of_the_worker_holds_its_socket(start: Start) -> None:
    group = ready(start("worker_entries:with_a_child", count=1))
    try:
        os.kill(group.pids[0], signal.SIGKILL)
        with pytest.raises(EngineError, match="SIGKILL"):
            group.check(within_s=SOON_S)
    finally:
        group.close()


def test_closing_does_not_wait_for_a_child_of_the_worker(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without pidfds only the socket, which that child holds, could say that the worker ended."""
    monkeypatch.delattr(os, "pidfd_open")
    group = ready(start("worker_entries:with_a_child", count=1))
    begin = time.monotonic()
    group.close()
    assert time.monotonic() - begin < SOON_S
    assert nobody_watches()


def test_closing_wakes_who_waits_for_a_reply(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    group = ready(start())
    monkeypatch.setattr(processes, "STOP_S", 1.0)
    group.send(entries.SLEEP, b"60")
    timer = threading.Timer(0.2, group.close)
    timer.start()
    try:
        begin = time.monotonic()
        with pytest.raises(EngineClosedError, match="were closed"):
            group.receive(START_S)
        assert time.monotonic() - begin < SOON_S
    finally:
        timer.join()


@pytest.mark.breadth
@pytest.mark.parametrize("rounds", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_many_groups_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before, pids = open_descriptors(), []
    for number in range(rounds):
        group = WorkerProcesses(ECHO, 1, {})
        pids += group.pids
        if number % 3 == 0:
            ready(group)
        if number % 5 == 0:
            os.kill(group.pids[0], signal.SIGKILL)
        group.close()
    assert not open_descriptors() - before
    assert nobody_watches()
    assert all(is_gone(pid) for pid in pids)
    assert list(tmp_path.iterdir()) == []


FAULTS = {
    "SIGKILL": "was killed by SIGKILL",
    "SIGSEGV": "was killed by SIGSEGV",
    "SIGSTOP": "was silent for",
    "RAISE": "failed: ZeroDivisionError",
    "GARBAGE": "sent a damaged message",
}


def fault_at_random(rng: random.Random, fault: str) -> None:
    """One group that answers in a loop, until one of its workers comes to harm."""
    group = WorkerProcesses(ECHO, 2, {"bad": [rng.choice([1, 2])]})
    timer = None
    begin = time.monotonic()
    try:
        if fault.startswith("SIG"):
            victim, means = rng.choice(group.pids), getattr(signal, fault)
            timer = threading.Timer(rng.uniform(0.0, 0.4), os.kill, (victim, means))
            timer.start()
        with pytest.raises(EngineError, match=f"worker . of 2 {FAULTS[fault]}"):
            while time.monotonic() < begin + START_S:
                if timer is None and rng.random() < 0.01:
                    group.send(getattr(entries, fault), entries.TOO_LONG)
                group.send(entries.ECHO, os.urandom(rng.randrange(20_000)))
                group.receive(1.0 if fault == "SIGSTOP" else START_S)
        assert all_gone(group)
    finally:
        if timer is not None:
            timer.join()
        group.close()


@pytest.mark.some(1)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rounds", [1, pytest.param(100, marks=pytest.mark.slow)])
def test_faults_at_random_instants(fault: str, rounds: int) -> None:
    before = open_descriptors()
    rng = random.Random(rounds)
    for _ in range(rounds):
        fault_at_random(rng, fault)
    assert not open_descriptors() - before
    assert nobody_watches()
