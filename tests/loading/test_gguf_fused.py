"""Queries, keys and values that a GGUF has in one tensor: llama.cpp's converter, `--fuse-qkv`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as QuantType
from gguf_model import GGUFModel
from test_gguf_layouts import converted, model_of

from nanoengine.errors import CorruptModelError
from nanoengine.loading.checkpoint import CheckpointReader
from nanoengine.models.stored_codes import numbers_of

Tiny = Callable[[str], Path]


def fuse(model: GGUFModel) -> int:
    """The file's form; returns how many tensors became one."""
    num_fused = 0
    for name in [name for name in model.tensors if ".attn_q." in name]:
        names = [name, name.replace("attn_q.", "attn_k."), name.replace("attn_q.", "attn_v.")]
        if all(each in model.tensors for each in names):
            parts = [model.tensors.pop(each) for each in names]
            model.tensors[name.replace("attn_q.", "attn_qkv.")] = np.concatenate(parts)
            num_fused += 1
    return num_fused


# Rows in another order, with biases, beside recurrent layers and gates, of layers that differ, in
# layers of both kinds and in recurrent ones.
FUSED = {"llama": 3, "llama-bias": 6, "qwen3.5": 1, "gemma4-shared": 3, "lfm2": 1}
FUSED |= {"falcon-h1": 3, "kimi-linear": 2, "ling": 2}


@pytest.mark.parametrize("keeps_codes", [False, True])
@pytest.mark.parametrize(("name", "fused"), FUSED.items())
def test_tensors_are_those_of_a_file_with_three(
    tiny: Tiny, tmp_path: Path, name: str, fused: int, keeps_codes: bool
) -> None:
    apart, together = model_of(tiny(name), name), model_of(tiny(name), name)
    assert fuse(together) == fused
    for model in (apart, together):
        for each, values in model.tensors.items():
            if values.ndim == 2 and values.shape[1] % 32 == 0:
                model.types[each] = QuantType.Q8_0
    folders = [
        converted(model, tmp_path / part, keeps_codes=keeps_codes)
        for part, model in (("apart", apart), ("together", together))
    ]
    assert (folders[0] / "config.json").read_text() == (folders[1] / "config.json").read_text()
    with CheckpointReader(folders[0]) as ours, CheckpointReader(folders[1]) as theirs:
        assert ours.names() == theirs.names()
        for each in ours.names():
            assert ours.code_format(each) == theirs.code_format(each)
            numbers = (numbers_of(of.weight(each, torch.float32)) for of in (ours, theirs))
            assert torch.equal(*numbers), each


def test_one_without_rows_of_queries_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    model = GGUFModel(tiny("llama"))
    fuse(model)
    name = "blk.1.attn_qkv.weight"
    model.tensors[name] = model.tensors[name][:64]  # keys and values have 32 each
    with pytest.raises(CorruptModelError, match=r"'blk\.1\.attn_qkv\.weight' has 64 rows, and"):
        converted(model, tmp_path / "out")


def test_one_of_a_layer_that_is_not_there_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    model = GGUFModel(tiny("llama"))
    fuse(model)
    model.tensors["blk.7.attn_qkv.weight"] = model.tensors["blk.0.attn_qkv.weight"]
    with pytest.raises(CorruptModelError, match="layer 7 of 3 layers"):
        converted(model, tmp_path / "out")


def test_one_of_a_layer_without_keys_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    model = model_of(tiny("nemotron-h"), "nemotron-h")
    fuse(model)
    model.settings["nemotron_h.attention.head_count_kv"] = [2, 0, 0, 0, 0, 0, 0]
    with pytest.raises(CorruptModelError, match=r"'blk\.3\.attn_qkv\.weight' .*have 0 each"):
        converted(model, tmp_path / "out")
