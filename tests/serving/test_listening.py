"""Sockets that the server listens on."""

from __future__ import annotations

import asyncio
import socket

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
