"""How a model's files hold each of its weights: read from their headers, or from what config.json
says where there are no files. Reads no weights, but for some rows of an output head.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch

from nanoengine.config.model import ModelConfig
from nanoengine.errors import ModelLoadError
from nanoengine.loading.checkpoint import CheckpointReader, Part
from nanoengine.loading.find_model import gguf_of, local_folder
from nanoengine.loading.gguf.convert import read_forms
from nanoengine.loading.left_out import stays_numbers
from nanoengine.loading.loader import open_checkpoint, rename_tensors
from nanoengine.models.make_codes import ENDS
from nanoengine.models.stored_codes import FORMATS, NEVER_CODES
from nanoengine.models.weight_shapes import weight_shapes

NUMBERS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # torch's names -> safetensors'
COMPARED_ROWS = 64  # of a head and of embeddings


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """forms: of the tensors by the names of `weight_shapes`, each a key of FORMATS, or a dtype as
    safetensors names it. has_own_head: its numbers are not those of the embeddings, whatever
    config.json says.
    """

    forms: Mapping[str, str] = field(default_factory=dict)
    is_gguf: bool = False
    has_own_head: bool = False

    @property
    def has_codes(self) -> bool:
        """Whether any weight may stay codes."""
        return any(form in FORMATS for form in self.forms.values())


def read_stored(name: str | Path, model: ModelConfig) -> StoredWeights:
    """Of the model of this name, which resolve_model explains; downloads nothing. model: its shape.
    Raises what read_config_of raises for a GGUF.
    """
    gguf = gguf_of(name)
    if gguf is not None:
        tensors = _Tensors(read_forms(gguf))
        rename_tensors(model, tensors)
        return StoredWeights(tensors.forms, is_gguf=True)
    folder = local_folder(name)
    return said_weights(model) if folder is None else stored_in(folder, model)


@dataclass(slots=True)
class _Tensors:
    """The tensors of a GGUF by Hugging Face's names, none of which is of all experts."""

    forms: dict[str, str]

    def names(self) -> set[str]:
        return set(self.forms)

    def shape(self, name: str) -> tuple[int, ...]:
        return ()

    def rename(self, parts: Mapping[str, Part]) -> None:
        lost = {part.stored for part in parts.values()}
        kept = {name: form for name, form in self.forms.items() if name not in lost}
        self.forms = kept | {name: self.forms[part.stored] for name, part in parts.items()}


def stored_in(folder: Path, model: ModelConfig) -> StoredWeights:
    """Of a folder with a config.json. Where its weights are missing, or damaged, of which loading
    tells, as config.json says.
    """
    try:
        with closing(open_checkpoint(folder, model)) as reader:
            forms = {name: reader.form(name) for name in reader.names()}
            return StoredWeights(forms, has_own_head=_has_own_head(reader, model))
    except ModelLoadError:
        return said_weights(model)


def _has_own_head(reader: CheckpointReader, model: ModelConfig) -> bool:
    if not model.tie_word_embeddings or not reader.names().issuperset(ENDS):
        return False
    rows = torch.arange(COMPARED_ROWS) * model.vocab_size // COMPARED_ROWS
    embeddings, head = (reader.tensor(name)[rows].float() for name in ENDS)
    return not torch.equal(embeddings, head)


def said_weights(model: ModelConfig) -> StoredWeights:
    """As config.json says: matrices of layers are codes, or of experts alone, but for those that
    its lists leave out.
    """
    numbers = NUMBERS.get(model.stored_dtype, "")
    forms = {}
    for name, shape in weight_shapes(model).items():
        in_layers = ".experts." in name if model.codes == "MXFP4" else ".layers." in name
        is_coded = in_layers and len(shape) == 2 and not name.endswith(NEVER_CODES)
        block = FORMATS.get(model.codes, (1, 0))[0]
        is_coded = is_coded and bool(model.codes) and not stays_numbers(name, model.left_out)
        whole = model.codes if is_coded and shape[1] % block == 0 else "F32"
        forms[name] = whole if is_coded else numbers
    return StoredWeights(forms)
