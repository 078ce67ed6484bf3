"""EventStream: a client that leaves or reads nothing ends it, and what it holds is let go.

Seconds are virtual: they pass only while all wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

import pytest
from starlette.responses import Response
from virtual_time import run

from nanoengine.serving.event_stream import EventStream, event, unless_gone

SECONDS = 10.0


class Client:
    """Takes what a server sends; may leave, and may read nothing from some message on."""

    def __init__(self, leaves_after: int | None = None, stalls_after: int | None = None) -> None:
        self.messages: list[Any] = []
        self._leaves_after = leaves_after
        self._stalls_after = stalls_after
        self._left = asyncio.Event()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    async def send(self, message: Any) -> None:
        if len(self.messages) == self._stalls_after:
            await asyncio.Event().wait()
        self.messages.append(message)
        if len(self.messages) == self._leaves_after:
            self._left.set()

    async def receive(self) -> Any:
        await self._left.wait()
        return {"type": "http.disconnect"}


async def sent(
    client: Client,
    events: AsyncIterator[bytes],
    stall_seconds: float = 60 * SECONDS,
    keep_alive_seconds: float = SECONDS,
) -> bool:
    """Send a stream; returns whether what it held was let go."""
    released: list[bool] = []
    with ExitStack() as stack:
        stack.callback(released.append, True)
        seconds = keep_alive_seconds, stall_seconds
        stream = EventStream(events, stack.pop_all(), *seconds, refused, failed)
    async with asyncio.timeout(600 * SECONDS):
        await stream({"type": "http"}, client.receive, client.send)
    return released == [True]


def refused(error: Exception) -> Response:
    return Response(str(error), 503, {"retry-after": "1"})


def failed(error: Exception) -> bytes:
    return event({"error": str(error)})


@pytest.mark.parametrize("pause", [0, SECONDS * 4])
@pytest.mark.parametrize("count", [0, 2])
def test_an_error_is_the_answer_until_something_was_sent(pause: float, count: int) -> None:
    async def events() -> AsyncIterator[bytes]:
        for number in range(count):
            yield event({"n": number})
        await asyncio.sleep(pause)
        raise ValueError("no")

    async def work() -> None:
        client = Client()
        assert await sent(client, events())
        start, *_, end = client.messages
        if count or pause:
            assert start["status"] == 200 and end["more_body"] is False
            assert client.body.endswith(b'data: {"error":"no"}\n\n')
            assert client.body.count(b'data: {"n"') == count
        else:
            assert start["status"] == 503 and (b"retry-after", b"1") in start["headers"]
            assert client.body == b"no" and len(client.messages) == 2

    run(work())


def test_no_comment_comes_between_an_error_and_its_answer() -> None:
    """Also where one is due in the moment of the error."""

    async def events() -> AsyncIterator[bytes]:
        if client.messages:
            yield b""
        raise ValueError("no")

    client = Client()
    assert run(sent(client, events(), keep_alive_seconds=0))
    assert client.messages[0]["status"] == 503 and client.body == b"no"


async def three(pause: float = 0) -> AsyncIterator[bytes]:
    for number in range(3):
        await asyncio.sleep(pause)
        yield event({"n": number})


async def endless(ended: list[bool]) -> AsyncIterator[bytes]:
    try:
        while True:
            await asyncio.sleep(0)
            yield b"data: x\n\n"
    finally:
        ended.append(True)


def test_all_events_are_sent_and_then_the_end() -> None:
    async def work() -> None:
        client = Client()
        assert await sent(client, three())
        assert client.body == b'data: {"n":0}\n\ndata: {"n":1}\n\ndata: {"n":2}\n\n'
        start, *parts, end = client.messages
        assert start["status"] == 200 and all(part["more_body"] for part in parts)
        assert end == {"type": "http.response.body", "body": b"", "more_body": False}

    run(work())


def test_comments_fill_a_silence() -> None:
    async def work() -> None:
        client = Client()
        assert await sent(client, three(pause=SECONDS * 4))
        assert client.body.count(b": waiting\n\n") >= 3
        assert client.body.count(b"data: ") == 3

    run(work())


def test_a_named_event() -> None:
    assert event({"a": "é"}, "ping") == b'event: ping\ndata: {"a":"\\u00e9"}\n\n'


@pytest.mark.parametrize("way", [{"leaves_after": 5}, {"stalls_after": 5}])
def test_a_client_that_leaves_or_reads_nothing_ends_it(way: dict[str, int]) -> None:
    async def work() -> None:
        ended: list[bool] = []
        client = Client(**way)
        assert await sent(client, endless(ended), stall_seconds=SECONDS * 3)
        assert ended == [True] and len(client.messages) < 10_000

    run(work())


def test_a_slow_client_that_reads_is_waited_for() -> None:
    class Slow(Client):
        async def send(self, message: Any) -> None:
            await asyncio.sleep(SECONDS * 2)
            await super().send(message)

    async def work() -> None:
        client = Slow()
        assert await sent(client, three(), stall_seconds=SECONDS * 6)
        assert client.messages[-1]["more_body"] is False

    run(work())


def test_work_ends_when_its_client_leaves() -> None:
    class Asked:
        def __init__(self, client: Client) -> None:
            self.receive = client.receive

    async def work() -> None:
        ended: list[bool] = []

        async def forever() -> int:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)
            return 1

        async def at_once() -> int:
            return 1

        async def never() -> None:
            await asyncio.Event().wait()

        client = Client(leaves_after=1)
        assert await unless_gone(Asked(client), at_once(), never()) == 1
        waiting = asyncio.ensure_future(unless_gone(Asked(client), forever(), never()))
        await asyncio.sleep(0)
        await client.send({})
        assert await waiting is None and ended == [True]

    run(work())
