"""PayingDrafts: how many tokens to draft for one request, by their cost and how many were right.

A step with k drafts takes plain_s + fixed_s + k * draft_s seconds and gives 1 + p1 + p1 p2 + ...
tokens, where p_i is how often draft i is right if those before it are. The largest k with nearly
the most tokens a second is taken, as fewer bytes then cross the link for each, or none where that
is hardly more than without. fixed_s: no step with drafts is begun ahead and replayed, as others.

p_i is the mean of a beta distribution: what was checked, and before that an expectation. Of the
first draft that is what the engine's requests have had lately, of each other one p of the one
before it, if that is less: a depth that was hardly tried follows those that were.
"""

from __future__ import annotations

import math
import time
from collections import deque
from itertools import accumulate, combinations
from operator import mul
from statistics import median

from nanoengine.kv.draft_plan import HOPE, LEAST_GAIN

EXPECTED = 3.0  # an expectation counts as so many checked drafts
KEPT = 0.98  # each later step with drafts multiplies the weight of a check by it
NEARLY = 0.985  # this share of the most tokens a second is enough
LEAST_HOPE = 0.5  # texts differ: one that drafts guess badly says little about the next
HOPE_STEPS = 60  # steps with drafts that the engine's average spans
WEIGHT = 0.15  # of the newest step without drafts, if it was slower than those before
NUM_PLAIN = 2  # first steps without drafts; the faster one gives their time
FIRST = 2  # drafts of a step while their cost is unknown
NUM_TRIALS = 3  # steps with FIRST drafts
NUM_COSTS = 5  # newest costs whose median counts: one step may have waited for other programs
LEAST_SHARE = 0.5  # least part of a step's added time that grows with the number of drafts
# Drafts that do not pay are tried again, for at most this share of the time.
TRIAL_COST = 0.01
LEAST_WAIT = 16  # steps from one trial to the next
# Steps with drafts until one without is timed again; twice as many each time.
FIRST_REFRESH, LAST_REFRESH = 8, 64


class EngineDrafts:
    """Averages over all requests: a draft's seconds, and how often the first draft is right."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, float]] = deque(maxlen=NUM_COSTS)
        self._fixed_s = self._draft_s = math.inf
        self._hope = HOPE
        self.since_trial = 0  # steps of the newest request: a short one ends before its first trial

    def seconds(self, number: int) -> float:
        """The seconds that `number` drafts add to a step; infinite before any was timed."""
        return self._fixed_s + number * self._draft_s if number else 0.0

    @property
    def is_known(self) -> bool:
        """Whether enough steps were timed to decide; the first ones may have compiled kernels."""
        return len(self._recent) >= NUM_TRIALS

    @property
    def hope(self) -> float:
        """How often the first draft of a request is right, before any was checked."""
        return max(LEAST_HOPE, self._hope)

    def record_time(self, number: int, seconds: float) -> None:
        """Note the seconds that `number` drafts added to a step. Medians (Theil and Sen) fit a line
        through the newest of these.
        """
        self._recent.append((number, max(0.0, seconds)))
        one = median(added / drafts for drafts, added in self._recent)
        pairs = combinations(sorted(self._recent), 2)
        slopes = [(b - a) / (more - less) for (less, a), (more, b) in pairs if more > less]
        self._draft_s = min(max(median(slopes or [one]), LEAST_SHARE * one), one)
        left = median(added - drafts * self._draft_s for drafts, added in self._recent)
        self._fixed_s = max(0.0, left)

    def record_first(self, is_right: bool) -> None:
        """Whether the first draft of a step was right."""
        self._hope = _moved(self._hope, float(is_right), 1 / HOPE_STEPS)


class PayingDrafts:
    """Chooses for each step of one request (sequence.DraftLength)."""

    def __init__(self, most: int, engine: EngineDrafts) -> None:
        """most: drafts a step. engine: this request adds to it what it measures."""
        self._engine = engine
        # Of each draft of a step; older checks count less.
        self._num_right, self._num_checked = [0.0] * most, [0.0] * most
        self._is_drafting = True  # who does goes on for less: to stop and try again costs, too
        self._plain_s, self._num_plain = math.inf, 0
        self._run: list[float] = []  # times of steps without drafts, begun ahead of each other
        self._since_plain, self._since_trial = 0, engine.since_trial  # steps
        self._between_plain = FIRST_REFRESH
        self._began: float | None = None  # when the step under way was planned
        self._ended: float | None = None  # when the one before did, if it was timed

    @property
    def pays(self) -> bool:
        """Whether drafts are made in every step, or their cost is unknown yet."""
        return not self._is_decided or self._best() > 0

    @property
    def is_short(self) -> bool:
        """Whether drafts pay and take at most half as long as a step without. If one half of the
        requests drafts while the other is checked, they may then cost nothing.
        """
        best = self._best() if self._is_decided else 0
        return best > 0 and 2 * self._engine.seconds(best) <= self._plain_s

    @property
    def is_due(self) -> bool:
        """Whether the next step drafts or is the first one timed: it must not begin ahead."""
        return (self._began is None and self._ended is None) or self._number() > 0

    def choose(self) -> int:
        """How many tokens to draft in the step that begins now."""
        self._end_run()
        self._began = time.perf_counter()
        return self._number()

    def record(self, num_drafts: int, num_right: int, is_decode: bool, is_ahead: bool) -> None:
        """Note how many drafts of a step were right. is_decode: its time counts. is_ahead: it began
        before the previous step had ended.
        """
        began, self._began = self._ended if is_ahead else self._began, None
        self._ended = None if began is None else time.perf_counter()
        if began is None or self._ended is None:
            return
        seconds = self._ended - began
        self._count(num_drafts, num_right)
        if not is_decode:
            self._end_run()
        if num_drafts:
            self._learn(num_drafts, num_right)
        if is_decode and not num_drafts:
            self._time_plain(seconds, is_ahead)
        elif is_decode and self._num_plain:
            # A draft reads less than a step: one that takes two waited for other programs, and
            # would keep the next trial away for long.
            most = 2 * num_drafts * self._plain_s
            self._engine.record_time(num_drafts, min(seconds - self._plain_s, most))

    def _time_plain(self, seconds: float, is_ahead: bool) -> None:
        """Note a step without drafts. Where such steps begin ahead of each other, the time of one
        holds the launch of the next: a run's first one has two launches, and its last one none. So
        those between them count, or the mean of two.
        """
        if not is_ahead:
            self._end_run()
        elif len(self._run) > 1:
            self._note_plain(self._run[-1])
        before = self._run or [math.nan] * 2 * is_ahead  # of such a one the launch is not known
        self._run = [*before[:2], seconds]

    def _end_run(self) -> None:
        if 0 < len(self._run) < 3:
            self._note_plain(sum(self._run) / len(self._run))
        self._run = []

    def _note_plain(self, seconds: float) -> None:
        self._num_plain += 1
        # What is slower may be a step that also moved blocks, or in which others drafted.
        is_slower = seconds > self._plain_s
        self._plain_s = _moved(self._plain_s, seconds, WEIGHT) if is_slower else seconds

    @property
    def _is_decided(self) -> bool:
        """Whether enough was measured to say whether drafts pay."""
        return self._num_plain > 0 and self._engine.is_known

    def _number(self) -> int:
        """How many tokens the next step drafts."""
        if not self._is_decided:
            return 0 if self._num_plain < NUM_PLAIN else min(FIRST, len(self._num_right))
        if best := self._best():
            return best if self._since_plain < self._between_plain else 0
        wait = self._engine.seconds(1) / (self._plain_s * TRIAL_COST)
        return int(self._since_trial >= max(LEAST_WAIT, wait))

    def _count(self, num_drafts: int, num_right: int) -> None:
        """Count a step that has ended, by what was known when it began. After a trial that was
        right comes another, if drafts could pay at all.
        """
        is_promising = num_right == num_drafts and self._engine.seconds(1) < self._plain_s
        is_last_trial = num_drafts and not self.pays and not is_promising
        self._since_trial = 0 if is_last_trial else self._since_trial + 1
        self._engine.since_trial = self._since_trial
        if not num_drafts and self._since_plain >= self._between_plain:
            self._between_plain = min(2 * self._between_plain, LAST_REFRESH)
        self._since_plain = self._since_plain + 1 if num_drafts else 0

    def _learn(self, num_drafts: int, num_right: int) -> None:
        """Note which drafts of a step were right; those after a wrong one say nothing."""
        self._engine.record_first(num_right > 0)
        self._num_right = [KEPT * number for number in self._num_right]
        self._num_checked = [KEPT * number for number in self._num_checked]
        for depth in range(min(num_right + 1, num_drafts)):
            self._num_right[depth] += depth < num_right
            self._num_checked[depth] += 1
        self._is_drafting = self.pays

    def _chances(self) -> list[float]:
        """How often each draft of a step is right if those before it are."""
        chances: list[float] = []
        expected = hope = self._engine.hope
        for right, checked in zip(self._num_right, self._num_checked, strict=True):
            chances.append((right + EXPECTED * expected) / (checked + EXPECTED))
            expected = min(chances[-1], hope)
        return chances

    def _best(self) -> int:
        """The largest number with nearly the most tokens a second; 0 if none gains enough."""
        num_tokens = accumulate(accumulate(self._chances(), mul), initial=1.0)
        plain_s, added = self._plain_s, self._engine.seconds
        rates = [tokens / (plain_s + added(k)) for k, tokens in enumerate(num_tokens)]
        least = 1.0 if self._is_drafting else LEAST_GAIN
        enough = max(NEARLY * max(rates), least * rates[0])
        return max((number for number, rate in enumerate(rates) if rate > enough), default=0)


def _moved(average: float, new: float, weight: float) -> float:
    return average + weight * (new - average)
