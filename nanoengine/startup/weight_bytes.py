"""What the weights of a model take, or the part of them that a rank holds, from their shapes and
the forms in which its files have them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nanoengine.config.model import ModelConfig
from nanoengine.errors import ConfigError
from nanoengine.kernels.packed_weight import GROUP
from nanoengine.models.latent import held_share
from nanoengine.models.make_codes import EMBEDDINGS, FORMAT, becomes_codes
from nanoengine.models.shard import EMBEDDINGS_OF_LAYERS, Shard
from nanoengine.models.stored_codes import FORMATS, HELD_BYTES, NEVER_CODES, TAKEN_APART
from nanoengine.models.weight_shapes import in_float, weight_shapes

# Dtypes of 16 bits in files, and codes whose numbers fit no 16 bits.
NARROW = frozenset(("BF16", "F16"))
BECOME_WIDE = frozenset(("INT4", "INT8", "FP8", "NVFP4", "NF4"))
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightForm:
    """How weights are held. dtype: of activations, and of numbers unless these fit fewer bits.
    forms: as of StoredWeights. makes_codes: quantization="int8". keeps_codes: matrices that are
    codes in files stay so. packs: as of LayerOps.
    """

    dtype: torch.dtype
    forms: Mapping[str, str]
    makes_codes: bool
    keeps_codes: bool
    packs: bool

    def codes_of(self, name: str, shape: Shape) -> str:
        """The key of FORMATS in which a tensor is held; "" if it is numbers."""
        if self.makes_codes:
            return FORMAT if becomes_codes(name, shape) else ""
        stored = self.forms.get(name, "")
        is_kept = self.keeps_codes and len(shape) == 2 and not name.endswith(NEVER_CODES)
        return stored if is_kept and stored in FORMATS else ""

    def bytes_of(self, name: str, shape: Shape, model: ModelConfig) -> float:
        """Of one tensor, or a rank's part of it."""
        count = math.prod(shape)
        if codes := self.codes_of(name, shape):
            weights, _ = FORMATS[codes]
            return count * HELD_BYTES[codes] / weights
        if name.endswith(in_float(model)):
            return 4.0 * count
        if model.latent is not None and name.endswith(TAKEN_APART):
            count = int(count * held_share(model.latent))
        share = self._narrow_share(name, shape, model)
        return count * (self.dtype.itemsize - 2 * share)

    def _narrow_share(self, name: str, shape: Shape, model: ModelConfig) -> float:
        """The share of a tensor's numbers that are held in 16 bits where activations have 32."""
        stored = self.forms.get(name, "")
        # A GGUF becomes bfloat16 as a whole, or what cannot stay codes becomes float32 here.
        becomes_narrow = stored in FORMATS and stored not in BECOME_WIDE and not self.keeps_codes
        is_narrow = stored in NARROW or becomes_narrow
        if not (self.packs and self.dtype is torch.float32 and is_narrow and len(shape) == 2):
            return 0.0
        if (latent := model.latent) is not None and name.endswith(TAKEN_APART):
            keys = latent.nope_dim * (latent.nope_dim % GROUP == 0)
            values = latent.value_dim * (latent.row_dim % GROUP == 0)
            return (keys + values) / latent.kv_dim
        return float(shape[1] % GROUP == 0)


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Of the weights that a rank has. active: of them, of a token's experts and of all that is no
    expert. read: of these, those that a decode step reads: of embeddings it takes a row.
    """

    held: int
    active: int
    read: int


def weight_bytes(model: ModelConfig, shard: Shard, form: WeightForm) -> WeightBytes:
    """Of this part of the model."""
    shapes = shard.shapes(weight_shapes(model), model)
    found = {name: form.bytes_of(name, shape, model) for name, shape in shapes.items()}
    head = 0.0  # that has the embeddings' numbers
    if model.tie_word_embeddings:
        head = found[EMBEDDINGS] * len(shard.part(model.vocab_size)) / model.vocab_size
    are_codes = bool(form.codes_of(EMBEDDINGS, shapes[EMBEDDINGS]))
    # Ranks hold all embeddings, and what they pack of them once more (ShardedOps.tied).
    copied = head if shard.size > 1 and (form.packs or are_codes) else 0.0
    share = model.experts.top_k / model.experts.count if model.experts else 1.0
    active = sum(size * (share if ".experts." in name else 1) for name, size in found.items())
    tables = found[EMBEDDINGS] + found.get(EMBEDDINGS_OF_LAYERS, 0.0)
    held = sum(found.values()) + copied
    return WeightBytes(int(held), int(active + copied), int(active - tables + head))


def bytes_of_numbers(model: ModelConfig, itemsize: int) -> int:
    """Of the whole model, all of whose weights are numbers of so many bytes."""
    return itemsize * sum(map(math.prod, weight_shapes(model).values()))


def no_codes(method: str) -> ConfigError:
    """The error about a quantization that leaves all weights numbers."""
    lacks = "is codes of a GGUF" if method == "gguf" else "has rows of whole blocks of 32 inputs"
    return ConfigError(f"quantization={method!r}: no weight {lacks}; leave it out")


def layer_matrices(model: ModelConfig, experts_only: bool = False) -> dict[str, tuple[int, int]]:
    """The matrices of layers that may be codes, or of their experts, with their shapes."""
    part = ".experts." if experts_only else ".layers."
    return {
        name: (shape[0], shape[1])
        for name, shape in weight_shapes(model).items()
        if len(shape) == 2 and part in name and not name.endswith(NEVER_CODES)
    }
