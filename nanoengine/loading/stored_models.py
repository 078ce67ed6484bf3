"""Lists the models on this machine and removes one: the hub's cache, installed packages, converted
GGUFs. Reads config.json and the metadata of GGUFs, never weights; downloads nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from nanoengine.config.model import ModelConfig
from nanoengine.errors import ModelLoadError, ModelNotFoundError
from nanoengine.loading import model_cache
from nanoengine.loading.find_model import is_outdated, read_config_of
from nanoengine.loading.model_config import read_model_config
from nanoengine.loading.packaged import PACKAGED, installed_files, joined_name
from nanoengine.loading.stored_weights import StoredWeights, read_stored

HUB, PACKAGE, CONVERTED = "hub", "package", "converted"
OUTDATED = (
    "another version of nanoengine made it, and this one converts its GGUF anew; remove it with "
    "nanoengine models rm and this name"
)


@dataclass(frozen=True, slots=True)
class StoredModel:
    """name: what LLM takes. kind: HUB, PACKAGE or CONVERTED. origin: the package, or what was
    converted. config: None if the model cannot run, and then `problem` says why, or if its shape
    is known only after its first use. weights: how its files hold them, with config.
    """

    name: str
    kind: str
    path: Path
    num_bytes: int
    origin: str = ""
    config: ModelConfig | None = None
    weights: StoredWeights | None = None
    problem: str = ""


def stored_models() -> list[StoredModel]:
    """All of them, sorted by kind and name."""
    found = [*_packaged(), *_in_hub_cache(), *_converted()]
    kinds = (PACKAGE, HUB, CONVERTED)
    return sorted(found, key=lambda each: (kinds.index(each.kind), each.name))


def remove_model(model: StoredModel) -> None:
    """Remove a model and nothing else from the hub's cache or from that of converted models.

    Raises ModelNotFoundError if it is gone, ModelLoadError if it belongs to a package or an engine
    has it loaded.
    """
    if model.kind == PACKAGE:
        raise ModelLoadError(
            f"{model.name} belongs to a package; remove it with: pip uninstall {model.origin}"
        )
    if model.kind == HUB:
        _remove_from_hub_cache(model)
    elif not model_cache.remove_conversion(model.path):
        raise ModelLoadError(f"{model.name} is loaded by a process; end that first")


def _packaged() -> Iterator[StoredModel]:
    """Models that have a name, and other GGUF files of installed packages."""
    named: set[Path] = set()
    joined = {each.folder.name: each.folder for each in model_cache.conversions()}
    for name, model in PACKAGED.items():
        files = [path.resolve() for path in installed_files(name)]
        if not files:
            continue
        named |= set(files)
        size = sum(path.stat().st_size for path in files)
        made = StoredModel(name, PACKAGE, files[0], size, " ".join(model.packages))
        if not model.sha256:
            yield _with_config(made, files[0])
        elif joined_name(name) in joined:
            yield _with_config(made, joined[joined_name(name)] / f"{name}.gguf")
        else:  # nobody can read a part, and a list joins none
            yield made
    for package in metadata.distributions():
        record = package.read_text("RECORD")
        if record is not None and ".gguf" not in record.lower():
            continue  # to parse the record of each package takes long
        for file in package.files or ():
            if file.suffix.lower() != ".gguf":
                continue
            path = Path(str(package.locate_file(file))).resolve()
            if path not in named and path.is_file():
                made = StoredModel(str(path), PACKAGE, path, path.stat().st_size, package.name)
                yield _with_config(made, path)


def _converted() -> Iterator[StoredModel]:
    for each in model_cache.conversions():
        made = StoredModel(
            str(each.folder), CONVERTED, each.folder, each.num_bytes, each.description
        )
        if is_outdated(each.folder):
            yield replace(made, problem=OUTDATED)
            continue
        # The joined parts of a package are a GGUF.
        ggufs = sorted(each.folder.glob("*.gguf"))
        yield _with_config(made, ggufs[0] if ggufs else each.folder)


def _in_hub_cache() -> Iterator[StoredModel]:
    found = _hub_cache()
    for repository in found.repos if found else ():
        if repository.repo_type == "model":
            yield _hub_model(repository)


def _hub_cache() -> Any:
    """What the hub's client finds in its cache; None if there is no cache."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        return scan_cache_dir(constants.HF_HUB_CACHE)
    except (CacheNotFound, ValueError):
        return None


def _hub_model(repository: Any) -> StoredModel:
    revisions = sorted(
        repository.revisions, key=lambda each: ("main" in each.refs, each.last_modified)
    )
    made = StoredModel(repository.repo_id, HUB, Path(repository.repo_path), repository.size_on_disk)
    if not revisions:
        return replace(made, problem="its download was not finished")
    folder = Path(revisions[-1].snapshot_path)
    missing = _missing_weights(folder)
    return replace(made, problem=missing) if missing else _with_config(made, folder)


def _missing_weights(folder: Path) -> str:
    """Why a snapshot's weights cannot be read; "" if they are there, or if it has no config.json,
    about which the reader of config.json says more.
    """
    if not (folder / "config.json").is_file():
        return ""
    index = folder / "model.safetensors.index.json"
    there = {path.name for path in folder.glob("*.safetensors")}
    try:
        wanted = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        wanted = set()
    if missing := wanted - there:
        return f"{len(missing)} of its {len(wanted)} weight files are not downloaded"
    if there:
        return ""
    for pattern, what in (
        ("*.gguf", "it holds GGUF files; give the file itself: {}"),
        ("*.bin", "its weights are pickled ({}), which are never opened; take a safetensors copy"),
        ("*.pth", "its weights are pickled ({}), which are never opened; take a safetensors copy"),
    ):
        if files := sorted(folder.glob(pattern)):
            return what.format(files[0] if pattern == "*.gguf" else files[0].name)
    return "its weights are not downloaded; loading it does that"


def _with_config(model: StoredModel, place: Path) -> StoredModel:
    """With its shape, or with the reason why it cannot run."""
    try:
        config = read_model_config(place) if place.is_dir() else read_config_of(place)
        weights = read_stored(place, config)
    except ModelLoadError as error:
        text = str(error)
        for prefix in (f"{place / 'config.json'}: ", f"{place}: "):
            text = text.removeprefix(prefix)
        return replace(model, problem=text)
    return replace(model, config=config, weights=weights)


def _remove_from_hub_cache(model: StoredModel) -> None:
    found = _hub_cache()
    own = [each for each in found.repos if Path(each.repo_path) == model.path] if found else []
    if not own:
        raise ModelNotFoundError(f"{model.name} is not in the hub's cache any more")
    # Of this repository alone: a mirror may have a commit of the same name.
    hashes = [revision.commit_hash for revision in own[0].revisions]
    replace(found, repos=frozenset(own)).delete_revisions(*hashes).execute()
