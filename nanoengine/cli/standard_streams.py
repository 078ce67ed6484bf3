"""The command's stdin, stdout and stderr where they are missing or take nothing."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

STDERR = 2  # its number


def open_missing_streams() -> None:
    """Give a process that was started without stdin, stdout or stderr empty ones. Otherwise the
    next files get their numbers, and what libraries print goes into those.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - until Python ends


class _MayBeFull(io.FileIO):
    """Drops what cannot be written: nobody can be told."""

    def write(self, data: Any) -> int:
        """Write; an error of the file counts as written."""
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def let_stderr_fail() -> None:
    """From now on a full disk behind stderr, or a reader that has left, ends no command: an answer
    is worth more than the lines beside it.
    """
    file = io.BufferedWriter(_MayBeFull(STDERR, "w", closefd=False))
    encoding = sys.stderr.encoding
    sys.stderr = io.TextIOWrapper(file, encoding, "backslashreplace", line_buffering=True)
