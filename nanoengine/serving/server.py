"""Runs the application, and ends it on SIGTERM or Ctrl-C when open requests have ended."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from nanoengine.serving.accept_faults import AcceptFaults
from nanoengine.serving.app import make_app
from nanoengine.serving.connections import Connection
from nanoengine.serving.engine import Engine
from nanoengine.serving.event_stream import ended
from nanoengine.serving.guards import NameGuard
from nanoengine.serving.open_requests import OpenRequests
from nanoengine.serving.options import ServerOptions
from nanoengine.serving.prompts import Facts
from nanoengine.serving.service import Service, running_service

STOPPING = "the server is stopping"
GRACE_S = 2.0  # to tell clients that their request was ended
TICK_S = 0.1
BACKLOG = 2048


async def serve(
    engine: AbstractAsyncContextManager[tuple[Engine, Facts]],
    options: ServerOptions,
    listener: socket.socket,
    on_start: Callable[[], None] = lambda: None,
) -> None:
    """Answer requests until a signal ends it. engine: connects to it. on_start: called when clients
    can connect.
    """
    async with running_service(engine, options) as service:
        await make_server(service, on_start).serve([listener])


def make_server(service: Service, on_start: Callable[[], None]) -> Server:
    """The server of a service; on_start: called when clients can connect."""
    drain_seconds, idle_seconds = service.options.drain_seconds, service.options.idle_seconds
    app: ASGIApp = make_app(service)
    if service.options.is_for_this_machine:
        app = NameGuard(app, service.options.allow_origins)
    config = uvicorn.Config(
        app,
        http=Connection.with_stall(service.options.stall_seconds),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=math.ceil(idle_seconds),
        timeout_graceful_shutdown=math.ceil(drain_seconds + 2 * GRACE_S),
    )
    return Server(config, service.open, drain_seconds, on_start)


class Server(uvicorn.Server):
    """uvicorn's, which tells open requests why they end."""

    def __init__(
        self,
        config: uvicorn.Config,
        requests: OpenRequests,
        drain_seconds: float,
        on_start: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._requests = requests
        self._drain_seconds = drain_seconds
        self._on_start = on_start
        self._num_signals = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        asyncio.get_running_loop().set_exception_handler(AcceptFaults())
        await super().startup(sockets)
        self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nothing more, give open requests their time, end the rest."""
        self._requests.refuse_all(STOPPING)
        ending = asyncio.create_task(self._end_requests())
        await super().shutdown(sockets)
        await ended(ending)

    async def _end_requests(self) -> None:
        """End the requests that are open too long, then the connections of clients that do not
        take that, or that have sent half a body.
        """
        await self._wait(self._drain_seconds, until_signal=2)
        self._requests.end_all(STOPPING)
        await self._wait(GRACE_S, until_signal=3)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def _wait(self, seconds: float, until_signal: int) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while loop.time() < end and self._num_signals < until_signal:
            await asyncio.sleep(min(TICK_S, seconds))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End; a further Ctrl-C shortens a wait. Unlike uvicorn's, the process does not die of it,
        and open requests are told instead of cancelled.
        """
        if sig == signal.SIGINT or not self.should_exit:
            self._num_signals += 1
        self.should_exit = True
