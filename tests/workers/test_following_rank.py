"""What a rank does with the record of a step. Programs of many steps: tests/kv/shadow_ranks.py."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shadow import HeldDevice
from torch import Tensor

from nanoengine.context import ForwardContext, StepRows
from nanoengine.devices.cpu import CpuDevice
from nanoengine.kv.kv_memory import KVMemory
from nanoengine.kv.kv_spec import KVSpec
from nanoengine.kv.step_kv import StepKV
from nanoengine.kv.step_plan import (
    DEVICE,
    Part,
    SequenceSpan,
    SlotWrite,
    StepPlan,
    StepTransfers,
    Store,
)
from nanoengine.workers.following_rank import FollowingRank
from nanoengine.workers.leading_parts import LeadingDecoder
from nanoengine.workers.orders import Order
from nanoengine.workers.step_record import StepRecord, decode, encode


@pytest.mark.parametrize("may_replay", [True, False])
def test_a_rank_replays_if_rank_0_does(may_replay: bool) -> None:
    """It waits for its own stores, which may be later, and does not look at them otherwise."""
    device = HeldDevice()
    memory = KVMemory(KVSpec(((1, 3),) * 2, 4, 4, torch.float32, 6), device)
    found: list[tuple[bool, bool]] = []

    def forward(ctx: ForwardContext) -> Tensor:
        is_still = not any(stream.work for stream in device.held)
        found.append((ctx.kv.replay_key() is not None, is_still))
        return ctx.token_ids

    model = SimpleNamespace(
        decoder=SimpleNamespace(forward=forward, mtp=None), config=SimpleNamespace(hidden_size=1)
    )
    parts: Any = SimpleNamespace(
        model=model, attention=None, facts=SimpleNamespace(dtype=torch.float32)
    )
    channel: Any = SimpleNamespace(reply=lambda body: None)
    group: Any = None
    rank = FollowingRank(parts, memory, device, group, channel)
    plan = StepPlan(
        1, 0, (SlotWrite(0, 1, 0, 1),), (1,), (Part(DEVICE, (SequenceSpan(0, 0, (1,)),)),)
    )
    step = StepRecord(plan, (5,), (0,), ((1, 1),), may_replay)
    storing = replace(plan, transfers=StepTransfers(stores=(Store(1, 5, 0, 4),)))
    try:
        rank.do(Order.START, encode(replace(step, plan=storing)))
        rank.do(Order.START, encode(step))
        rank.do(Order.STEP, encode(step))
        assert found == [(may_replay, may_replay)]
    finally:
        memory.close()


@pytest.mark.parametrize("reports", [True, False])
def test_a_step_that_reports_its_mass_is_replayed_by_nobody(reports: bool) -> None:
    """Rank 0 runs it as it is, so the others must: on GPUs all replay the same."""
    device = CpuDevice(1)
    memory = KVMemory(KVSpec(((1, 3),) * 2, 4, 4, torch.float32), device)
    plan = StepPlan(
        1, 0, (SlotWrite(0, 1, 0, 1),), (1,), (Part(DEVICE, (SequenceSpan(0, 0, (1,)),)),)
    )
    rows = StepRows((5,), (0,), ((1, 1),))
    mass = torch.zeros(1, 1) if reports else None
    nobody: Any = None
    ctx = ForwardContext.lay_out(rows, StepKV.open(plan, memory), nobody, device.tensor, mass)
    told: list[StepRecord] = []

    def lead(order: Order, body: bytes, work: Any) -> None:
        told.append(decode(body))

    leader: Any = SimpleNamespace(lead=lead)
    decoder: Any = SimpleNamespace(mtp=None)
    LeadingDecoder(decoder, leader).forward(ctx)
    assert [record.may_replay for record in told] == [not reports]
    memory.close()
