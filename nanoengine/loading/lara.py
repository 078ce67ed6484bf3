"""Lara 4: where the tensors of its recurrent layers are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nanoengine.config.model import ModelConfig, RecurrentConfig
from nanoengine.loading.checkpoint import Part

_WHOLE = "linear_attn.in_proj.weight"


def lara_parts(model: ModelConfig, names: Iterable[str]) -> Iterator[tuple[str, Part]]:
    """Where tensors lie that `weight_shapes` has other names for: a checkpoint has one for all
    projections of a layer.
    """
    shape = model.recurrent
    if model.architecture != "LaraMiniForCausalLM" or not isinstance(shape, RecurrentConfig):
        return
    heads = shape.num_value_heads
    sizes = {"qkv": shape.channels, "z": heads * shape.value_dim, "b": heads, "a": heads}
    for name in names:
        if not name.endswith(_WHOLE):
            continue
        start, prefix = 0, name.removesuffix("in_proj.weight")
        for part, size in sizes.items():
            yield f"{prefix}in_proj_{part}.weight", Part(name, rows=(start, start + size, 1))
            start += size
