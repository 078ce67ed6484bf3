"""EventStream: server-sent events to a client that may be slow, or leave.

And `unless_gone`, which waits for a whole answer as long as its client does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import ExitStack, aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"
COMMENT = b": waiting\n\n"
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect the events
}
GONE = Response(status_code=499)  # nobody reads it: the client has left


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    """One event: `data: {...}`, after its name if it has one."""
    text = f"data: {json.dumps(data, separators=(',', ':'))}\n\n"
    return (f"event: {name}\n{text}" if name else text).encode()


class EventStream(Response):
    """Sends what an iterator gives, and comments while it gives nothing. Ends when the iterator
    does, when the client leaves, or when it reads nothing for a long time.

    The status is sent with the first event or comment. An error before that is an answer of its
    own, with its status; a later one is the last event.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        held: ExitStack,
        keep_alive_seconds: float,
        stall_seconds: float,
        refusal: Callable[[Exception], Response],
        failure: Callable[[Exception], bytes],
    ) -> None:
        """held: what is let go at the end. refusal, failure: the answer that an error is, and the
        event.
        """
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._held = held
        self._keep_alive_seconds = keep_alive_seconds
        self._stall_seconds = stall_seconds
        self._refusal = refusal
        self._failure = failure
        self._refused: Response | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        link = _Link(send, start)
        tasks: list[asyncio.Task[None]] = []
        with self._held:
            try:
                work = self._send_events(link), until_gone(receive), self._keep_alive(link)
                tasks += map(asyncio.create_task, work)
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await ended(*tasks)
        if self._refused is not None:
            await self._refused(scope, receive, send)

    async def _send_events(self, link: _Link) -> None:
        async with aclosing(self._with_error(link)) as events:
            async for data in events:
                await link.send({"type": "http.response.body", "body": data, "more_body": True})
        if self._refused is None:
            await link.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _with_error(self, link: _Link) -> AsyncGenerator[bytes, None]:
        """The events; an error is the last one, or the answer if nothing was sent."""
        try:
            async with aclosing(self._events) as events:
                async for data in events:
                    yield data
        except Exception as error:
            if link.is_begun:
                yield self._failure(error)
            else:
                self._refused, link.is_ended = self._refusal(error), True

    async def _keep_alive(self, link: _Link) -> None:
        """Send comments between events; return when the client has read nothing for too long."""
        stalled = 0.0
        while stalled < self._stall_seconds:
            link.is_used = False
            seconds = min(self._keep_alive_seconds, self._stall_seconds)
            await asyncio.sleep(seconds)
            stalled = stalled + seconds if link.is_sending and not link.is_used else 0.0
            if not (link.is_used or link.is_sending or link.is_ended):
                await link.send({"type": "http.response.body", "body": COMMENT, "more_body": True})


class _Link:
    """The way to a client, and whether it is in use. start: goes before the first message."""

    def __init__(self, send: Send, start: dict[str, Any]) -> None:
        self._send = send
        self._start = start
        self.is_begun = self.is_sending = self.is_used = self.is_ended = False

    async def send(self, message: dict[str, Any]) -> None:
        """Send; waits while the client does not read."""
        self.is_sending = True
        if not self.is_begun:
            self.is_begun = True
            await self._send(self._start)
        self.is_ended = message.get("more_body") is False
        await self._send(message)
        self.is_sending, self.is_used = False, True


async def unless_gone(
    request: Request,
    work: Coroutine[Any, Any, Result],
    until_end: Coroutine[Any, Any, None],
) -> Result | None:
    """The result of `work`; None if the client leaves before, which ends the work. until_end: ends
    it as well, by an error.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(until_gone(request.receive))
    ending = asyncio.create_task(until_end)
    try:
        await asyncio.wait([working, leaving, ending], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if ending.done():
            ending.result()
        return None
    finally:
        await ended(working, leaving, ending)


async def until_gone(receive: Receive) -> None:
    """Wait until the client has left; its body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def ended(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait for their ends."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
