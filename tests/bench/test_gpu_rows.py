"""The rows of `make gpu-check`: one that fails or takes too long costs no other row."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu.gpu_rows import chosen, is_ok, run_rows


def parts(is_slow: bool = False) -> Iterator[dict[str, int]]:
    """Two parts; the time of a slow row is over between them."""
    yield {"number": 1}
    if is_slow:
        assert 200 < signal.getitimer(signal.ITIMER_REAL)[0] <= 300
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        time.sleep(600)
    yield {"number": 2}


def test_a_row_that_fails_leaves_the_others_and_its_own_first_parts(tmp_path: Path) -> None:
    file, result = tmp_path / "result.json", {"device": "none"}

    def fails() -> None:
        assert json.loads(file.read_text())["first"] == {"speed": 3}, "saved before the next row"
        raise ValueError("no such shape")

    rows = {
        "first": lambda: {"speed": 3},
        "fails": fails,
        "slow": lambda: parts(is_slow=True),
        "last": parts,
    }
    run_rows(rows, result, {"slow": 300}, file)
    assert result["failed"] == {
        "fails": "ValueError: no such shape",
        "slow": "TooLongError: it took more than 300 s",
    }
    assert result["slow"] == [{"number": 1}] and len(result["last"]) == 2
    assert [*result["seconds"]] == [*rows] and json.loads(file.read_text()) == result
    assert not is_ok(result, ["first", "last"])


def test_no_row_begins_when_the_time_is_over(tmp_path: Path) -> None:
    file, result = tmp_path / "result.json", {}
    rows = {"first": lambda: time.sleep(0.2), "second": lambda: {"speed": 3}}
    run_rows(rows, result, {}, file, seconds=0.1)
    assert result["not_run"] == ["second"] and "second" not in result
    assert json.loads(file.read_text())["not_run"] == ["second"]
    assert is_ok(result, [*rows])


@pytest.mark.parametrize(
    ("found", "ok"),
    [
        ({"ring_2": {"ok": True}, "speed": 3}, True),
        ({"ring_2": {"ok": False}}, False),
        ({"ok": False}, False),
        ([{"ok": True}, {"speed": 3}], True),
        ([{"ok": True}, {"ok": False}], False),
    ],
)
def test_a_row_says_whether_it_is_ok(found: object, ok: bool) -> None:
    assert is_ok({"failed": {}, "parity": found}, ["parity"]) is ok


def test_only_names_rows_and_groups() -> None:
    def nothing() -> None:
        """Is not run."""

    groups = {"checks": {"parity": nothing, "graphs": nothing}, "speeds": {"drafts": nothing}}
    assert [*chosen(groups, None)] == ["parity", "graphs", "drafts"]
    assert [*chosen(groups, ["speeds", "graphs"])] == ["graphs", "drafts"]
    with pytest.raises(ValueError, match="no row is called draft; there are parity, graphs"):
        chosen(groups, ["draft"])
