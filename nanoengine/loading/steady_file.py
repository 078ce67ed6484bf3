"""SteadyFile: a file that must stay as it is while weights are read from it.

Files are mapped. To read a page that another program has cut off ends this process (SIGBUS), and a
page that was written anew is of another model: no error would follow.
"""

from __future__ import annotations

from pathlib import Path

from nanoengine.errors import CorruptModelError


class SteadyFile:
    """The size and the time of a file when this object was made."""

    def __init__(self, path: Path) -> None:
        """Raises CorruptModelError if there is no such file."""
        self._path = path
        self._then = self._now()

    def check(self) -> None:
        """Raise CorruptModelError if the file is another one now; a few microseconds. What changes
        right after this check is not seen.
        """
        now = self._now()
        if now != self._then:
            raise CorruptModelError(
                f"{self._path} was changed while it was loaded (from {self._then[0]} to {now[0]} "
                "bytes): load it again when nobody writes to it, and give a new version a new file"
            )

    def _now(self) -> tuple[int, int]:
        """Bytes, and nanoseconds since the epoch; no inode, which some network files change."""
        try:
            status = self._path.stat()
        except OSError as error:
            raise CorruptModelError(f"{self._path} cannot be read: {error.strerror}") from error
        return status.st_size, status.st_mtime_ns
