"""Benchmarks of many requests on two KV tiers: prefix reuse, sharing, preemption, fairness.

Each returns rows of figures by name.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from nanoengine.api.llm import LLM
from nanoengine.bench.main import make_llm, offload_settings
from nanoengine.errors import EngineError
from nanoengine.sampling_params import SamplingParams
from nanoengine.sequence import Sequence

Row = dict[str, Any]
MODES = ("in_place", "stream")


def shared_prefix(args: argparse.Namespace) -> dict[str, Row]:
    """Serve `num_seqs` requests with one long shared prefix twice: cold, then warm.

    The device cannot hold the prefix beside the running requests; `device only` has the same blocks
    and no host tier.
    """
    rng, rows = random.Random(args.seed), {}
    for mode in ("resident", "device only", *MODES):
        settings = offload_settings(args, mode, _resident_blocks(args), enable_prefix_caching=True)
        with make_llm(args, **settings) as llm:
            vocab = llm.llm_engine.model_config.vocab_size
            shared = _random_ids(rng, vocab, args.input_len)
            prompts: list[Any] = [
                shared + _random_ids(rng, vocab, args.own_len) for _ in range(args.num_seqs)
            ]
            _warm_up(llm)
            rows[mode] = {
                "cold": _answer_all(llm, prompts, args.output_len),
                "warm": _answer_all(llm, prompts, args.output_len),
            }
    return rows


def sharing(args: argparse.Namespace) -> dict[str, Row]:
    """Answer one question about a streamed document, then `num_seqs` at once, and draw as many
    samples of one answer: what all read crosses the link once.
    """
    rng, rows = random.Random(args.seed), {}
    settings = offload_settings(args, "stream", enable_prefix_caching=True)
    with make_llm(args, **settings) as llm:
        vocab = llm.llm_engine.model_config.vocab_size
        document = _random_ids(rng, vocab, args.input_len)
        prompts: list[Any] = [
            document + _random_ids(rng, vocab, args.own_len) for _ in range(args.num_seqs)
        ]
        llm.generate([document], _greedy(1), use_tqdm=False)
        llm.generate(prompts, _greedy(1), use_tqdm=False)
        llm.llm_engine.kv.reset_counters()
        rows["one question"] = _answer_all(llm, prompts[:1], args.output_len)
        rows["questions"] = _answer_all(llm, prompts, args.output_len)
        rows["samples"] = _answer_all(llm, prompts[:1], args.output_len, args.num_seqs)
    return rows


def preemption(args: argparse.Namespace) -> dict[str, Row]:
    """Seconds from a preemption to the next token, with KV kept on the host and recomputed."""
    rng, rows = random.Random(args.seed), {}
    for mode in MODES:
        with make_llm(args, **offload_settings(args, mode)) as llm:
            engine = llm.llm_engine
            prompt = _random_ids(rng, engine.model_config.vocab_size, args.input_len)
            _warm_up(llm)
            engine.add_request(prompt, _greedy(4 * args.rounds + 4))
            (seq,) = engine.scheduler.waiting
            _step_until(llm, seq, 2)
            resumed, computed = [], []
            for _ in range(args.rounds):
                resumed.append(_resume_s(llm, seq, forget=False))
                computed.append(_resume_s(llm, seq, forget=True))
            engine.abort(seq.seq_id)
            ratio = statistics.median(computed) / statistics.median(resumed)
            rows[mode] = {
                "resume_s": [round(s, 4) for s in resumed],
                "recompute_s": [round(s, 4) for s in computed],
                "recompute_to_resume": round(ratio, 1),
            }
    return rows


def fairness(args: argparse.Namespace) -> dict[str, Row]:
    """Time a short request beside a streamed one, with and without the link budget, and one that
    arrives during a long prefill.
    """
    rows: dict[str, Row] = {}
    budgets: dict[str, dict[str, Any]] = {"budget": {}, "no budget": {"stream_mib_per_step": 1e6}}
    for name, budget in budgets.items():
        budget["speculative"] = "off"  # drafts would cross the link less often
        with make_llm(args, **offload_settings(args, "stream", **budget)) as llm:
            rows[name] = _beside_a_streamed_one(args, llm)
    with make_llm(args, **offload_settings(args, "stream")) as llm:
        rows["arrival during a prefill"] = _arrival_during_prefill(args, llm)
    return rows


def _beside_a_streamed_one(args: argparse.Namespace, llm: LLM) -> Row:
    engine, rng = llm.llm_engine, random.Random(args.seed)
    vocab = engine.model_config.vocab_size
    _warm_up(llm)
    short = _start(llm, _random_ids(rng, vocab, 64))
    alone = _gaps(llm, short, args.output_len)
    long = _start(llm, _random_ids(rng, vocab, args.input_len))
    before, start = long.num_output_tokens, time.perf_counter()
    beside = _gaps(llm, short, args.output_len)
    elapsed = time.perf_counter() - start
    streamed = long.num_output_tokens - before
    engine.abort([short.seq_id, long.seq_id])
    return {
        "stream_blocks_per_step": llm.plan.stream_blocks_per_step,
        "alone_ms": round(1000 * statistics.mean(alone), 2),
        "beside_ms": round(1000 * statistics.mean(beside), 2),
        "beside_to_alone": round(statistics.mean(beside) / statistics.mean(alone), 2),
        "longest_gap_ms": round(1000 * max(beside), 1),
        "streamed_tokens_per_s": round(streamed / elapsed, 2),
        "streamed_part": round(streamed / len(beside), 3),
    }


def _arrival_during_prefill(args: argparse.Namespace, llm: LLM) -> Row:
    engine, rng = llm.llm_engine, random.Random(args.seed)
    vocab = engine.model_config.vocab_size
    _warm_up(llm)
    engine.add_request(_random_ids(rng, vocab, args.input_len), _greedy(1))
    (long,) = engine.scheduler.waiting
    while long.num_computed <= args.input_len // 4:
        engine.step()
    engine.add_request(_random_ids(rng, vocab, 64), _greedy(1))
    short = next(reversed(engine.scheduler.waiting))
    start, num_steps = time.perf_counter(), 0
    while not short.num_output_tokens:
        engine.step()
        num_steps += 1
    elapsed, left = time.perf_counter() - start, long.num_remaining
    engine.abort([long.seq_id, short.seq_id])
    return {"num_steps": num_steps, "first_token_s": round(elapsed, 3), "prefill_left": left}


def _start(llm: LLM, prompt: list[int]) -> Sequence:
    """Start a request and step until its first token; it goes on to the end of its context."""
    llm.llm_engine.add_request(prompt, _greedy(1 << 20))
    seq = next(reversed(llm.llm_engine.scheduler.waiting))
    _step_until(llm, seq, 1)
    return seq


def _gaps(llm: LLM, seq: Sequence, num_tokens: int) -> list[float]:
    """Seconds between the next `num_tokens` tokens of a request."""
    gaps = []
    for _ in range(num_tokens):
        start = time.perf_counter()
        _step_until(llm, seq, seq.num_output_tokens + 1)
        gaps.append(time.perf_counter() - start)
    return gaps


def _resume_s(llm: LLM, seq: Sequence, forget: bool) -> float:
    """Seconds from preempting the only running request to its next token."""
    engine, before = llm.llm_engine, seq.num_output_tokens
    engine.scheduler.preempt(seq)
    if forget:
        engine.kv.deallocate(seq)
    start = time.perf_counter()
    _step_until(llm, seq, before + 1)
    return time.perf_counter() - start


def _step_until(llm: LLM, seq: Sequence, num_output_tokens: int) -> None:
    while seq.num_output_tokens < num_output_tokens:
        if seq.is_finished:
            raise EngineError("a request ended before it was measured: shorten the long prompt")
        llm.llm_engine.step()


def _answer_all(llm: LLM, prompts: list[Any], output_len: int, num_samples: int = 1) -> Row:
    """num_samples: of each prompt; greedy if it is 1."""
    params = _greedy(output_len)
    if num_samples > 1:
        params = replace(params, n=num_samples, temperature=1.0, seed=0)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    elapsed = time.perf_counter() - start
    counters, num_tokens = llm.llm_engine.kv.counters, len(prompts) * num_samples * output_len
    row = {
        "output_tokens_per_s": round(num_tokens / elapsed, 1),
        "cached_tokens": sum(output.num_cached_tokens for output in outputs),
        "host_cached_tokens": sum(output.num_host_cached_tokens for output in outputs),
        "h2d_gb": round(counters.h2d_bytes / 1e9, 3),
        "link_mb_a_token": round(counters.h2d_bytes / num_tokens / 1e6, 2),
    }
    llm.llm_engine.kv.reset_counters()
    return row


def _resident_blocks(args: argparse.Namespace) -> int:
    """Blocks that hold the shared prefix and all requests, with two to spare."""
    size = args.kvcache_block_size
    each = -(-(args.own_len + args.output_len) // size) + 1
    return int(-(-args.input_len // size) + args.num_seqs * each + 2)


def _warm_up(llm: LLM) -> None:
    llm.generate([[1, 2, 3]], _greedy(2), use_tqdm=False)
    llm.llm_engine.kv.reset_counters()


def _random_ids(rng: random.Random, vocab_size: int, length: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(length)]


def _greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, ignore_eos=True, max_tokens=num_tokens)


def add_commands(commands: Any) -> Iterator[tuple[argparse.ArgumentParser, Callable[..., Any]]]:
    """Yield this module's subcommands, each with its function."""
    for name, function, defaults, text in (
        (
            "prefix",
            shared_prefix,
            {"input_len": 2048, "output_len": 64, "num_gpu_blocks": 20, "num_seqs": 16},
            "requests that share a long prefix, cold and warm",
        ),
        (
            "sharing",
            sharing,
            {"input_len": 8000, "output_len": 64, "num_gpu_blocks": 12, "num_seqs": 8},
            "questions about one streamed document, and samples of one answer",
        ),
        (
            "preempt",
            preemption,
            {"input_len": 4000, "num_gpu_blocks": 8},
            "seconds from preemption to the next token, resumed and recomputed",
        ),
        (
            "fairness",
            fairness,
            {"input_len": 8000, "output_len": 64, "num_gpu_blocks": 8},
            "a short request beside a streamed one, and during a prefill",
        ),
    ):
        sub = commands.add_parser(
            name, help=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        sub.set_defaults(max_num_seqs=None, kv_cache_gib=None)
        _arguments(sub, defaults)
        yield sub, function


def _arguments(sub: argparse.ArgumentParser, defaults: dict[str, int]) -> None:
    texts = {
        "input_len": "tokens of a long prompt, or of a shared prefix",
        "output_len": "tokens to generate, or to time",
        "num_seqs": "requests at once",
        "num_gpu_blocks": "device blocks",
    }
    for name, default in defaults.items():
        sub.add_argument("--" + name.replace("_", "-"), type=int, default=default, help=texts[name])
    if "num_seqs" in defaults:
        sub.add_argument("--own-len", type=int, default=32, help="tokens after the shared prefix")
    else:
        sub.add_argument("--rounds", type=int, default=5, help="repetitions")
    sub.add_argument("--kvcache-block-size", type=int, default=256, help="tokens of a block")
    sub.add_argument("--kv-offload-gib", type=float, default=2.0, help="host KV")
