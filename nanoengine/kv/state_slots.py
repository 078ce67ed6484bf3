"""StateSlots: which sequence has which slot of recurrent state, and how far that state has come.

Numbers alone; KVMemory holds the states. A state is of one length: unlike KV it cannot be cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nanoengine.errors import EngineError
from nanoengine.sequence import ScheduledBatch

UNKNOWN = -1  # a step has begun to change the state, and did not come to its end


class StateSlots:
    """The slots of a model with recurrent layers; of other models there are none to take."""

    def __init__(self, num_slots: int) -> None:
        """num_slots: sequences that can have a state at once; 0: the model has no such layers."""
        self.num_slots = num_slots
        self._free = list(range(num_slots))[::-1]
        self._slots: dict[int, int] = {}  # by seq_id, the one that took its slot first comes first
        self._lengths: dict[int, int] = {}  # by seq_id, the tokens behind its state

    def may_take(self, running: Iterable[int]) -> bool:
        """Whether another sequence can have a slot. running: ids of those that keep theirs."""
        return not self.num_slots or len(set(running)) < self.num_slots

    def take(self, seq_id: int, running: Iterable[int]) -> None:
        """Give a sequence a slot, if it has none: a free one, or that of another sequence, which
        does not run. A new state is of length 0.
        """
        if not self.num_slots or seq_id in self._slots:
            return
        if not self._free:
            others = [other for other in self._slots if other not in set(running)]
            if not others:
                raise EngineError("more sequences run than have a recurrent state")
            self.release(others[-1])
        self._slots[seq_id], self._lengths[seq_id] = self._free.pop(), 0

    def release(self, seq_id: int) -> None:
        """Free the slot of a sequence, if it has one."""
        slot = self._slots.pop(seq_id, None)
        if slot is not None:
            del self._lengths[seq_id]
            self._free.append(slot)

    def is_at(self, seq_id: int, num_tokens: int) -> bool:
        """Whether the next token of a sequence with `num_tokens` tokens of KV can be computed. It
        always can be from the first one on.
        """
        return not self.num_slots or not num_tokens or self._lengths.get(seq_id) == num_tokens

    def begin(self, batch: ScheduledBatch, num_rows: int) -> tuple[int, ...]:
        """A step changes the states of a batch: the slot of each sequence. Rows past them, up to
        num_rows, have the last slot, which is nobody's.
        """
        if not self.num_slots:
            return ()
        seq_ids = [item.seq.seq_id for item in batch.items]
        self._lengths.update(dict.fromkeys(seq_ids, UNKNOWN))
        slots = [self._slots[seq_id] for seq_id in seq_ids]
        return (*slots, *[self.num_slots] * (num_rows - len(slots)))

    def end(self, batch: ScheduledBatch) -> None:
        """The step has changed them all."""
        if self.num_slots:
            self._lengths |= {i.seq.seq_id: i.start + i.num_tokens for i in batch.items}

    def check(self, tables: Mapping[int, object]) -> None:
        """Raise AssertionError unless every slot is free or held once, by a sequence that lives."""
        held = [*self._slots.values()]
        assert sorted([*held, *self._free]) == list(range(self.num_slots)), "a slot is lost"
        assert self._slots.keys() <= tables.keys(), "a sequence that ended has a slot"
