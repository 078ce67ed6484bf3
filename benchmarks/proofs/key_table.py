"""The table of config_keys.py and gguf_keys.py: a row for each model, made by several processes.

A row has the "model", "counts" of outcomes, and lists of the changes that are "wrong" or "known".
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def print_table(
    make: Callable[..., Row], each: Sequence[tuple[Any, ...]], path: Path | None
) -> int:
    """Print the rows that `make` gives for each of the arguments, and write them to `path`.

    Returns the exit status: 1 if any change is wrong.
    """
    rows: list[Row] = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for job in [pool.submit(make, *arguments) for arguments in each]:
            rows.append(job.result())
            print(_line(rows[-1]), flush=True)
    total: Counter[str] = sum((Counter(row["counts"]) for row in rows), Counter())
    num_wrong, num_known = (sum(len(row[kind]) for row in rows) for kind in ("wrong", "known"))
    print(f"{total.total()} changes: {_counted(total)}; {num_known} known, {num_wrong} wrong")
    if path:
        told = {"counts": total, "known": num_known, "wrong": num_wrong, "rows": rows}
        path.write_text(json.dumps(told, indent=1) + "\n")
    return int(num_wrong > 0)


def _line(row: Row) -> str:
    wrong = "".join(f"\n    WRONG: {json.dumps(each)}" for each in row["wrong"])
    return f"{row['model']:32} {_counted(row['counts'])}{wrong}"


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
