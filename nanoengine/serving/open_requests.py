"""OpenRequests: what is being answered now, how much of it may be, and its end at shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from nanoengine.serving.engine import TokenStream
from nanoengine.serving.refusals import Refusal

RETRY = {"Retry-After": "1"}  # seconds


class OpenRequests:
    """Counts the texts that are generated or wait, and can end them all. For one event loop."""

    def __init__(self, most: int, queue_seconds: float) -> None:
        """most: texts at once. queue_seconds: longest wait for the first step; 0: no limit."""
        self._most = most
        self._queue_seconds = queue_seconds
        self._streams: set[TokenStream] = set()
        self._end_reason: str | None = None  # why every request is refused
        self._has_ended = asyncio.Event()
        self.num_texts = 0

    @contextmanager
    def room_for(self, num_texts: int) -> Iterator[None]:
        """Holds room for a request's texts. Raises Refusal if there is none."""
        self._check_open()
        if num_texts > self._most:
            raise Refusal(
                400,
                "invalid_value",
                f"the request asks for {num_texts} texts, and this server generates at most "
                f"{self._most} at once (--max-open-texts)",
            )
        if self.num_texts + num_texts > self._most:
            raise Refusal(
                429,
                "rate_limit_exceeded",
                f"texts that are generated or wait: {self.num_texts}; with {num_texts} more they "
                f"would be above {self._most} (--max-open-texts); try again",
                headers=RETRY,
            )
        self.num_texts += num_texts
        try:
            yield
        finally:
            self.num_texts -= num_texts

    @contextmanager
    def watched(self, stream: TokenStream) -> Iterator[None]:
        """Ends a stream at shutdown, or when it has waited too long; closes it at the end."""
        self._streams.add(stream)
        timer = None
        if self._queue_seconds:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(self._queue_seconds, self._end_if_queued, stream)
        try:
            self._check_open()
            yield
        finally:
            if timer is not None:
                timer.cancel()
            self._streams.discard(stream)
            stream.close()

    def refuse_all(self, reason: str) -> None:
        """From now on every request is refused; those that are open go on."""
        self._end_reason = reason

    def end_all(self, reason: str) -> None:
        """End every open request; its client is told the reason."""
        self.refuse_all(reason)
        self._has_ended.set()
        for stream in list(self._streams):
            stream.fail(_stopping(reason))

    async def until_end(self) -> None:
        """Wait until all requests are ended; for those that have no stream yet. Raises Refusal."""
        await self._has_ended.wait()
        self._check_open()

    def _check_open(self) -> None:
        if self._end_reason is not None:
            raise _stopping(self._end_reason)

    def _end_if_queued(self, stream: TokenStream) -> None:
        if stream.is_queued:
            stream.fail(
                Refusal(
                    503,
                    "queue_timeout",
                    f"the request waited {self._queue_seconds:g} s for its first step "
                    "(--queue-seconds); try again when the server is less busy",
                    headers=RETRY,
                )
            )


def _stopping(reason: str) -> Refusal:
    return Refusal(503, "server_stopping", reason, headers=RETRY)
