"""An event loop whose clock jumps to what is due next, so that no pause of the machine matters."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _Jumping(selectors.DefaultSelector):
    """Waits for files without taking time; `passed_s` is how long it would have waited."""

    passed_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select()
        self.passed_s += max(timeout, 0.0)
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.passed_s


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """As asyncio.run, where seconds pass at once and only while every task waits for them."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(work)
