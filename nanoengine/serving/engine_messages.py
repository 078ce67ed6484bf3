"""Messages between a server and its engine's process: records as lines of JSON, and back.

A record is an object of those of its fields that differ from their defaults. Times in records are
those of time.perf_counter, which on Linux is one clock for all processes. Imports no torch.
"""

from __future__ import annotations

import json
import traceback
import types
from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, partial
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from nanoengine import errors
from nanoengine.errors import EngineError
from nanoengine.outputs import StreamDelta
from nanoengine.sampling_params import SamplingParams

MAX_LINE = 1 << 30  # bytes

Record = TypeVar("Record")
Reader = Callable[[Any], Any]


def line_of(message: Mapping[str, Any]) -> bytes:
    """A message as a line. Its values: JSON's, records and errors, also in lists.

    Raises EngineError for a line beyond MAX_LINE.
    """
    # JSON in ASCII can hold any text, also half of a surrogate pair.
    line = _ENCODER.encode(message).encode() + b"\n"
    if len(line) > MAX_LINE:
        raise EngineError(
            f"a message of the engine has {len(line)} bytes, the limit is {MAX_LINE}: ask for "
            "fewer log-probabilities"
        )
    return line


def message_of(line: bytes) -> dict[str, Any]:
    """The message of a line. Raises EngineError if it is damaged."""
    try:
        message = json.loads(line)
    except ValueError as error:
        raise EngineError(f"a damaged message between processes: {error}") from error
    if not isinstance(message, dict):
        raise EngineError(f"a damaged message between processes: a {type(message).__name__}")
    return message


def record(kind: type[Record], value: Any) -> Record:
    """The record of this class that a message holds."""
    made: Record = _reader(cast(Any, kind))(value)
    return made


def deltas_of(deltas: list[StreamDelta]) -> list[dict[str, Any]]:
    """Deltas for `line_of`, which would take them for the strings that they are, too."""
    return [_object_of(delta) for delta in deltas]


def error_of(value: Mapping[str, Any]) -> EngineError:
    """The error that a message holds: of its class if that is one of ours, else EngineError."""
    kind = getattr(errors, value["kind"], None)
    if not (isinstance(kind, type) and issubclass(kind, EngineError)):
        error = EngineError(f"{value['kind']}: {value['text']}")
    else:
        error = kind(value["text"])
    if value.get("cause"):
        error.__cause__ = EngineError(value["cause"])
    return error


def _object_of(value: Any) -> dict[str, Any]:
    if isinstance(value, BaseException):
        return {"kind": type(value).__name__, "text": str(value), "cause": _cause(value)}
    known = (
        (name, default, getattr(value, name)) for name, default in _defaults(cast(Any, type(value)))
    )
    return {name: found for name, default, found in known if found is not default}


def _cause(error: BaseException) -> str:
    """Where an unexpected error was raised, as text."""
    if isinstance(error, EngineError):
        return ""
    return "".join(traceback.format_exception(error))


_ENCODER = json.JSONEncoder(default=_object_of, separators=(",", ":"))


@cache
def _defaults(kind: Hashable) -> list[tuple[str, Any]]:
    return [(field.name, field.default) for field in fields(cast(Any, kind))]


@cache
def _reader(kind: Hashable) -> Reader:
    """What makes a value of this type from JSON's."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        some = [each for each in inner if each is not type(None)]
        return _or_none(_reader(some[0])) if len(some) == 1 else _as_it_is
    if kind is SamplingParams:  # which takes lists for tuples
        return lambda value: SamplingParams(**value)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return partial(_made, kind, {name: _reader(hints[name]) for name, _ in _defaults(kind)})
    if origin in (list, tuple):
        each = _reader(inner[0])
        return lambda values: origin(values if each is _as_it_is else map(each, values))
    if origin in (dict, Mapping):  # by numbers, which JSON writes as texts
        each = _reader(inner[1])
        return lambda value: {int(key): each(found) for key, found in value.items()}
    is_error = isinstance(kind, type) and issubclass(kind, EngineError)
    return error_of if is_error else _as_it_is


def _made(kind: Any, readers: Mapping[str, Reader], values: Mapping[str, Any]) -> Any:
    return kind(**{name: readers[name](value) for name, value in values.items()})


def _or_none(read: Reader) -> Reader:
    return lambda value: None if value is None else read(value)


def _as_it_is(value: Any) -> Any:
    return value
