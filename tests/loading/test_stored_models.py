"""What lies on this machine: the hub's cache, packages, conversions; what runs; removing one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from gguf_model import GGUFModel
from huggingface_hub import constants

from nanoengine.errors import ModelLoadError, ModelNotFoundError
from nanoengine.loading import packaged
from nanoengine.loading import stored_models as stored
from nanoengine.loading.find_model import resolve_model
from nanoengine.loading.gguf.convert import CONVERTER_VERSION
from nanoengine.loading.model_cache import cached_folder
from nanoengine.loading.packaged import Packaged
from nanoengine.loading.stored_models import StoredModel, remove_model, stored_models

Tiny = Callable[[str], Path]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_cache: Path) -> Path:
    """An empty cache of the hub, no packages with models, no conversions."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(metadata, "distributions", lambda: [])
    monkeypatch.setattr(stored, "PACKAGED", {})
    return tmp_path / "hub"


def cached(hub: Path, name: str, commit: str = COMMIT, ref: str = "main") -> Path:
    """An empty snapshot of a model in the hub's cache."""
    repository = hub / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    (repository / "refs" / ref).write_text(commit)
    return snapshot


def add(snapshot: Path, name: str, content: bytes) -> None:
    """A file as the hub's client keeps it: a link to a blob."""
    blob = snapshot.parents[1] / "blobs" / f"blob-of-{name}"
    blob.write_bytes(content)
    (snapshot / name).symlink_to(f"../../blobs/{blob.name}")


def fill(snapshot: Path, checkpoint: Path) -> None:
    for path in checkpoint.iterdir():
        add(snapshot, path.name, path.read_bytes())


def by_name() -> dict[str, StoredModel]:
    return {model.name: model for model in stored_models()}


def test_nothing_is_listed_where_nothing_is(hub: Path) -> None:
    assert stored_models() == []
    hub.mkdir()
    assert stored_models() == []


def test_a_checkpoint_of_the_hub_is_listed_with_its_size(hub: Path, tiny: Tiny) -> None:
    fill(cached(hub, "org/tiny"), tiny("llama"))
    (found,) = stored_models()
    assert (found.name, found.kind, found.problem) == ("org/tiny", stored.HUB, "")
    assert found.num_bytes == sum(path.stat().st_size for path in tiny("llama").iterdir())
    assert found.config is not None and found.config.num_layers == 3


def test_what_does_not_run_says_why(hub: Path, tiny: Tiny) -> None:
    config = (tiny("llama") / "config.json").read_bytes()
    other = json.dumps(json.loads(config) | {"architectures": ["DbrxForCausalLM"]}).encode()
    index = json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}).encode()
    for name, files, problem in (
        ("config", {"config.json": config}, "are not downloaded; loading it does"),
        ("other", {"config.json": other, "m.safetensors": b""}, "DbrxForCausalLM"),
        ("bin", {"config.json": config, "pytorch_model.bin": b""}, "pytorch_model.bin), which are"),
        ("gguf", {"x.gguf": b""}, "has no config.json; give the file itself: "),
        ("both", {"config.json": config, "x.gguf": b""}, "give the file itself: "),
        (
            "part",
            {"config.json": config, "1.safetensors": b"", "model.safetensors.index.json": index},
            "1 of its 2 weight files are not downloaded",
        ),
        ("bad", {"config.json": b"{", "m.safetensors": b""}, "no valid JSON"),
    ):
        snapshot = cached(hub, f"org/{name}")
        for file, content in files.items():
            add(snapshot, file, content)
        found = by_name()[f"org/{name}"]
        assert found.config is None and problem in found.problem, name
        assert "config.json:" not in found.problem


def test_the_main_revision_counts(hub: Path, tiny: Tiny) -> None:
    fill(cached(hub, "org/tiny"), tiny("llama"))
    add(cached(hub, "org/tiny", COMMIT[::-1], "other"), "newer.txt", b"")
    assert by_name()["org/tiny"].config is not None


def test_removing_takes_one_repository_and_nothing_else(hub: Path, tiny: Tiny) -> None:
    """Also where a mirror has a commit of the same name."""
    for name in ("org/a", "mirror/a", "org/a-b"):
        fill(cached(hub, name), tiny("llama"))
    (hub / "datasets--org--a").mkdir()
    remove_model(by_name()["org/a"])
    assert sorted(path.name for path in hub.iterdir()) == [
        *("datasets--org--a", "models--mirror--a", "models--org--a-b")
    ]
    for name in ("mirror/a", "org/a-b"):
        assert by_name()[name].config is not None
        assert by_name()[name].num_bytes > 1000


def test_a_model_that_is_gone_is_an_error(hub: Path, tiny: Tiny) -> None:
    fill(cached(hub, "org/a"), tiny("llama"))
    (found,) = stored_models()
    remove_model(found)
    with pytest.raises(ModelNotFoundError, match="org/a is not in the hub's cache any more"):
        remove_model(found)


def test_a_conversion_is_listed_and_removed(tmp_path: Path, tiny: Tiny) -> None:
    source = tmp_path / "tiny.gguf"
    GGUFModel(tiny("llama")).write(source)
    folder = resolve_model(source)
    (found,) = stored_models()
    assert (found.name, found.kind, found.path) == (str(folder), stored.CONVERTED, folder)
    assert found.config is not None and "GGUF" in found.origin
    remove_model(found)
    assert stored_models() == [] and not folder.exists() and source.exists()


@pytest.mark.parametrize("end", ["", "-codes"])
def test_a_conversion_of_another_version_says_that_it_is_of_no_use(tiny: Tiny, end: str) -> None:
    def copy(folder: Path) -> str:
        for path in tiny("llama").iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        return "Q8_0 GGUF, codes as stored"

    cached_folder(f"a-{'0' * 32}-v{CONVERTER_VERSION}{end}", copy)
    older = cached_folder(f"b-{'0' * 32}-v{CONVERTER_VERSION - 1}{end}", copy)
    current, found = stored_models()
    assert current.config is not None and current.problem == ""
    assert found.path == older and found.config is None
    assert "another version of nanoengine made it" in found.problem
    remove_model(found)
    assert [model.name for model in stored_models()] == [current.name]


def test_a_joined_gguf_is_listed_with_its_shape(tiny: Tiny) -> None:
    def join(folder: Path) -> str:
        GGUFModel(tiny("llama")).write(folder / "whole.gguf")
        return "parts of a package"

    folder = cached_folder("joined", join)
    (found,) = stored_models()
    assert (found.path, found.origin) == (folder, "parts of a package")
    assert found.config is not None and found.problem == ""


def test_a_package_shows_its_models_and_is_not_removed(
    tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pip leaves it: a folder of metadata that lists the files."""
    GGUFModel(tiny("llama")).write(tmp_path / "tiny.gguf")
    info = tmp_path / "some_model-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\n")
    (info / "RECORD").write_text("tiny.gguf,,\nsome.py,,\ngone.gguf,,\n")
    monkeypatch.setattr(metadata, "distributions", lambda: [metadata.PathDistribution(info)])
    (found,) = stored_models()
    assert (found.name, found.origin) == (str(tmp_path / "tiny.gguf"), "some-model")
    assert found.kind == stored.PACKAGE and found.config is not None
    with pytest.raises(ModelLoadError, match="pip uninstall some-model"):
        remove_model(found)


def test_a_model_with_a_name_is_listed_once_and_its_parts_are_not_joined(
    tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts are known when a first use has joined them."""
    content = GGUFModel(tiny("llama")).write(tmp_path / "tiny.gguf").read_bytes()
    files = {"whole": content, "part_1": content[:1000], "part_2": content[1000:]}
    for package, piece in files.items():
        (tmp_path / "site" / package).mkdir(parents=True)
        (tmp_path / "site" / package / "a.gguf").write_bytes(piece)
    monkeypatch.syspath_prepend(tmp_path / "site")
    known = {
        "one": Packaged(("whole",)),
        "two": Packaged(("part-1", "part-2"), hashlib.sha256(content).hexdigest()),
        "three": Packaged(("whole", "not-installed"), "0"),
    }
    monkeypatch.setattr(packaged, "PACKAGED", known)
    monkeypatch.setattr(stored, "PACKAGED", known)
    info = tmp_path / "site" / "whole-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: whole\nVersion: 1.0\n")
    (info / "RECORD").write_text("whole/a.gguf,,\n")
    monkeypatch.setattr(metadata, "distributions", lambda: [metadata.PathDistribution(info)])
    found = by_name()
    assert found.keys() == {"one", "two"} and found["one"].config is not None
    assert (found["two"].config, found["two"].problem) == (None, "")
    assert found["two"].num_bytes == len(content) and found["two"].origin == "part-1 part-2"
    packaged.packaged_gguf("two")
    assert by_name()["two"].config == found["one"].config
