"""Breaks a copy of the engine on purpose, a patch of tests/mutants/ at a time: each must be caught.

    python benchmarks/proofs/mutants.py [NAME ...] [--jobs N]

The head of a patch says what it breaks, which tests must notice (an id with spaces in quotes) and
with what message (a regular expression). The unpatched copy must pass those tests first. Prints a
row for each; exit code 1 if a mutant survives, fails for another reason, or does not apply. One
whose tests are skipped is not tried.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("nanoengine", "benchmarks", "tests", "pyproject.toml")
TIMEOUT_S = 240  # of one mutant
UNPATCHED_TIMEOUT_S = 60  # of each test that is named, on a busy machine
PASSED, FAILED = 0, 1  # pytest's exit codes; anything else is a broken run, not a verdict


@dataclass(frozen=True)
class Mutant:
    """One patch and what must happen."""

    path: Path
    breaks: str
    tests: tuple[str, ...]
    fails_with: str

    @classmethod
    def read(cls, path: Path) -> Mutant:
        head = dict(re.findall(r"^(Breaks|Tests|Fails with): (.*)$", path.read_text(), re.M))
        return cls(path, head["Breaks"], tuple(shlex.split(head["Tests"])), head["Fails with"])


@dataclass(frozen=True)
class Verdict:
    """How it went; `problem` is empty when the mutant was caught for the right reason, or when its
    tests are skipped here.
    """

    mutant: Mutant
    problem: str
    seconds: float
    output: str = ""
    is_skipped: bool = False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="patches to try, without .patch (default: all)")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1))
    arguments = parser.parse_args()
    known = {path.stem: path for path in sorted((ROOT / "tests/mutants").glob("*.patch"))}
    if unknown := [name for name in arguments.names if name not in known]:
        parser.error(f"no such mutant: {', '.join(unknown)}; there are {', '.join(known)}")
    mutants = [Mutant.read(known[name]) for name in arguments.names or known]
    if problem := run_unpatched(mutants):
        print(problem)
        return 1
    width = max(len(mutant.path.stem) for mutant in mutants)
    caught = skipped = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for verdict in pool.map(try_mutant, mutants):
            tell(verdict, width)
            skipped += verdict.is_skipped
            caught += not verdict.problem and not verdict.is_skipped
    print(f"\n{caught} of {len(mutants)} mutants caught, {skipped} not tried")
    return int(caught + skipped < len(mutants))


def run_unpatched(mutants: Iterable[Mutant]) -> str:
    """The tests of all mutants on an unchanged copy; what is wrong, or nothing."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        copy = copied_tree(Path(name))
        code, output = run_tests(copy, tests, UNPATCHED_TIMEOUT_S * len(tests))
    seconds = time.perf_counter() - started
    if code != PASSED:
        return f"{output}\nthe unpatched engine does not pass: mutants would prove nothing"
    print(f"unpatched: {len(tests)} tests named, all pass ({seconds:.0f} s)", flush=True)
    return ""


def try_mutant(mutant: Mutant) -> Verdict:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        copy = copied_tree(Path(name))
        problem, output, is_skipped = apply_patch(copy, mutant.path), "", False
        if not problem:
            code, output = run_tests(copy, mutant.tests)
            is_skipped = code == PASSED and " passed" not in output
            problem = "" if is_skipped else judge(mutant, code, output)
    return Verdict(mutant, problem, time.perf_counter() - started, output, is_skipped)


def judge(mutant: Mutant, code: int, output: str) -> str:
    if code == PASSED:
        return "SURVIVED"
    if code != FAILED:
        return f"pytest ended with {code}: no verdict"
    if not re.search(mutant.fails_with, output):
        return f"red, but not with {mutant.fails_with!r}"
    return ""


def copied_tree(folder: Path) -> Path:
    """The engine and its tests, and nothing else, in a folder of their own."""
    for name in COPIED:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "results"))
        else:
            shutil.copy(source, target)
    return folder


def apply_patch(folder: Path, patch: Path) -> str:
    """Apply it to the copy; what is wrong, or nothing."""
    # A temporary folder may lie inside some repository, whose root git would then take.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    done = subprocess.run(
        ["git", "apply", str(patch)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return f"does not apply: {done.stderr.strip()}"
    changed = re.findall(r"^\+\+\+ b/(.*)$", patch.read_text(), re.M)
    same = [name for name in changed if (folder / name).read_bytes() == (ROOT / name).read_bytes()]
    return f"changed nothing in {', '.join(same)}" if same or not changed else ""


def run_tests(folder: Path, tests: Iterable[str], timeout_s: float = TIMEOUT_S) -> tuple[int, str]:
    """pytest's exit code and output, up to the first failure."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", ""]  # -m: tests of every marker
    command = [sys.executable, "-m", "pytest", *options, *tests]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, f"no end after {timeout_s} s"
    return done.returncode, done.stdout + done.stderr


def tell(verdict: Verdict, width: int) -> None:
    """At once: a run of all takes an hour, and may be cut off."""
    what = verdict.problem or f"caught: {verdict.mutant.fails_with}"
    if verdict.is_skipped:
        what = "not tried: this machine skips its tests"
    print(f"{verdict.mutant.path.stem:{width}}  {verdict.seconds:4.0f} s  {what}")
    print(f"{'':{width}}          {verdict.mutant.breaks}", flush=True)
    if verdict.problem:
        print(f"{verdict.output[-3000:]}\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
