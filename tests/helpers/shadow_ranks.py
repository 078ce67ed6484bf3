"""The shadow engine on two ranks: the other one has nothing but what it is told, in the bytes that
go to a process. What it holds and reads is checked by value, as that of the first one is.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
from shadow import Boom, Faults, HeldDevice
from shadow_drafts import DraftingEngine
from torch import Tensor

from nanoengine.context import AttentionBackend, ForwardContext, StepRows
from nanoengine.devices.cpu import CpuDevice
from nanoengine.devices.device import Device
from nanoengine.devices.stream_check import CheckedDevice
from nanoengine.kv.kv_memory import KVMemory
from nanoengine.kv.kv_spec import KVSpec
from nanoengine.kv.open_step import DraftStep
from nanoengine.kv.step_kv import StepKV
from nanoengine.models.decoder import Model
from nanoengine.sequence import ScheduledBatch
from nanoengine.workers.following_rank import FollowingRank
from nanoengine.workers.group import Group
from nanoengine.workers.leading_parts import LeadingDecoder, LeadingMemory
from nanoengine.workers.orders import Order, spec_from_json, spec_to_json

Result = TypeVar("Result")


class SecondRank:
    """Gives orders (leading_parts.Leader): the other rank carries them out at once, in this thread.

    forward: what that rank does as its decoder.
    """

    group: Group  # nobody gathers

    def __init__(self, copies: str) -> None:
        """copies: "inline" or "held"; they need not be those of the first rank."""
        self.forward: Callable[[ForwardContext], Tensor]
        self.cpu = HeldDevice() if copies == "held" else CpuDevice(1)
        self.device = CheckedDevice(self.cpu)
        self._replies: list[bytes] = []

    def make_memory(self, spec: KVSpec, device: Device, debug: bool) -> KVMemory:
        """That of both; returns the first one's."""
        told = spec_from_json(json.loads(json.dumps(spec_to_json(spec))))
        self.memory = KVMemory(told, self.device, debug)
        decoder = SimpleNamespace(forward=lambda ctx: self.forward(ctx))
        model = SimpleNamespace(decoder=decoder, config=SimpleNamespace(hidden_size=1))
        parts: Any = SimpleNamespace(
            model=model, attention=None, facts=SimpleNamespace(dtype=torch.float32)
        )
        nobody, channel = cast(Any, None), cast(Any, self)
        self._rank = FollowingRank(parts, self.memory, self.device, nobody, channel)
        return LeadingMemory(spec, device, debug, self)

    def lead(self, order: Order, body: bytes, work: Callable[[], Result]) -> Result:
        """See Leader."""
        self._rank.do(order, body)
        return work()

    def step_replies(self) -> list[bytes]:
        """See Leader."""
        told, self._replies = self._replies, []
        return told

    def reply(self, body: bytes) -> None:
        """See Channel."""
        self._replies.append(body)

    @property
    def is_amid_a_step(self) -> bool:
        """Whether it has begun the copies of a step, and the step itself has not come."""
        return self._rank._run is not None

    @property
    def is_still(self) -> bool:
        """Whether no copy is queued."""
        return not isinstance(self.cpu, HeldDevice) or not any(s.work for s in self.cpu.held)


@dataclass
class RankedEngine(DraftingEngine):
    """A DraftingEngine of two ranks. other_copies: of the second one.

    A failure in the layers is the end of ranks, so a step that is told to fail does so before.
    """

    other_copies: str = "inline"

    def __post_init__(self) -> None:
        super().__post_init__()
        streams = self.other.cpu.h2d, self.other.cpu.d2h
        self.faults |= {f"{stream.name} of another rank": Faults(stream) for stream in streams}

    def make_memory(self, spec: KVSpec, device: Device, debug: bool) -> KVMemory:
        """See ShadowEngine."""
        self.other = SecondRank(self.other_copies)
        return self.other.make_memory(spec, device, debug)

    def forward(
        self,
        kv: StepKV,
        fresh: list[int],
        hashes: list[list[int]],
        fail_at: tuple[int, int] | None,
    ) -> Iterator[None]:
        """See ShadowEngine; all layers at once."""
        if fail_at is not None:
            raise Boom("step")
        run, ends = super().forward, [len(each) for each in hashes]
        self._on_both(kv, fresh, ends, lambda kv: deque(run(kv, fresh, hashes, None), maxlen=0))
        yield

    def draft_forward(
        self, batch: ScheduledBatch, one: DraftStep, chains: list[list[int]], fails_in: int | None
    ) -> None:
        """See DraftingEngine."""
        if fails_in is not None:
            raise Boom("draft")
        run = super().draft_forward
        self._on_both(
            one.kv,
            [chain[-1] for chain in chains],
            one.num_keys,
            lambda kv: run(batch, replace(one, kv=kv), chains, None),
        )

    def _on_both(
        self, kv: StepKV, fresh: list[int], ends: Sequence[int], forward: Callable[[StepKV], object]
    ) -> None:
        """Run a forward pass on both ranks, whose tokens are hashes here."""
        lengths = tuple((1, end) for end in ends)

        def run(ctx: ForwardContext) -> Tensor:
            assert ctx.token_ids.tolist() == fresh and ctx.lengths == lengths
            assert isinstance(ctx.kv, StepKV)
            forward(ctx.kv)
            return ctx.token_ids

        self.other.forward = run
        rows = StepRows(fresh, range(len(fresh)), lengths)
        nobody = cast(AttentionBackend, None)
        ctx = ForwardContext.lay_out(rows, kv, nobody, self.device.tensor)
        LeadingDecoder(cast(Model, SimpleNamespace(forward=run)), self.other).forward(ctx)

    def check(self, settled: bool = False) -> None:
        """See ShadowEngine."""
        super().check(settled)
        other = self.other
        # It ends the copies of a step that failed when it hears of the next thing.
        if other.is_still or not other.is_amid_a_step:
            self._check_memory(other.memory, settled or other.is_still)

    def settle(self) -> None:
        """See ShadowEngine."""
        self.other.device.synchronize()
        super().settle()

    def close(self) -> None:
        """See ShadowEngine."""
        super().close()
        self.other.memory.close()
