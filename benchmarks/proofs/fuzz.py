"""Throws damaged files, odd settings and odd parameters at the engine: each must be accepted, or be
refused by an error of ours, in bounded time and memory.

    python benchmarks/proofs/fuzz.py [--cases N] [--loads N] [--seed S] [--minutes M]
                                     [--json FILE]
    python benchmarks/proofs/fuzz.py --case "gguf:1234"

Cases run in children forked from a process that imported and never computed, with a limit on their
memory and a clock for each case. Prints how many cases of each target ran, at what rate, and what
became of them; exit code 1 if any crashed, hung, or raised something else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from fuzz_cases import LOAD, PARSE, Bench, make_seeds, run_case  # noqa: E402 (found just above)

BATCH = 200  # cases of one child
CASE_SECONDS = 30
CASE_BYTES = 2 << 30  # beside what the imports took
LANES = os.cpu_count() or 1
SHOWN = 20


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=100_000, help="of parsing, in all")
    parser.add_argument("--loads", type=int, default=3_000, help="whole loads with a greedy text")
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("--minutes", type=float, default=30, help="stop after so many")
    parser.add_argument("--case", help="run this one here, as TARGET:NUMBER")
    parser.add_argument("--json", type=Path, help="write the results there, too")
    parser.add_argument("--make-seeds", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make_seeds:
        make_seeds(arguments.make_seeds)
        return 0
    with tempfile.TemporaryDirectory() as name:
        seeds = Path(name) / "seeds"
        seeds.mkdir()
        make = [sys.executable, __file__, "--make-seeds", str(seeds)]
        environment = os.environ | {"XDG_CACHE_HOME": str(seeds / "cache")}
        subprocess.run(make, check=True, capture_output=True, timeout=300, env=environment)
        if arguments.case:
            return run_one(arguments.case, seeds, Path(name))
        results = run_all(arguments, seeds, Path(name))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return int(any(result["failures"] for result in results))


def run_one(case: str, seeds: Path, folder: Path) -> int:
    target, number = case.split(":")
    os.environ["XDG_CACHE_HOME"] = str(folder / "scratch" / "cache")
    (folder / "scratch").mkdir()
    print(run_case(Bench(seeds, folder / "scratch"), target, int(number)))
    return 0


def run_all(arguments: argparse.Namespace, seeds: Path, folder: Path) -> list[dict[str, Any]]:
    """All targets, one after the other, each over all lanes."""
    deadline = time.monotonic() + 60 * arguments.minutes
    results = []
    for targets, total in ((PARSE, arguments.cases), (LOAD, arguments.loads)):
        whole = sum(share for _, share in targets.values())
        for target, (_, share) in targets.items():
            numbers = range(arguments.seed, arguments.seed + total * share // whole)
            results.append(run_target(target, numbers, deadline, seeds, folder))
            print_result(results[-1])
    return results


def run_target(
    target: str, numbers: range, deadline: float, seeds: Path, folder: Path
) -> dict[str, Any]:
    """Counts of outcomes and a list of failures."""
    begin = time.monotonic()
    lanes = []
    for lane in range(LANES):
        log = folder / f"lane-{lane}.jsonl"
        pid = os.fork()
        if not pid:
            with log.open("w") as file:
                batches = range(numbers.start + lane * BATCH, numbers.stop, LANES * BATCH)
                for first in batches:
                    batch = range(first, min(first + BATCH, numbers.stop))
                    if time.monotonic() < deadline:
                        run_batch(target, batch, seeds, folder / f"scratch-{lane}", file)
            os._exit(0)
        lanes.append((pid, log))
    outcomes: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    for pid, log in lanes:
        os.waitpid(pid, 0)
        for line in log.read_text().splitlines():
            number, outcome, is_failure = json.loads(line)
            outcomes["failed" if is_failure else outcome] += 1
            if is_failure:
                failures.append({"case": f"{target}:{number}", "how": outcome})
    seconds = time.monotonic() - begin
    return {
        "target": target,
        "first": numbers.start,
        "asked": len(numbers),
        "cases": sum(outcomes.values()),
        "seconds": round(seconds, 1),
        "outcomes": dict(outcomes.most_common()),
        "failures": failures,
    }


def run_batch(target: str, numbers: range, seeds: Path, scratch: Path, log: Any) -> None:
    """The cases in children; one that dies has failed, and the next child goes on after it."""
    done = numbers.start
    while done < numbers.stop:
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reader)
            with tempfile.TemporaryDirectory(prefix=scratch.name, dir=scratch.parent) as name:
                work(target, range(done, numbers.stop), seeds, Path(name), writer)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as lines:
            for line in lines:
                log.write(line)
                done = json.loads(line)[0] + 1
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code:
            how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            what = "no end in time" if code == -signal.SIGALRM else f"died: {how}"
            log.write(json.dumps([done, what, True]) + "\n")
            done += 1


def work(target: str, numbers: range, seeds: Path, folder: Path, writer: int) -> None:
    """In a child: case after case, each told when it is over."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a case without an end kills the child
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + CASE_BYTES, held + CASE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    bench = Bench(seeds, folder)
    for number in numbers:
        signal.setitimer(signal.ITIMER_REAL, CASE_SECONDS)
        try:
            told = [number, run_case(bench, target, number), False]
        except BaseException as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno}"
            told = [number, f"{type(error).__name__} at {where}: {str(error)[:300]}", True]
        os.write(writer, (json.dumps(told) + "\n").encode())


def print_result(result: dict[str, Any]) -> None:
    rate = result["cases"] / max(result["seconds"], 1e-9)
    shown = ", ".join(f"{name} {count}" for name, count in result["outcomes"].items())
    print(
        f"{result['target']:12} {result['cases']:6} of {result['asked']:6} cases from "
        f"{result['first']}, {result['seconds']:6} s, {rate:6.0f} a second: {shown}"
    )
    for failure in result["failures"][:SHOWN]:
        print(f"    {failure['case']}: {failure['how']}")
    sys.stdout.flush()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
