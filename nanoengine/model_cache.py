"""The user's cache of converted models: folders that are whole or not there.

Owns folder names, hashes, the manifest and the lock between processes. Knows nothing of what is in
the files: a caller hands over a function that fills an empty folder.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from nanoengine.errors import ModelLoadError

logger = logging.getLogger(__name__)

MANIFEST = "nanoengine.json"
MANIFEST_VERSION = 1
STAGING_PREFIX = ".building-"
STALE_SECONDS = 24 * 3600
READ_BYTES = 8 << 20


def file_digest(path: Path) -> str:
    """xxh3_128 of a file's content, in hex. It finds damage; it does not resist an attacker."""
    digest = xxhash.xxh3_128()
    buffer = bytearray(READ_BYTES)
    with path.open("rb", buffering=0) as file:
        while num_read := file.readinto(buffer):
            digest.update(memoryview(buffer)[:num_read])
    return digest.hexdigest()


def cached_folder(name: str, build: Callable[[Path], str]) -> Path:
    """The folder `name` of the cache, built first if it is missing or damaged.

    `build` fills an empty folder and returns one line that says what it made (see `description`).
    One process builds at a time; a folder appears under its name only when it is complete.
    Raises ModelLoadError if no cache folder can be written; errors of `build` pass through.
    """
    for root in _roots():
        if is_whole(root / name):
            return root / name
    root = _writable_root()
    with _lock(root / f".{name}.lock"):
        if not is_whole(root / name):  # another process may have built it meanwhile
            _build(root, name, build)
    return root / name


def is_whole(folder: Path) -> bool:
    """Whether the manifest is there and every file has the size and the hash it lists."""
    manifest = _read_manifest(folder)
    if manifest is None:
        return False
    try:
        return all(
            (folder / name).stat().st_size == entry["size"]
            and file_digest(folder / name) == entry["xxh3_128"]
            for name, entry in manifest["files"].items()
        )
    except (OSError, KeyError, TypeError, AttributeError):
        return False


def description(folder: Path) -> str | None:
    """The line that `build` returned for this folder; None for a folder that is not from the
    cache."""
    manifest = _read_manifest(folder)
    return None if manifest is None else str(manifest.get("description"))


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_known = isinstance(content, dict) and content.get("version") == MANIFEST_VERSION
    return content if is_known else None


def _build(root: Path, name: str, build: Callable[[Path], str]) -> None:
    _remove_leftovers(root)
    staging = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=root))
    try:
        _write_manifest(staging, build(staging))
        _install(staging, root / name)
    except ModelLoadError:
        raise
    except OSError as error:
        raise ModelLoadError(
            f"cannot write the converted model to {root}: {error}; "
            "free some space there or set XDG_CACHE_HOME to another folder"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write_manifest(folder: Path, line: str) -> None:
    files = {
        path.name: {"size": path.stat().st_size, "xxh3_128": file_digest(path)}
        for path in sorted(folder.iterdir())
    }
    content = {"version": MANIFEST_VERSION, "description": line, "files": files}
    (folder / MANIFEST).write_text(json.dumps(content, indent=1), encoding="utf-8")


def _install(staging: Path, final: Path) -> None:
    """Give a finished folder its name, which a damaged one may hold.

    Where locks do not work another process may have been faster; its folder is as good.
    """
    if is_whole(final):
        return
    if final.exists():
        damaged = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=final.parent))
        os.replace(final, damaged / final.name)
        shutil.rmtree(damaged, ignore_errors=True)
    try:
        os.rename(staging, final)
    except OSError:
        if not is_whole(final):
            raise


def _remove_leftovers(root: Path) -> None:
    """What killed processes left behind a day ago or earlier."""
    for path in root.glob(f"{STAGING_PREFIX}*"):
        try:
            is_stale = time.time() - path.stat().st_mtime > STALE_SECONDS
        except FileNotFoundError:
            continue
        if is_stale:
            shutil.rmtree(path, ignore_errors=True)


def _roots() -> list[Path]:
    """Where converted models may be, the user's cache first."""
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    cache = configured if configured.is_absolute() else Path.home() / ".cache"
    roots = [cache / "nanoengine" / "models"]
    fallback = _fallback_root()
    return roots if fallback is None else [*roots, fallback]


def _fallback_root() -> Path | None:
    """A folder of this user among the temporary files; None if somebody else could have filled
    it."""
    uid = os.getuid() if hasattr(os, "getuid") else 0
    root = Path(tempfile.gettempdir()) / f"nanoengine-{uid}"
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        status = root.lstat()
    except OSError:
        return None
    is_private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o022
    return root if is_private and status.st_uid == uid else None


def _writable_root() -> Path:
    problems = []
    for root in _roots():
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=root):
                pass
        except OSError as error:
            problems.append(f"{root}: {error.strerror}")
            continue
        if problems:
            logger.warning("cannot write %s; converted models go to %s", problems[0], root)
        return root
    raise ModelLoadError(
        f"no folder for converted models can be written ({'; '.join(problems)}); "
        "set XDG_CACHE_HOME to a folder of yours"
    )


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold `path` alone among processes; the system lets go when a process dies."""
    try:
        import fcntl  # not there on Windows, where two processes may both build: slower, not wrong
    except ImportError:
        yield
        return
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems have no locks
            logger.info("no lock on %s: %s", path, error)
        yield
