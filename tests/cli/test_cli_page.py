"""docs/command_line.md: its examples with output are run, and the flags of all others are real."""

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
PAGE = ROOT / "docs" / "command_line.md"
EXAMPLES = re.findall(
    r"^```console\n\$ nanoengine (.*?)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
)


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
    assert len(EXAMPLES) == 3


def test_commands_have_flags_that_exist() -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for line in "".join(blocks).splitlines() if "nanoengine " in line]
    commands = [found for line in lines if (found := re.search(r"(?:^|\s)nanoengine (.*)$", line))]
    assert commands
    for command in commands:
        words = shlex.split(command[1], comments=True)
        if words[0] not in DOORS:
            assert make_parser()[0].parse_known_args(words)[1] == []
