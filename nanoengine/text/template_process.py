"""Runs template_worker.py: starts it when a template is first rendered, bounds it, ends it.

A model's template is a program of somebody else's. In its own process it may loop or allocate
without end, and costs this one no more than the wait.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoengine.errors import InvalidPromptError, RequestError
from nanoengine.text import template_worker

RENDER_SECONDS = 10.0
START_SECONDS = 30.0  # a busy machine may need some to start a Python
WORKER = Path(__file__).with_name("template_worker.py")


class TemplateProcess:
    """Renders templates in another process, which ends with this object or with the interpreter.

    Any thread may call it: they take turns. A fork of this process starts a worker of its own.
    """

    def __init__(self, seconds: float = RENDER_SECONDS) -> None:
        """seconds: for one text, from the request to the answer."""
        self._seconds = seconds
        self._desk = _Desk()

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """The text of the template `source` with `variables`, plain JSON values.

        Raises InvalidPromptError when the template fails or needs more time or memory than it may,
        RequestError when no process can be started.
        """
        try:
            content = json.dumps([source, variables, self._seconds], ensure_ascii=False)
        except ValueError as error:  # an integer of too many digits
            raise InvalidPromptError(
                f"the chat template refuses these messages: {error}"
            ) from error
        request = template_worker.encoded(content)
        if len(request) > template_worker.MAX_BYTES:
            raise InvalidPromptError(
                f"the messages are {len(request)} bytes, a chat template takes up to "
                f"{template_worker.MAX_BYTES}; render them yourself and send the text"
            )
        if self._desk.owner != os.getpid():  # after a fork worker and lock are the parent's
            self._desk = _Desk()
        desk = self._desk
        with desk.lock:
            if desk.worker is None or not desk.worker.is_alive():
                desk.worker = _Worker()
            kind, answer = desk.worker.ask(request, self._seconds)
        return _text(kind, template_worker.decoded(answer))

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker; None before the first rendering and after a failed one."""
        worker = self._desk.worker
        return worker.pid if worker is not None and worker.is_alive() else None

    def __reduce__(self) -> tuple[type[TemplateProcess], tuple[float]]:
        """A copy, in this process or in another one, has its own worker."""
        return TemplateProcess, (self._seconds,)


class _Worker:
    """One process. Whoever asks it holds the lock of its desk."""

    def __init__(self) -> None:
        """Starts it. Raises RequestError when that fails."""
        command = _command()
        try:
            self._link, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
        except OSError as error:
            raise RequestError(f"cannot start a process for the chat template: {error}") from error
        self.pid = self._process.pid
        self._end = weakref.finalize(self, _end, self._process, self._link, os.getpid())
        self._await_start()

    def _await_start(self) -> None:
        try:
            deadline = time.monotonic() + START_SECONDS
            template_worker.receive(self._link, deadline, max_bytes=0)
        except (EOFError, OSError) as error:
            self._end()
            raise RequestError(
                f"the process for chat templates does not start (status "
                f"{self._process.returncode}): {sys.executable!r} must be a Python with jinja2"
            ) from error

    def is_alive(self) -> bool:
        return self._end.alive and self._process.poll() is None

    def ask(self, request: bytes, seconds: float) -> tuple[bytes, bytes]:
        """Kind and payload of the answer. Whatever is raised, the process has ended."""
        deadline = time.monotonic() + seconds
        try:
            template_worker.send(self._link, template_worker.RENDER, request, deadline)
            kind, answer = template_worker.receive(self._link, deadline, template_worker.MAX_BYTES)
        except TimeoutError as error:
            self._end()
            raise InvalidPromptError(
                f"the chat template did not finish within {seconds:g} s; render the messages "
                "yourself and send the text"
            ) from error
        except (EOFError, OSError) as error:
            self._end()
            raise InvalidPromptError(
                f"the chat template ended its process (status {self._process.returncode})"
            ) from error
        except BaseException:  # an interrupt: this answer would be taken for the next one's
            self._end()
            raise
        if kind == template_worker.NO_MEMORY:
            self._end()  # what it holds is spread all over its memory
        return kind, answer


@dataclass(slots=True)
class _Desk:
    """What one process, `owner`, has of a TemplateProcess. lock: for asking the worker."""

    owner: int = field(default_factory=os.getpid)
    lock: threading.Lock = field(default_factory=threading.Lock)
    worker: _Worker | None = None


def _end(process: subprocess.Popen[bytes], link: socket.socket, owner: int) -> None:
    link.close()
    if os.getpid() != owner:
        process.returncode = 0  # the worker of the process that this one was forked from
        return
    process.kill()
    process.wait()


def _command() -> list[str]:
    if not sys.executable:
        raise RequestError(
            "chat templates run in a Python process of their own, and this Python does not know "
            "its own program (sys.executable is empty); set sys.executable to one, or render the "
            "messages yourself and send the text"
        )
    # -P: neither the working directory nor the worker's own folder gives it modules.
    places = [entry for entry in sys.path if os.path.isabs(entry)]
    return [sys.executable, "-P", str(WORKER), str(os.getpid()), *places]


def _text(kind: bytes, answer: str) -> str:
    if kind == template_worker.TEXT:
        return answer
    problem = {
        template_worker.BROKEN: f"the model's chat template is broken: {answer}",
        template_worker.REFUSED: f"the chat template refuses these messages: {answer}",
        template_worker.NO_MEMORY: "the chat template needs more than "
        f"{template_worker.MEMORY_BYTES >> 30} GiB of memory",
        template_worker.TOO_LONG: "the chat template made more than "
        f"{template_worker.MAX_BYTES >> 20} MiB of text",
    }
    raise InvalidPromptError(problem[kind])
