"""One GGUF file into one Hugging Face folder: names, row order and dtype of the tensors.

settings.py makes its configuration, tokenizer.py its tokenizer. Tensors are read and dequantised by
the `gguf` package, then rounded to bfloat16. Knows nothing of caches or of the engine: after the
conversion there is one loading path, `loader.py`'s. The file is not trusted: its whole structure is
checked against its size before the package reads it.
"""

from __future__ import annotations

import json
import logging
import math
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from nanoengine.config.engine import GIB
from nanoengine.errors import CorruptModelError, UnsupportedModelError
from nanoengine.loading.gguf.metadata import Metadata
from nanoengine.loading.gguf.settings import ROPE_TENSORS, check_supported, model_config
from nanoengine.loading.gguf.structure import check_structure
from nanoengine.loading.gguf.tokenizer import write_tokenizer
from nanoengine.models.architectures import ARCHITECTURES
from nanoengine.models.stored_codes import CODES_KEY, FORMATS

logger = logging.getLogger(__name__)
CONVERTER_VERSION = 1  # part of the cache key: raise it when the written folder changes

# Row order of q and k in a GGUF of these is llama.cpp's (pairs side by side), not Hugging Face's
# (halves).
PERMUTED = frozenset({"llama", "smollm3"})
CHUNK_ELEMENTS = 4 << 20  # dequantised at a time: 16 MiB of float32
LARGE_GROWTH = 1 << 30  # bytes; a user wants to know of these before they are written

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PHI3_NAMES = _LAYER_NAMES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_GEMMA_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Tensors with an entry for each expert, by Hugging Face's place in ExpertNames.parts.
_EXPERT_PARTS = {"ffn_gate_exps": 0, "ffn_up_exps": 1, "ffn_down_exps": 2}
_ROUTER = "ffn_gate_inp"
_NAMES = {"phi3": _PHI3_NAMES, "gemma3": _GEMMA_NAMES}
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9]\d{0,4})\.([a-z_]+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A stored tensor under its Hugging Face name. `data` is [rows, bytes of a row] if
    quantised."""

    name: str
    shape: tuple[int, ...]
    data: npt.NDArray[Any]
    quant_type: Any
    rows: npt.NDArray[np.intp] | None  # order to read the rows in; None is as stored
    offset: float = 0.0  # to be added
    code_format: str = ""  # of a tensor that stays codes

    @property
    def written(self) -> tuple[str, tuple[int, ...], int]:
        """Dtype, shape and bytes in a safetensors file."""
        if self.code_format:
            return "U8", self.data.shape, self.data.nbytes
        return "BF16", self.shape, 2 * math.prod(self.shape)


def convert_gguf(source: Path, target: Path, keeps_codes: bool = False) -> str:
    """Fill the empty folder `target` with the model in `source`; returns what the weights are, in
    words. keeps_codes: matrices of a format in stored_codes.FORMATS stay as they are.

    Writes config.json, generation_config.json, tokenizer.json, tokenizer_config.json and
    model.safetensors (bfloat16; codes are uint8 [rows, bytes of a row], and CODES_KEY of its
    metadata is JSON with the format of each). At most 16 MiB of float32 are held at a time.
    Raises CorruptModelError for a damaged file, UnsupportedModelError for what cannot be
    represented.
    """
    check_structure(source)
    reader = _open_reader(source)
    metadata = Metadata(source, reader.fields)
    check_supported(metadata)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    _check_types(source, stored)
    config = model_config(metadata, stored)
    tensors = [
        tensor
        for name, t in stored.items()
        if name not in ROPE_TENSORS
        for tensor in _named(metadata, config, t)
    ]
    if keeps_codes:
        tensors = [_with_codes(tensor) for tensor in tensors]
    else:
        _tell_growth(source, target, stored, tensors)
    eos_ids = write_tokenizer(metadata, target, config["vocab_size"])
    _write_json(target / "config.json", config | {"eos_token_id": eos_ids[0] if eos_ids else None})
    _write_json(target / "generation_config.json", {"eos_token_id": eos_ids})
    _write_safetensors(target / "model.safetensors", tensors)
    how = "codes as stored" if keeps_codes else "dequantised to bfloat16"
    return f"{_main_type(stored)} GGUF, {how}"


def read_gguf_config(source: Path) -> dict[str, Any]:
    """The content of the config.json that convert_gguf writes, without the end token: reads the
    file's metadata and no weight. Raises what convert_gguf raises for them.
    """
    vocabulary = check_structure(source)
    reader = _open_reader(source, vocabulary)
    metadata = Metadata(source, reader.fields)
    check_supported(metadata)
    return model_config(metadata, {tensor.name: tensor for tensor in reader.tensors})


def _open_reader(path: Path, unread: Mapping[int, int] | None = None) -> Any:
    """A `gguf.GGUFReader` of a file whose structure was checked. unread: where values begin and end
    that it leaves out, as it takes seconds for a vocabulary.
    """
    ends = unread or {}
    # 0.3 s to import, and needed only the first time a GGUF is used.
    import gguf

    class Reader(gguf.GGUFReader):
        """Slices a plain array, not a memmap: a third of the time for 100,000 strings."""

        @property
        def data(self) -> Any:
            return self._plain

        @data.setter
        def data(self, mapped: Any) -> None:
            self._plain = mapped.view(np.ndarray)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if orig_offs in ends:
                return ends[orig_offs] - orig_offs, [], [], []
            return super()._get_field_parts(orig_offs, raw_type)

    try:
        return Reader(path)
    except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
        raise CorruptModelError(f"{path} is damaged: {error}") from error


def _check_types(path: Path, stored: Mapping[str, Any]) -> None:
    """Every tensor type must be one that the `gguf` package can dequantise (probed with one
    block)."""
    import gguf  # 0.3 s, see _open_reader

    for kind in sorted({tensor.tensor_type for tensor in stored.values()}):
        block = np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
        try:
            gguf.quants.dequantize(block, kind)
        except NotImplementedError as error:
            name = next(n for n, t in stored.items() if t.tensor_type == kind)
            raise UnsupportedModelError(
                f"{path}: tensor {name!r} has the type {kind.name}, which cannot be dequantised"
            ) from error


def _named(metadata: Metadata, config: Mapping[str, Any], stored: Any) -> list[_Tensor]:
    match = _LAYER_TENSOR.fullmatch(stored.name)
    name = _GLOBAL_NAMES.get(stored.name)
    rows = None
    names = _NAMES.get(metadata.architecture, _LAYER_NAMES)
    if match and match[2] in names:
        name = f"model.layers.{int(match[1])}.{names[match[2]]}.{match[3]}"
        if metadata.architecture in PERMUTED and match[2] in ("attn_q", "attn_k"):
            is_query = match[2] == "attn_q"
            num_heads = config["num_attention_heads" if is_query else "num_key_value_heads"]
            rows = _half_order(metadata.path, stored, num_heads, config["head_dim"])
    experts = ARCHITECTURES[config["architectures"][0]].experts
    if match and experts is not None and match[3] == "weight":
        block = f"model.layers.{int(match[1])}.{experts.block}."
        if match[2] in _EXPERT_PARTS and len(stored.shape) == 3:
            part = experts.parts[_EXPERT_PARTS[match[2]]]
            return _by_expert(f"{block}experts.", f".{part}.weight", stored)
        if match[2] == _ROUTER:
            name = f"{block}gate.weight"
    if name is None:
        raise UnsupportedModelError(
            f"{metadata.path}: tensor {stored.name!r} has no place in {config['architectures'][0]}"
        )
    shape = tuple(int(size) for size in reversed(stored.shape))
    # llama.cpp stores the weight + 1 that Gemma's norms multiply with.
    offset = -1.0 if metadata.architecture == "gemma3" and name.endswith("norm.weight") else 0.0
    return [_Tensor(name, shape, stored.data, stored.tensor_type, rows, offset)]


def _by_expert(prefix: str, suffix: str, stored: Any) -> list[_Tensor]:
    """The entries of a tensor [experts, rows, columns]."""
    columns, rows, count = (int(size) for size in stored.shape)
    return [
        _Tensor(f"{prefix}{i}{suffix}", (rows, columns), stored.data[i], stored.tensor_type, None)
        for i in range(count)
    ]


def _with_codes(tensor: _Tensor) -> _Tensor:
    """The tensor as it stays, if it is a matrix of codes."""
    name = tensor.quant_type.name
    return replace(tensor, code_format=name if name in FORMATS and len(tensor.shape) == 2 else "")


def _half_order(path: Path, stored: Any, num_heads: int, head_dim: int) -> npt.NDArray[np.intp]:
    """Stored rows in Hugging Face's order: in each head the even rows, then the odd ones.

    llama.cpp's converter lays the two halves of a head side by side, because its RoPE turns
    neighbours.
    """
    num_rows = int(stored.shape[-1])
    if num_rows != num_heads * head_dim or head_dim % 2:
        raise CorruptModelError(
            f"{path}: tensor {stored.name!r} has {num_rows} rows, "
            f"not {num_heads} heads of {head_dim}"
        )
    pairs = np.arange(num_rows).reshape(num_heads, head_dim // 2, 2)
    return pairs.swapaxes(1, 2).reshape(-1)


def _tell_growth(
    source: Path, target: Path, stored: Mapping[str, Any], tensors: list[_Tensor]
) -> None:
    """Say how large the weights will be, as a warning if they grow by much."""
    before = sum(int(tensor.n_bytes) for tensor in stored.values())
    after = sum(2 * math.prod(tensor.shape) for tensor in tensors)
    kind = _main_type(stored)
    keeps = '"gguf"' if kind in ("Q4_0", "Q4_1") else '"int4" or "int8"'
    logger.log(
        logging.WARNING if after - before >= LARGE_GROWTH else logging.INFO,
        "%s: the %.2f GiB of %s weights become %.2f GiB in bfloat16, on disk (once, in %s) and in "
        "memory; quantization=%s keeps them small in memory",
        *(source, before / GIB, kind, after / GIB, target.parent, keeps),
    )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_safetensors(path: Path, tensors: list[_Tensor]) -> None:
    """The format: uint64 header length, JSON header padded to 8 bytes, then the tensors end to
    end."""
    formats = {tensor.name: tensor.code_format for tensor in tensors if tensor.code_format}
    about = {CODES_KEY: json.dumps(formats)} if formats else {}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"} | about}
    offset = 0
    for tensor in tensors:
        dtype, shape, num_bytes = tensor.written
        end = offset + num_bytes
        header[tensor.name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for tensor in tensors:
            _write_tensor(file, tensor)


def _write_tensor(file: BinaryIO, tensor: _Tensor) -> None:
    import gguf  # 0.3 s, see _open_reader

    for data in _row_chunks(tensor):
        if tensor.code_format:
            file.write(data.tobytes())
            continue
        values = np.array(gguf.quants.dequantize(data, tensor.quant_type), dtype=np.float32)
        rounded = torch.from_numpy(values).add_(tensor.offset).to(torch.bfloat16)
        file.write(rounded.view(torch.int16).numpy().tobytes())


def _row_chunks(tensor: _Tensor) -> Iterator[npt.NDArray[Any]]:
    """Rows in their final order, a few MiB at a time: rows are quantised one by one."""
    num_rows = tensor.shape[0]
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
