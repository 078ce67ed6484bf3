"""Blocks on two tiers: slots, references, prefix chain, LRU. Every rule of `check` can fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine.kv import block_manager
from nanoengine.kv.block_manager import Block, BlockKey, BlockManager, SlotPool, block_key


def on_device(manager: BlockManager, num_tokens: int = 1) -> Block:
    """A referenced block with KV in a device slot."""
    block = manager.allocate()
    block.device_slot, block.num_tokens = manager.device.allocate(), num_tokens
    return block


def on_host(manager: BlockManager, num_tokens: int = 1) -> Block:
    block = manager.allocate()
    block.host_slot = manager.host.allocate()
    block.num_tokens = block.host_len = num_tokens
    return block


def key(tokens: list[int], after: Block | None = None, salt: str = "") -> BlockKey:
    return block_key(after.key if after else None, tokens, salt)


def published_chain(manager: BlockManager, *contents: list[int]) -> list[Block]:
    parent, blocks = None, []
    for tokens in contents:
        block = on_device(manager)
        parent = manager.publish(block, parent, key(tokens, parent))
        blocks.append(block)
    return blocks


def test_free_and_referenced_add_up() -> None:
    manager = BlockManager(3)
    a, b = on_device(manager), on_device(manager)
    manager.check({a: 1, b: 1})
    assert manager.num_available == 1 and manager.device.num_free == 1
    manager.release(a)
    manager.check({b: 1})
    assert manager.num_available == 2 and manager.device.num_free == 2
    with pytest.raises(AssertionError, match="miscounted"):
        manager.check({})


def test_capacity_counts_both_tiers_less_the_reserve() -> None:
    assert BlockManager(3, 5, 2).num_available == 6
    assert BlockManager(3, 0, 2).num_available == 3  # nothing moves, nothing is held back
    manager = BlockManager(1, 2, 1)
    a, b = on_device(manager), on_host(manager)
    assert manager.num_available == 0
    manager.check({a: 1, b: 1})


def test_a_published_block_is_found_under_its_parent_only() -> None:
    manager = BlockManager(4)
    a, b = published_chain(manager, [1, 2], [3, 4])
    assert manager.find(None, key([1, 2])) is a
    assert manager.find(a, key([3, 4], a)) is b
    assert manager.find(None, key([3, 4])) is None
    assert manager.find(a, key([3, 5], a)) is None


def test_a_hash_collision_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a digest that is always the same, only tokens and parent keep prompts apart."""
    monkeypatch.setattr(block_manager, "chain_digest", lambda before, tokens: b"same")
    manager = BlockManager(4)
    a = on_device(manager)
    manager.publish(a, None, key([1, 2]))
    assert manager.find(None, key([9, 9])) is None
    assert manager.find(a, key([1, 2], a)) is None
    assert manager.find(None, key([1, 2])) is a


def test_equal_content_is_published_once() -> None:
    manager = BlockManager(4)
    a, b = on_device(manager), on_device(manager)
    assert manager.publish(a, None, key([1])) is a
    assert manager.publish(b, None, key([1])) is a
    manager.release(b)
    assert not list(manager.cached) and manager.num_available == 3
    manager.check({a: 1})


def test_the_cache_is_ordered_by_release() -> None:
    """On both tiers: what was released first goes first; a block in use again is not in it."""
    manager = BlockManager(3, 3)
    a, b = published_chain(manager, [1], [2])
    c = on_host(manager)
    manager.publish(c, b, key([3], b))
    for block in (c, b, a):
        manager.release(block)
    assert list(manager.cached) == [c, b, a]
    assert manager.oldest_on_device is b
    manager.check({})
    manager.acquire(b)
    assert list(manager.cached) == [c, a] and manager.oldest_on_device is a
    manager.check({b: 1})


def test_an_evicted_block_is_forgotten_and_its_slots_are_free() -> None:
    manager = BlockManager(3, 3)
    a, b = published_chain(manager, [1], [2])
    b.host_slot, b.host_len = manager.host.allocate(), 1
    manager.release(b)
    manager.evict(b)
    assert manager.find(a, key([2], a)) is None
    assert manager.find(None, key([1])) is a
    assert (manager.device.num_free, manager.host.num_free) == (2, 3)
    assert (b.device_slot, b.host_slot, b.num_tokens, b.host_len) == (None, None, 0, 0)
    manager.check({a: 1})


def test_nothing_is_chained_under_an_evicted_parent() -> None:
    manager = BlockManager(2)
    a = published_chain(manager, [1])[0]
    manager.release(a)
    manager.evict(a)
    child = on_device(manager)
    assert manager.publish(child, a, key([2], a)) is child
    assert child.key is None
    manager.check({child: 1})


@pytest.mark.parametrize("is_used", [False, True])
def test_a_block_whose_parent_is_gone_does_not_keep_the_next_one_from_being_found(
    is_used: bool,
) -> None:
    manager = BlockManager(8)
    a, b, c = published_chain(manager, [1], [2], [3])
    held = [b, c] if is_used else []
    for block in (a, b, c):
        if block not in held:
            manager.release(block)
    manager.evict(a)
    again = published_chain(manager, [1], [2], [3])
    for parent, block, tokens in zip((None, *again), again, ([1], [2], [3]), strict=False):
        assert manager.find(parent, key(tokens, parent)) is block
    assert not manager.cached and b.key is None and c.key is None
    manager.check(dict.fromkeys([*held, *again], 1))
    assert manager.device.num_free == 5 - len(held)


def test_an_unpublished_block_stays_with_its_table() -> None:
    manager = BlockManager(3)
    a, b = published_chain(manager, [1], [2])
    manager.release(b)
    manager.evict(b)
    manager.unpublish(a)
    assert manager.find(None, key([1])) is None
    manager.check({a: 1})
    manager.release(a)
    manager.check({})
    assert manager.num_available == manager.device.num_free == 3


def test_the_last_copy_cannot_be_dropped() -> None:
    manager = BlockManager(2, 2)
    block = on_host(manager)
    with pytest.raises(AssertionError, match="last copy"):
        manager.drop_host(block)
    manager = BlockManager(2, 2)
    block = on_device(manager)
    manager.device.free(manager.drop_device(block))  # its own rule: the host copy is complete
    with pytest.raises(AssertionError, match="last copy"):
        manager.check({block: 1})


def test_a_block_on_both_tiers_can_lose_either() -> None:
    manager = BlockManager(2, 2)
    block = on_device(manager, 3)
    block.host_slot, block.host_len = manager.host.allocate(), 2
    assert not block.is_on_host
    block.host_len = 3
    assert block.is_on_host
    manager.host.free(manager.drop_host(block))
    assert (block.host_slot, block.host_len) == (None, 0) and not block.is_on_host
    manager.check({block: 1})


def test_slots_are_taken_next_to_each_other_where_that_is_asked_for() -> None:
    pool = SlotPool(4)
    assert pool.allocate(2) == 2
    assert pool.allocate(2) == 0  # taken already: another one
    assert pool.allocate(3) == 3 and pool.allocate() == 1 and pool.allocate() is None
    pool.free(3)
    assert pool.allocate(99) == 3


class PlainPool:
    """What SlotPool must do, by a dict of all free slots."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.slots = dict.fromkeys(range(num_slots - 1, -1, -1))  # the last one is taken first

    @property
    def num_free(self) -> int:
        return len(self.slots)

    def allocate(self, preferred: int | None = None) -> int | None:
        if preferred is not None and preferred in self.slots:
            del self.slots[preferred]
            return preferred
        return self.slots.popitem()[0] if self.slots else None

    def free(self, slot: int) -> None:
        self.slots[slot] = None

    def check(self, held: Iterable[int]) -> None:
        slots = list(held)
        assert len(set(slots)) == len(slots), "a slot is held twice"
        assert not self.slots.keys() & set(slots), "a slot is both free and held"
        assert len(self.slots) + len(slots) == self.num_slots, "slots leaked"


Pool = SlotPool | PlainPool
SLOTS = st.integers(-1, 9)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.none() | SLOTS),
        st.tuples(st.just("give"), SLOTS),
        st.tuples(st.just("give back"), SLOTS),
        st.tuples(st.just("check"), st.lists(SLOTS, max_size=9)),
        st.tuples(st.just("full"), st.tuples(st.integers(0, 4), st.lists(st.none() | SLOTS))),
    ),
    max_size=60,
)


def complaint(pool: Pool, held: Iterable[int]) -> str:
    """What `check` says of the pool."""
    try:
        pool.check(held)
    except AssertionError as error:
        return str(error).partition("\n")[0]
    return ""


def plainly_full(pool: PlainPool, num_kept: int, asked: list[int | None]) -> list[int | None]:
    """The slots that are taken while all free ones but `num_kept` are."""
    kept = [pool.allocate() for _ in range(min(num_kept, pool.num_free))]
    taken = [pool.allocate() for _ in range(pool.num_free)]
    for slot in reversed(kept):
        pool.free(slot)
    found = [pool.allocate(preferred) for preferred in asked]
    left = [pool.allocate() for _ in range(pool.num_free)]
    for slot in reversed([*left, *taken]):
        pool.free(slot)
    return found


def full(pool: SlotPool, num_kept: int, asked: list[int | None]) -> list[int | None]:
    with pool.all_taken_but(num_kept):
        return [pool.allocate(preferred) for preferred in asked]


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.integers(0, 8), STEPS)
def test_slots_come_in_the_order_of_a_dict_of_all(num_slots: int, steps: list[tuple]) -> None:
    """Any steps, misuse too: slots freed twice, never taken, or out of range."""
    pool, plain = SlotPool(num_slots), PlainPool(num_slots)
    held: list[int] = []
    for step, asked in steps:
        if step == "take":
            slot = pool.allocate(asked)
            assert slot == plain.allocate(asked)
            held += [] if slot is None else [slot]
        elif step == "full":
            found = full(pool, *asked)
            assert found == plainly_full(plain, *asked)
            held += [slot for slot in found if slot is not None]
        elif step == "check":
            assert complaint(pool, asked) == complaint(plain, asked)
        elif step == "give" or held:
            slot = held.pop(asked % len(held)) if step == "give back" else asked
            pool.free(slot)
            plain.free(slot)
        assert pool.num_free == plain.num_free
        assert complaint(pool, held) == complaint(plain, held)
    while (slot := plain.allocate()) is not None:
        assert pool.allocate() == slot
    assert pool.allocate() is None


def test_a_pool_of_a_billion_slots_costs_nothing() -> None:
    start = time.process_time()
    manager = BlockManager(10**9, 10**9, 2)
    pool = manager.device
    assert (pool.allocate(), pool.allocate(10**9 - 1), pool.allocate()) == (0, 10**9 - 1, 1)
    assert pool.num_free == 10**9 - 3
    with pool.all_taken_but(1):
        assert (pool.allocate(5), pool.allocate()) == (2, None)
    pool.free(10**9 - 1)
    assert pool.allocate() == 10**9 - 1 and pool.allocate() == 3
    with pytest.raises(AssertionError, match="leaked"):
        manager.check({})
    assert time.process_time() - start < 2


def test_slots_freed_while_the_others_are_hidden_are_taken_first() -> None:
    pool = SlotPool(4)
    assert [pool.allocate() for _ in range(2)] == [0, 1]
    with pool.all_taken_but(1):
        assert pool.allocate() == 2 and pool.allocate() is None
        pool.free(0)
        assert pool.num_free == 1
    assert [pool.allocate() for _ in range(3)] == [0, 3, None]
    pool.check([0, 1, 2, 3])


def _lose_a_slot(manager: BlockManager, a: Block, b: Block) -> None:
    manager.device.allocate()


def _hold_a_slot_twice(manager: BlockManager, a: Block, b: Block) -> None:
    b.device_slot = a.device_slot


def _give_back_a_held_slot(manager: BlockManager, a: Block, b: Block) -> None:
    manager.device.free(a.device_slot or 0)


def _forget_a_reference(manager: BlockManager, a: Block, b: Block) -> None:
    a.ref_count += 1


def _claim_a_longer_host_copy(manager: BlockManager, a: Block, b: Block) -> None:
    a.host_slot, a.host_len = manager.host.allocate(), a.num_tokens + 1


def _release_without_caching(manager: BlockManager, a: Block, b: Block) -> None:
    b.ref_count -= 1
    manager._num_referenced -= 1


BREAKAGES: dict[str, Callable[[BlockManager, Block, Block], None]] = {
    "slots leaked": _lose_a_slot,
    "held twice": _hold_a_slot_twice,
    "both free and held": _give_back_a_held_slot,
    "a reference count is off": _forget_a_reference,
    "longer than the block": _claim_a_longer_host_copy,
    "miscounted": _release_without_caching,
}


@pytest.mark.parametrize("message", BREAKAGES)
def test_check_finds_what_is_broken(message: str) -> None:
    manager = BlockManager(4, 4)
    a, b = published_chain(manager, [1], [2])
    manager.check({a: 1, b: 1})
    BREAKAGES[message](manager, a, b)
    with pytest.raises(AssertionError, match=message):
        manager.check({a: 1, b: 1})


def test_a_salt_keeps_equal_prompts_apart() -> None:
    """Also where the digests collide: the salt is compared like the tokens."""
    manager = BlockManager(4)
    a = on_device(manager)
    manager.publish(a, None, key([1], salt="x"))
    assert manager.find(None, key([1], salt="x")) is a
    assert manager.find(None, key([1])) is None and manager.find(None, key([1], salt="y")) is None
    second = key([2], a)
    assert second == block_key(a.key, [2], "y")  # only the first block is salted
    assert second.digest != block_key(key([1]), [2]).digest
    # A client chooses the salt, and a published block keeps its key.
    assert len(key([1], salt="x" * 1_000_000).tokens) < 100


def test_a_block_is_in_flight_until_its_owner_withdraws() -> None:
    manager = BlockManager(4)
    first, second = key([1]), block_key(key([1]), [2])
    manager.promise(first, owner=7)
    manager.promise(first, owner=8)  # somebody else already computes it
    assert manager.is_in_flight(first) and not manager.is_in_flight(second)
    manager.withdraw(first, owner=8)
    assert manager.is_in_flight(first)
    manager.withdraw(first, owner=7)
    manager.withdraw(first, owner=7)
    assert not manager.is_in_flight(first)


def test_an_unpublished_block_in_use_is_freed_when_it_is_released() -> None:
    manager = BlockManager(2)
    (a,) = published_chain(manager, [1])
    manager.unpublish(a)
    assert manager.find(None, key([1])) is None
    manager.check({a: 1})
    manager.release(a)
    manager.check({})
    assert manager.device.num_free == 2
