"""A server that is out of file descriptors says so in one line, and goes on."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette

from nanoengine.serving.accept_faults import AcceptFaults
from nanoengine.serving.open_requests import OpenRequests
from nanoengine.serving.server import Server

MOST_TRIES = 50


class Full(socket.socket):
    """Has no descriptor for a client for so many tries."""

    tries = 0

    def accept(self) -> Any:
        self.tries += 1
        if self.tries <= MOST_TRIES:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def make_server() -> Server:
    config = uvicorn.Config(Starlette(), lifespan="off", log_config=None, backlog=MOST_TRIES)
    return Server(config, OpenRequests(8, 1.0), 0.0, lambda: None)


async def ask(listener: socket.socket) -> str:
    """The first line of an answer by a server on this socket, which ends then."""
    made = make_server()
    running = asyncio.create_task(made.serve([listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(b"GET /x HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    line = await asyncio.wait_for(reader.readline(), 60)
    writer.close()
    made.should_exit = True
    await running
    return line.decode()


def test_clients_that_cannot_connect_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with Full() as listener, caplog.at_level(logging.ERROR):
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert "404" in asyncio.run(ask(listener))
        assert listener.tries > MOST_TRIES
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("clients cannot connect: Too many open files; this process may have ")


def test_other_exceptions_of_the_loop_are_logged_as_ever(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(error: Exception) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(AcceptFaults())
        loop.call_exception_handler({"message": "m", "exception": error})

    for error in (ValueError("of another kind"), OSError(errno.EMFILE, "not of a socket")):
        caplog.clear()
        asyncio.run(fail(error))
        assert [record.getMessage() for record in caplog.records] == ["m"]
