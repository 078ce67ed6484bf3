"""docs/benchmarks.md: its peaks are those of the results that its sections name, and the ranges in
README.md those of its first table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
FOLDER = re.compile(r"`benchmarks/results/(compare_(?:1b|shapes)\w*)/`")
# Names of shapes that their files do not have letter by letter.
SHAPES = {"granite_4_0_h_tiny": "granite_h_tiny"}
ENGINES = {"OpenVINO": "openvino", "vLLM": "vllm"}
RANGE = re.compile(r"(\d\.\d+)x?-(\d(?:\.\d+)?)x")
# The ranges in README.md, in their order: the machine, and the weights of its rows.
CLAIMS = (
    ("Zen 4", ("1B, Q4_0", "1B, Q4_K_M")),
    ("Zen 4", ("1B, bf16",)),
    ("Xeon with AMX", ("1B, Q4_0", "1B, Q4_K_M")),
    ("Xeon with AMX", ("1B, bf16",)),
)


class Peak(NamedTuple):
    """A row of a table. name: of the weights or the shape."""

    folder: str
    name: str
    engine: str
    has_8_bits: bool
    mib: int


def peaks() -> Iterator[Peak]:
    """The rows of all tables of shapes that have a column of peaks."""
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for section in re.split(r"^##+ ", text, flags=re.MULTILINE):
        found, name = FOLDER.search(section), ""
        if found is None or "| peak MiB |" not in section:
            continue
        for line in section.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if line.startswith("|") and cells[-1].isdigit():
                name = cells[0] or name
                has_8_bits = name.endswith("8 bits") or cells[1].endswith("8 bits")
                engine = cells[1].partition(",")[0]
                yield Peak(found[1], name, engine, has_8_bits, int(cells[-1]))


def most_of(peak: Peak) -> int:
    """The most memory of this engine with these weights, in whatever work."""
    plain = peak.name.removesuffix(", 8 bits").removeprefix("1B ").lower()
    stem = re.sub(r"\W", "_", plain)
    file = re.compile(rf"{SHAPES.get(stem, stem)}(_q4_0)?(_llama)?_(single|prefill|batch)(_last)?")
    engine = ENGINES.get(peak.engine, peak.engine)
    found = [0]
    for path in (RESULTS / peak.folder).glob("*.json"):
        if not file.fullmatch(path.stem):
            continue
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            precision = row.get("precision", "")
            is_it = row["engine"].split()[0].rstrip(",") == engine and "KV u8" not in precision
            rounds = "activations of 8 bits" in precision
            # llama.cpp has one way to multiply the codes of a file.
            is_it = is_it and (engine == "llama.cpp" or rounds == peak.has_8_bits)
            if is_it and "peak_memory_mib" in row:
                found.append(row["peak_memory_mib"])
    return max(found)


@pytest.mark.parametrize("folder", sorted({peak.folder for peak in peaks()}))
def test_a_peak_is_the_most_of_all_works(folder: str) -> None:
    rows = [peak for peak in peaks() if peak.folder == folder]
    assert len(rows) > 3
    wrong = [(*row[1:], most_of(row)) for row in rows if row.mib != most_of(row)]
    assert wrong == []


def ratios() -> Iterator[tuple[str, str, float]]:
    """Machine, weights and each ratio of the first table of docs/benchmarks.md."""
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    machine = ""
    for line in text.partition("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 5:
            machine = re.sub(r"\[([^]]*)\].*", r"\1", cells[0]) or machine
            for ratio in re.findall(r": (\d\.\d+)(?= |$)", " ".join(cells[2:])):
                yield machine, cells[1], float(ratio)


def test_the_readme_says_by_how_much_as_the_table_does() -> None:
    said = RANGE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(said) == len(CLAIMS)
    for (least, most), (machine, weights) in zip(said, CLAIMS, strict=True):
        found = [ratio for name, each, ratio in ratios() if name == machine and each in weights]
        assert len(found) == 3 * len(weights)
        for text, value in ((least, min(found)), (most, max(found))):
            digits = len(text.partition(".")[2])
            assert abs(float(text) - value) <= 0.5 * 10**-digits + 1e-9, (machine, weights, found)
