"""Plans of draft steps against a naive model: what a draft reads, where it writes, who drafts."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shadow import VOCAB, HeldDevice
from shadow_drafts import Adversary, DraftingEngine

from nanoengine.kv import draft_plan
from nanoengine.kv.draft_plan import DraftReads, kept_blocks, plan_draft
from nanoengine.kv.kv_memory import KVMemory
from nanoengine.kv.kv_spec import KVSpec
from nanoengine.kv.step_kv import StepKV
from nanoengine.kv.step_plan import DEVICE, StepTransfers, Store


@dataclass(frozen=True)
class Case:
    """A sequence whose newest token is at `start`, and the device slot of each of its blocks (None:
    it has none).
    """

    size: int
    start: int
    num_drafts: int
    slots: list[int | None]

    def reads(self, index: int) -> DraftReads:
        first = self.start // self.size
        kept = [slot for slot in self.slots[:first] if slot is not None]
        tail = [slot for slot in self.slots[first:] if slot is not None]
        return DraftReads(index, self.start, self.num_drafts, tuple(kept), tuple(tail))

    def keys(self, number: int) -> list[int]:
        """Positions of the keys that draft `number` sees: all up to its own that are there."""
        positions = range(self.start + number + 1)
        return [at for at in positions if self.slots[at // self.size] is not None]

    def place(self, position: int) -> tuple[int | None, int]:
        return self.slots[position // self.size], position % self.size


@st.composite
def cases(draw: st.DrawFn, size: int) -> Case:
    start, num_drafts = draw(st.integers(0, 40)), draw(st.integers(1, 9))
    num_blocks = -(-(start + 1 + num_drafts) // size)
    all_slots = draw(st.permutations(range(num_blocks)))
    is_there = draw(st.lists(st.booleans(), min_size=num_blocks, max_size=num_blocks))
    slots = [
        slot if index >= start // size or is_there[index] else None
        for index, slot in enumerate(all_slots)
    ]
    return Case(size, start, num_drafts, slots)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data(), st.integers(1, 8), st.integers(0, 3))
def test_a_draft_sees_what_is_there_up_to_itself(
    data: st.DataObject, size: int, padding: int
) -> None:
    batch = data.draw(st.lists(cases(size), min_size=1, max_size=4), label="batch")
    number = data.draw(st.integers(0, min(case.num_drafts for case in batch) - 1), label="number")
    reads = [case.reads(index) for index, case in enumerate(batch)]
    num_rows = padding and len(batch) + padding - 1
    plan = plan_draft(reads, number, size, num_rows)
    assert (plan.num_tokens, plan.num_rows) == (len(batch), num_rows)
    assert plan.transfers == StepTransfers() and not plan.unseen
    (part,) = plan.reads
    assert part.tier == DEVICE and not part.fill
    assert plan.write_slots == tuple(write.slot for write in plan.writes)
    each = zip(batch, reads, part.spans, plan.writes, strict=True)
    for row, (case, read, span, write) in enumerate(each):
        places = [(slot, offset) for slot in span.slots for offset in range(size)]
        num_keys = read.num_keys(number, size)
        assert places[:num_keys] == [case.place(position) for position in case.keys(number)]
        assert len(places) - num_keys < size, "a block without a key is read"
        assert (span.sequence, span.first) == (row, 0)
        assert (write.slot, write.offset) == case.place(case.start + number)
        assert (write.row, write.num_tokens) == (row, 1)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([None, 0.0, 0.1, 0.2]), max_size=20), st.integers(1, 12))
def test_the_first_the_newest_and_the_hottest_blocks_are_kept(
    heat: list[float | None], most: int
) -> None:
    kept = kept_blocks(heat, most)
    there = [index for index, warmth in enumerate(heat) if warmth is not None]
    left_out = [index for index in there if index not in kept]
    assert kept == [index for index in there if index not in left_out]
    assert len(kept) == min(most, len(there))
    if left_out:
        assert kept[0] == there[0] and there[len(there) - most // 2 :] == kept[most - most // 2 :]
        hottest = kept[1 : most - most // 2]
        ranked = sorted(left_out + hottest, key=lambda index: (heat[index], index))
        assert sorted(ranked[len(left_out) :]) == hottest, "the coldest go, older ones first"


def test_drafts_read_no_more_than_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all that is on the device, what kept_blocks says."""
    monkeypatch.setattr(draft_plan, "MAX_DRAFT_TOKENS", 5 * 2)
    engine = DraftingEngine(11, 40, 2, 2, block_size=2, copies="inline", adversary=Adversary(0, 3))
    engine.most_kept = 5
    engine.add([1, 0, 2] * 10, 9)
    engine.drain()
    assert engine.adversary.counts["drafts"]
    engine.close()


@pytest.mark.parametrize("device_blocks", [8, 14])
def test_a_draft_writes_to_no_shared_block(device_blocks: int) -> None:
    """A sequence that lost its blocks finds all its tokens in the cache, its newest one too, on the
    host or on the device. The step does not store that one's KV: what a draft wrote would stay.
    """
    adversary = Adversary(1, 3)
    engine = DraftingEngine(
        device_blocks, 40, 3, 2, block_size=1, copies="inline", adversary=adversary
    )
    prompt = [token % VOCAB for token in range(1, 9)]
    engine.add(prompt, 12)
    for _ in range(3):
        engine.step()
    late = engine.add(prompt, 12)
    for _ in range(3):
        engine.step()
    seq = engine.scheduler.running[-1]
    assert seq.seq_id == late and seq.num_output_tokens > 1
    engine.scheduler.preempt(seq)
    while engine.kv._reclaim(besides=-1):
        pass
    batch = engine.step()
    (item,) = [item for item in batch.items if item.seq is seq]
    assert len(item.guesses) > 0, "it asked for drafts"
    assert item.start < engine.kv.tables[late].num_shared_tokens
    engine.drain()
    engine.close()


def test_a_draft_is_not_replayed_over_a_store_under_way() -> None:
    """Its tape would not wait: the store may still read the slot that the draft writes."""
    device = HeldDevice()
    memory = KVMemory(KVSpec(((1, 3),) * 2, 4, 4, torch.float32, 6, 2, 2), device)
    assert memory.offload is not None
    memory.start(StepTransfers(stores=(Store(1, 5, 0, 2),))).finish()
    draft = DraftReads(0, start=6, num_drafts=2, kept=(0,), tail=(1,))
    plan = plan_draft([draft], 0, block_size=4, num_rows=0)
    assert StepKV.open(plan, memory).replay_key() is None
    device.synchronize()
    assert StepKV.open(plan, memory).replay_key() is not None
    memory.close()
