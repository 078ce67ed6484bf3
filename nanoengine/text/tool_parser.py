"""Reads calls of tools from an answer as it comes, by the rows of tool_syntax.py.

Text that is no call stays content: a call is one once it has the name of a tool that was given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from nanoengine.text.answer_pieces import (
    MAX_HELD_SPACES,
    Kind,
    Piece,
    PieceReader,
    Steps,
    first_of,
    num_held_back,
)
from nanoengine.text.argument_types import argument_of
from nanoengine.text.bare_object import BareObject
from nanoengine.text.checked_json import object_in
from nanoengine.text.python_arguments import PythonArguments
from nanoengine.text.tool_syntax import (
    MAX_NAME,
    NAME,
    SPACES,
    Calls,
    Named,
    Objects,
    Tagged,
    ToolSyntax,
    head_of,
)

MAX_HEAD = 256  # characters before a call's name is known; the patterns match no more
MAX_FAILED = 16  # marks without a call; the rest is text
KEYS = "name|arguments|parameters|type|id"  # of an object that is a call
# With limits, so that a text that is no call is searched again and again at no cost.
ANY_HEAD = head_of(rf'([^"\\]{{0,{MAX_NAME}}})')
HEAD = re.compile(rf"{SPACES}{ANY_HEAD}{SPACES}(?=\{{)")
NO_CALL = re.compile(
    rf"\s{{17}}|{SPACES}(?:[^\s{{]|\{{\s{{17}}|\{{{SPACES}"  # no object, or too many spaces
    rf'(?:[^\s"]|"(?!(?:{KEYS})")[^"\\]{{0,{MAX_NAME}}}"))'  # an object with another first key
)
PYTHON_HEAD = rf"{SPACES}{NAME}\((?={SPACES}(?:\)|[a-zA-Z_]\w{{0,63}}{SPACES}=))"
MARKS = re.compile(r'[\\"{}\[\]]')
CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
TOOL = "to=functions."
RECIPIENT = re.compile(rf"to=functions\.{NAME}")
MESSAGE = "<|message|>"
STARTS = ("<|start|>", "<|channel|>", MESSAGE)
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")


class ToolParser(PieceReader):
    """Splits an answer into its content and its calls."""

    def __init__(self, syntax: ToolSyntax, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """schemas: of the arguments, by the name of the tool."""
        self._syntax = syntax
        self._schemas = schemas
        self._num_calls = 0
        super().__init__()

    def _read(self) -> Steps[None]:
        failed = 0
        if self._syntax.is_bare:
            yield from self._call(0)
        marks = self._syntax.marks
        while (at := (yield from self._content(marks))) is not None:
            if not (yield from self._call(at)):
                yield Piece(Kind.CONTENT, self.take(at))
                failed += 1
            if failed == MAX_FAILED:
                marks = ()

    def _content(self, marks: tuple[str, ...]) -> Steps[int | None]:
        """Give out text up to the spaces before a mark. Returns where the mark ends; None if the
        text has none.
        """
        while True:
            at, mark = first_of(self.left, marks)
            if mark:
                spaces = _num_spaces(self.left[:at])
                yield Piece(Kind.CONTENT, self.take(at - spaces))
                return spaces + len(mark)
            if self.has_ended:
                is_idle = self._num_calls > 0 and self.left.isspace()
                dropped = _num_spaces(self.left) if is_idle else 0
                yield Piece(Kind.CONTENT, self.take(len(self.left) - dropped))
                return None
            certain = len(self.left) - num_held_back(self.left, marks)
            yield Piece(Kind.CONTENT, self.take(certain - _num_spaces(self.left[:certain])))
            yield None

    def _call(self, at: int) -> Steps[bool]:
        """Read calls that begin at `at`; False, and nothing is taken, if there is none."""
        for body in self._syntax.bodies:
            match body:
                case Objects():
                    found = yield from self._objects(at, body)
                case Named():
                    found = yield from self._named(at, body)
                case Tagged():
                    found = yield from self._tagged(at, body)
                case Calls():
                    found = yield from self._python(at, body)
            if found:
                return True
        return False

    def _objects(self, at: int, body: Objects) -> Steps[bool]:
        start = (yield from self.past(at, body.before)) if body.before else at
        if start is None or not (yield from self._object(start)):
            return False
        while body.between:
            is_next = (yield from self.skip(body.between)) or (yield from self.past(0, "{"))
            if not is_next or not (yield from self._object(0)):
                break
        yield from self._skip_all(body.after)
        return True

    def _object(self, at: int) -> Steps[bool]:
        """Read one {"name": ..., "arguments": {...}}; with its keys in another order it is read
        when it has come whole.
        """
        scan, seen = JsonEnd(), at
        while True:
            if head := HEAD.match(self.left, at):
                if head[1] not in self._schemas:
                    return False
                yield from self._begin(head[1], head.end())
                yield from self._json(JsonEnd(), is_given_out=True)
                yield from self._close()
                self._num_calls += 1
                return True
            if NO_CALL.match(self.left, at):
                return False
            if (end := scan.end_in(self.left[seen:])) is not None:
                return (yield from self._whole(at, seen + end))
            seen = len(self.left)
            if self.has_ended:
                return False
            yield None

    def _close(self) -> Steps[None]:
        """Take what an object has after its arguments: other keys, and the brace, which models
        leave out now and then.
        """
        if (yield from self.skip("}")):
            return
        comma = yield from self.past(0, ",")
        if comma is not None and (yield from self.past(comma, '"')) is not None:
            yield from self._json(JsonEnd(depth=1), is_given_out=False)

    def _whole(self, at: int, end: int) -> Steps[bool]:
        call = object_in(self.left[at:end]) or {}
        name = call.get("name")
        if not isinstance(name, str) or name not in self._schemas:
            return False
        arguments = call.get("arguments", call.get("parameters"))
        if arguments is None:
            arguments = {}
        if isinstance(arguments, str):  # an object's text, as in OpenAI's answers
            arguments = object_in(arguments)
        if not isinstance(arguments, dict):
            return False
        yield from self._begin(name, end)
        yield Piece(Kind.ARGUMENTS, _json(arguments), self._num_calls)
        self._num_calls += 1
        return True

    def _named(self, at: int, body: Named) -> Steps[bool]:
        found = False
        while (yield from self._head(at, body.head)) is not None:
            if body.quote:
                yield from BareObject(self, body.quote, self._num_calls).read()
            else:
                yield from self._json(JsonEnd(), is_given_out=True)
            yield from self._skip_all(body.after)
            self._num_calls += 1
            found = True
            comma = (yield from self.past(0, body.between)) if body.between else None
            if comma is None:
                break
            at = comma
        if found:
            yield from self._skip_all(body.end)
        return found

    def _python(self, at: int, body: Calls) -> Steps[bool]:
        start = yield from self.past(at, "[")
        if (yield from self._head(at if start is None else start, PYTHON_HEAD)) is None:
            return False
        while True:
            yield from PythonArguments(self, self._num_calls).read()
            self._num_calls += 1
            if (yield from self._skip_all(body.after)):
                return True
            comma = yield from self.past(0, ",")
            if (yield from self._head(comma or 0, PYTHON_HEAD)) is None:
                return True

    def _tagged(self, at: int, body: Tagged) -> Steps[bool]:
        name = yield from self._head(at, body.head)
        if name is None:
            return False
        number = self._num_calls
        self._num_calls += 1
        root = self._schemas[name]
        before = "{"
        key_end = re.compile(re.escape(body.key_end))
        while (yield from self.skip(body.key)):
            key = yield from self.before(key_end)
            value = None if key is None else (yield from self._value(body))
            if key is None or value is None:  # the text ended in the middle of the call
                self.take(len(self.left))
                return True
            if body.trims:
                value = value.removeprefix("\n").removesuffix("\n")
            made = f"{before}{_json(key)}: {_json(argument_of(value, key, root))}"
            yield Piece(Kind.ARGUMENTS, made, number)
            before = ", "
        closed = yield from self._skip_all(body.after)
        if closed or not self.has_ended:
            yield Piece(Kind.ARGUMENTS, "{}" if before == "{" else "}", number)
        return True

    def _value(self, body: Tagged) -> Steps[str | None]:
        """Take a value and what ends it, or what comes before the end of the call."""
        if body.value:
            yield from self.skip(body.value)
        ends = re.compile(f"{re.escape(body.value_end)}|(?={body.next_part})")
        value = yield from self.before(ends)
        if value is None and (end := self.left.find(body.after[0])) >= 0:
            return self.take(end)
        return value

    def _head(self, at: int, pattern: str) -> Steps[str | None]:
        """Begin a call once what it begins with is there; its name, or None if it is no call of a
        tool.
        """
        compiled = re.compile(pattern)
        while (found := compiled.match(self.left, at)) is None:
            if self.has_ended or len(self.left) - at > MAX_HEAD:
                return None
            yield None
        if found[1] not in self._schemas:
            return None
        yield from self._begin(found[1], found.end())
        return found[1]

    def _skip_all(self, marks: tuple[str, ...]) -> Steps[bool]:
        """Take those of the marks that come next, in their order; whether any did."""
        found = False
        for mark in marks:
            found = (yield from self.skip(mark)) or found
        return found

    def _begin(self, name: str, length: int) -> Steps[None]:
        yield Piece(Kind.NAME, name, self._num_calls)
        self.take(length)

    def _json(self, scan: JsonEnd, is_given_out: bool) -> Steps[None]:
        """Take the rest of an object, as arguments where it is given out."""
        while True:
            end = scan.end_in(self.left)
            taken = self.take(len(self.left) if end is None else end)
            if is_given_out:
                yield Piece(Kind.ARGUMENTS, taken, self._num_calls)
            if end is not None or self.has_ended:
                return
            yield None


class ChannelParser(PieceReader):
    """Splits an answer of gpt-oss into its channels: analysis is reasoning, a message to a tool is
    a call, the rest is content. Source: OpenAI's harmony response format.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]], goes_on: bool = False) -> None:
        """schemas: of the arguments, by the name of the tool. goes_on: the prompt ends within the
        content.
        """
        self._schemas = schemas
        self._goes_on = goes_on
        self._num_calls = 0
        super().__init__()

    def _read(self) -> Steps[None]:
        mark = yield from self._first()
        while mark is not None:
            header = yield from self._header(mark)
            if header is None:
                return
            kind, name = self._kind_of(header)
            mark = yield from self._call(name) if name else self.until(ENDS, kind)
            if mark not in (None, STARTS[0]):
                mark = yield from self.until(STARTS, Kind.CONTENT)

    def _first(self) -> Steps[str | None]:
        """Give out what stands before the first header; its mark, None if there is none."""
        if self._goes_on:
            mark = yield from self.until(ENDS, Kind.CONTENT)
            if mark in (None, STARTS[0]):
                return mark
        # The prompt may have ended before the part of a header that names a tool.
        elif (yield from self.past(0, TOOL)) is not None:
            return ""
        return (yield from self.until(STARTS, Kind.CONTENT))

    def _call(self, name: str) -> Steps[str | None]:
        """As `until`, of a message to a tool; one without text is a call without arguments."""
        number, is_empty = self._num_calls, True
        yield Piece(Kind.NAME, name, number)
        self._num_calls += 1
        steps = self.until(ENDS, Kind.ARGUMENTS, number)
        while True:
            try:
                piece = next(steps)
            except StopIteration as end:
                if is_empty:
                    yield Piece(Kind.ARGUMENTS, "{}", number)
                return str(end.value) if end.value else None
            is_empty = is_empty and not (piece and piece.text)
            yield piece

    def _header(self, mark: str) -> Steps[str | None]:
        """What stands before a message, from its mark on; None if the text ends in it."""
        message = re.compile(re.escape(MESSAGE))
        header = "" if mark == MESSAGE else (yield from self.before(message))
        return None if header is None else mark + header

    def _kind_of(self, header: str) -> tuple[Kind, str]:
        """What a message is, and the tool that it calls."""
        channel, recipient = CHANNEL.search(header), RECIPIENT.search(header)
        if recipient and recipient[1] in self._schemas:
            return Kind.ARGUMENTS, recipient[1]
        is_thought = channel is not None and channel[1] == "analysis"
        return (Kind.REASONING if is_thought else Kind.CONTENT), ""


class JsonEnd:
    """Finds the end of an object or a list in a text that comes in parts. Whether it is JSON at
    all, it does not say. Its work for a text grows with the text's length alone.
    """

    def __init__(self, depth: int = 0) -> None:
        """depth: how many brackets are open."""
        self._depth = depth
        self._in_string = False
        self._escaped = 0  # characters of the next part before which nothing counts

    def end_in(self, part: str) -> int | None:
        """Where it ends in the next part of the text; None if it does not."""
        for found in MARKS.finditer(part):
            at, mark = found.start(), found[0]
            if at < self._escaped:
                continue
            if self._in_string:
                if mark == "\\":
                    self._escaped = at + 2
                elif mark == '"':
                    self._in_string = False
            elif mark == '"':
                self._in_string = True
            elif mark in "{[":
                self._depth += 1
            elif mark in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
        self._escaped = max(0, self._escaped - len(part))
        return None


def _num_spaces(text: str) -> int:
    """How many spaces at the end of a text may be dropped if a call follows."""
    return min(len(text) - len(text.rstrip()), MAX_HELD_SPACES)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
