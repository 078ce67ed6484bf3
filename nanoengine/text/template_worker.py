"""Renders chat templates and tries out grammars in a process that its parent may end at any time.

Run as a script with only the standard library, jinja2 and, for grammars, llguidance. Defines also
the frames between this process and its parent (template_process.py): a kind, a length, that many
bytes. Requests are JSON, answers are text. Knows nothing of models or messages.
"""

from __future__ import annotations

import functools
import json
import os
import re
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

MEMORY_BYTES = 1 << 30  # in addition to the memory of the ready process
MAX_BYTES = 64 << 20  # of a request, and of a text
MAX_ERROR_CHARS = 2000
IDLE_SECONDS = 1.0  # between checks that the parent is alive
REQUEST_SECONDS = 60.0  # to receive a request after its first byte
SPARE_SECONDS = 1.0  # beyond the time at which the parent should have ended a rendering

# Kinds of frames: the requests, readiness for one, and the answers.
RENDER, COMPILE, READY, TEXT = b"?", b"g", b"+", b"t"
BROKEN, REFUSED, NO_MEMORY, TOO_LONG = b"b", b"r", b"m", b"l"

# Tokens that a grammar names by their ids, and one that a vocabulary of bytes has, too.
CHARACTER = re.compile(r"\\\\|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})")  # of llama.cpp's grammars
TOKEN_IDS, ANY_TOKEN = re.compile(r"<\[[0-9,-]+\]>"), "<[0]>"
# What alone may come next, llguidance gives as the tokens of that text, special ones among them,
# which the same grammar then refuses.
UNFORCED = '%llguidance {"no_forcing": true}\n'
_FRAME = struct.Struct(">cQ")
# The end of a worker must not kill a parent that has SIGPIPE's default action.
_NO_SIGNAL: int = getattr(socket, "MSG_NOSIGNAL", 0)


def send(link: socket.socket, kind: bytes, payload: bytes, deadline: float) -> None:
    """Send one frame. Raises TimeoutError after `deadline` (of time.monotonic), OSError if the
    other side is gone."""
    for part in (_FRAME.pack(kind, len(payload)), payload):
        link.settimeout(_left(deadline))
        link.sendall(part, _NO_SIGNAL)


def receive(link: socket.socket, deadline: float, max_bytes: int) -> tuple[bytes, bytes]:
    """Receive kind and payload of one frame. Raises TimeoutError after `deadline`, EOFError if the
    other side is gone, OSError for a frame longer than `max_bytes`."""
    kind, size = _FRAME.unpack(_exactly(link, _FRAME.size, deadline))
    if size > max_bytes:
        raise OSError(f"a frame of {size} bytes, more than {max_bytes}")
    return kind, bytes(_exactly(link, size, deadline))


def _exactly(link: socket.socket, size: int, deadline: float) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        link.settimeout(_left(deadline))
        count = link.recv_into(view)
        if not count:
            raise EOFError("the other side is gone")
        view = view[count:]
    return data


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def encoded(text: str) -> bytes:
    """UTF-8 bytes of a text, which may contain lone surrogates."""
    return text.encode("utf-8", "surrogatepass")


def decoded(data: bytes) -> str:
    """The inverse of `encoded`."""
    return data.decode("utf-8", "surrogatepass")


def main(parent: int, places: list[str]) -> None:
    """Answer requests on standard input, a socket, while the process `parent` lives.

    places: the parent's import path. It comes last, because a file beside the parent's program may
    have the name of a standard module.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the parent handles Ctrl-C
    sys.path += places
    link = socket.socket(fileno=0)
    compiled = functools.lru_cache(maxsize=8)(_environment().from_string)
    _limit_memory()
    send(link, READY, b"", time.monotonic() + REQUEST_SECONDS)
    while _has_request(link, parent):
        try:
            kind, request = receive(link, time.monotonic() + REQUEST_SECONDS, MAX_BYTES)
        except EOFError:
            return
        answer = _grammar(request) if kind == COMPILE else _answer(compiled, request)
        send(link, *answer, time.monotonic() + REQUEST_SECONDS)


def _has_request(link: socket.socket, parent: int) -> bool:
    # The link can stay open after the parent's end, because its forks hold it, too.
    while not select.select([link], [], [], IDLE_SECONDS)[0]:
        if os.getppid() != parent:
            return False
    return True


def _answer(compiled: Callable[[str], Any], request: bytes) -> tuple[bytes, bytes]:
    stage = REFUSED
    try:
        source, variables, seconds = json.loads(decoded(request))
        _end_after(seconds + SPARE_SECONDS)  # the parent may have died
        stage = BROKEN
        template = compiled(source)
        stage = REFUSED
        text = encoded(template.render(variables))
    except MemoryError:
        return NO_MEMORY, b""
    except Exception as error:  # a template is a program: it may raise anything
        return stage, encoded((str(error) or type(error).__name__)[:MAX_ERROR_CHARS])
    finally:
        _end_after(0)
    return (TOO_LONG, b"") if len(text) > MAX_BYTES else (TEXT, text)


def _grammar(request: bytes) -> tuple[bytes, bytes]:
    """A form as a grammar of llguidance, which was compiled once, for a vocabulary of bytes."""
    try:
        kind, text, whitespace, is_forced, limits, seconds = json.loads(decoded(request))
        _end_after(seconds + SPARE_SECONDS)
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer

        grammar = _grammar_text(LLMatcher, kind, text, whitespace)
        grammar = grammar if is_forced else _unforced(kind, grammar)
        limited = LLParserLimits(verbose_errors=False, **limits)
        tried = TOKEN_IDS.sub(ANY_TOKEN, grammar)
        matcher = LLMatcher(LLTokenizer("byte"), tried, log_level=0, limits=limited)
        matcher.compute_bitmask()  # a grammar that has no text is found here
        error = matcher.get_error()
    except MemoryError:
        return NO_MEMORY, b""
    except Exception as refusal:
        error = str(refusal) or type(refusal).__name__
    finally:
        _end_after(0)
    return (REFUSED, encoded(error[:MAX_ERROR_CHARS])) if error else (TEXT, encoded(grammar))


def _grammar_text(matcher: Any, kind: str, text: str, whitespace: str) -> str:
    """The form as llguidance reads it; raises anything for one that it cannot read."""
    if kind in ("json", "json_object"):
        rest = {"whitespace_pattern": whitespace, "lenient": False}
        return str(matcher.grammar_from_json_schema(text or '{"type":"object"}', overrides=rest))
    if kind == "regex":
        return str(matcher.grammar_from_regex(text))
    if kind == "choice":
        choices = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
        text = "start: CHOICE\nCHOICE: " + " | ".join(choices)  # one item of a row, not thousands
    elif "::=" in text:
        from llguidance.gbnf_to_lark import any_to_lark

        text = any_to_lark(CHARACTER.sub(_character, text))
    return str(matcher.grammar_from_lark(text))


def _character(found: re.Match[str]) -> str:
    """What an escape in a grammar stands for, beyond ASCII; others stay as they are."""
    code = int(found[1] or found[2] or "0", 16)
    is_whole = 0x80 <= code < 0xD800 or 0xDFFF < code < 0x110000
    return chr(code) if is_whole else found[0]


def _unforced(kind: str, grammar: str) -> str:
    """The grammar, which then gives no token as the only one unless it is."""
    if kind in ("choice", "grammar"):
        return UNFORCED + grammar
    made = json.loads(grammar)["grammars"][0]
    return UNFORCED + (made["lark_grammar"] or f"start: %json {json.dumps(made['json_schema'])}")


def _end_after(seconds: float) -> None:
    """Have the system end this process after `seconds`; 0 cancels that."""
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _limit_memory() -> None:
    """Allow no core dumps, and MEMORY_BYTES more memory than now, which only Linux can tell."""
    if not sys.platform.startswith("linux"):
        return
    import resource  # Windows has none

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    present = [n for n in resource.getrlimit(resource.RLIMIT_AS) if n != resource.RLIM_INFINITY]
    limit = min([size + MEMORY_BYTES, *present])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _environment() -> Any:
    """A jinja2 sandbox with transformers' settings."""
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class GenerationTag(Extension):
        """Accepts `{% generation %}` blocks, which mark the assistant's part for training."""

        tags = {"generation"}  # noqa: RUF012 (the name and the type are jinja2's)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class PlainNamespace(Namespace):
        """A namespace that refuses names of Python's internal attributes."""

        def __init__(*args: Any, **attributes: Any) -> None:  # an attribute may be named `self`
            for name in dict(*args[1:], **attributes):
                check_name(name)
            Namespace.__init__(*args, **attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            check_name(name)
            super().__setitem__(name, value)

    def check_name(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace takes no attribute {name!r}")

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "dict": _MakesDicts(),
        "namespace": PlainNamespace,
        "raise_exception": raise_exception,
        "strftime_now": _strftime_now,
    }
    return environment


class _MakesDicts:
    """The name `dict` in templates: it makes dicts but is not a class."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` without Jinja's HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
