"""When Ctrl-C must not raise KeyboardInterrupt, or not at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Ctrl-C ends the process at once, as SIGTERM does; for imports. Inside them a
    KeyboardInterrupt may be lost, and with it the lock for which imports of other threads wait.
    """
    if not _raises():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def noted_ctrl_c() -> Iterator[Callable[[], None]]:
    """Ctrl-C is noted, and raises KeyboardInterrupt where the block calls what it gets, or at its
    end: Python drops one that is raised in a destructor. A second Ctrl-C raises it at once.
    """
    num_noted = 0

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal num_noted
        num_noted += 1
        if num_noted > 1:
            raise KeyboardInterrupt

    def check() -> None:
        if num_noted:
            raise KeyboardInterrupt

    if not _raises():
        yield check
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    check()


def _raises() -> bool:
    """Whether Ctrl-C raises KeyboardInterrupt in this thread."""
    is_pythons = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return is_pythons and threading.current_thread() is threading.main_thread()
