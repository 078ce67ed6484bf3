"""Model files for peers that read GGUF: `bench.py write-gguf`, and what a file's weights are."""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanoengine.errors import ConfigError
from nanoengine.loading.packaged import DEMO_MODEL, packaged_gguf

# These keys are replaced, or set by the GGUF writer itself.
KEYS_OF_OURS = ("general.architecture", "general.file_type", "general.quantization_version")
TYPES = {"bf16": "BF16", "f16": "F16", "q4_0": "Q4_0", "q8_0": "Q8_0"}  # ggml's names


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a Llama, with the demo model's vocabulary."""

    num_layers: int
    hidden_size: int
    num_heads: int
    head_dim: int
    inner_size: int
    num_kv_heads: int = 8


SHAPES = {  # Llama 3.2 1B and 3B, Llama 3.1 8B
    "1B": Shape(16, 2048, 32, 64, 8192),
    "3B": Shape(28, 3072, 24, 128, 8192),
    "8B": Shape(32, 4096, 32, 128, 14336),
}


def weights_of(path: Path) -> str:
    """The type of most weights in a GGUF file, from its metadata: "BF16", "Q4_1"."""
    import gguf  # 0.3 s, and only for peers that read such a file

    try:
        field = gguf.GGUFReader(path).fields["general.file_type"]
        return gguf.LlamaFileType(field.contents()).name.removeprefix("MOSTLY_")
    except (ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"{path} does not say what its weights are: {error}") from error


def write_gguf(args: argparse.Namespace) -> dict[str, Any]:
    """Write the GGUF `source` with its matrices in another type, for peers at equal precision; or a
    model of a shape in SHAPES with random weights, which say nothing but speeds.

    Every weight is rounded to bf16 first, as in nanoengine, so all engines have the same numbers.
    Vectors stay float32, as llama.cpp needs them. Raises ConfigError if there is no source.
    """
    source, out = _source_gguf(args.source), Path(args.out)
    if args.random and args.dtype == "stored":
        raise ConfigError(f"random weights have no stored type: give --dtype {', '.join(TYPES)}")
    if args.random:
        write_random(SHAPES[args.random], source, out, TYPES[args.dtype])
    elif args.dtype == "stored":
        shutil.copyfile(source, out)
    else:
        write_as(source, out, TYPES[args.dtype])
    return {"file": args.out, "dtype": args.dtype, "bytes": out.stat().st_size}


def write_as(source: Path, out: Path, kind: str) -> None:
    """Write a GGUF again with its matrices in a format (ggml's name) that gguf can make."""
    import gguf  # 0.3 s, and only for this command

    reader = gguf.GGUFReader(source)
    writer = _writer(reader, out, kind)
    for tensor in reader.tensors:
        values = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        rounded = torch.from_numpy(values).bfloat16().float().numpy()
        stored = gguf.GGMLQuantizationType[kind if len(tensor.shape) > 1 else "F32"]
        writer.add_tensor(tensor.name, gguf.quants.quantize(rounded, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_random(shape: Shape, source: Path, out: Path, kind: str) -> None:
    """Write a Llama of a shape with random weights and the tokenizer of the GGUF `source`, a tensor
    at a time.
    """
    import gguf  # 0.3 s, and only for this command

    reader = gguf.GGUFReader(source)
    sizes = {
        "block_count": shape.num_layers,
        "embedding_length": shape.hidden_size,
        "feed_forward_length": shape.inner_size,
        "attention.head_count": shape.num_heads,
        "attention.head_count_kv": shape.num_kv_heads,
        "rope.dimension_count": shape.head_dim,
    }
    writer = _writer(reader, out, kind, {f"llama.{key}": size for key, size in sizes.items()})
    shapes = dict(_random_shapes(shape, reader.fields["llama.vocab_size"].contents()))
    types = {n: gguf.GGMLQuantizationType[kind if len(s) > 1 else "F32"] for n, s in shapes.items()}
    for name, dims in shapes.items():
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[types[name]]
        row_bytes = dims[-1] // per_block * block_bytes
        num_bytes = row_bytes * math.prod(dims[:-1])
        writer.add_tensor_info(name, dims, np.dtype(np.float32), num_bytes, types[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    draw = np.random.default_rng(0)
    for name, dims in shapes.items():
        values = draw.standard_normal(dims, np.float32)
        values *= 0.02
        if len(dims) == 1:
            values += 1.0  # norms
        writer.write_tensor_data(gguf.quants.quantize(values, types[name]))
    writer.close()


def _writer(reader: Any, out: Path, kind: str, changed: dict[str, int] | None = None) -> Any:
    """A writer with the keys of a read file, some of them changed."""
    import gguf

    changed = changed or {}
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in KEYS_OF_OURS:
            continue
        sub_type = field.types[-1] if len(field.types) > 1 else None
        value = changed.get(field.name, field.contents())
        writer.add_key_value(field.name, value, field.types[0], sub_type=sub_type)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    return writer


def _random_shapes(shape: Shape, vocab_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensors of a Llama as llama.cpp names them, and their shapes, [outputs, inputs]."""
    hidden, inner = shape.hidden_size, shape.inner_size
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield "token_embd.weight", (vocab_size, hidden)
    for i in range(shape.num_layers):
        yield f"blk.{i}.attn_norm.weight", (hidden,)
        yield f"blk.{i}.attn_q.weight", (query, hidden)
        yield f"blk.{i}.attn_k.weight", (key, hidden)
        yield f"blk.{i}.attn_v.weight", (key, hidden)
        yield f"blk.{i}.attn_output.weight", (hidden, query)
        yield f"blk.{i}.ffn_norm.weight", (hidden,)
        yield f"blk.{i}.ffn_gate.weight", (inner, hidden)
        yield f"blk.{i}.ffn_up.weight", (inner, hidden)
        yield f"blk.{i}.ffn_down.weight", (hidden, inner)
    yield "output_norm.weight", (hidden,)


def _source_gguf(source: str | None) -> Path:
    """The given file, or the demo model's."""
    found = Path(source) if source is not None else packaged_gguf(DEMO_MODEL)
    if not found.is_file():
        raise ConfigError(
            f"there is no file {source!r} to take the weights from; give a GGUF with --source"
        )
    return found


def add_command(commands: Any) -> None:
    """Add `write-gguf`."""
    sub = commands.add_parser(
        "write-gguf",
        help="a model file for peers that read GGUF",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    sub.set_defaults(run=write_gguf, json=None)
    sub.add_argument("--dtype", choices=(*TYPES, "stored"), default="bf16", help="of OUT")
    sub.add_argument("--random", choices=SHAPES, help="random weights of this size, a Llama's")
    sub.add_argument("--source", metavar="GGUF", help="weights; the demo model's without it")
    sub.add_argument("out", metavar="OUT", help="the file to write")
