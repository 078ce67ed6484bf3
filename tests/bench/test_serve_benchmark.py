"""`bench serve` against a small server whose answers are known."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanoengine.bench.main import main
from nanoengine.bench.serve import Answered, Asked, _arriving, report
from nanoengine.errors import ConfigError, EngineError

GAP_S = 0.02


class Toy(BaseHTTPRequestHandler):
    """Answers each prompt with as many words as it wants; refuses prompts of 7 tokens, answers
    those of 9 with what is no JSON, and goes away within the answers to those of 10.
    """

    protocol_version = "HTTP/1.1"
    num_open = most_open = 0
    least = 0  # it answers nobody before so many have asked at once
    lock = threading.Condition()

    def do_GET(self) -> None:
        self._whole(200, {"object": "list", "data": [{"id": "toy"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == "toy" and body["stream"] and body["ignore_eos"]
        if len(body["prompt"]) == 7:
            self._whole(400, {"error": {"message": "seven"}})
            return
        with self.lock:
            Toy.num_open += 1
            Toy.most_open = max(Toy.most_open, Toy.num_open)
            self.lock.notify_all()
            self.lock.wait_for(lambda: Toy.most_open >= Toy.least, 60)
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        for _ in range(body["max_tokens"]):
            time.sleep(GAP_S)
            self._event({"choices": [{"text": " word"}], "usage": None})
        if len(body["prompt"]) == 9:
            self.wfile.write(b"data: <html>\n\n")
        if len(body["prompt"]) == 10:
            return
        usage = {"completion_tokens": body["max_tokens"]}
        self._event({"choices": [], "usage": usage})
        with self.lock:  # before its client can ask again
            Toy.num_open -= 1
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, chunk: dict[str, Any]) -> None:
        self.wfile.write(b": keep-alive\n\ndata: " + json.dumps(chunk).encode() + b"\n\n")

    def _whole(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing on stderr."""


class ToyServer(ThreadingHTTPServer):
    """Has room for all clients that come at once: a sixth would be refused or wait a second."""

    request_queue_size = 64


@contextmanager
def toy_server() -> Iterator[str]:
    Toy.num_open = Toy.most_open = 0
    with ToyServer(("127.0.0.1", 0), Toy) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    with toy_server() as url:
        main(["serve", "--base-url", url, *arguments])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_figures_are_those_of_the_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Toy, "least", 3)
    sizes = ["--min-input", "5", "--max-input", "5", "--min-output", "4", "--max-output", "4"]
    found = bench(capsys, "--num-prompts", "6", "--max-concurrency", "3", *sizes)
    assert found["completed"] == 6 and found["failed"] == 0 and not found["errors"]
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 24)
    assert found["output_throughput"] == pytest.approx(24 / found["duration"], rel=0.01)
    assert Toy.most_open == 3
    gap_ms = 1000 * GAP_S
    assert gap_ms <= found["median_ttft_ms"] < found["median_e2el_ms"]
    assert found["p99_e2el_ms"] >= 4 * gap_ms
    after_first_ms = found["mean_e2el_ms"] - found["mean_ttft_ms"]  # with three gaps
    assert found["mean_itl_ms"] == pytest.approx(after_first_ms / 3, rel=0.01)
    assert found["client_cpu_s"] > 0


def test_requests_come_at_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Poisson process: independent gaps, exponential with the mean 1 / rate, although each sleep
    ends late.
    """
    now, late = 0.0, 0.005

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += max(0.0, seconds) + late

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    asked = [Asked([1], 1)] * 4000

    async def arrive(rate: float | None) -> list[float]:
        return [now async for each in _arriving(asked, rate, seed=0) if each is asked[0]]

    assert asyncio.run(arrive(None)) == [0.0] * len(asked)
    times = asyncio.run(arrive(20))
    assert len(times) == len(asked) and np.mean(np.diff(times)) == pytest.approx(1 / 20, rel=0.05)
    assert np.std(np.diff(times)) == pytest.approx(1 / 20, rel=0.05)


@pytest.mark.parametrize("flag", ["--request-rate", "--timeout"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "fast"])
def test_a_rate_or_a_time_that_is_none_is_named(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", flag, value])
    assert f"argument {flag}: must be a number above 0, got {value!r}" in capsys.readouterr().err


def test_inf_is_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--min-output", "1", "--max-output", "1"]
    found = bench(capsys, "--num-prompts", "2", "--request-rate", "inf", *sizes)
    assert found["completed"] == 2 and found["request_rate"] == "inf"


def test_a_failed_request_is_counted_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--min-input", "6", "--max-input", "8", "--min-output", "1", "--max-output", "1"]
    found = bench(capsys, "--num-prompts", "12", *sizes)
    assert found["failed"] and found["completed"] + found["failed"] == 12
    assert found["errors"] == ['HTTP 400: {"error": {"message": "seven"}}']
    with pytest.raises(EngineError, match=r"no request of 2 was answered.*seven"):
        bench(capsys, "--num-prompts", "2", "--min-input", "7", "--max-input", "7")


def test_an_answer_that_is_none_spoils_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--min-input", "8", "--max-input", "10", "--min-output", "2", "--max-output", "2"]
    found = bench(capsys, "--num-prompts", "18", "--max-concurrency", "3", *sizes)
    assert found["failed"] and found["completed"] + found["failed"] == 18
    assert found["total_output_tokens"] == 2 * found["completed"]
    told = " ".join(found["errors"])
    assert "JSONDecodeError" in told and "the answer was cut off: it has no [DONE]" in told


def test_what_came_is_kept_with_its_times(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Each line, so that a server can say the same again."""
    path, sizes = tmp_path / "kept.json", ["--min-output", "1", "--max-output", "5"]
    found = bench(capsys, "--num-prompts", "3", *sizes, "--record", str(path))
    kept = json.loads(path.read_text())
    assert (
        len(kept) == 3 and sum(each["max_tokens"] for each in kept) == found["total_output_tokens"]
    )
    for each in kept:
        times, lines = zip(*each["lines"], strict=True)
        assert sum('" word"' in line for line in lines) == each["max_tokens"]
        assert lines.count(": keep-alive") >= each["max_tokens"] and lines[-2] == "data: [DONE]"
        assert list(times) == sorted(times) and times[-1] >= GAP_S * each["max_tokens"]


@pytest.mark.parametrize("flag", ["--json", "--record"])
def test_a_file_that_cannot_be_written_is_told_before_the_run(flag: str, tmp_path: Path) -> None:
    told = {
        tmp_path: " is a folder; give a file in it",
        tmp_path / "none" / "x.json": ": there is no folder for such a file",
        Path("/proc/x.json"): " cannot be written: ",
    }
    for path, text in told.items():
        with pytest.raises(ConfigError, match=f"{flag} {path}{text}"):
            main(["serve", "--base-url", "http://127.0.0.1:9", flag, str(path)])


def test_no_server_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with toy_server() as url:
        pass
    for end in ("", "/", "/v1", "/v1/"):
        said = f"no model was found at {url}/v1/models: .*nanoengine serve MODEL"
        with pytest.raises(EngineError, match=said):
            main(["serve", "--base-url", url + end])


def test_percentiles_are_between_the_nearest_values() -> None:
    asked = Asked([1], 2)
    rows = report([Answered(asked, 0.0, [float(i)], num_tokens=1) for i in range(1, 12)], 1.0)
    assert (rows["mean_ttft_ms"], rows["median_ttft_ms"], rows["p50_ttft_ms"]) == (6000,) * 3
    assert (rows["p90_ttft_ms"], rows["p99_ttft_ms"]) == (10_000, 10_900)
    assert "p90_tpot_ms" not in rows


def test_a_failed_answer_adds_no_times() -> None:
    asked = Asked([1, 2], 2)
    good = Answered(asked, 0.0, [1.0, 3.0], num_tokens=3)
    bad = Answered(asked, 0.0, [100.0], num_tokens=9, error="broken")
    rows = report([good, bad], 4.0)
    assert rows["median_tpot_ms"] == rows["mean_tpot_ms"] == 1000
    assert rows["median_itl_ms"] == 2000 and rows["total_output_tokens"] == 3
