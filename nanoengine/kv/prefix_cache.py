"""PrefixCache: full blocks that a new sequence finds by content, instead of computing them again.

A block is published once it is full and computed. While it is computed it is announced, and other
sequences with the same prefix wait for it. Knows blocks and tables, no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nanoengine.kv.block_manager import Block, BlockManager
from nanoengine.kv.block_table import BlockTable
from nanoengine.kv.kv_spec import KVSpec
from nanoengine.kv.placement import device_slot
from nanoengine.sequence import Sequence as Request


@dataclass(frozen=True, slots=True)
class Start:
    """What a sequence begins with: blocks whose KV is there, of which the first `num_released` are
    not needed; prompt_owner: the table whose prompt it shares.
    """

    blocks: list[Block]
    num_released: int
    prompt_owner: BlockTable | None = None

    @property
    def num_idle(self) -> int:
        """Blocks that no table holds yet: to hold them takes room."""
        return sum(not block.ref_count for block in self.blocks[self.num_released :])


@dataclass(slots=True)
class PrefixHits:
    """Tokens of the prompts admitted so far, those of them that were looked up, and those of these
    that were found. A prompt counts once, however many completions or beams share it.
    """

    num_tokens: int = 0
    num_looked_up: int = 0
    num_cached: int = 0


class PrefixCache:
    """Looks blocks up, announces and publishes them; disabled, it does none of this."""

    def __init__(
        self,
        blocks: BlockManager,
        spec: KVSpec,
        is_enabled: bool,
        num_resumable: Callable[[Sequence[Block]], int],
    ) -> None:
        """num_resumable: how many of these consecutive blocks a sequence can begin with."""
        self._num_resumable = num_resumable
        self._blocks = blocks
        self._spec = spec
        self._size = spec.block_size
        self._is_enabled = is_enabled
        self.hits = PrefixHits()

    def find_start(self, table: BlockTable, tables: Mapping[int, BlockTable]) -> Start | None:
        """What the sequence begins with; None: another one is computing what it needs next."""
        if table.blocks:  # preempted: it goes on with what it still holds
            return Start(table.blocks, table.num_released)
        owner = self._prompt_owner(table, tables)
        if owner is not None:
            if owner.seq.num_computed < table.seq.num_prompt_tokens:
                return None
            hits = owner.blocks[: table.seq.num_prompt_tokens // self._size]
        else:
            hits = self._lookup(table)
            if any(map(self._blocks.is_in_flight, table.keys[len(hits) : len(hits) + 1])):
                return None
            table.known = hits
            if self._spec.num_states:  # the last token is computed: its logits give the next
                hits = hits[: (table.seq.num_tokens - 1) // self._size]
            hits = hits[: self._num_resumable(hits)]
        return Start(hits, self._spec.first_needed(self._num_found(table.seq, len(hits))), owner)

    def adopt(self, table: BlockTable, start: Start) -> None:
        """Take references to the blocks that the sequence begins with. Those that its windows have
        passed only count as used: the prefix is found through them.
        """
        seq, size, hits = table.seq, self._size, start.blocks
        self._blocks.touch(hits[: start.num_released])
        for block in hits[start.num_released :]:
            self._blocks.acquire(block)
        table.adopt(hits, start.num_released)
        table.num_shared_tokens = len(hits) * size
        table.commit(self._num_found(seq, len(hits)))
        if seq.metrics.first_scheduled_time is None:
            seq.num_cached = seq.num_computed
            if not seq.request.index:
                self.hits.num_tokens += seq.num_tokens
                self.hits.num_looked_up += seq.num_tokens if self._looks_up(seq) else 0
                self.hits.num_cached += seq.num_cached
            seq.num_cached_on_host = sum(
                min(size, seq.num_computed - index * size)
                for index, block in enumerate(hits)
                if block.device_slot is None
            )

    def announce(self, table: BlockTable) -> None:
        """Sequences with the same prefix may wait for the blocks that this one will compute."""
        if self._is_enabled:
            keys = table.first_keys(table.seq.num_tokens // self._size)
            table.num_announced = len(keys)
            for key in keys[len(table.published) :]:
                self._blocks.promise(key, table.seq.seq_id)

    def withdraw(self, table: BlockTable) -> None:
        """Take back what the sequence has announced and not computed."""
        for key in table.keys[len(table.published) : table.num_announced]:
            self._blocks.withdraw(key, table.seq.seq_id)
        table.num_announced = 0

    def publish(self, table: BlockTable, num_blocks: int) -> None:
        """Publish the first `num_blocks` blocks, which are full and computed."""
        if not self._is_enabled:
            return
        keys = table.first_keys(num_blocks)
        for index in range(len(table.published), num_blocks):
            parent = table.published[-1] if table.published else None
            table.published.append(self._blocks.publish(table.blocks[index], parent, keys[index]))
            self._blocks.withdraw(keys[index], table.seq.seq_id)

    def share_prompt(self, table: BlockTable, owner: BlockTable) -> tuple[int, int, int] | None:
        """Let the table begin with the full blocks of its owner's prompt.

        If the prompt ends within a block, the sequence writes to that block and needs a copy.
        Returns the device slots to copy from and to, and how many tokens; None if there is nothing
        to copy, or no free slot: the sequence then computes that part of the prompt again.
        """
        seq = table.seq
        index, num_tokens = divmod(seq.num_prompt_tokens, self._size)
        table.published, table.keys = owner.published[:index], owner.keys[:index]
        if not num_tokens or owner.blocks[index].device_slot is None:
            return None
        slot = self._blocks.idle_device_slot()
        if slot is None:
            return None
        copy = table.blocks[index]
        copy.device_slot, copy.num_tokens = slot, num_tokens
        table.num_shared_tokens = seq.num_prompt_tokens
        table.commit(min(seq.num_prompt_tokens, seq.num_tokens - 1))
        return device_slot(owner.blocks[index]), slot, num_tokens

    def _prompt_owner(
        self, table: BlockTable, tables: Mapping[int, BlockTable]
    ) -> BlockTable | None:
        """The table whose prompt this one shares; None when that sequence has ended, has not begun,
        or has released what is needed. A recurrent state is not shared.
        """
        owner = table.seq.prompt_owner
        if owner is None or owner.is_finished or self._spec.num_states:
            return None
        found = tables.get(owner.seq_id)
        num_found = self._num_found(table.seq, table.seq.num_prompt_tokens // self._size)
        is_released = found is not None and found.num_released > self._spec.first_needed(num_found)
        return None if is_released else found

    def _looks_up(self, seq: Request) -> bool:
        """Whether the cache serves this sequence: prompt scores need the logits of every token."""
        return self._is_enabled and not seq.request.scores_prompt

    def _lookup(self, table: BlockTable) -> list[Block]:
        """The cached blocks with which the sequence begins."""
        hits: list[Block] = []
        if self._looks_up(table.seq):
            for key in table.first_keys(table.seq.num_tokens // self._size):
                block = self._blocks.find(hits[-1] if hits else None, key)
                if block is None:
                    break
                hits.append(block)
        return hits

    def _num_found(self, seq: Request, num_hits: int) -> int:
        """Tokens that need not be computed. The last one always is: its logits give the next."""
        return min(num_hits * self._size, seq.num_tokens - 1)
