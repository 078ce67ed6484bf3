"""Fixtures of all tests: tiny checkpoints by name, an empty cache.

A test that wants a checkpoint asks for the fixture `tiny` and calls it with a name of TINY; a test
that wants the right answer imports it: `from checkpoints import reference, reference_greedy`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import TINY


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a name of TINY to the checkpoint's folder, built when first asked for."""

    @functools.cache
    def folder_of(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        TINY[name](folder)
        return folder

    return folder_of


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty XDG_CACHE_HOME, for tests of what is put there."""
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`-m ''` runs everything that the machine can run."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
