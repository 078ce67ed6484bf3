"""Threads for work that an event loop must not wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")
Work = tuple["Future[Any]", Callable[[], Any]]


class WorkThreads:
    """Does work in the order in which it comes. Unlike a ThreadPoolExecutor's, its threads do not
    keep the process from ending: what a client wants parsed may take long.
    """

    def __init__(self, number: int, name: str) -> None:
        self._waiting: SimpleQueue[Work | None] = SimpleQueue()
        self._number = number
        for index in range(number):
            threading.Thread(
                target=self._serve, name=f"{name}-{index}", args=(self._waiting,), daemon=True
            ).start()

    async def run(self, work: Callable[[], Result]) -> Result:
        """The result of `work`; it does not begin if this is cancelled before."""
        future: Future[Result] = Future()
        self._waiting.put((future, work))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the threads after the work that they do; what waits is dropped."""
        while not self._waiting.empty():
            if (waiting := self._waiting.get()) is not None:
                waiting[0].cancel()
        for _ in range(self._number):
            self._waiting.put(None)

    @staticmethod
    def _serve(waiting: SimpleQueue[Work | None]) -> None:
        while (each := waiting.get()) is not None:
            _do(*each)
            del each  # a body's bytes need not wait for the next one


async def in_own_thread(work: Callable[[], Result]) -> Result:
    """The result of `work`, done in a thread that does not keep the process from ending."""
    future: Future[Result] = Future()
    threading.Thread(target=_do, args=(future, work), daemon=True).start()
    return await asyncio.wrap_future(future)


def _do(future: Future[Any], work: Callable[[], Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
