"""AsyncDeltaStream: the output of one request, read on its caller's loop."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from typing import Self

from nanoengine.api.chat_rules import ChatRules
from nanoengine.api.engine_thread import EngineThread
from nanoengine.api.mailbox import Mailbox
from nanoengine.engine.output_processor import RequestState
from nanoengine.errors import EngineError, RequestError, without_our_lines
from nanoengine.outputs import RequestOutput, StreamDelta


class AsyncDeltaStream(AsyncIterator[StreamDelta]):
    """Returned by AsyncLLM.stream: the deltas of one request, as they come.

    Leaving it early (close(), the end of an `async with`, dropping it) aborts the request and frees
    its memory. To be used on the event loop that it was made on.
    """

    def __init__(
        self,
        engine: EngineThread,
        mailbox: Mailbox,
        request_id: int | str,
        request: RequestState,
        rules: ChatRules | None = None,
    ) -> None:
        """rules: of a chat, whose deltas have messages as they are iterated over."""
        self.rules = rules
        self.output: RequestOutput | None = None  # once the request has ended
        self.error: Exception | None = None  # once take() has raised it
        self.request_id = request_id  # of its deltas and outputs, and for abort()
        self._engine = engine
        self._mailbox = mailbox
        self._request = request
        self._reader = None if rules is None else rules.reader(request.prompt or "")
        self._ready: deque[StreamDelta] = deque()

    @property
    def is_queued(self) -> bool:
        """True while the request waits for its first step."""
        return self._request.seqs[0].metrics.first_scheduled_time is None

    def begun(self) -> RequestOutput:
        """The output before the first token; from the first delta on with num_cached_tokens, and
        with prompt_logprobs if they are requested.
        """
        asked = self._request
        return RequestOutput(
            self.request_id,
            asked.prompt,
            asked.prompt_token_ids,
            [],
            finished=False,
            num_cached_tokens=asked.seqs[0].num_cached,
            prompt_logprobs=None if self.is_queued else asked.prompt_logprobs,
        )

    async def take(self) -> list[StreamDelta]:
        """Wait for new output: at most one delta for each completion; none after the end.

        Raises the error of the request or the engine.
        """
        if self.output is not None:
            return []
        try:
            deltas, self.output = await self._mailbox.take()
        except Exception as error:
            self.error = error
            if isinstance(error, RequestError):
                raise without_our_lines(error) from error.__cause__
            raise
        if self.request_id == self._request.request_id:
            return deltas
        return [replace(delta, request_id=self.request_id) for delta in deltas]

    async def whole(self) -> RequestOutput:
        """Wait for the end; no deltas are made until then. Raises what take() raises."""
        self._mailbox.wants_deltas = False
        while self.output is None:
            await self.take()
        return self.output

    def fail(self, error: Exception) -> None:
        """End the request unless it has ended: whoever reads it gets this error."""
        self._mailbox.put([], error)
        self._mailbox.wake()
        self._engine.leave(self._mailbox)

    def close(self) -> None:
        """End the request unless it has ended; closing twice is fine. A task that waits for its
        output, or comes later, gets an EngineError.
        """
        self._ready.clear()
        if not self._mailbox.is_done:
            self._mailbox.is_done = True
            if self._engine.leave(self._mailbox):
                self._mailbox.put([], EngineError("the stream was closed"))
                with suppress(RuntimeError):  # the loop is closed
                    self._mailbox.wake()

    async def __anext__(self) -> StreamDelta:
        if not self._ready:
            self._ready.extend(await self.take())
        if not self._ready:
            raise StopAsyncIteration
        delta = self._ready.popleft()
        return delta if self._reader is None else self._reader.read(delta)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._mailbox.is_done:  # on any thread; nobody waits
            self._engine.leave(self._mailbox)
