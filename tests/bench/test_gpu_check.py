"""`make gpu-check` in small shapes on a CPU: what only a GPU runs in earnest must not rot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.breadth
def test_the_rehearsal_runs_to_its_end(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    script = Path(__file__).parents[2] / "benchmarks" / "gpu" / "gpu_check.py"
    command = [sys.executable, str(script), "--device", "cpu", "--json", str(result)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(result.read_text())
    assert found["rehearsal"] and len(found["seconds"]) > 20
    assert found["failed"] == {} and found["ok"]
    assert [row["ranks"] for row in found["two_gpus"] if "ranks" in row] == [1, 2] * 3
    assert 0 < found["two_gpus"][-1]["error_after_s"] < 2
    hashes = {(row["context"], row["hash"]) for row in found["line"] if "hash" in row}
    assert len(hashes) == len(dict(hashes)) == 3, "the same tokens however a request decodes"
    assert [row["oracle_right"] for row in found["line"] if row.get("how") == "drafts"] == [1, 1]
    assert {row.get("how") for row in found["line"]} == {None, "resident", "streamed", "drafts"}
