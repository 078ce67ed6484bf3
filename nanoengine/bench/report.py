"""Parts that the reports of all benchmarks share."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch

import nanoengine
from nanoengine.errors import ConfigError


def versions(*packages: str) -> dict[str, str | None]:
    """Versions behind a report's figures, with those of `packages` (None: not installed)."""
    found: dict[str, str | None] = {
        "nanoengine": nanoengine.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def check_file(flag: str, path: str | Path | None) -> None:
    """Raise ConfigError for a file that could not be written after the run."""
    if path is not None and Path(path).is_dir():
        raise ConfigError(f"{flag} {path} is a folder; give a file in it")
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder for such a file")
    if path is not None:
        is_new = not Path(path).exists()
        try:
            Path(path).open("a").close()
        except OSError as error:
            raise ConfigError(f"{flag} {path} cannot be written: {error.strerror}") from error
        if is_new:
            Path(path).unlink()


def first_difference(ids: Sequence[int], other: Sequence[int] | None) -> int | None:
    """The first position at which two sequences differ; None if equal or if `other` is None."""
    if other is None or list(ids) == list(other):
        return None
    pairs = enumerate(zip(ids, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(ids), len(other)))
