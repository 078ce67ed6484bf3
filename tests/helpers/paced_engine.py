"""When an AsyncLLM steps: a test says so where its outcome would hang on which thread is faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from nanoengine import LLM, AsyncLLM


@contextmanager
def stepping_if(llm: AsyncLLM, may_step: Callable[[LLM], object]) -> Iterator[None]:
    """Until the block ends, the engine makes a step only where it may. Nothing waits for that: it
    goes on with what is posted, and ends the requests that are left.

    may_step: called in the engine's thread before each step.
    """
    engine = llm._engine
    step = engine._step

    def paced(inner: LLM) -> None:
        if may_step(inner):
            step(inner)
        else:
            time.sleep(0.001)

    engine._step = paced  # type: ignore[method-assign]
    try:
        yield
    finally:
        del engine._step  # type: ignore[method-assign]


def standing_still(llm: AsyncLLM) -> AbstractContextManager[None]:
    """No step: requests are open, and stay as they are."""
    return stepping_if(llm, lambda _: False)


def stepping_as_read(llm: AsyncLLM) -> AbstractContextManager[None]:
    """No step while a caller has output to read: each reads every token by itself, and a request
    that nobody reads does not end.
    """
    return stepping_if(llm, lambda _: not any(box._deltas for box in [*llm._engine._open]))


def stepping_to_begin(llm: AsyncLLM) -> AbstractContextManager[None]:
    """No step unless a request waits for its first one: all run, and do not end."""
    return stepping_if(llm, lambda inner: inner.llm_engine.scheduler.waiting)


def standing_still_once_one_runs(llm: AsyncLLM) -> AbstractContextManager[None]:
    """No step while a request runs: the first one does not end, and others wait where there is
    room for one.
    """
    return stepping_if(llm, lambda inner: not inner.llm_engine.scheduler.running)
