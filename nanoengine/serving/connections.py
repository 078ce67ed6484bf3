"""Connections of a server: each must bring a request in time, and take what it is sent.

Alone, uvicorn waits without end for a first request, for the rest of a head, and for a client that
does not read its answer.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_AHEAD = 1 << 16  # bytes of the next request


class Connection(H11Protocol):
    """uvicorn's connection. It ends when no whole head of a request has come for timeout_keep_alive
    seconds since it began or gave its last answer, and when its client has taken nothing of what
    was sent for `stall_seconds`, and more waits for it.
    """

    stall_seconds = 60.0
    _due = 0.0  # when it ends without a request
    _num_ahead = 0  # bytes that came while a request was answered
    _watching: asyncio.TimerHandle | None = None

    @classmethod
    def with_stall(cls, seconds: float) -> type[Connection]:
        """Connections whose clients may take nothing for so long."""
        return type(cls.__name__, (cls,), {"stall_seconds": seconds})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request."""
        super().connection_made(transport)
        self._due = self.loop.time() + self.timeout_keep_alive
        self._wait_on()

    def data_received(self, data: bytes) -> None:
        """Parts of a head, and of a body that nobody reads any more, win no time."""
        super().data_received(data)
        self._read_on(len(data))
        self._wait_on()

    def on_response_complete(self) -> None:
        """Wait for the next request, and watch whether this answer is taken."""
        self._due = self.loop.time() + self.timeout_keep_alive
        self._num_ahead = 0
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """The client does not take as much as there is."""
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        """The client has taken it."""
        super().resume_writing()
        self._unwatch()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._unwatch()

    def _read_on(self, length: int) -> None:
        """Go on reading while a request is answered: a client that has sent some bytes of its next
        one, and leaves, would not be noticed.
        """
        if self.conn.their_state is h11.DONE and self.flow.read_paused:
            self._num_ahead += length
            if self._num_ahead < MAX_AHEAD:
                self.flow.resume_reading()

    def _wait_on(self) -> None:
        """Unless a request is being answered, end when the time is over."""
        if self.cycle is not None and not self.cycle.response_complete:
            if not self.flow.write_paused:  # more will be added to what waits
                self._unwatch()
        elif not (self.timeout_keep_alive_task or self.transport.is_closing()):
            end = self.timeout_keep_alive_handler
            self.timeout_keep_alive_task = self.loop.call_at(self._due, end)

    def _watch(self) -> None:
        """End if the client takes nothing from now on."""
        self._unwatch()
        if size := self.transport.get_write_buffer_size():
            self._watching = self.loop.call_later(self.stall_seconds, self._look, size)

    def _unwatch(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    def _look(self, size: int) -> None:
        """size: what waited when the watch began; nothing was added since."""
        if self.transport.get_write_buffer_size() >= size:
            self.transport.abort()  # `close` would wait for the client
        else:
            self._watch()
