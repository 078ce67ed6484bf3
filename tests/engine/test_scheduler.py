"""Who runs, with how many tokens: the scheduler over a KV manager that only counts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace

import pytest

from nanoengine.config.engine import EngineConfig
from nanoengine.engine.scheduler import Scheduler
from nanoengine.outputs import RequestMetrics
from nanoengine.sampling_params import SamplingParams
from nanoengine.sequence import Admission, Request, ScheduledBatch, Sequence


class CountingKV:
    """A pool of single-token blocks."""

    def __init__(self, num_tokens: int = 1 << 20) -> None:
        self.free = num_tokens
        self.held: dict[int, int] = {}
        self.in_flight: set[int] = set()
        self.costs: dict[int, int] = {}

    def admit(self, seq: Sequence) -> Admission:
        if seq.seq_id in self.in_flight:
            return Admission.IN_FLIGHT
        self.held[seq.seq_id] = 0
        if self.reserve(seq, seq.num_tokens) is not None:
            return Admission.ADMITTED
        del self.held[seq.seq_id]
        return Admission.FULL

    def stream_cost(self, seq: Sequence) -> int:
        return self.costs.get(seq.seq_id, 0) if seq.num_computed else 0

    def may_draft(self, seq: Sequence) -> bool:
        return self.stream_cost(seq) > 0

    def reset_budget(self) -> None:
        pass

    def reserve(self, seq: Sequence, num_tokens: int) -> int | None:
        more = max(0, seq.num_computed + num_tokens - self.held[seq.seq_id])
        if more > self.free:
            return None
        self.free -= more
        self.held[seq.seq_id] += more
        return num_tokens

    def preempt(self, seq: Sequence) -> None:
        self.deallocate(seq)

    def free_tokens(self, seq: Sequence) -> int:
        return self.free

    def commit(self, seq: Sequence, num_tokens: int, num_rejected: int = 0) -> None:
        seq.num_computed += num_tokens

    def deallocate(self, seq: Sequence) -> None:
        self.free += self.held.pop(seq.seq_id, 0)
        seq.num_computed = 0


def sequence(seq_id: int, prompt: int, out: int = 4) -> Sequence:
    params = SamplingParams(max_tokens=out)
    request = Request(params, 0, frozenset(), prompt + out)
    return Sequence(seq_id, [7] * prompt, prompt, request, RequestMetrics(0.0))


def scheduler(kv: CountingKV, link: int | None = None, **settings: int) -> Scheduler:
    defaults = {"max_num_batched_tokens": 100, "max_num_seqs": 8}
    config = EngineConfig("m", **(defaults | settings))
    return Scheduler(config, kv, config.max_num_batched_tokens, link)


def run(s: Scheduler) -> ScheduledBatch:
    batch = s.schedule()
    s.postprocess(batch, [9] * sum(item.samples for item in batch.items))
    return batch


def shape(batch: ScheduledBatch) -> dict[int, int]:
    return {item.seq.seq_id: item.num_tokens for item in batch.items}


def test_prefill_chunks_and_decodes_share_a_step() -> None:
    s = scheduler(CountingKV())
    s.add(sequence(0, 30))
    s.add(sequence(1, 90))
    assert shape(run(s)) == {0: 30, 1: 50}  # long: at most half a step while others prefill
    assert shape(run(s)) == {0: 1, 1: 40}
    assert shape(run(s)) == {0: 1, 1: 1}


def test_a_long_prompt_leaves_nothing_to_its_own_completions() -> None:
    """They wait for it."""
    s = scheduler(CountingKV())
    first = sequence(0, 90)
    s.add(first)
    s.add(replace(sequence(1, 90), prompt_owner=first))
    assert shape(s.schedule())[0] == 90


class OneWriteKV(CountingKV):
    """A step may write one token."""

    def reset_budget(self) -> None:
        self.writes = 1

    def reserve(self, seq: Sequence, num_tokens: int) -> int | None:
        found = super().reserve(seq, num_tokens)
        if not found or seq.num_computed == 0:
            return found
        granted, self.writes = min(self.writes, num_tokens), 0
        return granted


def test_what_a_preempted_sequence_was_given_goes_to_others() -> None:
    """The younger one is served first, as it does not stream; then its blocks are taken."""
    kv = OneWriteKV(8)
    s = scheduler(kv, link=5)
    s.add(sequence(0, 3))
    s.add(sequence(1, 3))
    run(s)
    kv.costs, kv.free = {0: 1}, 1
    batch = run(s)
    assert [seq.seq_id for seq in s.waiting] == [1]
    assert shape(batch) == {0: 1}


def test_a_short_prompt_passes_a_long_one() -> None:
    """During a long prefill a newcomer has its first token after one step."""
    s = scheduler(CountingKV())
    s.add(sequence(0, 1000))
    assert shape(run(s)) == {0: 100}
    s.add(sequence(1, 20))
    assert shape(run(s)) == {0: 50, 1: 20}
    assert s.running[1].num_output_tokens == 1


def test_only_one_long_prompt_is_half_computed() -> None:
    s = scheduler(CountingKV(), max_num_partial_prefills=2, max_long_partial_prefills=1)
    for i, prompt in enumerate((300, 300, 10)):
        s.add(sequence(i, prompt))
    assert shape(run(s)) == {0: 50, 2: 10}
    assert [seq.seq_id for seq in s.waiting] == [1]
    starts = next(i for i in range(20) if 1 in shape(run(s)))
    assert starts < 8


def test_a_stream_of_short_prompts_does_not_starve_a_long_one() -> None:
    s = scheduler(CountingKV())
    s.add(sequence(0, 1000, out=1))
    for i in range(1, 200):
        for j in range(3):
            s.add(sequence(i * 3 + j, 40, out=1))
        run(s)
        if all(seq.seq_id for seq in s.running):
            break
    assert i <= 1000 // 50 + 1


class CountedQueue(OrderedDict[Sequence, None]):
    """Counts how many of its entries are looked at."""

    num_looks = 0

    def popitem(self, last: bool = True) -> tuple[Sequence, None]:
        self.num_looks += 1
        return super().popitem(last)

    def __iter__(self) -> Iterator[Sequence]:
        for seq in super().__iter__():
            self.num_looks += 1
            yield seq


@pytest.mark.parametrize("prompt", [8, 300])
def test_a_step_does_not_look_through_the_queue_for_each_sequence(prompt: int) -> None:
    s = scheduler(CountingKV())
    s.waiting = queue = CountedQueue()
    for i in range(500):
        s.add(sequence(i, prompt))
    s.schedule()
    assert s.running and queue.num_looks <= 2 * 500


@pytest.mark.parametrize("kind", ["short", "long", "in flight"])
def test_a_step_takes_no_longer_when_more_wait(kind: str) -> None:
    kv = CountingKV()
    s = scheduler(kv)
    s.waiting = queue = CountedQueue()
    seqs = [sequence(i, 300 if kind == "long" else 8) for i in range(5000)]
    for seq in seqs:
        s.add(seq)
    kv.in_flight = set(range(1, 5000)) if kind == "in flight" else set()
    for _ in range(3):
        run(s)
    s.abort([s.running[0], seqs[-1]])
    assert s.waiting is queue and queue.num_looks <= 1200
    assert [*s.running, *s.waiting] == seqs[1:-1]


def test_the_youngest_is_preempted_and_the_oldest_goes_on() -> None:
    kv = CountingKV(43)
    s = scheduler(kv)
    old, young = sequence(0, 20, out=10), sequence(1, 20, out=10)
    s.add(old)
    s.add(young)
    done: list[int] = []
    for _ in range(40):
        done += [i.seq.seq_id for i in run(s).items if i.seq.output.finish_reason]
    assert (
        done == [0, 1] and young.metrics.num_preemptions >= 1 and old.metrics.num_preemptions == 0
    )
    assert kv.free == 43 and not kv.held and not s.has_work


def test_the_budget_is_never_exceeded_and_every_step_works() -> None:
    s = scheduler(CountingKV(400), max_num_batched_tokens=16, max_num_seqs=8)
    for i in range(20):
        s.add(sequence(i, 1 + 7 * i, out=1 + i % 5))
    steps = 0
    while s.has_work:
        batch = run(s)
        assert 0 < batch.num_tokens <= 16 and len(s.running) <= 8
        steps += 1
        assert steps < 2000


def test_abort_frees_waiting_and_running() -> None:
    kv = CountingKV(100)
    s = scheduler(kv)
    seqs = [sequence(i, 60) for i in range(3)]
    for seq in seqs:
        s.add(seq)
    run(s)
    ended = s.abort([seqs[0], seqs[2], seqs[0]])
    assert [seq.output.finish_reason for seq in ended] == ["abort", "abort"]
    assert kv.free == 100 and [seq.seq_id for seq in s.waiting] == [1]
    assert not s.abort(seqs[:1])  # it has ended


def prefilled(kv: CountingKV, link: int | None, *prompts: int) -> Scheduler:
    """A scheduler whose sequences 0, 1, ... all decode."""
    s = scheduler(kv, link)
    for seq_id, prompt in enumerate(prompts):
        s.add(sequence(seq_id, prompt, 1000))
    while any(seq.is_prefill for seq in [*s.waiting, *s.running]):
        run(s)
    return s


def who(s: Scheduler, num_steps: int) -> list[list[int]]:
    return [sorted(shape(run(s))) for _ in range(num_steps)]


def test_a_streamed_sequence_takes_part_in_every_kth_step_beside_a_resident_one() -> None:
    kv = CountingKV()
    s = prefilled(kv, 10, 5, 5)
    kv.costs[1] = 30
    assert who(s, 9) == [[0], [0], [0, 1]] * 3


def test_streamed_sequences_take_turns_and_the_longest_is_not_passed_for_ever() -> None:
    kv = CountingKV()
    s = prefilled(kv, 10, 5, 5, 5)
    kv.costs |= {1: 30, 2: 10}
    steps = who(s, 40)
    assert sum(1 in step for step in steps) == sum(2 in step for step in steps) == 10
    assert all(0 in step for step in steps)


def test_without_resident_decodes_everybody_streams_in_every_step() -> None:
    kv = CountingKV()
    s = prefilled(kv, 10, 5, 5)
    kv.costs |= {0: 25, 1: 25}
    assert who(s, 3) == [[0, 1]] * 3
    kv = CountingKV()
    s = prefilled(kv, None, 5, 5)
    kv.costs[1] = 25
    assert who(s, 3) == [[0, 1]] * 3  # nor where there is no limit


def test_a_streamed_prefill_and_a_streamed_decode_share_the_link_beside_a_resident_one() -> None:
    kv = CountingKV()
    s = prefilled(kv, 10, 5, 5)
    kv.costs |= {1: 20, 2: 20}
    s.add(sequence(2, 1000))
    steps = who(s, 21)
    assert all(0 in step for step in steps)
    assert sum(1 in step for step in steps) >= 4 and sum(2 in step for step in steps) >= 4


def test_a_request_whose_prefix_is_in_flight_waits_and_others_pass() -> None:
    kv = CountingKV()
    s = scheduler(kv)
    kv.in_flight.add(0)
    s.add(sequence(0, 5))
    s.add(sequence(1, 5))
    assert shape(run(s)) == {1: 5}
    kv.in_flight.clear()
    assert shape(run(s)) == {1: 1, 0: 5}


def test_failed_sequences_end_with_a_reason_wherever_they_are_and_others_go_on() -> None:
    kv = CountingKV(20)
    s = scheduler(kv, max_num_seqs=2)
    for seq_id in range(3):
        s.add(sequence(seq_id, 5))
    batch = s.schedule()
    ended = s.postprocess(batch, [8, 9], {0: "copy failed", 2: "lost"})
    assert [(e.seq_id, e.output.finish_reason, str(e.output.error)) for e in ended] == [
        (0, "error", "copy failed"),
        (2, "error", "lost"),
    ]
    assert [seq.output_token_ids for seq in s.running] == [[9]] and not s.waiting
    assert kv.held.keys() == {1}


def test_what_nobody_needed_is_not_saved_up_for_a_streamed_sequence() -> None:
    kv = CountingKV()
    s = prefilled(kv, 10, 5)
    who(s, 50)
    s.add(sequence(1, 5, 1000))
    run(s)
    kv.costs[1] = 40
    assert who(s, 7) == [[0], [0], [0, 1], [0], [0], [0], [0, 1]]  # one step's worth was left
