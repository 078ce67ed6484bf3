"""StepPlan: what one step does to the KV cache, in integers; and how it reads KV on two tiers.

Pure functions and frozen records, no torch. Records of which a step makes hundreds are NamedTuples:
a dataclass takes three times as long to make. A sequence's blocks are read in logical order, each
exactly once. Runs of blocks on the device are read in place; runs on the host are read through ring
fills, or in place. Sequences that share a prefix share its fills: one crossing of the link serves
them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

DEVICE, HOST = 0, 1  # segment i of the host pool is tier HOST + i
Location = tuple[int, int]  # (tier, slot)


class Store(NamedTuple):
    """Copy tokens [start, stop) of a block, all layers, from a device slot to a host slot."""

    device_slot: int
    host_slot: int
    start: int
    stop: int


class Load(NamedTuple):
    """Copy the first `num_tokens` tokens of a block, all layers, from a host to a device slot."""

    host_slot: int
    device_slot: int
    num_tokens: int


class SequenceSpan(NamedTuple):
    """Consecutive blocks of a sequence of the batch, from logical block `first` on.

    slots: where they lie in the pool; inside the ring slot if the part is a fill.
    """

    sequence: int
    first: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """What one attention call reads: spans of several sequences in one pool.

    tier: DEVICE, or HOST + i for segment i of the host pool, read in place. If `fill` is set, the
    tier is HOST, and these host slots are copied into a ring slot first.
    """

    tier: int
    spans: tuple[SequenceSpan, ...]
    fill: tuple[int, ...] = ()


class SlotWrite(NamedTuple):
    """The KV of `num_tokens` tokens of a step, from row `row` on, goes to one device slot, from
    token `offset` of the block on.
    """

    row: int
    slot: int
    offset: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepTransfers:
    """What one step moves between the tiers.

    fills: host slots of each ring fill. fills_of: for each layer the numbers of the fills that it
    reads, in order; () if every layer reads all. block_ids: which block a host slot holds, for the
    report if a copy of it fails. is_decode: one token a sequence and its guesses, so that
    copies take as long as the arithmetic of one core.
    """

    stores: tuple[Store, ...] = ()
    loads: tuple[Load, ...] = ()
    fills: tuple[tuple[int, ...], ...] = ()
    fills_of: tuple[tuple[int, ...], ...] = ()
    block_ids: Mapping[int, int] = field(default_factory=dict)
    is_decode: bool = False

    @property
    def is_none(self) -> bool:
        """Whether nothing moves."""
        return not (self.stores or self.loads or self.fills)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step does to the KV cache: StepKV opens it over a KVMemory.

    num_tokens: of the step. num_rows: the sequences that it is laid out for, those past the real
    ones without KV; 0: as many as it has. num_padding: padding rows after all others, with which
    steps with more and with fewer guesses have as many rows. write_slots: the device slots of
    `writes`, each once. state_slots: of the recurrent state of each sequence; () if the model has
    none. unseen: for each layer the numbers of `reads` that lie before its window; () if no layer
    has a window.
    """

    num_tokens: int
    num_rows: int
    writes: tuple[SlotWrite, ...]
    write_slots: tuple[int, ...]
    reads: tuple[Part, ...]
    unseen: tuple[frozenset[int], ...] = ()
    transfers: StepTransfers = StepTransfers()
    state_slots: tuple[int, ...] = ()
    num_padding: int = 0


def without_short_runs(
    table: Sequence[Location], copies: Sequence[Location | None], least: int
) -> list[Location]:
    """The table of a sequence, in which runs of fewer than `least` device blocks between host
    blocks are read from the host as well, so that one fill holds them and their neighbours.

    copies: where the host has each block; None: nowhere.
    """
    places: list[Location] = []
    runs = [[*run] for _, run in groupby(range(len(table)), lambda at: table[at][0] == DEVICE)]
    for number, run in enumerate(runs):
        on_host = [copy for at in run if (copy := copies[at]) is not None]
        is_between = 0 < number < len(runs) - 1
        is_short = table[run[0]][0] == DEVICE and len(run) < least
        keeps = not (is_between and is_short and len(on_host) == len(run))
        places += [table[at] for at in run] if keeps else on_host
    return places


def plan_reads(
    tables: Sequence[Sequence[Location]], slot_blocks: int, firsts: Sequence[int] = ()
) -> list[Part]:
    """The parts in which the blocks of each sequence are read, every sequence in logical order.

    tables: the location of each block of each sequence of the batch.
    slot_blocks: blocks that a ring slot holds; 0: host blocks are read in place.
    firsts: the logical index of the first block of each table; () if all begin with 0.
    """
    done, firsts = [0] * len(tables), firsts or [0] * len(tables)
    parts: list[Part] = []
    while tiers := {t[at][0] for at, t in zip(done, tables, strict=True) if at < len(t)}:
        for tier in sorted(tiers):
            runs = [_run(table, at, tier) for at, table in zip(done, tables, strict=True)]
            if tier != DEVICE and slot_blocks:
                begins = [at + first for at, first in zip(done, firsts, strict=True)]
                parts += _fills(runs, begins, slot_blocks)
            else:
                spans = (
                    SequenceSpan(i, firsts[i] + done[i], run) for i, run in enumerate(runs) if run
                )
                parts.append(Part(tier, tuple(spans)))
            done = [at + len(run) for at, run in zip(done, runs, strict=True)]
    return parts


def _run(table: Sequence[Location], at: int, tier: int) -> tuple[int, ...]:
    """Slots of the consecutive blocks from `at` on that lie on `tier`."""
    stop = at
    while stop < len(table) and table[stop][0] == tier:
        stop += 1
    return tuple(slot for _, slot in table[at:stop])


def _fills(runs: list[tuple[int, ...]], firsts: list[int], slot_blocks: int) -> list[Part]:
    """Cut host runs into ring fills. A slot that several sequences need next is copied once."""
    # Slots of each; and by sequence the first block of its span, and where it lies in the fill.
    fills: list[tuple[list[int], dict[int, tuple[int, list[int]]]]] = []
    served = [0] * len(runs)
    # A sequence that has released blocks begins further on: the blocks that it shares with others
    # are then in their fills.
    for index in sorted(range(len(runs)), key=firsts.__getitem__):
        run = runs[index]
        while served[index] < len(run):
            slot = run[served[index]]
            if not fills or len(fills[-1][0]) == slot_blocks:
                fills.append(([], {}))
            fill, spans = fills[-1]
            for i, other in enumerate(runs):
                if served[i] < len(other) and other[served[i]] == slot:
                    spans.setdefault(i, (firsts[i] + served[i], []))[1].append(len(fill))
                    served[i] += 1
            fill.append(slot)
    return [
        Part(
            HOST,
            tuple(SequenceSpan(i, first, tuple(at)) for i, (first, at) in sorted(spans.items())),
            tuple(fill),
        )
        for fill, spans in fills
    ]


def unseen_parts(
    parts: Sequence[Part], starts: Sequence[int], block_size: int, windows: Sequence[int | None]
) -> tuple[frozenset[int], ...]:
    """For each layer, the numbers of the parts that lie before the window of all its queries.

    starts: position of the first query of each sequence. The last part is never among them: it
    ends with the newest key of a sequence.
    """

    def unseen(window: int | None) -> frozenset[int]:
        if window is None:
            return frozenset()
        firsts = [start + 1 - window for start in starts]  # keys that the first queries see
        return frozenset(
            number
            for number, part in enumerate(parts)
            if all((s.first + len(s.slots)) * block_size <= firsts[s.sequence] for s in part.spans)
        )

    found = {window: unseen(window) for window in set(windows)}
    return tuple(found[window] for window in windows)


def fills_of_layers(
    parts: Sequence[Part], unseen: Sequence[frozenset[int]]
) -> tuple[tuple[int, ...], ...]:
    """For each layer the numbers of the fills that it reads; () if every layer reads all."""
    numbers = [number for number, part in enumerate(parts) if part.fill]
    if not any(hidden.intersection(numbers) for hidden in unseen):
        return ()
    return tuple(
        tuple(fill for fill, number in enumerate(numbers) if number not in hidden)
        for hidden in unseen
    )


def streamed_bytes(
    parts: Sequence[Part], unseen: Sequence[frozenset[int]], read_bytes: Sequence[int]
) -> dict[int, int]:
    """For each sequence that streams, the bytes that its fills copy. read_bytes: as in KVSpec."""
    streamed: dict[int, int] = {}
    hidden_of = unseen or [frozenset[int]()] * len(read_bytes)
    for number, part in enumerate(parts):
        if part.fill:
            each = zip(read_bytes, hidden_of, strict=True)
            of_a_block = sum(num_bytes for num_bytes, hidden in each if number not in hidden)
            for span in part.spans:
                before = streamed.get(span.sequence, 0)
                streamed[span.sequence] = before + of_a_block * len(span.slots)
    return streamed


def slot_runs(slots: Sequence[int]) -> list[tuple[int, int, int]]:
    """Consecutive slots as (position in `slots`, first slot, count): each is one copy."""
    runs: list[tuple[int, int, int]] = []
    for at, slot in enumerate(slots):
        if runs and slot == runs[-1][1] + runs[-1][2]:
            position, first, count = runs[-1]
            runs[-1] = (position, first, count + 1)
        else:
            runs.append((at, slot, 1))
    return runs


def store_runs(stores: Sequence[Store], block_size: int) -> list[list[Store]]:
    """Groups stores of consecutive whole blocks, consecutive on both tiers, into one copy each."""
    runs: list[list[Store]] = []
    for store in sorted(stores, key=lambda s: s.host_slot):
        last = runs[-1][-1] if runs else store
        following = Store(last.device_slot + 1, last.host_slot + 1, 0, block_size)
        if store == following and (last.start, last.stop) == (0, block_size):
            runs[-1].append(store)
        else:
            runs.append([store])
    return runs
