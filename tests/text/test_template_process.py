"""The process that renders chat templates: bounded, replaced when it ends, gone with its owner."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest
import tokenizers

from nanoengine.errors import InvalidPromptError, RequestError
from nanoengine.text import template_process, template_worker
from nanoengine.text.template_process import TemplateProcess
from nanoengine.text.tokenizer import Tokenizer

SECONDS = 0.3
PATIENCE_S = 60.0
ENDLESS = "{% for a in x %}" * 9 + "{% endfor %}" * 9
LISTS = {"x": [0] * 1000}
DOUBLED = (
    "{% set ns = namespace(x='12345678') %}{% for _ in range(60) %}{% set ns.x = OP %}{% endfor %}"
)
BOMBS = {
    "loops": (ENDLESS, "did not finish within 0.3 s"),
    "doubled text": (DOUBLED.replace("OP", "ns.x ~ ns.x"), "did not finish|1 GiB"),
    "doubled lists": (DOUBLED.replace("OP", "[ns.x, ns.x]") + "{{ ns.x }}", "did not finish|1 GiB"),
    "text times": ("{{ 'a' * 10 ** 10 }}", "1 GiB of memory"),
    "a power": ("{{ 10 ** (10 ** 9) }}", "did not finish|1 GiB"),
    "format": ("{{ '%1000000000d' % x | length }}", "did not finish|1 GiB"),
    "center": ("{{ 'a'.center(10 ** 10) }}", "1 GiB of memory"),
    "wide batches": ("{{ x | batch(10 ** 9, 0) | list }}", "did not finish|1 GiB"),
}


@pytest.fixture(scope="module")
def process() -> TemplateProcess:
    """One for all tests that do not look at what is left of it."""
    return TemplateProcess(PATIENCE_S)


def answers(process: TemplateProcess) -> int:
    """The worker that renders now."""
    assert process.render("{{ 1 + x }}", {"x": 1}) == "2"
    assert process.worker_pid is not None
    return process.worker_pid


def is_gone(pid: int) -> bool:
    """Whether there is no such process, or only its exit status (nobody may want it)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def await_true(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -- bounds ----------------------------------------------------------------------------------------


@pytest.mark.some(3)
@pytest.mark.parametrize(("template", "match"), BOMBS.values(), ids=list(BOMBS))
def test_a_bomb_is_an_error_and_the_next_text_is_rendered(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch, template: str, match: str
) -> None:
    answers(process)
    with monkeypatch.context() as patch:
        patch.setattr(process, "_seconds", SECONDS if "finish" in match else PATIENCE_S)
        with pytest.raises(InvalidPromptError, match=match):
            process.render(template, LISTS)
    answers(process)


def test_a_tokenizer_passes_its_limit_on() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    tokenizer = Tokenizer(backend, {}, {"default": ENDLESS}, template_seconds=0.1)
    with pytest.raises(InvalidPromptError, match=r"did not finish within 0\.1 s"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], x=[0] * 1000)


def test_too_much_text_is_refused_both_ways() -> None:
    process = TemplateProcess()
    with pytest.raises(InvalidPromptError, match="made more than 64 MiB of text"):
        process.render("{{ x * (65 * 2 ** 20) }}", {"x": "a"})
    with pytest.raises(InvalidPromptError, match="takes up to 67108864"):
        process.render("{{ x | length }}", {"x": "é" * (33 << 20)})
    long = "é\n" * (8 << 20)
    assert process.render("{{ x }}!", {"x": long}) == long + "!"


def test_a_long_error_is_cut(process: TemplateProcess) -> None:
    with pytest.raises(InvalidPromptError, match="refuses these messages: aaaa") as caught:
        process.render("{{ raise_exception(x * 10 ** 6) }}", {"x": "a"})
    assert len(str(caught.value)) < 3000


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        *("\ud83d\ude42", "a\udfff\x00\u2028", "🙂é", math.nan, math.inf, -0.0, 1e22, 10**4200),
        *(1.0, 1, True, None, [], {}, {"b": 1, "a": {"é": [2.5, "\ud800"]}}),
    ],
)
def test_values_arrive_as_they_are(process: TemplateProcess, value: Any) -> None:
    assert process.render("{{ x | tojson }}", {"x": value}) == json.dumps(value, ensure_ascii=False)
    assert process.render("{{ x }}|", {"x": value}) == f"{value}|"


def test_an_integer_of_too_many_digits_is_refused(process: TemplateProcess) -> None:
    with pytest.raises(InvalidPromptError, match="refuses these messages: Exceeds the limit"):
        process.render("{{ x }}", {"x": 10**5000})


@pytest.mark.parametrize("setting", ["ns = namespace(_a=1)", "ns = namespace() %}{% set ns._a = 1"])
def test_a_namespace_takes_no_names_of_python_s_own(process: TemplateProcess, setting: str) -> None:
    with pytest.raises(InvalidPromptError, match="a namespace takes no attribute '_a'"):
        process.render(f"{{% set {setting} %}}", {})


# -- one worker, and its end -----------------------------------------------------------------------


def test_the_worker_stays() -> None:
    process = TemplateProcess()
    assert process.worker_pid is None
    first = answers(process)
    with pytest.raises(InvalidPromptError, match="broken"):
        process.render("{% if %}", {})
    assert answers(process) == first


def test_ctrl_c_is_not_for_the_worker() -> None:
    process = TemplateProcess()
    first = answers(process)
    os.kill(first, signal.SIGINT)
    assert answers(process) == first


def test_a_killed_worker_is_replaced() -> None:
    process = TemplateProcess()
    first = answers(process)
    os.kill(first, signal.SIGKILL)
    await_true(lambda: process.worker_pid is None)
    assert answers(process) != first and is_gone(first)


def when_asked(patch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    """Has it called when a request was sent."""
    send = template_worker.send

    def sends(link: socket.socket, kind: bytes, payload: bytes, deadline: float) -> None:
        send(link, kind, payload, deadline)
        call()

    patch.setattr(template_worker, "send", sends)


@pytest.mark.parametrize(
    ("means", "match"),
    [
        (signal.SIGKILL, r"ended its process \(status -9\)"),
        # Its own alarm, where its owner looks up later than that.
        (signal.SIGALRM, "did not finish within 60 s"),
    ],
)
def test_a_worker_that_ends_while_it_renders_is_an_error(
    monkeypatch: pytest.MonkeyPatch, means: signal.Signals, match: str
) -> None:
    process = TemplateProcess(PATIENCE_S)
    first = answers(process)
    with monkeypatch.context() as patch:
        when_asked(patch, lambda: os.kill(first, means))
        with pytest.raises(InvalidPromptError, match=match):
            process.render(ENDLESS, LISTS)
    answers(process)


def test_an_interrupt_leaves_no_answer_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> NoReturn:
        raise KeyboardInterrupt

    process = TemplateProcess()
    first = answers(process)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            when_asked(patch, lambda: signal.setitimer(signal.ITIMER_REAL, 0.1))
            process.render(ENDLESS, LISTS)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert is_gone(first)
    answers(process)


def test_no_worker_outlives_its_tokenizer() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    process = TemplateProcess()
    tokenizer = Tokenizer(backend, {}, {"default": "x"})
    tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    workers = [answers(process), tokenizer._templates["default"]._process.worker_pid]
    assert workers[1] is not None and not any(map(is_gone, workers))
    del process, tokenizer
    assert all(map(is_gone, workers))


def test_a_copy_has_a_worker_of_its_own() -> None:
    process = TemplateProcess(PATIENCE_S)
    first, other = answers(process), copy.deepcopy(process)
    assert answers(other) != first and answers(process) == first


def test_threads_take_turns() -> None:
    process = TemplateProcess()

    def render(number: int) -> str:
        return process.render("{{ x }}", {"x": f"{number}" * 5000})

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(render, range(200)))
    assert texts == [f"{number}" * 5000 for number in range(200)]


def test_a_fork_leaves_the_worker_to_its_parent() -> None:
    """Also while a thread of the parent renders, which the child does not have."""
    process = TemplateProcess(120.0)
    first = answers(process)

    def render() -> None:
        with pytest.raises(InvalidPromptError, match="ended its process"):
            process.render(ENDLESS, LISTS)

    renders = threading.Thread(target=render)
    renders.start()
    await_true(process._state.lock.locked)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(60)
            status = 0 if answers(process) != first else 2
            del process
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not is_gone(first)
    os.kill(first, signal.SIGKILL)
    renders.join()
    answers(process)


@pytest.fixture
def orphan() -> Iterator[Callable[[bool], int]]:
    """Makes a worker whose owner was killed, but not a fork of that, which holds the link, too."""
    sleepers = []

    def owner(pipe: int, is_busy: bool) -> NoReturn:
        process = TemplateProcess(PATIENCE_S)
        worker = answers(process)
        sleeper = os.fork()
        if sleeper == 0:
            signal.alarm(60)
            signal.pause()
        os.write(pipe, f"{worker} {sleeper}".encode())
        if is_busy:
            link = process._state.worker._link  # type: ignore[union-attr]
            request = json.dumps([ENDLESS, LISTS, SECONDS]).encode()
            template_worker.send(link, template_worker.RENDER, request, time.monotonic() + 9)
        os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)

    def make(is_busy: bool) -> int:
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                owner(theirs, is_busy)
            finally:
                os._exit(1)
        os.close(theirs)
        os.waitpid(child, 0)
        worker, sleeper = map(int, os.read(ours, 100).split())
        os.close(ours)
        sleepers.append(sleeper)
        return worker

    yield make
    for pid in sleepers:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.some(1)
@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
def test_a_worker_ends_after_its_owner(orphan: Callable[[bool], int], is_busy: bool) -> None:
    pid = orphan(is_busy)
    await_true(lambda: is_gone(pid))


# -- how it is started -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "match"),
    [
        (None, "sys.executable is empty"),
        ("", "sys.executable is empty"),
        ("/no/such/python", "cannot start a process"),
        ("/bin/false", r"does not start \(status 1\).*'/bin/false' must be a Python with jinja2"),
    ],
)
def test_without_a_python_there_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, program: Any, match: str
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    with pytest.raises(RequestError, match=match):
        TemplateProcess().render("x", {})


def test_a_slow_start_is_not_blamed_on_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves no process behind; the next request starts another."""
    process, real = TemplateProcess(), sys.executable
    told = tmp_path / "pid"
    (slow := tmp_path / "python").write_text(f"#!/bin/sh\necho $$ > {told}\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    monkeypatch.setattr(template_process, "START_SECONDS", 1.0)
    with pytest.raises(RequestError, match="did not start within 1 s: is the machine too busy"):
        process.render("x", {})
    if told.exists():  # the shell may not have come so far
        await_true(lambda: is_gone(int(told.read_text())))
    monkeypatch.undo()
    assert sys.executable == real
    answers(process)


def test_modules_that_lie_about_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the worker, beside the user's program, or in the working directory."""
    for name in ("enum", "jinja2", "json", "nanoengine", "re", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('taken')\n")
    monkeypatch.setattr(template_process, "WORKER", shutil.copy(template_process.WORKER, tmp_path))
    answers(TemplateProcess())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", ".", str(tmp_path), *sys.path])
    answers(TemplateProcess())


def test_jinja2_may_be_anywhere_that_its_owner_imports_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Python that finds nothing by itself but its standard library."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    answers(TemplateProcess())
    (tmp_path / "jinja2.py").write_text("raise SystemExit('taken')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    answers(TemplateProcess())


def test_a_worker_has_no_files_of_its_owner(tmp_path: Path) -> None:
    process = TemplateProcess()
    with (tmp_path / "file").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        worker = answers(process)
    opened = sorted(path.name for path in Path(f"/proc/{worker}/fd").iterdir())
    assert opened == ["0", "1", "2"]
    assert all(os.readlink(f"/proc/{worker}/fd/{fd}") == "/dev/null" for fd in (1, 2))
