"""The socket that a server listens on. Imports no library, so an address is tried at once."""

from __future__ import annotations

import errno
import socket

from nanoengine.errors import EngineError


def listen(host: str, port: int) -> socket.socket:
    """A socket of this address; nobody can connect yet. Raises EngineError if it is taken, or none
    of this machine.
    """
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
        step = "give --host an address of this machine, such as 127.0.0.1"
        if getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES):
            step = "try another --port"
        raise EngineError(f"cannot listen on {host}:{port}: {reason}; {step}") from error
    return made
