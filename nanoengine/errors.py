"""Every error nanoengine raises on purpose, helpers that check plain values, and how errors and
warnings reach the user's own line.

EngineError
├── ConfigError                 an engine setting is unknown, out of range or cannot be honoured
│   └── OutOfMemoryError        the KV budget or the weights do not fit
├── ModelLoadError              a model folder or file cannot be used
│   ├── ModelNotFoundError      no model at the given place
│   ├── CorruptModelError       truncated or damaged file
│   ├── UnsupportedModelError   architecture, RoPE type or tensor type we do not know
│   └── WeightMismatchError     missing, unexpected or wrongly shaped tensors
├── RequestError                one request is wrong; every other request goes on
│   ├── InvalidParamsError      a sampling parameter is out of range
│   ├── InvalidPromptError      empty, of a wrong type, or a token id outside the vocabulary
│   ├── PromptTooLongError      could not finish even alone in an empty engine
│   ├── TransferError           a copy of its KV between device and host memory failed
│   └── LogitsError             the model computed logits that are no numbers
├── EngineClosedError           the engine was closed
└── ForkedProcessError          the engine, or its threads, belong to the process before a fork
"""

from __future__ import annotations

import difflib
import functools
import math
import operator
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import ParamSpec, TypeVar

MAX_COUNT = (1 << 31) - 1
SEEDS = (-(1 << 63), (1 << 64) - 1)  # numbers that fit 64 bits, signed or unsigned
MAX_SHOWN = 100  # characters
MAX_BITS = 128
MAX_NAME = 64  # characters of an unknown name that are compared with known names
# A name less similar than this (difflib's ratio) is another name, and not a slip of the fingers.
NEAR, SHORT_AND_NEAR, SHORT = 0.85, 0.75, 5  # of long names, of names up to 5 characters
TRACEBACK = "NANOENGINE_TRACEBACK"  # set, errors show where in this package they were raised

Given = ParamSpec("Given")
Result = TypeVar("Result")
Error = TypeVar("Error", bound=BaseException)


class EngineError(Exception):
    """Base of every error raised by nanoengine."""


class ConfigError(EngineError, ValueError):
    """An engine setting is unknown, out of range or cannot be honoured."""


class OutOfMemoryError(ConfigError):
    """The KV budget or the weights do not fit the memory they were given."""


class ModelLoadError(EngineError):
    """A model folder or file cannot be used."""


class ModelNotFoundError(ModelLoadError, FileNotFoundError):
    """No model is at the given place."""


class CorruptModelError(ModelLoadError):
    """A model file is truncated or damaged."""


class UnsupportedModelError(ModelLoadError):
    """The architecture, RoPE type or tensor type is not known."""


class WeightMismatchError(ModelLoadError):
    """The checkpoint's tensors are not the ones the architecture needs."""


class RequestError(EngineError, ValueError):
    """One request is wrong; every other request goes on."""


class InvalidParamsError(RequestError):
    """A sampling parameter is out of range."""


class InvalidPromptError(RequestError):
    """A prompt is empty, of a wrong type, or holds a token id outside the vocabulary."""


class PromptTooLongError(RequestError):
    """The request could not finish even alone in an empty engine."""


class TransferError(RequestError, RuntimeError):
    """A copy of the request's KV between device and host memory failed."""


class LogitsError(RequestError, ArithmeticError):
    """The model computed logits that are no numbers, or left no token to choose."""

    @classmethod
    def for_token(cls, position: int) -> LogitsError:
        """No token at this position can be chosen by its logits."""
        return cls(
            f"the model's logits for token {position} of this request are no finite numbers, or "
            "leave no token to choose: its weights may be damaged, or too large for their dtype "
            '(try dtype="float32")'
        )


class EngineClosedError(EngineError, RuntimeError):
    """The engine was closed."""


class ForkedProcessError(EngineError, RuntimeError):
    """The engine, or threads that it needs, belong to the parent process of this fork."""


# What a user can mend: errors that end at the user's line.
USERS = (ConfigError, ModelLoadError, RequestError, EngineClosedError, ForkedProcessError)


def integer(value: object) -> int | None:
    """An integer of any type as an int; None for anything else, also for True and False."""
    if type(value) is int:  # the common case; the other checks take ten times as long
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    return operator.index(value)


def number(value: object) -> int | float | None:
    """An integer as an int, another finite number as a float; None for anything else."""
    if type(value) is float:
        return value if math.isfinite(value) else None
    whole = integer(value)
    if whole is not None or isinstance(value, bool) or not isinstance(value, Real):
        return whole
    try:
        made = float(value)
    except OverflowError:  # a fraction of huge integers
        return None
    return made if math.isfinite(made) else None


def path_text(name: str, value: object) -> str:
    """A path, or a name, as a string. Raises ConfigError if it can name no file."""
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str):
        raise ConfigError(f"{name} must be a string or a path, got {shown(value)}")
    try:
        is_odd = b"\0" in os.fsencode(path)
    except UnicodeEncodeError:
        is_odd = True
    if is_odd:
        raise ConfigError(f"{name} must be a string that can name a file, got {shown(value)}")
    return path


def torch_name(value: object) -> str:
    """A string as it is; torch's dtypes and devices as str() shows them; "" for other types."""
    kind = type(value)
    is_torch_s = kind.__module__ == "torch" and kind.__name__ in ("dtype", "device")
    return str(value) if is_torch_s else value if isinstance(value, str) else ""


def is_one_of(value: object, allowed: Iterable[str]) -> bool:
    """`value in allowed` for values of any type: some have no hash, and some cannot be compared."""
    return isinstance(value, str) and value in allowed


def near_name(name: str, known: Iterable[str]) -> str | None:
    """The name among `known` that was probably meant; None if none is near."""
    cutoff = SHORT_AND_NEAR if len(name) <= SHORT else NEAR
    near = difflib.get_close_matches(name[:MAX_NAME], sorted(known), n=1, cutoff=cutoff)
    return near[0] if near else None


def counted(number: int, thing: str) -> str:
    """A number of things as text: 1 token, 2 tokens."""
    return f"{number} {thing}{'s' * (number != 1)}"


def shown(value: object) -> str:
    """The value as error texts show it: one line of readable length."""
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        return f"an integer of {value.bit_length()} bits"
    try:
        if isinstance(value, str | bytes | list | tuple):
            value = value[:MAX_SHOWN]  # a repr of all of it may take long
        text = repr(value)
    except Exception:  # a foreign type's repr may raise anything
        text = f"a value of type {type(value).__name__}"
    text = "".join(c if c.isprintable() else " " for c in text[: MAX_SHOWN + 1])
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def ends_at_the_user(call: Callable[Given, Result]) -> Callable[Given, Result]:
    """Decorates what users call: errors about their settings, models and requests, and about an
    engine that was closed, show the user's line and no lines of this package (see
    `without_our_lines`).
    """

    @functools.wraps(call)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        try:
            return call(*args, **kwargs)
        except USERS as error:
            raise without_our_lines(error) from error.__cause__

    return called


def without_our_lines(error: Error) -> Error:
    """The error without its traceback and cause, unless NANOENGINE_TRACEBACK is set."""
    if os.environ.get(TRACEBACK):
        return error
    error.__cause__ = None
    return error.with_traceback(None)


def warn_user(text: str) -> None:
    """Give a UserWarning at the line outside of this package that led here."""
    package = __name__.partition(".")[0]
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
