"""EngineProcess: an engine in a process of its own, so that HTTP, tokenising and events never take
the interpreter from its steps.

It starts and ends the process (by workers/); remote_engine.py talks to it. Imports no torch.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import Any

from nanoengine.devices.logs import PACKAGE
from nanoengine.errors import EngineClosedError, EngineError
from nanoengine.serving.engine import Engine
from nanoengine.serving.engine_messages import error_of, message_of
from nanoengine.serving.prompts import Facts
from nanoengine.serving.remote_engine import RemoteEngine
from nanoengine.workers.processes import WorkerProcesses

ENTRY = "nanoengine.serving.engine_worker:main"
NAME = "the engine process"
WHY_S = 5.0  # from the end of its connection to what is known of its end


class EngineProcess:
    """A model loaded in another process, for one server; `close` ends the process."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Returns when the model is loaded. settings: AsyncLLM's arguments, all of JSON.

        Raises what AsyncLLM raises, InvalidPromptError if the model has no tokenizer, EngineError
        if the process ends.
        """
        self._link, theirs = socket.socketpair()
        said = {"settings": dict(settings), "link": theirs.fileno(), "log_level": _log_level()}
        try:
            self._processes = WorkerProcesses(
                ENTRY,
                1,
                said,
                [theirs.fileno()],
                partial(_end, self._link),
                NAME,
                shares_stderr=True,
            )
        except BaseException:
            self._link.close()
            raise
        finally:
            theirs.close()
        try:
            self._engine = RemoteEngine(self._link, self._first_message(), self._why_ended)
        except BaseException:
            with suppress(ProcessLookupError):  # it would load the model to the end
                os.kill(self.pid, signal.SIGTERM)
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._processes.pids[0]

    def connected(self) -> AbstractAsyncContextManager[tuple[Engine, Facts]]:
        """Talk to the engine on this event loop; once only."""
        return self._engine.connected()

    def close(self) -> None:
        """End the process; closing twice is fine."""
        self._link.close()
        self._processes.close()

    def _first_message(self) -> dict[str, Any]:
        with self._link.makefile("rb") as lines, suppress(ConnectionError):
            line = lines.readline()
            if line.endswith(b"\n"):
                told = message_of(line)
                if "error" in told:
                    raise error_of(told["error"])
                return told
        raise self._why_ended()

    def _why_ended(self) -> EngineError:
        """Why the process says nothing more."""
        try:
            self._processes.check(WHY_S)
        except EngineError as error:
            if error.__cause__ is not None:  # it told of an exception, which is for the log
                return error
            return EngineClosedError(f"{error}; start the server again, and see its log")
        return EngineError(f"{NAME} closed its connection")


def _end(link: socket.socket) -> None:
    """End a connection: whoever reads it finds its end."""
    with suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)


def _log_level() -> str | None:
    """The level that `show_logs` was given; None if it was not called."""
    level = logging.getLogger(PACKAGE).level
    return logging.getLevelName(level).lower() if level else None
