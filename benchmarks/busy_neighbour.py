"""Decode on a CPU beside a process that is always busy: `python -m benchmarks.busy_neighbour`.

Each run is a process: SmolLM2-135M, one request, then 16 at once, with a number of threads that is
set and with the engine's own, which follows the free cores. The busy process is a session of its
own, as another program of a user is.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.ending import exit_on_sigterm
from nanoengine import LLM, SamplingParams
from nanoengine.bench.report import versions

MODEL = "smollm2-135m"
WORKS = {"one request": (1, 20), "16 requests": (16, 100)}  # requests, tokens of a prompt
WARM_UP_S = 4.0  # in which the engine sees its neighbour
MEASURED_S, MOST_TOKENS = 6.0, 400
Row = dict[str, Any]


def measure(num_threads: int | None) -> Row:
    """Output tokens a second of each work, and the threads at the end."""
    found: Row = {}
    options: dict[str, Any] = {"kv_cache_gib": 0.5, "enable_prefix_caching": False}
    options |= {"num_threads": num_threads, "max_num_seqs": 32, "measure_speed": False}
    with LLM(MODEL, **options) as llm:
        rng = random.Random(0)
        end = time.perf_counter() + WARM_UP_S
        while time.perf_counter() < end:
            _speed(llm, rng, 1, 20, 10)
        for work, (requests, length) in WORKS.items():
            rate = _speed(llm, rng, requests, length, 4)
            tokens = int(min(MOST_TOKENS, max(4, MEASURED_S * rate / requests)))
            found[work] = _speed(llm, rng, requests, length, tokens)
        found["threads"] = torch.get_num_threads()
    return found


def _speed(llm: LLM, rng: random.Random, requests: int, length: int, tokens: int) -> float:
    prompts = [[rng.randrange(5, 40000) for _ in range(length)] for _ in range(requests)]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return requests * tokens / (time.perf_counter() - start)


@contextmanager
def busy(is_there: bool) -> Iterator[None]:
    """A process that computes all the time."""
    if not is_there:
        yield
        return
    command = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(command, start_new_session=True) as neighbour:
        try:
            yield
        finally:
            neighbour.kill()


def run_all(most: int, rounds: int) -> list[Row]:
    """A row for each number of threads (0: the engine's own), alone and beside a busy process."""
    cases = [(threads, beside) for threads in (0, 1, most) for beside in (False, True)]
    runs: dict[tuple[int, bool], list[Row]] = {case: [] for case in cases}
    for _ in range(rounds):
        for threads, beside in cases:
            command = [sys.executable, "-m", "benchmarks.busy_neighbour", "--run", str(threads)]
            with busy(beside):
                done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            runs[threads, beside].append(json.loads(done.stdout.splitlines()[-1]))
    return [
        {
            "num_threads": threads or "the engine's own",
            "beside a busy process": beside,
            "threads at the end": [run["threads"] for run in found],
        }
        | {
            work: [round(f([run[work] for run in found]), 1) for f in (statistics.median, min, max)]
            for work in WORKS
        }
        for (threads, beside), found in runs.items()
    ]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="that are set")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--run", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    exit_on_sigterm()
    if args.run is not None:
        print(json.dumps(measure(args.run or None)))
        return
    rows = run_all(args.threads, args.rounds)
    report = {
        "model": MODEL,
        "date": date.today().isoformat(),
        "versions": versions(),
        "rows": rows,
    }
    print(json.dumps(report, indent=1))
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
