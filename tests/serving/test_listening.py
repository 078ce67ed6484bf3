"""Sockets that the server listens on."""

from __future__ import annotations

import asyncio
import errno
import socket

import pytest

from nanoengine.errors import EngineError
from nanoengine.serving import listener
from nanoengine.serving.listener import listen


def test_what_is_written_is_sent_at_once() -> None:
    """Nagle's algorithm would hold back the end of an answer, and the next token of a stream."""
    options: list[int] = []

    async def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made = writer.get_extra_info("socket")
        options.append(made.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async def connect() -> None:
        listener = listen("127.0.0.1", 0)
        async with await asyncio.start_server(note, sock=listener):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            await reader.read()
            writer.close()

    asyncio.run(connect())
    assert options and all(options)


@pytest.mark.parametrize(
    ("error", "step"),
    [
        (OSError(errno.EADDRINUSE, "Address already in use"), "try another --port"),
        (PermissionError(errno.EACCES, "Permission denied"), "try another --port"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "give --host an address"),
        (OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address"), "give --host an address"),
        (UnicodeError("label too long"), "give --host an address"),
    ],
)
def test_an_address_that_cannot_be_had_says_what_to_change(
    monkeypatch: pytest.MonkeyPatch, error: Exception, step: str
) -> None:
    class Socket(socket.socket):
        def bind(self, address: object) -> None:
            raise error

    monkeypatch.setattr(listener.socket, "socket", Socket)
    with pytest.raises(EngineError, match=f"cannot listen on here:80: .*; {step}"):
        listen("here", 80)
