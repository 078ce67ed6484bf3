"""One GGUF file into one Hugging Face folder: names, row order, dtype, configuration and tokenizer.

Tensors are read and dequantised by the `gguf` package, then rounded to bfloat16. Knows nothing of
caches or of the engine: after the conversion there is one loading path, `loader.py`'s. The file is
not trusted: its whole structure is checked against its size before the package reads it.
"""

from __future__ import annotations

import json
import logging
import math
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from nanoengine.config import GIB
from nanoengine.errors import CorruptModelError, UnsupportedModelError
from nanoengine.loading.gguf.metadata import Metadata
from nanoengine.loading.gguf.structure import check_structure
from nanoengine.loading.gguf.tokenizer import write_tokenizer
from nanoengine.loading.refused import about_architecture
from nanoengine.models.rope import yarn_attention_factor

logger = logging.getLogger(__name__)
CONVERTER_VERSION = 1  # part of the cache key: raise it when the written folder changes

ARCHITECTURES = {
    "gemma3": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",  # Mistral, too
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
# Row order of q and k in a GGUF of these is llama.cpp's (pairs side by side), not Hugging Face's
# (halves).
PERMUTED = frozenset({"llama", "smollm3"})
# What no key of a GGUF says: llama.cpp has it in its code.
FIXED_SETTINGS: dict[str, dict[str, Any]] = {"smollm3": {"no_rope_layer_interval": 4}}
GEMMA_INTERVAL, GEMMA_LOCAL_THETA, GEMMA_27B_LAYERS = 6, 10000.0, 62
# Settings that change the arithmetic and that no Hugging Face config of these architectures can
# say.
REFUSED_KEYS = (
    "attention.scale",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
)
# The same of a RoPE scaling.
REFUSED_ROPE_KEYS = ("rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_ext_factor")
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
_NAMES = {"phi3": _PHI3_NAMES, "gemma3": _GEMMA_NAMES}
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9]\d{0,4})\.([a-z_]+)\.(weight|bias)")
_ROPE_FREQS = "rope_freqs.weight"
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_ROPE_TENSORS = frozenset({_ROPE_FREQS, _LONG_FACTORS, _SHORT_FACTORS})


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


def convert_gguf(source: Path, target: Path) -> str:
    """Fill the empty folder `target` with the model in `source`; returns what the weights are, in
    words.

    Writes config.json, generation_config.json, tokenizer.json, tokenizer_config.json and
    model.safetensors (bfloat16). At most 16 MiB of float32 are held at a time.
    Raises CorruptModelError for a damaged file, UnsupportedModelError for what cannot be
    represented.
    """
    check_structure(source)
    reader = _open_reader(source)
    metadata = Metadata(source, reader.fields)
    _check_supported(metadata)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    _check_types(source, stored)
    config = _model_config(metadata, stored)
    tensors = [
        _named(metadata, config, t) for name, t in stored.items() if name not in _ROPE_TENSORS
    ]
    _tell_growth(source, target, stored, tensors)
    eos_ids = write_tokenizer(metadata, target, config["vocab_size"])
    _write_json(target / "config.json", config | {"eos_token_id": eos_ids[0] if eos_ids else None})
    _write_json(target / "generation_config.json", {"eos_token_id": eos_ids})
    _write_safetensors(target / "model.safetensors", tensors)
    return f"{_main_type(stored)} GGUF, dequantised to bfloat16"


def read_gguf_config(source: Path) -> dict[str, Any]:
    """The content of the config.json that convert_gguf writes, without the end token: reads the
    file's metadata and no weight. Raises what convert_gguf raises for them.
    """
    vocabulary = check_structure(source)
    reader = _open_reader(source, vocabulary)
    metadata = Metadata(source, reader.fields)
    _check_supported(metadata)
    return _model_config(metadata, {tensor.name: tensor for tensor in reader.tensors})


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


def _check_supported(metadata: Metadata) -> None:
    architecture = metadata.architecture
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(f"{metadata.path}: {about_architecture(architecture)}")
    experts = f"{architecture}.expert_count"
    if metadata.has(experts) and metadata.get(experts, int):
        about = about_architecture(f"{architecture}-moe")
        raise UnsupportedModelError(f"{metadata.path}: {experts!r} is set: {about}")
    for key in REFUSED_KEYS:
        full_key = f"{architecture}.{key}"
        if metadata.has(full_key) and metadata.get(full_key, float):
            raise UnsupportedModelError(f"{metadata.path}: {full_key!r} is set and not supported")
    if _window(metadata) and architecture not in ("gemma3", "llama", "phi3"):
        raise UnsupportedModelError(
            f"{metadata.path}: '{architecture}.attention.sliding_window' is set and not supported"
        )


def _window(metadata: Metadata) -> int | None:
    """None without one. One that no text is longer than is none; 0 says that there is none."""
    window = int(metadata.get(f"{metadata.architecture}.attention.sliding_window", int, 0))
    return window if 0 < window < metadata.number("context_length") else None


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


def _model_config(metadata: Metadata, stored: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the model, in the spelling that every transformers release reads."""
    num_heads = metadata.number("attention.head_count")
    hidden_size = metadata.number("embedding_length")
    head_dim = metadata.number("attention.key_length", max(hidden_size // num_heads, 1))
    turned = metadata.number("rope.dimension_count", head_dim)
    for key in ("attention.value_length", "rope.dimension_count"):
        may_differ = (
            metadata.architecture == "phi3" and key.startswith("rope") and turned < head_dim
        )
        if metadata.number(key, head_dim) != head_dim and not may_differ:
            raise UnsupportedModelError(
                f"{metadata.path}: {key} is {metadata.number(key)}, the head size {head_dim}; "
                "only equal sizes are supported"
            )
    if "token_embd.weight" not in stored:
        raise CorruptModelError(f"{metadata.path} has no tensor 'token_embd.weight'")
    if metadata.number("block_count") > len(stored):
        raise CorruptModelError(
            f"{metadata.path}: {metadata.number('block_count')} layers of {len(stored)} tensors"
        )
    theta = metadata.real("rope.freq_base", 10000.0)
    settings = FIXED_SETTINGS.get(metadata.architecture, {})
    if metadata.architecture == "phi3":
        settings = _phi3_settings(metadata, turned, head_dim)
    elif metadata.architecture == "gemma3":
        settings = _gemma_settings(metadata, hidden_size // num_heads, head_dim)
    elif _window(metadata):
        settings = _mistral_settings(metadata, stored)
    return {
        "architectures": [ARCHITECTURES[metadata.architecture]],
        "model_type": metadata.architecture,
        "vocab_size": int(stored["token_embd.weight"].shape[-1]),
        "hidden_size": hidden_size,
        "intermediate_size": metadata.number("feed_forward_length"),
        "num_hidden_layers": metadata.number("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.number("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.number("context_length"),
        "rms_norm_eps": metadata.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(metadata, stored, theta, head_dim),
        "attention_bias": "blk.0.attn_output.bias" in stored,
        "mlp_bias": "blk.0.ffn_up.bias" in stored,
        "tie_word_embeddings": "output.weight" not in stored,
        "torch_dtype": "bfloat16",
    } | settings


def _phi3_settings(metadata: Metadata, turned: int, head_dim: int) -> dict[str, Any]:
    part = turned / head_dim
    if int(head_dim * part) != turned:  # the quotient was rounded down
        part = math.nextafter(part, 1.0)
    return {
        "partial_rotary_factor": part,
        "original_max_position_embeddings": _original_length(metadata),
        "sliding_window": _window(metadata),
    }


def _mistral_settings(metadata: Metadata, stored: Mapping[str, Any]) -> dict[str, Any]:
    """A Llama with a window in every layer."""
    biased = sorted(name for name in stored if name.endswith(".bias"))
    if biased:
        raise UnsupportedModelError(
            f"{metadata.path}: a sliding window beside {biased[0]!r} is not supported"
        )
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": _window(metadata),
    }


def _gemma_settings(metadata: Metadata, width_per_head: int, head_dim: int) -> dict[str, Any]:
    """The layers with a window, their RoPE and the scale of scores, as llama.cpp knows them.

    width_per_head: of the residual stream, by which the model of 27B scales its scores.
    """
    num_layers = metadata.number("block_count")
    interval = metadata.number("attention.sliding_window_pattern", GEMMA_INTERVAL)
    window = int(metadata.get("gemma3.attention.sliding_window", int, 0))
    kinds = ["sliding" if window and (i + 1) % interval else "full" for i in range(num_layers)]
    return {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": [f"{kind}_attention" for kind in kinds],
        "sliding_window": window or 4096,
        "rope_local_base_freq": metadata.real("rope.freq_base_swa", GEMMA_LOCAL_THETA),
        "query_pre_attn_scalar": width_per_head if num_layers == GEMMA_27B_LAYERS else head_dim,
        "final_logit_softcapping": metadata.real("final_logit_softcapping", 0.0) or None,
    }


def _original_length(metadata: Metadata) -> int:
    length = metadata.number("context_length")
    return metadata.number("rope.scaling.original_context_length", length)


def _rope_scaling(
    metadata: Metadata, stored: Mapping[str, Any], theta: float, head_dim: int
) -> dict[str, Any] | None:
    kind = metadata.get(f"{metadata.architecture}.rope.scaling.type", str, "none")
    attention_factor = metadata.real("rope.scaling.attn_factor", 1.0)
    for key in REFUSED_ROPE_KEYS:
        if metadata.has(f"{metadata.architecture}.{key}"):
            raise UnsupportedModelError(f"{metadata.path}: {key!r} is set and not supported")
    given = stored.keys() & _ROPE_TENSORS
    if kind in ("none", "longrope") and given == {_LONG_FACTORS, _SHORT_FACTORS}:
        return {
            "rope_type": "longrope",
            "long_factor": _factors(stored[_LONG_FACTORS]),
            "short_factor": _factors(stored[_SHORT_FACTORS]),
            "attention_factor": attention_factor,
            "original_max_position_embeddings": _original_length(metadata),
        }
    if kind == "yarn" and not given:
        return _yarn_scaling(metadata, attention_factor)
    if attention_factor == 1.0:
        if kind == "none" and given == {_ROPE_FREQS}:
            return _llama3_scaling(metadata.path, stored[_ROPE_FREQS], theta, head_dim)
        if kind == "none" and not given:
            return None
        if kind == "linear" and not given:
            return {"rope_type": "linear", "factor": metadata.real("rope.scaling.factor")}
    raise UnsupportedModelError(
        f"{metadata.path}: RoPE scaling {kind!r} with attention factor {attention_factor} and "
        f"tensors {sorted(given)} is not supported; supported: none, linear, llama3, yarn, longrope"
    )


def _factors(stored: Any) -> list[float]:
    return [float(str(value)) for value in np.array(stored.data, dtype=np.float32).reshape(-1)]


def _yarn_scaling(metadata: Metadata, attention_factor: float) -> dict[str, Any]:
    """llama.cpp multiplies YaRN's own attention factor with the one in the file."""
    factor = metadata.real("rope.scaling.factor")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": _original_length(metadata),
        "attention_factor": yarn_attention_factor(factor) * attention_factor,
        "beta_fast": metadata.real("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": metadata.real("rope.scaling.yarn_beta_slow", 1.0),
    }


def _llama3_scaling(path: Path, freqs: Any, theta: float, head_dim: int) -> dict[str, Any]:
    """llama.cpp stores Llama 3's rule as one divisor per frequency; find the rule they come
    from."""
    divisors = np.array(freqs.data, dtype=np.float64).reshape(-1)
    factor = float(divisors.max())
    low, high, original = 1.0, 4.0, 8192  # the same in every Llama 3
    # [head_dim / 2]: 1 for short waves, `factor` for long ones, blended between.
    turns = original * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - blend) / factor + blend)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise UnsupportedModelError(f"{path}: {_ROPE_FREQS!r} does not follow Llama 3's rule")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _named(metadata: Metadata, config: Mapping[str, Any], stored: Any) -> _Tensor:
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
    if name is None:
        raise UnsupportedModelError(
            f"{metadata.path}: tensor {stored.name!r} has no place in {config['architectures'][0]}"
        )
    shape = tuple(int(size) for size in reversed(stored.shape))
    # llama.cpp stores the weight + 1 that Gemma's norms multiply with.
    offset = -1.0 if metadata.architecture == "gemma3" and name.endswith("norm.weight") else 0.0
    return _Tensor(name, shape, stored.data, stored.tensor_type, rows, offset)


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
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + 2 * math.prod(tensor.shape)
        header[tensor.name] = {
            "dtype": "BF16",
            "shape": tensor.shape,
            "data_offsets": [offset, end],
        }
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
