"""The Stream protocol, and the streams of a CPU: copies run inline or on a thread.

Knows tensors and events, no device. A failed copy does not stop the stream.
"""

from __future__ import annotations

import queue
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanoengine.devices.home_process import HomeProcess, join
from nanoengine.errors import EngineClosedError

Convert = Callable[[Tensor, Tensor], None]
WorkQueue: TypeAlias = "queue.SimpleQueue[Callable[[], object] | WorkerEvent | None]"


class Event(Protocol):
    """A point in a stream's queue of work."""

    def is_done(self) -> bool:
        """True once all work before the point has ended."""
        ...


class Stream(Protocol):
    """A queue of work that runs in order; only events order it against other streams."""

    name: str

    def copy(
        self, dst: Tensor, src: Tensor, owner: object = None, convert: Convert | None = None
    ) -> None:
        """Copy contiguous `src` to contiguous `dst`: its bytes, or by convert(dst, src).

        A failed copy does not stop the stream; `take_failed` returns it with its owner.
        """
        ...

    def fill(self, dst: Tensor, value: float) -> None:
        """Fill a contiguous tensor."""
        ...

    def record(self) -> Event:
        """An event that is done when all work queued so far is."""
        ...

    def wait(self, event: Event) -> None:
        """Make all later work of this stream wait for the event."""
        ...

    def take_failed(self) -> list[FailedCopy]:
        """The failed copies since the last call; it includes all before an event that is done."""
        ...


@dataclass(frozen=True, slots=True)
class FailedCopy:
    """A copy that failed, with its owner and the error."""

    owner: object
    error: Exception


class Copies:
    """Makes copies and records those that failed."""

    def __init__(self) -> None:
        self._failed: deque[FailedCopy] = deque()

    def make(self, dst: Tensor, src: Tensor, owner: object, convert: Convert | None) -> None:
        """Copy contiguous host memory: bytes, or by `convert`. Records errors, never raises."""
        try:
            (convert or _copy_bytes)(dst, src)
        except Exception as error:  # `take_failed` returns it
            self._failed.append(FailedCopy(owner, error))

    def fill(self, dst: Tensor, value: float) -> None:
        """Fill a tensor. Never raises: an error would end the worker, and waits would never end."""
        try:
            dst.fill_(value)
        except Exception as error:
            self._failed.append(FailedCopy((), error))

    def take_failed(self) -> list[FailedCopy]:
        return [self._failed.popleft() for _ in range(len(self._failed))]


class DoneEvent:
    """An event of work that ran inline and is therefore done."""

    def is_done(self) -> bool:
        return True


class InlineStream:
    """Runs work immediately in the calling thread: a CPU's compute, and copies without overlap.

    Waiting for another stream's event blocks the caller.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.copies = Copies()
        self.take_failed = self.copies.take_failed

    def copy(
        self, dst: Tensor, src: Tensor, owner: object = None, convert: Convert | None = None
    ) -> None:
        self.copies.make(dst, src, owner, convert)

    def fill(self, dst: Tensor, value: float) -> None:
        dst.fill_(value)

    def record(self) -> Event:
        return DoneEvent()

    def wait(self, event: Event) -> None:
        if isinstance(event, WorkerEvent):
            event.block()


class WorkerEvent:
    """An event in the queue of a WorkerStream."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self.is_done = self._done.is_set
        self.set = self._done.set  # called by the worker
        self.block = self._done.wait


class Delays:
    """Random delays, the same for each stream of this name."""

    def __init__(self, name: str, longest_s: float) -> None:
        self._longest_s = longest_s
        self._random = random.Random(name)

    def next(self) -> float:
        """The next delay in seconds."""
        return self._random.uniform(0, self._longest_s) if self._longest_s else 0.0


class WorkerStream:
    """Runs copies on its own thread; a random delay before each reveals missing waits.

    The thread ends with `close`, when the stream is collected, or when Python exits.
    """

    def __init__(self, name: str, max_delay_s: float = 0.0) -> None:
        self.name = name
        self.copies = Copies()
        self.take_failed = self.copies.take_failed
        self._work: WorkQueue = queue.SimpleQueue()
        # The thread refers to the queue, not to the stream, so the stream can be collected.
        work = self._work, Delays(name, max_delay_s)
        self._thread = threading.Thread(
            target=_work_off, args=work, name=f"nanoengine-{name}", daemon=True
        )
        self._end = weakref.finalize(self, _end_worker, HomeProcess(), self._work, self._thread)
        self._thread.start()

    def copy(
        self, dst: Tensor, src: Tensor, owner: object = None, convert: Convert | None = None
    ) -> None:
        copies = self.copies
        self._put(lambda: copies.make(dst, src, owner, convert))

    def fill(self, dst: Tensor, value: float) -> None:
        copies = self.copies
        self._put(lambda: copies.fill(dst, value))

    def record(self) -> Event:
        event = WorkerEvent()
        self._put(event)
        return event

    def wait(self, event: Event) -> None:
        if isinstance(event, WorkerEvent) and not event.is_done():
            self._put(event.block)

    @property
    def is_alive(self) -> bool:
        """True until the thread has ended."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End the thread once its queue is empty; closing twice is fine."""
        self._end()

    def _put(self, work: Callable[[], object] | WorkerEvent) -> None:
        """Queue work. Raises EngineClosedError after `close`: a wait for it would never end."""
        if not self._end.alive:
            raise EngineClosedError("the copies of a closed engine were ended")
        self._work.put(work)


def _work_off(work_queue: WorkQueue, delays: Delays) -> None:
    """Run queued work: the thread of a WorkerStream."""
    while (work := work_queue.get()) is not None:
        if isinstance(work, WorkerEvent):
            work.set()
            continue
        if delay_s := delays.next():
            time.sleep(delay_s)
        work()


def _end_worker(home: HomeProcess, work_queue: WorkQueue, thread: threading.Thread) -> None:
    """Let the worker finish its queue and wait for it. A forked process has no worker."""
    if not home.is_here:
        return
    work_queue.put(None)
    join(thread)


def _copy_bytes(dst: Tensor, src: Tensor) -> None:
    """Copy with numpy, a plain memcpy: it releases the GIL and starts no OpenMP threads."""
    np.copyto(_as_bytes(dst), _as_bytes(src))


def _as_bytes(tensor: Tensor) -> npt.NDArray[np.uint8]:
    return tensor.view(torch.uint8).numpy()
