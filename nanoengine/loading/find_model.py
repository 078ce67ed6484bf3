"""Finds the folder of a model by its name."""

from __future__ import annotations

import difflib
import json
import logging
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from nanoengine.config.engine import A_MODEL
from nanoengine.config.model import ModelConfig
from nanoengine.devices.logs import LONG_WORK
from nanoengine.errors import (
    ConfigError,
    ModelLoadError,
    ModelNotFoundError,
    UnsupportedModelError,
    shown,
)
from nanoengine.loading import model_cache
from nanoengine.loading.gguf.convert import CONVERTER_VERSION, convert_gguf, read_gguf_config
from nanoengine.loading.gguf.parts import names_beside
from nanoengine.loading.hub import cached_folder, fetch_config, hub_folder, is_hub_id
from nanoengine.loading.model_config import read_model_config
from nanoengine.loading.packaged import PACKAGED, packaged_gguf
from nanoengine.loading.refused import about_name
from nanoengine.models.stored_codes import OF_GGUF

logger = logging.getLogger(__name__)
MAX_HUB_ID = 200  # characters, twice what the hub allows


def resolve_model(name: str | Path, keeps_codes: bool = False) -> Path:
    """The Hugging Face folder of a model. `name` is such a folder, a .gguf file, a name in PACKAGED
    or a hub id ("organisation/model"). keeps_codes: of a GGUF, see `convert_gguf`.

    A GGUF is converted once into the user's cache (see `model_cache.py`); this takes seconds. A hub
    model is downloaded once into the hub's cache.
    Raises ModelNotFoundError if there is no such model, other ModelLoadErrors for a bad GGUF.
    """
    path = given_path(name)
    if path.is_dir():
        return path
    if (gguf := gguf_of(name)) is not None:
        return _convert_once(gguf, keeps_codes)
    if _may_be_at_the_hub(str(name)):
        return hub_folder(str(name))
    _raise_not_found(str(name))


def read_config_of(name: str | Path) -> ModelConfig:
    """The shape of a model, see `config_folder`. Raises ModelLoadError."""
    with config_folder(name) as folder:
        return read_model_config(folder)


@contextmanager
def config_folder(name: str | Path) -> Iterator[Path]:
    """A folder with the config.json of a model, made of the metadata if it is a GGUF: reads no
    weights, converts nothing, downloads config.json alone. Raises ModelLoadError.
    """
    path = given_path(name)
    if path.is_dir():
        yield path
        return
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        gguf = gguf_of(name)
        if gguf is not None:
            (folder / "config.json").write_text(json.dumps(read_gguf_config(gguf)))
        elif _may_be_at_the_hub(str(name)):
            folder = fetch_config(str(name), folder)
        else:
            _raise_not_found(str(name))
        yield folder


def gguf_of(name: str | Path) -> Path | None:
    """The GGUF that the model of this name is; None if it is another one. Raises ModelLoadError."""
    if not is_gguf(name):
        return None
    path = given_path(name)
    gguf = path if path.is_file() else packaged_gguf(str(name))
    if gguf.suffix.lower() != ".gguf":
        raise UnsupportedModelError(
            f"{gguf} is a {gguf.suffix or 'nameless'} file; a model is a Hugging Face folder "
            "or a .gguf file"
        )
    return gguf


def local_folder(name: str | Path) -> Path | None:
    """The folder on this machine of a model that is no GGUF: the one of this name, or that in the
    hub's cache. None: there is none.
    """
    path = given_path(name)
    if path.is_dir():
        return path
    return cached_folder(str(name)) if _may_be_at_the_hub(str(name)) else None


def _may_be_at_the_hub(name: str) -> bool:
    """Whether this is a hub id of weights that are downloaded: not of a collection of GGUFs."""
    return len(name) <= MAX_HUB_ID and is_hub_id(name) and not name.lower().endswith("gguf")


def given_path(name: str | Path) -> Path:
    """`name` as a path. Raises ModelNotFoundError if it is no valid path or access is denied."""
    try:
        path = Path(name).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelNotFoundError(
            f"there is no model at {shown(str(name))}, which cannot be a path: {reason}"
        ) from error
    return path


def describe_weights(folder: Path) -> str:
    """Describe the weights in `folder` for the plan: "Q4_1 GGUF, dequantised to bfloat16"."""
    return model_cache.description(folder) or "safetensors"


def is_dequantised(folder: Path) -> bool:
    """Whether `folder` is made of a GGUF whose codes became numbers."""
    kind, _, rest = describe_weights(folder).partition(" ")
    return kind in OF_GGUF and "dequantised" in rest


def is_gguf(name: str | Path) -> bool:
    """Whether the model of this name is a GGUF. Raises ModelNotFoundError as resolve_model."""
    return given_path(name).is_file() or str(name) in PACKAGED


def is_outdated(folder: Path) -> bool:
    """Whether a converter of another version made this folder of the cache; then no GGUF becomes it
    any more.
    """
    version = re.search(r"-v(\d+)(?:-codes)?$", folder.name)
    return version is not None and int(version[1]) != CONVERTER_VERSION


def _convert_once(path: Path, keeps_codes: bool) -> Path:
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", path.stem)[:64].lstrip(".")
    try:
        kept = "-codes" if keeps_codes else ""
        parts = [path, *filter(Path.is_file, names_beside(path))]
        key = f"{model_cache.joint_digest(parts)}-v{CONVERTER_VERSION}{kept}"
    except OSError as error:
        raise ModelLoadError(
            f"{error.filename or path} cannot be read: {error.strerror}"
        ) from error

    def convert(target: Path) -> str:
        logger.info("converting %s (once)", path, extra=LONG_WORK)
        return convert_gguf(path, target, keeps_codes)

    return model_cache.cached_folder(f"{stem}-{key}", convert)


def _raise_not_found(name: str) -> NoReturn:
    close = difflib.get_close_matches(name[:MAX_HUB_ID].lower(), PACKAGED, cutoff=0.6)
    if close:
        raise ModelNotFoundError(f"there is no model {name!r}; did you mean {close[0]!r}?")
    names = ", ".join(PACKAGED)
    about = about_name(name[:MAX_HUB_ID]) or f"give {A_MODEL}, or one of the names {names}"
    raise ModelNotFoundError(f"there is no model at {shown(name)}: {about}")


def find_model(name: str, load_format: str, keeps_codes: bool = False) -> Path:
    """The folder of a model from `resolve_model`, if it has the wanted format.

    Raises ModelLoadError, and ConfigError for another format.
    """
    folder = resolve_model(name, keeps_codes)
    is_given = folder == given_path(name) or model_cache.description(folder) is None
    check_format(name, load_format, "safetensors" if is_given else "gguf")
    return folder


def check_format(name: str, load_format: str, found: str) -> None:
    """Raise ConfigError for a model with another format than was asked for."""
    if load_format in ("safetensors", "gguf") and load_format != found:
        is_what = {"safetensors": "a folder; give the .gguf file", "gguf": "GGUF; give a folder"}
        raise ConfigError(f"load_format={load_format!r}, but {name} is {is_what[found]}")
