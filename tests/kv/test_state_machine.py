"""Random programs against the accounting of two-tier KV: no order of calls may break it.

hypothesis draws pools, chunks and limits, then adds requests that share beginnings of every length,
steps, aborts, preempts, evicts, resets, fails steps and copies, and lets copies come as early or as
late as events allow. shadow.py is the engine: the real scheduler and KV manager over hashes for
keys; shadow_drafts.py guesses and drafts for it, rightly and wrongly. After every call all that
docs/kv_offload.md promises must hold (ShadowEngine.check), and at the end every answer must be
right and everything must be free. Some programs run on two ranks (shadow_ranks.py).

    python tests/kv/test_state_machine.py --minutes 20 [--json FILE]    new seeds for so long
    python tests/kv/test_state_machine.py --seed 3 --mode stream        one, with a minimal program
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

# As a script, it finds our helpers itself.
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from shadow import COPIES, NUM_LAYERS, VOCAB, Boom, HeldDevice, ShadowEngine, answer
from shadow_drafts import Adversary, DraftingEngine
from shadow_ranks import RankedEngine

from nanoengine import PromptTooLongError
from nanoengine.engine.draft_turns import FasterWay
from nanoengine.kv import block_manager, host_pool
from nanoengine.kv.block_manager import Block
from nanoengine.kv.placement import Placement
from nanoengine.sequence import Admission, Sequence

MODES = ("resident", "in_place", "stream")
ANY = st.integers(0, 1 << 16)  # taken modulo whatever there is to choose from


@dataclass(frozen=True)
class Shape:
    """Everything an example fixes at its start.

    stream_blocks_per_step: see Scheduler. segment_blocks: host memory comes in pieces of so many
    blocks. digests: how many different ones there are (None: as many as xxh3 has). most_drafts: of
    a sequence and step; own_head, looks_up: see Adversary; draft_seed: of all that is drawn for
    them. least_run_bytes, drafts_from: see KVSpec. takes_turns: see DraftTurns. other_copies: of a
    second rank, which there is not if it is "".
    """

    copies: str
    block_size: int
    device_blocks: int
    host_blocks: int
    spare_blocks: int
    ring_slots: int
    slot_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    max_num_partial_prefills: int
    decode_reserve_blocks: int
    stream_blocks_per_step: int | None
    segment_blocks: int
    prefix_caching: bool
    digests: int | None
    closes_early: bool
    most_drafts: int
    own_head: bool
    looks_up: bool
    draft_seed: int
    least_run_bytes: int
    drafts_from: int
    takes_turns: bool
    other_copies: str

    def make(self) -> ShadowEngine:
        how = self.draft_seed, self.most_drafts, self.own_head, self.looks_up
        drafts = Adversary(*how) if self.most_drafts else None
        kind: Callable[..., ShadowEngine] = ShadowEngine
        if self.other_copies:
            kind = partial(RankedEngine, adversary=drafts, other_copies=self.other_copies)
        elif drafts:
            kind = partial(DraftingEngine, adversary=drafts)
        return kind(
            self.device_blocks,
            self.host_blocks,
            self.ring_slots,
            self.slot_blocks,
            self.block_size,
            self.spare_blocks,
            self.prefix_caching,
            max_delay_s=0.0002,
            settings={
                "max_num_seqs": self.max_num_seqs,
                "max_num_batched_tokens": self.max_num_batched_tokens,
                "long_prefill_token_threshold": self.long_prefill_token_threshold,
                "max_num_partial_prefills": self.max_num_partial_prefills,
                "max_long_partial_prefills": self.max_num_partial_prefills,
                "decode_reserve_blocks": self.decode_reserve_blocks,
            },
            copies=self.copies,
            stream_blocks_per_step=self.stream_blocks_per_step,
            least_run_bytes=self.least_run_bytes,
            drafts_from=self.drafts_from,
            takes_turns=self.takes_turns and not self.other_copies,
        )


def one_of(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


def shapes(mode: str) -> st.SearchStrategy[Shape]:
    """Each number on its own, so that no two are multiples of each other for long."""
    resident, streams = mode == "resident", mode == "stream"
    copies = {"resident": ["inline"], "in_place": ["inline", "held"]}  # threads take their time
    return st.builds(
        Shape,
        copies=one_of(*copies.get(mode, ["held"] * 4 + ["inline"] * 2 + ["threads"])),
        block_size=one_of(1, 2, 3, 5, 8),
        device_blocks=one_of(4, 5, 7, 11, 16) if resident else one_of(3, 5, 6, 7, 9),
        host_blocks=st.just(0) if resident else one_of(2, 3, 5, 8, 13),
        spare_blocks=one_of(1, 2, 3),
        ring_slots=one_of(2, 3, 4, 5) if streams else st.just(0),
        slot_blocks=one_of(1, 2, 3, 5) if streams else st.just(0),
        max_num_seqs=one_of(4, 5, 7, 8),
        max_num_batched_tokens=one_of(8, 11, 13, 24, 37),
        long_prefill_token_threshold=one_of(3, 7, 1000),
        max_num_partial_prefills=one_of(1, 2, 4),
        decode_reserve_blocks=one_of(0, 1, 2, 3),
        stream_blocks_per_step=one_of(None, None, 1, 3, 7) if streams else st.none(),
        segment_blocks=one_of(1, 2, 3, 5, 100),
        prefix_caching=one_of(True, True, True, False),
        digests=one_of(None, None, None, 1, 2, 7),
        closes_early=one_of(False, False, False, True),
        most_drafts=one_of(0, 3, 6, 9),
        own_head=one_of(False, False, True),
        looks_up=one_of(False, False, True),
        draft_seed=ANY,
        least_run_bytes=one_of(0, 100, 1 << 20) if streams else st.just(0),
        drafts_from=one_of(0, 1, 2, 4),
        takes_turns=one_of(True, True, False),
        other_copies=one_of("", "", "", "inline" if resident else "held"),
    )


@dataclass(frozen=True)
class Request:
    """The first `cut` tokens of an earlier one (its answer included), then `length` new ones.

    percent: of all room, what the prompt may take at most.
    """

    base: int
    cut: int
    pattern: bytes
    length: int
    percent: int
    num_tokens: int
    salt: str


requests = st.builds(
    Request,
    base=ANY,
    cut=ANY,
    pattern=st.binary(min_size=1, max_size=4),
    length=st.integers(0, 60),
    percent=one_of(10, 20, 40, 110),
    num_tokens=st.integers(1, 12),
    salt=one_of("", "", "", "a", "b"),
)


class CollidingDigests:
    """Stands in for chain_digest and knows few values; counts what only a comparison tells apart.

    Equal digests of different content are what a hash of any length may give.
    """

    def __init__(self, num_digests: int, tally: Counter[str]) -> None:
        self._real = block_manager.chain_digest
        self._num_digests = num_digests
        self._tally = tally
        self._content: dict[bytes, bytes] = {}

    def __call__(self, before: bytes, tokens: bytes) -> bytes:
        real = self._real(before, tokens)
        digest = bytes([real[0] % self._num_digests])
        self._tally["collisions"] += self._content.setdefault(digest, real) != real
        return digest


def small_segments(segment_blocks: int) -> Callable[[int, int], list[int]]:
    """Stands in for segment_sizes."""

    def segment_sizes(num_blocks: int, block_bytes: int) -> list[int]:
        starts = range(0, num_blocks, segment_blocks)
        return [min(segment_blocks, num_blocks - start) for start in starts]

    return segment_sizes


def counting_swaps(tally: Counter[str]) -> Callable[[Placement, list[Block]], None]:
    """Stands in for Placement.swap_hot and counts what it brings to the device."""
    real = Placement.swap_hot

    def swap_hot(self: Placement, blocks: list[Block]) -> None:
        before = len(self.loads)
        real(self, blocks)
        tally["swaps"] += len(self.loads) - before

    return swap_hot


class Machine(RuleBasedStateMachine):
    """The rules; `mode` and `tally` are set by machine_for."""

    mode: str
    tally: Counter[str]
    engine: ShadowEngine

    def __init__(self) -> None:
        super().__init__()
        self.patches = contextlib.ExitStack()
        self.asked: dict[int, tuple[list[int], int, str]] = {}
        self.histories: list[list[int]] = []  # token ids of all requests; the engine appends

    @initialize(data=st.data(), wanted=st.lists(requests, min_size=3, max_size=8))
    def start(self, data: st.DataObject, wanted: list[Request]) -> None:
        self.shape = data.draw(shapes(self.mode), label="shape")
        self.tally["examples"] += 1
        if self.shape.digests is not None:
            digests = CollidingDigests(self.shape.digests, self.tally)
            self.patches.enter_context(mock.patch.object(block_manager, "chain_digest", digests))
        pieces = small_segments(self.shape.segment_blocks)
        self.patches.enter_context(mock.patch.object(host_pool, "segment_sizes", pieces))
        self.patches.enter_context(
            mock.patch.object(Placement, "swap_hot", counting_swaps(self.tally))
        )
        if self.shape.takes_turns:  # always, where they may
            always = mock.patch.object(FasterWay, "next", lambda *_: True)
            self.patches.enter_context(always)
        self.engine = self.shape.make()
        self.engine.kv.admit = self.counting(self.engine.kv.admit)
        self.add(wanted)

    def counting(self, admit: Callable[[Sequence], Admission]) -> Callable[[Sequence], Admission]:
        def counted(seq: Sequence) -> Admission:
            admission = admit(seq)
            self.tally[admission.value] += 1
            return admission

        return counted

    # -- requests come and go

    @rule(wanted=st.lists(requests, max_size=4), steps=st.integers(1, 6))
    def go_on(self, wanted: list[Request], steps: int) -> None:
        """Maybe with some requests more."""
        self.add(wanted)
        self.step(steps)

    def add(self, wanted: list[Request]) -> None:
        room = self.engine.kv.spec.num_tokens
        for request in wanted:
            prompt, num_tokens = self.prompt_of(request), request.num_tokens
            if len(prompt) + num_tokens > room:
                with pytest.raises(PromptTooLongError, match=str(room)):
                    self.engine.add(prompt, num_tokens)
                self.tally["refused"] += 1
                num_tokens = min(num_tokens, room - 1)
                prompt = prompt[: room - num_tokens]
            if num_tokens:
                self.queue(prompt, num_tokens, request.salt)

    def prompt_of(self, request: Request) -> list[int]:
        base = self.histories[request.base % len(self.histories)] if self.histories else []
        pattern = [byte % VOCAB for byte in request.pattern]
        fresh = [pattern[i % len(pattern)] for i in range(request.length)]
        most = self.engine.kv.spec.num_tokens * request.percent // 100
        return (base[: request.cut % (len(base) + 1)] + fresh)[:most] or [0]

    def queue(self, prompt: list[int], num_tokens: int, salt: str) -> None:
        seq_id = self.engine.add(prompt, num_tokens, salt)
        self.asked[seq_id] = prompt, num_tokens, salt
        self.histories.append(next(reversed(self.engine.scheduler.waiting)).token_ids)
        self.tally["requests"] += 1

    @precondition(lambda self: self.engine.scheduler.has_work)
    @rule(which=ANY)
    def abort(self, which: int) -> None:
        seq = self.chosen(self.engine.unfinished, which)
        self.engine.abort(seq.seq_id)
        del self.asked[seq.seq_id]
        self.tally["aborted"] += 1

    def finish(self) -> None:
        """Everything that was asked for is answered."""
        self.engine.drain(self.observed_step)
        self.check_answers()

    # -- steps

    def step(self, count: int) -> None:
        for _ in range(count):
            self.observed_step()

    @rule(
        layer=st.integers(0, NUM_LAYERS - 1),
        chunk=st.integers(0, 3),
        count=st.integers(1, 4),
        in_draft=st.booleans(),
    )
    def fail_steps(self, layer: int, chunk: int, count: int, in_draft: bool) -> None:
        """Each goes wrong on the way, and then well."""
        for _ in range(count):
            self.failing_step(layer, chunk, in_draft)
            self.observed_step()

    def failing_step(self, layer: int, chunk: int, in_draft: bool) -> None:
        """Nothing is counted: the next step does it again. in_draft: in a draft, if one is made."""
        before = {seq.seq_id: list(seq.token_ids) for seq in self.engine.unfinished}
        try:
            self.engine.step((layer, chunk), (layer, chunk // 2) if in_draft else None)
        except Boom as boom:
            self.tally[f"failed {boom}s"] += 1
            assert before == {seq.seq_id: seq.token_ids for seq in self.engine.unfinished}

    def observed_step(self) -> None:
        """A step of the engine, and in the tally what it was a step of."""
        scheduler, tables = self.engine.scheduler, self.engine.kv.tables
        held = {s.seq_id: tables[s.seq_id].blocks for s in scheduler.waiting if s.seq_id in tables}
        parked = {seq_id for seq_id, blocks in held.items() if blocks}
        on_host = {i for i in parked if any(b.host_len and b.device_slot is None for b in held[i])}
        batch = self.engine.step()
        self.tally["steps"] += 1
        running = {item.seq.seq_id for item in batch.items}
        self.tally["resumed"] += len(running & parked)
        self.tally["resumed from the host"] += len(running & on_host)
        self.tally["most at once"] = max(self.tally["most at once"], len(running))
        sat_out = {seq.seq_id for seq in scheduler.running} - running
        self.tally["paced"] += len(sat_out) if scheduler._pacer.is_limited else 0

    # -- pressure

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(
        count=st.integers(1, 8),
        to_the_back=st.booleans(),
        is_robbed=st.booleans(),
        steps=st.integers(0, 6),
    )
    def preempt(self, count: int, to_the_back: bool, is_robbed: bool, steps: int) -> None:
        """The youngest leave the running set, as when blocks run out; others may pass them, and
        take all their blocks.
        """
        scheduler = self.engine.scheduler
        for _ in range(min(count, len(scheduler.running))):
            scheduler.preempt(scheduler.running[-1])
            if to_the_back:
                scheduler.waiting.move_to_end(next(iter(scheduler.waiting)))
            self.tally["preempted by force"] += 1
        while is_robbed and self.engine.kv._reclaim(besides=-1):
            pass
        self.engine.check()
        self.step(steps)

    @precondition(lambda self: self.engine.kv.blocks.cached)
    @rule(which=ANY, copy=one_of("all", "device", "host"))
    def evict(self, which: int, copy: str) -> None:
        """A cached block loses one of its two copies, or goes altogether."""
        kv = self.engine.kv
        manager = kv.blocks
        cached = list(manager.cached)
        twice = [b for b in cached if b.device_slot is not None and b.is_on_host]
        if not twice or copy == "all":
            kv.evict(self.chosen(cached, which))
            copy = "all"
        elif copy == "device":
            slot = manager.drop_device(self.chosen(twice, which))
            manager.device.free(slot)
            kv.memory.poison(slot, None)
        else:
            slot = manager.drop_host(self.chosen(twice, which))
            manager.host.free(slot)
            kv.memory.poison(None, slot)
        self.tally[f"evicted: {copy}"] += 1

    @precondition(lambda self: self.mode != "resident")
    @rule(stream=ANY, number=st.integers(1, 12))
    def fail_copy(self, stream: int, number: int) -> None:
        """A copy to come fails: whoever needs it ends with an error, the others do not notice."""
        self.chosen([*self.engine.faults.values()], stream).arm(number)
        self.step(2)

    @rule(how=one_of("settle", "settle", "reset", "reset", "finish"))
    def calm_down(self, how: str) -> None:
        """Wait for all copies, or for all requests; or forget the prefix cache."""
        if how == "settle":
            self.engine.settle()
        elif how == "finish":
            self.finish()
        else:
            self.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        self.engine.kv.reset_prefix_cache()
        assert not self.engine.kv.blocks.cached and not self.engine.kv.blocks.by_digest
        self.tally["resets"] += 1

    # -- copies

    @precondition(lambda self: self.engine.num_held)
    @rule(which=st.booleans(), count=st.integers(1, 12))
    def release(self, which: bool, count: int) -> None:
        """Held copies of one stream go on of themselves."""
        assert isinstance(self.engine.cpu, HeldDevice)
        stream = self.engine.cpu.held[which]
        for _ in range(min(count, len(stream.work))):
            stream.proceed()
            self.tally["released"] += 1

    # -- what holds

    @invariant()
    def everything_adds_up(self) -> None:
        self.engine.check()
        if self.shape.digests is None:  # a hash that collides may keep a block from being found
            self.check_that_nothing_lost_is_in_the_way()

    def check_that_nothing_lost_is_in_the_way(self) -> None:
        """Where a sequence's block could be found, no block whose parent is gone has its hash."""
        by_digest = self.engine.kv.blocks.by_digest
        for table in self.engine.kv.tables.values():
            keys = table.keys[: len(table.published)]
            for parent, key in zip((None, *table.published), keys, strict=False):
                other = by_digest.get(key.digest)
                is_lost = other and other.parent and other.parent.key is None
                is_findable = parent is None or parent.key is not None
                assert not (is_lost and is_findable), "a lost block is in the way"

    def check_answers(self) -> None:
        for seq_id, (prompt, num_tokens, salt) in self.asked.items():
            seq, expected = self.engine.finished[seq_id], answer(prompt, num_tokens, salt)
            if seq.output.finish_reason == "error":
                expected = expected[: seq.num_output_tokens]
            assert seq.output_token_ids == expected

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None and hasattr(self, "engine"):
                if self.shape.closes_early:
                    self.close_early()
                else:
                    self.finish_and_close()
                self.count_engine()
            elif hasattr(self, "engine"):
                with contextlib.suppress(Exception):  # the first failure is the one to report
                    self.engine.close()
        finally:
            self.patches.close()

    def finish_and_close(self) -> None:
        """All is answered; all slots are free or cached, then free; closing ends all copies."""
        if self.engine.scheduler.has_work:
            self.finish()
        self.engine.settle()
        kv = self.engine.kv
        manager = kv.blocks
        assert not kv.tables and manager.num_available == manager.capacity
        for pool, name in ((manager.device, "device_slot"), (manager.host, "host_slot")):
            cached = sum(getattr(block, name) is not None for block in manager.cached)
            assert pool.num_free + cached == pool.num_slots
        kv.reset_prefix_cache()
        for pool in (manager.device, manager.host):
            assert pool.num_free == pool.num_slots
        self.engine.close()
        assert self.engine.is_idle

    def close_early(self) -> None:
        """As LLMEngine.close does: with requests half way, a failed step, and copies under way."""
        if self.engine.scheduler.has_work:
            with contextlib.suppress(Boom):
                self.engine.step(fail_at=(NUM_LAYERS // 2, 0))
        self.tally["closed with copies under way"] += bool(self.engine.num_held)
        self.engine.scheduler.abort(self.engine.unfinished)
        self.engine.check()
        self.engine.close()
        assert self.engine.is_idle and not self.engine.kv.tables

    def count_engine(self) -> None:
        seqs = self.engine.finished.values()
        self.tally["finished"] += sum(seq.output.finish_reason == "length" for seq in seqs)
        self.tally["failed copies"] += len(self.engine.victims)
        self.tally["failed requests"] += sum(seq.output.finish_reason == "error" for seq in seqs)
        self.tally["preemptions"] += sum(seq.metrics.num_preemptions for seq in seqs)
        self.tally["prefix hits"] += sum(seq.num_cached > 0 for seq in seqs)
        self.tally.update(self.engine.num_moved)
        if isinstance(self.engine, DraftingEngine) and self.engine.adversary is not None:
            self.tally.update(self.engine.adversary.counts)

    @staticmethod
    def chosen(items: list[Any], which: int) -> Any:
        return items[which % len(items)]


def machine_for(mode: str, tally: Counter[str]) -> type[Machine]:
    """The machine of one mode, counting into `tally`."""
    return type(f"{mode.title()}Machine", (Machine,), {"mode": mode, "tally": tally})


HAPPENS = {
    "resident": (
        "requests, refused, aborted, finished, failed steps, in flight, prefix hits, collisions, "
        "preemptions, preempted by force, resumed, evicted: all, resets, drafts, accepted, "
        "drafts of who does not stream, failed drafts, looked up, drafts after a guess"
    ),
    "in_place": "stores, released, resumed from the host, failed copies, failed requests",
    "stream": ("loads, fills, paced, swaps, steps in which others drafted, kept drafts"),
}


def must_happen(mode: str) -> set[str]:
    """What a run of programs of this mode shows, with all that less demanding modes do."""
    modes = MODES[: MODES.index(mode) + 1]
    return {what for each in modes for what in HAPPENS[each].split(", ")}


@pytest.mark.parametrize(
    ("mode", "rounds"),
    [
        pytest.param("resident", 6, id="resident", marks=pytest.mark.breadth),
        pytest.param("in_place", 5, id="in_place", marks=pytest.mark.breadth),
        pytest.param("stream", 6, id="stream, fewer"),
        pytest.param("stream", 7, id="stream", marks=pytest.mark.breadth),
    ],
)
def test_no_program_breaks_the_accounting(mode: str, rounds: int) -> None:
    tally: Counter[str] = Counter()
    missing: set[str] = set()
    for number in range(2 * rounds):
        # What programs do depends on where memory lies, too: a rare event may take some more.
        if number < rounds or missing:
            run_round(mode, number, tally)
            missing = {what for what in must_happen(mode) if not tally[what]}
    assert not missing, "the programs were too tame"
    assert tally["most at once"] >= 4


def run_round(mode: str, number: int, tally: Counter[str], shrinks: bool = False) -> None:
    """Ten programs drawn from a seed (later ones of a seed would be variations of earlier ones).

    shrinks: look for a smaller program that fails, too; that may take minutes.
    """
    chosen = settings(
        max_examples=10,
        stateful_step_count=30,
        phases=[Phase.generate, Phase.shrink] if shrinks else [Phase.generate],
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    try:
        run_state_machine_as_test(seed(number)(machine_for(mode, tally)), settings=chosen)
    except Exception as error:
        error.add_note(
            f"smaller: python tests/kv/test_state_machine.py --mode {mode} --seed {number}"
        )
        raise


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("copies", COPIES)
def test_closing_in_the_middle_of_copies(copies: str, fails: bool) -> None:
    """Stores of a step that went wrong are still queued, one may fail; twice in one process."""
    for _ in range(2):
        engine = ShadowEngine(5, 40, 2, 1, block_size=2, max_delay_s=0.002, copies=copies)
        engine.add([1] * 30, 4)
        engine.step()
        engine.faults["d2h"].arm(5 if fails else 0)  # one of the second layer
        with pytest.raises(Boom):
            engine.step(fail_at=(0, 0))
        assert engine.num_moved["stores"] == 5
        assert engine.num_held or copies != "held"
        engine.close()
        assert engine.is_idle and bool(engine.victims) == fails


# -- the command line


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--minutes", type=float, default=0.0, help="draw new programs for so long")
    parser.add_argument("--seed", type=int, default=time.time_ns() // 1_000_000_000, help="start")
    parser.add_argument("--mode", choices=MODES, help="only this one")
    parser.add_argument("--json", type=Path, help="write here what was run")
    arguments = parser.parse_args()
    modes = [arguments.mode] if arguments.mode else MODES
    started, minutes, number = time.perf_counter(), 0.0, arguments.seed
    tallies: dict[str, Counter[str]] = {mode: Counter() for mode in modes}
    failures: list[dict[str, Any]] = []
    while not minutes or minutes < arguments.minutes:
        for mode in modes:
            if report := failure_of(mode, number, tallies[mode]):
                failures.append({"mode": mode, "seed": number, "report": report})
                print(report, flush=True)
        number += 1
        minutes = (time.perf_counter() - started) / 60
    summary = {"minutes": round(minutes, 2), "first_seed": arguments.seed, **summed(tallies)}
    print(json.dumps(summary | {"failures": len(failures)}, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(summary | {"failures": failures}, indent=1) + "\n")
    return int(bool(failures))


def failure_of(mode: str, number: int, tally: Counter[str]) -> str:
    """What went wrong in a round, with a minimal program; empty if nothing did."""
    try:
        run_round(mode, number, tally)
    except Exception as error:  # whatever it was, the next seed goes on
        print(f"--- {mode}, seed {number}: {error!r}; looking for a smaller program", flush=True)
        report = traceback.format_exc()
    else:
        return ""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            run_round(mode, number, Counter(), shrinks=True)
        except Exception:
            report = traceback.format_exc()
    return printed.getvalue() + report


def summed(tallies: dict[str, Counter[str]]) -> dict[str, Any]:
    """Totals, and what happened how often in each mode."""
    total: dict[str, Any] = {
        what: sum(tally[what] for tally in tallies.values())
        for what in ("examples", "steps", "requests")
    }
    return total | {"modes": {mode: dict(sorted(t.items())) for mode, t in tallies.items()}}


if __name__ == "__main__":
    sys.exit(main())
