"""A rank above 0: does what rank 0 tells, over its own part of the model and of the KV."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanoengine.config.engine import EngineConfig
from nanoengine.context import ForwardContext, StepRows
from nanoengine.devices.device import Device
from nanoengine.kv.kv_memory import KVMemory
from nanoengine.kv.offload import TransferRun
from nanoengine.kv.step_kv import StepKV
from nanoengine.models.mtp import MtpHead
from nanoengine.startup.largest_step import ScratchKV
from nanoengine.startup.parts import (
    ComputeParts,
    find_folder,
    load_compute_parts,
    make_engine_device,
)
from nanoengine.startup.probe import measure_copy
from nanoengine.workers.channel import Channel
from nanoengine.workers.group import Group
from nanoengine.workers.orders import Order, spec_from_json
from nanoengine.workers.rank_setup import RankSetup, RankSharding, fingerprint
from nanoengine.workers.step_record import StepRecord, decode


def main(channel: Channel, hello: Mapping[str, Any]) -> None:
    """The work of a rank, until rank 0 ends it. hello: "rank", and "setup" of a RankSetup."""
    setup = RankSetup(**hello["setup"])
    config = setup.config(hello["rank"])
    device = make_engine_device(config)
    group = setup.join(hello["rank"], device)
    sharding = RankSharding(hello["rank"], group)
    folder = find_folder(config, device)
    parts = load_compute_parts(config, device, folder, sharding)
    channel.reply(fingerprint(parts).encode())
    start = RankStart(parts, config, device, group, channel)
    requests = channel.requests()
    try:
        with torch.inference_mode():
            for order, body in requests:
                if order == Order.MEMORY:
                    break
                start.do(Order(order), body)
            else:
                return  # rank 0 could not start
        memory = KVMemory(spec_from_json(json.loads(body)), device, config.debug_kv)
        channel.reply()
        rank = FollowingRank(parts, memory, device, group, channel)
        with torch.inference_mode():
            for order, body in requests:
                rank.do(Order(order), body)
    finally:
        device.close_streams()
        parts.ops.forget_steps()
        group.close()


@dataclass(frozen=True, slots=True)
class RankStart:
    """Carries out orders before there is KV memory."""

    parts: ComputeParts
    config: EngineConfig
    device: Device
    group: Group
    channel: Channel

    def do(self, order: Order, body: bytes) -> None:
        """Carry out one order."""
        match order:
            case Order.FREE:
                self.channel.reply(json.dumps(self.device.memory()).encode())
            case Order.PROFILE:
                self.device.peak_bytes_of(partial(self._profile, *json.loads(body)))
            case Order.LOGITS:
                _logits(self.parts, json.loads(body), self.device, self.group)
            case _:
                raise AssertionError(f"{order.name} needs the KV memory")

    def _profile(self, lengths: list[int], last_rows: list[int] | None) -> None:
        model, size = self.parts.model, self.config.kvcache_block_size
        kv = ScratchKV(model.part, size, self.parts.facts.dtype, self.device, lengths)
        num_tokens = sum(lengths)
        zeros = [0] * num_tokens
        rows = StepRows(zeros, zeros, [(num, num) for num in lengths], last_rows or ())
        ctx = ForwardContext.lay_out(
            rows,
            kv,
            self.parts.attention,
            self.device.tensor,
            logits_alone=last_rows is not None,
        )
        model.decoder.forward(ctx)


# Between START and STEP; whatever else comes then, the step does not.
_OF_A_STEP = (Order.DRAFT, Order.LOGITS, Order.STEP, Order.HEAD_DRAFT, Order.HEAD_LOGITS)
# Between STEP and HEAD; whatever else comes then, the head does not run over the step.
_BEFORE_THE_HEAD = (Order.LOGITS, Order.HEAD)


@dataclass(frozen=True, slots=True)
class _OpenStep:
    """A step that was computed. x: [tokens, hidden], after the model's last layer."""

    kv: StepKV
    ctx: ForwardContext
    x: Tensor


class FollowingRank:
    """Carries out orders."""

    def __init__(
        self, parts: ComputeParts, memory: KVMemory, device: Device, group: Group, channel: Channel
    ) -> None:
        self._parts = parts
        self._decoder = parts.model.decoder
        self._head = parts.model.decoder.mtp
        self._attention = parts.attention
        self._memory = memory
        self._device = device
        self._group = group
        self._channel = channel
        self._run: TransferRun | None = None
        self._open: _OpenStep | None = None

    def do(self, order: Order, body: bytes) -> None:
        """Carry out one order."""
        if order not in _OF_A_STEP:
            self._end_run()
        if order not in _BEFORE_THE_HEAD:
            self._end_step()
        match order:
            case Order.START:
                self._start(decode(body))
            case Order.DRAFT:
                self._decoder.forward(self._draft_context(decode(body)))
            case Order.STEP:
                self._step(decode(body))
            case Order.LOGITS:
                _logits(self._parts, json.loads(body), self._device, self._group)
            case Order.HEAD | Order.HEAD_DRAFT | Order.HEAD_LOGITS:
                self._run_head(self._head, order, body)
            case Order.LINK_SPEED:
                self._channel.reply(json.dumps(measure_copy(self._memory)).encode())
            case Order.KV:
                method, *said = json.loads(body)
                getattr(self._memory, method)(*said)
            case _:
                raise AssertionError("the KV memory is there")

    def _start(self, record: StepRecord) -> None:
        self._run = self._memory.start(record.plan.transfers)

    def _end_run(self) -> None:
        """Of a step that rank 0 was interrupted in, and whose blocks may go to others now."""
        if self._run is not None:
            self._run.finish()
        self._run = None

    def _run_head(self, head: MtpHead | None, order: Order, body: bytes) -> None:
        assert head is not None
        if order == Order.HEAD_LOGITS:
            head.logits(_broadcast(self._parts, json.loads(body), self._device, self._group))
        elif order == Order.HEAD_DRAFT:
            ctx = self._draft_context(decode(body))
            num_rows = len(ctx.token_ids)
            given = _broadcast(self._parts, num_rows, self._device, self._group)
            head(ctx, ctx.token_ids, given)
        else:
            step = self._open
            assert step is not None
            next_ids = self._group.broadcast(step.ctx.token_ids.new_empty(json.loads(body)))
            head.after_model(step.ctx, next_ids, step.x)
            self._end_step()

    def _draft_context(self, record: StepRecord) -> ForwardContext:
        if self._run is not None:
            self._run.share_cores(False)
        return self._context(record, StepKV.open(record.plan, self._memory))

    def _step(self, record: StepRecord) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.share_cores(True)
        kv = StepKV.open(record.plan, self._memory, run)
        try:
            ctx = self._context(record, kv)
            self._open = _OpenStep(kv, ctx, self._decoder.forward(ctx))
        finally:
            if self._open is None:
                kv.finish()
        if self._head is None:
            self._end_step()

    def _end_step(self) -> None:
        """Say which copies failed, once those of the step have come to their end."""
        if self._open is None:
            return
        self._open.kv.finish()
        self._open = None
        failures = [[*asdict(failure).values()] for failure in self._memory.take_failures()]
        self._channel.reply(json.dumps(failures).encode())

    def _context(self, record: StepRecord, kv: StepKV) -> ForwardContext:
        if record.may_replay and kv.replay_key() is None:  # its stores are later than rank 0's
            _await_stores(kv)
        kv = replace(kv, may_replay=record.may_replay)
        tensor, ids, positions = self._device.tensor, record.token_ids, record.positions
        if not ids:
            ids = positions = (0,) * sum(num for num, _ in record.lengths)
        rows = StepRows(ids, positions, record.lengths, record.last_rows or ())
        ctx = ForwardContext.lay_out(
            rows, kv, self._attention, tensor, logits_alone=record.last_rows is not None
        )
        if not record.token_ids:
            told = self._group.broadcast(ctx.token_ids.new_empty(2, len(ids)))
            ctx = replace(ctx, token_ids=told[0], positions=told[1])
        return ctx


def _logits(parts: ComputeParts, num_rows: int, device: Device, group: Group) -> None:
    """This rank's part of the logits of rows that rank 0 has."""
    parts.model.decoder.logits(_broadcast(parts, num_rows, device, group))


def _broadcast(parts: ComputeParts, num_rows: int, device: Device, group: Group) -> Tensor:
    """What rank 0 gives, [rows, hidden]."""
    shape = num_rows, parts.model.config.hidden_size
    return group.broadcast(torch.empty(shape, dtype=parts.facts.dtype, device=device.torch_device))


def _await_stores(kv: StepKV) -> None:
    """Wait for the stores that a step's layers would wait for: those of the last layer end last."""
    last = len(kv.memory.layers) - 1
    kv.target(last)
    for _ in kv.read(last):
        pass
