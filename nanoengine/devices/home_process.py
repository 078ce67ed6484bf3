"""Detects forks: a forked process lacks the threads, and cannot unlock what they hold."""

from __future__ import annotations

import os
import threading

from nanoengine.errors import ForkedProcessError


class HomeProcess:
    """The process that made this object."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """False in a fork of that process."""
        return os.getpid() == self._pid

    def check(self, what: str) -> None:
        """Raise ForkedProcessError in a fork of that process, where `what` cannot be used."""
        if not self.is_here:
            raise ForkedProcessError(
                f"{what} belongs to process {self._pid}, and {os.getpid()} is a fork of it: "
                "threads do not survive a fork, and work on them would never end. Start the new "
                'process by multiprocessing\'s "spawn" and make an LLM in it'
            )


def join(thread: threading.Thread) -> None:
    """Wait for a thread, unless it never began or is the calling one, as in a finalizer."""
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join()
