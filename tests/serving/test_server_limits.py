"""What a client may not do, and clients that leave: nothing stays behind, and others go on."""

from __future__ import annotations

import json
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from driver import break_engine
from live_server import (
    LiveServer,
    events_of,
    live_server,
    read_stream,
    read_until,
    request_bytes,
    until,
)
from paced_engine import standing_still_once_one_runs, stepping_if, stepping_to_begin

from nanoengine import LLM, InvalidParamsError, SamplingParams
from nanoengine.serving import service
from nanoengine.serving.openai_keys import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from nanoengine.serving.openai_requests import CompletionRequest
from nanoengine.serving.prompts import Prepared, check_repeats, json_of

LONG = {"prompt": "long", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
SHORT = LONG | {"max_tokens": 3}
pytestmark = pytest.mark.usefixtures("threads_as_before")


@pytest.fixture(scope="module")
def server(tiny: Callable[[str], Path]) -> Iterator[LiveServer]:
    with live_server(tiny("llama"), api_key="secret", max_open_texts=4, max_body_mib=1) as made:
        yield made
        made.wait_until_idle()


SECRET = "secret"
KEY = {"Authorization": f"Bearer {SECRET}"}


@contextmanager
def held(server: LiveServer) -> Iterator[None]:
    """The engine makes no step until the block ends."""
    gate, reached = threading.Event(), threading.Event()

    def wait(_: Any) -> None:
        reached.set()
        assert gate.wait(60)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.on_engine, wait)
        assert reached.wait(60)
        try:
            yield
        finally:
            gate.set()
            waiting.result()


def reset(connection: socket.socket) -> None:
    """Close without a goodbye."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def rest_of(link: socket.socket) -> bytes:
    """All until the server closes."""
    return b"".join(iter(lambda: link.recv(65536), b""))


def test_the_key_guards_all_but_health_and_the_page(server: LiveServer) -> None:
    for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere"):
        status, error = server.get(path)
        assert (status, error["error"]["code"]) == (401, "invalid_api_key")
        for wrong in ("Bearer secre", "Bearer", "Basic secret", "secret", "Bearer \xe9"):
            assert server.get(path, Authorization=wrong)[0] == 401
    assert {server.ask("GET", path)[0] for path in ("/health", "/ping", "/")} == {200}
    assert server.get("/v1/models", Authorization="bearer secret")[0] == 200
    assert server.get("/v1/models", x_api_key="secret")[0] == 200


def test_spaces_around_a_key_are_no_part_of_it(tiny: Callable[[str], Path]) -> None:
    """As from a file with a line break; HTTP cannot send them."""
    with live_server(tiny("llama"), api_key=" key\n") as server:
        assert server.get("/v1/models", Authorization="Bearer key")[0] == 200
        assert server.get("/v1/models", x_api_key="key ")[0] == 200
        assert server.get("/v1/models", Authorization="Bearer ke")[0] == 401


def test_a_body_has_a_largest_size(server: LiveServer) -> None:
    """However much larger it is, the client gets the answer."""
    for size in (1, 1 << 20, 1 << 24, 1 << 25):
        status, headers, data = server.ask("POST", CHAT, b" " * ((1 << 20) + size), **KEY)
        assert status == 413 and b"larger than 1 MiB; --max-body-mib raises" in data
        assert "connection" not in headers


@contextmanager
def slow_reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """To read a body of over 1000 bytes takes until the event is set. Gives it, once there is no
    other in the way.
    """
    gate, json_of = threading.Event(), service.json_of

    def slow(body: bytes) -> Any:
        assert len(body) < 1000 or gate.wait(60)
        return json_of(body)

    monkeypatch.setattr(service, "json_of", slow)
    monkeypatch.setattr(service, "LARGE_BODY", 1000)
    try:
        yield gate
    finally:
        gate.set()


LARGE = SHORT | {"user": "a" * 1000}


def test_large_bodies_do_not_keep_small_ones_waiting(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor each other, once their clients have left."""
    with slow_reader(monkeypatch) as gate:
        links = [server.connect(COMPLETIONS, SECRET, **LARGE) for _ in range(6)]
        status, _, _ = server.ask("POST", COMPLETIONS, SHORT, **KEY)
        assert status == 200
        for link in links[1:]:
            link.close()
        until(lambda: len(server.server.server_state.tasks) == 1)
        begun: list[bytes] = []
        monkeypatch.setattr(service, "json_of", lambda body: (begun.append(body), json_of(body))[1])
        gate.set()
        with links[0]:
            read_until(links[0], b'"finish_reason": "length"')
        assert server.ask("POST", COMPLETIONS, LARGE, **KEY)[0] == 200
    assert len(begun) == 1


def test_shutdown_ends_requests_that_are_being_read(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no stream yet. Clients are told, whatever their body takes."""
    with slow_reader(monkeypatch), live_server(tiny("llama"), drain_seconds=0.2) as server:
        links = [
            server.connect(path, **LARGE | {"messages": [{"role": "user", "content": "a"}]})
            for path in (COMPLETIONS, MESSAGES, f"{MESSAGES}/count_tokens")
        ]
        until(lambda: len(server.server.server_state.tasks) == 3)
        server.server.should_exit = True
        for link in links:
            with link:
                answer = rest_of(link)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"server_stopping" in answer or b"overloaded_error" in answer


@contextmanager
def slow_compiler(server: LiveServer) -> Iterator[None]:
    """A regular expression of x's is not compiled until the end."""
    gate = threading.Event()
    grammars: Any = server.on_engine(lambda llm: llm.llm_engine.inputs.grammars)
    compile_one = grammars._compile

    def slow(source: tuple[str, str]) -> Any:
        assert "x" not in source[1] or gate.wait(60)
        return compile_one(source)

    grammars._compile = slow
    try:
        yield
    finally:
        gate.set()
        del grammars._compile


def in_form(regex: str) -> dict[str, Any]:
    return SHORT | {"structured_outputs": {"regex": regex}}


def test_forms_that_take_long_to_compile_hold_up_no_known_ones(
    tiny: Callable[[str], Path],
) -> None:
    with live_server(tiny("llama")) as server:
        assert server.post(COMPLETIONS, **in_form("a+"))[0] == 200
        with slow_compiler(server):
            links = [server.connect(COMPLETIONS, **in_form("x" * n)) for n in range(1, 13)]
            until(lambda: len(server.server.server_state.tasks) == len(links))
            assert server.post(COMPLETIONS, **in_form("a+"))[0] == 200
            assert server.post(COMPLETIONS, **in_form("b+"))[0] == 200
        for link in links:
            with link:
                read_until(link, b'"finish_reason"')


@pytest.mark.parametrize("stream", [True, False])
def test_shutdown_ends_requests_whose_forms_are_compiled(
    tiny: Callable[[str], Path], stream: bool
) -> None:
    with live_server(tiny("llama"), drain_seconds=0.2) as server, slow_compiler(server):
        links = [
            server.connect(COMPLETIONS, **in_form("x" * number), stream=stream)
            for number in range(1, 11)
        ]
        until(lambda: len(server.server.server_state.tasks) == len(links))
        server.server.should_exit = True
        for link in links:
            with link:
                answer = rest_of(link)
            assert answer.startswith(b"HTTP/1.1 503 ") and b"server_stopping" in answer


def test_a_chat_of_more_messages_than_tokens_is_not_rendered(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.service.prompts, "rendered", None)
    messages = [{"role": "user", "content": ""}] * 2000
    status, _, data = server.ask("POST", CHAT, {"messages": messages}, **KEY)
    assert status == 400 and b"context_length_exceeded" in data


@pytest.mark.parametrize("more", [b"\r\n", b"GET /health HTTP/1.1\r\n"])
def test_a_client_that_began_another_request_and_left_is_noticed(
    server: LiveServer, more: bytes
) -> None:
    with held(server):
        with server.connect(COMPLETIONS, SECRET, **LONG) as link:
            until(lambda: server.service.open.num_texts == 1)
            link.sendall(more)
            time.sleep(0.05)
        until(lambda: server.service.open.num_texts == 0)


def test_what_a_client_sends_ahead_has_an_end(server: LiveServer) -> None:
    """While its request is answered, a megabyte of the next one stays in its socket."""
    with held(server), server.connect(COMPLETIONS, SECRET, **LONG) as link:
        until(lambda: server.service.open.num_texts == 1)
        link.settimeout(1)
        with pytest.raises(TimeoutError):
            for _ in range(500):
                link.sendall(b"a" * (1 << 16))


def test_a_body_in_chunks_is_counted_too(server: LiveServer) -> None:
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
        "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    with server.open() as link:
        link.sendall(head.encode())
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        with suppress(ConnectionError):  # it may close before it has read the last one
            for _ in range(17):
                link.sendall(chunk)
        assert link.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_a_body_must_come_in_time(tiny: Callable[[str], Path]) -> None:
    data = request_bytes(COMPLETIONS, SHORT)
    with live_server(tiny("llama"), read_seconds=0.5) as server, server.open() as link:
        link.sendall(data[:-1])
        found = rest_of(link)
    assert found.startswith(b"HTTP/1.1 408 ") and b"within 0.5 s" in found


def test_a_client_that_leaves_within_its_body_is_no_error(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    data = request_bytes(COMPLETIONS, SHORT, SECRET)
    with server.open() as link:
        link.sendall(data[:-1])
    assert server.ask("POST", COMPLETIONS, SHORT, **KEY)[0] == 200  # a round of the loop later
    server.wait_until_idle()
    assert [record.getMessage() for record in caplog.records] == []


def test_a_client_that_leaves_while_its_prompt_is_made_is_let_go(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template may take ten seconds: the end of the server does not wait for it either."""
    gate, reached = threading.Event(), threading.Event()

    def wait(_: Any) -> list[Any]:
        reached.set()
        assert gate.wait(60)
        return []

    with live_server(tiny("llama")) as server:
        monkeypatch.setattr(server.service.prompts, "made_of", wait)
        try:
            with server.connect(COMPLETIONS, **SHORT):
                assert reached.wait(60) and server.server.server_state.tasks
            until(lambda: not server.server.server_state.tasks)
        finally:
            gate.set()


def test_an_idle_connection_outlives_those_of_clients_and_proxies(
    tiny: Callable[[str], Path],
) -> None:
    """httpx drops its own after 5 s, nginx after 60: who closes first can hit no request."""
    with live_server(tiny("llama")) as server:
        assert server.server.config.timeout_keep_alive == 75
    with live_server(tiny("llama"), idle_seconds=1) as server, server.open() as link:
        start = time.monotonic()
        link.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 2)  # the second never idles
        assert rest_of(link).count(b"HTTP/1.1 200 ") == 2 and time.monotonic() - start > 0.9


def test_a_connection_must_bring_a_whole_head_in_time(tiny: Callable[[str], Path]) -> None:
    """Neither silence, nor bytes one by one, nor a body after its answer keep one open."""
    starts = (b"", b"GET /health HTTP/1.1\r\nHost: x\r\nA: ")
    asked = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    with live_server(tiny("llama"), idle_seconds=1, api_key="k") as server:
        for start in (*starts, asked):
            begun = time.monotonic()
            with server.open() as link:
                link.sendall(start)
                if start == asked:
                    assert link.recv(4096).startswith(b"HTTP/1.1 401 ")
                with suppress(ConnectionError):
                    while time.monotonic() - begun < 60 and not has_ended(link, 0.1):
                        link.sendall(b"a" if start else b"")
                assert 0.5 < time.monotonic() - begun < 60


def has_ended(link: socket.socket, within_s: float) -> bool:
    """Whether the other side ends it in that time."""
    link.settimeout(within_s)
    try:
        return link.recv(4096) == b""
    except TimeoutError:
        return False


def gets_all(server: LiveServer, pause: float, num: int) -> bool:
    """Whether a client that reads slowly, for longer than a stall, gets that many answers."""
    size = len(server.ask("GET", "/")[2])
    found, begun = 0, time.monotonic()
    with suppress(ConnectionError), asking(server, num) as link:
        while found < num * size and (part := link.recv(1 << 15)):
            found += len(part)
            time.sleep(pause)
    return found >= num * size and time.monotonic() - begun > 1


@contextmanager
def asking(server: LiveServer, num: int) -> Iterator[socket.socket]:
    """A connection of small buffers that has asked for the page so many times."""
    with socket.socket() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 13)
        link.settimeout(60)
        link.connect(("127.0.0.1", server.port))
        link.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * num)
        yield link


@pytest.mark.breadth
def test_a_client_that_takes_nothing_of_an_answer_is_left(tiny: Callable[[str], Path]) -> None:
    with live_server(tiny("llama"), stall_seconds=1) as server:
        (listener,) = server.server.servers[0].sockets
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)  # what it accepts, too
        # A machine may pause for longer than a stall, but hardly each time.
        assert any(gets_all(server, 0.03, 40) for _ in range(8))
        until(lambda: not server.server.server_state.connections)
        server.server.server_state.connections = seen = Seen()
        with asking(server, 40):
            until(lambda: seen.num_added == 1 and not seen)


class Seen(set[Any]):
    """A set that counts what was ever added: a connection may end before a test looks."""

    num_added = 0

    def add(self, element: Any) -> None:
        self.num_added += 1
        super().add(element)


def test_headers_have_a_largest_size(server: LiveServer) -> None:
    with server.open() as link:
        link.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 2_000_000 + b"\r\n\r\n")
        assert link.recv(4096)[:13] == b"HTTP/1.1 400 "


def test_too_many_open_texts_are_429(server: LiveServer) -> None:
    status, _, data = server.ask("POST", COMPLETIONS, LONG | {"n": 5, "temperature": 1}, **KEY)
    assert status == 400 and b"asks for 5 texts" in data
    with held(server):
        link = server.connect(COMPLETIONS, SECRET, **LONG | {"prompt": ["a", "b", "c"]})
        until(lambda: server.service.open.num_texts == 3)
        status, headers, data = server.ask(
            "POST", COMPLETIONS, SHORT | {"n": 2, "temperature": 1}, **KEY
        )
        assert (status, headers["retry-after"]) == (429, "1") and b"rate_limit_exceeded" in data
        reset(link)
    server.wait_until_idle()
    assert server.ask("POST", COMPLETIONS, SHORT, **KEY)[0] == 200


@pytest.mark.parametrize("is_stream", [True, False])
def test_texts_may_not_repeat_gigabytes_of_a_prompt(
    tiny: Callable[[str], Path], is_stream: bool
) -> None:
    """Of 10 kB of body, n texts with 20 log-probabilities for each token of a prompt."""
    with live_server(tiny("llama")) as server:
        asked = {"prompt": [5] * 400, "echo": True, "max_tokens": 1, "stream": is_stream}
        status, body = server.post(COMPLETIONS, **asked, n=1024, logprobs=20)
        assert status == 400 and "echo: the 1024 texts would repeat" in body["error"]["message"]
        assert body["error"]["param"] == "echo"
        many = {"prompt": [[5] * 400] * 1024, "logprobs": 20}
        assert server.post(COMPLETIONS, **asked | many)[0] == 400
        for few in ({"n": 2, "logprobs": 20}, {"n": 64}, {"logprobs": 20}):
            assert server.ask("POST", COMPLETIONS, asked | few)[0] == 200


def test_texts_may_not_repeat_gigabytes_of_ids() -> None:
    ids = [5] * 10_000
    prompts = [Prepared({}, ids, SamplingParams())]
    for n, has_ids, fits in ((800, True, True), (900, True, False), (900, False, True)):
        params = SamplingParams(n=n)
        request = CompletionRequest((ids,), params, has_token_ids=has_ids)
        if fits:
            check_repeats(request, prompts)
        else:
            with pytest.raises(InvalidParamsError, match="return_token_ids: the 900 texts would"):
                check_repeats(request, prompts)


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("leave", [reset, socket.socket.close])
def test_a_client_that_leaves_ends_its_request(
    server: LiveServer, is_stream: bool, leave: Callable[[socket.socket], None]
) -> None:
    slow_down(server, 0.05)  # 20 s for all of it
    with server.connect(COMPLETIONS, SECRET, **LONG, stream=is_stream) as link:
        if is_stream:
            read_until(link, b"data: ")
        else:
            until(lambda: server.on_engine(lambda llm: len(llm.llm_engine.scheduler.running)))
        leave(link)
        left = time.monotonic()
    server.wait_until_idle()
    assert time.monotonic() - left < 15
    slow_down(server, 0)


STREAMED = {
    "num_gpu_blocks": 12,
    "enable_cpu_offload": True,
    "offload_mode": "stream",
    "kv_offload_gib": 0.02,
    "slot_tokens": 16,
    "measure_speed": False,
}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", STREAMED | {"speculative": "ngram:2+resident:3"}),
        ("qwen3.5", {"speculative": "ngram:3"}),
        ("qwen3.5", STREAMED),
    ],
    ids=["drafts over the link", "states with guesses", "states over the link"],
)
def test_what_those_held_who_left_comes_back(
    tiny: Callable[[str], Path], name: str, settings: dict[str, Any]
) -> None:
    """Blocks of both tiers and states, of clients that leave in mid-stream at about once."""
    texts = {"n": 2, "temperature": 1.0, "stop": ["no such text"], "max_tokens": 60}
    with live_server(tiny(name), settings) as server:
        for most in (2, 5, 9):  # steps of up to six tokens
            steps = Counted(lambda: server.service.open.num_texts == 8, most)
            with stepping_if(server.engine, steps):
                links = [
                    server.connect(COMPLETIONS, **LONG | texts, stream=True, seed=seed)
                    for seed in range(4)
                ]
                until(lambda steps=steps: not steps.num_left)
                assert server.on_engine(lambda llm: llm.llm_engine.kv.tables)
                (first, *_), _, _ = select.select(links, [], [], 60)
                assert first.recv(4096).startswith(b"HTTP/1.1 200 ")
                for link in links:
                    reset(link)
                server.wait_until_idle()


class Counted:
    """So many steps, where they may begin."""

    def __init__(self, may_begin: Callable[[], bool], num_left: int) -> None:
        self.num_left = num_left
        self._may_begin = may_begin

    def __call__(self, _: LLM) -> bool:
        may_step = self.num_left > 0 and self._may_begin()
        self.num_left -= may_step
        return may_step


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_while_its_request_waits(server: LiveServer, is_stream: bool) -> None:
    with held(server):
        with server.connect(COMPLETIONS, SECRET, **LONG, stream=is_stream) as link:
            until(lambda: server.service.open.num_texts)
            reset(link)
        until(lambda: not server.service.open.num_texts)
    server.wait_until_idle()


@pytest.mark.parametrize("queue_seconds", [0.5, 600])
def test_a_stream_that_waits_gets_comments_and_a_slow_queue_ends_it(
    tiny: Callable[[str], Path], queue_seconds: float
) -> None:
    options = {"keep_alive_seconds": 0.1, "queue_seconds": queue_seconds}
    with live_server(tiny("llama"), {"max_num_seqs": 1}, **options) as server:
        with (
            standing_still_once_one_runs(server.engine),
            server.connect(COMPLETIONS, **LONG, stream=True) as first,
        ):
            read_until(first, b"data: ")
            with server.connect(COMPLETIONS, **LONG, stream=True) as second:
                if queue_seconds > 1:
                    for _ in range(3):
                        read_until(second, b": waiting\n\n")
                else:
                    told = read_stream(second)
                    assert b"waited 0.5 s" in told and b"queue_timeout" in told
        server.wait_until_idle()
        assert server.post(COMPLETIONS, **SHORT)[0] == 200


def test_a_stream_of_messages_that_is_ended_says_overloaded(tiny: Callable[[str], Path]) -> None:
    with live_server(tiny("llama"), drain_seconds=0) as server:
        asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 400}
        with (
            stepping_to_begin(server.engine),
            server.connect(MESSAGES, **asked, stream=True) as link,
        ):
            assert link.recv(100)
            server.server.should_exit = True
            found = dechunked(read_stream(link)).decode()
    last = found.split("\n\n")[-2]
    assert last.startswith("event: error\n")
    error = json.loads(last.partition("data: ")[2])["error"]
    assert error == {"type": "overloaded_error", "message": "the server is stopping"}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
def test_an_error_before_a_streams_first_event_is_its_status(
    tiny: Callable[[str], Path], path: str
) -> None:
    asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "stream": True}
    if path in (COMPLETIONS, RESPONSES):
        del asked["messages"], asked["max_tokens"]
        asked |= {"prompt" if path == COMPLETIONS else "input": "a"}
    with live_server(tiny("llama"), {"max_num_seqs": 1}, queue_seconds=0.2) as server:
        with (
            standing_still_once_one_runs(server.engine),
            server.connect(COMPLETIONS, **LONG, stream=True) as first,
        ):
            assert first.recv(100)
            status, headers, data = server.ask("POST", path, asked)
        server.wait_until_idle()
    assert (status, headers["retry-after"]) == (503, "1")
    assert headers["content-type"] == "application/json"
    assert b"waited 0.2 s" in data and not data.startswith(b"data: ")


def slow_down(server: LiveServer, seconds: float) -> None:
    """Each step of the engine takes so long."""

    def change(llm: Any) -> None:
        engine = llm.llm_engine
        step = type(engine).step

        def slowly() -> Any:
            time.sleep(seconds)
            return step(engine)

        engine.step = slowly

    server.on_engine(change)


def test_shutdown_lets_requests_end(tiny: Callable[[str], Path]) -> None:
    with live_server(tiny("llama"), drain_seconds=60) as server:
        with stepping_to_begin(server.engine):
            short = server.connect(COMPLETIONS, **SHORT, stream=True)
            late = server.open()
            late.sendall(request_bytes(COMPLETIONS, SHORT)[:-1])
            until(lambda: server.service.open.num_texts == 1)
            server.server.should_exit = True
            until(lambda: not server.server.servers[0].sockets)
        with short, late:
            late.sendall(b"}")
            refused = rest_of(late)
            assert refused.startswith(b"HTTP/1.1 503 ") and b"server_stopping" in refused
            assert b'"finish_reason":"length"' in read_stream(short)
        with pytest.raises(OSError):
            server.get("/health")


def test_shutdown_ends_requests_that_take_too_long(tiny: Callable[[str], Path]) -> None:
    with live_server(tiny("llama"), drain_seconds=0.5) as server, stepping_to_begin(server.engine):
        long = server.connect(COMPLETIONS, **LONG, stream=True)
        whole = server.connect(COMPLETIONS, **LONG)
        with long, whole:
            read_until(long, b"data: ")
            until(lambda: server.service.open.num_texts == 2)
            server.server.should_exit = True
            found = read_stream(long)
            answer = rest_of(whole)
        assert b"server_stopping" in found and found.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 503 ") and b"server_stopping" in answer


def test_a_further_ctrl_c_ends_open_requests_and_then_cuts_them_off(
    tiny: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """A client is told why. What it sends or reads too slowly is cut off, and is no error."""
    with live_server(tiny("llama"), drain_seconds=600) as server:
        slow_down(server, 0.1)  # 40 s for all of it
        stream = server.connect(COMPLETIONS, **LONG, stream=True)
        half = server.open()
        half.sendall(request_bytes(COMPLETIONS, SHORT)[:-1])
        begin = time.monotonic()
        with stream, half:
            assert stream.recv(100)
            for sig in (signal.SIGTERM, signal.SIGTERM):  # a service manager may say it twice
                server.server.handle_exit(sig, None)
            until(lambda: not server.server.servers[0].sockets)
            for _ in range(3):
                assert b"server_stopping" not in read_until(stream, b"data: ")
            server.server.handle_exit(signal.SIGINT, None)
            assert read_stream(stream).count(b"server_stopping") == 1
            server.server.handle_exit(signal.SIGINT, None)
            with suppress(ConnectionResetError):
                assert rest_of(half) == b""
    assert time.monotonic() - begin < 120
    assert [record.getMessage() for record in caplog.records] == []


def test_an_engine_that_fails_for_good_is_seen_by_all(tiny: Callable[[str], Path]) -> None:
    with live_server(tiny("llama")) as server:
        with server.connect(COMPLETIONS, **LONG, stream=True) as link:
            with stepping_to_begin(server.engine):
                assert link.recv(100)
                server.on_engine(break_engine)
            error = events_of(dechunked(read_stream(link)))[-1]["error"]
        assert error["type"] == "server_error" and "device lost" not in error["message"]
        for status, body in (
            server.get("/health"),
            server.post(COMPLETIONS, **SHORT),
            server.get("/metrics"),
        ):
            assert (status, body["error"]["code"]) == (503, "engine_closed")


def test_an_unexpected_error_is_logged_once(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: Any) -> None:
        raise RuntimeError("oh")

    with live_server(tiny("llama")) as server:
        monkeypatch.setattr(server.service, "check_model", broken)
        status, body = server.get("/v1/models/tiny")
    error = body["error"]
    assert (status, error["code"]) == (500, "server_error") and "oh" not in error["message"]
    (record,) = caplog.records
    assert record.exc_info and str(record.exc_info[1]) == "oh"
    assert record.args and str(record.args[0]) in error["message"]


def dechunked(data: bytes) -> bytes:
    """The body of an answer in chunks."""
    rest, body = data.partition(b"\r\n\r\n")[2], b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return body


def test_pages_of_named_origins_may_call(tiny: Callable[[str], Path]) -> None:
    origin = "https://chat.example"
    with live_server(tiny("llama"), api_key="k", allow_origins=(origin,)) as server:
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        status, headers, _ = server.ask("OPTIONS", CHAT, **asked)
        assert (status, headers["access-control-allow-origin"]) == (200, origin)
        status, headers, _ = server.ask("GET", "/v1/models", Origin="https://evil.example")
        assert status == 401 and "access-control-allow-origin" not in headers


def test_a_page_whose_name_leads_here_may_not_call(tiny: Callable[[str], Path]) -> None:
    """DNS rebinding: to a browser the server is then the page's own site."""
    near = ("127.0.0.1", "[::1]:80", "localhost:8000", "box", "host.docker.internal", "192.0.2.1:9")
    far = ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example")
    for host in ("127.0.0.1", "127.0.0.2"):
        with live_server(tiny("llama"), host=host) as server:
            assert {server.ask("GET", "/v1/models", Host=name)[0] for name in near} == {200}
            for name in far:
                status, error = server.get("/v1/models", Host=name)
                assert (status, error["error"]["code"]) == (403, "unknown_host")
                assert server.ask("POST", CHAT, {}, Host=name)[0] == 403
    for options in (
        {"api_key": "k"},
        {"allow_origins": ("https://evil.example",)},
        {"allow_origins": ("*",)},
        {"host": "0.0.0.0"},
    ):
        with live_server(tiny("llama"), **options) as server:
            assert server.get("/v1/models", Authorization="Bearer k", Host=far[1])[0] == 200
