"""GGUFs in several files, as the package gguf and llama-gguf-split write them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf_model import GGUFModel
from safetensors.torch import load_file

from nanoengine.errors import CorruptModelError, ModelNotFoundError, UnsupportedModelError
from nanoengine.loading.find_model import read_config_of, resolve_model
from nanoengine.loading.gguf.convert import convert_gguf, read_gguf_config
from nanoengine.loading.stored_weights import read_stored

Tiny = Callable[[str], Path]


def parts_of(model: GGUFModel, folder: Path, **split: Any) -> list[Path]:
    """The files, in order; of 12 tensors each if nothing else is said."""
    folder.mkdir()
    model.write(folder / "m.gguf", **(split or {"split_max_tensors": 12}))
    return sorted(folder.iterdir())


@pytest.fixture
def parts(tiny: Tiny, tmp_path: Path) -> list[Path]:
    found = parts_of(GGUFModel(tiny("llama")), tmp_path / "parts")
    assert [part.name for part in found] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    return found


@pytest.mark.usefixtures("fresh_cache")
@pytest.mark.parametrize("split", [{}, {"split_max_tensors": 12, "small_first_shard": True}])
@pytest.mark.parametrize("keeps_codes", [False, True])
def test_parts_are_read_as_the_whole_file(
    tiny: Tiny, tmp_path: Path, split: dict[str, Any], keeps_codes: bool
) -> None:
    """The first part may have no tensors."""
    model = GGUFModel(tiny("llama"))
    name = "blk.2.ffn_up.weight"
    model.types = {name: gguf.GGMLQuantizationType.Q8_0}
    whole, first = model.write(tmp_path / "w.gguf"), parts_of(model, tmp_path / "p", **split)[0]
    folders = [resolve_model(path, keeps_codes) for path in (whole, first)]
    assert folders[0] != folders[1]
    theirs, ours = (load_file(folder / "model.safetensors") for folder in folders)
    assert theirs.keys() == ours.keys()
    assert all(theirs[each].equal(ours[each]) for each in theirs)
    for file in ("config.json", "tokenizer.json"):
        assert len({(folder / file).read_text() for folder in folders}) == 1
    config = read_config_of(whole)
    assert read_config_of(first) == config
    assert read_stored(first, config) == read_stored(whole, config)


@pytest.mark.usefixtures("fresh_cache")
def test_another_part_is_another_model(parts: list[Path], tiny: Tiny, tmp_path: Path) -> None:
    """In the cache, too."""
    before = resolve_model(parts[0])
    assert resolve_model(parts[0]) == before
    model = GGUFModel(tiny("llama"))
    name = "blk.2.ffn_up.weight"
    model.tensors[name] = model.tensors[name] * 2
    for part, new in zip(parts, parts_of(model, tmp_path / "new"), strict=True):
        if part.read_bytes() != new.read_bytes():
            assert part != parts[0]
            shutil.copy(new, part)
    after = resolve_model(parts[0])
    assert after != before
    ours = "model.layers.2.mlp.up_proj.weight"
    old, new_rows = (load_file(f / "model.safetensors")[ours] for f in (before, after))
    assert new_rows.equal(2 * old)


@pytest.mark.parametrize("read", [convert_gguf, lambda path, _: read_gguf_config(path)])
def test_a_missing_part_is_named(
    parts: list[Path], tmp_path: Path, read: Callable[[Path, Path], object]
) -> None:
    parts[1].unlink()
    match = r"part 1 of 3 .* and part 2 is not beside it: get m-00002-of-00003\.gguf$"
    with pytest.raises(ModelNotFoundError, match=match):
        read(parts[0], tmp_path)


def test_the_first_part_is_asked_for(parts: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"part 2 of 3 .* first part, m-00001-of-00003"):
        convert_gguf(parts[1], tmp_path)


@pytest.mark.parametrize("name", ["NAME.gguf", "NAME-00001-of-00004.gguf"])
def test_a_name_that_leads_to_no_part_says_how_to_call_it(
    parts: list[Path], tmp_path: Path, name: str
) -> None:
    other = parts[0].rename(tmp_path / name)
    with pytest.raises(UnsupportedModelError, match=r"must end as in NAME-00001-of-00003\.gguf$"):
        convert_gguf(other, tmp_path)


def test_a_file_of_one_part_is_whole(tiny: Tiny, tmp_path: Path) -> None:
    """As after a merge. Its name does not count."""
    model = GGUFModel(tiny("llama"))
    model.settings |= {"split.no": 0, "split.count": 0, "split.tensors.count": 2}
    path = model.write(tmp_path / "m-00001-of-00002.gguf")
    (tmp_path / "out").mkdir()
    convert_gguf(path, tmp_path / "out")


def test_a_part_of_another_model_is_refused(parts: list[Path], tiny: Tiny, tmp_path: Path) -> None:
    other = parts_of(GGUFModel(tiny("qwen3")), tmp_path / "other")
    shutil.copy(other[1], parts[1])
    with pytest.raises(CorruptModelError, match=r"00002.* and not part 2 of 3 .*all parts of one"):
        convert_gguf(parts[0], tmp_path)


def test_parts_in_another_order_are_refused(parts: list[Path], tmp_path: Path) -> None:
    parts[2].replace(parts[1])
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(CorruptModelError, match=r"is part 3 of 3 .* not part 2 of 3"):
        convert_gguf(parts[0], tmp_path)


def test_a_tensor_that_is_in_two_parts_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    model = GGUFModel(tiny("llama"))
    said = 2 * len(model.tensors)
    model.settings |= {"split.no": 0, "split.count": 2, "split.tensors.count": said}
    model.write(tmp_path / "m-00001-of-00002.gguf")
    model.settings["split.no"] = 1
    model.write(tmp_path / "m-00002-of-00002.gguf")
    with pytest.raises(CorruptModelError, match=f"parts have {said} different tensors, but they"):
        convert_gguf(tmp_path / "m-00001-of-00002.gguf", tmp_path)


def test_a_part_that_is_cut_is_named(parts: list[Path], tmp_path: Path) -> None:
    parts[2].write_bytes(parts[2].read_bytes()[:-100])
    with pytest.raises(CorruptModelError, match=r"m-00003-of-00003\.gguf is truncated"):
        convert_gguf(parts[0], tmp_path)
