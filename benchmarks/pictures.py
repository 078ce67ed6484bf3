"""Draws the pictures of README and docs from committed results: `make pictures`.

Each picture is an SVG in two colour schemes. Its description holds a digest of the files that it
shows, so that a test can tell when a picture is old.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Scheme:
    """Colours of a picture. peer: of other engines."""

    name: str
    text: str
    grid: str
    ours: str
    second: str
    peer: str


SCHEMES = (
    Scheme("light", "#1f2328", "#d1d9e0", "#0969da", "#bc4c00", "#818b98"),
    Scheme("dark", "#f0f6fc", "#3d444d", "#4493f8", "#f0883e", "#8b949e"),
)


@dataclass(frozen=True, slots=True)
class Work:
    """A row of the picture of speeds: what is done, its file, the unit of its figure."""

    label: str
    file: str
    unit: str


WORKS = (
    Work("32 requests at once", "compare_amx/offline.json", "tok/s"),
    Work("one request", "compare_amx/single.json", "tok/s"),
    Work("prefill of 4096 tokens", "compare_amx/prefill.json", "tok/s"),
    Work("8000 tokens in, 32 out", "compare_amx/long.json", "s"),
)
ENGINES = ("nanoengine", "vllm", "openvino", "transformers", "llama.cpp")
ENGINE_NAMES = {"vllm": "vLLM", "openvino": "OpenVINO"}
CONTEXTS = "gpu/h200.json"
# Heading and file of each column of the picture of needles.
NEEDLES = (
    ("SmolLM2\n4,096 tokens", "ruler/smollm2_4096_bfloat16_stream_24_blocks.json"),
    ("SmolLM2\n8,192 tokens", "ruler/smollm2_8192_20_niah_single_1_stream_24_blocks.json"),
    ("induction model\n32,768 tokens", "ruler/induction_32k_100_stream_24_blocks.json"),
    ("induction model\n131,072 tokens", "ruler/induction_128k_stream_4_blocks.json"),
)


SERVERS = "serving/epyc_bfloat16.json"
SERVER_NAMES = {
    "nanoengine": "nanoengine serve",
    "llama.cpp BF16": "llama-server BF16",
    "vllm": "vLLM 0.32",
}
# Label, key and unit of each row of the picture of servers.
SERVER_ROWS = (
    ("output", "output_throughput", "tok/s"),
    ("time to first token,\nmedian", "median_ttft_ms", "ms"),
    ("time to first token,\np99", "p99_ttft_ms", "ms"),
    ("time between tokens,\nmedian", "median_itl_ms", "ms"),
    ("time between tokens,\np99", "p99_itl_ms", "ms"),
)


def read(file: str) -> dict[str, Any]:
    """A committed result. file: its path under benchmarks/results/."""
    found: dict[str, Any] = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    return found


def digest(files: tuple[str, ...]) -> str:
    """What a picture of these results has in its description."""
    hashed = hashlib.sha256()
    for file in files:
        hashed.update((RESULTS / file).read_bytes())
    return f"results {hashed.hexdigest()[:16]}"


def speeds(axes: Any, scheme: Scheme) -> None:
    """Bars of each engine's speed in each work, as a share of ours."""
    height = 0.16
    for row, work in enumerate(WORKS):
        report = read(work.file)
        figure = report["workload"]["figure"]
        medians = _equal_precision(report["rows"], figure)
        ours = medians["nanoengine"]
        there = [engine for engine in ENGINES if engine in medians]
        for place, engine in enumerate(there):
            value = medians[engine]
            share = ours / value if work.unit == "s" else value / ours
            at = row + (place - (len(there) - 1) / 2) * height
            is_ours = engine == "nanoengine"
            colour = scheme.ours if is_ours else scheme.peer
            axes.barh(at, share, height * 0.86, color=colour)
            name = ENGINE_NAMES.get(engine, engine)
            axes.text(
                share + 0.01,
                at,
                f"{name} {_figure(value)} {work.unit}",
                va="center",
                color=scheme.text,
                fontsize=9,
                fontweight="bold" if is_ours else "normal",
            )
    axes.set_yticks(range(len(WORKS)), [work.label for work in WORKS])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    axes.set_title("Speed as a share of nanoengine's: SmolLM2-135M, bf16, 2 CPU cores with AMX")


def _equal_precision(rows: list[dict[str, Any]], figure: str) -> dict[str, float]:
    """Medians by engine; not of runs with KV in fewer bits."""
    return {
        row["engine"].split()[0]: row[figure]["median"]
        for row in rows
        if "KV u8" not in row["precision"]
    }


def _figure(value: float) -> str:
    """With three digits, or all digits of a whole number."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def contexts(axes: Any, scheme: Scheme) -> None:
    """Decode speed over the context, with all KV on the GPU and with 1 GiB of it."""
    report = read(CONTEXTS)
    rows, link = report["long_context"]["decode"], report["link"]["h2d_gb_per_s"]
    lengths = [row["context"] for row in rows]
    resident = [1e3 / row["resident_step_ms"] for row in rows]
    streamed = [row["tokens_per_s"] for row in rows]
    limit = [link / row["streamed_gb"] for row in rows]
    axes.plot(lengths, resident, "o-", color=scheme.peer, label="all KV on the GPU")
    axes.plot(lengths, streamed, "o-", color=scheme.ours, label="1 GiB of KV on the GPU", zorder=3)
    label = f"what the link allows at {link:.0f} GB/s"
    axes.plot(lengths, limit, color=scheme.second, label=label, linewidth=9, alpha=0.45)
    for length, speed in [*zip(lengths * 2, [*resident, *streamed], strict=True)]:
        axes.annotate(
            _figure(speed),
            (length, speed),
            xytext=(0, 9),
            textcoords="offset points",
            ha="center",
            color=scheme.text,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(0.5, 400)
    gib = 131072 / GIB  # bytes of KV of a token, as the report's plan says
    axes.set_xticks(lengths, [f"{n >> 10}K tokens\n{n * gib:.0f} GiB of KV" for n in lengths])
    axes.minorticks_off()
    axes.set_yticks([1, 10, 100], ["1", "10", "100"])
    axes.set_ylabel("tokens per second")
    axes.set_title("Decoding one request: Llama-3.1-8B shapes, bf16, one H200")
    axes.legend(frameon=False, labelcolor=scheme.text)


def needles(axes: Any, scheme: Scheme) -> None:
    """Answers by length of the text and depth of the needle, with KV streamed from the host."""
    for column, (_, file) in enumerate(NEEDLES):
        report = read(file)
        for sample in report["samples"]:
            colour = scheme.ours if sample["correct"] else scheme.second
            axes.plot([column - 0.34, column + 0.34], [sample["depth"]] * 2, color=colour, lw=2.2)
        settings = report["settings"]
        num_tokens = settings["num_gpu_blocks"] * settings["kvcache_block_size"]
        requests = settings["max_num_seqs"]
        axes.text(
            column,
            105,
            f"{report['num_correct']} of {report['num_samples']} right\n"
            f"{requests} request{'s' * (requests > 1)} on\n{num_tokens:,} device tokens",
            ha="center",
            va="top",
            color=scheme.text,
            fontsize=9,
        )
    axes.set_xticks(range(len(NEEDLES)), [heading for heading, _ in NEEDLES])
    axes.set_ylim(136, -3)
    axes.set_yticks([0, 25, 50, 75, 100])
    axes.set_ylabel("depth of the needle, %")
    axes.set_title("A needle in a haystack, KV streamed from RAM: one line a text, blue is right")


def servers(axes: Any, scheme: Scheme) -> None:
    """Bars of both servers' figures, as a share of the larger one."""
    found = read(SERVERS)["servers"]
    names = {name: shown for name, shown in SERVER_NAMES.items() if name in found}
    height = 0.75 / len(names)
    for row, (_, key, unit) in enumerate(SERVER_ROWS):
        most = max(found[name][key] for name in names)
        for place, (name, shown) in enumerate(names.items()):
            value, at = found[name][key], row + (place - (len(names) - 1) / 2) * height
            colour = scheme.ours if name == "nanoengine" else scheme.peer
            axes.barh(at, value / most, height * 0.86, color=colour)
            text = f"{shown} {value:,.0f} {unit}"
            axes.text(value / most + 0.01, at, text, va="center", color=scheme.text, fontsize=9)
    axes.set_yticks(range(len(SERVER_ROWS)), [label for label, _, _ in SERVER_ROWS])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.48)
    axes.set_xticks([])
    axes.set_title(
        "32 clients of a server: SmolLM2-135M, bfloat16, 2 CPU cores. Times: less is better"
    )


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture: its name, what draws it, the results it shows, its size in inches."""

    name: str
    draw: Callable[[Any, Scheme], None]
    files: tuple[str, ...]
    size: tuple[float, float]


ALL = (
    Picture("speeds", speeds, tuple(work.file for work in WORKS), (8.2, 4.6)),
    Picture("contexts", contexts, (CONTEXTS,), (8.2, 4.2)),
    Picture("servers", servers, (SERVERS,), (8.2, 4.0)),
    Picture("needles", needles, tuple(file for _, file in NEEDLES), (8.2, 3.8)),
)


def paint(picture: Picture, scheme: Scheme, folder: Path) -> Path:
    """Write one picture in one scheme; returns its path."""
    import matplotlib
    from matplotlib.figure import Figure

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": picture.name,
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
        "font.size": 10,
        "axes.titlesize": 11,
        **dict.fromkeys(("text.color", "axes.labelcolor"), scheme.text),
        **dict.fromkeys(("xtick.color", "ytick.color"), scheme.text),
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=picture.size, layout="constrained")
        axes = figure.add_subplot()
        picture.draw(axes, scheme)
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(scheme.grid)
        axes.grid(visible=True, color=scheme.grid, linewidth=0.5)
        axes.set_axisbelow(True)
        path = folder / f"{picture.name}-{scheme.name}.svg"
        about = {"Date": None, "Creator": None, "Description": digest(picture.files)}
        figure.savefig(path, transparent=True, metadata=about)
    return path


def main() -> None:
    """Draw all pictures."""
    PICTURES.mkdir(exist_ok=True)
    for picture in ALL:
        for scheme in SCHEMES:
            path = paint(picture, scheme, PICTURES)
            print(f"{path.relative_to(PICTURES.parents[1])}: {path.stat().st_size >> 10} KiB")


if __name__ == "__main__":
    main()
