"""WorkerProcesses: the driver's side. Starts the processes of an engine's other ranks, or that of a
server's engine, talks to them, watches them, and ends them.

No fork (threads and CUDA do not survive one) and no multiprocessing (it imports the user's program
again): a worker is a new Python that is told what to run. It has no name, port or file that could
clash or stay behind. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence

from nanoengine.devices.home_process import HomeProcess, join
from nanoengine.errors import EngineClosedError, EngineError
from nanoengine.workers.channel import HELLO, STOP
from nanoengine.workers.worker_handle import EXIT_S, Failure, WorkerHandle

SEND_S = 120.0  # a worker that does not take a message for so long has stopped
LOOK_S = 0.01  # until what has come in time is read
STOP_S = 5.0  # from each means of ending a worker to the next

logger = logging.getLogger(__name__)


class WorkerProcesses:
    """Processes of ranks 1 to `count`, each behind a socketpair; a thread watches them by pidfd.

    One thread at a time sends and receives; `check` and `close` may be called by any. The first
    failure of a worker ends all of them, and every later call raises it. The processes end with
    this object, with the interpreter, and when this process is killed.
    """

    def __init__(
        self,
        entry: str,
        count: int,
        hello: Mapping[str, object],
        fds: Sequence[int] = (),
        on_death: Callable[[], None] = lambda: None,
        name: str = "",
        shares_stderr: bool = False,
    ) -> None:
        """Start the processes; does not wait for them (`receive` does).

        entry: "module:function", called in each worker with its Channel and its hello.
        hello: plain JSON values; "rank" is added. fds: descriptors that the workers have under the
        same numbers. on_death: called once, from any thread, when a worker has failed and before
        the others are killed; it must not refer to this object, which would then never be freed.
        name: of a worker in errors; by default with its rank. shares_stderr: what a worker writes
        to stderr goes to this process's, where its user sees it, and not into errors.

        Raises ConfigError if this Python cannot start another one, EngineError if a worker ends at
        once.
        """
        self._home = HomeProcess()
        self._team = _Team(count, on_death, name, shares_stderr)
        self._end = weakref.finalize(self, _end, self._team, self._home)
        try:
            self._team.start(fds)
            for rank, worker in enumerate(self._team.workers, 1):
                said = {"entry": entry, "hello": {**hello, "rank": rank}}
                self._team.send([worker], HELLO, json.dumps(said).encode())
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids, in order of rank."""
        return [worker.process.pid for worker in self._team.workers]

    def send(self, kind: int, body: bytes = b"") -> None:
        """Send a message to every worker. Raises EngineError if one has failed."""
        self.check()
        self._team.send(self._team.workers, kind, body)

    def receive(self, timeout_s: float) -> list[bytes]:
        """One reply of each worker, in order of rank.

        Raises EngineError if a worker has ended, has sent an error (then of that error's class, if
        it is one of this package), or has been silent for `timeout_s` seconds. After an interrupt
        the replies can still be received.
        """
        self.check()
        return self._team.receive(timeout_s)

    def check(self, within_s: float = 0.0) -> None:
        """Raise the EngineError of a worker that has failed.

        within_s: how long to wait for one, for a caller who has seen a sign of it elsewhere (a
        connection between ranks that broke).
        """
        self._home.check("this engine's group of worker processes")
        self._team.check(within_s)

    def close(self) -> None:
        """Ask the workers to stop, then end them by SIGTERM and SIGKILL, STOP_S apart; twice is
        fine. Does nothing in a forked process.
        """
        self._end()


class _Team:
    """The workers, and the thread that watches them, which must not keep WorkerProcesses alive."""

    def __init__(
        self, count: int, on_death: Callable[[], None], name: str, shares_stderr: bool
    ) -> None:
        self.workers: list[WorkerHandle] = []
        self._count = count
        self._name = name
        self._shares_stderr = shares_stderr
        self._on_death = on_death
        self._news = threading.Condition()  # a reply, a sign of life, a failure
        self._failure: Failure | None = None
        self._is_closing = False
        self._thread = threading.Thread(
            target=self._watch, name="nanoengine-worker-watch", daemon=True
        )

    def start(self, fds: Sequence[int]) -> None:
        for rank in range(1, self._count + 1):
            name = self._name or f"worker {rank} of {self._count}"
            self.workers.append(WorkerHandle(name, fds, self._shares_stderr))
        self._thread.start()

    def send(self, workers: Sequence[WorkerHandle], kind: int, body: bytes) -> None:
        for worker in workers:
            try:
                worker.channel.send(kind, body, SEND_S)
            except TimeoutError:
                self._fail(worker.failed(f"has not taken a message for {SEND_S:g} s"))
            except OSError:  # it is gone: the watching thread will know why
                self.check(STOP_S)
                self._fail(worker.failed("closed its connection"))
            except EngineError:  # the body is too long
                raise
            except BaseException:  # some have this message, and some a part of it
                self._fail(worker.failed("got a part of a message, which was interrupted"))
                raise
        self.check(0)

    def receive(self, timeout_s: float) -> list[bytes]:
        begin = time.monotonic()
        with self._news:
            while waiting := [worker for worker in self.workers if not worker.replies]:
                if self._is_over():
                    raise self._error()
                silent = min(waiting, key=lambda worker: worker.heard)
                left = max(begin, silent.heard) + timeout_s - time.monotonic()
                # After a stop of this process, what has come may still wait to be read.
                if left <= 0 and not silent.channel.has_news():
                    break
                self._news.wait(max(left, LOOK_S))
            else:
                return [worker.replies.popleft() for worker in self.workers]
        self._fail(silent.failed(f"was silent for {timeout_s:g} s"))
        raise self._error()

    def check(self, within_s: float) -> None:
        with self._news:
            if self._news.wait_for(self._is_over, within_s):
                raise self._error()

    def close(self) -> None:
        with self._news:
            self._is_closing = True
            self._news.notify_all()
        try:
            for worker in self.workers:
                with contextlib.suppress(OSError):
                    worker.channel.send(STOP, timeout_s=0)
            for means in (signal.SIGTERM, signal.SIGKILL):
                if not self._have_ended(STOP_S):
                    self._signal(means)
        finally:
            self._signal(signal.SIGKILL)  # after an interrupt
            self._have_ended(STOP_S)
            for worker in self.workers:
                worker.channel.shut_down()  # ends the watching thread
            join(self._thread)
            if threading.current_thread() is not self._thread:
                self._close_descriptors()

    def _close_descriptors(self) -> None:
        for worker in self.workers:
            worker.close()

    def _have_ended(self, within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        return all(
            worker.has_ended(max(0.0, deadline - time.monotonic())) for worker in self.workers
        )

    def _signal(self, means: signal.Signals) -> None:
        for worker in self.workers:
            worker.process.send_signal(means)  # does nothing to one that has ended

    def _is_over(self) -> bool:
        return self._is_closing or self._failure is not None

    def _error(self) -> EngineError:
        """Why nothing can be said or heard any more."""
        if self._failure is None or self._is_closing:
            return EngineClosedError("the worker processes of this engine were closed")
        return self._failure.error()

    def _fail(self, failure: Failure) -> None:
        """Keep the first failure, and end all workers."""
        with self._news:
            if self._is_over():
                return
            self._failure = failure
            self._news.notify_all()
        try:
            self._on_death()
        except Exception:  # whatever it is, the workers must end
            logger.exception("what an engine does when a worker has died failed")
        self._signal(signal.SIGKILL)

    def _watch(self) -> None:
        """Take in what workers send until all have ended."""
        alive = {worker.channel.fileno(): worker for worker in self.workers}
        alive |= {worker.pidfd: worker for worker in self.workers if worker.pidfd is not None}
        poll = select.poll()
        for fd in alive:
            poll.register(fd, select.POLLIN)
        while alive:
            for worker in {alive[fd] for fd, _ in poll.poll()}:
                with self._news:  # nobody looks between what is read and what it is kept as
                    failure = worker.take_in()
                    if failure is None:
                        self._news.notify_all()
                        continue
                self._fail(failure)
                worker.has_ended(EXIT_S)  # was killed now, if it had not ended
                for fd in [fd for fd, other in alive.items() if other is worker]:
                    poll.unregister(fd)
                    del alive[fd]
        if self._is_closing:  # a finalizer may run on this thread, which polls them until now
            self._close_descriptors()


def _end(team: _Team, home: HomeProcess) -> None:
    if home.is_here:
        team.close()
        return
    for worker in team.workers:
        worker.process.returncode = 0  # it belongs to the parent of this fork
