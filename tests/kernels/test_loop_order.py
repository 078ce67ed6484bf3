"""No kernel needs the order in which OpenMP hands out steps, but where it asks for that order."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

GCC = shutil.which("gcc") or ""
SOURCE = Path(__file__).with_name("backward_loops.c")
# Of a hybrid model with experts: many rows, few and one; a context whose attention is shared out.
PROGRAM = """
import sys
from nanoengine import LLM, SamplingParams
with LLM(sys.argv[1], num_threads=3, enforce_eager=True) as llm:
    prompts = [[(7 * i + n) % 90 + 1 for i in range(n)] for n in (1, 40, 300)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
    for output in llm.generate(prompts, params, use_tqdm=False):
        (made,) = output.outputs
        print(made.token_ids, made.cumulative_logprob.hex())
"""


def run(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)],
        env=os.environ | {"CC": GCC} | variables,
        text=True,
        capture_output=True,
        timeout=240,
    )


@pytest.mark.skipif(
    not GCC or sys.platform != "linux", reason="takes the place of GCC's OpenMP on Linux"
)
def test_loops_may_run_backward(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    library = tmp_path / "backward.so"
    build = [GCC, "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(build, check=True, timeout=60)
    folder = tiny("qwen3.5-moe")
    forward, backward = run(folder), run(folder, LD_PRELOAD=str(library))
    assert backward.returncode == 0, backward.stderr
    turned = re.search(r"(\d+) loops ran backward", backward.stderr)
    assert turned and int(turned[1]) > 100, backward.stderr
    assert backward.stdout == forward.stdout and forward.stdout.count("\n") == 3
