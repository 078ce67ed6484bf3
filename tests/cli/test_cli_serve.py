"""nanoengine serve: its flags, and a server that a signal ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from live_server import lines_until_ready

from nanoengine.cli.main import FAILED, MISUSED, main, make_parser
from nanoengine.cli.serve import OPTIONS, server_options, url
from nanoengine.cli.usage import UsageError
from nanoengine.errors import ConfigError
from nanoengine.serving.listener import listen
from nanoengine.serving.options import ServerOptions

ROOT = Path(__file__).parents[2]
FLAGS = ["--device", "cpu", "--num-gpu-blocks", "8", "--num-threads", "1"]


def options_of(*flags: str, **environ: str) -> ServerOptions:
    return server_options(make_parser()[0].parse_args(["serve", "m", *flags]), environ)


def test_every_option_is_a_flag() -> None:
    assert set(OPTIONS) == {field.name for field in fields(ServerOptions)}
    assert options_of() == ServerOptions()
    made = options_of(
        *("--port", "9", "--allow-origins", "a", "--allow-origins", "b", "--tokenizer-info")
    )
    assert made == ServerOptions(port=9, allow_origins=("a", "b"), tokenizer_info=True)


def test_the_key_may_be_in_the_environment() -> None:
    assert options_of(NANOENGINE_API_KEY="k").api_key == "k"
    assert options_of("--api-key", "own", NANOENGINE_API_KEY="k").api_key == "own"
    assert "own" not in repr(options_of("--api-key", "own"))
    with pytest.raises(UsageError, match="api_key must be a non-empty text"):
        options_of(NANOENGINE_API_KEY="")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"port": 65536}, "port must be an integer from 0 to 65535, got 65536"),
        ({"max_open_texts": 0}, "max_open_texts must be an integer from 1"),
        ({"queue_seconds": -1}, "queue_seconds must be from 0 to 86400, got -1"),
        ({"stall_seconds": float("nan")}, "stall_seconds must be from 0.1 to 86400, got nan"),
        ({"metrics_prefix": "x"}, "metrics_prefix must be nanoengine or vllm, got 'x'"),
        ({"api_key": "\xe9"}, "api_key must be a non-empty text of ASCII"),
    ],
)
def test_a_value_out_of_range_is_named(given: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        ServerOptions(**given)


def test_who_may_come_in() -> None:
    assert not ServerOptions().is_open and not ServerOptions(host="::1").is_open
    assert ServerOptions(host="0.0.0.0").is_open
    assert not ServerOptions(host="0.0.0.0", api_key="k").is_open
    assert url("::1", 80) == "http://[::1]:80"


def test_a_port_that_is_taken_is_said_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", "no-such-model", "--port", port]) == FAILED
    err = capsys.readouterr().err
    assert (
        err
        == f"error: cannot listen on 127.0.0.1:{port}: Address already in use; try another --port\n"
    )


def test_a_mistake_is_said_before_anything_large_is_imported() -> None:
    code = """
import sys
from nanoengine.cli.main import main
print(main(["serve", "m", "--port", sys.argv[1]]))
print([name for name in ("torch", "fastapi", "uvicorn") if name in sys.modules])
"""
    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        ran = subprocess.run(
            [sys.executable, "-c", code, str(taken.getsockname()[1])],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
        )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"{FAILED}\n[]\n" and "cannot listen on" in ran.stderr


def test_without_its_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", "m"]) == MISUSED
    assert "the server needs uvicorn: pip install 'nanoengine[server]'" in capsys.readouterr().err


def test_a_signal_ends_it_with_status_0(tiny: Callable[[str], Path]) -> None:
    command = [sys.executable, "-m", "nanoengine", "serve", str(tiny("llama")), "--port", "0"]
    process = subprocess.Popen(
        [*command, *FLAGS, "--host", "0.0.0.0"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stderr is not None
    try:
        lines = lines_until_ready(process.stderr)
        found = re.search(r":(\d+)/v1, a chat page at http://0\.0\.0\.0:\1/$", lines[-1])
        assert found is not None
        port = found[1]
        body = {"prompt": "a", "max_tokens": 3, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 3
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(60) == 0 and rest == "stopped\n"
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert any("everybody who reaches http://0.0.0.0:" in line for line in lines)
