"""How many tokens a round of drafts from resident KV would give: measured offline, in fp32.

`python -m benchmarks.draft_acceptance MODEL --context 8192 --output FILE` generates each work once
with all KV. Each of its positions is then the beginning of a round: up to 12 drafts see a share of
the context, and count until one is not the work's token. `--table FILES` prints what it found.

A verified output does not depend on the drafts, so the rounds of every selector, budget and K
follow from these counts: a round of K drafts advances by min(count, K) + 1.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

from benchmarks.cut_attention import (
    BLOCK,
    DEPTH,
    PER_LAYER,
    SELECTORS,
    VERIFIED,
    CutDecoder,
    Reference,
    Sampling,
    Selector,
)
from nanoengine.bench.niah import NiahBuilder, PromptFormat
from nanoengine.config.engine import EngineConfig
from nanoengine.engine.speculative import PromptLookup
from nanoengine.loading.find_model import resolve_model
from nanoengine.loading.loader import load_model
from nanoengine.models.decoder import Decoder
from nanoengine.models.layer_ops import TorchOps
from nanoengine.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
SHARES = (0.06, 0.12, 0.25)
PER_LAYER_SHARE = 0.12
NEEDLE_TOKENS = 24  # of an answer: the number, and what the model says after it
TEMPERATURE = 0.8  # of the sampled works: what small models choose greedily ends in a loop
BATCH = 32
QUESTION = "Write a long summary of this documentation, page by page. Quote its own sentences."
NGRAM, NGRAM_OR = "n-gram", "n-gram, else "
SHOWN_DEPTHS = (4, 8, 12)
SHOWN = (
    NGRAM,
    "recent 12%",
    "mass 12%",
    "both 6%",
    "both 12%",
    "both 25%",
    "both, per layer 12%",
    NGRAM_OR + "both 12%",
)


@dataclass(frozen=True, slots=True)
class Work:
    """A prompt and how it goes on: `num_tokens` tokens, fewer if it `stops` at an end token.
    starts: the most rounds, one from each of the first tokens.
    """

    name: str
    prompt: list[int]
    num_tokens: int
    starts: int
    temperature: float = 0.0
    stops: bool = False


@dataclass(frozen=True, slots=True)
class Counts:
    """Right drafts from each start of one generation, which has `num_tokens` after the first.

    The n-gram drafter's `guessed` says where it had a guess at all.
    """

    num_tokens: int
    by_drafter: dict[str, list[int]]
    guessed: list[bool]


def works(tokenizer: Tokenizer, context: int, starts: int, needles: int) -> Iterator[Work]:
    """The works of one model: prompt and generated tokens fit `context`."""
    generated = starts + DEPTH + 1
    room = context - generated
    form = PromptFormat(tokenizer)
    for sample in NiahBuilder("niah_single_1", form, context, seed=0).samples(needles):
        yield Work("needle", sample.prompt_ids, NEEDLE_TOKENS, NEEDLE_TOKENS, stops=True)
    prose = "\n\n".join(topics[name] for name in sorted(topics))
    files = sorted((ROOT / "nanoengine").rglob("*.py"))
    code = "\n\n".join(f"# {path.relative_to(ROOT)}\n{path.read_text()}" for path in files)
    prompts = {
        "prose": tokenizer.encode(prose)[:room],
        "code": tokenizer.encode(code)[:room],
        "chat": _chat(tokenizer, room),
    }
    for name, prompt in prompts.items():
        stops = name == "chat"
        yield Work(name, prompt, generated, starts, stops=stops)
        yield Work(f"{name}, sampled", prompt, generated, starts, TEMPERATURE, stops)


def _chat(tokenizer: Tokenizer, room: int) -> list[int]:
    """The pages of docs/ and a question; by the model's template, if it has one."""
    pages = sorted((ROOT / "docs").glob("*.md"), key=lambda path: path.stat().st_size)
    text = "\n\n".join(path.read_text() for path in pages)
    text = tokenizer.decode(tokenizer.encode(text)[: room - 100])
    if not tokenizer.has_chat_template:
        return tokenizer.encode(f"{text}\n\nQuestion: {QUESTION}\n\nAnswer:")
    message = {"role": "user", "content": f"{text}\n\n{QUESTION}"}
    return tokenizer.encode(tokenizer.apply_chat_template([message]), add_special_tokens=False)


def drafters() -> Iterator[tuple[str, Selector, float]]:
    """What is measured: the name of a row, the selector and the share of the blocks it keeps."""
    for selector in SELECTORS:
        for share in SHARES:
            yield f"{selector.name} {share:.0%}", selector, share
    yield f"{PER_LAYER.name} {PER_LAYER_SHARE:.0%}", PER_LAYER, PER_LAYER_SHARE


def measure(model: CutDecoder, work: Work, stops: Sequence[int]) -> tuple[Reference, Counts]:
    """Generate a work and count the right drafts from each position."""
    banned = () if work.stops else tuple(stops)
    sampling = Sampling(work.temperature, banned)
    reference = model.reference(work.prompt, work.num_tokens, sampling, stops)
    num_tokens = len(reference.tokens) - len(work.prompt) - 1
    num_starts = min(work.starts, num_tokens)
    starts = range(len(work.prompt), len(work.prompt) + num_starts)
    count = functools.partial(model.accepted, reference, sampling=sampling)
    spread = starts[:: max(1, num_starts // 8)]
    whole = count(spread, SELECTORS[0], 1.0)
    most = [min(DEPTH, len(reference.tokens) - 1 - start) for start in spread]
    if whole != most:
        print(f"{work.name}: with the whole context {whole} of {most} drafts are right", flush=True)
    lookup, tokens = PromptLookup(), reference.tokens.tolist()
    guesses = [lookup.guess(tokens[: start + 1], DEPTH) for start in starts]
    by_drafter = {
        NGRAM: [
            common(guess, tokens[start + 1 :]) for guess, start in zip(guesses, starts, strict=True)
        ]
    }
    for name, selector, share in drafters():
        began = time.perf_counter()
        by_drafter[name] = count(starts, selector, share)
        mean = sum(by_drafter[name]) / len(starts)
        print(f"  {name}: {mean:.2f}, {time.perf_counter() - began:.0f} s", flush=True)
    return reference, Counts(num_tokens, by_drafter, [bool(guess) for guess in guesses])


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """The length of the common beginning."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def tokens_a_round(counts: Sequence[Counts], drafter: str, depth: int) -> float:
    """Tokens of all generations over their rounds of up to `depth` drafts."""
    tokens = rounds = 0
    for one in counts:
        accepted, at = accepted_by(one, drafter), 0
        while at < len(accepted):
            at += min(accepted[at], depth) + 1
            rounds += 1
        tokens += min(at, one.num_tokens)
    return tokens / rounds


def accepted_by(counts: Counts, drafter: str) -> list[int]:
    """Right drafts from each start; "n-gram, else X" takes X where the n-gram has no guess."""
    if not drafter.startswith(NGRAM_OR):
        return counts.by_drafter[drafter]
    other = counts.by_drafter[drafter.removeprefix(NGRAM_OR)]
    mixed = zip(counts.guessed, counts.by_drafter[NGRAM], other, strict=True)
    return [ngram if guessed else resident for guessed, ngram, resident in mixed]


def acceptance(counts: Sequence[Counts], drafter: str) -> list[float | None]:
    """By depth: the share of drafts that are right where those before them are; None: no draft."""
    shares: list[float | None] = []
    for depth in range(1, DEPTH + 1):
        tried = [
            found
            for one in counts
            for at, found in enumerate(one.by_drafter[drafter])
            if found >= depth - 1 and at + depth <= one.num_tokens
        ]
        right = sum(found >= depth for found in tried)
        shares.append(round(right / len(tried), 3) if tried else None)
    return shares


def report(counts: Sequence[Counts]) -> dict[str, Any]:
    """A work's figures: by drafter, tokens a round for K of 1 to 12 and acceptance by depth.

    right: right drafts from each start, a hex digit each. repeats: the share of positions where the
    n-gram drafter's first guess is right.
    """
    names = list(counts[0].by_drafter)
    first = [found > 0 for one in counts for found in one.by_drafter[NGRAM]]
    mixed = [NGRAM_OR + name for name in names if name != NGRAM]
    return {
        "starts": len(first),
        "repeats": round(sum(first) / len(first), 3),
        "guessed": ["".join("01"[flag] for flag in one.guessed) for one in counts],
        "tokens_a_round": {
            name: [round(tokens_a_round(counts, name, k), 2) for k in range(1, DEPTH + 1)]
            for name in [*names, *mixed]
        },
        "acceptance": {name: acceptance(counts, name) for name in names},
        "right": {
            name: ["".join(f"{found:x}" for found in one.by_drafter[name]) for one in counts]
            for name in names
        },
    }


def table(files: Sequence[Path]) -> str:
    """Tokens a round at K of 4, 8 and 12 in Markdown: a row for each model and work."""
    lines = [f"| model | work | repeats | {' | '.join(SHOWN)} |", "|---" * (3 + len(SHOWN)) + "|"]
    for found in (json.loads(path.read_text()) for path in files):
        for name, work in found["works"].items():
            cells = [
                " / ".join(f"{work['tokens_a_round'][drafter][k - 1]:.1f}" for k in SHOWN_DEPTHS)
                for drafter in SHOWN
            ]
            about = f"{found['model']} {found['context'] // 1024}K | {name} | {work['repeats']:.0%}"
            lines.append(f"| {about} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure one model and write its JSON, or print the table of such files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--context", type=int, default=8192, help="tokens, generated ones included")
    parser.add_argument("--starts", type=int, default=160, help="rounds that begin in a work")
    parser.add_argument("--needles", type=int, default=2, help="samples of RULER's niah_single_1")
    parser.add_argument("--works", nargs="+", help="these alone")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--table", nargs="+", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.table:
        print(table(args.table))
        return
    result = run(args)
    if args.output is None:
        print(json.dumps(result, indent=1))


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the works one after the other; the file is written after each."""
    folder = resolve_model(args.model)
    tokenizer = Tokenizer.from_folder(folder)
    loaded = load_model(
        folder, EngineConfig(str(folder)), torch.device("cpu"), torch.float32, TorchOps()
    )
    assert isinstance(loaded.decoder, Decoder)
    model = CutDecoder(loaded.config, loaded.decoder, args.context, BATCH)
    result: dict[str, Any] = {
        "model": args.model,
        "weights": loaded.source,
        "context": args.context,
        "block_size": BLOCK,
        "rows_of_mass": VERIFIED,
        "works": {},
    }
    counts: dict[str, list[Counts]] = {}
    for work in works(tokenizer, args.context, args.starts, args.needles):
        if args.works and work.name not in args.works:
            continue
        print(f"{work.name}, {len(work.prompt)} tokens, {time.strftime('%H:%M:%S')}", flush=True)
        reference, found = measure(model, work, loaded.config.eos_token_ids)
        text = tokenizer.decode(reference.tokens[len(work.prompt) :].tolist())
        print(f"  {text!r}", flush=True)
        counts.setdefault(work.name, []).append(found)
        result["works"][work.name] = {
            "prompt_tokens": len(work.prompt),
            "prompt_sha256": hashlib.sha256(repr(work.prompt).encode()).hexdigest()[:16],
            "begins": text[:200],
            **report(counts[work.name]),
        }
        if args.output is not None:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
