"""Queries, keys and values that a GGUF has in one tensor, as llama.cpp's converter writes them with
`--fuse-qkv`: three tensors are made of it, which are views. Reads no weight.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nanoengine.errors import CorruptModelError
from nanoengine.loading.gguf.families import KIMIS
from nanoengine.loading.gguf.metadata import Metadata

TOGETHER = ("bailingmoe2", "phi3")
_FUSED = re.compile(r"blk\.(0|[1-9]\d{0,4})\.attn_qkv\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a stored tensor, by what a `gguf.ReaderTensor` says of itself."""

    name: str
    data: npt.NDArray[Any]
    shape: npt.NDArray[Any]
    tensor_type: Any
    n_elements: int
    n_bytes: int


def qkv_apart(metadata: Metadata, stored: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors by name, those of queries, keys and values each by its own.

    At Hugging Face Phi-3 and Ling 2 have them together, too, and Qwen's recurrent layers have other
    things under this name: these stay. Raises CorruptModelError where one of the three would have
    no rows.
    """
    if metadata.architecture in TOGETHER:
        return dict(stored)
    apart: dict[str, Any] = {}
    for name, tensor in stored.items():
        match = _FUSED.fullmatch(name)
        if match is None or _is_recurrence(stored, f"blk.{match[1]}"):
            apart[name] = tensor
            continue
        num_rows, of_keys = int(tensor.shape[-1]), _rows_of_keys(metadata, int(match[1]))
        if not 0 < 2 * of_keys < num_rows:
            raise CorruptModelError(
                f"{metadata.path}: tensor {name!r} has {num_rows} rows, and keys and values have "
                f"{of_keys} each; queries, keys and values need one at least"
            )
        ends = (0, num_rows - 2 * of_keys, num_rows - of_keys, num_rows)
        for part, start, end in zip("qkv", ends, ends[1:], strict=False):
            made = _rows(tensor, f"blk.{match[1]}.attn_{part}.{match[2]}", start, end)
            apart[made.name] = made
    return apart


def _is_recurrence(stored: Mapping[str, Any], layer: str) -> bool:
    """Alone in its layer, as Qwen's: those of Falcon-H1 and Kimi Linear have attention's output."""
    return f"{layer}.ssm_a" in stored and f"{layer}.attn_output.weight" not in stored


def _rows(tensor: Any, name: str, start: int, end: int) -> _Rows:
    shape = np.array([*tensor.shape[:-1], end - start])
    data = tensor.data[start:end]
    return _Rows(name, data, shape, tensor.tensor_type, int(np.prod(shape)), int(data.nbytes))


def _rows_of_keys(metadata: Metadata, layer: int) -> int:
    """As many as the values of a layer have."""
    num_layers, num_heads = metadata.number("block_count"), metadata.number("attention.head_count")
    kv_heads = [num_heads] * num_layers
    if metadata.has(f"{metadata.architecture}.attention.head_count_kv"):
        kv_heads = metadata.of_layers("attention.head_count_kv", num_layers, at_least=0)
    if layer >= num_layers:
        raise CorruptModelError(f"{metadata.path}: layer {layer} of {num_layers} layers")
    if metadata.architecture in KIMIS:  # whose recurrent layers alone have all three
        return num_heads * metadata.number("kda.head_dim")
    key = "attention.key_length"
    if metadata.architecture == "gemma4" and metadata.have_windows(num_layers)[layer]:
        key = "attention.key_length_swa"
    head_dim = metadata.number(key, max(metadata.number("embedding_length") // num_heads, 1))
    return kv_heads[layer] * head_dim
