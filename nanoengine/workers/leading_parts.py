"""The parts of rank 0 that tell the other ranks what it does: its decoder and its KV memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from nanoengine.context import ForwardContext
from nanoengine.devices.device import Device
from nanoengine.kv.kv_memory import KVMemory
from nanoengine.kv.kv_spec import KVSpec
from nanoengine.kv.offload import TransferRun
from nanoengine.kv.step_kv import StepKV
from nanoengine.kv.step_plan import StepPlan, StepTransfers
from nanoengine.kv.transfers import FailedTransfer
from nanoengine.models.decoder import Model
from nanoengine.models.mtp import MtpHead
from nanoengine.models.products import Ends
from nanoengine.workers.group import Group
from nanoengine.workers.orders import Order
from nanoengine.workers.step_record import StepRecord, encode

Result = TypeVar("Result")


class Leader(Protocol):
    """Gives the other ranks orders (leading_rank.LeadingRank)."""

    @property
    def group(self) -> Group: ...
    def lead(self, order: Order, body: bytes, work: Callable[[], Result]) -> Result: ...
    def step_replies(self) -> list[bytes]: ...


class LeadingDecoder:
    """Runs each step on all ranks."""

    num_runs = 0

    def __init__(self, decoder: Model, leader: Leader) -> None:
        self._decoder = decoder
        self._leader = leader
        self.mtp = LeadingHead(decoder.mtp, leader) if decoder.mtp else None

    @property
    def ends(self) -> Ends:
        """Of this rank's part."""
        return self._decoder.ends

    def forward(self, ctx: ForwardContext) -> Tensor:
        kv = ctx.kv
        if not isinstance(kv, StepKV):  # a step to measure, of whatever tokens
            said = json.dumps([[num for num, _ in ctx.lengths], ctx.last_rows]).encode()
            return self._leader.lead(Order.PROFILE, said, lambda: self._decoder.forward(ctx))
        # A step that reports its mass is not replayed, see Decoder.forward.
        may_replay = ctx.block_mass is None and kv.replay_key() is not None
        ctx = replace(ctx, kv=replace(kv, may_replay=may_replay))
        is_draft = kv.run is None and kv.memory.offload is not None
        order = Order.DRAFT if is_draft else Order.STEP
        return _lead_pass(
            self._leader, order, ctx, ctx.token_ids, may_replay, lambda: self._decoder.forward(ctx)
        )

    def layers(self, ctx: ForwardContext) -> Generator[Tensor]:
        """All at once."""
        yield self.forward(ctx)

    def logits(self, x: Tensor, runs: Tensor | None = None) -> Tensor:
        """Of all tokens."""
        return _logits(self._leader, Order.LOGITS, self._decoder.logits, x)


class LeadingHead:
    """Runs the MTP head on all ranks."""

    num_runs = 0

    def __init__(self, head: MtpHead, leader: Leader) -> None:
        self._head = head
        self._leader = leader

    def __call__(self, ctx: ForwardContext, next_ids: Tensor, given: Tensor) -> Tensor:
        def work() -> Tensor:
            return self._head(ctx, next_ids, self._leader.group.broadcast(given))

        return _lead_pass(self._leader, Order.HEAD_DRAFT, ctx, next_ids, False, work)

    def after_model(self, ctx: ForwardContext, next_ids: Tensor, x: Tensor) -> Tensor:
        """Over the step that runs: the others have its context, and x."""

        def work() -> Tensor:
            return self._head.after_model(ctx, self._leader.group.broadcast(next_ids), x)

        return self._leader.lead(Order.HEAD, json.dumps(len(next_ids)).encode(), work)

    def logits(self, x: Tensor, runs: Tensor | None = None) -> Tensor:
        """Of all tokens."""
        return _logits(self._leader, Order.HEAD_LOGITS, self._head.logits, x)


def _lead_pass(
    leader: Leader,
    order: Order,
    ctx: ForwardContext,
    token_ids: Tensor,
    may_replay: bool,
    work: Callable[[], Tensor],
) -> Tensor:
    """A pass on all ranks; tokens that only the device knows follow the order by broadcast."""
    kv = ctx.kv
    assert isinstance(kv, StepKV)
    rows = token_ids, ctx.positions
    is_known = not kv.memory.device.computes_later
    tokens, positions = (tuple(each.tolist()) if is_known else () for each in rows)
    record = StepRecord(kv.plan, tokens, positions, ctx.lengths, may_replay, ctx.last_rows)

    def told_work() -> Tensor:
        if not is_known:
            leader.group.broadcast(torch.stack(rows))
        return work()

    return leader.lead(order, encode(record), told_work)


def _logits(leader: Leader, order: Order, head: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """head(x) on all ranks."""
    body = json.dumps(len(x)).encode()
    return leader.lead(order, body, lambda: head(leader.group.broadcast(x)))


class LeadingMemory(KVMemory):
    """Rank 0's KV memory; the other ranks hold the same blocks of their heads."""

    def __init__(self, spec: KVSpec, device: Device, debug: bool, leader: Leader) -> None:
        self._leader = leader
        super().__init__(spec, device, debug)

    def start(self, transfers: StepTransfers) -> TransferRun | None:
        if self.offload is None:
            return None
        plan = StepPlan(0, 0, (), (), (), (), transfers)
        body = encode(StepRecord(plan, (), (), (), may_replay=False))
        return self._leader.lead(Order.START, body, lambda: KVMemory.start(self, transfers))

    def copy_block(self, source: int, target: int, num_tokens: int) -> None:
        self._lead("copy_block", source, target, num_tokens)

    def save_state(self, slot: int, place: int) -> None:
        self._lead("save_state", slot, place)

    def load_state(self, place: int, slot: int) -> None:
        self._lead("load_state", place, slot)

    def copy_state(self, source: int, target: int) -> None:
        self._lead("copy_state", source, target)

    def poison(self, device_slot: int | None, host_slot: int | None) -> None:
        if self.is_debugged:
            self._lead("poison", device_slot, host_slot)

    def poison_all(self) -> None:
        if self.is_debugged:
            self._lead("poison_all")

    def allocate_rest(self) -> None:
        self._lead("allocate_rest")

    def take_failures(self) -> list[FailedTransfer]:
        """Those of all ranks."""
        told = [each for reply in self._leader.step_replies() for each in json.loads(reply)]
        return [
            *super().take_failures(),
            *(FailedTransfer(tuple(ids), is_lost, reason) for ids, is_lost, reason in told),
        ]

    def _lead(self, method: str, *said: int | None) -> None:
        """KVMemory's method on all ranks."""
        work = partial(getattr(KVMemory, method), self, *said)
        self._leader.lead(Order.KV, json.dumps([method, *said]).encode(), work)
