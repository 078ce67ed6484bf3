"""Perplexity of GGUF files with their codes as stored beside that of the same files dequantised.

    python -m benchmarks.codes_perplexity [--models MODEL ...] [--json FILE]

The demo model's weights are quantised again by the package gguf into each format; --models adds
names or files as they are. In fp32, so that nothing but the weights differs: codes are exact, and
what is dequantised is rounded to bfloat16.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.compare import write_as
from benchmarks.quantization import TEXT, perplexity
from nanoengine.api.llm import LLM
from nanoengine.bench.report import versions
from nanoengine.loading.packaged import DEMO_MODEL, packaged_gguf

FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
MOST_TOKENS = 2000


def rows(models: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each format of the demo model, then for each of `models`."""
    with tempfile.TemporaryDirectory() as folder:
        for kind in FORMATS:
            path = Path(folder) / f"{kind}.gguf"
            write_as(packaged_gguf(DEMO_MODEL), path, kind)
            yield {"model": DEMO_MODEL, "format": kind} | _compared(str(path))
    for model in models:
        yield {"model": model, "format": "as stored"} | _compared(model)


def _compared(model: str) -> dict[str, Any]:
    stored, held, num_tokens = _perplexity(model, "gguf")
    dequantised, _, _ = _perplexity(model, None)
    difference = 100 * (stored / dequantised - 1)
    return {
        "tokens": num_tokens,
        "stored": round(stored, 4),
        "dequantised": round(dequantised, 4),
        "difference_percent": round(difference, 3),
        "held": held,
    }


def _perplexity(model: str, quantization: str | None) -> tuple[float, str, int]:
    """Of the text; what the plan says of the weights, and how many tokens the text has."""
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": MOST_TOKENS + 16,
        "kv_cache_gib": 0.5,
    }
    with LLM(model, quantization=quantization, max_num_seqs=1, **settings) as llm:
        ids = llm.tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:MOST_TOKENS]
        return perplexity(llm, ids), llm.plan.quantization, len(ids)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=[], help="names or GGUF files")
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    found = []
    for row in rows(arguments.models):
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
