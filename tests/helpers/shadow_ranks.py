"""The shadow engine on two ranks: the other one has nothing but what it is told, in the bytes that
go to a process. What it holds and reads is checked by value, as that of the first one is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
from shadow import NUM_LAYERS, Boom, Faults, HeldDevice
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
from nanoengine.workers.leading_parts import LeadingDecoder, LeadingHead, LeadingMemory
from nanoengine.workers.orders import Order, spec_from_json, spec_to_json

Result = TypeVar("Result")


class SecondRank:
    """Gives orders (leading_parts.Leader): the other rank carries them out at once, in this thread.

    run: what that rank does next, as its decoder or as the MTP head.
    """

    group = cast(Group, SimpleNamespace(broadcast=lambda x: x))  # nobody looks at what is given

    def __init__(self, copies: str, has_head: bool) -> None:
        """copies: "inline" or "held"; they need not be those of the first rank."""
        self.run: Callable[[ForwardContext], Tensor]
        self.has_head = has_head
        self.cpu = HeldDevice() if copies == "held" else CpuDevice(1)
        self.device = CheckedDevice(self.cpu)
        self._replies: list[bytes] = []

    def make_memory(self, spec: KVSpec, device: Device, debug: bool) -> KVMemory:
        """That of both; returns the first one's."""
        told = spec_from_json(json.loads(json.dumps(spec_to_json(spec))))
        self.memory = KVMemory(told, self.device, debug)
        head = head_of(lambda ctx: self.run(ctx)) if self.has_head else None
        decoder = SimpleNamespace(forward=lambda ctx: self.run(ctx), mtp=head)
        model = SimpleNamespace(decoder=decoder, config=SimpleNamespace(hidden_size=1))
        parts: Any = SimpleNamespace(
            model=model, attention=None, facts=SimpleNamespace(dtype=torch.float32)
        )
        channel = cast(Any, self)
        self._rank = FollowingRank(parts, self.memory, self.device, self.group, channel)
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
        """Whether it has begun the copies of a step, and the end of the step has not come."""
        return self._rank._run is not None or self._rank._open is not None

    @property
    def is_still(self) -> bool:
        """Whether no copy is queued."""
        return not isinstance(self.cpu, HeldDevice) or not any(s.work for s in self.cpu.held)


def head_of(run: Callable[[ForwardContext], Tensor]) -> Any:
    """An MtpHead that runs, and looks at no token."""

    class Head:
        def __call__(self, ctx: ForwardContext, next_ids: Tensor, given: Tensor) -> Tensor:
            return run(ctx)

        after_model = __call__

    return Head()


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
        adversary = self.adversary
        self.other = SecondRank(self.other_copies, adversary is not None and adversary.own_head)
        return self.other.make_memory(spec, device, debug)

    def forward(
        self, kv: StepKV, fresh: list[int], hashes: list[list[int]], fail_at: tuple[int, int] | None
    ) -> Iterator[None]:
        """See ShadowEngine; all layers at once."""
        if fail_at is not None:
            raise Boom("step")
        layers, ctx = range(NUM_LAYERS), self._context(kv, fresh, [*map(len, hashes)])

        def run(layers: Sequence[int], kv: StepKV) -> None:
            for layer in layers:
                self.layer(layer, kv, fresh, hashes, None)

        if self.other.has_head:
            self._decoder(ctx, partial(run, layers[:-1]))
            head = self._head(ctx, partial(run, layers[-1:]))
            head.after_model(ctx, ctx.token_ids, ctx.token_ids)
        else:
            self._decoder(ctx, partial(run, layers))
        yield

    def draft_forward(
        self, batch: ScheduledBatch, one: DraftStep, chains: list[list[int]], fails_in: int | None
    ) -> None:
        """See DraftingEngine."""
        if fails_in is not None:
            raise Boom("draft")
        run = super().draft_forward
        ctx = self._context(one.kv, [chain[-1] for chain in chains], one.num_keys)

        def draft(kv: StepKV) -> None:
            run(batch, replace(one, kv=kv), chains, None)

        if self.other.has_head:
            self._head(ctx, draft)(ctx, ctx.token_ids, ctx.token_ids)
        else:
            self._decoder(ctx, draft)

    def _context(self, kv: StepKV, fresh: list[int], ends: Sequence[int]) -> ForwardContext:
        """Of a step whose tokens are hashes."""
        rows = StepRows(fresh, range(len(fresh)), tuple((1, end) for end in ends))
        nobody = cast(AttentionBackend, None)
        return ForwardContext.lay_out(rows, kv, nobody, self.device.tensor)

    def _decoder(self, ctx: ForwardContext, forward: Callable[[StepKV], None]) -> None:
        """Run a forward pass on both ranks."""
        run = self._on_both(ctx, forward)
        LeadingDecoder(cast(Model, SimpleNamespace(forward=run, mtp=None)), self.other).forward(ctx)

    def _head(self, ctx: ForwardContext, forward: Callable[[StepKV], None]) -> LeadingHead:
        """The head of both, which will do that."""
        return LeadingHead(head_of(self._on_both(ctx, forward)), self.other)

    def _on_both(
        self, like: ForwardContext, forward: Callable[[StepKV], None]
    ) -> Callable[[ForwardContext], Tensor]:
        """What both ranks do next, over what is laid out like that."""

        def run(ctx: ForwardContext) -> Tensor:
            assert torch.equal(ctx.token_ids, like.token_ids) and ctx.lengths == like.lengths
            assert isinstance(ctx.kv, StepKV)
            forward(ctx.kv)
            return ctx.token_ids

        self.other.run = run
        return run

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
