"""benchmarks/servers.py with small programs in the place of servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import beside_clients
from benchmarks.beside_clients import beside_round
from benchmarks.servers import BESIDE, Server, clients, cpu_seconds, running, summary
from nanoengine.bench.workload import random_requests
from nanoengine.errors import EngineError

LATE = """
import sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
time.sleep(0.3)
end = time.process_time() + 0.2
while time.process_time() < end:
    pass
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def server(code: str) -> Server:
    return Server("toy", lambda port: [sys.executable, "-c", code, str(port)], {})


def test_a_server_is_waited_for_and_ended(tmp_path: Path) -> None:
    with running(server(LATE), tmp_path / "log") as (url, pid, start_s):
        assert url.startswith("http://127.0.0.1:") and start_s > 0.3
        everything, main = cpu_seconds(pid)
        assert 0.2 <= main <= everything < 60
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    start = time.perf_counter()
    with (
        pytest.raises(EngineError, match=r"toy did not start.*\n.*no such model"),
        running(server("raise SystemExit('no such model')"), tmp_path / "log"),
    ):
        pass
    assert time.perf_counter() - start < 60


ENDED = """
import sys, threading
from pathlib import Path
from benchmarks.ending import exit_on_sigterm
from benchmarks.servers import Server, running
exit_on_sigterm()
toy = Server("toy", lambda port: [sys.executable, "-c", sys.argv[2], str(port)], {})
with running(toy, Path(sys.argv[1])) as (_, pid, _):
    print(pid, flush=True)
    threading.Event().wait()
"""


@pytest.mark.breadth
def test_sigterm_leaves_no_server(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDED, str(tmp_path / "log"), LATE]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as benchmark:
        try:
            server_pid = int(benchmark.stdout.readline())
            benchmark.terminate()
            assert benchmark.wait(60) == 128 + signal.SIGTERM
        finally:
            benchmark.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(server_pid, 0)


GAP_S, NUM_TOKENS = 0.05, 12
SIZES = {"num_prompts": 3, "min_input": 5, "max_input": 9}
SIZES |= {"min_output": NUM_TOKENS, "max_output": NUM_TOKENS}


def record(path: Path) -> int:
    """What a server sent to these clients, a token every GAP_S; returns how many."""
    kept = []
    namespace = SimpleNamespace(**SIZES, seed=0)
    for prompt, num_tokens in random_requests(namespace, SIZES["num_prompts"], 60):
        lines = []
        for at in range(num_tokens):
            chunk = {"choices": [{"text": f" {at}"}]}
            lines += [(GAP_S * (at + 1), f"data: {json.dumps(chunk)}"), (GAP_S * (at + 1), "")]
        end = json.dumps({"choices": [], "usage": {"completion_tokens": num_tokens}})
        last = GAP_S * num_tokens
        lines += [(last, f"data: {end}"), (last, ""), (last, "data: [DONE]"), (last, "")]
        kept.append({"prompt": prompt, "max_tokens": num_tokens, "lines": lines})
    path.write_text(json.dumps(kept))
    return SIZES["num_prompts"] * NUM_TOKENS


@pytest.mark.breadth
def test_an_offline_run_beside_the_clients_of_a_stand_in(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """The clients get what was recorded, when it came; the run answers their prompts meanwhile."""
    recording = tmp_path / "recording"
    num_tokens = record(recording)
    settings = {"model": str(tiny("llama")), "num_threads": 1, "dtype": "float32"}
    row = beside_round(recording, clients(60, 2, SIZES), settings, tmp_path / "log")
    assert row["clients_s"] >= 2 * GAP_S * NUM_TOKENS  # two at a time
    assert row["clients_output_throughput"] == pytest.approx(
        num_tokens / row["clients_s"], rel=0.01
    )
    assert row["output_throughput"] == pytest.approx(num_tokens / row["elapsed_s"], rel=0.2)
    assert row["dtype"] == "float32" and row["client_cpu_s"] >= 0 <= row["stand_in_cpu_s"]


def test_the_run_begins_with_its_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No client asks, so nothing is told to begin; and no program is left."""
    record(tmp_path / "recording")
    begun: list[subprocess.Popen[str]] = []
    told: list[str] = []
    popen = subprocess.Popen

    def kept(command: list[str], **settings: Any) -> subprocess.Popen[str]:
        if "benchmarks.beside_clients" in command:
            code = "import time; print('ready', flush=True); time.sleep(600)"
            command = [sys.executable, "-c", code]
        begun.append(popen(command, **settings))
        if len(begun) == 3:  # they all run, and the stand-in dies
            begun[0].kill()
        return begun[-1]

    monkeypatch.setattr(beside_clients.subprocess, "Popen", kept)
    monkeypatch.setattr(beside_clients, "_go", lambda process: told.append(str(process.args)))
    asking = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(EngineError, match=r"stand_in.* has ended"):
        beside_round(tmp_path / "recording", asking, {}, tmp_path / "log")
    assert told == [] and len(begun) == 3
    assert all(process.poll() is not None for process in begun)


def test_servers_are_compared_with_the_run_beside_clients() -> None:
    rounds = {
        "nanoengine": [{"output_throughput": 10.0}, {"output_throughput": 30.0}],
        BESIDE: [{"output_throughput": 20.0}, {"output_throughput": 30.0}],
    }
    assert summary(rounds)["nanoengine"]["over_beside_clients"] == 0.75
    del rounds[BESIDE]
    assert "over_beside_clients" not in summary(rounds)["nanoengine"]


def test_ratios_are_of_the_same_round() -> None:
    ours = [{"output_throughput": 10.0}, {"output_throughput": 30.0}, {"output_throughput": 20.0}]
    other = [{"output_throughput": 5.0}, {"output_throughput": 30.0}, {"output_throughput": 5.0}]
    rows = summary({"nanoengine": ours, "other": other})
    assert rows["nanoengine"]["ours_over_it"] == 1.0
    assert rows["other"]["output_throughput"] == 5.0
    assert rows["other"]["ours_over_it"] == 2.0 and rows["other"]["spread"] == [1.0, 4.0]
