"""Who starts worker processes: scripts of any kind, from any folder; and what is left of the
workers when such a program is killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HELPERS = ROOT / "tests" / "helpers"
# What takes milliseconds, or an interpreter's start: less than what is killed would live, and no
# pause of a machine.
SOON_S = 20.0
# A script without `if __name__ == "__main__"`, which prints a line for each time that it runs.
SCRIPT = """
import json, sys
import worker_entries as entries
from nanoengine.workers.processes import WorkerProcesses
print("begins", flush=True)
group = WorkerProcesses("worker_entries:echo", 2, {"bad": [1, 2]})
group.send(entries.FACTS, json.dumps(["torch", "nanoengine", "worker_entries"]).encode())
facts = json.loads(group.receive(60)[0])
same = facts["optimize"] == sys.flags.optimize
print(json.dumps([same, facts["stdin"], *facts["origins"]]), flush=True)
"""
# The same, and then it waits to be killed.
WAITS = """
import time
import worker_entries as entries
from nanoengine.workers.processes import WorkerProcesses
group = WorkerProcesses(ENTRY, 2, {})
if READY:
    group.send(entries.ECHO)
    group.receive(60)
print(*group.pids, flush=True)
MORE
time.sleep(600)
"""


def run(*arguments: str, cwd: Path, script: str | None = None, **environment: str) -> list[str]:
    """What a Python with these arguments and this standard input prints."""
    ran = subprocess.run(
        [sys.executable, *arguments],
        input=script,
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{HELPERS}"} | environment,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    return ran.stdout.splitlines()


def assert_ours(lines: list[str]) -> None:
    """The script ran once, and its workers found what this process finds."""
    import torch

    import nanoengine

    assert lines[0] == "begins" and len(lines) == 2
    assert json.loads(lines[1]) == [
        True,
        os.devnull,
        torch.__file__,
        nanoengine.__file__,
        str(HELPERS / "worker_entries.py"),
    ]


def test_a_script_without_a_guard(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    assert_ours(run("script.py", cwd=tmp_path))


def test_a_script_from_standard_input(tmp_path: Path) -> None:
    assert_ours(run("-", cwd=tmp_path, script=SCRIPT))


def test_a_script_without_a_file(tmp_path: Path) -> None:
    code = f"exec({SCRIPT!r}, {{'__name__': '__main__'}})"
    assert_ours(run("-c", code, cwd=tmp_path))


@pytest.mark.parametrize("flags", [["-O"], ["-s", "-B"], ["-X", "utf8=1"], ["-W", "error"]])
def test_a_python_with_flags(tmp_path: Path, flags: list[str]) -> None:
    assert_ours(run(*flags, "-c", SCRIPT, cwd=tmp_path))


@pytest.mark.parametrize("path", ["", ":", "relative:"])
def test_a_folder_with_files_of_known_names(tmp_path: Path, path: str) -> None:
    """The driver came there after its own imports, by chdir; the workers must not import them."""
    for name in ("torch", "nanoengine", "json", "socket"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stray file')", encoding="utf-8")
    script = f"import os, nanoengine.workers.processes; os.chdir({str(tmp_path)!r})\n{SCRIPT}"
    assert_ours(run("-c", script, cwd=HELPERS, PYTHONPATH=f"{path}{ROOT}:{HELPERS}"))


def test_a_checkout_that_is_the_working_directory() -> None:
    """It is found by the entry of sys.path that workers do not get."""
    script = SCRIPT.replace(
        "import json, sys", f"import json, sys; sys.path.append({str(HELPERS)!r})"
    )
    assert_ours(run("-c", script, cwd=ROOT, PYTHONPATH=""))


def test_a_program_without_standard_streams(tmp_path: Path) -> None:
    """Descriptors 0 to 2 are free, and the end of a socket gets one of them."""
    free = "import os, sys; out = os.dup(1); os.closerange(0, 3); sys.stdout = os.fdopen(out, 'w')"
    code = f"{free}\n{SCRIPT}"
    assert_ours(run("-c", code, cwd=tmp_path))


@contextmanager
def waiting(
    entry: str = "worker_entries:echo", ready: bool = True, more: str = "", **environment: str
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A program that has started two workers, and their process ids."""
    script = WAITS.replace("ENTRY", repr(entry)).replace("READY", str(ready))
    program = subprocess.Popen(
        [sys.executable, "-c", script.replace("MORE", more)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{HELPERS}"} | environment,
    )
    pids: list[int] = []
    try:
        assert program.stdout is not None
        pids += map(int, program.stdout.readline().split())
        assert len(pids) == 2
        yield program, pids
    finally:
        program.kill()
        program.wait()
        assert program.stdout is not None
        program.stdout.close()
        for pid in pids:
            if has_work(pid):
                os.kill(pid, signal.SIGKILL)


def has_work(pid: int) -> bool:
    """Whether a process of another parent runs, or is stopped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def assert_gone(pids: list[int]) -> None:
    """Nothing of these processes runs any more, soon."""
    end = time.monotonic() + SOON_S
    while (left := [pid for pid in pids if has_work(pid)]) and time.monotonic() < end:
        time.sleep(0.002)
    assert left == []


@pytest.mark.parametrize("ready", [True, False])
def test_workers_of_a_killed_program_end(ready: bool) -> None:
    with waiting(ready=ready) as (program, pids):
        program.kill()
        assert_gone(pids)


@pytest.mark.parametrize("entry", ["deaf", "holds_the_interpreter"])
def test_workers_at_work_end_with_their_program(entry: str) -> None:
    """They read nothing; a thread of theirs cannot run in the second case."""
    receive = "group.receive(60); print('ready', flush=True)"
    with waiting(f"worker_entries:{entry}", more=receive, ready=False) as (program, pids):
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        time.sleep(0.1)
        program.kill()
        assert_gone(pids)


def test_stopped_workers_end_with_their_program() -> None:
    """The system continues a process group that has become an orphan."""
    with waiting() as (program, pids):
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        program.kill()
        assert_gone(pids)


@pytest.mark.parametrize("has_pidfds", [True, False])
def test_a_fork_of_the_program_keeps_no_worker_alive(tmp_path: Path, has_pidfds: bool) -> None:
    """It holds the other end of the workers' sockets."""
    path: dict[str, Any] = {}
    if not has_pidfds:
        site = tmp_path / "sitecustomize.py"
        site.write_text("import os\ndel os.pidfd_open\n", encoding="utf-8")
        path = {"PYTHONPATH": f"{tmp_path}:{ROOT}:{HELPERS}"}
    fork = "import os\nif not (fork := os.fork()): time.sleep(60)\nelse: print(fork, flush=True)"
    with waiting(more=fork, **path) as (program, pids):
        assert program.stdout is not None
        holder = int(program.stdout.readline())
        try:
            program.kill()
            assert_gone(pids)
        finally:
            os.kill(holder, signal.SIGKILL)


def test_ctrl_c_reaches_the_program_alone() -> None:
    with waiting() as (program, pids):
        assert os.getpgid(program.pid) not in {os.getpgid(pid) for pid in pids}


@pytest.mark.parametrize(
    "ending",
    ["sys.exit(3)", "raise KeyError", "os.kill(os.getpid(), signal.SIGTERM)", "os._exit(0)"],
)
def test_workers_end_however_the_program_does(ending: str) -> None:
    with waiting(more=f"import os, signal, sys\n{ending}") as (program, pids):
        program.wait(timeout=60)
        assert_gone(pids)


@pytest.mark.slow
def test_a_hundred_programs_killed_at_random_instants() -> None:
    rng = random.Random(3)
    for _ in range(100):
        with waiting(ready=rng.random() < 0.5) as (program, pids):
            time.sleep(rng.uniform(0, 0.3))
            program.kill()
            assert_gone(pids)
