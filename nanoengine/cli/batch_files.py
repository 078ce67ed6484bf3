"""The two files of a batch, in OpenAI's format: lines that ask, and lines that answer.

A line of answers has an id that follows from the line that asked, so a batch that was killed goes
on where it stopped. Knows no model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import xxhash

from nanoengine.errors import EngineError, counted, near_name, shown

KEYS = ("custom_id", "method", "url", "body")
BEGINNING = b'{"id": "batch_req_'  # of every line of answers


class BatchFileError(EngineError):
    """The input cannot be used, or the output belongs to something else."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line that asks. id: of its answer. problem: why it is no request; "" if it is one."""

    number: int
    id: str
    custom_id: str | None
    url: str = ""
    body: Any = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Survey:
    """What an input holds: the ids of its lines, and models that its lines name."""

    ids: frozenset[str]
    models: frozenset[str]


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of an input, one after the other; empty ones are left out."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                yield _line(number, raw.strip())


def survey(path: Path) -> Survey:
    """Read the whole input once. Raises BatchFileError if two lines have one custom_id, or if there
    are no lines.
    """
    ids: set[str] = set()
    models: set[str] = set()
    first: dict[str, int] = {}
    for line in read_lines(path):
        ids.add(line.id)
        if isinstance(line.body, dict) and isinstance(line.body.get("model"), str):
            models.add(line.body["model"])
        if line.custom_id is None:
            continue
        before = first.setdefault(line.custom_id, line.number)
        if before != line.number:
            raise BatchFileError(
                f"{path}: lines {before} and {line.number} have the same custom_id "
                f"{shown(line.custom_id)}; give each line its own"
            )
    if not ids:
        raise BatchFileError(f"{path} has no lines")
    return Survey(frozenset(ids), frozenset(models))


def _line(number: int, raw: bytes) -> Line:
    try:
        content = json.loads(raw)
        custom_id = content.get("custom_id") if isinstance(content, dict) else None
        if not isinstance(custom_id, str) or not custom_id:
            custom_id = None
        problem = _problem(content)
    except (ValueError, RecursionError) as error:
        reason = str(error)
        if isinstance(error, json.JSONDecodeError):  # whose text calls each line the first
            reason = f"{error.msg} at column {error.colno}"
        content, custom_id, problem = {}, None, f"it is no JSON: {reason}"
    # Without a custom_id, two lines may be the same.
    told = raw if custom_id is not None else b"%d " % number + raw
    name = f"batch_req_{xxhash.xxh3_128_hexdigest(told)}"
    if problem:
        return Line(number, name, custom_id, problem=f"line {number}: {problem}")
    return Line(number, name, custom_id, content["url"], content["body"])


def _problem(content: Any) -> str:
    """Why this is no request of a batch; "" if it is one."""
    if not isinstance(content, dict):
        return f"it must be a JSON object, got {shown(content)}"
    for name in content:
        if name not in KEYS:
            near = near_name(name, KEYS)
            return f"unknown key {shown(name)}" + (f"; did you mean {near!r}?" if near else "")
    for name in KEYS:
        if name not in content:
            return f"it lacks {name!r}"
    if not isinstance(content["custom_id"], str) or not content["custom_id"]:
        return f"custom_id must be a text that is not empty, got {shown(content['custom_id'])}"
    if content["method"] != "POST":
        return f"method must be POST, got {shown(content['method'])}"
    if not isinstance(content["url"], str):
        return f"url must be a text, got {shown(content['url'])}"
    return ""


class AnswerFile:
    """The output. Opening it drops a line that a kill tore; each line is added whole.

    done: ids of the answers that it holds. num_failed: those of them that are errors. first_error:
    the text of one, with the custom_id of its line.
    """

    def __init__(self, path: Path, ids: frozenset[str]) -> None:
        """ids: of the answers that may be there. Raises BatchFileError if the file holds anything
        else, which it leaves as it is, or if another process writes to it.
        """
        self._path = path
        self.done: set[str] = set()
        self.num_failed = 0
        self.first_error = ""
        # Without a buffer: a line that was written survives a kill.
        self._file = path.open("ab", buffering=0)
        try:
            _lock(self._file.fileno(), path)
            self._file.truncate(self._read(ids))
        except BaseException:
            self._file.close()
            raise

    def _read(self, ids: frozenset[str]) -> int:
        """Take note of the answers that are there; returns their length in bytes."""
        length = 0
        with self._path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n"):
                    if not (raw.startswith(BEGINNING) or BEGINNING.startswith(raw)):
                        raise self._foreign(number)
                    break
                self._note(raw, number, ids)
                length += len(raw)
        return length

    def _note(self, raw: bytes, number: int, ids: frozenset[str]) -> None:
        try:
            row = json.loads(raw)
            name, error = row["id"], row["error"]
            told = None if error is None else (row["custom_id"], error["message"])
        except (ValueError, RecursionError, KeyError, TypeError) as problem:
            raise self._foreign(number) from problem
        if name not in ids or name in self.done:
            raise self._foreign(number)
        self.done.add(name)
        if told is not None:
            self._count_error(*told)

    def _count_error(self, custom_id: object, message: str) -> None:
        if not self.num_failed:  # the message of a line that is no JSON names its number
            self.first_error = message if custom_id is None else f"{shown(custom_id)}: {message}"
        self.num_failed += 1

    def _foreign(self, number: int) -> BatchFileError:
        return BatchFileError(
            f"{self._path}, line {number} answers no line of the input as it is now; give another "
            "output file, or delete that line"
        )

    def add(
        self, line: Line, response: dict[str, Any] | None, error: dict[str, str] | None
    ) -> None:
        """Write an answer: a response, an error, or both for a request that was refused. Raises
        BatchFileError if the disk takes no more.
        """
        row = {"id": line.id, "custom_id": line.custom_id, "response": response, "error": error}
        data = json.dumps(row).encode() + b"\n"
        try:
            while data:  # a disk that is nearly full takes a part
                data = data[self._file.write(data) :]
        except OSError as error:
            raise BatchFileError(
                f"cannot write to {self._path} after {counted(len(self.done), 'answer')}: "
                f"{error.strerror}; make room there, and the same command goes on"
            ) from error
        self.done.add(line.id)
        if error is not None:
            self._count_error(line.custom_id, error["message"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _lock(handle: int, path: Path) -> None:
    """Two batches must not write to one file. The lock ends with the process."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BatchFileError(f"{path} is being written by another process") from error
