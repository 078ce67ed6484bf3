"""The check of the plan runs, and the table of docs/small_gpu.md is what its command prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import plan_check, small_gpu
from nanoengine.startup.machine_speed import MachineSpeed

ROOT = Path(__file__).parents[2]


@pytest.mark.usefixtures("in_16_bits")  # of which held_share is 1
def test_the_check_compares_both_modes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """On a shape that loads at once; its speed is not what was `measured`."""
    speed = MachineSpeed("here", "2026-11-22", 20.0, 10.0, 0.0, 9e5, False)
    monkeypatch.setattr(plan_check, "measure_speed", lambda *_: speed)
    monkeypatch.setattr(plan_check, "remember_speed", lambda speed: None)
    monkeypatch.setitem(plan_check.SHAPES, "tiny", (64, 64, 2, 2, 1, 128))
    out = tmp_path / "made" / "plan.json"
    asked = ["--models", "tiny", "--context", "600", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["plan_check", *asked])
    with pytest.raises(SystemExit) as end:
        plan_check.main()
    found = json.loads(out.read_text())
    assert end.value.code == 1 and not found["is_near"]
    assert json.loads(capsys.readouterr().out) == found
    resident, offloaded = found["rows"]
    assert (resident["mode"], offloaded["mode"]) == ("resident", "offloaded")
    for row in found["rows"]:
        assert row["bytes_off"] < 0.03 and row["tokens_per_s"] > 2 * row["predicted_tokens_per_s"]
        assert row["speed_off"] < -0.5


@pytest.mark.breadth
def test_the_page_has_the_table_that_its_command_prints() -> None:
    page = (ROOT / "docs/small_gpu.md").read_text(encoding="utf-8")
    assert "\n".join(small_gpu.table()) in page
