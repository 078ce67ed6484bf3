"""Drafts over the KV on the device, end to end: speed, link bytes and whether the output stays.

`python -m benchmarks.drafts MODEL --context 8192 --output FILE` streams each work of
draft_acceptance.py with a share of its context on the device: without guesses, by lookup, by
drafts, by both; with `--draft-model` by that model. With `--resident` all of it lies on the device.
The modes take turns, each in an engine of its own, and the first turn, which also reads the prompt,
is not timed. Each turn has a seed of its own, so what is sampled differs from turn to turn. A chat
ends where the model ends it; all else has as many tokens as are asked for.
"""

from __future__ import annotations

import argparse
import json
import statistics
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.draft_acceptance import Work, works
from nanoengine import LLM, SamplingParams
from nanoengine.bench.report import versions
from nanoengine.loading.find_model import resolve_model
from nanoengine.outputs import RequestOutput
from nanoengine.text.tokenizer import Tokenizer

BLOCK = 32
MODES = {
    "off": "off",
    "ngram": "ngram:{K}",
    "resident": "resident:{K}",
    "both": "ngram:{K}+resident:{K}",
    "draft": "draft:{K}",
}
SEED = 1  # of the first turn


@dataclass(frozen=True, slots=True)
class Answer:
    """What one mode made of a work in one turn."""

    token_ids: list[int]
    logprobs: list[float]
    tokens_per_s: float
    tokens_a_round: float
    guesses_a_round: float
    link_mb_a_token: float

    @classmethod
    def of(cls, output: RequestOutput) -> Answer:
        """The answer of a request's output."""
        made, metrics = output.outputs[0], output.metrics
        assert metrics is not None and metrics.tpot_s and made.logprobs is not None
        num_tokens = len(made.token_ids)
        num_rounds = num_tokens - metrics.num_accepted
        scores = zip(made.logprobs, made.token_ids, strict=True)
        return cls(
            made.token_ids,
            [entry[token].logprob for entry, token in scores],
            1 / metrics.tpot_s,
            num_tokens / num_rounds,
            metrics.num_guessed / num_rounds,
            metrics.h2d_bytes / num_tokens / 1e6,
        )


def measure(engines: dict[str, LLM], work: Work, num_tokens: int, num_turns: int) -> dict[str, Any]:
    """Medians of each mode's turns, and how its output differs from that without guesses."""
    found: dict[str, list[Answer]] = {name: [] for name in engines}
    for turn in range(1 + num_turns):
        params = SamplingParams(
            temperature=work.temperature,
            seed=SEED + turn,
            max_tokens=num_tokens,
            ignore_eos=not work.name.startswith("chat"),
            logprobs=0,
        )
        for name, llm in engines.items():
            (output,) = llm.generate([work.prompt], params, use_tqdm=False)
            found[name].append(Answer.of(output))
    plain = found["off"]
    lengths = [len(answer.token_ids) for answer in plain]
    rows: dict[str, Any] = {"prompt_tokens": len(work.prompt), "tokens": lengths}
    for name, answers in found.items():
        timed = answers[1:]
        speeds = [answer.tokens_per_s for answer in timed]
        ratios = [
            answer.tokens_per_s / off.tokens_per_s
            for answer, off in zip(timed, plain[1:], strict=True)
        ]
        pairs = zip(answers, plain, strict=True)
        same = [(answer, off) for answer, off in pairs if answer.token_ids == off.token_ids]
        rows[name] = {
            "tokens_per_s": round(statistics.median(speeds), 2),
            "times_off": round(statistics.median(ratios), 2),
            "spread": [round(min(ratios), 2), round(max(ratios), 2)],
            "tokens_a_round": round(statistics.median(a.tokens_a_round for a in timed), 2),
            "guesses_a_round": round(statistics.median(a.guesses_a_round for a in timed), 2),
            "link_mb_a_token": round(statistics.median(a.link_mb_a_token for a in timed), 2),
            "same_ids": f"{len(same)} of {len(answers)}",
            "largest_logprob_difference": max(
                (_difference(answer.logprobs, off.logprobs) for answer, off in same), default=None
            ),
        }
    return rows


def _difference(these: list[float], those: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(these, those, strict=True))


def main() -> None:
    """Measure and write the report after each work."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--share", type=float, default=0.12, help="of the context on the device")
    parser.add_argument("--resident", action="store_true", help="the whole context on the device")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none", help="of the weights, as in LLM")
    parser.add_argument("--drafts", type=int, default=8, help="most guesses of a step")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--works", nargs="+", help='only these, as in needle "prose, sampled"')
    others = [name for name in MODES if name != "off"]
    parser.add_argument("--modes", nargs="+", choices=others, help="beside off")
    parser.add_argument("--draft-model", help="for the mode draft")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_folder(resolve_model(args.model))
    share = 1.0 if args.resident else args.share
    settings: dict[str, Any] = {
        "kvcache_block_size": BLOCK,
        "num_gpu_blocks": int(args.context * share / BLOCK),
        "max_model_len": args.context,
        "max_num_seqs": 1,
        "dtype": args.dtype,
        "quantization": args.quantization,
    }
    if not args.resident:
        settings |= {"enable_cpu_offload": True, "offload_mode": "stream"}
    report: dict[str, Any] = {
        "model": args.model,
        "settings": {name: str(v) for name, v in vars(args).items()} | settings,
        "versions": versions(),
        "works": {},
    }
    wanted = args.modes or [name for name in others if name != "draft" or args.draft_model]
    with ExitStack() as opened:
        engines = {}
        for name in ("off", *wanted):
            own = settings | ({"draft_model": args.draft_model} if name == "draft" else {})
            llm = LLM(args.model, speculative=MODES[name].format(K=args.drafts), **own)
            engines[name] = opened.enter_context(llm)
        report["plan"] = {name: str(llm.plan).splitlines() for name, llm in engines.items()}
        for work in works(tokenizer, args.context, args.tokens, 1):
            if args.works and work.name not in args.works:
                continue
            report["works"][work.name] = measure(engines, work, args.tokens, args.turns)
            args.output.write_text(json.dumps(report, indent=2) + "\n")
            print(work.name, json.dumps(report["works"][work.name], indent=1), flush=True)


if __name__ == "__main__":
    main()
