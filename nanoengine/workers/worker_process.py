"""The first and the last lines that a worker process runs: it greets its driver, watches it, calls
the entry, and reports an exception. processes.py starts it. Imports no torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import select
import socket
import sys
import threading
import traceback

from nanoengine.errors import EngineError
from nanoengine.workers.channel import ERROR, HELLO, Channel, pidfd_of

FAILED = 70  # the exit code after an exception (EX_SOFTWARE)
MAX_TRACEBACK = 1 << 16  # characters
CHECK_MS = 200  # between looks at the parent where there are no pidfds


def main(link: int, driver: int) -> None:
    """Run a worker until its driver says STOP.

    link: the descriptor of this end of the socketpair. driver: the process id of the parent.
    """
    faulthandler.enable()  # a crash leaves its stack in the last lines
    channel = Channel(socket.socket(fileno=link))
    os.set_inheritable(link, False)
    _watch(driver, channel)
    try:
        channel.progress()
        entry, hello = _hello(channel)
        module, _, name = entry.partition(":")
        getattr(importlib.import_module(module), name)(channel, hello)
    except BaseException as error:  # whatever it is, the driver should know
        _report(channel, error)


def _hello(channel: Channel) -> tuple[str, dict[str, object]]:
    kind, body = channel.receive()
    if kind != HELLO:
        raise EngineError(f"a damaged message between processes: its kind is {kind}, not {HELLO}")
    said = json.loads(body)
    return said["entry"], said["hello"]


def _report(channel: Channel, error: BaseException) -> None:
    """Tell the driver of the exception that is being handled, and exit."""
    told = {
        "error": type(error).__name__,
        "text": str(error),
        "traceback": traceback.format_exc()[-MAX_TRACEBACK:],
    }
    traceback.print_exc()
    with contextlib.suppress(OSError):
        channel.send(ERROR, json.dumps(told).encode(), timeout_s=5.0)
    sys.stderr.flush()
    # Threads and destructors of what has failed may never end.
    os._exit(FAILED)


def _watch(driver: int, channel: Channel) -> None:
    """End this process at once when the driver ends or closes its side.

    By a pidfd and not by PR_SET_PDEATHSIG, which ends a worker when the thread that started it
    ends.
    """
    poll = select.poll()
    poll.register(channel, 0)  # POLLHUP alone: the main thread reads
    pidfd = pidfd_of(driver)
    if pidfd is not None:
        poll.register(pidfd, select.POLLIN)

    def watch() -> None:
        while os.getppid() == driver and not poll.poll(CHECK_MS if pidfd is None else None):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="nanoengine-driver-watch", daemon=True).start()
