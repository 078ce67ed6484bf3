"""Perplexity with weights as codes beside that of numbers, in fp32.

    python -m benchmarks.codes_perplexity [--of stored rounded made] [--models MODEL ...]

"stored": GGUF files with their codes as stored beside the same files dequantised. The demo model's
weights are quantised again by the package gguf into each format; --models adds names or files as
they are. Codes are exact, and what is dequantised is rounded to bfloat16.

"rounded": the same files with activation_dtype="int8" beside exact activations.

"made": int8, of the demo model and of --models, beside the model as it is. A file in codes has a
grid in each block of 32 inputs, which int8 may find again. So there is a second row, for which
blocks begin 16 inputs later than the file's, and no grid fits.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.gguf_files import write_as
from benchmarks.quantization import TEXT, perplexity
from nanoengine.api.llm import LLM
from nanoengine.bench.report import versions
from nanoengine.loading.checkpoint import CheckpointReader
from nanoengine.loading.find_model import resolve_model
from nanoengine.loading.packaged import DEMO_MODEL, packaged_gguf
from nanoengine.models.make_codes import becomes_codes, make_codes

FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
MOST_TOKENS = 2000
OFF = 16  # inputs


def made(models: list[str]) -> Iterator[dict[str, Any]]:
    """Two rows for each model."""
    for model in (DEMO_MODEL, *models):
        plain, _, num_tokens = _perplexity(model, "none")
        with tempfile.TemporaryDirectory() as folder:
            _write_off_the_grid(resolve_model(model), Path(folder))
            runs = {"of the file": (model, "int8"), f"{OFF} inputs later": (folder, "none")}
            for blocks, run in runs.items():
                found, held, _ = _perplexity(*run)
                yield {
                    "model": Path(model).stem,
                    "method": "int8",
                    "blocks": blocks,
                    "tokens": num_tokens,
                    "perplexity": round(found, 4),
                    "unquantised": round(plain, 4),
                    "difference_percent": round(100 * (found / plain - 1), 3),
                    "held": held,
                }


def _write_off_the_grid(source: Path, target: Path) -> None:
    """The checkpoint with the numbers of codes whose blocks begin OFF inputs later."""
    for path in source.glob("*.json"):
        shutil.copy(path, target)
    tensors = {}
    with CheckpointReader(source) as reader:
        for name in reader.names():
            tensor = reader.tensor(name).float()
            if becomes_codes(name, tuple(tensor.shape)):
                rows = make_codes(tensor.roll(-OFF, 1))
                assert rows is not None
                tensor = rows.numbers(torch.float32).roll(OFF, 1)
            tensors[name] = tensor.contiguous()
    save_file(tensors, target / "model.safetensors")


def stored(models: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each format of the demo model, then for each of `models`."""
    for named, path in _files(models):
        yield named | _compared(path)


def rounded(models: list[str]) -> Iterator[dict[str, Any]]:
    """As `stored`: with activations of 8 bits."""
    for named, path in _files(models):
        exact, _, num_tokens = _perplexity(path, "gguf")
        found, held, _ = _perplexity(path, "gguf", "int8")
        yield named | {
            "tokens": num_tokens,
            "rounded": round(found, 4),
            "exact": round(exact, 4),
            "difference_percent": round(100 * (found / exact - 1), 3),
            "held": held,
        }


def _files(models: list[str]) -> Iterator[tuple[dict[str, str], str]]:
    """The demo model in each format, then `models`: how a row names it, and what to load."""
    with tempfile.TemporaryDirectory() as folder:
        for kind in FORMATS:
            path = Path(folder) / f"{kind}.gguf"
            write_as(packaged_gguf(DEMO_MODEL), path, kind)
            yield {"model": DEMO_MODEL, "format": kind}, str(path)
    for model in models:
        yield {"model": model, "format": "as stored"}, model


def _compared(model: str) -> dict[str, Any]:
    as_stored, held, num_tokens = _perplexity(model, "gguf")
    dequantised, _, _ = _perplexity(model, "none")
    difference = 100 * (as_stored / dequantised - 1)
    return {
        "tokens": num_tokens,
        "stored": round(as_stored, 4),
        "dequantised": round(dequantised, 4),
        "difference_percent": round(difference, 3),
        "held": held,
    }


def _perplexity(
    model: str, quantization: str, activations: str | None = None
) -> tuple[float, str, int]:
    """Of the text; what the plan says of the weights, and how many tokens the text has."""
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": MOST_TOKENS + 16,
        "kv_cache_gib": 0.5,
        "activation_dtype": activations,
    }
    with LLM(model, quantization=quantization, max_num_seqs=1, **settings) as llm:
        ids = llm.tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:MOST_TOKENS]
        return perplexity(llm, ids), llm.plan.quantization, len(ids)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = {"stored": stored, "rounded": rounded, "made": made}
    parser.add_argument("--of", nargs="+", choices=kinds, default=tuple(kinds), help="which rows")
    parser.add_argument("--models", nargs="*", default=[], help="names or GGUF files")
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    found = []
    for each in arguments.of:
        for row in kinds[each](arguments.models):
            found.append(row)
            print(json.dumps(row), flush=True)
    report = {
        "text": "alice.txt",
        "date": date.today().isoformat(),
        "versions": versions("gguf"),
        "rows": found,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
