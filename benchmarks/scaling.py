"""`bench.py scaling`: decode speed by batch size and context, and its share of the limit.

Runs steps of the engine's own model runner over random KV, so nothing is prefilled.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.limits import Model, decode_steps, measure_limits, rounded
from nanoengine.api.llm import LLM
from nanoengine.bench.main import make_llm
from nanoengine.config.engine import GIB
from nanoengine.loading.find_model import resolve_model
from nanoengine.loading.model_config import read_model_config
from nanoengine.startup.probe import time_steps

Row = dict[str, Any]
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (1024, 2048, 4096, 8192)


def scaling(args: argparse.Namespace) -> Row:
    """Measure a row for each batch size and context; `tokens_per_s` is null if the KV does not fit.

    share_of_limit: the least time of a step, by limits.share_of_limits, over its measured time.
    kv_gb_per_s: bytes of K and V of all contexts over the time of the whole step.
    """
    limits = measure_limits(args.num_threads or torch.get_num_threads())
    config = read_model_config(resolve_model(args.model))
    tokens = max(args.batches) * (max(args.contexts) + 1) + 256 * max(args.batches)
    settings = {
        "kv_cache_gib": tokens * config.kv_bytes_per_token(2) / GIB,
        "max_num_seqs": max(args.batches),
        "enable_prefix_caching": False,
    }
    with make_llm(args, **settings) as llm:
        cells = [(batch, context) for context in args.contexts for batch in args.batches]
        model = Model(config, 0, limits)
        rows = [_row(llm, model, *cell) for cell in tqdm(cells, desc="cells", file=sys.stderr)]
    return {"limits": asdict(limits), "rows": rows}


def _row(llm: LLM, model: Model, batch: int, context: int) -> Row:
    engine = llm.llm_engine
    times = time_steps(engine.runner, engine.kv, engine.device, [context] * batch)
    row: Row = {"batch": batch, "context": context, "tokens_per_s": None}
    if not times:
        return row
    seconds = statistics.median(times)
    ((num_bytes, flop),) = decode_steps(model, [(context - 1, 2)] * batch)
    read, matmul = model.limits.read_gb_per_s * 1e9, model.limits.matmul_gflop_per_s * 1e9
    kv_bytes = batch * context * model.config.kv_bytes_per_token(2)
    return row | {
        "tokens_per_s": rounded(batch / seconds),
        "step_ms": rounded(seconds * 1e3),
        "step_ms_min_max": [rounded(min(times) * 1e3), rounded(max(times) * 1e3)],
        "share_of_limit": rounded(max(num_bytes / read, flop / matmul) / seconds),
        "share_of_read": rounded(num_bytes / seconds / read),
        "share_of_matmul": rounded(flop / seconds / matmul),
        "kv_gb_per_s": rounded(kv_bytes / seconds / 1e9),
    }


def add_commands(commands: Any) -> Iterator[tuple[argparse.ArgumentParser, Callable[..., Any]]]:
    """Yield this module's subcommand with its function."""
    sub = commands.add_parser(
        "scaling",
        help="decode speed over batch sizes and contexts",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    sub.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="requests a step")
    sub.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, help="tokens of each")
    sub.add_argument(
        "--kv-cache-gib", type=float, help="KV budget; default: what the largest needs"
    )
    yield sub, scaling
