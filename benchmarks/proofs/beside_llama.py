"""Reads the same GGUF files as llama.cpp does: tiny random models of every architecture, and
vocabularies with nasty texts.

    python benchmarks/proofs/beside_llama.py PYTHON [NAME ...] [--vocabularies FOLDER]
                                             [--json FILE]

PYTHON is an interpreter in which llama-cpp-python is installed. A model has one row: the largest
difference of its logits to llama.cpp's over their spread, after each of 100 tokens of a prompt and
of 8 that are forced, one step each, all in fp32. A vocabulary has one, too: how many texts have the
same ids. FOLDER: of GGUF files that have a vocabulary alone, as llama.cpp's models/. NAME is a part
of a row's name.

Exit code 1 if anything differs that llama_cases.py does not explain, or nothing that it does.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from driver import Driver, small_engine  # noqa: E402 (found by the line above)

from benchmarks.proofs.llama_cases import KNOWN_TEXTS, Case, cases, make_file  # noqa: E402
from benchmarks.proofs.llama_texts import compare_texts, made_vocabularies  # noqa: E402
from nanoengine import SamplingParams  # noqa: E402
from nanoengine.errors import ModelLoadError  # noqa: E402
from nanoengine.loading.gguf.convert import convert_gguf  # noqa: E402

PEER = Path(__file__).with_name("llama_peer.py")
PROMPT_TOKENS, FORCED_TOKENS = 100, 8
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
Row = dict[str, Any]
Make = Callable[[Path], Row]


def our_logits(path: Path, prompt: list[int], forced: list[int]) -> npt.NDArray[np.float32]:
    """[tokens of both, vocabulary]. A prompt's own are those of its beginnings."""
    folder = path.with_name("converted")
    folder.mkdir()
    convert_gguf(path, folder, keeps_codes=True)
    driver = Driver(small_engine(folder, num_threads=1))
    tokens = prompt + forced
    ids = [driver.engine.add_request(tokens[: n + 1], ONE) for n in range(len(tokens))]
    driver.drain()
    driver.engine.close()
    rows: npt.NDArray[np.float32] = torch.stack([driver.logits[i][0] for i in ids]).numpy()
    return rows


def ask(python: str, tasks: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """llama.cpp's answers, up to the first error. It aborts where a file breaks its assertions."""
    path = folder / "tasks.json"
    path.write_text(json.dumps(tasks), encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [python, str(PEER), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    answers: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        about = [line for line in lines if "ASSERT" in line or "Error" in line] or lines[-1:]
        words = about[0][-200:] if about else "without a word"
        answers.append({"error": f"ended with {done.returncode}: {words}"})
    return answers


def compare_logits(name: str, case: Case, python: str, folder: Path) -> Row:
    """One row."""
    chance = random.Random(name)
    tokens = [chance.randrange(4, 200) for _ in range(PROMPT_TOKENS + FORCED_TOKENS)]
    prompt, forced = tokens[:PROMPT_TOKENS], tokens[PROMPT_TOKENS:]
    path, out = make_file(case, folder), folder / "logits.npy"
    forms = [path]
    # With weights in codes llama.cpp rounds activations, so it makes numbers of its codes first.
    tasks: list[dict[str, Any]] = []
    for form in case.forms:
        forms.append(folder / f"{len(forms)}.gguf")
        tasks.append({"source": str(forms[-2]), "target": str(forms[-1]), "ftype": form})
    task = {"model": str(forms[-1]), "prompt": prompt, "forced": forced, "out": str(out)}
    answer = ask(python, [*tasks, task], folder)[-1]
    row = {"name": name, "architecture": case.tiny, "known": case.known}
    try:
        ours = our_logits(forms[-2] if case.forms else path, prompt, forced)
    except ModelLoadError as error:
        return row | answer | {"refused": str(error).replace(str(folder), "")}
    if "error" in answer:
        return row | answer
    theirs = np.load(out)
    differences = np.abs(ours - theirs).max(axis=1) / theirs.std()
    agree = int((ours.argmax(axis=1) == theirs.argmax(axis=1)).sum())
    found = {"difference": float(differences.max()), "tolerance": case.tolerance}
    return row | found | {"same_choices": agree, "tokens": len(tokens)}


def line(row: Row) -> str:
    """The row of the table."""
    name, about = f"{row['name']:30}", "" if is_right(row) else "  DIFFERS"
    if row["known"]:
        about += f"  ({row['known']})"
    if "refused" in row:
        return f"{name} refused: {row['refused'][:160]}{about}"
    if "error" in row:
        return f"{name} llama.cpp: {row['error']}{about}"
    if "texts" in row:
        first = "".join(f"  {each['text']!a}" for each in row["different"][:1])
        return f"{name} {row['same']} of {row['texts']} texts{about}{first}"
    choices = f"{row['same_choices']} of {row['tokens']} choices"
    return f"{name} {row['difference']:.1e}  {choices}{about}"


def is_right(row: Row) -> bool:
    """A difference that is known must be there."""
    if "texts" in row:
        return ("refused" in row or row.get("same") != row["texts"]) == bool(row["known"])
    if "difference" not in row:
        return False
    return bool((row["difference"] <= row["tolerance"]) != bool(row["known"]))


def all_rows(python: str, vocabularies: Path | None) -> dict[str, Make]:
    """By name, and what makes each in an empty folder."""
    rows: dict[str, Make] = {}
    for name, case in cases().items():
        rows[name] = functools.partial(_of_model, name, case, python)
    for name, write in made_vocabularies().items():
        rows[f"vocabulary: {name}"] = functools.partial(_of_vocabulary, name, write, python)
    for path in sorted(vocabularies.glob("*.gguf")) if vocabularies else ():
        its = functools.partial(_of_vocabulary, path.name, _as_it_is(path), python)
        rows[f"vocabulary: {path.name}"] = its
    return rows


def _as_it_is(path: Path) -> Callable[[Path], Path]:
    return lambda _: path


def _of_model(name: str, case: Case, python: str, folder: Path) -> Row:
    return compare_logits(name, case, python, folder)


def _of_vocabulary(name: str, write: Callable[[Path], Path], python: str, folder: Path) -> Row:
    def answer(task: dict[str, Any]) -> dict[str, Any]:
        return ask(python, [task], folder)[-1]

    row = compare_texts(name, write(folder / "vocabulary.gguf"), folder, answer)
    return row | {"name": f"vocabulary: {name}", "known": KNOWN_TEXTS.get(name, "")}


def main() -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("python", help="with llama-cpp-python")
    parser.add_argument("names", nargs="*", help="parts of names of rows")
    parser.add_argument("--vocabularies", type=Path, help="a folder of GGUF files")
    parser.add_argument("--json", type=Path, help="write the results there, too")
    arguments = parser.parse_args()
    rows = []
    for name, make in all_rows(arguments.python, arguments.vocabularies).items():
        if not arguments.names or any(part in name for part in arguments.names):
            with tempfile.TemporaryDirectory() as folder:
                rows.append(make(Path(folder)))
            print(line(rows[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1, ensure_ascii=True) + "\n")
    wrong = [row["name"] for row in rows if not is_right(row)]
    print(f"{len(rows)} rows, {len(wrong)} not explained{': ' * bool(wrong)}{', '.join(wrong)}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
