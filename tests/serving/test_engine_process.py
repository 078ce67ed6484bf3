"""An engine in a process of its own: clients get what they get without, and nothing stays behind
however it ends.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from descriptors import open_descriptors
from live_server import (
    SETTINGS,
    LiveServer,
    lines_until_ready,
    live_server,
    read_stream,
    read_until,
    request_bytes,
    until,
)
from prometheus_client.parser import text_string_to_metric_families

from nanoengine import AsyncLLM
from nanoengine.errors import ConfigError
from nanoengine.serving.engine_process import EngineProcess
from nanoengine.serving.openai_keys import CHAT, COMPLETIONS, MESSAGES, RESPONSES

ROOT = Path(__file__).parents[2]
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
GREEDY = {"temperature": 0, "ignore_eos": True}
LONG = {"prompt": "long", "max_tokens": 480, **GREEDY}
# One after the other, with ONE_BY_ONE: more than any pause of a machine.
ENDLESS = LONG | {"prompt": [[7, 8, i] for i in range(60)]}
ONE_BY_ONE = {"max_num_seqs": 1}
pytestmark = pytest.mark.usefixtures("threads_as_before")


@pytest.fixture(scope="module")
def server(tiny: Callable[[str], Path]) -> Iterator[LiveServer]:
    with live_server(tiny("llama"), engine_process=True) as made:
        yield made
        wait_until_idle(made)


@pytest.fixture(scope="module")
def plain(tiny: Callable[[str], Path]) -> Iterator[LiveServer]:
    with live_server(tiny("llama")) as made:
        yield made


def figure(server: LiveServer, name: str, **labels: str) -> float:
    """The sum of a metric's values that have these labels."""
    families = text_string_to_metric_families(server.ask("GET", "/metrics")[2].decode())
    samples = [sample for family in families for sample in family.samples]
    found = [s for s in samples if s.name == f"nanoengine:{name}"]
    assert found
    return sum(s.value for s in found if labels.items() <= s.labels.items())


def wait_until_idle(server: LiveServer) -> None:
    """Wait until no request holds anything, on either side."""
    for name in ("num_requests_running", "num_requests_waiting"):
        until(lambda name=name: figure(server, name) == 0)
    until(lambda: figure(server, "kv_blocks", state="used") == 0)
    assert server.service.open.num_texts == 0


def same(answer: tuple[int, Any]) -> tuple[int, Any]:
    """An answer without what no two answers share."""
    status, body = answer
    return status, _same(body)


def _same(value: Any) -> Any:
    if isinstance(value, list):
        return [_same(each) for each in value]
    if isinstance(value, dict):
        apart = ("id", "created", "created_at", "completed_at")
        return {key: _same(each) for key, each in value.items() if key not in apart}
    return value


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, HELLO | {"max_tokens": 9, **GREEDY}),
        (CHAT, HELLO | {"max_tokens": 5, "logprobs": True, "top_logprobs": 3, **GREEDY}),
        (COMPLETIONS, {"prompt": "abc", "echo": True, "logprobs": 2, "max_tokens": 4, **GREEDY}),
        (COMPLETIONS, {"prompt": ["one", [5, 6, 7]], "n": 2, "max_tokens": 9, "seed": 3}),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 20, "stop": ["e", "a"], "temperature": 0}),
        (RESPONSES, {"input": "hello", "max_output_tokens": 7, "temperature": 0}),
        (MESSAGES, HELLO | {"max_tokens": 600, "temperature": 0}),
        (
            COMPLETIONS,
            {"prompt": "a", "structured_outputs": {"regex": "(ab){9}"}, "max_tokens": 30},
        ),
        (CHAT, HELLO | {"response_format": {"type": "json_object"}, "max_tokens": 20, "seed": 1}),
        (CHAT, HELLO | {"structured_outputs": {"json": {"type": "banana"}}}),
        ("/tokenize", {"prompt": "aé"}),
        (CHAT, HELLO | {"model": "x"}),
        (CHAT, HELLO | {"top_p": 7}),
        (CHAT, HELLO | {"max_tokens": 600}),
        (CHAT, HELLO | {"max_tokens": 600, "stream": True}),
        (COMPLETIONS, {"prompt": [5] * 600}),
        (COMPLETIONS, {"prompt": [9999]}),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"9999": 1}}),
        (COMPLETIONS, {"prompt": [[5], [9999]], "stream": True}),
        (COMPLETIONS, {"prompt": "a", "cache_salt": "\ud800"}),
    ],
)
def test_an_answer_is_that_of_a_server_without(
    server: LiveServer, plain: LiveServer, path: str, body: dict[str, Any]
) -> None:
    expected = same(plain.post(path, **body))
    assert same(server.post(path, **body)) == expected
    assert bool(expected[1].get("error")) == (expected[0] >= 400)


def test_a_stream_is_that_of_a_server_without(server: LiveServer, plain: LiveServer) -> None:
    asked = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 20, **GREEDY}
    expected = plain.stream(COMPLETIONS, **asked)
    found = server.stream(COMPLETIONS, **asked)
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        lists = [
            [value for event in events for value in event["choices"][0]["logprobs"][name]]
            for events in (found, expected)
        ]
        assert lists[0] == lists[1] and len(lists[0]) == 24
    texts = ["".join(e["choices"][0]["text"] for e in events) for events in (found, expected)]
    assert texts[0] == texts[1] and texts[0].startswith("abc")
    # And not all of it at the end; a busy machine may merge the tokens of some.
    assert any(len(server.stream(COMPLETIONS, **asked)) > 3 for _ in range(20))


def test_streams_at_once_are_those_alone(server: LiveServer) -> None:
    asked = [{"prompt": [7 + i, 8], "max_tokens": 30, **GREEDY} for i in range(12)]

    def text(body: dict[str, Any]) -> str:
        return "".join(e["choices"][0]["text"] for e in server.stream(COMPLETIONS, **body))

    alone = [text(body) for body in asked]
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(text, asked)) == alone
    assert len(set(alone)) > 6


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(server: LiveServer, stream: bool) -> None:
    """The engine may be the faster one, but hardly each time."""
    assert any(generated_for_who_leaves(server, stream) < LONG["max_tokens"] for _ in range(10))


def generated_for_who_leaves(server: LiveServer, stream: bool) -> float:
    """How many tokens are generated for a client that leaves once its request has begun."""
    asked, made = "prompt_tokens_total", "generation_tokens_total"
    num_asked, num_made = figure(server, asked), figure(server, made)
    with server.connect(COMPLETIONS, **LONG, stream=stream) as link:
        if stream:
            assert link.recv(100).startswith(b"HTTP/1.1 200")
        until(lambda: figure(server, asked) > num_asked)
    wait_until_idle(server)
    return figure(server, made) - num_made


def test_what_requests_took_is_measured(server: LiveServer) -> None:
    names = (
        "time_to_first_token_seconds",
        "request_queue_time_seconds",
        "e2e_request_latency_seconds",
    )
    before = [figure(server, f"{name}_count") for name in names]
    server.post(COMPLETIONS, prompt="a", max_tokens=3, **GREEDY)
    for name, count in zip(names, before, strict=True):
        assert figure(server, f"{name}_count") == count + 1
        assert 0 < figure(server, f"{name}_sum") < 60 * (count + 1)


def test_a_process_that_is_killed(tiny: Callable[[str], Path]) -> None:
    before = open_descriptors()
    with live_server(tiny("llama"), ONE_BY_ONE, engine_process=True) as server:
        assert isinstance(server.llm, EngineProcess)
        with server.connect(COMPLETIONS, **ENDLESS, stream=True) as link:
            read_until(link, b"data: ")
            os.kill(server.llm.pid, signal.SIGKILL)
            until(lambda: server.get("/health")[0] == 503)
            rest = read_stream(link)
        [told] = [line[6:] for line in rest.splitlines() if b'"error"' in line]
        error = json.loads(told)["error"]
        assert (error["type"], error["code"]) == ("server_error", "engine_closed")
        assert error["message"] == (
            "the engine process was killed by SIGKILL (out of memory?); start the server again, "
            "and see its log"
        )
        status, body = server.post(COMPLETIONS, prompt="a")
        assert (status, body["error"]["code"]) == (503, "engine_closed")
        assert body["error"]["message"] == error["message"]
        assert server.get("/metrics")[0] == 503
        pid = server.llm.pid
    assert not Path(f"/proc/{pid}").exists()
    assert not open_descriptors() - before


def test_what_the_process_reports_is_for_the_log(
    tiny: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """The text of an exception may say what no client should read."""
    with live_server(tiny("llama"), ONE_BY_ONE, engine_process=True) as server:
        assert isinstance(server.llm, EngineProcess)
        with server.connect(COMPLETIONS, **ENDLESS, stream=True) as link:
            read_until(link, b"data: ")
            server.llm._link.send(b'{"id": "hidden"}\n')
            rest = read_stream(link)
        assert b"internal error" in rest and b"KeyError" not in rest and b"server_error" in rest
    assert "the engine process failed: KeyError: 'do'" in caplog.text


def test_a_template_of_the_setting_is_that_of_both_processes(tiny: Callable[[str], Path]) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %} and x"
    settings = {"chat_template": template}
    with live_server(tiny("llama"), settings, engine_process=True) as server:
        code, body = server.post("/v1/chat/completions", **HELLO, max_tokens=1, **GREEDY)
        (alone,) = server.post("/tokenize", prompt="hello and x", add_special_tokens=False)[1:]
    assert code == 200 and body["usage"]["prompt_tokens"] == alone["count"]


@pytest.mark.breadth
def test_an_error_of_the_start_is_that_without(tiny: Callable[[str], Path]) -> None:
    settings = SETTINGS | {"model": str(tiny("llama")), "max_model_len": 1 << 20}
    with pytest.raises(ConfigError, match="max_model_len") as expected:
        AsyncLLM(**settings)
    before = open_descriptors()
    with pytest.raises(ConfigError) as found:
        EngineProcess(settings)
    assert (found.type, str(found.value)) == (expected.type, str(expected.value))
    assert not open_descriptors() - before


def test_the_servers_side_imports_no_torch() -> None:
    script = (
        "import nanoengine.serving.engine_process, nanoengine.serving.server, sys\n"
        "print('torch' in sys.modules)"
    )
    path = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, env=path, stdout=subprocess.PIPE, check=True)
    assert ran.stdout.strip() == b"False"


@pytest.mark.breadth
def test_signals_end_it_with_status_0(tiny: Callable[[str], Path]) -> None:
    """As a service manager ends it: every process gets SIGTERM, with a stream in the middle."""
    command = [sys.executable, "-m", "nanoengine", "serve", str(tiny("llama")), "--port", "0"]
    flags = ["--device", "cpu", "--num-gpu-blocks", "80", "--num-threads", "1"]
    process = subprocess.Popen(
        [*command, *flags, "--engine-process", "--drain-seconds", "1"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stderr is not None
    try:
        lines = lines_until_ready(process.stderr)
        assert any(
            line.startswith("INFO nanoengine.api.llm: model") for line in lines
        )  # the worker's
        port = int(lines[-1].rpartition(":")[2].removesuffix("/\n"))
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert children
        body = {"prompt": "a", "max_tokens": 500, "stream": True, **GREEDY}
        with socket.create_connection(("127.0.0.1", port), timeout=60) as link:
            link.sendall(request_bytes(COMPLETIONS, body))
            assert link.recv(15) == b"HTTP/1.1 200 OK"
            begin = time.monotonic()
            for pid in (process.pid, *map(int, children)):
                os.kill(pid, signal.SIGTERM)
            rest = read_stream(link)
        assert process.wait(60) == 0
        assert time.monotonic() - begin < 60
        assert process.stderr.read() == "stopped\n"
        assert b"server_stopping" in rest or b'"finish_reason":"length"' in rest
        assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
