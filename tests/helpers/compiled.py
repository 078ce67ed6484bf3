"""Programs that compile Triton kernels, in a process that does not interpret them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def compiled_by(*arguments: str) -> list[Any]:
    """What a program of Python printed: a line of JSON for each kernel."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
