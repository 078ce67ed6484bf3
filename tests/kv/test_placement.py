"""Which blocks move between the tiers: drop order, last copies, pools that are full."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine.kv.block_manager import Block, BlockManager, block_key
from nanoengine.kv.placement import (
    HOTTER,
    SAVED_AT_ONCE,
    SWAPPED_SHARE,
    Placement,
    StepTables,
    Tables,
    drop_ranks,
)
from nanoengine.kv.step_plan import DEVICE, HOST, Load, Location, Store

SIZE = 4


def block_on(manager: BlockManager, tiers: str, num_tokens: int = SIZE) -> Block:
    """A referenced block: "d" on the device, "h" on the host, "dh" on both, "" on neither."""
    block = manager.allocate()
    block.num_tokens = num_tokens if tiers else 0
    if "d" in tiers:
        block.device_slot = manager.device.allocate()
    if "h" in tiers:
        block.host_slot, block.host_len = manager.host.allocate(), num_tokens
    return block


def step(tables: Tables, active: Tables) -> StepTables:
    """Those of `tables` that are not active are preempted."""
    return StepTables(active, preempted=[t for t in tables if not any(t is a for a in active)])


def location(block: Block) -> Location:
    if block.device_slot is not None:
        return DEVICE, block.device_slot
    assert block.host_slot is not None
    return HOST, block.host_slot


def drop_order(tables: StepTables) -> list[Block]:
    ranks = drop_ranks(tables)
    return sorted(ranks, key=ranks.__getitem__)


def references(tables: list[list[Block]]) -> dict[Block, int]:
    counts: dict[Block, int] = {}
    for table in tables:
        for block in table:
            counts[block] = counts.get(block, 0) + 1
    return counts


# -- the order


def test_drop_order_idle_before_running_own_before_shared_middle_before_first() -> None:
    manager = BlockManager(16, 16)
    shared = block_on(manager, "d")
    shared.ref_count = 2
    idle = [shared, *(block_on(manager, "d") for _ in range(3))]
    running = [shared, *(block_on(manager, "d") for _ in range(3))]
    other = [block_on(manager, "d") for _ in range(4)]
    order = drop_order(step([idle, running, other], [running, other]))
    assert order[:3] == idle[1:]  # whoever does not run, oldest first
    assert order[-2:] == [other[0], shared]  # then first blocks, and the shared first one at last
    assert set(order[3:-2]) == {*running[1:], *other[1:]}


def test_only_blocks_with_a_device_copy_are_in_the_order() -> None:
    manager = BlockManager(4, 4)
    table = [block_on(manager, "d"), block_on(manager, "h"), block_on(manager, "")]
    assert drop_order(step([table], [table])) == table[:1]


def test_a_block_counts_as_running_if_any_running_sequence_holds_it() -> None:
    manager = BlockManager(4)
    shared, idle = block_on(manager, "d"), block_on(manager, "d")
    shared.ref_count = 2
    assert drop_order(step([[shared, idle], [shared]], [[shared]])) == [idle, shared]


def test_drop_order_preempted_then_resting_then_long_then_short() -> None:
    manager = BlockManager(32)
    parked, resting, short, long = (
        [block_on(manager, "d") for _ in range(n)] for n in (2, 2, 3, 5)
    )
    order = drop_order(StepTables([short, long], [resting], [parked]))
    groups = [next(g for g in (parked, resting, short, long) if b in g) for b in order]
    assert groups == [parked] * 2 + [resting] * 2 + [long] * 5 + [short] * 3


def test_a_sequence_that_sits_out_keeps_its_slots_unless_they_are_written() -> None:
    manager = BlockManager(2, 4, 1)
    resting, streamed = block_on(manager, "dh"), block_on(manager, "h")
    tail = block_on(manager, "d")
    placement = Placement(manager, StepTables([[streamed, tail]], [[resting]]))
    placement.place([tail])
    placement.promote()
    assert resting.device_slot is not None and streamed.device_slot is None
    new = block_on(manager, "")
    placement = Placement(manager, StepTables([[streamed, tail, new]], [[resting]]))
    placement.place([new])
    assert resting.device_slot is None and tail.device_slot is not None


def test_a_short_sequence_gets_the_slots_of_a_long_one_that_streams_anyway() -> None:
    """And not of one of its own kind, so that nobody takes turns in loading the same."""
    manager = BlockManager(3, 12, 1)
    long = [block_on(manager, "h"), *(block_on(manager, "dh") for _ in range(3))]
    short, alike = ([block_on(manager, "h")] for _ in range(2))
    placement = Placement(manager, StepTables([long, short], [alike]))
    placement.place(long[-1:])
    placement.promote()
    assert placement.loads.keys() == {short[0]} and long[1].device_slot is None
    placement = Placement(manager, StepTables([alike], [short]))
    placement.promote()
    assert not placement.loads and short[0].device_slot is not None


def test_tails_are_dropped_last_whoever_holds_them() -> None:
    manager = BlockManager(32)
    parked, resting, short, long = (
        [block_on(manager, "d") for _ in range(n)] for n in (2, 2, 3, 5)
    )
    tails = {resting[1], long[4]}
    order = drop_order(StepTables([short, long], [resting], [parked], frozenset(tails)))
    assert set(order[-2:]) == tails and set(order[:2]) == set(parked)


def test_tails_come_to_the_device_over_all_but_tails() -> None:
    """A step reads them there, whatever streams beside them."""
    manager = BlockManager(3, 12, 1)
    long = [block_on(manager, "dh"), block_on(manager, "h"), block_on(manager, "h")]
    short = [block_on(manager, "dh"), block_on(manager, "dh")]
    tails = frozenset([*long[1:], short[1]])
    placement = Placement(manager, StepTables([long, short], kept=tails))
    placement.promote()
    assert [block.device_slot is None for block in (*long, *short)] == [
        True,
        False,
        False,
        True,
        False,
    ]
    assert placement.loads.keys() == {*long[1:]}
    manager = BlockManager(2, 12, 1)
    kept = [block_on(manager, "dh") for _ in range(2)]
    late = [block_on(manager, "h")]
    placement = Placement(manager, StepTables([kept, late], kept=frozenset([*kept, *late])))
    placement.promote()
    assert not placement.loads and late[0].device_slot is None


# -- moves


def test_free_slots_come_first_then_the_cache_then_referenced_blocks() -> None:
    manager = BlockManager(3, 4, 1)
    cached, held = block_on(manager, "d"), block_on(manager, "dh")
    manager.publish(cached, None, block_key(None, [1]))
    manager.release(cached)
    slots = cached.device_slot, held.device_slot
    new = [block_on(manager, "") for _ in range(3)]
    placement = Placement(manager, step([[held, *new]], [[held, *new]]))
    placement.place(new)
    assert (new[1].device_slot, new[2].device_slot) == slots
    # The cached block went to the host, where there is room; the held one was there already.
    assert list(placement.stores.values()) == [Store(slots[0], cached.host_slot, 0, SIZE)]
    assert location(held)[0] == HOST and cached.is_on_host and cached.device_slot is None
    manager.check(references([[held, *new]]))


def test_only_what_the_host_lacks_is_stored() -> None:
    manager = BlockManager(1, 3, 1)
    tail = block_on(manager, "dh", 1)
    tail.num_tokens = 3
    new = block_on(manager, "")
    placement = Placement(manager, step([[tail], [new]], [[new]]))
    placement.place([new])
    assert list(placement.stores.values()) == [Store(0, tail.host_slot, 1, 3)]
    assert tail.is_on_host and tail.host_len == 3


def test_a_load_brings_the_computed_tokens_of_the_block() -> None:
    manager = BlockManager(2, 3, 1)
    tail = block_on(manager, "h", 3)
    placement = Placement(manager, step([[tail]], [[tail]]))
    placement.place([tail])
    assert list(placement.loads.values()) == [Load(tail.host_slot, tail.device_slot, 3)]
    assert location(tail) == (DEVICE, tail.device_slot)


def test_what_the_step_writes_stays_where_it_is() -> None:
    manager = BlockManager(2, 4, 1)
    written, other = block_on(manager, "dh", 2), block_on(manager, "dh")
    new = block_on(manager, "")
    placement = Placement(manager, step([[other, written, new]], [[other, written, new]]))
    placement.place([written, new])
    assert written.device_slot is not None and other.device_slot is None
    assert new.device_slot is not None and not placement.stores


def test_the_host_gives_up_cached_blocks_then_second_copies_never_a_last_one() -> None:
    manager = BlockManager(2, 2, 1)
    a, b = block_on(manager, "dh"), block_on(manager, "d")
    cached = block_on(manager, "h")
    manager.publish(cached, None, block_key(None, [1]))
    manager.release(cached)
    new = block_on(manager, "")
    tables = [[a, b, new]]
    # a is written, so only b can go, and it has no host copy: the cached block makes room.
    placement = Placement(manager, step(tables, tables))
    placement.place([a, new])
    assert manager.find(None, block_key(None, [1])) is None
    manager.check(references(tables))
    # Now a's second copy is all that can be given up.
    a.num_tokens = a.host_len = SIZE
    other = block_on(manager, "")
    tables[0].append(other)
    assert manager.num_available < 0  # the reserve is in use, on purpose: nothing can be moved
    placement = Placement(manager, step(tables, tables))
    placement.place([new, other])
    assert (a.device_slot is None) != (a.host_slot is None)
    manager.check(references(tables))


def test_the_host_copy_under_a_load_is_not_given_up() -> None:
    """Its slot is still read, so another block's second copy makes room."""
    manager = BlockManager(3, 3, 1)
    loaded, twice = block_on(manager, "h", 1), block_on(manager, "dh", 2)
    plain = [block_on(manager, "d") for _ in range(2)]
    new = block_on(manager, "")
    tables = [[loaded], [twice], plain, [new]]
    host_slot = loaded.host_slot
    placement = Placement(manager, step(tables, tables))
    placement.place([twice, loaded, new])
    assert placement.loads[loaded].host_slot == host_slot == loaded.host_slot
    assert twice.host_slot is None and all(block.is_on_host for block in plain)
    manager.check(references(tables))


def test_an_empty_block_leaves_the_device_without_a_copy() -> None:
    """A failed step leaves blocks with a device slot and nothing in it: no host slot for those."""
    manager = BlockManager(1, 2, 1)
    empty, tail = block_on(manager, ""), block_on(manager, "h", 1)
    empty.device_slot = manager.device.allocate()
    tables = [[empty], [tail]]
    placement = Placement(manager, step(tables, tables[1:]))
    placement.place([tail])
    assert not placement.stores and empty.device_slot is None and empty.host_slot is None
    manager.check(references(tables))


def test_neighbours_lie_next_to_each_other_on_the_host() -> None:
    manager = BlockManager(4, 12, 1)
    old = [block_on(manager, "d") for _ in range(4)]
    for slot in (manager.host.allocate(), manager.host.allocate()):
        manager.host.free(slot)  # freed in between: the last one freed would be taken first
    new = [block_on(manager, "") for _ in range(3)]
    Placement(manager, step([old, new], [new])).place(new)
    assert [block.host_slot for block in old] == [None, 1, 2, 3]


def test_undo_leaves_loaded_blocks_on_the_host_only() -> None:
    manager = BlockManager(2, 3, 1)
    tail = block_on(manager, "h", 2)
    placement = Placement(manager, step([[tail]], [[tail]]))
    placement.place([tail])
    placement.undo_loads()
    assert tail.device_slot is None and tail.is_on_host and manager.device.num_free == 2
    manager.check({tail: 1})


# -- swaps by heat


def heated(manager: BlockManager, *blocks: tuple[str, float]) -> list[Block]:
    """A sequence, by tiers and heat of each block."""
    table = [block_on(manager, tiers) for tiers, _ in blocks]
    for block, (_, heat) in zip(table, blocks, strict=True):
        block.heat = heat
    return table


def swapped(
    manager: BlockManager, table: list[Block], written: list[Block], kept: list[Block] | None = None
) -> Placement:
    """The placement of a step of this sequence alone, after swaps."""
    placement = Placement(manager, StepTables([table], kept=frozenset(kept or [])))
    placement.place(written)
    placement.swap_hot(table)
    manager.check(references([table]))
    return placement


def test_the_hottest_take_the_place_of_the_coldest_a_few_at_a_time() -> None:
    manager = BlockManager(2 + 2 * SWAPPED_SHARE, 40, 1)
    there = [("dh", 0.5 + i) for i in range(2 * SWAPPED_SHARE)]
    away = [("h", 50.0), ("h", 90.0), ("h", 70.0), ("h", 3.0)]
    table = heated(manager, ("dh", 99.0), *away, *there[::-1], ("d", 0.0))
    slots = [block.device_slot for block in (table[-2], table[-3])]
    placement = swapped(manager, table, table[-1:])
    assert list(placement.loads) == [table[2], table[3]], "the two hottest"
    assert [block.device_slot for block in (table[2], table[3])] == slots, "of the two coldest"
    assert all(block.device_slot is None for block in (table[-2], table[-3]))
    assert all(block.device_slot is not None for block in table[5:-3])
    assert not placement.stores


def test_device_blocks_before_host_blocks_get_a_copy_a_few_at_a_time() -> None:
    def saved(num_host: int, *kinds: str) -> list[int]:
        manager = BlockManager(kinds.count("d") + kinds.count("dh"), num_host, 0)
        table = heated(manager, *((kind, 1.0) for kind in kinds))
        placement = Placement(manager, StepTables([table]))
        placement.place(table[-1:])
        placement.save_between(table)
        manager.check(references([table]))
        return [table.index(block) for block in placement.stores]

    assert saved(9, "d", "dh", "h", "d", "h", "d", "d") == [0, 3]
    assert saved(9, "d", "d", "d") == [], "nothing lies on the host"
    assert saved(3, "d", "d", "h", "h", "d") == [0], "as far as the host has room"
    many = ["d"] * (SAVED_AT_ONCE + 2)
    assert saved(30, *many, "h", "d") == [*range(SAVED_AT_ONCE)]


def test_where_drafts_do_not_pay_the_most_recent_come_back_side_by_side() -> None:
    """Whatever attention looks at; the first block stays, and in the end nothing moves."""
    kinds = ["dh", "h", "dh", "h", "h", "dh", "h", "h", "dh", "h", "h", "d"]
    manager = BlockManager(5, 40, 1)
    table = heated(manager, *((kind, 9.0 * (kind == "dh")) for kind in kinds))
    moved = []
    for _ in range(5):
        placement = Placement(manager, StepTables([table]))
        placement.place(table[-1:])
        placement.swap_recent(table)
        manager.check(references([table]))
        moved.append([table.index(block) for block in placement.loads])
    there = [at for at, block in enumerate(table) if block.device_slot is not None]
    assert moved == [[10], [9], [], [], []] and there == [0, 8, 9, 10, 11]


def test_a_small_device_swaps_one_block() -> None:
    manager = BlockManager(3, 9, 1)
    table = heated(manager, ("dh", 99), ("h", 5), ("h", 9), ("dh", 1), ("d", 0))
    assert list(swapped(manager, table, table[-1:]).loads) == [table[2]]


def test_nothing_moves_for_what_is_hardly_hotter() -> None:
    for heat, moves in ((HOTTER, False), (HOTTER + 0.01, True)):
        manager = BlockManager(3, 9, 1)
        table = heated(manager, ("dh", 99), ("h", heat), ("dh", 1), ("d", 0))
        placement = swapped(manager, table, table[-1:])
        assert bool(placement.loads) == moves == (table[2].device_slot is None)


def test_the_last_block_is_not_swapped() -> None:
    """It is being filled, even if the step writes nothing to it."""
    manager = BlockManager(3, 9, 1)
    table = heated(manager, ("dh", 99), ("h", 9), ("dh", 0))
    assert not swapped(manager, table, []).loads
    manager = BlockManager(3, 9, 1)
    table = heated(manager, ("dh", 0), ("dh", 0), ("h", 9))
    assert not swapped(manager, table, []).loads


def test_the_first_block_is_swapped_like_any_other() -> None:
    manager = BlockManager(3, 9, 1)
    table = heated(manager, ("h", 9), ("dh", 1), ("d", 0))
    assert list(swapped(manager, table, table[-1:]).loads) == table[:1]


def test_what_the_step_writes_or_keeps_is_not_swapped() -> None:
    manager = BlockManager(4, 9, 1)
    table = heated(manager, ("dh", 99), ("dh", 0), ("dh", 0), ("h", 9), ("h", 7), ("d", 0))
    written, kept, hot_but_kept, hot = table[1:5]
    placement = swapped(manager, table, [written, table[-1]], [kept, hot_but_kept])
    assert not placement.loads and not placement.stores
    assert written.device_slot is not None and kept.device_slot is not None
    assert hot.device_slot is None


def test_a_block_without_kv_is_not_brought() -> None:
    manager = BlockManager(3, 9, 1)
    table = heated(manager, ("dh", 99), ("", 9), ("dh", 1), ("d", 0))
    swapped(manager, table, table[-1:])
    assert table[1].device_slot is None and table[2].device_slot is not None


def test_the_last_copy_of_a_cold_block_is_stored_or_it_stays() -> None:
    manager = BlockManager(3, 2, 1)
    table = heated(manager, ("d", 99), ("h", 9), ("d", 1), ("d", 0))
    slot = table[2].device_slot
    placement = swapped(manager, table, table[-1:])
    assert placement.stores == {table[2]: Store(slot, table[2].host_slot, 0, SIZE)}
    assert table[2].is_on_host and table[1].device_slot == slot
    manager = BlockManager(3, 1, 1)  # no host slot is left
    table = heated(manager, ("d", 99), ("h", 9), ("d", 1), ("d", 0))
    placement = swapped(manager, table, table[-1:])
    assert not placement.stores and not placement.loads
    assert table[2].device_slot is not None and table[1].device_slot is None


# -- random worlds, up to the last slot


@dataclass
class World:
    """Tables over two tiers, and what a step wants to write."""

    manager: BlockManager
    tables: list[list[Block]]
    active: list[list[Block]]
    written: list[Block]

    def check(self) -> None:
        self.manager.check(references(self.tables))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Any tables that the KV manager could have granted a step for, full pools among them.

    Its promise: written blocks fit the device, and all referenced blocks plus one more slot for
    each load fit both tiers together.
    """
    num_device, num_host = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    manager = BlockManager(num_device, num_host, 1)
    room = num_device + num_host
    tables: list[list[Block]] = []
    written: list[Block] = []
    for _ in range(draw(st.integers(1, 4))):
        origin = draw(st.sampled_from([[], *tables]))
        table = [b for b in origin[: draw(st.integers(0, len(origin)))] if b not in written]
        for block in table:
            manager.acquire(block)
        for _ in range(draw(st.integers(0, 6))):
            if room and (block := _draw_block(draw, manager)):
                room -= 1
                table.append(block)
        room -= _draw_tail(draw, manager, table, written, room)
        tables.append(table)
    _draw_cached(draw, manager)
    active = [t for t in tables if set(t) & set(written) or draw(st.booleans())]
    return World(manager, tables, active, written)


def _draw_block(draw: st.DrawFn, manager: BlockManager) -> Block | None:
    tiers = draw(st.sampled_from(["d", "h", "dh"]))
    if ("d" in tiers and not manager.device.num_free) or (
        "h" in tiers and not manager.host.num_free
    ):
        return None
    block = block_on(manager, tiers)
    if tiers == "dh":
        block.host_len = draw(st.integers(0, SIZE))
    return block


def _draw_tail(
    draw: st.DrawFn, manager: BlockManager, table: list[Block], written: list[Block], room: int
) -> int:
    """A new or partly filled block at the table's end, to be written; returns its cost in slots."""
    kind = draw(st.sampled_from(["none", "new", "empty on device", "d", "h"]))
    if kind == "none" or len(written) == manager.device.num_slots:
        return 0
    cost = 2 if kind == "h" else 1
    pool = manager.host if kind == "h" else manager.device
    if cost > room or (kind != "new" and not pool.num_free):
        return 0
    block = block_on(manager, kind if kind in "dh" else "", draw(st.integers(1, SIZE - 1)))
    if kind == "empty on device":
        block.device_slot = manager.device.allocate()
    table.append(block)
    written.append(block)
    return cost


def _draw_cached(draw: st.DrawFn, manager: BlockManager) -> None:
    """Unreferenced blocks in whatever slots are left."""
    for number in range(draw(st.integers(0, 4))):
        tiers = draw(st.sampled_from(["d", "h", "dh"]))
        if ("d" in tiers and not manager.device.num_free) or (
            "h" in tiers and not manager.host.num_free
        ):
            continue
        block = block_on(manager, tiers)
        manager.publish(block, None, block_key(None, [number]))
        manager.release(block)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(worlds(), st.booleans())
def test_every_step_that_was_granted_can_be_placed(world: World, promotes: bool) -> None:
    """Written blocks on the device, no content lost, no slot held twice, however full the pools."""
    world.check()
    before = {b: (location(b), b.num_tokens) for t in world.tables for b in t if b.num_tokens}
    host_before = {b: (b.host_slot, b.host_len) for b in before}
    placement = Placement(world.manager, step(world.tables, world.active))
    placement.place(world.written)
    if promotes:
        placement.promote()
    world.check()
    assert all(block.device_slot is not None for block in world.written)
    stored = list(placement.stores.values())
    for block, (_, num_tokens) in before.items():
        assert block.num_tokens == num_tokens, "content lost"
        assert block.device_slot is not None or block.is_on_host, "the last copy is gone"
    for block, load in placement.loads.items():
        # Read where the block was before the step, and nothing of this step overwrites that.
        assert (load.host_slot, load.num_tokens) == host_before[block]
        assert load.device_slot == block.device_slot and load.host_slot == block.host_slot
        assert load.host_slot not in {store.host_slot for store in stored}
    for block, store in placement.stores.items():
        if block in before:
            assert before[block][0] == (DEVICE, store.device_slot)
            assert store.stop == block.num_tokens == block.host_len
            slot, length = host_before[block]
            assert store.start == (length if slot == store.host_slot else 0)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(worlds())
def test_promotion_takes_slots_only_from_longer_sequences(world: World) -> None:
    """Of those that run; and no free slot is left over while blocks are on the host."""
    running = {block for table in world.active for block in table}
    placement = Placement(world.manager, step(world.tables, world.active))
    placement.place(world.written)
    on_device = {b for b in running if b.device_slot is not None}
    placement.promote()

    def shortest(block: Block) -> int:
        return min(len(table).bit_length() for table in world.active if block in table)

    lost = [shortest(block) for block in on_device if block.device_slot is None]
    gained = [shortest(b) for b in running - on_device if b.device_slot is not None]
    assert len(lost) <= len(gained) and (not lost or min(lost) > min(gained))
    if any(block.device_slot is None for block in running):
        assert not world.manager.device.num_free, "a free slot, and blocks left on the host"
    world.check()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(worlds())
def test_undo_after_any_step_leaves_everything_readable(world: World) -> None:
    held = {b: b.num_tokens for table in world.tables for b in table}
    placement = Placement(world.manager, step(world.tables, world.active))
    placement.place(world.written)
    placement.promote()
    placement.undo_loads()
    world.check()
    for block, num_tokens in held.items():
        assert block.num_tokens == num_tokens
        assert block not in placement.loads or block.is_on_host


@settings(max_examples=250, deadline=None, derandomize=True)
@given(worlds(), st.data())
def test_swaps_lose_nothing_and_only_bring_what_is_hotter_or_more_recent(
    world: World, data: st.DataObject
) -> None:
    """After any placement, for one sequence after the other, and undone if the step fails."""
    held = {b: b.num_tokens for table in world.tables for b in table}
    for block in held:
        block.heat = data.draw(st.sampled_from([0.0, 0.1, 0.2, 1.0, 5.0]))
    placement = Placement(world.manager, step(world.tables, world.active))
    placement.place(world.written)
    if data.draw(st.booleans()):
        placement.promote()
    for table in world.active:
        before = {block for block in table if block.device_slot is not None}
        placed = set(placement.loads)
        is_by_heat = data.draw(st.booleans())
        placement.swap_hot(table) if is_by_heat else placement.swap_recent(table)
        world.check()
        saved = set(placement.stores)
        placement.save_between(table)
        world.check()
        assert len(placement.stores.keys() - saved) <= SAVED_AT_ONCE
        after = {block for block in table if block.device_slot is not None}
        gone, come = before - after, after - before
        assert len(gone) == len(come) <= max(1, len(before) // SWAPPED_SHARE)
        assert come == {*placement.loads} - placed
        assert not (gone | come) & {*table[-1:], *world.written, *placed}
        if gone and is_by_heat:
            assert min(b.heat for b in come) > HOTTER * min(b.heat for b in gone)
        elif gone:
            assert min(map(table.index, come)) > min(map(table.index, gone)) > 0
    for block, num_tokens in held.items():
        assert block.num_tokens == num_tokens, "content lost"
        assert not num_tokens or block.device_slot is not None or block.is_on_host
    if data.draw(st.booleans()):
        placement.undo_loads()
        world.check()


def test_a_second_copy_of_another_block_counts_as_room() -> None:
    """Both tiers full, but one block is there twice: its host slot is taken."""
    manager = BlockManager(2, 2, 1)
    twice, single, hosted = (block_on(manager, tiers) for tiers in ("dh", "d", "h"))
    new = block_on(manager, "")
    tables = [[twice], [single], [hosted], [new]]
    placement = Placement(manager, step(tables, tables))
    placement.place([twice, new])
    assert single.is_on_host and twice.host_slot is None and new.device_slot is not None
    manager.check(references(tables))


def test_without_room_for_a_new_block_the_fault_is_named() -> None:
    """One block more than the promise allows: an assertion, not a silent overwrite."""
    manager = BlockManager(1, 1, 0)
    tables = [[block_on(manager, "d")], [block_on(manager, "h")], [block_on(manager, "")]]
    with pytest.raises(AssertionError, match="no device slot"):
        Placement(manager, step(tables, tables)).place(tables[2])
