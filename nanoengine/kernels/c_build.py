"""Compiles C files once, caches the libraries with a checksum, and loads them."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import xxhash

from nanoengine.devices.cache_folders import cache_folders, is_private
from nanoengine.devices.logs import LONG_WORK
from nanoengine.errors import EngineError

logger = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("cpu_kernels.c")
CFLAGS = (
    *("-std=gnu11", "-O3", "-march=native", "-fopenmp"),
    *("-fno-math-errno", "-ffp-contract=fast", "-shared", "-fPIC"),
)
_BUILD_TIMEOUT_S = 120
# Beside the compiler a shell reads until the process that builds is gone, and then kills the group.
_WITH_THE_BUILDER = """
exec 3<&0 </dev/null
{ read -r line <&3; kill -s KILL 0; } >/dev/null 2>&1 &
exec "$@" 3<&-
"""
# Libraries of older versions and other flags: this many stay, and all that were used today.
_KEPT_LIBRARIES, _KEPT_SECONDS = 8, 24 * 3600
_SEAL_BYTES = 16


class KernelBuildError(EngineError):
    """The CPU kernels could not be compiled or loaded; the engine can run without them."""


class Source(NamedTuple):
    """A C file of this folder, and flags beside CFLAGS."""

    path: Path
    extra_cflags: tuple[str, ...] = ()


def find_compiler() -> str:
    """Path of $CC, gcc, cc or clang, the first that exists. Raises KernelBuildError."""
    for name in (os.environ.get("CC"), "gcc", "cc", "clang"):
        if name and (path := shutil.which(name)):
            return path
    raise KernelBuildError("no C compiler found ($CC, gcc, cc, clang): install gcc")


def load_library(
    source: Path, folder: Path | None = None, extra_cflags: tuple[str, ...] = ()
) -> ctypes.CDLL:
    """Compile `source` (or take it from the cache) and load it. Raises KernelBuildError.

    folder: where the library is kept (None: the first cache folder that is ours alone and works).
    """
    problem = KernelBuildError(
        "no folder for compiled kernels can be written: set XDG_CACHE_HOME to one"
    )
    name = _library_name(find_compiler(), extra_cflags, source)
    with closing(_kernel_folders(folder, name)) as folders:
        for each in folders:
            try:
                path = build_library(each, extra_cflags, source, name)
                return ctypes.CDLL(str(path))
            except OSError as error:  # full, read-only, or mounted noexec
                problem = KernelBuildError(f"compiled kernels cannot be kept in {each}: {error}")
                problem.__cause__ = error
    raise problem


def build_together(*sources: Source) -> None:
    """Compile at the same time what no cache folder has, if that is more than one library. What
    goes wrong is left for load_library to meet again.
    """
    with suppress(KernelBuildError, OSError):
        compiler, folders = find_compiler(), [*_own_folders()]
        names = [_library_name(compiler, flags, path) for path, flags in sources]
        missing = [
            source
            for source, name in zip(sources, names, strict=True)
            if not any(_is_whole(folder / name) for folder in folders)
        ]
        if len(missing) < 2 or not folders:
            return
        # Who interrupts this thread does not wait for the others: they end with the process.
        first, *others = ((folders[0], source) for source in missing)
        threads = [Thread(target=_try, args=each, daemon=True) for each in others]
        for thread in threads:
            thread.start()
        _try(*first)
        for thread in threads:
            thread.join()


def _try(folder: Path, source: Source) -> None:
    with suppress(KernelBuildError, OSError):
        build_library(folder, source.extra_cflags, source.path)


def _kernel_folders(wanted: Path | None, name: str) -> Generator[Path]:
    """`wanted` if it is given; else the cache folders that are ours alone, then a temporary one.
    First come those that have the library `name`: that a disk is full shows after a long build.
    """
    if wanted is not None:
        yield wanted
        return
    yield from (folder for folder in _own_folders() if _is_whole(folder / name))
    yield from _own_folders()
    with suppress(OSError), tempfile.TemporaryDirectory(prefix="nanoengine-") as temporary:
        yield Path(temporary)


def _own_folders() -> Iterator[Path]:
    for folder in (cache / "kernels" for cache in cache_folders()):
        if is_private(folder) and os.access(folder, os.W_OK):
            yield folder


def build_library(
    folder: Path,
    extra_cflags: tuple[str, ...] = (),
    source: Path = SOURCE,
    name: str | None = None,
) -> Path:
    """Compile `source` into `folder` unless that very build is already there; returns the .so.

    name: of the library, as _library_name gives it; None: not known yet.
    Two processes may build at once: each writes its own temporary file and renames it. A file torn
    by a crash is built again. Raises KernelBuildError when there is no compiler or it fails, and
    OSError when the folder cannot be used.
    """
    compiler = find_compiler()
    target = folder / (name or _library_name(compiler, extra_cflags, source))
    if _is_whole(target):
        with suppress(OSError):  # a folder that only others may write
            os.utime(target)  # says when it was last used
    else:
        _remove_old(folder)
        logger.info("compiling kernels, once: 5 to 20 seconds ...", extra=LONG_WORK)
        _compile([compiler, *CFLAGS, *extra_cflags], source, target)
    return target


def _remove_old(folder: Path) -> None:
    """Remove libraries that nobody used for long, and what killed compilers left."""
    times: dict[Path, float] = {}
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another process is compiling, too
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                times[path] = status.st_mtime
    libraries = sorted((path for path in times if path.suffix == ".so"), key=times.__getitem__)
    recent = libraries[-_KEPT_LIBRARIES:]
    for path, used in times.items():
        if path not in recent and time.time() - used > _KEPT_SECONDS:
            path.unlink(missing_ok=True)


def _is_whole(path: Path) -> bool:
    """Whether the file ends with the hash of the rest: loading half a library is a bus error."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return content[-_SEAL_BYTES:] == xxhash.xxh3_128_digest(content[:-_SEAL_BYTES])


def _library_name(compiler: str, extra_cflags: tuple[str, ...], source: Path) -> str:
    """A hash of everything that the machine code depends on."""
    found = os.stat(compiler)  # to ask it for its version would take longer than all the rest
    version = f"{os.path.realpath(compiler)} {found.st_size} {found.st_mtime_ns}".encode()
    sources = [source, *sorted(source.parent.glob("*.h"))]
    content = [path.read_bytes() for path in sources]
    command = " ".join([compiler, *CFLAGS, *extra_cflags])
    parts = [*content, command.encode(), version, cpu_flags()]
    return xxhash.xxh3_128_hexdigest(b"\0".join(parts)) + ".so"


def cpu_flags() -> bytes:
    """What -march=native means on this CPU; machines may share the cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}".encode()
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")


def _compile(command: list[str], source: Path, target: Path) -> None:
    handle, temporary = tempfile.mkstemp(dir=target.parent, suffix=".tmp")
    try:
        os.close(handle)
        _run([*command, str(source), "-o", temporary, "-lm"], target.parent)
        with open(temporary, "r+b") as file:
            # No loader reads what follows the end of an ELF file.
            file.write(xxhash.xxh3_128_digest(file.read()))
        os.replace(temporary, target)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _run(command: list[str], folder: Path) -> None:
    """Run a compiler; folder: for its own temporary files. Raises KernelBuildError, and OSError if
    it found no room there.
    """
    environment = os.environ | {"TMPDIR": str(folder), "LC_ALL": "C"}
    reader, writer = os.pipe()  # nothing is written: that it is open says that this process lives
    try:
        # A group of its own: gcc has children, which would go on when it is killed.
        with subprocess.Popen(
            ["/bin/sh", "-c", _WITH_THE_BUILDER, "sh", *command],
            stdin=reader,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            process_group=0,
        ) as process:
            try:
                told = process.communicate(timeout=_BUILD_TIMEOUT_S)[1].decode(errors="replace")
            except BaseException:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"cannot run {command[0]}: {error}") from error
    finally:
        os.close(reader)
        os.close(writer)
    for code in (errno.ENOSPC, errno.EDQUOT):
        if process.returncode != 0 and os.strerror(code) in told:
            raise OSError(code, os.strerror(code))
    if process.returncode != 0:
        tail = told.strip()[-2000:]
        raise KernelBuildError(f"{command[0]} failed with status {process.returncode}: {tail}")
