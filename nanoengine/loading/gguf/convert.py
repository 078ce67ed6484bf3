"""One GGUF file into one Hugging Face folder.

settings.py makes its configuration, tokenizer.py its tokenizer; tensors.py names its tensors. These
are read and dequantised by the `gguf` package, codes then rounded to bfloat16. Knows nothing of
caches or of the engine: after the conversion there is one loading path, `loader.py`'s.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from nanoengine.config.engine import GIB
from nanoengine.errors import UnsupportedModelError
from nanoengine.loading.checkpoint import DTYPES, header_bytes
from nanoengine.loading.gguf.grids import CHANGED, held_rows
from nanoengine.loading.gguf.metadata import Metadata
from nanoengine.loading.gguf.parts import names_beside
from nanoengine.loading.gguf.reader import open_gguf
from nanoengine.loading.gguf.settings import check_supported, model_config, sampling_config
from nanoengine.loading.gguf.tensors import TILED, GgufTensor, hf_tensors
from nanoengine.loading.gguf.tokenizer import write_tokenizer
from nanoengine.loading.steady_file import SteadyFile
from nanoengine.models.families import OUT_IS_TILED
from nanoengine.models.stored_codes import CODES_KEY, FORMATS, OF_GGUF, TAKEN_APART

logger = logging.getLogger(__name__)
CONVERTER_VERSION = 10  # part of the cache key: raise it when the written folder changes

CHUNK_ELEMENTS = 4 << 20  # dequantised at a time: 16 MiB of float32
LARGE_GROWTH = 1 << 30  # bytes; a user wants to know of these before they are written


def convert_gguf(source: Path, target: Path, keeps_codes: bool = False) -> str:
    """Fill the empty folder `target` with the model in `source`; returns what the weights are, in
    words. keeps_codes: matrices of a type in stored_codes.OF_GGUF stay codes.

    Writes config.json, generation_config.json, tokenizer.json, tokenizer_config.json and
    model.safetensors. Numbers there have the dtype of the file; codes that do not stay become
    bfloat16, or float32 where others stay and latent attention takes these apart; codes are uint8
    [rows, bytes of a row], and CODES_KEY of its metadata is JSON with the format of each. At most
    16 MiB of float32 are held at a time.
    Raises CorruptModelError for a file that is damaged or changes, UnsupportedModelError for what
    cannot be represented, ModelNotFoundError for a part of a split file that is not beside it.
    """
    files = [SteadyFile(path) for path in (source, *filter(Path.is_file, names_beside(source)))]
    metadata, stored = _described(source, reads_vocabulary=True)
    _check_types(source, stored)
    config = model_config(metadata, stored)
    if keeps_codes:
        config |= _order_of_codes(metadata)
    tensors = list(hf_tensors(metadata, config, stored))
    kind = _main_type(stored)
    stays = keeps_codes and kind in OF_GGUF
    tensors = _as_written(tensors, keeps_codes)
    if not stays:
        _tell_growth(source, target, stored, tensors)
    eos_ids = write_tokenizer(metadata, target, config["vocab_size"])
    _write_json(target / "config.json", config | {"eos_token_id": eos_ids[0] if eos_ids else None})
    sampling = sampling_config(metadata)
    _write_json(target / "generation_config.json", {"eos_token_id": eos_ids} | sampling)
    _write_safetensors(target / "model.safetensors", tensors, files)
    if kind in DTYPES:
        return f"{kind} GGUF"
    return f"{kind} GGUF, {_in_words(kind) if stays else 'dequantised to bfloat16'}"


def read_gguf_config(source: Path) -> dict[str, Any]:
    """The content of the config.json that convert_gguf writes, without the end token: reads the
    file's metadata and no weight. Raises what convert_gguf raises for them.
    """
    return model_config(*_described(source))


def read_forms(source: Path) -> dict[str, str]:
    """Of each tensor that convert_gguf writes where codes stay, the format of its codes, or the
    dtype of its numbers. Reads and raises as read_gguf_config does.
    """
    metadata, stored = _described(source)
    config = model_config(metadata, stored) | _order_of_codes(metadata)
    kept = _as_written(list(hf_tensors(metadata, config, stored)), keeps_codes=True)
    return {tensor.name: tensor.code_format or tensor.dtype for tensor in kept}


def _order_of_codes(metadata: Metadata) -> dict[str, Any]:
    """What config.json says where codes stay: a block of them has inputs of several heads, so
    inputs stay where they are.
    """
    return {OUT_IS_TILED: True} if metadata.architecture in TILED else {}


def _described(source: Path, reads_vocabulary: bool = False) -> tuple[Metadata, dict[str, Any]]:
    """The metadata, and the tensors by name, of a file that can be run."""
    metadata, stored = open_gguf(source, reads_vocabulary)
    check_supported(metadata)
    return metadata, stored


def _check_types(path: Path, stored: Mapping[str, Any]) -> None:
    """Every tensor type must be one that the `gguf` package can dequantise (probed with one
    block)."""
    import gguf  # 0.3 s, needed only the first time a GGUF is used

    for kind in sorted({tensor.tensor_type for tensor in stored.values()}):
        block = np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
        try:
            gguf.quants.dequantize(block, kind)
        except NotImplementedError as error:
            name = next(n for n, t in stored.items() if t.tensor_type == kind)
            raise UnsupportedModelError(
                f"{path}: tensor {name!r} has the type {kind.name}, which cannot be dequantised"
            ) from error


def _with_codes(tensor: GgufTensor) -> GgufTensor:
    """The tensor as it stays, if it is a matrix of codes."""
    is_matrix = len(tensor.shape) == 2 and tensor.change is None
    is_matrix = is_matrix and not tensor.name.endswith(TAKEN_APART)
    return replace(tensor, code_format=OF_GGUF.get(tensor.quant_type.name, "") if is_matrix else "")


def _as_written(tensors: list[GgufTensor], keeps_codes: bool) -> list[GgufTensor]:
    """With the formats of codes that stay, and the dtypes of numbers: one for all rows of a name,
    float32 where they have several.
    """
    made: list[GgufTensor] = []
    for name, group in groupby(tensors, key=attrgetter("name")):
        rows = [_with_codes(tensor) if keeps_codes else tensor for tensor in group]
        of_codes = "F32" if keeps_codes and name.endswith(TAKEN_APART) else "BF16"
        dtypes = {row.dtype or _own_dtype(row.quant_type.name, of_codes) for row in rows}
        dtype = dtypes.pop() if len(dtypes) == 1 else "F32"
        made += (replace(row, dtype=dtype) for row in rows)
    return made


def _own_dtype(kind: str, of_codes: str) -> str:
    return kind if kind in DTYPES else of_codes


def _in_words(kind: str) -> str:
    """How codes of this type of a file stay codes."""
    weights, num_bytes = FORMATS[OF_GGUF[kind]]
    return f"codes in {8 * num_bytes / weights:.2f} bits" if kind in CHANGED else "codes as stored"


def _tell_growth(
    source: Path, target: Path, stored: Mapping[str, Any], tensors: list[GgufTensor]
) -> None:
    """Say how large the weights will be, as a warning if they grow by much."""
    before = sum(int(tensor.n_bytes) for tensor in stored.values())
    after = sum(tensor.written[2] for tensor in tensors)
    kind = _main_type(stored)
    keeps = '"gguf"' if kind in OF_GGUF else '"int8"'
    logger.log(
        logging.WARNING if after - before >= LARGE_GROWTH else logging.INFO,
        "%s: the %.2f GiB of %s weights become %.2f GiB in bfloat16, on disk (once, in %s) and in "
        "memory; quantization=%s keeps them small in memory",
        *(source, before / GIB, kind, after / GIB, target.parent, keeps),
    )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_safetensors(path: Path, tensors: list[GgufTensor], files: Sequence[SteadyFile]) -> None:
    """The format: the header, then the tensors end to end.
    files: where the tensors are read.
    """
    formats = {tensor.name: tensor.code_format for tensor in tensors if tensor.code_format}
    about = {CODES_KEY: json.dumps(formats)} if formats else {}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"} | about}
    offset = 0
    for name, rows in groupby(tensors, key=attrgetter("name")):
        dtypes, shapes, sizes = zip(*(tensor.written for tensor in rows), strict=True)
        shape, end = shapes[0], offset + sum(sizes)
        if len(shapes) > 1:
            shape = (sum(part[0] for part in shapes), *shape[1:])
        header[name] = {"dtype": dtypes[0], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    with path.open("wb") as file:
        file.write(header_bytes(header))
        for tensor in tensors:
            _check_all(files)
            _write_tensor(file, tensor)
        _check_all(files)


def _check_all(files: Sequence[SteadyFile]) -> None:
    for file in files:
        file.check()


def _write_tensor(file: BinaryIO, tensor: GgufTensor) -> None:
    import gguf  # 0.3 s, see _check_types

    for data in _row_chunks(tensor):
        if tensor.code_format:
            file.write(held_rows(data, tensor.quant_type.name).tobytes())
            continue
        array = np.array(gguf.quants.dequantize(data, tensor.quant_type), dtype=np.float32)
        values = torch.from_numpy(array)
        if tensor.change is not None:
            values = tensor.change(values)
        dtype = DTYPES[tensor.dtype]
        file.write(values.to(dtype).contiguous().view(torch.uint8).numpy().tobytes())


def _row_chunks(tensor: GgufTensor) -> Iterator[npt.NDArray[Any]]:
    """Rows in their final order, a few MiB at a time: rows are quantised one by one."""
    num_rows = len(tensor.data if tensor.rows is None else tensor.rows)
    step = max(1, CHUNK_ELEMENTS * num_rows // math.prod(tensor.shape))
    for start in range(0, num_rows, step):
        picked = slice(start, start + step)
        yield tensor.data[picked] if tensor.rows is None else tensor.data[tensor.rows[picked]]


def _main_type(stored: Mapping[str, Any]) -> str:
    """The type that most weights have."""
    elements: Counter[str] = Counter()
    for tensor in stored.values():
        elements[tensor.tensor_type.name] += int(tensor.n_elements)
    return elements.most_common(1)[0][0]
