"""DeltaStream: an iterator over the deltas of one request, which steps the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Self

from nanoengine.api.chat_rules import MessageReader
from nanoengine.engine.output_processor import RequestState
from nanoengine.errors import ends_at_the_user
from nanoengine.outputs import StreamDelta


class DeltaStream(Iterator[StreamDelta]):
    """Returned by LLM.stream: the deltas of one request; steps the engine when there are none.

    Leaving it early (close(), the end of a `with`, dropping it) aborts the request and frees its
    memory: at once, or after the engine's current call.
    """

    def __init__(
        self,
        request: RequestState,
        advance: Callable[[RequestState], list[StreamDelta]],
        abandon: Callable[[int], None],
        reader: MessageReader | None,
    ) -> None:
        """advance: steps the engine until there are deltas. abandon: aborts a request by its id.
        reader: of a chat.
        """
        self.request = request
        self._advance = advance
        self._abandon = abandon
        self._reader = reader
        self._ready: deque[StreamDelta] = deque()
        self._is_open = True

    @ends_at_the_user
    def __next__(self) -> StreamDelta:
        """The next delta. Raises the error of the engine or the request and then ends."""
        if not self._ready and self._is_open:
            try:
                self._ready.extend(self._advance(self.request))
            except BaseException:
                self.close()
                raise
            self._is_open = not self.request.is_given_out
        if not self._ready:
            raise StopIteration
        delta = self._ready.popleft()
        if delta.error is not None:
            self.close()
            raise delta.error
        return delta if self._reader is None else self._reader.read(delta)

    def close(self) -> None:
        """End the request unless it has ended; closing twice is fine."""
        self._ready.clear()
        if self._is_open:
            self._is_open = False
            self._abandon(self.request.request_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
