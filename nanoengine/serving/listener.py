"""The socket that a server listens on. Imports no library, so an address is tried at once."""

from __future__ import annotations

import socket

from nanoengine.errors import EngineError


def listen(host: str, port: int) -> socket.socket:
    """A socket of this address; nobody can connect yet. Raises EngineError if it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Asyncio turns Nagle's algorithm off only for sockets that name TCP; with it, each answer on a
    # connection that is used again takes 40 ms more.
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except (OSError, UnicodeError) as error:
        made.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise EngineError(
            f"cannot listen on {host}:{port}: {reason}; try another --port"
        ) from error
    return made
