"""What tests of ranks as processes share."""

from __future__ import annotations

import pytest

from nanoengine.workers import leading_rank
from nanoengine.workers.processes import WorkerProcesses


@pytest.fixture
def pids(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes of ranks that are started."""
    found: list[int] = []

    class Seen(WorkerProcesses):
        def __init__(self, *args: object, **named: object) -> None:
            super().__init__(*args, **named)  # type: ignore[arg-type]
            found.extend(self.pids)

    monkeypatch.setattr(leading_rank, "WorkerProcesses", Seen)
    return found
