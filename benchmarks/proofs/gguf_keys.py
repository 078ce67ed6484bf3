"""Changes the metadata of GGUF files, key by key: a tiny model of every architecture must then be
refused, or have llama.cpp's logits.

    python benchmarks/proofs/gguf_keys.py PYTHON [NAME ...] [--json FILE]

PYTHON is an interpreter in which llama-cpp-python is installed. NAME is a row of beside_llama.py.
Each key gets other values, and is left out; keys that another architecture has are added. Prints a
line for each model; exit code 1 if one differs that KNOWN does not explain, or fails by no error of
ours.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from driver import Driver, small_engine  # noqa: E402 (found by the line above)
from gguf_model import GGUFModel  # noqa: E402
from other_keys import PROMPT, Outcome, other_values  # noqa: E402

from benchmarks.proofs.beside_llama import ONE, PEER  # noqa: E402
from benchmarks.proofs.key_table import Row, print_table  # noqa: E402
from benchmarks.proofs.llama_cases import BETAS, FACTORS, NO_WINDOW, cases, make_file  # noqa: E402
from nanoengine.errors import EngineError  # noqa: E402
from nanoengine.loading.gguf.convert import convert_gguf  # noqa: E402

LEFT_OUT = "left out"
TOKENS = [4 + token % 190 for token in PROMPT]
CHECKED = (40, 99, 100)  # tokens of a beginning, whose last one has these logits
OF_NUMBERS = (
    *("attention.clamp_kqv", "attention.max_alibi_bias", "attention.scale", "embedding_scale"),
    *("attention.temperature_scale", "attn_logit_softcapping", "expert_group_scale"),
    *("expert_weights_scale", "final_logit_softcapping", "logit_scale", "residual_scale"),
    *("rope.scaling.attn_factor", "swiglu_clamp_exp"),
)
ADDED: dict[str, list[Any]] = {key: [0.37] for key in OF_NUMBERS} | {
    "attention.causal": [False],
    "attention.key_length": [8],
    "attention.sliding_window": [13],
    "attention.sliding_window_pattern": [2],
    "attention.temperature_length": [16],
    "expert_gating_func": [1, 2, 3],
    "expert_weights_norm": [True, False],
    "interleave_moe_layer_step": [2],
    "leading_dense_block_count": [1],
    "rope.dimension_count": [8],
    "rope.scale_linear": [2.0],
    "rope.scaling.factor": [2.0],
    "rope.scaling.type": ["none", "linear", "yarn", "longrope"],
    "use_parallel_residual": [True, False],
}
EPS = "norms inside a layer have an eps of their own, as the models' own code has it"
ONE_THETA = "llama.cpp turns layers with a window and those without by one theta"
OF_SCORES = "llama.cpp multiplies scores, too, where RoPE is not YaRN's"
# Of a key, which architectures differ and why; None: whatever the key is.
KNOWN: list[tuple[tuple[str, ...], str | None, str]] = [
    (
        ("bailingmoe3", "deepseek2", "kimi-linear", "qwen35", "qwen35moe", "qwen3next"),
        "attention.layer_norm_rms_epsilon",
        EPS,
    ),
    (("llama", "phi3", "exaone4"), "attention.sliding_window", NO_WINDOW.format("them")),
    (("afmoe",), "attention.sliding_window_pattern", "llama.cpp has it in its code"),
    (("phi3",), "context_length", "the long divisors count if texts may be longer"),
    (("deepseek2",), "expert_gating_func", "without the key ours goes by the bias of choices"),
    (("deepseek2",), "expert_group_count", "llama.cpp chooses V2's groups as V3's"),
    (("deepseek2",), "rope.scale_linear", OF_SCORES),
    (("deepseek2",), "rope.scaling.factor", OF_SCORES),
    (("deepseek2",), "rope.scaling.type", OF_SCORES),
    (("deepseek2",), "rope.scaling.yarn_log_multiplier", "to llama.cpp 0 is a file's of before it"),
    (("gemma2",), "final_logit_softcapping", "llama.cpp divides by 0"),
    (("qwen35", "qwen35moe"), "rope.dimension_sections", "a text has no sections"),
    (("olmo2",), "rope.freq_base", "llama.cpp reads no theta of windows"),
    (("olmo2",), "rope.freq_base_swa", "llama.cpp reads no theta of windows"),
    (("arcee", "olmo2", "qwen2"), "rope.scaling.yarn_beta_fast", BETAS),
    (("laguna",), None, FACTORS),
    (("mellum",), "rope.freq_base", ONE_THETA),
    (("mellum",), "rope.freq_base_swa", ONE_THETA),
]


def known(arch: str, key: str) -> str:
    """Why logits may differ; "" if they may not. Laguna: of its RoPE."""
    for names, its_key, why in KNOWN:
        if arch in names and (key == its_key or (its_key is None and key.startswith("rope."))):
            return why
    return ""


def changes(arch: str, settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """A key without the name of the architecture, and its value."""
    for whole, value in settings.items():
        if whole.startswith(f"{arch}."):
            key = whole.removeprefix(f"{arch}.")
            yield key, LEFT_OUT
            others = other_values(key, value) if key != "rope.scaling.type" else ADDED[key]
            yield from ((key, other) for other in others)
    for key, values in ADDED.items():
        if f"{arch}.{key}" not in settings:
            yield from ((key, value) for value in values)


class Peer:
    """llama.cpp in a process of its own."""

    def __init__(self, python: str) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen(
            [python, str(PEER), "-"],
            stdin=pipe,
            stdout=pipe,
            stderr=quiet,
            text=True,
            env=environment,
        )

    def logits(self, path: Path) -> torch.Tensor | None:
        """[CHECKED, vocabulary]; None for a file that it cannot run."""
        out = path.with_name("logits.npy")
        task = {"model": str(path), "prompt": TOKENS, "forced": [], "out": str(out)}
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin and stdout
        stdin.write(json.dumps(task) + "\n")
        stdin.flush()
        if "error" in json.loads(stdout.readline()):
            return None
        rows = torch.from_numpy(np.load(out)[[number - 1 for number in CHECKED]])
        return rows if rows.isfinite().all() else None

    def close(self) -> None:
        """Let it end."""
        self._process.communicate()


def our_logits(path: Path) -> torch.Tensor:
    """[CHECKED, vocabulary]. Raises EngineError."""
    folder = path.with_name("converted")
    folder.mkdir()
    convert_gguf(path, folder, keeps_codes=True)
    driver = Driver(small_engine(folder, num_threads=1))
    ids = [driver.engine.add_request(TOKENS[:number], ONE) for number in CHECKED]
    driver.drain()
    driver.engine.close()
    return torch.stack([driver.logits[i][0] for i in ids])


def outcome(path: Path, peer: Peer, tolerance: float) -> Outcome:
    """As of other_keys."""
    theirs = peer.logits(path)
    try:
        ours = our_logits(path)
    except EngineError as error:
        said = str(error).replace(str(path.parent), "")
        return Outcome("refused" if theirs is not None else "not theirs", said[:200])
    except Exception as error:
        return Outcome("fails", f"{type(error).__name__}: {error}"[:200])
    if theirs is None:
        return Outcome("not theirs")
    by = float((ours - theirs).abs().max() / theirs.std().clamp(min=0.01))
    return Outcome("equal" if by <= tolerance else "differs", f"{by:.1e}")


def row_of(name: str, python: str) -> Row:
    """The counts of one model, and each change that is not as it must be, or is known."""
    torch.set_num_threads(1)
    case = cases()[name]
    peer, counts = Peer(python), Counter[str]()
    row: Row = {"model": name, "wrong": [], "known": []}
    made: list[GGUFModel] = []

    def keep(model: GGUFModel) -> None:
        case.change(model)
        made.append(model)

    with tempfile.TemporaryDirectory() as folder:
        make_file(replace(case, change=keep), Path(folder))
    (model,) = made
    settings = dict(model.settings)
    for key, value in changes(model.arch, settings):
        model.settings = {k: v for k, v in settings.items() if k != f"{model.arch}.{key}"}
        if value != LEFT_OUT:
            model.settings[f"{model.arch}.{key}"] = value
        with tempfile.TemporaryDirectory() as folder:
            found = outcome(model.write(Path(folder) / "model.gguf"), peer, case.tolerance)
        counts[found.kind] += 1
        if found.kind in ("differs", "fails"):
            why = known(model.arch, key) if found.kind == "differs" else ""
            told = {"key": key, "value": value, "kind": found.kind, "about": found.about}
            row["known" if why else "wrong"].append(told | {"why": why})
    peer.close()
    return row | {"counts": counts}


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("python", help="with llama-cpp-python")
    parser.add_argument("names", nargs="*", help="rows of beside_llama.py")
    parser.add_argument("--json", type=Path, help="write the results there, too")
    arguments = parser.parse_args()
    # Codes, and what differs as it is, would say nothing of keys.
    chosen = [name for name, case in cases().items() if not case.forms and not case.known]
    unknown = sorted(set(arguments.names) - set(chosen))
    if unknown:
        parser.error(f"no such row, or one that differs as it is: {', '.join(unknown)}")
    each = [(name, arguments.python) for name in arguments.names or chosen]
    return print_table(row_of, each, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
