"""OpenRequests: what is being answered now, how much of it may be, and its end at shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from nanoengine.async_llm import AsyncDeltaStream
from nanoengine.serving.refusals import Refusal

RETRY_S = "1"


class OpenRequests:
    """Counts the texts that are generated or wait, and can end them all. For one event loop."""

    def __init__(self, most: int, queue_seconds: float) -> None:
        """most: texts at once. queue_seconds: longest wait for the first step; 0: no limit."""
        self._most = most
        self._queue_seconds = queue_seconds
        self._streams: set[AsyncDeltaStream] = set()
        self._refusal: Refusal | None = None
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
                f"{self.num_texts} texts are generated or wait, and at most {self._most} may "
                "(--max-open-texts); try again",
                headers={"Retry-After": RETRY_S},
            )
        self.num_texts += num_texts
        try:
            yield
        finally:
            self.num_texts -= num_texts

    @contextmanager
    def watched(self, stream: AsyncDeltaStream) -> Iterator[None]:
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
        self._refusal = Refusal(503, "server_stopping", reason, headers={"Retry-After": RETRY_S})

    def end_all(self, reason: str) -> None:
        """End every open request; its client is told the reason."""
        self.refuse_all(reason)
        for stream in list(self._streams):
            stream.fail(Refusal(503, "server_stopping", reason))

    def _check_open(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def _end_if_queued(self, stream: AsyncDeltaStream) -> None:
        if stream.is_queued:
            stream.fail(
                Refusal(
                    503,
                    "queue_timeout",
                    f"the request waited {self._queue_seconds:g} s for its first step "
                    "(--queue-seconds); try again when the server is less busy",
                    headers={"Retry-After": RETRY_S},
                )
            )
