"""The shadow engine with an adversarial drafter: how many drafts, which tokens, and what attention
gives to each block are drawn from a seed. So are guesses by lookup, and those of a head of the
model's own: its layer is the last one, and drafts follow its first guess.

The keys of a draft bear a mark, as real ones differ from those of the step that checks it: what a
draft leaves behind shows, even if its token was right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from random import Random

import torch
from shadow import NUM_LAYERS, VOCAB, Boom, ShadowEngine, extended, next_token, rows
from torch import Tensor

from nanoengine.kv.open_step import DraftStep, OpenStep
from nanoengine.kv.step_plan import DEVICE
from nanoengine.sequence import ScheduledBatch, ScheduledSequence, Sequence

MARK = 0.5  # added to the layer in the keys of drafts
SHARE_RIGHT = 0.6  # of the drafts, beside those that are right by chance
SHARE_PAYING = 0.7  # of the choices
SHARE_SHORT = 0.9  # of the choices, after which requests take turns if they can


class Adversary:
    """Chooses for all sequences (sequence.DraftLength). counts: of "drafts" and "accepted"."""

    def __init__(
        self, seed: int, most: int, own_head: bool = False, looks_up: bool = False
    ) -> None:
        """most: drafts of a sequence and step. own_head: they are those of the MTP head.
        looks_up: whether there are guesses by lookup, too.
        """
        self.most, self.own_head, self.looks_up = most, own_head, looks_up
        self.pays = self.is_due = self.is_short = True
        self.counts: Counter[str] = Counter()
        self._random = Random(seed)

    def choose(self) -> int:
        """How many tokens are to be drafted, and whether that pays: so other blocks move."""
        self.pays = self._random.random() < SHARE_PAYING
        self.is_short = self._random.random() < SHARE_SHORT
        return self._random.randint(0, self.most)

    def record(self, num_drafts: int, num_right: int, is_decode: bool, is_ahead: bool) -> None:
        """What became of them."""
        assert 0 <= num_right <= num_drafts <= self.most
        self.counts.update(checked=num_drafts, accepted=num_right)

    def draft(self, right: int) -> int:
        """The next token, or any."""
        is_right = self._random.random() < SHARE_RIGHT
        return right if is_right else self._random.randrange(VOCAB)

    def look_up(self, last: int, most: int) -> tuple[int, ...]:
        """Some tokens after that of this hash, or none."""
        hashes, found = [last], []
        for _ in range(self._random.randint(0, most)):
            found.append(self.draft(next_token(hashes[-1])))
            hashes += extended(hashes, found[-1:])
        return tuple(found)

    def guess(self, hashes: list[int]) -> list[int]:
        """What the head guesses after the token that follows each of these; () now and then."""
        if not self.own_head or self._random.random() < 1 - SHARE_PAYING:
            return []
        following = [extended([h], [next_token(h)])[-1] for h in hashes]
        return [self.draft(next_token(h)) for h in following]

    def report(self, mass: Tensor) -> None:
        """Fill in what attention gives to each block; some get most of it."""
        drawn = [self._random.random() ** 4 for _ in range(mass.numel())]
        mass.copy_(torch.tensor(drawn).view_as(mass))


@dataclass
class Lookup:
    """Guesses for one sequence in the place of PromptLookup. hashes: of all its tokens."""

    adversary: Adversary
    hashes: Callable[[], list[int]]

    @property
    def is_trusted(self) -> bool:
        """It is asked each time."""
        return True

    @property
    def is_careful(self) -> bool:
        """It may guess as many as it likes."""
        return False

    def guess(self, token_ids: list[int], most: int) -> tuple[int, ...]:
        """Right ones and wrong ones."""
        return self.adversary.look_up(self.hashes()[-1], most)

    def record(self, num_guesses: int, num_right: int) -> None:
        """What became of them."""
        assert 0 <= num_right <= max(num_guesses, self.adversary.most)
        self.adversary.counts["looked up"] += num_guesses


@dataclass
class DraftingEngine(ShadowEngine):
    """A ShadowEngine whose sequences draft: those that stream and, from `drafts_from` blocks on,
    those on the device; or all, by a head of the model's own. What each draft reads is checked by
    value: the blocks of its own sequence that are on the device, one in eight where all are and no
    head of its own drafts, whole and in order, then what drafts wrote.
    """

    adversary: Adversary | None = None
    most_kept: int | None = None  # blocks before the tail that drafts may read

    def __post_init__(self) -> None:
        if self.adversary is not None:
            lookup = f"ngram:{self.adversary.most}+" if self.adversary.looks_up else ""
            kind = "mtp" if self.adversary.own_head else "resident"
            asked = f"{lookup}{kind}:{self.adversary.most}"
            self.settings = {"speculative": asked, **self.settings}
        super().__post_init__()
        # Of who rested: what is known of it, as a hash, and what it drafted then.
        self._kept: dict[int, tuple[int, tuple[int, ...]]] = {}

    def equip(self, seq: Sequence) -> None:
        """See ShadowEngine."""
        adversary = self.adversary
        if adversary is None:
            return
        if adversary.looks_up:
            seq.guesser = Lookup(adversary, partial(self.hashes, seq))
        if adversary.own_head:
            seq.mtp_length = adversary
        else:
            seq.draft_length = adversary

    def guess(self, hashes: list[int]) -> list[int]:
        """See ShadowEngine."""
        return [] if self.adversary is None else self.adversary.guess(hashes)

    def draft(
        self, batch: ScheduledBatch, step: OpenStep, fail_at: tuple[int, int] | None
    ) -> ScheduledBatch:
        """The batch with its drafts, as Drafter and Drafts make it."""
        if self.adversary is None:
            return super().draft(batch, step, fail_at)
        self._check_kept(batch)
        before, moved = self._counted(), replace(self.kv.counters)
        self._loading = {load.device_slot for load in step.kv.plan.transfers.loads}
        made: dict[int, list[int]] = {}
        for number, one in enumerate(step.draft_steps()):
            self._draft_step(batch, one, number, made, fail_at)
        assert self._counted() == before, "a draft was counted"
        assert self.kv.counters == moved, "a draft moved KV"
        items = []
        for index, item in enumerate(batch.items):
            tokens = made.get(index, [0] * item.num_drafts)  # as NOT_DRAFTED
            assert len(tokens) == item.num_drafts, "as many as were asked for, or none"
            items.append(item.with_drafts(tuple(tokens)))
        return replace(batch, items=tuple(items))

    def _check_kept(self, batch: ScheduledBatch) -> None:
        """Guesses that were drafted while others were checked follow what is known now."""
        assert self.adversary is not None
        for item in batch.items:
            if item.has_drafted and not self.adversary.own_head:
                known, drafted = self._kept[item.seq.seq_id]
                assert known == self.hashes(item.seq)[-1], "drafts of an older token"
                assert item.guesses == drafted[: len(item.guesses)], "drafts of another"
                self.adversary.counts["kept drafts"] += len(item.guesses)

    def draft_between(
        self,
        batch: ScheduledBatch,
        step: OpenStep,
        layers: Iterator[None],
        fail_at: tuple[int, int] | None,
    ) -> ScheduledBatch:
        """The same for those who are not in the step."""
        if not batch.resting or self.adversary is None:
            return super().draft_between(batch, step, layers, fail_at)
        before, made = self._counted(), dict[int, list[int]]()
        for number, one in enumerate(step.draft_steps_between(layers)):
            self._draft_step(batch.of_resting, one, number, made, fail_at)
        assert self._counted() == before, "a draft was counted"
        resting = []
        for index, drafted in made.items():
            item = batch.resting[index].with_drafts(tuple(drafted))
            assert len(drafted) == batch.resting[index].num_drafts
            self._kept[item.seq.seq_id] = self.hashes(item.seq)[-1], item.guesses
            resting.append(item)
        self.adversary.counts["steps in which others drafted"] += bool(made)
        return replace(batch, resting=tuple(resting))

    def report(self, mass: Tensor | None) -> None:
        """What attention says of the step that has just run."""
        if self.adversary is None:
            super().report(mass)
        elif mass is not None:
            self.adversary.report(mass)

    def _counted(self) -> list[tuple[int, list[int]]]:
        """What is counted as computed: by sequence and by block."""
        tables = self.kv.tables.values()
        return [(t.seq.num_computed, [block.num_tokens for block in t.blocks]) for t in tables]

    def _draft_step(
        self,
        batch: ScheduledBatch,
        one: DraftStep,
        number: int,
        made: dict[int, list[int]],
        fail_at: tuple[int, int] | None,
    ) -> None:
        """A draft more of each item in the step. made: those of each item so far."""
        assert self.adversary is not None
        chains, last = [], []
        for index, position in zip(one.items, one.positions, strict=True):
            item = batch.items[index]
            known = self.hashes(item.seq)
            assert position == item.start + number, "a draft at a wrong position"
            assert len(known) + number == position + 1, "drafts begin with the newest token"
            assert len(item.guesses) == self.adversary.own_head, "the head drafts after one guess"
            ahead = [*item.guesses, *made.setdefault(index, [])]
            # Its row has the keys of a token, and knows the one that follows.
            known = [*known, *extended(known, ahead)]
            chains.append(known[: position + 1])
            last.append(known[-1])
        fails_in = fail_at[0] if fail_at is not None and fail_at[1] == number else None
        self.draft_forward(batch, one, chains, fails_in)
        for index, newest in zip(one.items, last, strict=True):
            made[index].append(self.adversary.draft(next_token(newest)))
            self.adversary.counts["drafts"] += 1
            self.adversary.counts["drafts after a guess"] += self.adversary.own_head

    def draft_forward(
        self, batch: ScheduledBatch, one: DraftStep, chains: list[list[int]], fails_in: int | None
    ) -> None:
        """All layers of a draft. chains: the hashes of each row's tokens; fails_in: a layer."""
        assert self.adversary is not None
        for layer in range(NUM_LAYERS - 1 if self.adversary.own_head else 0, NUM_LAYERS):
            keys = rows([chain[-1] for chain in chains], layer + MARK)
            one.kv.target(layer).store(keys, -keys)
            if fails_in == layer:
                raise Boom("draft")
            self._check_reads(batch, one, layer, chains)

    def _check_reads(
        self, batch: ScheduledBatch, one: DraftStep, layer: int, chains: list[list[int]]
    ) -> None:
        """One chunk of the device's pool, with a row for each item."""
        (part,) = one.kv.plan.reads
        (chunk,) = one.kv.read(layer)
        assert part.tier == DEVICE and not part.fill and chunk.is_last, "more than the device"
        assert chunk.seq_index.tolist() == [*range(len(one.items))]
        assert chunk.num_blocks.tolist() == [len(span.slots) for span in part.spans]
        for row, index in enumerate(one.items):
            slots = chunk.block_table[row, : int(chunk.num_blocks[row])]
            item, chain = batch.items[index], chains[row]
            keys = self._keys(item, chain, slots.tolist(), layer)
            assert one.num_keys[row] == len(keys), "a draft sees parts of blocks, or more"
            found = chunk.k[slots].flatten(0, 1)[: len(keys)]
            values = chunk.v[slots].flatten(0, 1)[: len(keys)]
            if not (torch.equal(found, keys) and torch.equal(values, -keys)):
                assert self.victims, "a draft reads wrong keys or values"
                self._misread.add(index)

    def _keys(
        self, item: ScheduledSequence, chain: list[int], slots: list[int], layer: int
    ) -> Tensor:
        """What must be in these slots: whole blocks, but for the tail, which ends with the newest
        draft.
        """
        size, blocks = self.block_size, self.kv.tables[item.seq.seq_id].blocks
        place = {block.device_slot: index for index, block in enumerate(blocks)}
        indices, stop = [place[slot] for slot in slots], -(-len(chain) // size)
        there = [i for slot, i in place.items() if slot is not None and slot not in self._loading]
        before = [index for index in there if index < item.start // size]
        num_before = item.start // size
        most = self.most_kept or num_before
        if len(before) == num_before:
            most = min(most, num_before if item.guesses else max(1, num_before // 8))
            self.adversary.counts["drafts of who does not stream"] += 1
        while len(before) > most:
            between = before[1 : len(before) - most // 2]
            before.remove(min(between, key=lambda index: blocks[index].heat))
        assert indices == [*before, *range(item.start // size, stop)], "not what is there, in order"
        hashes = [h for index in indices for h in chain[index * size : (index + 1) * size]]
        keys = rows(hashes, layer)
        keys[len(keys) - (len(chain) - item.start) :, 0, 1] += MARK
        return keys
