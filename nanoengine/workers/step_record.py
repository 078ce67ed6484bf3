"""StepRecord: what every rank runs in one step, and its form between processes: int32 numbers.

Rank 0 plans; the others have no requests, no block tables and no placement. What depends on time is
decided in the record, so that all ranks do the same. Knows no tensors and no channel.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import TypeVar

import numpy as np

from nanoengine.errors import EngineError
from nanoengine.kv.step_plan import (
    Load,
    Part,
    SequenceSpan,
    SlotWrite,
    StepPlan,
    StepTransfers,
    Store,
)

MAGIC, VERSION = 0x4345524E, 4
NUM_BYTES = 4

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What every rank runs in one step.

    token_ids, positions: one of each row; on a GPU none, as they follow by broadcast. lengths: as
    in ForwardContext. may_replay: whether all ranks may replay an earlier step of the same layout
    in its place. last_rows: as in ForwardContext.
    """

    plan: StepPlan
    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    lengths: tuple[tuple[int, int], ...]
    may_replay: bool
    last_rows: tuple[int, ...] | None = None


def encode(record: StepRecord) -> bytes:
    """The record as little-endian int32. Raises EngineError for a number that does not fit."""
    plan, moves = record.plan, record.plan.transfers
    numbers = [MAGIC, VERSION, plan.num_tokens, plan.num_rows, plan.num_padding]
    numbers += (moves.is_decode, record.may_replay)
    numbers += _rows(plan.writes)
    numbers += _list(plan.write_slots)
    numbers.append(len(plan.reads))
    for part in plan.reads:
        numbers += (part.tier, *_list(part.fill))
        numbers += _rows([(s.sequence, s.first, len(s.slots)) for s in part.spans])
        for span in part.spans:
            numbers += span.slots
    numbers += _lists([sorted(hidden) for hidden in plan.unseen])
    numbers += _list(plan.state_slots)
    numbers += _rows(moves.stores)
    numbers += _rows(moves.loads)
    numbers += _lists(moves.fills)
    numbers += _lists(moves.fills_of)
    numbers += _rows(moves.block_ids.items())
    numbers += _rows(record.lengths)
    numbers += _lists([] if record.last_rows is None else [record.last_rows])
    numbers += _list(record.positions)
    numbers += _list(record.token_ids)
    try:
        return struct.pack(f"<{len(numbers)}i", *numbers)
    except struct.error as error:
        raise EngineError(f"a number of a step does not fit 32 bits: {error}") from error


def decode(body: bytes) -> StepRecord:
    """The record that `encode` wrote. Raises EngineError if it is damaged or of another version."""
    if len(body) % NUM_BYTES:
        raise _damaged(f"it has {len(body)} bytes")
    reader = _Reader(body)
    found = reader.number(), reader.number()
    if found != (MAGIC, VERSION):
        raise _damaged(f"it begins with {found}, and not with {(MAGIC, VERSION)}")
    num_tokens, num_rows, num_padding = (reader.number() for _ in range(3))
    is_decode, may_replay = reader.flag(), reader.flag()
    plan = StepPlan(
        num_tokens,
        num_rows,
        writes=tuple(map(SlotWrite, *reader.columns(4))),
        write_slots=reader.numbers(),
        reads=reader.items(reader.part),
        unseen=tuple(map(frozenset, reader.lists())),
        state_slots=reader.numbers(),
        transfers=StepTransfers(
            stores=tuple(map(Store, *reader.columns(4))),
            loads=tuple(map(Load, *reader.columns(3))),
            fills=reader.lists(),
            fills_of=reader.lists(),
            block_ids=dict(reader.pairs()),
            is_decode=is_decode,
        ),
        num_padding=num_padding,
    )
    lengths = tuple(reader.pairs())
    last_rows = reader.lists()
    positions = reader.numbers()
    reader.refuse_negative()
    token_ids = reader.numbers()
    reader.refuse_rest()
    if len(token_ids) != len(positions):
        raise _damaged(f"it has {len(token_ids)} tokens at {len(positions)} positions")
    if len(last_rows) > 1:
        raise _damaged(f"it has {len(last_rows)} lists of last rows")
    return StepRecord(plan, token_ids, positions, lengths, may_replay, *last_rows)


def _list(numbers: Collection[int]) -> tuple[int, ...]:
    return len(numbers), *numbers


def _lists(lists: Collection[Collection[int]]) -> tuple[int, ...]:
    return len(lists), *chain.from_iterable(map(_list, lists))


def _rows(rows: Collection[Iterable[int]]) -> tuple[int, ...]:
    return len(rows), *chain.from_iterable(rows)


def _damaged(what: str) -> EngineError:
    return EngineError(f"a damaged record of a step: {what}")


class _Reader:
    """Takes numbers in order. Raises EngineError where there are fewer than it should take."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._numbers: tuple[int, ...] = struct.unpack(f"<{len(body) // NUM_BYTES}i", body)
        self._at = 0

    def _pass(self, count: int) -> int:
        """Go behind the next `count` numbers; where they begin."""
        start, self._at = self._at, self._at + count
        if not start <= self._at <= len(self._numbers):
            raise _damaged(f"{count} numbers at {start} of {len(self._numbers)}")
        return start

    def _take(self, count: int) -> tuple[int, ...]:
        return self._numbers[self._pass(count) : self._at]

    def number(self) -> int:
        return self._take(1)[0]

    def flag(self) -> bool:
        number = self.number()
        if number not in (0, 1):
            raise _damaged(f"{number} at {self._at - 1}, where 0 or 1 should be")
        return number == 1

    def numbers(self) -> tuple[int, ...]:
        return self._take(self.number())

    def items(self, item: Callable[[], Item]) -> tuple[Item, ...]:
        """As many as the next number says; each takes a number or more, or fails."""
        return tuple(item() for _ in range(self.number()))

    def lists(self) -> tuple[tuple[int, ...], ...]:
        return self.items(self.numbers)

    def columns(self, width: int) -> list[tuple[int, ...]]:
        """Of as many rows of `width` numbers as the next number says."""
        numbers = self._take(self.number() * width)
        return [numbers[column::width] for column in range(width)]

    def pairs(self) -> Iterator[tuple[int, int]]:
        return zip(*self.columns(2), strict=True)

    def part(self) -> Part:
        tier, fill = self.number(), self.numbers()
        indices, firsts, counts = self.columns(3)
        # The slots of all spans lie end to end.
        cuts = pairwise(accumulate(counts, initial=self._pass(sum(counts))))
        slots = [self._numbers[start:stop] for start, stop in cuts]
        return Part(tier, tuple(map(SequenceSpan, indices, firsts, slots)), fill)

    def refuse_negative(self) -> None:
        """Raise EngineError if a number that was taken is negative."""
        # By NumPy in 5 us; Python's min takes a third of all the time.
        if np.frombuffer(self._body, "<i4", self._at).min() < 0:
            raise _damaged("a negative number")

    def refuse_rest(self) -> None:
        """Raise EngineError if numbers are left."""
        if left := len(self._numbers) - self._at:
            raise _damaged(f"{left} numbers more than it needs")
