"""How long threads waited for a processor, read from files like Linux's."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from nanoengine.devices.waiting import WaitingShare


def waited(tasks: Path, **seconds: float) -> None:
    for name, each in seconds.items():
        (tasks / name).mkdir(exist_ok=True)
        (tasks / name / "schedstat").write_text(f"5 {int(each * 1e9)} 7\n")


def test_the_thread_that_waited_most_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    waited(tmp_path, a=3.0, b=5.0)
    share = WaitingShare(tmp_path)
    clock[0] += 2
    waited(tmp_path, a=3.5, b=5.1)
    assert share.now() == pytest.approx(0.25)
    waited(tmp_path, new=1.0)
    (tmp_path / "ended").mkdir()
    assert share.now() == pytest.approx(0.5)
    waited(tmp_path, a=30.0)
    assert share.now() == 1.0


def test_without_such_files_the_load_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = WaitingShare(tmp_path / "none")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for load, expected in ((0.0, 0.0), (1.9, 0.0), (4.0, 0.5)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 9.0, 9.0))
        assert share.now() == expected
