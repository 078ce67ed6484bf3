"""What the worker processes of tests/workers run: small entries that import no torch."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from importlib.util import find_spec
from typing import Any

from nanoengine.errors import ModelLoadError
from nanoengine.workers.channel import FIRST_KIND, MAX_BYTES, Channel

ECHO, DIE, RAISE, OURS, SLEEP, GARBAGE, TALK, FACTS, RETURN = range(FIRST_KIND, FIRST_KIND + 9)


def echo(channel: Channel, hello: dict[str, Any]) -> None:
    """Does what each request says on the ranks hello["bad"], or on rank 1; others send it back."""
    for kind, body in channel.requests():
        if kind != ECHO and hello["rank"] not in hello.get("bad", [1]):
            kind = ECHO
        if kind == RETURN:
            return
        ACTIONS[kind](channel, hello, body)


def _echo(channel: Channel, hello: dict[str, Any], body: bytes) -> None:
    channel.reply(b"%d:" % hello["rank"] + body)


def _die(channel: Channel, hello: dict[str, Any], body: bytes) -> None:
    print("the last words\n" * 30 + "of this worker", file=sys.stderr, flush=True)
    os.kill(os.getpid(), int(body))


def _raise(channel: Channel, hello: dict[str, Any], body: bytes) -> None:
    raise ZeroDivisionError(body.decode())


def _ours(channel: Channel, hello: dict[str, Any], body: bytes) -> None:
    raise ModelLoadError(body.decode())


def _sleep(channel: Channel, hello: dict[str, Any], body: bytes) -> None:
    time.sleep(float(body))
    channel.reply(b"slept")


def _garbage(channel: Channel, hello: dict[str, Any], body: bytes) -> None:
    os.write(channel.fileno(), body)
    time.sleep(60)


def _talk(channel: Channel, hello: dict[str, Any], body: bytes) -> None:
    for _ in range(int(body)):
        time.sleep(0.1)
        channel.progress()
    channel.reply(b"done")


def _facts(channel: Channel, hello: dict[str, Any], body: bytes) -> None:
    facts = {
        "pid": os.getpid(),
        "group": os.getpgrp(),
        "has_torch": "torch" in sys.modules,
        "origins": [getattr(find_spec(name), "origin", None) for name in json.loads(body)],
        "path": sys.path,
        "optimize": sys.flags.optimize,
        "inheritable": os.get_inheritable(channel.fileno()),
        "stdin": os.readlink("/proc/self/fd/0"),
    }
    for fd in hello.get("fds", []):
        os.write(fd, b"x")
    channel.reply(json.dumps(facts).encode())


ACTIONS = {
    ECHO: _echo,
    DIE: _die,
    RAISE: _raise,
    OURS: _ours,
    SLEEP: _sleep,
    GARBAGE: _garbage,
    TALK: _talk,
    FACTS: _facts,
}
TOO_LONG = (MAX_BYTES + 1).to_bytes(4, "little") + b"\x02"


def deaf(channel: Channel, hello: dict[str, Any]) -> None:
    """Never reads a request, and does not end by SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel.reply(b"deaf")
    time.sleep(600)


def raises_at_once(channel: Channel, hello: dict[str, Any]) -> None:
    """Fails while it starts."""
    raise ValueError("no such thing")


def with_a_child(channel: Channel, hello: dict[str, Any]) -> None:
    """Like `echo`; a process that it started holds its connection for longer
    than a test waits.
    """
    if os.fork() == 0:
        time.sleep(40)
        os._exit(0)
    echo(channel, hello)


def holds_the_interpreter(channel: Channel, hello: dict[str, Any]) -> None:
    """Lets no other thread run: a regular expression that takes for ever, and never looks up."""
    channel.reply(b"begins")
    re.match(r"(a+)+$", "a" * 64 + "b")
