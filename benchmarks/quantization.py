"""`bench.py quantization`: perplexity, memory and speed of quantised weights.

Each row runs in its own process, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.limits import rounded
from nanoengine.api.llm import LLM
from nanoengine.bench.main import make_llm
from nanoengine.config.engine import CHOICES, GIB
from nanoengine.loading.find_model import resolve_model
from nanoengine.loading.model_config import read_model_config
from nanoengine.sampling_params import SamplingParams
from nanoengine.startup.probe import time_steps

Row = dict[str, Any]
METHODS = CHOICES["quantization"]
BATCHES = (1, 8)
ROOT = Path(__file__).parents[1]
TEXT = ROOT / "tests" / "data" / "alice.txt"
COLUMNS = ("perplexity", "weight_mib", "peak_mib", "prefill_tokens_per_s")


def quantization(args: argparse.Namespace) -> Row:
    """Measure a row for each method; prints them as a table, too.

    perplexity: exp of the mean negative log-likelihood of the text's tokens after the first.
    peak_mib: peak memory of a process that loads the model, prefills and decodes. prefill: a prompt
    of `--input-len` random tokens. decode: steps over random KV, `--context` tokens each.
    """
    if len(args.methods) == 1:
        return {"rows": [_measure(args, args.methods[0])]}
    rows = [_in_own_process(args, method) for method in args.methods]
    print(_table(rows))
    return {"rows": rows}


def perplexity(llm: LLM, token_ids: list[int]) -> float:
    """Perplexity of a text that fits the context, each token given those before it."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate(token_ids, params, use_tqdm=False)
    scored = zip(token_ids[1:], (output.prompt_logprobs or [])[1:], strict=True)
    logprobs = [entry[token_id].logprob for token_id, entry in scored if entry]
    return math.exp(-statistics.fmean(logprobs))


def _measure(args: argparse.Namespace, method: str) -> Row:
    config = read_model_config(resolve_model(args.model))
    tokens = max(max(BATCHES) * (args.context + 256), args.input_len, args.max_text_tokens) + 512
    settings = {
        "quantization": method,
        "kv_cache_gib": tokens * config.kv_bytes_per_token(4) / GIB,
        "max_num_seqs": max(BATCHES),
        "enable_prefix_caching": False,
    }
    with make_llm(args, **settings) as llm:
        engine = llm.llm_engine
        row: Row = {"method": method, "prefill_tokens_per_s": _prefill(args, llm)}
        for batch in BATCHES:
            lengths = [args.context] * batch
            times = time_steps(engine.runner, engine.kv, engine.device, lengths)
            row[f"decode_tokens_per_s_{batch}"] = rounded(batch / statistics.median(times))
        row["peak_mib"] = rounded(engine.device.peak_memory_mib())
        row["weight_mib"] = rounded(engine.plan.weight_bytes / (1 << 20))
        text = Path(args.text or TEXT).read_text(encoding="utf-8")
        ids = llm.tokenizer.encode(text)[: args.max_text_tokens]
        row["perplexity"] = rounded(perplexity(llm, ids))
        return row | {"text_tokens": len(ids), "quantization": engine.plan.quantization}


def _prefill(args: argparse.Namespace, llm: LLM) -> float:
    """Tokens per second: the median of three prompts."""
    rng = random.Random(args.seed)
    vocab = llm.llm_engine.model_config.vocab_size
    params = SamplingParams(temperature=0, max_tokens=1)
    times = []
    for _ in range(4):
        prompt = [rng.randrange(vocab) for _ in range(args.input_len)]
        start = time.perf_counter()
        llm.generate([prompt], params, use_tqdm=False)
        times.append(time.perf_counter() - start)
    return rounded(args.input_len / statistics.median(times[1:]))


def _in_own_process(args: argparse.Namespace, method: str) -> Row:
    """Run the same command for one method; the last line of its output is the result."""
    given = vars(args) | {"methods": method}
    flags = [
        part
        for name, value in given.items()
        if value is not None and name not in ("run", "json")
        for part in ("--" + name.replace("_", "-"), str(value))
    ]
    command = [sys.executable, str(ROOT / "bench.py"), "quantization", *flags]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    row: Row = json.loads(done.stdout.splitlines()[-1])["rows"][0]
    return row


def _table(rows: list[Row]) -> str:
    columns = ("method", *COLUMNS, *(f"decode_tokens_per_s_{batch}" for batch in BATCHES))
    cells = [columns, *([str(row[column]) for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    )


def add_commands(commands: Any) -> Iterator[tuple[argparse.ArgumentParser, Callable[..., Any]]]:
    """Yield this module's subcommand with its function."""
    sub = commands.add_parser(
        "quantization",
        help="quantised weights (lossy): perplexity, memory, speed",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    sub.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="rows")
    sub.add_argument("--text", help="a text file for the perplexity; default: one of the tests'")
    sub.add_argument("--max-text-tokens", type=int, default=2000, help="most tokens of it")
    sub.add_argument("--input-len", type=int, default=1024, help="tokens of a prefill")
    sub.add_argument("--context", type=int, default=512, help="tokens of each decoding request")
    yield sub, quantization
