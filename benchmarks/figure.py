"""`make figure`: decode speed over the length of the context, from what `make gpu-check` found.

    python -m benchmarks.figure [JSON ...]

Later files count over earlier ones. Rows of `line` are drawn, and the offloaded cache of
transformers beside them; without them the older rows of `long_context`. What is a rehearsal, or
lacks drafts, says so in large letters; a rehearsal in virtual time (gpu/virtual_line.py) shows what
a GPU measured beside it.
"""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.pictures import PICTURES, RESULTS, SCHEMES, Picture, Scheme, paint

FILES = ("gpu/h200_2026-11-27.json",)
FIRST_MEASURED = "2026-11-20"  # results without a date
LONGEST = 1 << 20
NEARLY_LONGEST = LONGEST - 1024  # room for what is generated
# What engines say of a request that KV on the GPU does not hold; vllm-project/vllm#2418.
VLLM = "larger than the maximum number of tokens that can be stored in KV cache"


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement. hash: of the tokens that were generated, "" if none was made."""

    context: int
    speed: float
    hash: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """Points of one way to decode. colour: a field of Scheme. is_wide: drawn behind the others."""

    label: str
    colour: str
    points: tuple[Point, ...]
    is_wide: bool = False


@dataclass(frozen=True, slots=True)
class Content:
    """What the figure shows. link: what the link allows. wall: the most tokens without offload.
    refusals: what engines say behind it. mark: large letters across the picture.
    """

    title: str
    lines: tuple[Line, ...]
    link: tuple[Point, ...]
    wall: int | None
    refusals: tuple[str, ...]
    mark: str

    @property
    def hashes(self) -> dict[int, set[str]]:
        """The hashes at each context; one each where every way gives the same tokens."""
        found: dict[int, set[str]] = {}
        for line in self.lines:
            for point in line.points:
                if point.hash:
                    found.setdefault(point.context, set()).add(point.hash)
        return found


def content(result: dict[str, Any]) -> Content:
    """What a result of gpu_check.py gives to draw."""
    made = _of_line(result) if result.get("line") else _of_long_context(result)
    if not result["rehearsal"]:
        return made
    if result.get("clock") != "virtual":
        title = "REHEARSAL in small shapes on a CPU: no speed of a GPU"
        return replace(made, title=title, mark="REHEARSAL")
    measured = Line(f"measured {FIRST_MEASURED}: 1 GiB of KV on the GPU", "peer", _streamed(result))
    title = "REHEARSAL in virtual time, in proportions of Llama-3.1-8B on an H200"
    return replace(made, title=title, mark="NOT MEASURED", lines=(*made.lines, measured))


def _of_line(result: dict[str, Any]) -> Content:
    about, *rows = result["line"]
    link = result["link"]["h2d_gb_per_s"]
    labels = {
        "resident": ("resident, no offload", "text"),
        "streamed": ("nanoengine", "ours"),
        "drafts": ("nanoengine, drafts of which 80 % are right", "second"),
    }
    lines = [
        Line(label, colour, _points(rows, how), is_wide=how == "resident")
        for how, (label, colour) in labels.items()
    ]
    theirs = tuple(
        Point(row["context"], row["transformers_tokens_per_s"])
        for row in result.get("offloaded_cache", ())
    )
    lines.append(Line("transformers, offloaded cache", "peer", theirs))
    first, longest = about["longest"], max(row["context"] for row in rows)
    ends = LONGEST if longest >= 8192 else longest  # small shapes are not drawn on
    contexts = [row["context"] for row in rows if row["context"] > 1.2 * first]
    allowed = tuple(
        Point(n, link * 1e9 / (about["token_bytes"] * (n - first)))
        for n in sorted({*contexts, ends})
    )
    device = f"{about['budget_gb']} GB of one {result['hardware']['device']}"
    return Content(
        title=f"Decoding one request: Llama-3.1-8B shapes, bf16, {device}, {_date(result)}",
        lines=tuple(line for line in lines if line.points),
        link=allowed,
        wall=first,
        refusals=(
            f"vLLM: “… {VLLM}”",
            f"nanoengine without offload: “{about['refusal'].split(';')[0]}”",
        ),
        mark="" if _points(rows, "drafts") else "DRAFTS ARE MISSING",
    )


def _points(rows: list[dict[str, Any]], how: str) -> tuple[Point, ...]:
    return tuple(
        Point(row["context"], row["tokens_per_s"], row["hash"]) for row in rows if row["how"] == how
    )


def _of_long_context(result: dict[str, Any]) -> Content:
    """Older results: with all KV on the GPU, whatever its size, and with 1 GiB of it."""
    rows = result["long_context"]["decode"]
    link = result["link"]["h2d_gb_per_s"]
    resident = tuple(Point(row["context"], 1000 / row["resident_step_ms"]) for row in rows)
    gib = result["hardware"]["memory_gib"]
    return Content(
        title=f"Decoding one request: Llama-3.1-8B shapes, bf16, one "
        f"{result['hardware']['device']}, {_date(result)}",
        lines=(
            Line(f"all KV on a GPU of {gib:.0f} GiB", "peer", resident),
            Line("1 GiB of KV on the GPU", "ours", _streamed(result)),
        ),
        link=tuple(Point(row["context"], link / row["streamed_gb"]) for row in rows),
        wall=None,
        refusals=(),
        mark="BEFORE DRAFTS",
    )


def _streamed(result: dict[str, Any]) -> tuple[Point, ...]:
    rows = result["long_context"]["decode"]
    return tuple(Point(row["context"], row["tokens_per_s"]) for row in rows)


def _date(result: dict[str, Any]) -> str:
    return str(result.get("date", FIRST_MEASURED))


def draw(shown: Content, axes: Any, scheme: Scheme) -> None:
    """Draw it on matplotlib's axes."""
    for line in shown.lines:
        xs, ys = [p.context for p in line.points], [p.speed for p in line.points]
        colour = getattr(scheme, line.colour)
        style: dict[str, Any] = {"marker": "o"}
        if line.is_wide:
            style = {"linewidth": 9, "alpha": 0.25, "solid_capstyle": "round"}
        axes.plot(xs, ys, color=colour, label=line.label, zorder=3, **style)
    label = "what the link allows without drafts"
    xs, ys = [p.context for p in shown.link], [p.speed for p in shown.link]
    axes.plot(xs, ys, "--", color=scheme.text, label=label, linewidth=1.2, zorder=4)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    contexts = sorted({p.context for line in shown.lines for p in line.points} | {*xs})
    hashes = shown.hashes
    axes.set_xticks(contexts, [_name(n, hashes.get(n, set())) for n in contexts], fontsize=9)
    for tick, context in zip(axes.get_xticklabels(), contexts, strict=True):
        if len(hashes.get(context, ())) > 1:  # ways to decode that differ
            tick.set_color(scheme.second)
    speeds = [p.speed for line in shown.lines for p in line.points] + ys
    axes.set_ylim(min(speeds) / 4, max(speeds) * 3)
    axes.minorticks_off()
    axes.set_xlabel(
        "tokens of context" + ", and a hash of the tokens generated there" * bool(hashes)
    )
    axes.set_ylabel("tokens per second")
    axes.set_title(shown.title)
    _draw_wall(shown, axes, scheme)
    if shown.mark:
        style = {"ha": "center", "va": "center", "alpha": 0.22, "fontsize": 44, "rotation": 18}
        axes.text(0.5, 0.45, shown.mark, transform=axes.transAxes, color=scheme.second, **style)
    axes.legend(frameon=False, labelcolor=scheme.text, loc="lower left", fontsize=9)


def _name(context: int, hashes: set[str]) -> str:
    """A tick's label: the length, and under it the hash of the tokens that were generated there."""
    name = str(context)
    if context >= 1024:
        name = f"{context >> 10}K" if context < NEARLY_LONGEST else f"{context / LONGEST:.0f}M"
    return "\n".join([name, *sorted(hashes)])


def _draw_wall(shown: Content, axes: Any, scheme: Scheme) -> None:
    if shown.wall is None:
        return
    axes.axvline(shown.wall, color=scheme.peer, linewidth=6, alpha=0.4)
    lines = [part for words in shown.refusals for part in textwrap.wrap(words, 64)[:4]]
    axes.annotate(
        "\n".join([f"{shown.wall:,} tokens fit; behind them", *lines]),
        (shown.wall, axes.get_ylim()[1]),
        xytext=(8, -6),
        textcoords="offset points",
        va="top",
        fontsize=7.5,
        color=scheme.text,
    )


def main(files: list[str]) -> None:
    """Draw it in both colour schemes."""
    committed = (RESULTS / file for file in FILES)
    paths = [Path(file).resolve() for file in files] or [
        path for path in committed if path.exists()
    ]
    result: dict[str, Any] = {}
    for path in paths:
        result |= json.loads(path.read_text(encoding="utf-8"))
    picture = Picture("line", partial(draw, content(result)), tuple(map(str, paths)), (8.2, 5.2))
    for scheme in SCHEMES:
        print(paint(picture, scheme, PICTURES).relative_to(PICTURES.parents[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
