"""Tells once that clients cannot connect, where asyncio tells of each try, thousands a second."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import resource
import time
from typing import Any

logger = logging.getLogger(__name__)

PAUSE_S = 10.0
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class AcceptFaults:
    """For `set_exception_handler` of a loop that listens. Other exceptions go to the loop's own
    handler.
    """

    def __init__(self) -> None:
        self._told = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """context: as call_exception_handler has it."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in NO_ROOM and "socket" in context):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._told >= PAUSE_S:
            self._told = time.monotonic()
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            logger.error(
                "clients cannot connect: %s; this process may have %d open files: raise the limit "
                "(ulimit -n), or put a proxy in front that limits connections",
                error.strerror,
                limit,
            )
