"""The figure of decode speed over context: what it takes from a result, and what it says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import figure
from benchmarks.pictures import PICTURES, RESULTS, SCHEMES, Scheme, digest


def result(**others: Any) -> dict[str, Any]:
    """A result of gpu_check.py as it would be: made up, and of no GPU."""
    refusal = "the prompt has 36001 tokens, but the limit is 36000; set enable_cpu_offload=True"
    rows = [
        {"how": how, "context": context, "tokens_per_s": speed, "hash": f"{context:08x}"}
        for how, context, speed in (
            ("resident", 8192, 190.0),
            ("streamed", 8192, 189.0),
            ("streamed", 131072, 4.4),
            ("drafts", 131072, 15.0),
        )
    ]
    about = {"budget_gb": 24, "longest": 36000, "token_bytes": 131072, "refusal": refusal}
    return {
        "rehearsal": False,
        "commit": "0123456789",
        "date": "2026-11-30",
        "hardware": {"device": "NVIDIA H200", "memory_gib": 139.8},
        "link": {"h2d_gb_per_s": 54.0},
        "line": [about, *rows],
        "offloaded_cache": [{"context": 131072, "transformers_tokens_per_s": 2.9}],
    } | others


def test_the_line_of_a_gpu() -> None:
    shown = figure.content(result())
    speeds = {line.label: [point.speed for point in line.points] for line in shown.lines}
    assert speeds == {
        "resident, no offload": [190.0],
        "nanoengine": [189.0, 4.4],
        "nanoengine, drafts of which 80 % are right": [15.0],
        "transformers, offloaded cache": [2.9],
    }
    assert shown.wall == 36000 and "36001 tokens" in shown.refusals[1]
    # 95,072 tokens do not fit, 128 KiB each.
    assert shown.link[0].speed == pytest.approx(54e9 / (95_072 * 131_072))
    assert [point.context for point in shown.link] == [131072, 1 << 20]
    assert "24 GB of one NVIDIA H200, 2026-11-30" in shown.title and not shown.mark
    assert all(len(found) == 1 for found in shown.hashes.values())


def test_a_rehearsal_and_missing_drafts_are_marked() -> None:
    assert figure.content(result(rehearsal=True)).mark == "REHEARSAL"
    assert "no speed of a GPU" in figure.content(result(rehearsal=True)).title
    without = [row for row in result()["line"] if row.get("how") != "drafts"]
    assert figure.content(result(line=without)).mark == "DRAFTS ARE MISSING"


def test_a_rehearsal_in_virtual_time_stands_beside_what_was_measured() -> None:
    old = json.loads((RESULTS / "gpu/h200.json").read_text())
    shown = figure.content(old | result(rehearsal=True, clock="virtual"))
    assert shown.mark == "NOT MEASURED" and "virtual time" in shown.title
    assert shown.lines[-1].label == "measured 2026-11-20: 1 GiB of KV on the GPU"
    assert [point.speed for point in shown.lines[-1].points] == [16.74, 3.4, 0.81]


def test_old_rows_stand_in_where_there_is_no_line() -> None:
    old = json.loads((RESULTS / "gpu/h200.json").read_text())
    shown = figure.content(old)
    assert shown.mark == "BEFORE DRAFTS" and "2026-11-20" in shown.title
    assert [point.speed for point in shown.lines[1].points] == [16.74, 3.4, 0.81]


def test_hashes_that_differ_are_drawn_in_another_colour() -> None:
    matplotlib = pytest.importorskip("matplotlib.figure")
    rows = result()["line"]
    rows[-1]["hash"] = "ffffffff"
    axes, scheme = matplotlib.Figure().add_subplot(), SCHEMES[0]
    figure.draw(figure.content(result(line=rows)), axes, scheme)
    labels = {tick.get_text().split()[0]: tick for tick in axes.get_xticklabels()}
    assert labels["8K"].get_text() == "8K\n00002000"
    assert labels["128K"].get_text() == "128K\n00020000\nffffffff"
    assert labels["128K"].get_color() == scheme.second != labels["8K"].get_color()


def test_it_draws_the_files_that_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(figure, "PICTURES", pictures := tmp_path / "docs" / "pictures")
    pictures.mkdir(parents=True)
    (tmp_path / "one.json").write_text(json.dumps(result(rehearsal=True)))
    (tmp_path / "two.json").write_text(json.dumps({"rehearsal": False}))
    monkeypatch.chdir(tmp_path)
    figure.main(["one.json", "two.json"])
    assert capsys.readouterr().out.split() == [
        "docs/pictures/line-light.svg",
        "docs/pictures/line-dark.svg",
    ]
    assert "24 GB of one NVIDIA H200" in (pictures / "line-dark.svg").read_text()


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_the_figure_shows_the_results_of_today(scheme: Scheme) -> None:
    files = tuple(file for file in figure.FILES if (RESULTS / file).exists())
    path: Path = PICTURES / f"line-{scheme.name}.svg"
    assert digest(files) in path.read_text(encoding="utf-8"), "run `make figure`"
