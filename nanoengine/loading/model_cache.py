"""The user's cache of converted models: a folder is either complete or absent.

Owns folder names, hashes, the manifest, the locks between processes and what is removed when the
disk's share is full. Knows nothing of the files' content: callers pass a function that fills an
empty folder.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import xxhash

from nanoengine.config.engine import GIB
from nanoengine.devices.cache_folders import (
    LIMIT_VARIABLE,
    cache_folders,
    cache_limit,
    disk_bytes,
    replace_file,
)
from nanoengine.devices.logs import LONG_WORK
from nanoengine.errors import ModelLoadError

logger = logging.getLogger(__name__)

MANIFEST = "nanoengine.json"
MANIFEST_VERSION = 2
STAGING_PREFIX = ".building-"
STALE_SECONDS = 24 * 3600
# A folder that was asked for is safe this long, until its engine has loaded it and holds it.
GRACE_SECONDS = 3600
READ_BYTES = 8 << 20
NO_FOLDER = "there is neither a home nor a temporary folder"
# A file changed within this time may change again without a new timestamp.
SETTLED_NS = 1_000_000_000


def file_digest(path: Path) -> str:
    """xxh3_128 of a file's content, in hex. It detects damage, not an attacker."""
    digest = xxhash.xxh3_128()
    buffer = bytearray(READ_BYTES)
    with path.open("rb", buffering=0) as file:
        while num_read := file.readinto(buffer):
            digest.update(memoryview(buffer)[:num_read])
    return digest.hexdigest()


def remembered_digest(path: Path) -> str:
    """`file_digest`, remembered while place, size and times of the file stay the same."""
    status = path.stat()
    times = f"{status.st_mtime_ns}/{status.st_ctime_ns}"
    asked = f"{path.resolve()}/{status.st_ino}/{status.st_size}/{times}"
    name = f".digest-{xxhash.xxh3_128_hexdigest(os.fsencode(asked))}"
    for root in _roots():
        try:
            digest = (root / name).read_text(encoding="ascii")
        except (OSError, ValueError):
            continue
        if re.fullmatch("[0-9a-f]{32}", digest):
            return digest
    digest = file_digest(path)
    if time.time_ns() - status.st_ctime_ns > SETTLED_NS:
        _remember(name, digest)
    return digest


def joint_digest(paths: Sequence[Path]) -> str:
    """`remembered_digest` of one file, or of several in this order."""
    digests = [remembered_digest(path) for path in paths]
    return digests[0] if len(digests) == 1 else xxhash.xxh3_128_hexdigest("".join(digests).encode())


def _remember(name: str, digest: str) -> None:
    try:
        replace_file(_writable_root() / name, digest)
    except (OSError, ModelLoadError) as error:
        logger.info("cannot store a digest: %s", error)


def cached_folder(name: str, build: Callable[[Path], str]) -> Path:
    """The folder `name` of the cache, built if it is missing or damaged.

    `build` fills an empty folder and returns a one-line description of it (see `description`). Only
    one process builds at a time; a folder gets its name only when it is complete.
    When the converted models take more than `cache_limit`, those that were not used for the
    longest time are removed, but none that an engine has loaded.
    Raises ModelLoadError if no cache folder can be written, ConfigError for a bad limit, and the
    errors of `build`.
    """
    for root in _roots():
        if is_whole(root / name):
            _mark_used(root / name)
            return root / name
    root, limit = _writable_root(), cache_limit()
    with _lock(root / f".{name}.lock") as is_locked:
        if not is_whole(root / name):  # another process may have built it meanwhile
            remove_leftovers(root, name if is_locked else None)
            _build(root, name, build)
        _mark_used(root / name)
    _make_room(root, limit)
    return root / name


def is_whole(folder: Path) -> bool:
    """Whether there is a manifest and every file matches it: the size is equal, and the file is
    older than the manifest or its hash is equal.
    """
    manifest = _read_manifest(folder)
    if manifest is None:
        return False
    try:
        listed_at = (folder / MANIFEST).stat().st_mtime_ns
        files = manifest["files"].items()
        return all(_is_as_listed(folder / name, entry, listed_at) for name, entry in files)
    except (OSError, KeyError, TypeError, AttributeError):
        return False


def _is_as_listed(path: Path, entry: Mapping[str, Any], listed_at: int) -> bool:
    status = path.stat()
    if status.st_size != entry["size"]:
        return False
    is_untouched = status.st_mtime_ns == entry["mtime_ns"] and status.st_mtime_ns < listed_at
    return bool(is_untouched or file_digest(path) == entry["xxh3_128"])


def description(folder: Path) -> str | None:
    """The description that `build` returned for this folder; None outside the cache."""
    manifest = _read_manifest(folder)
    return None if manifest is None else str(manifest.get("description"))


@dataclass(frozen=True, slots=True)
class Conversion:
    """A folder of the cache. last_used: seconds since the epoch."""

    folder: Path
    description: str
    num_bytes: int
    last_used: float


def conversions() -> list[Conversion]:
    """All converted models, those that were not used for the longest time first."""
    found = [each for root in _roots() for each in _conversions_in(root)]
    return sorted(found, key=lambda each: each.last_used)


def _conversions_in(root: Path) -> Iterator[Conversion]:
    for path in root.glob("*"):
        line = description(path)
        if line is None or path.name.startswith("."):  # unfinished
            continue
        mark = _use_mark(path)
        times = [each.stat().st_mtime for each in (path, mark) if each.exists()]
        yield Conversion(path, line, disk_bytes(path), max(times, default=0.0))


def remove_conversion(folder: Path) -> bool:
    """Remove a folder of the cache; False, and nothing happens, while an engine has it loaded."""
    with _lock(_use_mark(folder), waits=False) as is_free:
        if is_free:
            _remove_at_once(folder)
        return is_free


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Keep a folder of the cache from being removed; any other folder is left alone."""
    if description(folder) is None:
        yield
        return
    with _lock(_use_mark(folder), is_shared=True):
        yield
    _mark_used(folder)


def _use_mark(folder: Path) -> Path:
    """The file whose time says when the folder was last used, and whose lock says that it is."""
    return folder.parent / f".{folder.name}.use.lock"


def _mark_used(folder: Path) -> None:
    with suppress(OSError):  # a cache that only others may write
        _use_mark(folder).touch()


def _make_room(root: Path, limit: int) -> None:
    """Remove the least recently used folders until the others take at most `limit` bytes."""
    found = sorted(_conversions_in(root), key=lambda each: each.last_used)
    total = sum(each.num_bytes for each in found)
    for each in found:
        if total <= limit or time.time() - each.last_used < GRACE_SECONDS:
            break
        if remove_conversion(each.folder):
            total -= each.num_bytes
            logger.info("removed the converted model %s: the cache is full", each.folder.name)
    if total > limit:
        logger.warning(
            "converted models in %s take %.1f GiB, more than the %.1f GiB of %s: they are in use",
            root,
            total / GIB,
            limit / GIB,
            LIMIT_VARIABLE,
        )


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_known = isinstance(content, dict) and content.get("version") == MANIFEST_VERSION
    return content if is_known else None


def _build(root: Path, name: str, build: Callable[[Path], str]) -> None:
    try:
        staging = Path(tempfile.mkdtemp(prefix=f"{STAGING_PREFIX}{name}-", dir=root))
        try:
            _write_manifest(staging, build(staging))
            _install(staging, root / name)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except ModelLoadError:
        raise
    except OSError as error:
        raise ModelLoadError(
            f"cannot write the converted model to {root}: {error}; free some space there "
            "(nanoengine models rm NAME) or set XDG_CACHE_HOME to another folder"
        ) from error


def _write_manifest(folder: Path, line: str) -> None:
    files = {path.name: _entry(path) for path in sorted(folder.iterdir())}
    content = {"version": MANIFEST_VERSION, "description": line, "files": files}
    (folder / MANIFEST).write_text(json.dumps(content, indent=1), encoding="utf-8")


def _entry(path: Path) -> dict[str, Any]:
    status = path.stat()
    return {
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "xxh3_128": file_digest(path),
    }


def _install(staging: Path, final: Path) -> None:
    """Rename a finished folder to its name, and replace a damaged folder of that name.

    Without working locks another process may have been faster; its folder is kept.
    """
    if is_whole(final):
        return
    if final.exists():
        _remove_at_once(final)
    try:
        os.rename(staging, final)
    except OSError:
        if not is_whole(final):
            raise


def _remove_at_once(folder: Path) -> None:
    """It first gets the name of an unfinished one, even on a full disk: nobody sees half of it."""
    aside = folder.with_name(f"{STAGING_PREFIX}{folder.name}-{uuid.uuid4().hex}")
    os.replace(folder, aside)
    shutil.rmtree(aside, ignore_errors=True)


def remove_leftovers(root: Path, own: str | None) -> None:
    """Remove what killed processes left: unfinished folders whose build holds no lock any more, and
    all that are a day old. own: the folder whose lock the caller holds.
    """
    for path in root.glob(f"{STAGING_PREFIX}*"):
        name = path.name.removeprefix(STAGING_PREFIX).rpartition("-")[0]
        try:
            is_stale = time.time() - path.stat().st_mtime > STALE_SECONDS
        except FileNotFoundError:
            continue
        if is_stale or (name and name == own):
            shutil.rmtree(path, ignore_errors=True)
        elif name:
            with _lock(root / f".{name}.lock", waits=False) as is_free:
                if is_free:
                    shutil.rmtree(path, ignore_errors=True)


def _roots() -> list[Path]:
    """Folders that may hold converted models, the user's cache first; none that others fill."""
    return [root for root in _places() if not _is_others(root)]


def _places() -> list[Path]:
    return [folder / "models" for folder in cache_folders()]


def _is_others(root: Path) -> bool:
    """Whether other users than this one and root may write to the folder."""
    if not hasattr(os, "getuid"):  # Windows keeps folders of a user apart
        return False
    try:
        status = root.stat()
    except OSError:
        return False
    user = os.getuid()
    return bool(status.st_mode & 0o022) or (user != 0 and status.st_uid not in (user, 0))


@cache
def _warn_once(text: str) -> None:
    logger.warning(text)


def _writable_root() -> Path:
    problems = []
    for root in _places():
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            if _is_others(root):
                raise PermissionError(errno.EPERM, "other users may write to it (chmod go-w)")
            with tempfile.TemporaryFile(dir=root):
                pass
        except OSError as error:
            problems.append(f"{root}: {error.strerror}")
            continue
        if problems:
            _warn_once(f"cannot write {problems[0]}; converted models go to {root}")
        return root
    raise ModelLoadError(
        f"no folder for converted models can be written ({'; '.join(problems) or NO_FOLDER}); "
        "set XDG_CACHE_HOME to a folder of yours"
    )


@contextmanager
def _lock(path: Path, waits: bool = True, is_shared: bool = False) -> Iterator[bool]:
    """Lock `path` against other processes; the system unlocks it when a process dies. False if it
    is not locked: without `waits` because another process has it, else where there are no locks.
    """
    try:
        import fcntl  # Windows has none: two processes may both build, which is only slower
    except ImportError:
        yield False
        return
    how = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    with ExitStack() as opened:
        try:
            file = opened.enter_context(path.open("a"))
            try:
                fcntl.flock(file, how | fcntl.LOCK_NB)
            except BlockingIOError:
                if not waits:
                    raise
                logger.info("waiting for another process, which has %s", path, extra=LONG_WORK)
                fcntl.flock(file, how)
        except OSError as error:  # some network file systems have no locks
            if waits:
                logger.info("no lock on %s: %s", path, error)
            yield False
            return
        yield True
