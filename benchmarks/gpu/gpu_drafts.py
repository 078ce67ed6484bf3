"""What drafts over the KV on the device give on a GPU: parts of gpu_check.py.

Random weights give speed and never acceptance, so the share of right drafts is forced here: the
draft steps and the checking pass run as always, and a coin decides what is taken of them.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.gpu.gpu_measure import Row, Scale, decoding, offloaded, running, token_bytes
from nanoengine import SamplingParams
from nanoengine.engine.draft_turns import FasterWay
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.sequence import ScheduledSequence

RIGHT = (0.7, 0.8, 0.9)
MOST = 24
ROWS = (1, 2, 5, 9, 17)
NUM_ROUNDS = 10
DRAFTS_OF_TURNS = 6


class FixedLength:
    """Drafts as many tokens in each step (sequence.DraftLength)."""

    pays = is_short = True

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self.is_due = num_drafts > 0

    def choose(self) -> int:
        return self._num_drafts

    def record(self, num_drafts: int, num_right: int, is_decode: bool, is_ahead: bool) -> None:
        """Nothing is learned."""


@contextmanager
def right_share(share: float) -> Iterator[None]:
    """So many of the drafts count as right, each if those before it do."""
    dice = random.Random(1)

    def accepted(item: ScheduledSequence, sampled: list[int]) -> list[int]:
        right = 0
        while right < len(item.guesses) and dice.random() < share:
            right += 1
        return sampled[: right + 1]

    with mock.patch.object(ScheduledSequence, "accepted", accepted):
        yield


def time_rounds(made: LLMEngine, context: int, num_drafts: int, share: float) -> Row:
    """Rounds of one request with so many drafts, of which a share is right."""
    with decoding(made, [context]), right_share(share):
        return running_rounds(made, num_drafts, 4, NUM_ROUNDS)


def running_rounds(made: LLMEngine, num_drafts: int, num_warmups: int, num_rounds: int) -> Row:
    """The same of the request that is running."""
    (seq,) = made.scheduler.running
    seq.draft_length = FixedLength(num_drafts)
    for _ in range(num_warmups):
        made.step()
    made.kv.reset_counters()
    num_tokens, start = seq.num_tokens, time.perf_counter()
    for _ in range(num_rounds):
        made.step()
    seconds = time.perf_counter() - start
    made_tokens = seq.num_tokens - num_tokens
    return {
        "drafts": num_drafts,
        "round_ms": round(1000 * seconds / num_rounds, 2),
        "tokens_a_round": round(made_tokens / num_rounds, 2),
        "tokens_per_s": round(made_tokens / seconds, 2),
        "streamed_gb_a_round": round(made.kv.counters.h2d_bytes / num_rounds / 1e9, 3),
    }


def drafts(folder: Path, scale: Scale) -> Iterator[Row]:
    """Rounds of a request that streams nearly all of its KV, for each context."""
    most = max(scale.decode_contexts)
    with running(folder, scale, num_gpu_blocks=64) as made:
        size = token_bytes(made)
    settings = offloaded(scale, most, size) | {"max_model_len": most + 4096}
    with running(folder, scale, speculative=f"resident:{MOST}", **settings) as made:
        for context in scale.decode_contexts:
            yield rounds_at(made, context)


def resident_drafts(folder: Path, scale: Scale) -> Iterator[Row]:
    """The same of one that lies on the device, also where by its bytes it would not try. Its steps
    without drafts are begun ahead of each other.
    """
    most = max(scale.decode_contexts)
    settings = {"num_gpu_blocks": most // 256 + 8, "speculative": f"resident:{MOST}"}
    with running(folder, scale, **settings) as made:
        made.kv.spec = replace(made.kv.spec, drafts_from=1)
        for context in scale.decode_contexts:
            yield rounds_at(made, context)


def turns(folder: Path, scale: Scale) -> Iterator[Row]:
    """Two streamed requests whose drafts are checked in one step, and in turns: one drafts while
    the other is on the link.
    """
    contexts = scale.decode_contexts[:2]
    with running(folder, scale, num_gpu_blocks=64) as made:
        size = token_bytes(made)
    settings = offloaded(scale, 2 * max(contexts), size) | {"max_model_len": max(contexts) + 4096}
    settings |= {"kv_cache_gib": 2 * scale.device_gib, "speculative": f"resident:{MOST}"}
    with running(folder, scale, **settings) as made:
        for context in contexts:
            rates = {apart: _rate_of_two(made, context, apart) for apart in (False, True)}
            yield {
                "context": context,
                "drafts": DRAFTS_OF_TURNS,
                "together_tokens_per_s": round(rates[False], 2),
                "in_turns_tokens_per_s": round(rates[True], 2),
                "ratio": round(rates[True] / rates[False], 3),
            }


def _rate_of_two(made: LLMEngine, context: int, apart: bool) -> float:
    """Tokens a second of two requests. apart: whether they take turns, where the device can."""
    with (
        mock.patch.object(FasterWay, "next", lambda self, num_checked: apart),
        decoding(made, [context, context]),
        right_share(RIGHT[1]),
    ):
        seqs = list(made.scheduler.running)
        for seq in seqs:
            seq.draft_length = FixedLength(DRAFTS_OF_TURNS)
        for _ in range(6):
            made.step()
        before, start = sum(seq.num_tokens for seq in seqs), time.perf_counter()
        for _ in range(2 * NUM_ROUNDS):
            made.step()
        assert made.scheduler.turns.are_apart == (apart and made.scheduler.turns.are_taken)
        return (sum(seq.num_tokens for seq in seqs) - before) / (time.perf_counter() - start)


def rounds_at(made: LLMEngine, context: int) -> Row:
    """Without drafts, and at three shares of right drafts beside the arithmetic, (plain + K drafts)
    / plain.
    """
    plain = time_rounds(made, context, 0, 0.0)
    plain_ms = plain["round_ms"]
    row: Row = {"context": context, "plain": plain, "right": {}}
    many = time_rounds(made, context, MOST, 0.0)
    draft_ms = max(0.0, many["round_ms"] - plain_ms) / MOST
    row["draft_ms"] = round(draft_ms, 3)
    for share in RIGHT:
        num_drafts = best_number(share, plain_ms, draft_ms)
        found = time_rounds(made, context, num_drafts, share)
        multiple = found["tokens_per_s"] / plain["tokens_per_s"]
        gain = found["tokens_a_round"] * plain_ms / (plain_ms + num_drafts * draft_ms)
        found |= {"multiple": round(multiple, 2), "arithmetic": round(gain, 2)}
        row["right"][share] = found | {"share": round(multiple / gain, 3)}
    return row


def best_number(share: float, plain_ms: float, draft_ms: float) -> int:
    """The number of drafts with most tokens a second."""

    def rate(num_drafts: int) -> float:
        num_tokens = math.fsum(share**i for i in range(num_drafts + 1))
        return num_tokens / (plain_ms + num_drafts * draft_ms)

    return max(range(1, MOST + 1), key=rate)


def sharing(folder: Path, scale: Scale, num_questions: int = 8) -> Row:
    """Questions about one long document, one after the other and all at once: together they cross
    the link once. And a follow-up: how long until its first token, with the document on the host.
    """
    context = scale.decode_contexts[min(1, len(scale.decode_contexts) - 1)]
    with running(folder, scale, num_gpu_blocks=64) as made:
        size = token_bytes(made)
    document = [(i * 7919) % 1000 for i in range(context)]
    questions = [[*document, *range(n, n + 64)] for n in range(num_questions)]
    settings = offloaded(scale, context + 4096, size) | {"max_model_len": context + 4096}
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with running(folder, scale, enable_prefix_caching=True, **settings) as made:
        first = _answer(made, [document], params)
        alone = _answer(made, questions[:1], params)
        together = _answer(made, questions, params)
    return {
        "context": context,
        "questions": num_questions,
        "first_token_s": round(first["first_token_s"], 2),
        "follow_up_first_token_s": round(alone["first_token_s"], 3),
        "follow_up_times_faster": round(first["first_token_s"] / alone["first_token_s"], 1),
        "alone_tokens_per_s": round(alone["tokens_per_s"], 2),
        "together_tokens_per_s": round(together["tokens_per_s"], 2),
        "ratio": round(together["tokens_per_s"] / alone["tokens_per_s"], 2),
    }


def _answer(made: LLMEngine, prompts: list[list[int]], params: SamplingParams) -> dict[str, Any]:
    """Seconds to the first token of the first prompt, and tokens a second of all while decoding."""
    start = time.perf_counter()
    for prompt in prompts:
        made.add_request(prompt, params)
    outputs = []
    while made.has_unfinished_requests:
        outputs += made.step()
    times = [o.metrics.first_token_time or start for o in outputs if o.metrics is not None]
    num_tokens = sum(len(output.outputs[0].token_ids) - 1 for output in outputs)
    seconds = time.perf_counter() - max(times)
    return {"first_token_s": min(times) - start, "tokens_per_s": num_tokens / seconds}
