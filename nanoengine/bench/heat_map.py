"""Draws a needle report as a picture: score by length and depth. Needs matplotlib."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanoengine.bench.niah import INDUCTION

NUM_BANDS = 10  # of depth
MIB = 1 << 20


def draw_heat_map(report: Mapping[str, Any], path: Path) -> None:
    """Write a PNG: a column for each length, a row for each tenth of the depth."""
    from matplotlib.figure import Figure  # optional, and slow to import
    from matplotlib.patches import Patch

    lengths, grid = scores(report["samples"])
    figure = Figure(figsize=(5.5 + 0.6 * max(1, len(lengths)), 5.5), layout="constrained")
    axes = figure.add_subplot(xlabel="length (tokens of prompt and answer)", ylabel="depth (%)")
    axes.set_title("\n".join(title_lines(report)), fontsize=9)
    image = axes.imshow(grid or [[]], cmap="RdYlGn", vmin=0, vmax=100, aspect="auto")
    axes.set_facecolor("white")
    axes.set_xticks([i - 0.5 for i in range(1, len(lengths))], minor=True)
    axes.set_yticks([band - 0.5 for band in range(1, NUM_BANDS)], minor=True)
    axes.grid(which="minor", color="lightgrey", linewidth=0.5)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(
        range(NUM_BANDS), [f"{10 * band}-{10 * band + 10}" for band in range(NUM_BANDS)]
    )
    figure.colorbar(image, label="score (%)")
    white = Patch(facecolor="white", edgecolor="grey", label="white: no sample")
    figure.legend(handles=[white], loc="outside lower center", frameon=False, fontsize=8)
    figure.savefig(path, format="png", dpi=120)


def scores(samples: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[list[float]]]:
    """The lengths, and for each tenth of the depth the mean score at each length, 0 to 100; NaN
    where there is no sample.
    """
    cells: dict[tuple[int, int], list[float]] = {}
    for sample in samples:
        if sample["depth"] is not None:
            band = min(NUM_BANDS - 1, int(sample["depth"] * NUM_BANDS // 100))
            cells.setdefault((band, sample["length"]), []).append(100 * sample["score"])
    lengths = sorted({length for _, length in cells})
    nothing = [float("nan")]
    grid = [
        [statistics.fmean(cells.get((band, length), nothing)) for length in lengths]
        for band in range(NUM_BANDS)
    ]
    return lengths, grid


def title_lines(report: Mapping[str, Any]) -> list[str]:
    """Task and model; the KV budget and how KV is read; how many samples, and when."""
    settings, kv = report["settings"], report["kv"]
    task = Path(settings["data_file"] or settings["task"]).name
    if settings["task"] != INDUCTION:
        task += f" ({settings['mode']}, {settings['template']})"
    budget = f"KV: {_mib(kv['device_bytes'])} on the device"
    if kv["host_bytes"]:
        how = "streamed" if kv["ring_bytes"] else "read in place"
        budget += f", up to {_mib(kv['host_bytes'])} in RAM, {how}"
    else:
        budget += ", no offload"
    return [
        f"{task}, model {Path(settings['model']).name}",
        budget,
        f"{report['num_correct']} of n = {report['num_samples']} right, {report['date']}",
    ]


def _mib(num_bytes: int) -> str:
    mib = num_bytes / MIB
    return f"{mib:,.0f} MiB" if mib >= 10 else f"{mib:.1f} MiB"
