"""Loads a model: finds its folder, reads its configuration, and fills a Decoder with its tensors.

Checks sizes before it allocates. Knows nothing of the engine or of how a model fuses its weights.
Never runs code of a checkpoint and never opens pickles.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from nanoengine.config.engine import EngineConfig
from nanoengine.config.model import ModelConfig
from nanoengine.errors import ModelLoadError
from nanoengine.loading.checkpoint import CheckpointReader, Part, check_names, ignorable_tensors
from nanoengine.loading.experts_json import PACKED_EXPERTS, Listing, expert_parts
from nanoengine.loading.find_model import describe_weights
from nanoengine.loading.fp8 import Fp8Reader, fp8_block
from nanoengine.loading.kimi import kimi_parts
from nanoengine.loading.lara import lara_parts
from nanoengine.loading.lora import Change, changed, read_adapter
from nanoengine.loading.mixers import mixer_parts
from nanoengine.loading.model_config import read_model_config
from nanoengine.loading.modelopt import quantization_of
from nanoengine.loading.mtp_names import check_has_mtp, mtp_parts, with_mtp
from nanoengine.loading.nf4 import Nf4Reader, has_nf4
from nanoengine.loading.nvfp4 import Nvfp4Reader, has_nvfp4
from nanoengine.loading.olmo_hybrid import olmo_hybrid_parts
from nanoengine.loading.packed_ints import PackedReader, packed_format
from nanoengine.loading.short_convs import short_conv_parts
from nanoengine.loading.wrappers import about_others, text_config
from nanoengine.models.activations import XIELU_SHAPES
from nanoengine.models.architectures import ARCHITECTURES
from nanoengine.models.assistant import Assistant
from nanoengine.models.decoder import Decoder, Model
from nanoengine.models.draft_model import DraftModel
from nanoengine.models.latent import held_share
from nanoengine.models.layer_ops import LayerOps
from nanoengine.models.make_codes import ENDS, becomes_codes, make_codes
from nanoengine.models.shard import WHOLE, Shard, Sharding
from nanoengine.models.stored_codes import NEVER_CODES, TAKEN_APART, CodedWeight, Weight
from nanoengine.models.weight_shapes import in_float, weight_shapes
from nanoengine.text.checked_json import read_json

DUMMY_ROWS = 256  # that are drawn with one seed
COPIED_BYTES = 1 << 20  # of a tensor; larger ones are packed, or mapped on purpose


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder in memory. `source` describes its weights for the plan.

    config: of the model. part: of this process's part of it, see Shard. weight_bytes: that it
    holds. codes: how many of its tensors are codes, by format. assistant, draft: what guesses for
    it; draft has KV of its own.
    """

    config: ModelConfig
    part: ModelConfig
    decoder: Model
    source: str
    weight_bytes: int
    codes: Mapping[str, int] = field(default_factory=dict)
    assistant: Assistant | None = None
    draft: DraftModel | None = None


def load_model(
    folder: Path,
    settings: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    ops: LayerOps,
    sharding: Sharding | None = None,
) -> LoadedModel:
    """Check and load a model; with load_format "dummy" the weights are random.

    With quantization "int8" weights become codes, from other codes too. Those that a LoRA adapter
    changes are numbers before. sharding: of which a part
    is loaded; None: the whole.

    Raises ModelLoadError for anything wrong with the checkpoint, ConfigError if the model cannot be
    divided so, or has no such head.
    """
    config, shard = read_model_config(folder, settings.max_model_len), WHOLE
    is_dummy, quantization = settings.load_format == "dummy", settings.quantization
    if not is_dummy:
        config = _as_tied(config, folder, dtype)
    if settings.num_mtp:
        config = with_mtp(config)
    if sharding is not None:
        shard, ops = sharding.shard, sharding.sharded(ops, config)
        shard.check(config)
    shapes, part = weight_shapes(config), shard.config(config)
    num_bytes = sum(map(math.prod, shard.shapes(shapes, config).values())) * dtype.itemsize
    made = _FinalWeights(config, device, dtype, quantization == "int8")
    keeps_codes = ops.takes_codes and quantization in (None, "gguf")
    if is_dummy:
        dummy = DummyWeights(config, shard, device, dtype, settings.seed)
        decoder = Decoder(part, lambda name: made.weight(name, dummy.part(name)), device, ops)
        held = made.num_bytes - ops.saved_bytes
        return LoadedModel(config, part, decoder, "random weights", held, made.codes)
    is_wrapped = bool(config.wrapper)
    adapter = None if settings.lora is None else read_adapter(settings.lora)
    with _open(folder, is_wrapped) as reader:
        # Adapters call weights as their files do, or as transformers' classes.
        found = {} if adapter is None else adapter.find(reader, config)
        rename_tensors(config, reader)
        changes = dict[str, Change]()
        if adapter is not None:
            later = adapter.find(reader, config)
            found |= {its: each for its, each in later.items() if not found[its].stored}
            changes = adapter.checked(found, config)
        check_has_mtp(config, reader.names(), reader.folder)
        if isinstance(reader, PackedReader):
            reader.leave_out_zero_biases(shapes)
        check_names(shapes, reader, ignorable_tensors(config, reader.names()))

        def source(name: str) -> Weight:
            is_kept = keeps_codes and not name.endswith(NEVER_CODES)
            stored = reader.weight(name, dtype) if is_kept else reader.numbers(name, dtype)
            stored = changed(reader.part(name), stored, changes)
            return made.weight(name, shard.take(name, stored, config))

        decoder = Decoder(part, source, device, ops)
        origin = describe_weights(folder)
        growth = "" if made.codes else reader.growth(num_bytes)
        if growth:
            origin = f"{origin}; {growth}"
        if adapter is not None:
            origin = f"{origin}; {adapter.describe(changes.values(), settings.tokenizer)}"
    if is_wrapped:
        origin = f"{origin}; {about_others(config.wrapper, reader.others)}"
    held = made.num_bytes - ops.saved_bytes
    return LoadedModel(config, part, decoder, origin, held, made.codes)


class _FinalWeights:
    """Gives weights the form in which they are held, and counts them."""

    def __init__(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, makes_codes: bool
    ) -> None:
        self._device, self._dtype, self._makes_codes = device, dtype, makes_codes
        self._latent, self._in_float = config.latent, in_float(config)
        self.num_bytes = 0
        self.codes = Counter[str]()

    def weight(self, name: str, stored: Weight) -> Weight:
        weight = (
            self._made(name, stored)
            if isinstance(stored, torch.Tensor)
            else stored.to(self._device)
        )
        is_padded = self._latent is not None and name.endswith(TAKEN_APART)
        share = held_share(self._latent) if self._latent is not None and is_padded else 1
        self.num_bytes += int(weight.nbytes * share)
        if isinstance(weight, CodedWeight):
            self.codes.update(weight.formats)
        return weight

    def _made(self, name: str, stored: torch.Tensor) -> Weight:
        if self._makes_codes and becomes_codes(name, tuple(stored.shape)):
            rows = make_codes(stored.to(self._device))
            if rows is not None:
                return CodedWeight((rows,), self._dtype)
        dtype = torch.float32 if name.endswith(self._in_float) else self._dtype
        # A vector that stays as it is would keep all of its file mapped, see CheckpointReader.
        return stored.to(self._device, dtype, copy=stored.nbytes <= COPIED_BYTES)


def _open(folder: Path, is_wrapped: bool) -> CheckpointReader:
    content = read_json(folder / "config.json")
    quantised = quantization_of(folder, text_config(content) or content)
    if has_nvfp4(quantised):
        return Nvfp4Reader(folder, is_wrapped)
    if has_nf4(quantised):
        return Nf4Reader(folder, is_wrapped)
    block, packed = fp8_block(quantised), packed_format(quantised)
    if block is not None:
        return Fp8Reader(folder, is_wrapped, block)
    if packed is not None:
        return PackedReader(folder, is_wrapped, packed)
    return CheckpointReader(folder, is_wrapped)


def open_checkpoint(folder: Path, config: ModelConfig) -> CheckpointReader:
    """The reader of a checkpoint, whose tensors have the names of `weight_shapes`. Raises
    ModelLoadError.
    """
    reader = _open(folder, bool(config.wrapper))
    rename_tensors(config, reader)
    return reader


def rename_tensors(config: ModelConfig, reader: Listing) -> None:
    """Give tensors the names of `weight_shapes`."""
    for usual, own in ARCHITECTURES[config.architecture].names.items():
        reader.rename({n.replace(own, usual): Part(n) for n in reader.names() if own in n})
    reader.rename(_read_embeddings(config, reader))
    reader.rename(mtp_parts(config, reader.names()))
    reader.rename(mixer_parts(config, reader.names()))
    reader.rename(dict(short_conv_parts(config, reader.names())))
    reader.rename(dict(kimi_parts(config, reader.names())))
    reader.rename(dict(olmo_hybrid_parts(config, reader.names())))
    reader.rename(dict(lara_parts(config, reader.names())))
    reader.rename(expert_parts(config, reader))


def _read_embeddings(config: ModelConfig, reader: Listing) -> dict[str, Part]:
    """Of Apertus 1.5, which embeds more tokens than have logits: those of the text's."""
    name, size = ENDS[0], config.vocab_size
    has_more = "vocab_size" in ARCHITECTURES[config.architecture].keys
    if not has_more or name not in reader.names() or reader.shape(name)[:1] <= (size,):
        return {}
    return {name: Part(name, rows=(0, size, 1))}


def _as_tied(config: ModelConfig, folder: Path, dtype: torch.dtype) -> ModelConfig:
    """The model as its tensors have it: an output head that is not the embeddings once more counts,
    even if config.json says that they are one.
    """
    if not config.tie_word_embeddings:
        return config
    with open_checkpoint(folder, config) as reader:
        if not reader.names().issuperset(ENDS):
            return config
        embeddings, head = (reader.numbers(name, dtype) for name in ENDS)
        return replace(config, tie_word_embeddings=torch.equal(embeddings, head))


def code_formats(folder: Path) -> frozenset[str]:
    """The formats of the codes in `folder`, keys of FORMATS, as far as headers say: some of these
    weights may be numbers. None, too, if `load_model` will refuse the folder.
    """
    try:
        with _open(folder, is_wrapped=False) as reader:
            names = reader.names()
            found = reader.codes.union(map(reader.code_format, names)) - {""}
            are_mxfp4 = any(name.endswith(PACKED_EXPERTS) for name in names)
            return found | {"MXFP4"} if are_mxfp4 else found
    except ModelLoadError:
        return frozenset()


class DummyWeights:
    """Random weights, rounded to the dtype that config.json names. Each block of rows has a seed of
    its own, so a rank draws its rows alone.
    """

    def __init__(
        self, config: ModelConfig, shard: Shard, device: torch.device, dtype: torch.dtype, seed: int
    ) -> None:
        self._config, self._shard, self._seed = config, shard, seed
        self._shapes = weight_shapes(config)
        self._generator = torch.Generator(device)
        self._empty = partial(torch.empty, dtype=dtype, device=device)
        self._rounds = dtype is torch.float32 and config.is_stored_in_16_bits

    def part(self, name: str) -> Weight:
        """This rank's part of a tensor."""
        shape = self._shapes[name]
        if name.endswith(("norm.weight", "layer_scalar", *XIELU_SHAPES)):
            return self._shard.take(name, self._empty(shape).fill_(1.0), self._config)
        rows = self._shard.rows(name, self._config)
        if rows is None:
            return self._shard.take(name, self._rows(name, range(shape[0])), self._config)
        return torch.cat([self._rows(name, each) for each in rows])

    def _rows(self, name: str, rows: range) -> torch.Tensor:
        num_rows, *inputs = self._shapes[name]
        drawn = self._empty((len(rows), *inputs))
        for first in range(rows.start // DUMMY_ROWS * DUMMY_ROWS, rows.stop, DUMMY_ROWS):
            block = range(first, min(first + DUMMY_ROWS, num_rows))
            self._generator.manual_seed(zlib.crc32(f"{self._seed} {name} {first}".encode()))
            start, stop = max(first, rows.start), min(block.stop, rows.stop)
            here = drawn[start - rows.start : stop - rows.start]
            is_whole = len(here) == len(block)
            target = here if is_whole else self._empty((len(block), *inputs))
            target.normal_(0, 0.02, generator=self._generator)
            if not is_whole:
                here.copy_(target[start - first : stop - first])
        if self._rounds:
            drawn.copy_(drawn.to(getattr(torch, self._config.stored_dtype)))
        return drawn
