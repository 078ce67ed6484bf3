"""EngineThread: the one thread that calls the LLM, and what others may ask of it."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from nanoengine.api.llm import LLM
from nanoengine.api.mailbox import Mailbox
from nanoengine.api.streaming import DeltaStream
from nanoengine.api.turns import PATIENCE_S
from nanoengine.config.engine import Settings
from nanoengine.devices.home_process import HomeProcess, join
from nanoengine.engine.output_processor import RequestState
from nanoengine.errors import EngineClosedError, RequestError
from nanoengine.outputs import RequestOutput
from nanoengine.sequence import ScheduledBatch

Answer = TypeVar("Answer")


class EngineThread:
    """The thread that owns the LLM. Others may call `post`, `check_open`, `leave` and `stop`, and
    prepare requests with `inputs`.
    """

    def __init__(self, model: str | Path, settings: Settings) -> None:
        self._home = HomeProcess()
        self._changed = threading.Condition()  # guards the next three, and mailboxes
        self._posted: list[Mailbox | tuple[Callable[[LLM], Any], Future[Any]]] = []
        self._is_closed = False
        self._cause: BaseException | None = None
        self._open: dict[Mailbox, tuple[int | str, DeltaStream]] = {}
        self._by_id: dict[int | str, Mailbox] = {}
        self._by_request: dict[int | str, Mailbox] = {}
        self._seen: ScheduledBatch | None = None  # of the last step whose output was delivered
        ready: Future[Any] = Future()
        # A daemon: Python joins other threads before it runs the finalizer that would stop them.
        self._thread = threading.Thread(
            target=self._run, args=(model, settings, ready), name="nanoengine", daemon=True
        )
        self._thread.start()
        try:
            self.plan, self.inputs, self._abort_ranks = ready.result()
        except BaseException:
            self._refuse(None)
            if ready.done():  # otherwise Ctrl-C came here: the thread ends once it has loaded
                self._thread.join()
            raise

    # -- for every thread

    def mailbox(self) -> Mailbox:
        """A new mailbox for a caller on the running loop."""
        return Mailbox(self._changed)

    def post(self, function: Callable[[LLM], Answer]) -> Future[Answer]:
        """Have the engine's thread call `function(llm)` before its next step."""
        self._home.check("this engine")
        done: Future[Answer] = Future()
        with self._changed:
            if self._is_closed:
                raise self._refusal()
            self._posted.append((function, done))
            self._changed.notify()
        return done

    def check_open(self) -> None:
        """Raise EngineClosedError if the thread takes no more work."""
        with self._changed:
            if self._is_closed:
                raise self._refusal()

    def leave(self, mailbox: Mailbox) -> bool:
        """End a request whose caller is gone; False in a forked process, which has no such thread
        and may find every lock held.
        """
        if not self._home.is_here:
            return False
        with self._changed:
            if not self._is_closed:
                self._posted.append(mailbox)
                self._changed.notify()
        return True

    def stop(self) -> None:
        """End the thread and wait for its end, which a rank that has stopped does not delay for
        longer than PATIENCE_S; a forked process has no such thread. A signal handler may call it
        where its own thread holds the lock: the wait is then for Python's exit, as the engine's
        thread may need the lock to end.
        """
        if not self._home.is_here:
            return
        self._refuse(None)
        try:
            self._changed.notify()
        except RuntimeError:  # the calling thread does not hold the lock
            self._join()
        else:
            atexit.register(self._join)

    def _join(self) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join(PATIENCE_S)
            if self._thread.is_alive():
                self._abort_ranks()
        join(self._thread)

    def _refuse(self, cause: BaseException | None) -> None:
        with self._changed:
            if isinstance(cause, EngineClosedError):  # it speaks of the LLM, which nobody else has
                cause = cause.__cause__
            if not self._is_closed:  # what fails later does so because of that
                self._cause = cause
            self._is_closed = True
            self._changed.notify()

    def _refusal(self) -> EngineClosedError:
        if self._cause is None:
            return EngineClosedError("the engine was closed; make a new AsyncLLM")
        refusal = EngineClosedError(f"the engine failed and was closed: {self._cause!r}")
        refusal.__cause__ = self._cause
        return refusal

    # -- in the engine's thread, by `post`

    def begin(
        self,
        mailbox: Mailbox,
        open_stream: Callable[[LLM], DeltaStream],
        request_id: str | None,
        arrival: float,
        llm: LLM,
    ) -> tuple[int | str, RequestState]:
        """Queue a request, which its caller made at `arrival`; returns the id that its outputs
        show, and its state.
        """
        if request_id is not None and not isinstance(request_id, str):
            raise RequestError(f"request_id must be a string or None, got {request_id!r}")
        if request_id in self._by_id:
            raise RequestError(f"request_id {request_id!r} is in use by an open request")
        stream = open_stream(llm)
        for seq in stream.request.seqs:
            seq.metrics.arrival_time = arrival
        shown = stream.request.request_id if request_id is None else request_id
        self._open[mailbox] = shown, stream
        self._by_id[shown] = self._by_request[stream.request.request_id] = mailbox
        return shown, stream.request

    def abort(self, request_ids: Iterable[int | str], llm: LLM) -> None:
        """End requests and tell their callers."""
        known = filter(None, map(self._by_id.get, request_ids))
        boxes = {self._open[mailbox][1].request.request_id: mailbox for mailbox in known}
        ended = [(boxes[int(o.request_id)], o) for o in llm.llm_engine.abort(boxes)]
        self._wake([mailbox for mailbox, output in ended if self._deliver(mailbox, output)])

    def _end_left(self, left: list[Mailbox], llm: LLM) -> None:
        """End those of these requests that are open, all at once, and empty the list."""
        gone = [mailbox for mailbox in dict.fromkeys(left) if mailbox in self._open]
        left.clear()
        if gone:
            llm.close_streams(map(self._forget, gone))

    def _forget(self, mailbox: Mailbox) -> DeltaStream:
        """Remove an open request; returns its stream."""
        shown, stream = self._open.pop(mailbox)
        del self._by_id[shown], self._by_request[stream.request.request_id]
        return stream

    # -- the thread itself

    def _run(self, model: str | Path, settings: Settings, ready: Future[Any]) -> None:
        try:
            llm = LLM(model, **settings)
        except BaseException as error:
            ready.set_exception(error)
            return
        engine = llm.llm_engine
        with suppress(RequestError):  # it has no tokenizer
            _ = engine.inputs.grammars  # made here, before several threads ask for them
        ready.set_result((llm.plan, engine.inputs, engine.abort_ranks))
        try:
            self._serve(llm)
        except BaseException as error:
            self._refuse(error)
        self._end_all()
        llm.close()

    def _serve(self, llm: LLM) -> None:
        """Run posted functions and step until closed; wait when there is nothing to do."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._posted or self._open or self._is_closed)
                if self._is_closed:
                    return
                posted, self._posted = self._posted, []
            left: list[Mailbox] = []
            for work in posted:
                if isinstance(work, Mailbox):
                    left.append(work)
                    continue
                self._end_left(left, llm)
                function, done = work
                if not done.set_running_or_notify_cancel():
                    continue
                try:
                    done.set_result(function(llm))
                except BaseException as error:
                    done.set_exception(error)
            llm.llm_engine.check_open()  # a function may have closed it
            # The caller of a closed loop can no longer end its request.
            left += [mailbox for mailbox in self._open if mailbox.loop.is_closed()]
            self._end_left(left, llm)
            if self._open:
                self._step(llm)

    def _step(self, llm: LLM) -> None:
        """Step, and deliver what is new. There may be many requests that wait: they are looked at
        only where others have stepped the engine, or it has nothing to do.
        """
        engine = llm.llm_engine
        is_all = engine.batch is not self._seen or not engine.has_unfinished_requests
        ended = {output.request_id: output for output in engine.step()}
        self._seen = engine.batch
        stepped = ((item.seq.prompt_owner or item.seq).seq_id for item in engine.batch.items)
        found = map(self._by_request.get, dict.fromkeys([*stepped, *ended]))
        woken = []
        for mailbox in [*self._open] if is_all else [*filter(None, found)]:
            _, stream = self._open[mailbox]
            output = ended.get(stream.request.request_id)
            if output is None and stream.request.has_ended:  # in a step of a posted function
                output = stream.request.output()
            if self._deliver(mailbox, output):
                woken.append(mailbox)
        self._wake(woken)

    def _deliver(self, mailbox: Mailbox, output: RequestOutput | None) -> bool:
        """Put new output of a request into its mailbox; True if the caller must be woken."""
        shown, stream = self._open[mailbox]
        deltas = stream.request.new_deltas() if mailbox.wants_deltas else []
        if output is None:
            return bool(deltas) and mailbox.put(deltas)
        self._forget(mailbox).close()
        return mailbox.put(deltas, output.error or replace(output, request_id=shown))

    def _wake(self, mailboxes: Iterable[Mailbox]) -> None:
        """Wake the callers, with one call for each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Mailbox]] = {}
        for mailbox in mailboxes:
            by_loop.setdefault(mailbox.loop, []).append(mailbox)
        for loop, group in by_loop.items():
            with suppress(RuntimeError):  # the loop was closed just now
                loop.call_soon_threadsafe(_wake_all, group)

    def _end_all(self) -> None:
        """After the last step, give every waiting caller the reason."""
        with self._changed:
            posted, self._posted = self._posted, []
        for work in posted:
            if not isinstance(work, Mailbox) and work[1].set_running_or_notify_cancel():
                work[1].set_exception(self._refusal())
        waiting = [box for box in self._open if box.put([], self._cause or self._refusal())]
        self._wake(waiting)


def _wake_all(mailboxes: list[Mailbox]) -> None:
    for mailbox in mailboxes:
        mailbox.wake()
