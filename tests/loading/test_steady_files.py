"""Files that another program writes to while they are loaded: an error before a page is read that
is not there, and no model of two halves.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_model import GGUFModel
from safetensors.torch import save_file

from nanoengine.errors import CorruptModelError
from nanoengine.loading.checkpoint import CheckpointReader
from nanoengine.loading.gguf import convert


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def write_over(path: Path) -> None:
    """The same size and other numbers."""
    os.utime(path, (1, 1))  # the clock of files may stand still for some ms
    content = path.read_bytes()
    path.write_bytes(content[:-4] + b"\1\2\3\4")


def replace(path: Path) -> None:
    other = path.with_name("other")
    save_file({"one": torch.zeros(2000), "two": torch.zeros(1)}, other)
    os.replace(other, path)


@pytest.mark.parametrize("change", [cut, write_over, replace, Path.unlink])
def test_a_checkpoint_that_changes_is_read_no_further(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"one": torch.ones(2000), "two": torch.ones(2000)}, path)
    with CheckpointReader(tmp_path) as reader:
        assert reader.tensor("one").sum() == 2000
        change(path)
        with pytest.raises(CorruptModelError, match=r"model\.safetensors (was changed|cannot be)"):
            reader.tensor("two")


def test_the_error_names_both_sizes_and_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"one": torch.ones(2000)}, path)
    size = path.stat().st_size
    with CheckpointReader(tmp_path) as reader:
        cut(path)
        with pytest.raises(
            CorruptModelError, match=rf"from {size} to {size // 2} bytes\): load it"
        ):
            reader.tensor("one")


def test_a_gguf_that_changes_is_not_kept(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the digest of the file that it was; its last tensor counts, too."""
    source, target = GGUFModel(tiny("llama")).write(tmp_path / "model.gguf"), tmp_path / "target"
    target.mkdir()
    write, num_written = convert._write_tensor, 0

    def count(*given: Any) -> None:
        nonlocal num_written
        write(*given)
        num_written += 1
        if num_written == change_at:
            write_over(source)

    monkeypatch.setattr(convert, "_write_tensor", count)
    change_at = 0
    convert.convert_gguf(source, target)
    for change_at in (3, num_written):
        num_written = 0
        with pytest.raises(CorruptModelError, match=r"model\.gguf was changed while it was loaded"):
            convert.convert_gguf(source, target)
        assert num_written == change_at
