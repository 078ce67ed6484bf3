"""What attention gives to each block: when it is asked, and how it becomes heat."""

from __future__ import annotations

import pytest
import torch
from shadow_drafts import Adversary, DraftingEngine

from nanoengine.devices.cpu import CpuDevice
from nanoengine.kv.block_heat import WEIGHT, BlockHeat
from nanoengine.kv.block_manager import Block
from nanoengine.kv.block_table import BlockTable
from nanoengine.outputs import RequestMetrics
from nanoengine.sampling_params import SamplingParams
from nanoengine.sequence import Request, ScheduledBatch, ScheduledSequence, Sequence

DRAFTS = Adversary(0, 3)


class World:
    """Sequences of 9 tokens that decode, over tables of given blocks."""

    def __init__(self, *tables: list[Block]) -> None:
        self.heat = BlockHeat(CpuDevice(1))
        self.tables: dict[int, BlockTable] = {}
        for seq_id, blocks in enumerate(tables):
            request = Request(SamplingParams(), 0, frozenset(), 99)
            seq = Sequence(seq_id, [1] * 9, 8, request, RequestMetrics(0.0), num_computed=8)
            self.tables[seq_id] = BlockTable(seq, 4, blocks)

    def begin(self, drafts: Adversary | None = DRAFTS, num_tokens: int = 1) -> None:
        """A step of all sequences; the last of them may draft."""
        seqs = [table.seq for table in self.tables.values()]
        seqs[-1].draft_length = drafts
        items = [ScheduledSequence(seq, num_tokens) for seq in seqs]
        self.heat.begin(ScheduledBatch(tuple(items)), self.tables)

    def run(self, *mass: list[float]) -> None:
        """A whole step in which attention reports this."""
        self.begin()
        assert self.heat.mass is not None
        self.heat.mass.copy_(torch.tensor(mass))
        self.heat.end()
        self.heat.fold()


def blocks(num_blocks: int) -> list[Block]:
    return [Block(index) for index in range(num_blocks)]


def heats(table: list[Block]) -> list[float]:
    return [block.heat for block in table]


def test_only_decode_steps_of_who_may_draft_are_asked() -> None:
    world = World(blocks(2), blocks(4))
    world.begin(drafts=None)
    assert world.heat.mass is None
    world.begin(num_tokens=3)  # a prompt
    assert world.heat.mass is None
    idle = Adversary(0, 3)
    idle.pays = False
    world.begin(drafts=idle)
    assert world.heat.mass is None
    world.begin()
    assert world.heat.mass is not None
    assert world.heat.mass.dtype == torch.float32 and not world.heat.mass.any()
    assert world.heat.mass.shape == (2, 4), "a row for each sequence, a place for each block"


def test_heat_goes_towards_the_share_of_each_block() -> None:
    """Whatever the sum of what attention reports."""
    short, long = blocks(2), blocks(4)
    world = World(short, long)
    world.run([1, 3, 0, 0], [10, 0, 0, 30])
    assert heats(short) == [WEIGHT / 4, WEIGHT * 3 / 4]
    assert heats(long) == [WEIGHT / 4, 0, 0, WEIGHT * 3 / 4]
    for _ in range(20):
        world.run([0, 2, 0, 0], [0, 2, 2, 0])
    assert heats(short) == pytest.approx([0, 1], abs=1e-5)
    assert heats(long) == pytest.approx([0, 0.5, 0.5, 0], abs=1e-5)


def test_what_attention_does_not_report_leaves_numbers() -> None:
    table = blocks(3)
    world = World(table)
    world.run([0, 0, 4])
    world.run([0, 0, 0])
    assert heats(table) == [0, 0, WEIGHT * (1 - WEIGHT)]


def test_what_is_no_number_leaves_the_heat_of_others_as_it_is() -> None:
    shared = Block(0)
    world = World([shared, Block(1)], [shared, Block(2)])
    world.run([float("nan"), 1], [1, 0])
    assert shared.heat == WEIGHT
    world.run([float("inf"), 1], [1, 0])
    assert shared.heat == pytest.approx(0.625)


def test_a_shared_block_is_hot_for_whoever_looks_at_it() -> None:
    shared = Block(0)
    world = World([shared, Block(1)], [shared, Block(2)])
    world.run([0, 1], [1, 0])
    assert shared.heat == WEIGHT


def test_a_step_that_failed_says_nothing() -> None:
    table = blocks(2)
    world = World(table)
    world.begin()
    assert world.heat.mass is not None
    world.heat.mass.fill_(1)
    world.heat.fold()  # the next step; this one did not come to its end
    assert heats(table) == [0, 0] and world.heat.mass is None
    world.heat.end()
    world.heat.fold()
    assert heats(table) == [0, 0]


def test_a_step_counts_once() -> None:
    table = blocks(2)
    world = World(table)
    world.run([0, 1])
    world.heat.fold()
    assert heats(table) == [0, WEIGHT]


def test_the_blocks_are_those_of_the_step() -> None:
    """The table may have lost them, or have others, when the numbers come."""
    table = blocks(2)
    world = World(table)
    world.begin()
    assert world.heat.mass is not None
    world.heat.mass.copy_(torch.tensor([[0, 1]]))
    world.heat.end()
    left = world.tables[0].blocks.pop()
    world.tables[0].blocks += [new := Block(2)]
    world.heat.fold()
    assert (left.heat, new.heat) == (WEIGHT, 0)


@pytest.mark.parametrize("where", ["on the device", "in place", "streamed"])
def test_only_steps_that_stream_are_asked(where: str) -> None:
    """Others draft nothing."""
    num_blocks, ring = (30 if where == "on the device" else 5), (2 if where == "streamed" else 0)
    drafts = Adversary(1, 3)
    engine = DraftingEngine(num_blocks, 40, ring, ring, copies="inline", adversary=drafts)
    engine.add([1, 0, 2] * 9, 9)
    seen = []
    report = engine.report

    def noted(mass: torch.Tensor | None) -> None:
        seen.append(mass is not None)
        report(mass)

    engine.report = noted
    engine.drain()
    engine.close()
    assert any(seen) == bool(drafts.counts["drafts"]) == (where == "streamed")
    assert not seen[0], "a prompt"
