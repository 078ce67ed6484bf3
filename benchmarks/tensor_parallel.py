"""One process with N threads beside N ranks with one: `python -m benchmarks.tensor_parallel`.

Each way runs in a process of its own, one after the other, some rounds of them: start-up, decode
steps of a batch over random KV, a prefill, and the memory of the largest process. Ranks gather over
shared memory and over gloo. At the end it times the record of a step, and looks whether the
products of this shape have the same bits in parts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.ending import exit_on_sigterm
from benchmarks.plan_check import SHAPES, SMOLLM2, model_of
from nanoengine import LLM, SamplingParams
from nanoengine.bench.report import versions
from nanoengine.config.model import ModelConfig
from nanoengine.devices.cpu import default_threads
from nanoengine.kernels.c_build import KernelBuildError
from nanoengine.kv.step_plan import DEVICE, Part, SequenceSpan, SlotWrite, StepPlan
from nanoengine.models.shard import Shard
from nanoengine.startup.plan import MemoryPlan
from nanoengine.startup.probe import time_steps
from nanoengine.workers import rank_setup
from nanoengine.workers.step_record import StepRecord, decode, encode

Row = dict[str, Any]
ONE, SHARED, GLOO = "one process", "ranks, shared memory", "ranks, gloo"
ROWS = (1, 2, 5, 16, 32, 64, 256)


def main() -> None:
    """Print the JSON object, or be one of the ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="1.2B", help=", ".join((SMOLLM2, *SHAPES)))
    parser.add_argument("--ranks", type=int, default=default_threads())
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--prefill", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the result there, too")
    parser.add_argument("--way", choices=(ONE, SHARED, GLOO), help=argparse.SUPPRESS)
    parser.add_argument("--format", default="auto", help=argparse.SUPPRESS)
    args = parser.parse_args()
    exit_on_sigterm()
    if args.way:
        print(json.dumps(measured(args)))
        return
    text = json.dumps(compared(args), indent=1)
    print(text)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(text + "\n", encoding="utf-8")


def compared(args: argparse.Namespace) -> Row:
    """All ways, round by round; ratios are medians over rounds of a way to one process."""
    rows: dict[str, list[Row]] = {ONE: [], SHARED: [], GLOO: []}
    with model_of(args.model) as (model, load_format):
        _run_rounds(args, model, load_format, rows)
    ratios = {
        way: {
            key: round(statistics.median(_ratios(rows[way], rows[ONE], key)), 3)
            for key in ("decode_tokens_per_s", "prefill_tokens_per_s")
        }
        for way in (SHARED, GLOO)
    }
    return {
        "model": args.model,
        "batch": args.batch,
        "context": args.context,
        "prefill": args.prefill,
        "versions": versions(),
        "ratios": ratios,
        "record_ms": round(record_ms(), 3),
        "product_bits": product_bits(args.model, args.ranks) if args.model in SHAPES else {},
        "rounds": rows,
    }


def _run_rounds(
    args: argparse.Namespace, model: str, load_format: str, rows: dict[str, list[Row]]
) -> None:
    command = [sys.executable, "-m", "benchmarks.tensor_parallel", "--model", model]
    command += ["--format", load_format, "--dtype", args.dtype]
    for name in ("ranks", "batch", "context", "prefill"):
        command += [f"--{name}", str(getattr(args, name))]
    for _ in range(args.rounds):
        for way, found in rows.items():
            done = subprocess.run(
                [*command, "--way", way], check=True, stdout=subprocess.PIPE, text=True
            )
            found.append(json.loads(done.stdout.splitlines()[-1]))
            print(way, found[-1], file=sys.stderr)


def _ratios(rows: list[Row], others: list[Row], key: str) -> Iterator[float]:
    return (row[key] / other[key] for row, other in zip(rows, others, strict=True))


def measured(args: argparse.Namespace) -> Row:
    """The figures of one way."""
    if args.way == GLOO:
        setattr(rank_setup, "make_region", _refuse)  # noqa: B010 (as a test would)
    tokens = (args.batch + 2) * (args.context + 256) + args.prefill
    start = time.perf_counter()
    llm = LLM(
        args.model,
        load_format=args.format,
        dtype=args.dtype,
        num_threads=args.ranks,
        tensor_parallel_size=1 if args.way == ONE else args.ranks,
        num_gpu_blocks=-(-tokens // 256) + args.batch,
        max_num_batched_tokens=max(2048, args.prefill),
        enable_prefix_caching=False,
    )
    with closing(llm):
        start_s = time.perf_counter() - start
        engine = llm.llm_engine
        lengths = [args.context] * args.batch
        times = time_steps(engine.runner, engine.kv, engine.device, lengths)
        times += time_steps(engine.runner, engine.kv, engine.device, lengths)
        begin = time.perf_counter()
        params = SamplingParams(temperature=0, max_tokens=1)
        llm.generate([[5] * args.prefill], params, use_tqdm=False)
        prefill_s = time.perf_counter() - begin
        return {
            "start_s": round(start_s, 2),
            "decode_tokens_per_s": round(args.batch / statistics.median(times), 2),
            "prefill_tokens_per_s": round(args.prefill / prefill_s, 1),
            "weight_and_kv_bytes": llm.plan.weight_bytes
            + llm.plan.kv.num_blocks * llm.plan.kv.block_bytes,
            "embedding_bytes": embedding_bytes(args, engine.model_config, llm.plan),
            "peak_gib": [round(each, 2) for each in _peaks()],
        }


def embedding_bytes(args: argparse.Namespace, model: ModelConfig, plan: MemoryPlan) -> int:
    """Of rank 0: all embeddings, and its rows of them that a head of these packs once more."""
    rows = model.vocab_size
    if args.way != ONE and model.tie_word_embeddings:
        rows += len(Shard(0, args.ranks).part(model.vocab_size))
    return rows * model.hidden_size * plan.kv.dtype.itemsize


def _refuse(size: int) -> int:
    raise KernelBuildError("gloo was asked for")


def _peaks() -> Iterator[float]:
    """GiB of the largest resident set of this process and of each of its children."""
    mine = os.getpid()
    children = Path(f"/proc/{mine}/task/{mine}/children").read_text().split()
    for pid in (mine, *children):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                yield int(line.split()[1]) / (1 << 20)


def record_ms(num_rows: int = 64, num_blocks: int = 64) -> float:
    """Milliseconds to write and read the record of a decode step."""
    spans = tuple(
        SequenceSpan(row, 0, tuple(range(row * num_blocks, (row + 1) * num_blocks)))
        for row in range(num_rows)
    )
    slots = tuple(row * num_blocks for row in range(num_rows))
    plan = StepPlan(
        num_tokens=num_rows,
        num_rows=0,
        writes=tuple(SlotWrite(row, slot, 7, 1) for row, slot in enumerate(slots)),
        write_slots=slots,
        reads=(Part(DEVICE, spans),),
    )
    tokens = tuple(range(num_rows))
    record = StepRecord(plan, tokens, tokens, ((1, 4096),) * num_rows, may_replay=False)
    return min(timeit.repeat(lambda: decode(encode(record)), number=20, repeat=20)) / 20 * 1e3


def product_bits(model: str, ranks: int) -> dict[str, bool]:
    """Whether each product of a layer, and the head, has the same float32 bits when its outputs are
    divided: for each kind of product, over several numbers of rows. All are computed by one thread:
    PyTorch's bits depend on the number of threads, too. model: of SHAPES.
    """
    torch.set_num_threads(1)
    hidden, wide, _, heads, kv_heads, vocab = SHAPES[model]
    kinds = {
        "qkv": (hidden, (heads + 2 * kv_heads) * 64),
        "out": (heads * 64, hidden),
        "gate_up": (hidden, 2 * wide),
        "down": (wide, hidden),
        "head": (hidden, vocab),
    }
    return {name: _same_bits(*shape, ranks) for name, shape in kinds.items()}


def _same_bits(inputs: int, outputs: int, ranks: int) -> bool:
    source = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=source)
    widths = Shard(0, ranks).widths(outputs)
    same = True
    for rows in ROWS:
        x = torch.randn(rows, inputs, generator=source)
        parts = [functional.linear(x, part) for part in torch.split(weight, widths)]
        same &= torch.equal(torch.cat(parts, dim=1), functional.linear(x, weight))
    return same


if __name__ == "__main__":
    main()
