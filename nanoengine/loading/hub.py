"""Gets a model of the Hugging Face hub by its id, through the hub's own client and cache.

Knows no formats: it selects files by name and returns their folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nanoengine.errors import ModelNotFoundError
from nanoengine.loading.modelopt import FILE

# These patterns exclude files that could run code, and second copies of weights. A * is any number
# of folders, too: chat templates may lie in one.
WANTED = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt")
UNWANTED = ("*/*.json", "*/*.safetensors", "consolidated*")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form "organisation/model"."""
    return _HUB_ID.fullmatch(name) is not None


def hub_folder(name: str) -> Path:
    """The folder of the newest version in the hub's cache, downloaded if it is missing there.

    Offline or with HF_HUB_OFFLINE=1 it is the cached version. HF_HUB_CACHE, HF_HOME and HF_TOKEN
    are respected. Raises ModelNotFoundError.
    """
    from huggingface_hub import snapshot_download  # 0.2 s, for hub ids only

    with _as_not_found(name):
        return Path(
            snapshot_download(name, allow_patterns=list(WANTED), ignore_patterns=list(UNWANTED))
        )


def fetch_config(name: str, folder: Path) -> Path:
    """The folder of the model's config.json: the hub's cache, or `folder`, into which it and what
    ModelOpt says beside it are downloaded if it is missing there. The cache gets no model without
    weights. Raises ModelNotFoundError.
    """
    from huggingface_hub import snapshot_download

    with _as_not_found(name):
        cached = cached_folder(name)
        if cached is not None:
            return cached
        # Without a network it fails at once; hf_hub_download tries for 25 s.
        snapshot_download(name, allow_patterns=["config.json", FILE], local_dir=folder)
        if not (folder / "config.json").is_file():
            raise FileNotFoundError("it has no config.json")
        return folder


def cached_folder(name: str) -> Path | None:
    """The folder of the model's config.json in the hub's cache; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found).parent if isinstance(found, str) else None


@contextmanager
def _as_not_found(name: str) -> Iterator[None]:
    """Turns the errors of the hub's client into a ModelNotFoundError."""
    from huggingface_hub import constants

    try:
        yield
    except Exception as error:  # errors of the hub's client, the HTTP client and the system
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        remedy = (
            "HF_HUB_OFFLINE is set: unset it to download"
            if constants.HF_HUB_OFFLINE
            else "check the name and the network, and HF_TOKEN if the model is gated"
        )
        raise ModelNotFoundError(
            f"{name!r} is not a local folder; as a model of the hub it is not in the cache "
            f"{constants.HF_HUB_CACHE} and cannot be downloaded ({reason}): {remedy}; or give a "
            "folder, or set HF_HUB_CACHE to a cache that has it"
        ) from error
