"""The files of a batch: which lines are requests, and which output may be gone on with."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from nanoengine.cli.batch_files import AnswerFile, BatchFileError, read_lines, survey
from nanoengine.serving.openai_keys import COMPLETIONS


def line(custom_id: object = "a", **other: Any) -> str:
    row = {"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": {}}
    return json.dumps(row | other)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join([line("a"), "", line("b"), "nonsense", "nonsense"]) + "\n")
    return path


def test_ids_follow_from_the_lines(source: Path) -> None:
    first, second, third, fourth = read_lines(source)
    assert [each.number for each in (first, second, third, fourth)] == [1, 3, 4, 5]
    assert len({first.id, second.id, third.id, fourth.id}) == 4  # also of equal bad lines
    assert [each.id for each in read_lines(source)] == [first.id, second.id, third.id, fourth.id]
    assert survey(source).ids == {first.id, second.id, third.id, fourth.id}
    source.write_text(line("c") + "\n" + line("a"))
    assert first.id in survey(source).ids  # other lines may come or go


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"custom_id": "a",}', "it is no JSON: "),
        ('{"custom_id": a}', "it is no JSON: Expecting value at column 15"),
        ("\xff", "it is no JSON: 'utf-8' codec"),
        ("[" * 100_000, "it is no JSON: "),
        ("[1]", "it must be a JSON object, got [1]"),
        (line(boddy={}), "unknown key 'boddy'; did you mean 'body'?"),
        ('{"custom_id": "a"}', "it lacks 'method'"),
        (line(""), "custom_id must be a text"),
        (line(5), "custom_id must be a text that is not empty, got 5"),
        (line(method="GET"), "method must be POST, got 'GET'"),
        (line(url=None), "url must be a text, got None"),
    ],
)
def test_a_bad_line_says_why(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(f"\n\n{text}", encoding="latin-1")
    (found,) = read_lines(path)
    assert found.problem.startswith(f"line 3: {problem}")


def test_an_id_twice_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join([line("a"), line("b"), line("a", body={"x": 1})]))
    with pytest.raises(BatchFileError, match="lines 1 and 3 have the same custom_id 'a'"):
        survey(path)
    path.write_text("\n \n")
    with pytest.raises(BatchFileError, match="has no lines"):
        survey(path)


def answered(source: Path, target: Path) -> list[bytes]:
    """Answer all lines; the answers as bytes."""
    with AnswerFile(target, survey(source).ids) as answers:
        for each in read_lines(source):
            answers.add(each, None, {"code": "x", "message": "é"} if each.problem else None)
    return target.read_bytes().splitlines(keepends=True)


def test_a_torn_line_is_dropped_and_whole_ones_stay(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    rows = answered(source, target)
    whole = b"".join(rows)
    for cut in (0, 1, len(rows[0]) - 1, len(rows[0]), len(rows[0]) + 30, len(whole)):
        target.write_bytes(whole[:cut])
        num_whole = whole[:cut].count(b"\n")
        with AnswerFile(target, survey(source).ids) as answers:
            assert len(answers.done) == num_whole
            assert answers.num_failed == max(0, num_whole - 2)
        assert target.read_bytes() == b"".join(rows[:num_whole])


@pytest.mark.parametrize(
    "content",
    [
        b"my notes",
        b"my notes\n",
        b'{"id": 5}\n',
        b'{"id": "batch_req_0", "error": null}\n',
        b'{"id": "batch_req_0", "error": null}\nmy notes',
        b"[]\n",
    ],
)
def test_another_file_is_left_as_it_is(source: Path, tmp_path: Path, content: bytes) -> None:
    target = tmp_path / "out.jsonl"
    target.write_bytes(content)
    with pytest.raises(BatchFileError, match="line 1 answers no line of the input"):
        AnswerFile(target, survey(source).ids)
    assert target.read_bytes() == content


def test_an_answer_to_a_line_that_changed_is_refused(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    answered(source, target)
    source.write_text(source.read_text().replace('"body": {}', '"body": {"n": 2}', 1))
    with pytest.raises(BatchFileError, match=re.escape("line 1 answers no line")):
        AnswerFile(target, survey(source).ids)


def test_two_batches_do_not_write_to_one_file(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    target = tmp_path / "out.jsonl"
    with (
        AnswerFile(target, survey(source).ids),
        pytest.raises(BatchFileError, match="is being written by another process"),
    ):
        AnswerFile(target, survey(source).ids)
    AnswerFile(target, survey(source).ids).__exit__(None, None, None)
