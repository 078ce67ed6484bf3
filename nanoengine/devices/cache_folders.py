"""Finds folders for this user's converted models and compiled kernels, writes files there, and says
how large they may get.

We load machine code and weights from there. A temporary folder that another user may have filled is
not used, and the working directory, which may come from anywhere, is never used.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from nanoengine.config.engine import GIB, MAX_GIB
from nanoengine.errors import ConfigError, shown

LIMIT_VARIABLE, DEFAULT_LIMIT_GIB = "NANOENGINE_CACHE_GIB", 64.0
TEMPORARY_VARIABLES = ("TMPDIR", "TEMP", "TMP")
TEMPORARY_FOLDERS = ("/tmp", "/var/tmp")


def cache_folders() -> Iterator[Path]:
    """Folders to try, best first: the user's cache, which may not exist yet, then private folders
    in the temporary directories.

    The cache is in $XDG_CACHE_HOME, or in ~/.cache if that is no absolute path: the XDG base
    directory specification then ignores it. A container may have neither.
    """
    configured, home = os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~")
    if os.path.isabs(configured):
        yield Path(configured, "nanoengine")
    elif os.path.isabs(home):
        yield Path(home, ".cache", "nanoengine")
    named = (os.environ.get(name, "") for name in TEMPORARY_VARIABLES)
    for parent in dict.fromkeys((*named, *TEMPORARY_FOLDERS)):
        folder = Path(parent, f"nanoengine-{_user()}")
        if os.path.isabs(parent) and os.path.isdir(parent) and is_private(folder):
            yield folder


def folder_in_use() -> Path | None:
    """The first of them that files can be written to; None: there is none. Makes none in the user's
    cache.
    """
    for folder in cache_folders():
        there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
        if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
            return folder
    return None


def is_private(folder: Path) -> bool:
    """Make the folder if it is missing; True if this user owns it and no other may write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except (OSError, ValueError):
        return False
    is_closed = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o022
    return is_closed and (status.st_uid == _user() or not hasattr(os, "getuid"))


def replace_file(path: Path, text: str) -> None:
    """Write a file of which nobody sees half, and which may be there already. Raises OSError."""
    with replacing(path) as file:
        file.write(text.encode())


@contextmanager
def replacing(path: Path, suffix: str = "") -> Iterator[BinaryIO]:
    """A file that takes the place of another one when it is written whole; none is left of one that
    is not. suffix: of its name until then. Raises OSError.
    """
    prefix = f"{path.name}." if suffix else None
    handle, name = tempfile.mkstemp(suffix, prefix, path.parent)
    try:
        with open(handle, "wb") as file:
            yield file
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


def cache_limit() -> int:
    """Bytes for converted models: $NANOENGINE_CACHE_GIB, or 64 GiB. Raises ConfigError."""
    given = os.environ.get(LIMIT_VARIABLE, "")
    if not given:
        return int(DEFAULT_LIMIT_GIB * GIB)
    try:
        gib = float(given)
    except ValueError:
        gib = -1.0
    if not 0 <= gib < MAX_GIB:
        raise ConfigError(f"{LIMIT_VARIABLE} must be from 0 to {MAX_GIB} GiB, got {shown(given)}")
    return int(gib * GIB)


def disk_bytes(folder: Path) -> int:
    """Bytes of all files in a folder and below; 0 if there is none."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # gone meanwhile
                total += os.lstat(os.path.join(parent, name)).st_size
    return total
