"""How a step reads two tiers: properties of plan_reads and slot_runs over random tables."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine.kv.step_plan import (
    DEVICE,
    HOST,
    Location,
    Part,
    SequenceSpan,
    fills_of_layers,
    plan_reads,
    slot_runs,
    unseen_parts,
    without_short_runs,
)

Tables = list[list[Location]]


@st.composite
def tables(draw: st.DrawFn) -> Tables:
    """Tables of up to 5 sequences whose beginnings may be shared; a slot stands for one content."""
    made: Tables = []
    fresh = {DEVICE: 0, HOST: 0}
    for _ in range(draw(st.integers(0, 5))):
        origin = draw(st.sampled_from([[], *made]))
        table = list(origin[: draw(st.integers(0, len(origin)))])
        for tier in draw(st.lists(st.sampled_from((DEVICE, HOST)), max_size=12)):
            table.append((tier, fresh[tier]))
            fresh[tier] += 1
        made.append(table)
    return made


def read_back(parts: list[Part], num_tables: int) -> Tables:
    """The locations each sequence reads, in the order in which it reads them."""
    seen: Tables = [[] for _ in range(num_tables)]
    for part in parts:
        for span in part.spans:
            assert span.first == len(seen[span.sequence]), "not the next block of the sequence"
            assert span.slots, "an empty span"
            slots = [part.fill[at] for at in span.slots] if part.fill else span.slots
            seen[span.sequence] += [(part.tier, slot) for slot in slots]
    return seen


@settings(derandomize=True, deadline=None)
@given(tables(), st.integers(0, 4))
def test_every_block_is_read_once_and_in_order(made: Tables, slot_blocks: int) -> None:
    parts = plan_reads(made, slot_blocks)
    assert read_back(parts, len(made)) == made
    for part in parts:
        indices = [span.sequence for span in part.spans]
        assert indices == sorted(set(indices)) and indices, "a sequence twice in a part, or none"
        assert bool(part.fill) == (part.tier == HOST and slot_blocks > 0)


@settings(derandomize=True, deadline=None)
@given(tables(), st.integers(1, 4))
def test_fills_hold_what_is_read_and_no_more(made: Tables, slot_blocks: int) -> None:
    for part in plan_reads(made, slot_blocks):
        if part.fill:
            assert len(part.fill) <= slot_blocks
            used = {at for span in part.spans for at in span.slots}
            assert used == set(range(len(part.fill))), "something brought in and not read"
            assert len(set(part.fill)) == len(part.fill), "brought in twice"


@settings(derandomize=True, deadline=None)
@given(tables(), st.integers(1, 4))
def test_a_shared_prefix_crosses_the_link_once(made: Tables, slot_blocks: int) -> None:
    """Sequences that begin alike are at the same block at the same time, so no slot comes twice."""
    fills = [slot for part in plan_reads(made, slot_blocks) for slot in part.fill]
    on_host = {slot for table in made for tier, slot in table if tier == HOST}
    assert sorted(fills) == sorted(on_host)


@settings(derandomize=True, deadline=None)
@given(tables())
def test_device_and_in_place_parts_are_as_few_as_the_tier_changes(made: Tables) -> None:
    parts = plan_reads(made, 0)
    changes = max((_changes(table) for table in made), default=0)
    assert len(parts) <= changes + 1


def _changes(table: list[Location]) -> int:
    """Runs of one tier, counted from the device."""
    tiers = [DEVICE, *(tier for tier, _ in table)]
    return 1 + sum(a != b for a, b in pairwise(tiers)) if table else 0


def test_the_smallest_cases() -> None:
    assert plan_reads([], 2) == []
    assert plan_reads([[]], 2) == []
    host = [(HOST, 5), (HOST, 6), (HOST, 7)]
    assert plan_reads([host, host[:2]], 2) == [
        Part(HOST, (SequenceSpan(0, 0, (0, 1)), SequenceSpan(1, 0, (0, 1))), (5, 6)),
        Part(HOST, (SequenceSpan(0, 2, (0,)),), (7,)),
    ]
    assert plan_reads([host], 0) == [Part(HOST, (SequenceSpan(0, 0, (5, 6, 7)),))]


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 12)))
def test_slot_runs_are_the_slots_in_as_few_copies_as_possible(slots: list[int]) -> None:
    runs = slot_runs(slots)
    rebuilt = [first + i for _, first, count in runs for i in range(count)]
    assert rebuilt == slots
    assert [at for at, _, _ in runs] == [
        sum(count for _, _, count in runs[:i]) for i in range(len(runs))
    ]
    breaks = sum(b != a + 1 for a, b in pairwise(slots))
    assert len(runs) == (breaks + 1 if slots else 0)


def test_windowed_layers_leave_out_what_lies_before_their_window() -> None:
    """Blocks of 4; sequence 0 asks from position 17 on, sequence 1, without its first two blocks,
    from position 13 on.
    """
    host = [(HOST, slot) for slot in range(4)]
    parts = plan_reads([[*host, (DEVICE, 0)], [(HOST, 1), (DEVICE, 5)]], 1, [0, 2])
    assert parts[0].spans == (SequenceSpan(0, 0, (0,)),)
    assert parts[1].spans == (SequenceSpan(0, 1, (0,)), SequenceSpan(1, 2, (0,)))
    windows = (None, 9, 2, 14)  # the first keys seen: 0 and 0; 9 and 5; 16 and 12; 4 and 0
    unseen = unseen_parts(parts, [17, 13], 4, windows)
    assert unseen == (frozenset(), {0}, {0, 1, 2, 3}, {0})
    assert fills_of_layers(parts, unseen) == ((0, 1, 2, 3), (1, 2, 3), (), (1, 2, 3))
    assert fills_of_layers(parts, [frozenset()] * 2) == fills_of_layers(parts, ()) == ()


@settings(derandomize=True, deadline=None)
@given(tables(), st.integers(0, 4), st.data())
def test_only_short_runs_between_host_blocks_are_streamed_too(
    made: Tables, least: int, data: st.DataObject
) -> None:
    for table in made:
        num = len(table)
        has_copy = data.draw(st.lists(st.booleans(), min_size=num, max_size=num))
        copies = [(HOST, 1000 + at) if there else None for at, there in enumerate(has_copy)]
        edges = [-1, *(at for at, (tier, _) in enumerate(table) if tier == HOST), num]
        expected = list(table)
        for left, right in pairwise(edges):
            run = range(left + 1, right)
            is_between = left >= 0 and right < num
            if is_between and len(run) < least and all(has_copy[at] for at in run):
                expected[run.start : run.stop] = copies[run.start : run.stop]
        assert without_short_runs(table, copies, least) == expected
