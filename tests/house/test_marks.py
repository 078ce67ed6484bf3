"""Which cases of a test with `some(count)` are default tests."""

from __future__ import annotations

from typing import Any

import pytest
from marks import leave_to_breadth


class Case:
    """As much of a pytest.Item as the choice asks for."""

    def __init__(self, nodeid: str, *marks: pytest.MarkDecorator) -> None:
        self.nodeid, self._marks = nodeid, {mark.name: mark.mark for mark in marks}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self._marks.get(name)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self._marks[mark.name] = mark.mark


def default_ones(cases: list[Any]) -> list[str]:
    leave_to_breadth(cases)
    return [each.nodeid for each in cases if not each.get_closest_marker("breadth")]


def test_so_many_cases_stay_and_always_the_same() -> None:
    some = pytest.mark.some(3)
    names = [f"test_a.py::test_it[{i}]" for i in range(20)]
    first, again = (default_ones([Case(name, some) for name in names]) for _ in range(2))
    assert len(first) == 3
    assert first == again


def test_cases_of_breadth_and_slow_ones_do_not_count() -> None:
    some = pytest.mark.some(1)
    cases = [
        Case("test_a.py::test_it[slow]", some, pytest.mark.slow),
        Case("test_a.py::test_it[rare]", some, pytest.mark.breadth),
        Case("test_a.py::test_it[plain]", some),
        Case("test_a.py::test_other[0]"),
        Case("test_a.py::test_other[1]"),
    ]
    assert default_ones(cases) == [cases[i].nodeid for i in (0, 2, 3, 4)]


def test_a_case_that_is_asked_for_alone_runs() -> None:
    only = "test_a.py::test_it[7]"
    assert default_ones([Case(only, pytest.mark.some(3))]) == [only]
