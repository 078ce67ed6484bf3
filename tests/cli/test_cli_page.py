"""Commands of the pages: examples with output are run, and the flags of all others are real."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from huggingface_hub import constants
from tiny_model import LLAMA_8B

from nanoengine.cli.main import DOORS, main, make_parser

ROOT = Path(__file__).parents[2]
PAGES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
SHOWN = re.compile(r"^```console\n\$ nanoengine (.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES = [example for _, text in sorted(PAGES.items()) for example in SHOWN.findall(text)]
SHELL = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:^|\| |=\S+ )nanoengine (.*)$", re.MULTILINE)
COMMANDS = {name: COMMAND.findall("".join(SHELL.findall(text))) for name, text in PAGES.items()}


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the hub that holds the config.json of the page's model, and no weights."""
    repository = tmp_path / "models--meta-llama--Llama-3.1-8B-Instruct"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    (snapshot / "config.json").write_text(json.dumps(LLAMA_8B))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))


@pytest.mark.parametrize(("command", "shown"), EXAMPLES)
@pytest.mark.usefixtures("hub_cache")
def test_an_example_prints_what_the_page_shows(
    command: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(shlex.split(command))
    assert capsys.readouterr() == (shown, "")


def test_there_are_examples() -> None:
    found = {name: len(SHOWN.findall(text)) for name, text in PAGES.items()}
    assert found["command_line.md"] == 3 and found["small_gpu.md"] == 1
    assert COMMANDS["command_line.md"] and COMMANDS["workers.md"]


@pytest.mark.parametrize("name", sorted(name for name in COMMANDS if COMMANDS[name]))
def test_commands_have_flags_that_exist(name: str) -> None:
    for command in COMMANDS[name]:
        words = shlex.split(command, comments=True)
        if words[0] not in DOORS:
            assert make_parser()[0].parse_known_args(words)[1] == []


# What config.json of the published models says.
POSITIONS = {
    "meta-llama/Llama-3.1-8B-Instruct": 131072,
    "Qwen/Qwen3-4B": 40960,
    "Qwen/Qwen3-4B-Instruct-2507": 262144,
}
PLANS = [command for found in COMMANDS.values() for command in found if command.startswith("plan ")]


def test_no_plan_asks_for_a_context_that_its_model_does_not_have() -> None:
    asked = 0
    for command in [*PLANS, *(command for command, _ in EXAMPLES)]:
        known = make_parser()[0].parse_known_args(shlex.split(command, comments=True))[0]
        if known.context is not None:
            assert known.context <= POSITIONS[known.model]
            asked += 1
    assert asked >= 6
