"""Work in order: what a stream is, and the streams of a CPU. Copies run at once or on a thread.

Knows tensors and events, no device. A copy that fails stops nothing.
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
    """A point in a stream's work."""

    def is_done(self) -> bool:
        """True once all work before the point has ended."""
        ...


class Stream(Protocol):
    """Work that runs in order; against other streams only events order it."""

    name: str

    def copy(
        self, dst: Tensor, src: Tensor, owner: object = None, convert: Convert | None = None
    ) -> None:
        """Copy contiguous `src` to contiguous `dst`, of the same bytes or, given a function that
        does convert(dst, src), as that makes them.

        A copy that fails stops nothing; `take_failed` tells its owner.
        """
        ...

    def fill(self, dst: Tensor, value: float) -> None:
        """Fill a contiguous tensor."""
        ...

    def record(self) -> Event:
        """An event that is done when all work queued so far is."""
        ...

    def wait(self, event: Event) -> None:
        """Let all later work of this stream begin after the event."""
        ...

    def take_failed(self) -> list[FailedCopy]:
        """The copies that failed since the last call. One that an event followed which is done is
        among them.
        """
        ...


@dataclass(frozen=True, slots=True)
class FailedCopy:
    """A copy that could not be made, by its owner, and why."""

    owner: object
    error: Exception


class Copies:
    """Makes copies and remembers those that failed."""

    def __init__(self) -> None:
        self._failed: deque[FailedCopy] = deque()

    def make(self, dst: Tensor, src: Tensor, owner: object, convert: Convert | None) -> None:
        """Copy `src` to `dst`, both contiguous in host memory: its bytes, or as `convert` does.
        Never raises: what fails is remembered.
        """
        try:
            (convert or _copy_bytes)(dst, src)
        except Exception as error:  # told to whoever asks for the owner's copies
            self._failed.append(FailedCopy(owner, error))

    def fill(self, dst: Tensor, value: float) -> None:
        """Fill a tensor. Never raises: on a thread that ended others would wait for ever."""
        try:
            dst.fill_(value)
        except Exception as error:
            self._failed.append(FailedCopy((), error))

    def take_failed(self) -> list[FailedCopy]:
        """See Stream."""
        return [self._failed.popleft() for _ in range(len(self._failed))]


class DoneEvent:
    """An event of work that ran inline."""

    def is_done(self) -> bool:
        """Always."""
        return True


class InlineStream:
    """Runs everything at once, in the calling thread: compute on a CPU, and copies where none
    overlap.

    Waiting for another stream's event blocks the caller.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._copies = Copies()
        self.take_failed = self._copies.take_failed

    def copy(
        self, dst: Tensor, src: Tensor, owner: object = None, convert: Convert | None = None
    ) -> None:
        """See Stream."""
        self._copies.make(dst, src, owner, convert)

    def fill(self, dst: Tensor, value: float) -> None:
        """See Stream."""
        dst.fill_(value)

    def record(self) -> Event:
        """See Stream."""
        return DoneEvent()

    def wait(self, event: Event) -> None:
        """See Stream."""
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
    """Random ones, the same for each stream of this name."""

    def __init__(self, name: str, longest_s: float) -> None:
        self._longest_s = longest_s
        self._random = random.Random(name)

    def next(self) -> float:
        """Seconds."""
        return self._random.uniform(0, self._longest_s) if self._longest_s else 0.0


class WorkerStream:
    """Copies on a thread of its own; a random delay before each shows missing waits.

    The thread ends with `close`, when the stream is dropped, or when Python ends.
    """

    def __init__(self, name: str, max_delay_s: float = 0.0) -> None:
        self.name = name
        self._copies = Copies()
        self.take_failed = self._copies.take_failed
        self._work: WorkQueue = queue.SimpleQueue()
        # The thread knows the queue and not the stream, which can be dropped while it waits.
        work = self._work, Delays(name, max_delay_s)
        self._thread = threading.Thread(
            target=_work_off, args=work, name=f"nanoengine-{name}", daemon=True
        )
        self._end = weakref.finalize(self, _end_worker, HomeProcess(), self._work, self._thread)
        self._thread.start()

    def copy(
        self, dst: Tensor, src: Tensor, owner: object = None, convert: Convert | None = None
    ) -> None:
        """See Stream."""
        copies = self._copies
        self._put(lambda: copies.make(dst, src, owner, convert))

    def fill(self, dst: Tensor, value: float) -> None:
        """See Stream."""
        copies = self._copies
        self._put(lambda: copies.fill(dst, value))

    def record(self) -> Event:
        """See Stream."""
        event = WorkerEvent()
        self._put(event)
        return event

    def wait(self, event: Event) -> None:
        """See Stream."""
        if isinstance(event, WorkerEvent) and not event.is_done():
            self._put(event.block)

    def close(self) -> None:
        """End the thread once its queue is empty; closing twice is fine."""
        self._end()

    def _put(self, work: Callable[[], object] | WorkerEvent) -> None:
        """Raises EngineClosedError after `close`: nobody would do it, and who waits for it would
        wait for ever.
        """
        if not self._end.alive:
            raise EngineClosedError("the copies of a closed engine were ended")
        self._work.put(work)


def _work_off(work_queue: WorkQueue, delays: Delays) -> None:
    """The thread of a WorkerStream."""
    while (work := work_queue.get()) is not None:
        if isinstance(work, WorkerEvent):
            work.set()
            continue
        if delay_s := delays.next():
            time.sleep(delay_s)
        work()


def _end_worker(home: HomeProcess, work_queue: WorkQueue, thread: threading.Thread) -> None:
    """Let a worker come to the end of its queue. In a fork of the process there is no worker."""
    if not home.is_here:
        return
    work_queue.put(None)
    join(thread)


def _copy_bytes(dst: Tensor, src: Tensor) -> None:
    """numpy's copy is a plain memcpy: it releases the GIL and starts no team of threads."""
    np.copyto(_as_bytes(dst), _as_bytes(src))


def _as_bytes(tensor: Tensor) -> npt.NDArray[np.uint8]:
    return tensor.view(torch.uint8).numpy()
