"""The first and the last lines that a worker process runs: it watches its driver, is greeted, calls
the entry, and reports an exception.

worker_handle.py runs this file as a script. The watch begins before anything of this package is
imported, which takes time in which the driver may be killed. Imports no torch.
"""

import fcntl
import os
import select
import signal
import sys
import threading

FAILED = 70  # the exit code after an exception (EX_SOFTWARE)
MAX_TRACEBACK = 1 << 16  # characters
CHECK_MS = 200  # between looks at the parent where there are no pidfds
REPORT_S = 5.0  # to tell the driver of an exception


def watch(driver: int, link: int) -> None:
    """End this process at once when its parent, the process `driver`, ends, or closes the other end
    of the socket `link`.

    By a pidfd and not by PR_SET_PDEATHSIG, which ends a worker when the thread that started it
    ends.
    """
    poll = select.poll()
    poll.register(link, 0)  # POLLHUP alone: the main thread reads
    try:
        poll.register(os.pidfd_open(driver), select.POLLIN)
        period = None
    except (AttributeError, OSError):  # a build or a sandbox without pidfds; or it has ended
        period = CHECK_MS

    def look() -> None:
        while os.getppid() == driver and not poll.poll(period):
            pass
        os._exit(0)

    threading.Thread(target=look, name="nanoengine-driver-watch", daemon=True).start()


def hang_on(lifeline: int) -> None:
    """Have the system kill this process when the pipe `lifeline` has lost its writer, the driver.

    The watching thread sees it, too, but cannot run while C code holds the interpreter. And it sees
    what the pipe does not: the end of a driver whose fork lives on.
    """
    os.set_inheritable(lifeline, False)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)


def work(link: int) -> None:
    """Call the entry that the driver names, over the socket `link`, until it returns."""
    import atexit
    import gc
    import importlib
    import json
    import socket
    import traceback
    from contextlib import suppress

    from nanoengine.errors import EngineError
    from nanoengine.workers.channel import ERROR, HELLO, Channel

    os.set_inheritable(link, False)
    channel = Channel(socket.socket(fileno=link))
    try:
        channel.progress()
        kind, body = channel.receive()
        if kind != HELLO:
            raise EngineError(f"a damaged message between processes: its kind is {kind}")
        said = json.loads(body)
        module, _, name = said["entry"].partition(":")
        gc.disable()  # of 1.8 s of imports it takes 0.2
        entry = getattr(importlib.import_module(module), name)
        gc.freeze()  # what was imported stays
        gc.enable()
        entry(channel, said["hello"])
    except BaseException as error:  # whatever it is, the driver should know
        traceback.print_exc()
        told = {
            "error": type(error).__name__,
            "text": str(error),
            "traceback": traceback.format_exc()[-MAX_TRACEBACK:],
        }
        with suppress(OSError):
            channel.send(ERROR, json.dumps(told).encode(), REPORT_S)
        sys.stderr.flush()
        os._exit(FAILED)  # threads and destructors of what has failed may never end
    # The driver waits for this end, and taking all modules down takes up to a second.
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(0)


def main(link: int, lifeline: int, driver: int, places: list[str]) -> None:
    """Run a worker. places: the import path of its driver."""
    hang_on(lifeline)
    watch(driver, link)
    sys.path[:] = places
    # A crash leaves its stack in the last lines.
    import faulthandler

    faulthandler.enable()
    work(link)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
