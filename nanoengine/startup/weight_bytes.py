"""What the weights of a model take, or the part of them that a rank holds, from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from nanoengine.config.model import ModelConfig
from nanoengine.errors import ConfigError
from nanoengine.models.make_codes import EMBEDDINGS, FORMAT, becomes_codes
from nanoengine.models.shard import EMBEDDINGS_OF_LAYERS, WHOLE, Shard
from nanoengine.models.stored_codes import FORMATS, HELD_BYTES, NEVER_CODES, ROUTERS
from nanoengine.models.weight_shapes import in_float, weight_shapes

# Of "layers" and of "ends", the embedding and the head: weights by their format in a GGUF.
CodeCounts = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class WeightForm:
    """How weights are held. itemsize: of their numbers. quantization: as of EngineConfig. packs: as
    of LayerOps.

    codes: bytes of a weight with quantization="gguf", in "layers", in "ends", and of "numbers" that
    are never codes; without it, of "experts" and of "others" in layers, if they stay codes.
    """

    itemsize: int
    quantization: str | None
    codes: Mapping[str, float]
    packs: bool

    def bytes_of(
        self, name: str, shape: tuple[int, ...], never: tuple[str, ...], wide: tuple[str, ...]
    ) -> float:
        """Of one tensor. never: ends of names that are not codes; wide: that are float32."""
        if name.endswith(wide):
            return math.prod(shape) * 4
        place = "layers" if ".layers." in name else "ends"
        is_matrix = len(shape) == 2 and not name.endswith(ROUTERS)
        is_coded = is_matrix and not name.endswith(never)
        each = float(self.itemsize)
        if self.quantization == "int8":
            each = HELD_BYTES[FORMAT] / FORMATS[FORMAT][0] if becomes_codes(name, shape) else each
        elif self.quantization == "gguf":
            each = self.codes[place if is_coded else "numbers"]
        elif self.quantization is None and is_coded and place == "layers":
            each = self.codes.get("experts" if ".experts." in name else "others", each)
        return math.prod(shape) * each


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
    never, wide = (*NEVER_CODES, *model.not_codes), in_float(model)
    shapes = shard.shapes(weight_shapes(model), model)
    found = {name: form.bytes_of(name, shape, never, wide) for name, shape in shapes.items()}
    head = 0.0  # that has the embeddings' numbers
    if model.tie_word_embeddings:
        head = found[EMBEDDINGS] * len(shard.part(model.vocab_size)) / model.vocab_size
    are_codes = found[EMBEDDINGS] != math.prod(shapes[EMBEDDINGS]) * form.itemsize
    # Ranks hold all embeddings, and what they pack of them once more (ShardedOps.tied).
    copied = head if shard.size > 1 and (form.packs or are_codes) else 0.0
    share = model.experts.top_k / model.experts.count if model.experts else 1.0
    active = sum(size * (share if ".experts." in name else 1) for name, size in found.items())
    tables = found[EMBEDDINGS] + found.get(EMBEDDINGS_OF_LAYERS, 0.0)
    held = sum(found.values()) + copied
    return WeightBytes(int(held), int(active + copied), int(active - tables + head))


def bytes_of_numbers(model: ModelConfig, itemsize: int) -> int:
    """Of the whole model, all of whose weights are numbers of so many bytes."""
    return weight_bytes(model, WHOLE, WeightForm(itemsize, None, {}, packs=True)).held


def are_codes(codes: CodeCounts) -> bool:
    """Whether any weight is."""
    return any(name in FORMATS for counts in codes.values() for name in counts)


def bytes_of_codes(codes: CodeCounts, itemsize: int) -> dict[str, float]:
    """Of a weight with quantization="gguf", on average, in "layers" and in "ends"."""
    sizes = {name: HELD_BYTES[name] / weights for name, (weights, _) in FORMATS.items()}
    found = dict.fromkeys(("layers", "ends"), float(itemsize))
    for place, counts in codes.items():
        if counts:
            num_bytes = sum(n * sizes.get(name, itemsize) for name, n in counts.items())
            found[place] = num_bytes / sum(counts.values())
    return found


def no_codes(method: str) -> ConfigError:
    """The error about a quantization that leaves all weights numbers."""
    lacks = "is codes of a GGUF" if method == "gguf" else "has rows of whole blocks of 32 inputs"
    return ConfigError(f"quantization={method!r}: no weight {lacks}; leave it out")


def experts_become_codes(model: ModelConfig) -> bool:
    """Whether "int8" leaves none of their products numbers."""
    shapes = {name: shape for name, shape in weight_shapes(model).items() if ".experts." in name}
    return all(becomes_codes(name, shape) for name, shape in shapes.items() if len(shape) == 2)
