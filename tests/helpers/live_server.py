"""A server over a tiny checkpoint in a thread of this process, and a client without a library."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from driver import assert_all_free

from nanoengine import LLM, AsyncLLM
from nanoengine.serving.engine_process import EngineProcess
from nanoengine.serving.listener import listen
from nanoengine.serving.loaded_model import connected
from nanoengine.serving.options import ServerOptions
from nanoengine.serving.server import Server, make_server
from nanoengine.serving.service import Service, running_service

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "kvcache_block_size": 8,
    "num_gpu_blocks": 300,
    "num_threads": 1,
}
PATIENCE_S = 60.0


class LiveServer:
    """A running server: its address, its parts, and what a client does."""

    def __init__(
        self, llm: AsyncLLM | EngineProcess, service: Service, server: Server, port: int
    ) -> None:
        self.llm = llm
        self.service = service
        self.server = server
        self.port = port

    @property
    def engine(self) -> AsyncLLM:
        """The engine, where it is in this process."""
        assert isinstance(self.llm, AsyncLLM)
        return self.llm

    def ask(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one request; headers: with _ for -."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        sent = {"Content-Type": "application/json"} if body is not None else {}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        try:
            connection.request(method, path, data, sent)
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        """Status and JSON of a GET."""
        status, _, data = self.ask("GET", path, **headers)
        return status, json.loads(data or b"null")

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        """Status and JSON of a POST with these keys."""
        status, _, data = self.ask("POST", path, body)
        return status, json.loads(data)

    def stream(self, path: str, **body: Any) -> list[Any]:
        """The events of a stream, without the last one, which must be DONE."""
        status, headers, data = self.ask("POST", path, body | {"stream": True})
        assert status == 200, data
        assert headers["content-type"].startswith("text/event-stream")
        assert headers["x-accel-buffering"] == "no"
        return events_of(data)

    def open(self) -> socket.socket:
        """A raw connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)

    def connect(self, path: str, key: str | None = None, **body: Any) -> socket.socket:
        """A raw connection that has sent a POST."""
        made = self.open()
        made.sendall(request_bytes(path, body, key))
        return made

    def wait_until_idle(self) -> None:
        """Wait until nothing is left of any request, on either side."""
        until(lambda: not self.service.open.num_texts and not self.on_engine(_is_busy))
        self.on_engine(lambda llm: assert_all_free(llm.llm_engine))

    def on_engine(self, function: Callable[[LLM], Any]) -> Any:
        """What a function of the engine's LLM returns, called on its thread."""
        return asyncio.run(_called(self.engine.call(function)))


async def _called(work: Coroutine[Any, Any, Any]) -> Any:
    return await asyncio.wait_for(work, PATIENCE_S)


def _is_busy(llm: LLM) -> bool:
    return llm.llm_engine.has_unfinished_requests


def until(condition: Callable[[], Any]) -> None:
    """Wait until it is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "what is waited for does not come"
        time.sleep(0.005)


def request_bytes(path: str, body: Any, key: str | None = None) -> bytes:
    """A POST as it goes over the wire; bytes are sent as they are."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    if key is not None:
        head += f"Authorization: Bearer {key}\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def read_stream(link: socket.socket) -> bytes:
    """All until a stream's end."""
    return read_until(link, b"\r\n0\r\n\r\n")


def read_until(link: socket.socket, mark: bytes) -> bytes:
    """All that comes until these bytes are among it: they may come in any number of parts."""
    found = b""
    while mark not in found:
        part = link.recv(65536)
        assert part, found
        found += part
    return found


def lines_until_ready(stderr: Iterable[str]) -> list[str]:
    """What a server in another process writes until it can be asked, the last line among it."""
    lines: list[str] = []
    for line in stderr:
        lines.append(line)
        if line.startswith("ready after"):
            return lines
    raise AssertionError(f"the server has ended: {''.join(lines)}")


def events_of(data: bytes) -> list[Any]:
    """The JSON of all events but the last, which must be DONE; comments are left out."""
    parts = [part for part in data.decode().split("\n\n") if part and not part.startswith(":")]
    assert parts[-1] == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-1]]


@contextmanager
def live_server(
    path: Path, settings: dict[str, Any] | None = None, **options: Any
) -> Iterator[LiveServer]:
    """A server over the checkpoint at `path` on a free port, until the block ends. With
    engine_process=True nothing can be called on its engine.
    """
    made = ServerOptions(port=0, served_model_name="tiny", **options)
    given = SETTINGS | (settings or {}) | {"model": str(path)}
    started: list[LiveServer] = []
    ready = threading.Event()

    async def work() -> None:
        try:
            engine = connected(llm) if isinstance(llm, AsyncLLM) else llm.connected()
            async with running_service(engine, made) as service:
                server = make_server(service, ready.set)
                started.append(LiveServer(llm, service, server, listener.getsockname()[1]))
                await server.serve([listener])
        finally:
            ready.set()

    with (
        closing(EngineProcess(given) if made.engine_process else AsyncLLM(**given)) as llm,
        listen("127.0.0.1", 0) as listener,
    ):
        thread = threading.Thread(target=asyncio.run, args=(work(),), name="server")
        thread.start()
        try:
            assert ready.wait(PATIENCE_S) and started[0].server.started, "it does not start"
            yield started[0]
        finally:
            if started:
                started[0].server.should_exit = True
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
