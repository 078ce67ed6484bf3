"""Runs template_worker.py: starts it for the first request, limits it, ends it.

A model's template is a foreign program, and a grammar may be as good as one. In a process of their
own they may loop or allocate without end, and this process only waits for a limited time.
"""

from __future__ import annotations

import json
import os
import signal
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
START_SECONDS = 30.0  # a busy machine may take long to start Python
WORKER = Path(__file__).with_name("template_worker.py")


class WorkerProcess:
    """A worker process, which ends with this object or with the interpreter.

    Any thread may call it; calls run one at a time. A forked process starts its own worker.
    """

    def __init__(self, seconds: float = RENDER_SECONDS) -> None:
        """seconds: time limit for one answer, from the request on."""
        self._seconds = seconds
        self._state = _State()

    def ask(self, kind: bytes, request: bytes) -> tuple[bytes, str]:
        """Kind and text of the answer. Raises TimeoutError after the time limit, EOFError if the
        process ended, RequestError if none can be started.
        """
        if self._state.owner != os.getpid():  # after a fork, worker and lock belong to the parent
            self._state = _State()
        state = self._state
        with state.lock:
            if state.worker is None or not state.worker.is_alive():
                state.worker = _Worker()
            kind, answer = state.worker.ask(kind, request, self._seconds)
        return kind, template_worker.decoded(answer)

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker; None before the first request and after a failed one."""
        worker = self._state.worker
        return worker.pid if worker is not None and worker.is_alive() else None

    def __reduce__(self) -> tuple[type[WorkerProcess], tuple[float]]:
        """A copy, in this process or in another one, has its own worker."""
        return type(self), (self._seconds,)


class TemplateProcess(WorkerProcess):
    """Renders templates in a worker process."""

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """Render the template `source` with `variables`, plain JSON values.

        Raises InvalidPromptError if the template fails or exceeds its time or memory limit,
        RequestError if no process can be started.
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
        try:
            return _text(*self.ask(template_worker.RENDER, request))
        except TimeoutError as error:
            raise InvalidPromptError(
                f"the chat template did not finish within {self._seconds:g} s; render the messages "
                "yourself and send the text"
            ) from error
        except EOFError as error:
            raise InvalidPromptError(f"the chat template ended its process ({error})") from error


class _Worker:
    """One worker process. Callers of `ask` must hold its lock."""

    def __init__(self) -> None:
        """Start the process. Raises RequestError if that fails."""
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
        except TimeoutError as error:
            self._end()
            raise RequestError(
                f"the process for chat templates and grammars did not start within "
                f"{START_SECONDS:g} s: is the machine too busy? Try again"
            ) from error
        except (EOFError, OSError) as error:
            self._end()
            raise RequestError(
                f"the process for chat templates does not start (status "
                f"{self._process.returncode}): {sys.executable!r} must be a Python with jinja2"
            ) from error

    def is_alive(self) -> bool:
        return self._end.alive and self._process.poll() is None

    def ask(self, kind: bytes, request: bytes, seconds: float) -> tuple[bytes, bytes]:
        """Send a request; returns kind and payload of the answer. Any error ends the process."""
        deadline = time.monotonic() + seconds
        try:
            template_worker.send(self._link, kind, request, deadline)
            kind, answer = template_worker.receive(self._link, deadline, template_worker.MAX_BYTES)
        except TimeoutError:
            self._end()
            raise
        except (EOFError, OSError) as error:
            self._end()
            if self._process.returncode == -signal.SIGALRM:  # its own limit came first
                raise TimeoutError from error
            raise EOFError(f"status {self._process.returncode}") from error
        except BaseException:  # an interrupt: the next request would get this answer
            self._end()
            raise
        if kind == template_worker.NO_MEMORY:
            self._end()  # its heap is fragmented
        return kind, answer


@dataclass(slots=True)
class _State:
    """State of a TemplateProcess in the process `owner`. lock: held while the worker is used."""

    owner: int = field(default_factory=os.getpid)
    lock: threading.Lock = field(default_factory=threading.Lock)
    worker: _Worker | None = None


def _end(process: subprocess.Popen[bytes], link: socket.socket, owner: int) -> None:
    link.close()
    if os.getpid() != owner:
        process.returncode = 0  # the worker belongs to the parent of this fork
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
    # -P: import no modules from the working directory or the worker's folder.
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
