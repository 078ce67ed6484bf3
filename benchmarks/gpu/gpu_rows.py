"""Runs the rows of gpu_check.py one by one: each is bounded in time and saved at once, and one that
fails does not stop the others.
"""

from __future__ import annotations

import gc
import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from tqdm import tqdm

Result = dict[str, Any]
Run = Callable[[], Any]
MOST_SECONDS = 150.0


class TooLongError(Exception):
    """A row took longer than it may."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises TooLongError in the main thread, in the middle of the work, after so much time. A call
    into the GPU is not interrupted: it ends first.
    """

    def stop(_: int, __: FrameType | None) -> None:
        raise TooLongError(f"it took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def chosen(groups: dict[str, dict[str, Run]], only: list[str] | None) -> dict[str, Run]:
    """The rows of these names and groups, all without names. Raises ValueError for other names."""
    rows = {name: run for group in groups.values() for name, run in group.items()}
    if only is None:
        return rows
    if unknown := sorted({*only} - {*groups, *rows}):
        raise ValueError(f"no row is called {', '.join(unknown)}; there are {', '.join(rows)}")
    wanted = {name for group in {*only} & {*groups} for name in groups[group]} | {*only}
    return {name: run for name, run in rows.items() if name in wanted}


def run_rows(
    rows: dict[str, Run],
    result: Result,
    limits: dict[str, float],
    file: Path | None,
    seconds: float | None = None,
) -> None:
    """Put what each row finds into `result`, under its name, and write that to the file after each.

    A row that is a generator gives one part after the other, and what came before it failed is
    kept. limits: most seconds of a row, where that is not MOST_SECONDS. result["failed"] gets the
    reasons of those that failed, result["seconds"] their times. seconds: after so many no row
    begins; result["not_run"] has those that were left.
    """
    result |= {"seconds": {}, "failed": {}, "not_run": []}
    end = time.perf_counter() + (math.inf if seconds is None else seconds)
    for name, run in (bar := tqdm(rows.items())):
        bar.set_description(name)
        start = time.perf_counter()
        if start >= end:
            result["not_run"].append(name)
            save(result, file)
            continue
        try:
            with at_most(limits.get(name, MOST_SECONDS)):
                found = run()
                if isinstance(found, Iterator):
                    result[name] = []
                    for part in found:
                        result[name].append(part)
                        save(result, file)
                else:
                    result[name] = found
        except Exception as error:
            result["failed"][name] = f"{type(error).__name__}: {str(error)[:600]}"
        result["seconds"][name] = round(time.perf_counter() - start, 1)
        save(result, file)
        free_memory()  # a failed row may have left an engine


def free_memory() -> None:
    """Free what nobody refers to any more, pinned memory too: an engine that asks for most of the
    RAM is refused while PyTorch keeps that of the one before.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()


def save(result: Result, file: Path | None) -> None:
    """Write the result, if there is a file for it."""
    if file is not None:
        file.write_text(json.dumps(result, indent=2) + "\n")


def is_ok(result: Result, names: list[str]) -> bool:
    """Whether no row failed, and no row or part of one says that it is not ok."""
    found = [result[name] for name in names if name in result]
    each = [row for rows in found for row in (rows if isinstance(rows, list) else [rows])]
    dicts = [row for row in each if isinstance(row, dict)]
    parts = [part for each in dicts for part in (each, *each.values()) if isinstance(part, dict)]
    return not result["failed"] and all(part.get("ok", True) for part in parts)
