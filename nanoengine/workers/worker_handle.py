"""WorkerHandle: one worker process as its driver sees it, from its command line to its last lines.

processes.py holds one for each rank. Imports no torch.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from nanoengine import errors
from nanoengine.errors import ConfigError, EngineError
from nanoengine.workers.channel import ERROR, PROGRESS, REPLY, Channel

LAST_LINES, LAST_BYTES = 20, 1 << 14  # of a worker's stderr that an error shows
EXIT_S = 1.0  # from the end of a worker's connection to its exit
STANDARD = 3  # descriptors below are stdin, stdout and stderr

_PACKAGE = str(Path(errors.__file__).parents[1])
_SCRIPT = str(Path(__file__).with_name("worker_process.py"))


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the workers of an engine were ended: an error that can be raised more than once.

    kind: its class. cause: the traceback in the worker; "" if there is none.
    """

    text: str
    kind: type[EngineError] = EngineError
    cause: str = ""

    def error(self) -> EngineError:
        """A new error of that class and text."""
        error = self.kind(self.text)
        error.__cause__ = EngineError(self.cause) if self.cause else None
        return error


class WorkerHandle:
    """One worker. The watching thread calls `take_in`; `replies` and `heard` are its results.

    heard: when it last sent anything, by time.monotonic.
    """

    def __init__(self, name: str, fds: Sequence[int], shares_stderr: bool) -> None:
        """Start a process, which gets the descriptors `fds`. name: in errors. shares_stderr: it
        writes to this process's stderr, and its errors show no last lines.

        Raises ConfigError if this Python cannot start another one.
        """
        self.replies: deque[bytes] = deque()
        self.heard = time.monotonic()
        self._name = name
        self._told: Failure | None = None
        # A file and no pipe: a pipe may fill, and then the worker waits. It has no name.
        self._stderr: IO[bytes] | None = None
        if not shares_stderr:
            self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        mine, theirs = socket.socketpair()
        self.channel = Channel(mine)
        # Nothing is ever written: the end of all its writers is the end of this process.
        read_end, self._lifeline = os.pipe()
        try:
            self.process = _start((theirs.fileno(), read_end), fds, self._stderr)
        except BaseException:
            self._close()
            raise
        finally:
            theirs.close()
            os.close(read_end)
        self.pidfd = _pidfd(self.process.pid)

    def __str__(self) -> str:
        return self._name

    def close(self) -> None:
        """Close the descriptors of a worker that has ended; twice is fine."""
        if self.channel.fileno() >= 0:
            self._close()
            if self.pidfd is not None:
                os.close(self.pidfd)

    def _close(self) -> None:
        self.channel.close()
        if self._stderr is not None:
            self._stderr.close()
        os.close(self._lifeline)

    def has_ended(self, within_s: float) -> bool:
        """Whether the process ends in that time; what is left of it is then removed."""
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def take_in(self) -> Failure | None:
        """Take in what the worker has sent, up to READ_BYTES; why it failed, if it has ended."""
        try:
            has_sent = self.channel.read()
            while frame := self.channel.next_frame():
                self._take(*frame)
        except EOFError:
            return self._end()
        except EngineError as error:
            return self.failed(f"sent {error}")
        # A process that it started may hold its connection open.
        return None if has_sent or self.process.poll() is None else self._end()

    def failed(self, what: str) -> Failure:
        """A failure of this worker, with its last lines."""
        if self._stderr is None:
            return Failure(f"{self} {what}")
        lines = _last_lines(self._stderr)
        return Failure(f"{self} {what}; " + (f"its last lines:\n{lines}" if lines else "no output"))

    def _take(self, kind: int, body: bytes) -> None:
        self.heard = time.monotonic()
        if kind == REPLY:
            self.replies.append(body)
        elif kind == ERROR:
            self._told = self._as_told(body)
        elif kind != PROGRESS:
            raise EngineError(f"a damaged message between processes: its kind is {kind}")

    def _as_told(self, body: bytes) -> Failure:
        """The failure that the worker reports: of its error's class, if that is one of ours."""
        try:
            told = json.loads(body)
            name, text, traceback = (str(told[key]) for key in ("error", "text", "traceback"))
        except (ValueError, KeyError, TypeError) as error:
            raise EngineError(f"a damaged message between processes: {error}") from error
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, EngineError):
            return Failure(f"{self}: {text}", kind, traceback)
        return Failure(f"{self} failed: {name}: {text}", cause=traceback)

    def _end(self) -> Failure:
        """Why a worker ended whose connection has."""
        if not self.has_ended(EXIT_S):
            return self.failed("closed its connection")
        return self._told or self.failed(_ending(self.process.returncode))


def _last_lines(stderr: IO[bytes]) -> str:
    # pread: the worker writes at the offset of the same open file.
    fd = stderr.fileno()
    size = os.fstat(fd).st_size
    data = os.pread(fd, LAST_BYTES, max(0, size - LAST_BYTES))
    lines = data.decode("utf-8", "replace").splitlines()[-LAST_LINES:]
    return "\n".join(f"  {line}" for line in lines)


def _pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process `pid` ends; None where there are none (a
    build of Python or a sandbox without them): then the end of its connection says it.
    """
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = f"signal {-code}"
    return f"was killed by {name}" + (" (out of memory?)" if code == -signal.SIGKILL else "")


def _start(
    ends: Sequence[int], fds: Sequence[int], stderr: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    """Start a worker that gets these ends of its connection and of its lifeline."""
    # A parent without stdin has one of them there, where the worker's stdin will be.
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, STANDARD) for end in ends]
    try:
        return subprocess.Popen(
            _command(ends),
            pass_fds=[*ends, *fds],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            process_group=0,  # Ctrl-C is for the driver, which then ends its step in order
        )
    except OSError as error:
        raise ConfigError(
            f"cannot start a worker process: {error}; sys.executable ({sys.executable!r}) must be "
            "a Python that may be started"
        ) from error
    finally:
        for end in ends:
            os.close(end)


def _command(ends: Sequence[int]) -> list[str]:
    if not sys.executable or getattr(sys, "frozen", False):
        raise ConfigError(
            "several ranks, and a server's engine, run in Python processes of their own, and this "
            f"Python, which is part of another program (sys.executable is {sys.executable!r}), "
            "cannot start one; set sys.executable to a Python with the same packages, or "
            "tensor_parallel_size=1 and no --engine-process"
        )
    # What stands for the working directory stays out, and so does that itself (-P): a torch.py
    # there is none of ours. A checkout that was found there comes last.
    places = [entry for entry in sys.path if os.path.isabs(entry)]
    places += [] if _PACKAGE in places else [_PACKAGE]
    numbers = map(str, (*ends, os.getpid()))
    return [sys.executable, *_flags(), "-P", _SCRIPT, *numbers, *places]


def _flags() -> list[str]:
    """The flags of this Python that change what is imported and how it runs."""
    letters = {
        "B": sys.flags.dont_write_bytecode,
        "E": sys.flags.ignore_environment,
        "I": sys.flags.isolated,
        "O": sys.flags.optimize,
        "S": sys.flags.no_site,
        "s": sys.flags.no_user_site,
    }
    given = [f"-{letter * level}" for letter, level in letters.items() if level]
    return [*given, "-X", f"utf8={sys.flags.utf8_mode}"]
