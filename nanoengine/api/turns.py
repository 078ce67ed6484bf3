"""Lets one thread at a time use an engine, and interrupts it only between steps.

A Turn is one call's use of the engine. It delays Ctrl-C until a step has ended, so that no
bookkeeping is interrupted, and it ends early if another thread closes the engine. Knows the engine
only as three functions.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Self, TypeVar

from nanoengine.devices.home_process import HomeProcess
from nanoengine.errors import EngineClosedError, EngineError

Result = TypeVar("Result")
PATIENCE_S = 5.0  # of who closes, with the step of another thread


class Turns:
    """Lets one thread at a time use an engine. Closing waits for that thread."""

    def __init__(
        self,
        check_open: Callable[[], None],
        abort: Callable[[list[int]], object],
        close: Callable[[], None],
        is_whole: Callable[[], bool] = lambda: True,
        break_step: Callable[[], None] = lambda: None,
    ) -> None:
        """check_open: raises unless the engine can be used. abort: ends the requests with these
        ids. close: frees the engine; closing twice is fine. is_whole: whether nothing is half done
        that must be done at once; a turn that ends otherwise closes the engine. break_step: ends a
        step of another thread that waits for what may never come.
        """
        self._check_open = check_open
        self._abort = abort
        self._close = close
        self.is_whole = is_whole
        self._break_step = break_step
        self._failure: BaseException | None = None
        self._home = HomeProcess()
        self._lock = threading.RLock()  # a signal handler may close where its thread holds the lock
        self._owner: int | None = None  # the thread that uses the engine or ends abandoned requests
        self._is_turn = False  # whether it uses the engine
        self._is_closing = False
        self._is_closed = False
        self._abandoned: deque[int] = deque()

    def abandon(self, request_id: int) -> None:
        """End a request now or after the current call: finalizers call this from any thread."""
        self._abandoned.append(request_id)
        self._catch_up()

    def close(self) -> None:
        """Free the engine after the current step, which is broken after PATIENCE_S. A call from
        inside a step, by a signal handler or a finalizer, frees it at the end of the turn; one
        while abandoned requests are ended, after that. In a fork it does nothing: a thread that was
        using the engine does not exist there and never ends its turn.
        """
        if not self._home.is_here:
            return
        self._is_closing = True
        owner = threading.get_ident()
        if self._owner != owner:
            self._await_the_step()
            with self._lock:
                self._let_go(owner)

    def _await_the_step(self) -> None:
        if self._lock.acquire(timeout=PATIENCE_S):
            self._lock.release()
        else:
            self._break_step()

    def begin(self) -> None:
        """Begin the calling thread's turn. Raises EngineClosedError, ForkedProcessError, or
        EngineError while another thread has one; waits for one that ends abandoned requests.
        """
        self.check()
        owner = threading.get_ident()
        while self._owner == owner or not self._lock.acquire(timeout=0.001):
            if self._is_turn or self._owner == owner:
                by = "a call that has not ended" if self._owner == owner else "another thread"
                raise EngineError(
                    f"this LLM is in use by {by}; one at a time may call it. AsyncLLM takes calls "
                    "from any thread"
                )
        self._owner, self._is_turn = owner, True

    def check(self) -> None:
        """Raise unless the engine can be used and is not about to be closed."""
        if self._failure is not None:
            said = f"the engine failed and was closed: {self._failure!r}; make a new LLM"
            raise EngineClosedError(said) from self._failure
        self._check_open()
        if self._is_closing:
            raise EngineClosedError("the engine was closed; make a new LLM")

    def abort(self, request_ids: list[int]) -> None:
        """End requests in the calling thread's turn, unless the engine is about to be closed for
        what is half done.
        """
        if self.is_whole():
            self._abort(request_ids)

    def fail(self, error: BaseException) -> None:
        """The calling thread's turn raised this: if it left something half done, the engine is
        closed at the end of the turn.
        """
        if not self.is_whole():
            self._failure, self._is_closing = error, True

    def end(self) -> None:
        """End the calling thread's turn, and close or abort as requested meanwhile."""
        try:
            self._let_go(threading.get_ident())
        finally:
            self._lock.release()
        self._catch_up()

    def _catch_up(self) -> None:
        """Close or abort as requested, unless the lock is held: who holds it does so."""
        owner = threading.get_ident()
        while self._is_behind and self._owner != owner and self._lock.acquire(blocking=False):
            try:
                self._let_go(owner)
            finally:
                self._lock.release()

    @property
    def _is_behind(self) -> bool:
        return bool(self._abandoned) or (self._is_closing and not self._is_closed)

    def _let_go(self, owner: int) -> None:
        """Close or abort as requested, as the last thing before the lock is released."""
        try:
            self._owner = owner
            self._abort_abandoned()
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            try:
                if self._is_closing:
                    self._close()
                    self._is_closed = True
            finally:
                self._owner, self._is_turn = None, False

    def _abort_abandoned(self) -> None:
        while self._abandoned:
            ids = [self._abandoned.popleft() for _ in range(len(self._abandoned))]
            with suppress(EngineError):  # closed, or of the process before a fork
                self.abort(ids)


class Turn:
    """One call's use of the engine: `with Turn(turns) as turn`, and turn.run(step) for each step.

    Ctrl-C is delayed until the end of the current step or the turn, and never lost; a second one
    interrupts the step, but not what must be done at once. It is not delayed outside the main
    thread, or if other code handles SIGINT.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._previous: Any = None
        self._is_holding = False
        self._num_held = 0
        self._may_break = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.getsignal(signal.SIGINT)
            if self._previous is signal.default_int_handler:
                self._is_holding = True
                signal.signal(signal.SIGINT, self._hold)
        try:
            self._turns.begin()
        except BaseException:
            self._let_through()
            raise
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            if error is not None:
                self._turns.fail(error)
            self._turns.end()
        finally:
            self._let_through()

    def run(self, step: Callable[[], Result]) -> Result:
        """Run one engine step. Raises before it KeyboardInterrupt if Ctrl-C came since the turn
        began, and EngineClosedError if another thread closes the engine.
        """
        if self._num_held:
            raise KeyboardInterrupt
        self._turns.check()
        self._may_break = True
        try:
            return step()
        except EngineError:
            self._turns.check()  # who closes the engine may have broken the step
            raise
        finally:
            self._may_break = False

    def _let_through(self) -> None:
        """Restore the SIGINT handler; raise a delayed KeyboardInterrupt."""
        if self._is_holding:
            signal.signal(signal.SIGINT, self._previous)
        if self._num_held:
            raise KeyboardInterrupt

    def _hold(self, signum: int, frame: FrameType | None) -> None:
        self._num_held += 1
        if self._num_held > 1 and self._may_break and self._turns.is_whole():
            self._may_break = False  # the cleanup after the step is not interrupted again
            raise KeyboardInterrupt
