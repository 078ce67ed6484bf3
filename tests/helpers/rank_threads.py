"""Ranks of tensor parallelism as threads of the test's process, over the same channels and memory
as processes: starting them costs no import.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from nanoengine.errors import EngineError
from nanoengine.workers import following_rank
from nanoengine.workers.channel import REPLY, STOP, Channel
from nanoengine.workers.shared_memory_group import SharedMemoryGroup, make_region

PATIENCE_S = 20.0


@contextmanager
def sharing_ranks(
    size: int, folder: Path | None = None, timeout_s: float = PATIENCE_S
) -> Iterator[list[SharedMemoryGroup]]:
    """The groups of ranks in this process, each for a thread. folder: of their C."""
    fd = make_region(size, folder)
    groups = [SharedMemoryGroup(fd, rank, size, None, timeout_s, folder) for rank in range(size)]
    os.close(fd)
    try:
        yield groups
    finally:
        for group in groups:
            group.close()


class RankThreads:
    """Stands for WorkerProcesses."""

    def __init__(
        self,
        entry: str,
        count: int,
        hello: Mapping[str, object],
        fds: Sequence[int] = (),
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        self._failures: list[BaseException] = []
        self._channels: list[Channel] = []
        self._threads: list[threading.Thread] = []
        for rank in range(1, count + 1):
            mine, theirs = map(Channel, socket.socketpair())
            said = json.loads(json.dumps({**hello, "rank": rank}))
            work = functools.partial(self._work, theirs, said, on_death)
            self._channels.append(mine)
            self._threads.append(threading.Thread(target=work, daemon=True))
        for thread in self._threads:
            thread.start()

    def _work(self, channel: Channel, hello: Mapping[str, object], on_death: object) -> None:
        assert callable(on_death)
        try:
            self._main(channel, hello)
        except BaseException as error:
            self._failures.append(error)
            on_death()
        finally:
            channel.close()

    def _main(self, channel: Channel, hello: Mapping[str, object]) -> None:
        following_rank.main(channel, hello)

    def send(self, kind: int, body: bytes = b"") -> None:
        self.check()
        for channel in self._channels:
            channel.send(kind, body)

    def receive(self, timeout_s: float) -> list[bytes]:
        replies = []
        for channel in self._channels:
            try:
                kind, body = channel.receive(timeout_s)
            except EOFError:
                self.check()
                raise
            assert kind == REPLY
            replies.append(body)
        return replies

    def check(self, within_s: float = 0.0) -> None:
        if self._failures:
            raise EngineError(f"a rank has failed: {self._failures[0]!r}") from self._failures[0]

    def close(self) -> None:
        for channel, thread in zip(self._channels, self._threads, strict=True):
            with suppress(OSError):  # of a rank that has ended by itself
                channel.send(STOP)
            thread.join(60)
            assert not thread.is_alive(), "a rank did not stop"
            channel.close()
