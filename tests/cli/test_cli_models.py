"""nanoengine models: what the list says, and what rm asks and removes."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from nanoengine.cli.collect_env import environment
from nanoengine.cli.main import FAILED, MISUSED, main
from nanoengine.cli.models import disk_use
from nanoengine.loading import stored_models

NAME = "org/tiny"


@pytest.fixture
def hub(
    tmp_path: Path,
    tiny: Callable[[str], Path],
    fresh_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A cache of the hub with a model that runs, one that does not and one that is too large."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(metadata, "distributions", lambda: [])
    monkeypatch.setattr(stored_models, "PACKAGED", {})
    config = json.loads((tiny("llama") / "config.json").read_text())
    huge = {"hidden_size": 1 << 20, "num_hidden_layers": 100}
    for name, changes in (("tiny", {}), ("moe", {"architectures": ["Moe"]}), ("huge", huge)):
        repository = tmp_path / "hub" / f"models--org--{name}"
        snapshot = repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
        (repository / "blobs").mkdir(parents=True)
        snapshot.mkdir(parents=True)
        for file, content in (("config.json", json.dumps(config | changes)), ("m.safetensors", "")):
            (repository / "blobs" / file).write_text(content)
            (snapshot / file).symlink_to(f"../../blobs/{file}")
    return tmp_path / "hub"


def test_the_list_says_what_runs_and_what_does_not(
    hub: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = {lines[i].partition(" ")[0]: lines[i + 1].strip() for i in (0, 2, 4)}
    assert shown["org/tiny"] == "runs: LlamaForCausalLM, up to 512 tokens in one request"
    assert shown["org/moe"].startswith("does not run: the architecture Moe is a mixture of experts")
    assert shown["org/huge"].startswith("does not run: the weights take ")
    assert f" in {hub}" in lines[-2] and "of at most 64.00 GiB ($NANOENGINE_CACHE_GIB)" in lines[-1]


def test_json_is_the_same_for_a_program(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    found = {each["name"]: each for each in row["models"]}
    tiny = found["org/tiny"]
    assert (tiny["kind"], tiny["runs"], tiny["max_tokens"]) == ("hub", True, 512)
    assert tiny["problem"] is None and tiny["bytes"] > 100
    assert found["org/moe"]["runs"] is False and found["org/moe"]["architecture"] is None
    assert row["disk"]["hub_bytes"] > 300 and row["disk"]["converted_bytes"] == 0


def test_the_folder_that_is_named_is_the_one_in_use(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No folder can be made below a file, as below a HOME of /dev/null."""
    used = tmp_path / f"nanoengine-{os.getuid()}"
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "file").touch()
    for cache, folder in (
        (tmp_path / "file", used),
        (tmp_path / "new" / "cache", tmp_path / "new" / "cache" / "nanoengine"),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        assert disk_use()["folder"] == str(folder)
        assert environment()["cache"].startswith(f"{folder}: ")
    assert not (tmp_path / "new").exists()


def test_nothing_is_said_kindly(
    tmp_path: Path,
    fresh_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(metadata, "distributions", lambda: [])
    monkeypatch.setattr(stored_models, "PACKAGED", {})
    assert main(["models"]) == 0
    assert capsys.readouterr().out.startswith("no models yet")


def terminal(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    keyboard = io.StringIO(answer)
    monkeypatch.setattr(keyboard, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", keyboard)


@pytest.mark.parametrize(("answer", "is_removed"), [("y\n", True), ("\n", False), ("", False)])
def test_rm_asks(
    hub: Path,
    answer: str,
    is_removed: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    terminal(monkeypatch, answer)
    assert main(["models", "rm", NAME]) == (0 if is_removed else FAILED)
    out, err = capsys.readouterr()
    assert err.startswith("remove org/tiny (0.00 GiB, ") and "? [y/N] " in err
    assert ("removed org/tiny" in out, "nothing was removed" in err) == (is_removed, not is_removed)
    left = {path.name for path in hub.iterdir()}
    assert left == {"models--org--moe", "models--org--huge", "models--org--tiny"} - (
        {"models--org--tiny"} if is_removed else set[Any]()
    )


@pytest.mark.parametrize("flags", [(NAME, "--yes", "--json"), ("--yes", NAME, "--json")])
def test_rm_with_yes_asks_nothing(
    flags: tuple[str, ...], hub: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "rm", *flags]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["removed"] == NAME and err == ""


@pytest.mark.parametrize(
    ("argv", "status", "text"),
    [
        (["rm"], MISUSED, "needs the NAME of a model"),
        (["rm", "org/tini", "--yes"], FAILED, "did you mean org/tiny?"),
        (["rm", "qqqqqqqq", "--yes"], FAILED, "nanoengine models lists them"),
        (["rm", NAME], MISUSED, "--yes removes without a question"),
        (["rn", NAME], MISUSED, "invalid choice: 'rn'"),
    ],
)
def test_what_is_wrong_removes_nothing(
    hub: Path,
    argv: list[str],
    status: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert main(["models", *argv]) == status
    assert text in capsys.readouterr().err
    assert len(list(hub.iterdir())) == 3
