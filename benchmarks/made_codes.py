"""Decode, prefill, weights and seconds to load with int8 and without:

    python -m benchmarks.made_codes [--rounds 3] [--layers 4] [--output FILE]

Models are SmolLM2-135M and Llama 3.2 1B's shape with random weights, which say nothing but speeds.
Each row is a process of its own. Perplexities: benchmarks/codes_perplexity.py.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.ending import exit_on_sigterm
from benchmarks.packed_checkpoints import LLAMA
from nanoengine import LLM, SamplingParams
from nanoengine.bench.report import versions
from nanoengine.config.engine import GIB

Row = dict[str, Any]
METHODS = ("none", "int8")
SHORT, LONG, NEW = 32, 512, 32  # tokens of prompts, and of an answer


def write_shape(folder: str, layers: int) -> None:
    """Write the configuration of Llama 3.2 1B's shape."""
    shape = {name: value for name, value in LLAMA.items() if name != "quantization_config"}
    config = json.dumps(shape | {"num_hidden_layers": layers, "vocab_size": 128256})
    Path(folder, "config.json").write_text(config)


def measure(model: str, method: str, dtype: str) -> Row:
    """Speeds and weights in this process. A folder is a shape, whose weights are random."""
    draw = random.Random(0)
    short, *long = ([draw.randrange(100, 30000) for _ in range(n)] for n in (SHORT, *[LONG] * 3))
    settings: Row = {"dtype": dtype, "kv_cache_gib": 0.5, "max_model_len": 2048}
    settings["load_format"] = "dummy" if Path(model).is_dir() else "auto"
    begun = time.perf_counter()
    with LLM(model, quantization=method, speculative="off", **settings) as llm:
        loaded = time.perf_counter() - begun

        def seconds(prompt: list[int], tokens: int) -> float:
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            start = time.perf_counter()
            llm.generate([prompt], params, use_tqdm=False)
            return time.perf_counter() - start

        def median(run: Callable[[], float]) -> float:
            return statistics.median(run() for _ in range(3))

        seconds(short, NEW)
        whole, first = median(lambda: seconds(short, 1 + NEW)), median(lambda: seconds(short, 1))
        return {
            "decode_tokens_per_s": NEW / (whole - first),
            "prefill_tokens_per_s": LONG / statistics.median(seconds(each, 1) for each in long),
            "weights_gib": llm.plan.weight_bytes / GIB,
            "load_s": loaded,
            "threads": torch.get_num_threads(),
        }


def compared(model: str, rounds: int, dtype: str) -> Row:
    """[median, least, most] of each figure of each method, which run in turns."""
    runs: dict[str, list[Row]] = {method: [] for method in METHODS}
    for _ in range(rounds):
        for method, found in runs.items():
            command = [sys.executable, "-m", "benchmarks.made_codes", "--run", model, method, dtype]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    return {
        method: {
            figure: [
                round(f([run[figure] for run in found]), 3) for f in (statistics.median, min, max)
            ]
            for figure in found[0]
        }
        for method, found in runs.items()
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=4, help="of Llama 3.2 1B's 16")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        print(json.dumps(measure(*args.run)))
        return
    exit_on_sigterm()
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        write_shape(folder, args.layers)
        names = {"SmolLM2-135M": "smollm2-135m"}
        names[f"Llama 3.2 1B's shape, {args.layers} layers"] = folder
        for name, model in names.items():
            rows[name] = compared(model, args.rounds, args.dtype)
            print(name, json.dumps(rows[name]), flush=True)
    report = {"rows": rows, "rounds": args.rounds, "dtype": args.dtype, "versions": versions()}
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
