"""PayingDrafts against simulated requests: it never costs much, and comes near the best number."""

from __future__ import annotations

import random

import pytest

from nanoengine.engine import draft_length
from nanoengine.engine.draft_length import FIRST, NUM_PLAIN, NUM_TRIALS, EngineDrafts, PayingDrafts

MOST = 12


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(draft_length, "time", clock)
    return clock


def run(
    clock: Clock,
    draft_s: float,
    right: float,
    num_tokens: int,
    noise: float = 0.0,
    engine: EngineDrafts | None = None,
    seed: int = 3,
    check_s: float = 0.0,
) -> float:
    """Tokens a second of a request whose steps take 1 s, `draft_s` more a draft and `check_s` more
    with drafts.
    """
    drafts, dice = PayingDrafts(MOST, engine or EngineDrafts()), random.Random(seed)
    done, began = 0, clock.now
    while done < num_tokens:
        num_drafts = drafts.choose()
        seconds = 1 + num_drafts * draft_s + check_s * (num_drafts > 0)
        clock.now += seconds * (1 + noise * dice.random())
        num_right = 0
        while num_right < num_drafts and dice.random() < right:
            num_right += 1
        drafts.record(num_drafts, num_right, is_decode=True, is_ahead=False)
        done += 1 + num_right
    return done / (clock.now - began)


def run_ahead(
    clock: Clock, launch_s: float, device_s: float, draft_s: float, right: float, num_tokens: int
) -> float:
    """The same where steps without drafts are launched while the device computes the one before:
    the host launches for `launch_s`, then the device computes for `device_s`.
    """
    drafts, dice = PayingDrafts(MOST, EngineDrafts()), random.Random(3)
    done, began, device_ends = 0, clock.now, 0.0
    is_ahead = False
    while done < num_tokens:
        num_drafts = 0 if is_ahead else drafts.choose()
        if not is_ahead:
            clock.now += launch_s + num_drafts * draft_s
            device_ends = max(device_ends, clock.now) + device_s
        this_ends, was_ahead, is_ahead = device_ends, is_ahead, not (num_drafts or drafts.is_due)
        if is_ahead:
            clock.now += launch_s
            device_ends = max(device_ends, clock.now) + device_s
        clock.now = max(clock.now, this_ends)
        num_right = 0
        while num_right < num_drafts and dice.random() < right:
            num_right += 1
        drafts.record(num_drafts, num_right, True, was_ahead)
        done += 1 + num_right
    return done / (clock.now - began)


def best(draft_s: float, right: float) -> float:
    """Tokens a second of the best constant number."""
    return max(sum(right**i for i in range(k + 1)) / (1 + k * draft_s) for k in range(MOST + 1))


@pytest.mark.some(20)
@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("draft_s", [0.0, 0.02, 0.1, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("right", [0.0, 0.3, 0.7, 0.95, 1.0])
def test_it_comes_near_the_best_number(
    clock: Clock, draft_s: float, right: float, noise: float
) -> None:
    got = run(clock, draft_s, right, 2000, noise) * (1 + noise / 2)
    assert got >= 0.88 * best(draft_s, right)
    assert got >= 0.97


@pytest.mark.parametrize("draft_s", [0.02, 0.1, 0.25, 0.33, 1.0])
@pytest.mark.parametrize("right", [0.0, 0.1, 0.3])
def test_a_short_answer_that_cannot_be_drafted_loses_little(
    clock: Clock, draft_s: float, right: float
) -> None:
    """The mean over answers of 64 tokens, of an engine that knows what drafts cost."""
    engine = EngineDrafts()
    run(clock, draft_s, 1.0, 64, engine=engine)
    speeds = [run(clock, draft_s, right, 64, engine=engine, seed=seed) for seed in range(20)]
    assert sum(speeds) / len(speeds) >= 0.965


@pytest.mark.parametrize(
    ("draft_s", "right", "share"),
    [(0.05, 0.7, 0.9), (0.1, 0.8, 0.88), (0.25, 0.8, 0.91), (0.4, 0.7, 0.95), (0.4, 0.8, 0.92)],
)
def test_a_short_answer_comes_near_the_best_number(
    clock: Clock, draft_s: float, right: float, share: float
) -> None:
    """The mean over answers of 64 tokens, of an engine that knows what drafts cost."""
    engine = EngineDrafts()
    run(clock, draft_s, right, 64, engine=engine)
    speeds = [run(clock, draft_s, right, 64, engine=engine, seed=seed) for seed in range(40)]
    assert sum(speeds) / len(speeds) >= share * best(draft_s, right)


@pytest.mark.parametrize("right", [0.6, 0.7, 0.8])
def test_what_steps_with_any_drafts_cost_is_no_draft_of_theirs(clock: Clock, right: float) -> None:
    """A third of a step more if one drafts at all, and a twentieth for each draft."""
    engine, most = EngineDrafts(), range(1, MOST + 1)
    run(clock, 0.05, right, 200, engine=engine, check_s=0.33)
    speeds = [run(clock, 0.05, right, 400, 0.1, engine, seed, 0.33) for seed in range(20)]
    right_best = max(sum(right**i for i in range(k + 1)) / (1.33 + k * 0.05) for k in most)
    assert sum(speeds) / len(speeds) * 1.05 >= 0.92 * right_best


@pytest.mark.parametrize("right", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("draft_s", [0.05, 0.2, 0.6])
@pytest.mark.parametrize(("launch_s", "device_s"), [(1.0, 0.1), (0.7, 0.9), (0.1, 1.0)])
def test_steps_that_begin_ahead_of_each_other(
    clock: Clock, launch_s: float, device_s: float, draft_s: float, right: float
) -> None:
    """Also where launching takes longer than computing: then the last step without drafts, behind
    which none is launched, seems to take no time.
    """
    plain_s, lone_s = max(launch_s, device_s), launch_s + device_s
    rates = [
        sum(right**i for i in range(k + 1)) / (lone_s + k * draft_s) for k in range(1, MOST + 1)
    ]
    got = run_ahead(clock, launch_s, device_s, draft_s, right, 2000)
    assert got >= 0.88 * max(1 / plain_s, *rates)
    assert got >= 0.97 / plain_s


def test_who_knows_what_drafts_cost_times_one_step_without(clock: Clock) -> None:
    engine = EngineDrafts()
    run(clock, 0.1, 1.0, 64, engine=engine)
    drafts = PayingDrafts(MOST, engine)
    assert step(clock, drafts, 1.0) == 0
    assert step(clock, drafts, 1.0) > 0


def test_a_draft_that_was_hardly_tried_follows_the_one_before_it(clock: Clock) -> None:
    """The second one was wrong once; since then only first ones were made, and all were right."""
    engine = EngineDrafts()
    run(clock, 0.45, 1.0, 64, engine=engine)
    drafts, counts = PayingDrafts(MOST, engine), []
    for number in range(30):
        num_drafts = drafts.choose()
        clock.now += 1 + 0.45 * num_drafts
        drafts.record(num_drafts, min(num_drafts, 1 if number <= NUM_PLAIN else MOST), True, False)
        counts.append(num_drafts)
    assert max(counts[-4:]) > 2


def test_a_request_hopes_for_what_others_had(clock: Clock) -> None:
    engine, firsts = EngineDrafts(), []
    run(clock, 0.2, 1.0, 64, engine=engine)
    for right in [0.0] * 30 + [1.0] * 30:
        drafts = PayingDrafts(MOST, engine)
        for _ in range(NUM_PLAIN):
            step(clock, drafts, 1.0)
        firsts.append(drafts.choose())
        for _ in range(12):
            num_drafts = drafts.choose()
            clock.now += 1 + 0.2 * num_drafts
            drafts.record(num_drafts, int(right * num_drafts), True, False)
    assert firsts[0] > firsts[29] > 0, "texts differ: each is tried"
    assert firsts[-1] > firsts[29]


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize(("draft_s", "check_s"), [(0.6, 0.0), (0.4, 0.5), (0.05, 0.4)])
def test_an_answer_whose_drafts_are_seldom_right_loses_little(
    clock: Clock, draft_s: float, check_s: float, noise: float
) -> None:
    """Three of ten, in 512 tokens; also where a check takes longer than the drafts before it."""
    speeds = [run(clock, draft_s, 0.3, 512, noise, None, s, check_s) for s in range(5)]
    assert sum(speeds) / len(speeds) * (1 + noise / 2) >= 0.97


def step(clock: Clock, drafts: PayingDrafts, seconds: float, is_decode: bool = True) -> int:
    """A step in which all drafts are right; returns how many there were."""
    num_drafts = drafts.choose()
    clock.now += seconds
    drafts.record(num_drafts, num_drafts, is_decode, is_ahead=False)
    return num_drafts


def test_the_first_steps_tell_the_cost(clock: Clock) -> None:
    """Their median counts: one may have compiled a kernel."""
    drafts = PayingDrafts(MOST, EngineDrafts())
    assert [step(clock, drafts, 1.0) for _ in range(NUM_PLAIN)] == [0] * NUM_PLAIN
    for seconds in (30.0, *[1.02] * (NUM_TRIALS - 1)):
        assert step(clock, drafts, seconds) == FIRST
    assert drafts.choose() == MOST


@pytest.mark.parametrize("at", [0, 2, NUM_PLAIN, NUM_PLAIN + 1, 20])
def test_a_step_that_waited_for_another_program_is_no_rule(clock: Clock, at: int) -> None:
    engine = EngineDrafts()
    run(clock, 0.1, 1.0, 64, engine=engine)
    drafts, counts = PayingDrafts(MOST, engine), []
    for number in range(40):
        seconds = 1 + 0.1 * drafts.choose() + 100 * (number == at)
        counts.append(step(clock, drafts, seconds))
    assert sum(count > 0 for count in counts[NUM_PLAIN:]) > 30


def test_a_busy_start_is_forgotten(clock: Clock) -> None:
    """There all steps with drafts waited, for much longer than a step takes."""
    drafts, counts = PayingDrafts(MOST, EngineDrafts()), []
    for number in range(800):
        draft_s = 30 if number < 10 else 0.1
        counts.append(step(clock, drafts, 1 + drafts.choose() * draft_s))
    assert sum(count > 0 for count in counts[600:]) > 190


def test_a_busy_start_is_forgotten_by_short_answers(clock: Clock) -> None:
    """Each ends long before it would try drafts again by itself."""
    engine, counts = EngineDrafts(), []
    for request in range(60):
        drafts = PayingDrafts(MOST, engine)
        for _ in range(20):
            draft_s = 30 if request == 0 else 0.1
            counts.append(step(clock, drafts, 1 + drafts.choose() * draft_s))
    assert sum(count > 0 for count in counts[-200:]) > 160


def test_a_request_learns_the_cost_from_those_before(clock: Clock) -> None:
    engine = EngineDrafts()
    for draft_s, first in ((0.01, FIRST), (2.0, MOST)):
        drafts = PayingDrafts(MOST, engine)
        for _ in range(NUM_PLAIN):
            step(clock, drafts, 1.0)
        assert drafts.choose() == first
        for _ in range(20):
            step(clock, drafts, 1 + drafts.choose() * draft_s)
    assert PayingDrafts(MOST, engine).choose() == 0 and engine.seconds(1) > 1


def test_the_time_without_drafts_is_measured_anew(clock: Clock) -> None:
    """Where the first steps were slow, as they brought blocks to the device."""
    drafts = PayingDrafts(MOST, EngineDrafts())
    for _ in range(NUM_PLAIN):
        step(clock, drafts, 3.0)
    counts = []
    for _ in range(60):
        num_drafts = drafts.choose()
        counts.append(num_drafts)
        clock.now += 1 + num_drafts * 1.0
        drafts.record(num_drafts, num_drafts // 2, is_decode=True, is_ahead=False)
    assert max(counts[:10]) > 0 and sum(counts[20:]) <= 2


def test_they_pay_until_it_is_known_that_they_do_not(clock: Clock) -> None:
    """Neither while one is tried now and then; but again where these come true."""
    drafts, seen = PayingDrafts(MOST, EngineDrafts()), []
    for right in (0, 1):
        for _ in range(400):
            num_drafts = drafts.choose()
            seen.append((drafts.pays, num_drafts > 0))
            clock.now += 1 + num_drafts * 0.3
            drafts.record(num_drafts, right * num_drafts, is_decode=True, is_ahead=False)
    assert all(pays for pays, _ in seen[: NUM_PLAIN + NUM_TRIALS])
    assert not any(pays for pays, _ in seen[20:400]) and (False, True) in seen[20:400]
    assert all(pays for pays, _ in seen[-100:])


def test_a_step_with_other_work_says_nothing_of_the_time(clock: Clock) -> None:
    drafts = PayingDrafts(MOST, EngineDrafts())
    for seconds in (*[1.0] * NUM_PLAIN, *[1.02] * NUM_TRIALS):
        step(clock, drafts, seconds)
    for _ in range(20):
        step(clock, drafts, 50.0, is_decode=False)
    assert drafts.choose() == MOST


@pytest.mark.parametrize(("right", "gains"), [(0.6, False), (0.95, True)])
def test_drafts_must_gain_more_than_steps_that_are_begun_ahead(
    clock: Clock, right: float, gains: bool
) -> None:
    """Such a step takes 1 s, and one that is not 1.4 s: three of five right drafts gain only on the
    latter.
    """
    drafts, dice, seen, is_ahead = PayingDrafts(MOST, EngineDrafts()), random.Random(3), [], False
    for _ in range(400):
        num_drafts = 0 if is_ahead else drafts.choose()
        is_next_ahead = not num_drafts and not drafts.is_due
        clock.now += 1.0 if is_ahead else 1.4 + num_drafts * 0.3
        num_right = 0
        while num_right < num_drafts and dice.random() < right:
            num_right += 1
        drafts.record(num_drafts, num_right, True, is_ahead)
        seen.append(num_drafts)
        is_ahead = is_next_ahead
    share = sum(num_drafts > 0 for num_drafts in seen[100:]) / 300
    assert share > 0.8 if gains else share < 0.1


def test_steps_that_asked_for_no_number_are_not_counted(clock: Clock) -> None:
    """Such as steps before the KV is streamed."""
    drafts = PayingDrafts(MOST, EngineDrafts())
    for _ in range(50):
        clock.now += 0.1
        drafts.record(0, 0, is_decode=True, is_ahead=True)
    assert drafts.is_due, "the first that counts is not ahead of another"
    assert [step(clock, drafts, 1.0) for _ in range(NUM_PLAIN)] == [0] * NUM_PLAIN
    assert drafts.choose() == FIRST
