"""benchmarks/servers.py with small programs in the place of servers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.servers import Server, cpu_seconds, running, summary
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
    assert time.perf_counter() - start < 10


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


def test_sigterm_leaves_no_server(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDED, str(tmp_path / "log"), LATE]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as benchmark:
        try:
            server_pid = int(benchmark.stdout.readline())
            benchmark.terminate()
            assert benchmark.wait(30) == 128 + signal.SIGTERM
        finally:
            benchmark.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(server_pid, 0)


def test_ratios_are_of_the_same_round() -> None:
    ours = [{"output_throughput": 10.0}, {"output_throughput": 30.0}, {"output_throughput": 20.0}]
    other = [{"output_throughput": 5.0}, {"output_throughput": 30.0}, {"output_throughput": 5.0}]
    rows = summary({"nanoengine": ours, "other": other})
    assert rows["nanoengine"]["ours_over_it"] == 1.0
    assert rows["other"]["output_throughput"] == 5.0
    assert rows["other"]["ours_over_it"] == 2.0 and rows["other"]["spread"] == [1.0, 4.0]
