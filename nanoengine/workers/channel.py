"""Channel: whole messages between the driver and one worker, over one end of a socketpair.

A frame is a length (u32), a kind (u8) and a body of that length. Both sides use this file. It knows
nothing of what the bodies say, and imports no torch.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Iterator

from nanoengine.errors import EngineError

# Kinds of frames. A driver's own kinds begin with FIRST_KIND.
STOP, HELLO, REPLY, PROGRESS, ERROR = range(5)
FIRST_KIND = 16
MAX_BYTES = 1 << 30  # of a body
READ_BYTES = 1 << 18  # at once

_HEAD = struct.Struct("<IB")
# The end of the other side must not kill a process that has SIGPIPE's default action.
_NO_SIGNAL: int = getattr(socket, "MSG_NOSIGNAL", 0)


class Channel:
    """One end of a stream of frames. At any time one thread may send and another one receive."""

    def __init__(self, link: socket.socket) -> None:
        """link: a connected stream socket, which this object owns from now on."""
        link.setblocking(False)
        self._link = link
        self._arrived = bytearray()

    def fileno(self) -> int:
        """The socket's descriptor, for select.poll; -1 after `close`."""
        return self._link.fileno()

    def close(self) -> None:
        """Close the socket; twice is fine."""
        self._link.close()

    def shut_down(self) -> None:
        """End the stream in both directions: whoever waits for the socket finds its end."""
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)

    def send(self, kind: int, body: bytes = b"", timeout_s: float | None = None) -> None:
        """Send one frame. Raises EngineError for a body beyond MAX_BYTES, TimeoutError if the
        other side has not taken it after `timeout_s` seconds, OSError if the other side is gone.
        """
        if len(body) > MAX_BYTES:
            raise EngineError(
                f"a message between processes has {len(body)} bytes, the limit is {MAX_BYTES}"
            )
        rest = memoryview(_HEAD.pack(len(body), kind) + body)
        deadline = _deadline(timeout_s)
        while rest:
            try:
                rest = rest[self._link.send(rest, _NO_SIGNAL) :]
            except BlockingIOError:
                self._await(select.POLLOUT, deadline)

    def receive(self, timeout_s: float | None = None) -> tuple[int, bytes]:
        """Kind and body of the next frame. Raises EngineError if it is damaged, TimeoutError after
        `timeout_s` seconds, EOFError if the other side is gone.
        """
        deadline = _deadline(timeout_s)
        while (frame := self.next_frame()) is None:
            if not self.read():
                self._await(select.POLLIN, deadline)
        return frame

    def read(self) -> bool:
        """Take in what has arrived, up to READ_BYTES, without waiting; False if nothing has.

        Raises EOFError if the other side is gone.
        """
        try:
            data = self._link.recv(READ_BYTES)
        except BlockingIOError:
            return False
        except ConnectionError as error:
            raise EOFError("the other process is gone") from error
        if not data:
            raise EOFError("the other process is gone")
        self._arrived += data
        return True

    def has_news(self) -> bool:
        """Whether something has come that nobody has read."""
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        return bool(poll.poll(0))

    def next_frame(self) -> tuple[int, bytes] | None:
        """The next whole frame of what was read; None if there is none yet.

        Raises EngineError if its length cannot be one.
        """
        if len(self._arrived) < _HEAD.size:
            return None
        size, kind = _HEAD.unpack_from(self._arrived)
        if size > MAX_BYTES:
            raise EngineError(
                f"a damaged message between processes: it claims {size} bytes, the limit is "
                f"{MAX_BYTES}"
            )
        stop = _HEAD.size + size
        if len(self._arrived) < stop:
            return None
        with memoryview(self._arrived) as arrived:
            body = bytes(arrived[_HEAD.size : stop])
        del self._arrived[:stop]
        return kind, body

    def _await(self, event: int, deadline: float | None) -> None:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError
        poll = select.poll()
        poll.register(self._link, event)
        poll.poll(None if left is None else left * 1000 + 1)

    # What a worker says and hears.

    def requests(self) -> Iterator[tuple[int, bytes]]:
        """In a worker: kind and body of each request of the driver, until it says STOP."""
        while (frame := self.receive())[0] != STOP:
            yield frame

    def reply(self, body: bytes = b"") -> None:
        """In a worker: send what the driver's `receive` returns."""
        self.send(REPLY, body)

    def progress(self) -> None:
        """In a worker: show that it is at work, so that the driver waits on."""
        self.send(PROGRESS)


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s
