"""LeadingRank: rank 0. It starts the other ranks, and tells them each thing that it does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import TypeVar

from nanoengine.config.engine import EngineConfig
from nanoengine.devices.device import Device
from nanoengine.errors import EngineError, ModelLoadError
from nanoengine.kv.kv_memory import KVMemory
from nanoengine.kv.kv_spec import KVSpec
from nanoengine.startup.memory_plan import Memory
from nanoengine.startup.parts import Parts, load_parts, usable_settings
from nanoengine.startup.probe import measure_copy
from nanoengine.startup.rank_share import MemoryShare
from nanoengine.workers.group import Group
from nanoengine.workers.leading_parts import LeadingDecoder, LeadingMemory
from nanoengine.workers.orders import Order, spec_to_json
from nanoengine.workers.processes import WorkerProcesses
from nanoengine.workers.rank_setup import (
    MeetingPlace,
    RankSetup,
    RankSharding,
    devices_of_ranks,
    fingerprint,
    settings_of_a_rank,
)

ENTRY = "nanoengine.workers.following_rank:main"
START_S = 120.0  # silence after which a rank that starts counts as stuck
STEP_S = 300.0  # silence after which a rank at work counts as stuck
Result = TypeVar("Result")


class LeadingRank:
    """Rank 0 of `config.tensor_parallel_size` (engine.ranks.Ranks)."""

    def __init__(self, config: EngineConfig) -> None:
        """Start the other ranks. Raises ConfigError, EngineError."""
        self._size = config.tensor_parallel_size
        devices = devices_of_ranks(config.device, self._size)
        self.config = replace(settings_of_a_rank(config), device=devices[0])
        self._num_steps = 0  # told and not yet replied to
        self._failure: BaseException | None = None
        self._joined: list[Group] = []
        self._forget_steps: Callable[[], None] = lambda: None
        self._meeting = MeetingPlace(self._size, devices[0] == "cpu")
        self._setup = RankSetup(
            asdict(self.config), devices, self._meeting.memory, self._meeting.folder
        )
        try:
            self._processes = WorkerProcesses(
                ENTRY,
                self._size - 1,
                {"setup": asdict(self._setup)},
                self._meeting.fds,
                on_death=partial(_abort, self._joined),
            )
        except BaseException:
            self._meeting.close()
            raise

    @property
    def group(self) -> Group:
        """The group of all ranks; there is none before `load`."""
        return self._joined[0]

    def load(self, device: Device) -> Parts:
        try:
            self._joined.append(self._setup.join(0, device))
        except EngineError:
            self._processes.check(1.0)
            raise
        device.watch(self._look)
        parts = load_parts(self.config, device, RankSharding(0, self.group))
        self._forget_steps = parts.ops.forget_steps
        mine = fingerprint(parts)
        for rank, theirs in enumerate(self._processes.receive(START_S), 1):
            if theirs.decode() != mine:
                raise ModelLoadError(
                    f"rank {rank} of {self._size} found another model than rank 0 in "
                    f"{parts.folder}: was it changed while it was loaded?"
                )
        self._meeting.close()  # all have met
        self.config = usable_settings(self.config, parts, device)
        decoder = LeadingDecoder(parts.model.decoder, self)
        return replace(parts, model=replace(parts.model, decoder=decoder))

    def share_of(self, device: Device) -> Memory:
        """A CPU's ranks share its memory. Each GPU has its own: the least counts."""
        if device.name == "cpu":
            return MemoryShare(device, self._size)
        self._processes.send(Order.FREE)
        others = [json.loads(reply) for reply in self._processes.receive(START_S)]
        free, total = zip(device.memory(), *others, strict=True)
        return MemoryShare(device, self._size, (min(free), max(total)))

    def make_memory(self, spec: KVSpec, device: Device, debug: bool) -> KVMemory:
        self._processes.send(Order.MEMORY, json.dumps(spec_to_json(spec)).encode())
        memory = LeadingMemory(spec, device, debug, self)
        self._processes.receive(START_S)
        return memory

    def link_speeds(self, memory: KVMemory) -> list[float]:
        mine = self.lead(Order.LINK_SPEED, b"", lambda: measure_copy(memory))
        self.step_replies()  # of those that were timed
        return [mine, *(json.loads(reply) for reply in self._processes.receive(STEP_S))]

    def lead(self, order: Order, body: bytes, work: Callable[[], Result]) -> Result:
        """Tell the other ranks, and do this rank's part of it. A failure half-way is for good:
        raises EngineError then and at every later call.
        """
        if self._failure is not None:
            raise EngineError(f"a rank has failed: {self._failure}; make a new LLM")
        try:
            self._processes.send(order, body)
            result = work()
        except BaseException as error:
            self._failure = error
            _abort(self._joined)
            self._processes.check(1.0)
            raise
        self._num_steps += order is Order.STEP
        return result

    def step_replies(self) -> list[bytes]:
        """What the other ranks said to the steps since the last call."""
        replies: list[bytes] = []
        while self._num_steps:
            replies += self._processes.receive(STEP_S)
            self._num_steps -= 1
        return replies

    def _look(self, waited_s: float) -> None:
        """While this process waits for its GPU: whether the other ranks are there."""
        self._processes.check()
        for group in self._joined:
            group.check(waited_s)

    def abort(self) -> None:
        _abort(self._joined)

    def close(self) -> None:
        self._processes.close()
        self._forget_steps()
        for group in self._joined:
            group.close()
        self._meeting.close()


def _abort(joined: list[Group]) -> None:
    """Wake whoever waits for a rank that will not come."""
    for group in joined:
        group.abort()
