"""Changes what config.json says, key by key: a tiny model of every architecture must then be
refused, or have transformers' logits.

    python benchmarks/proofs/config_keys.py [NAME ...] [--several N] [--seed S] [--json FILE]

NAME is one of the tests' tiny models; all, if none is given. See tests/helpers/other_keys.py for
what is changed and which differences are meant. Prints a line for each model; exit code 1 if
another one differs, or fails by no error of ours.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch  # noqa: E402
from other_keys import Change, Outcome, changes, outcome, several  # noqa: E402 (found by the lines above)
from tiny_models import TINY  # noqa: E402

from benchmarks.proofs.key_table import Row, print_table  # noqa: E402


def row_of(tiny: str, num_several: int, seed: int) -> Row:
    """The counts of one model, and each change that is not as it must be, or is known."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chance, counts = random.Random(f"{tiny} {seed}"), Counter[str]()
    row: Row = {"model": tiny, "wrong": [], "known": []}
    good: list[Change] = []
    with tempfile.TemporaryDirectory() as name:
        base = Path(name) / "base"
        TINY[tiny](base)
        todo = changes(tiny)
        for number in range(len(todo) + num_several):
            change = todo[number] if number < len(todo) else several(chance, good)
            folder = Path(name) / str(number)
            folder.mkdir()
            found = outcome(change, folder, base)
            shutil.rmtree(folder)
            counts[found.kind] += 1
            if change.how == "set" and found.kind in ("equal", "refused"):
                good.append(change)
            if found.kind in ("differs", "fails"):
                is_known = found.kind == "differs" and change.known
                row["known" if is_known else "wrong"].append(_told(change, found))
    return row | {"counts": counts}


def _told(change: Change, found: Outcome) -> Row:
    return {"how": change.how, "values": change.values, "why": change.known} | asdict(found)


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="of tiny models")
    parser.add_argument("--several", type=int, default=60, help="changes of several keys")
    parser.add_argument("--seed", type=int, default=0, help="of these")
    parser.add_argument("--json", type=Path, help="write the results there, too")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - TINY.keys())
    if unknown:
        parser.error(f"no tiny model is called {', '.join(unknown)}")
    each = [(tiny, arguments.several, arguments.seed) for tiny in arguments.names or TINY]
    return print_table(row_of, each, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
