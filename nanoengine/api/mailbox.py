"""Mailbox: where the engine's thread leaves new output of a request, merged until it is read."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType

from nanoengine.engine.completion import merge_deltas
from nanoengine.outputs import RequestOutput, StreamDelta


class Mailbox:
    """New output of one request for its caller; made on the caller's loop."""

    def __init__(self, lock: threading.Condition) -> None:
        """lock: guards what arrives. It is the engine's: who holds it must not wait for that."""
        self.loop = asyncio.get_running_loop()
        self.is_done = False  # the caller has the last output or the error, or has left
        self.wants_deltas = True  # False: only the last output
        self._arrived = asyncio.Event()
        self._lock = lock
        self._deltas: list[StreamDelta] = []
        self._end: RequestOutput | BaseException | None = None
        self._trace: TracebackType | None = None

    def put(
        self, deltas: list[StreamDelta], end: RequestOutput | BaseException | None = None
    ) -> bool:
        """Merge new output into the unread output. Returns True if the caller must be woken."""
        with self._lock:
            was_empty = not self._deltas and self._end is None
            self._deltas = merge_deltas([*self._deltas, *deltas]) if self._deltas else deltas
            if self._end is None:
                self._end = end
                self._trace = end.__traceback__ if isinstance(end, BaseException) else None
            return was_empty

    def wake(self) -> None:
        """Tell the caller, on its own loop, that there is new output."""
        self._arrived.set()

    async def take(self) -> tuple[list[StreamDelta], RequestOutput | None]:
        """Wait for new output: at most one delta for each completion, and the last output if any.

        Raises the error of the request or the engine.
        """
        while True:
            with self._lock:
                deltas, self._deltas = self._deltas, []
                end = self._end
            self.is_done = end is not None
            if isinstance(end, BaseException):
                raise end.with_traceback(self._trace)  # without frames that other callers added
            if deltas or end is not None:
                return deltas, end
            await self._arrived.wait()
            self._arrived.clear()
