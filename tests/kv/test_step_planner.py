"""From where a step reads the blocks of a streamed sequence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nanoengine.kv.block_manager import Block, BlockManager
from nanoengine.kv.block_table import BlockTable
from nanoengine.kv.kv_codec import Int8Codec
from nanoengine.kv.kv_spec import KVSpec
from nanoengine.kv.state_slots import StateSlots
from nanoengine.kv.step_plan import DEVICE, HOST, Location, StepPlan
from nanoengine.kv.step_planner import StepPlanner
from nanoengine.outputs import RequestMetrics
from nanoengine.sampling_params import SamplingParams
from nanoengine.sequence import Request, ScheduledBatch, ScheduledSequence, Sequence

SIZE = 2  # tokens of a block, 64 bytes of a layer
SPEC = KVSpec(((1, 4),) * 3, 2, SIZE, torch.float32, 9, 2, 4, least_run_bytes=65)


def plan_of(
    spec: KVSpec, *lengths: tuple[bool, int], num_tokens: int = 1, guesses: tuple[int, ...] = ()
) -> StepPlan:
    """A step over blocks, each (is on the device, tokens in its host copy), that fills them up:
    with the last tokens of a sequence, or with the last one and guesses.
    """
    assert sum(there for there, _ in lengths) == spec.num_blocks
    manager = BlockManager(spec.num_blocks, spec.num_host_blocks, 0)
    blocks = []
    for number, (is_there, host_len) in enumerate(lengths):
        block = Block(number, num_tokens=SIZE)
        block.device_slot = manager.device.allocate() if is_there else None
        block.host_slot = manager.host.allocate() if host_len else None
        block.host_len = host_len
        blocks.append(block)
    blocks[-1].num_tokens -= num_tokens
    request = Request(SamplingParams(), 0, frozenset(), 99)
    num_known = SIZE * len(blocks) - len(guesses)
    seq = Sequence(0, [1] * num_known, 1, request, RequestMetrics(0.0))
    seq.num_computed = SIZE * len(blocks) - num_tokens
    planner = StepPlanner(spec, manager, lambda slot: (0, slot), StateSlots(spec, None, {}))
    batch = ScheduledBatch((ScheduledSequence(seq, num_tokens, guesses=guesses),))
    return planner.plan(batch, {0: BlockTable(seq, SIZE, blocks, is_preempted=False)}).plan


def places(spec: KVSpec, *lengths: tuple[bool, int]) -> list[Location]:
    """Where a decode step reads blocks, each (is on the device, tokens in its host copy)."""
    return [
        (part.tier, part.fill[slot] if part.fill else slot)
        for part in plan_of(spec, *lengths).reads
        for slot in part.spans[0].slots
    ]


HOST_ONLY, BOTH, HALF, NONE, TAIL = (False, SIZE), (True, SIZE), (True, 1), (True, 0), (True, 0)


def test_a_short_run_between_streamed_blocks_is_streamed() -> None:
    found = places(SPEC, HOST_ONLY, BOTH, HOST_ONLY, TAIL)
    assert found == [(HOST, 0), (HOST, 1), (HOST, 2), (DEVICE, 1)]


@pytest.mark.parametrize("between", [HALF, NONE])
def test_not_from_a_host_copy_that_lacks_tokens(between: tuple[bool, int]) -> None:
    assert places(SPEC, HOST_ONLY, between, HOST_ONLY, TAIL)[1] == (DEVICE, 0)


def test_not_where_it_begins_or_ends_the_sequence() -> None:
    assert places(SPEC, BOTH, HOST_ONLY, HOST_ONLY, TAIL)[0] == (DEVICE, 0)


def test_not_if_the_run_is_long() -> None:
    at_once = replace(SPEC, least_run_bytes=64)
    assert places(at_once, HOST_ONLY, BOTH, HOST_ONLY, TAIL)[1] == (DEVICE, 0)
    wide = replace(SPEC, num_blocks=3)
    found = places(wide, HOST_ONLY, BOTH, BOTH, HOST_ONLY, TAIL)
    assert found[1:3] == [(DEVICE, 0), (DEVICE, 1)]


def test_not_from_a_lossy_host() -> None:
    lossy = replace(SPEC, host_codec=Int8Codec())
    assert places(lossy, HOST_ONLY, BOTH, HOST_ONLY, TAIL)[1] == (DEVICE, 0)


def test_a_check_of_guesses_is_a_decode_step() -> None:
    """So it leaves a core to the copies."""
    blocks = HOST_ONLY, BOTH, HOST_ONLY, TAIL
    assert plan_of(SPEC, *blocks).transfers.is_decode
    assert plan_of(SPEC, *blocks, num_tokens=2, guesses=(5,)).transfers.is_decode
    assert not plan_of(SPEC, *blocks, num_tokens=2).transfers.is_decode


def test_who_rests_drafts_over_what_the_step_leaves_it() -> None:
    """The device is full. The step takes a slot for the block that it writes: of a block with a
    copy on the host, of the sequence that only drafts meanwhile.
    """
    manager = BlockManager(SPEC.num_blocks, SPEC.num_host_blocks, 0)

    def table(seq_id: int, *blocks: Block) -> BlockTable:
        num_known = SIZE * len(blocks) - 1
        request = Request(SamplingParams(), 0, frozenset(), 99)
        seq = Sequence(seq_id, [1] * num_known, 1, request, RequestMetrics(0.0))
        seq.num_computed = num_known - 1
        return BlockTable(seq, SIZE, [*blocks], is_preempted=False)

    copied = [
        Block(i, num_tokens=SIZE, host_slot=manager.host.allocate(), host_len=SIZE) for i in (0, 1)
    ]
    tail, new = Block(2, num_tokens=0), Block(3)
    for block in (*copied, tail):
        block.device_slot = manager.device.allocate()
    assert manager.device.num_free == 0
    tables = {0: table(0, copied[0], tail), 1: table(1, copied[1], new)}
    runs = ScheduledSequence(tables[1].seq, 1)
    rests = ScheduledSequence(tables[0].seq, 2, num_drafts=1)
    planned = StepPlanner(SPEC, manager, lambda slot: (0, slot), StateSlots(SPEC, None, {})).plan(
        ScheduledBatch((runs,), (rests,)), tables
    )
    assert new.device_slot == 0 and copied[0].device_slot is None
    (drafts,) = planned.of_resting
    assert drafts.kept == () and drafts.tail == (tail.device_slot,)
