"""README.md and docs/: links, files, commands, settings and examples are real; README is short."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from benchmarks import notebook, pictures
from nanoengine import LLM, AsyncLLM, SamplingParams
from nanoengine.config.engine import EngineConfig

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
# Files that are named by their folder, and Python files wherever they are named.
FILE = re.compile(r"(?<![\w/])((?:benchmarks|docs|tests)/[\w./-]*\w|[\w/]*\w\.py)\b")
TARGET = re.compile(r"\bmake ([a-z-]+)(?=[ `]|$)", re.MULTILINE)
SETTING = re.compile(r"`([a-z_]+)=[^`]+`")
SETTINGS = {field.name for field in fields(EngineConfig)}
PARAMS = {field.name for field in fields(SamplingParams)}


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors(text: str) -> set[str]:
    """What links to the headings of a page are called, as GitHub makes them."""
    headings = HEADING.findall(FENCED.sub("", text))
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {word.replace(" ", "-") for word in words}


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links that lead to no file, or to no heading of it."""
    broken = []
    for link in LINK.findall(FENCED.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        there = target.is_file()
        if there and anchor:
            there = anchor in anchors(text if target == page else text_of(target))
        if not there:
            broken.append(link)
    return broken


def python_in(text: str) -> list[ast.Module]:
    """The Python examples, which may await at the top."""
    blocks = [code for language, code in FENCED.findall(text) if language == "python"]
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    return [compile(code, "example", "exec", flags) for code in blocks]


def calls_in(tree: ast.Module) -> Iterator[tuple[str, set[str]]]:
    """Names of the functions that are called, with their keywords."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else ast.unparse(called)
            yield name, {str(keyword.arg) for keyword in node.keywords}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert broken_links(page, text_of(page)) == []


def test_a_broken_link_is_found() -> None:
    text = """# Here & there
[a](docs/nano.py) [two
lines](README.md#here--there) [b](#here--there) [c](https://example.org/none) [d](docs/none.md)
[e](#nowhere) [f](docs/README.md#nowhere) [g](docs)
```
# code
[h](none)
```
[i](#code)
"""
    found = broken_links(ROOT / "README.md", text)
    assert found == ["docs/none.md", "#nowhere", "docs/README.md#nowhere", "docs", "#code"]


def test_every_page_is_in_the_list_of_pages() -> None:
    listed = set(LINK.findall(text_of(ROOT / "docs/README.md")))
    kinds = (".md", ".py", ".ipynb")
    there = {path.name for path in (ROOT / "docs").iterdir() if path.suffix in kinds}
    assert listed == there - {"README.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_examples_are_python_with_real_settings(page: Path) -> None:
    allowed = {LLM.__name__: SETTINGS, AsyncLLM.__name__: SETTINGS, SamplingParams.__name__: PARAMS}
    for tree in python_in(text_of(page)):
        for name, keywords in calls_in(tree):
            assert keywords <= allowed.get(name, keywords)


def test_the_readme_shows_offload_and_a_hub_id() -> None:
    (example,) = python_in(text_of(ROOT / "README.md"))
    (keywords,) = (keywords for name, keywords in calls_in(example) if name == "LLM")
    assert "enable_cpu_offload" in keywords and '"Qwen/Qwen3-0.6B"' in text_of(ROOT / "README.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_are_named_exist(page: Path) -> None:
    places = ROOT, ROOT / "nanoengine", page.parent
    named = FILE.findall(LINK.sub("", text_of(page)))
    assert [name for name in named if not any((place / name).exists() for place in places)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_make_targets_that_are_named_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    code = re.findall(r"```sh\n(.*?)```|`([^`\n]+)`", text_of(page), re.DOTALL)
    named = TARGET.findall("\n".join(fenced or inline for fenced, inline in code))
    assert set(named) <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_settings_in_the_text_are_real(page: Path) -> None:
    assert set(SETTING.findall(text_of(page))) <= SETTINGS | PARAMS


def test_the_features_page_names_every_setting() -> None:
    prose = FENCED.sub("", text_of(ROOT / "docs/features.md"))
    assert SETTINGS - set(re.findall(r"`(\w+)(?:=[^`]*)?`", prose)) == set()


@pytest.mark.parametrize("scheme", pictures.SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("picture", pictures.ALL, ids=lambda picture: picture.name)
def test_pictures_show_the_results_of_today(
    picture: pictures.Picture, scheme: pictures.Scheme
) -> None:
    path = pictures.PICTURES / f"{picture.name}-{scheme.name}.svg"
    assert pictures.digest(picture.files) in text_of(path), "run `make pictures`"
    pages = text_of(ROOT / "README.md") + text_of(ROOT / "docs" / "benchmarks.md")
    assert f"pictures/{path.name}" in pages


def test_the_notebook_shows_what_its_cells_did() -> None:
    cells = json.loads(text_of(notebook.NOTEBOOK))["cells"]
    made = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    assert made == list(notebook.CELLS), "run `make notebook`"
    outputs = [out for cell in cells for out in cell.get("outputs", ())]
    assert outputs and not [out for out in outputs if out["output_type"] == "error"]


def test_the_readme_is_short_and_begins_with_the_two_commands() -> None:
    lines = text_of(ROOT / "README.md").splitlines()
    assert len(lines) <= 150 and len(" ".join(lines).split()) <= 900
    first_screen = "\n".join(lines[:20])
    assert "make demo" in first_screen and "make test" in first_screen
