"""Blocks: exact ids, references, prefix chain, eviction order."""

from __future__ import annotations

import pytest

from nanoengine import block_manager
from nanoengine.block_manager import Block, BlockManager, pack_tokens


def published_chain(manager: BlockManager, *contents: list[int]) -> list[Block]:
    parent, blocks = None, []
    for tokens in contents:
        block = manager.allocate()
        parent = manager.publish(block, parent, pack_tokens(tokens))
        blocks.append(block)
    return blocks


def test_free_and_referenced_add_up() -> None:
    manager = BlockManager(3)
    a, b = manager.allocate(), manager.allocate()
    manager.check({a.slot: 1, b.slot: 1})
    assert manager.num_available == 1
    manager.release(a)
    manager.check({b.slot: 1})
    with pytest.raises(AssertionError, match="leaked"):
        manager.check({})


def test_a_published_block_is_found_under_its_parent_only() -> None:
    manager = BlockManager(4)
    a, b = published_chain(manager, [1, 2], [3, 4])
    assert manager.find(None, pack_tokens([1, 2])) is a
    assert manager.find(a, pack_tokens([3, 4])) is b
    assert manager.find(None, pack_tokens([3, 4])) is None
    assert manager.find(a, pack_tokens([3, 5])) is None


def test_a_hash_collision_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a digest that is always the same, only tokens and parent keep prompts apart."""
    monkeypatch.setattr(block_manager, "chain_digest", lambda parent, tokens: b"same")
    manager = BlockManager(4)
    a = manager.allocate()
    manager.publish(a, None, pack_tokens([1, 2]))
    assert manager.find(None, pack_tokens([9, 9])) is None
    assert manager.find(a, pack_tokens([1, 2])) is None
    assert manager.find(None, pack_tokens([1, 2])) is a


def test_equal_content_is_published_once() -> None:
    manager = BlockManager(4)
    a, b = manager.allocate(), manager.allocate()
    assert manager.publish(a, None, pack_tokens([1])) is a
    assert manager.publish(b, None, pack_tokens([1])) is a
    manager.release(b)
    assert manager.num_cached == 0 and manager.num_available == 3


def test_eviction_takes_the_least_recently_released() -> None:
    manager = BlockManager(3)
    a, b = published_chain(manager, [1], [2])
    manager.release(b)
    manager.release(a)
    manager.allocate()  # the one free block
    manager.allocate()  # evicts b, released first
    assert manager.find(a, pack_tokens([2])) is None
    assert manager.find(None, pack_tokens([1])) is a
    manager.acquire(a)
    manager.check({a.slot: 1, **dict.fromkeys({0, 1, 2} - {a.slot}, 1)})


def test_nothing_is_chained_under_an_evicted_parent() -> None:
    manager = BlockManager(2)
    a = published_chain(manager, [1])[0]
    manager.release(a)
    child = manager.allocate()
    manager.allocate()  # evicts a
    manager.publish(child, a, pack_tokens([2]))
    assert child.digest is None


def test_reset_forgets_used_and_unused() -> None:
    manager = BlockManager(3)
    a, b = published_chain(manager, [1], [2])
    manager.release(b)
    manager.reset_cache()
    assert manager.find(None, pack_tokens([1])) is None
    manager.check({a.slot: 1})
    manager.release(a)
    manager.check({})
    assert manager.num_available == 3
