"""`nanoengine bench serve`: many clients at once against a server with OpenAI's /v1/completions.

Sends prompts of random token ids, reads the answers as they stream, and reports throughput and
latencies under vLLM's names. The server may be any engine's: ours, vLLM's, llama.cpp's.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from nanoengine.bench.report import versions
from nanoengine.bench.workload import random_requests
from nanoengine.errors import ConfigError, EngineError

PERCENTILES = (50, 90, 99)
END = "[DONE]"


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: `prompt` in token ids, and how many tokens it wants."""

    prompt: list[int]
    max_tokens: int

    def body(self, model: str) -> dict[str, Any]:
        """Greedy, at full length, streamed. vLLM and llama.cpp know ignore_eos."""
        return {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass(slots=True)
class Answered:
    """What became of a request. times: when each part of its text came; lines: all that came, if
    they are kept, with seconds after the start; has_ended: the server said so; error: "" if none.
    """

    asked: Asked
    start: float
    times: list[float] = field(default_factory=list)
    lines: list[tuple[float, str]] | None = None
    num_tokens: int = 0
    has_ended: bool = False
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """Seconds to the first part."""
        return self.times[0] - self.start

    @property
    def e2el_s(self) -> float:
        """Seconds to the last part."""
        return self.times[-1] - self.start

    @property
    def itl_s(self) -> list[float]:
        """Seconds between parts: of one token each, unless several came at once."""
        return [after - before for before, after in itertools.pairwise(self.times)]

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first; None with fewer than two."""
        if self.num_tokens < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.num_tokens - 1)


def run_serve(args: argparse.Namespace) -> dict[str, Any]:
    """Ask as the command line says. Raises EngineError if the server does not answer."""
    requests = random_requests(args, args.num_prompts, args.vocab_size)
    asked = [Asked(prompt, max_tokens) for prompt, max_tokens in requests]
    answers, elapsed, cpu_s = asyncio.run(_ask_all(args, asked))
    if args.record:
        kept = [
            {"prompt": each.asked.prompt, "max_tokens": each.asked.max_tokens, "lines": each.lines}
            for each in answers
        ]
        Path(args.record).write_text(json.dumps(kept), encoding="utf-8")
    failed = [answer for answer in answers if answer.error]
    if len(failed) == len(answers):
        raise EngineError(
            f"no request of {len(failed)} was answered; the first error: {failed[0].error}"
        )
    names = ("num_prompts", "min_input", "max_input", "min_output", "max_output", "seed")
    return {
        "workload": {"name": "serve", **{name: getattr(args, name) for name in names}},
        "versions": versions(),
        "request_rate": args.request_rate or "inf",
        "max_concurrency": args.max_concurrency,
        **report(answers, elapsed),
        "client_cpu_s": round(cpu_s, 2),
        "errors": sorted({answer.error for answer in failed}),
    }


async def _ask_all(
    args: argparse.Namespace, asked: Sequence[Asked]
) -> tuple[list[Answered], float, float]:
    """All answers, the seconds that they took, and those of this process's CPU."""
    room = asyncio.Semaphore(args.max_concurrency or len(asked))
    if args.api_key and not args.api_key.isascii():
        raise ConfigError("--api-key must be ASCII, as HTTP's headers are")
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    address = args.base_url.rstrip("/").removesuffix("/v1")  # OpenAI's clients take it with /v1
    async with httpx2.AsyncClient(
        base_url=address, headers=headers, timeout=args.timeout, limits=limits
    ) as client:
        model = args.served_model_name or await _served_model(client)

        async def ask(each: Asked) -> Answered:
            async with room:
                return await _ask(client, model, each, keeps_lines=bool(args.record))

        cpu_start, start = time.process_time(), time.perf_counter()
        tasks = [
            asyncio.create_task(ask(each))
            async for each in _arriving(asked, args.request_rate, args.seed)
        ]
        answers = await asyncio.gather(*tasks)
        return answers, time.perf_counter() - start, time.process_time() - cpu_start


async def _served_model(client: httpx2.AsyncClient) -> str:
    """The first model that the server has."""
    try:
        answer = await client.get("/v1/models")
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx2.HTTPError, LookupError, ValueError) as error:
        address = str(client.base_url).rstrip("/")
        raise EngineError(
            f"no model was found at {address}/v1/models: {error!r}; start a server with "
            "`nanoengine serve MODEL`, or give --base-url"
        ) from error


async def _arriving(asked: Sequence[Asked], rate: float | None, seed: int) -> AsyncIterator[Asked]:
    """The requests one after the other, `rate` a second on average (a Poisson process); None: at
    once. One that comes late, as sleep ends late, does not delay those after it.
    """
    rng, due = random.Random(seed), time.perf_counter()
    for number, each in enumerate(asked):
        if number and rate is not None:
            due += rng.expovariate(rate)
            await asyncio.sleep(due - time.perf_counter())
        yield each


async def _ask(client: httpx2.AsyncClient, model: str, asked: Asked, keeps_lines: bool) -> Answered:
    answer = Answered(asked, time.perf_counter(), lines=[] if keeps_lines else None)
    try:
        async with client.stream("POST", "/v1/completions", json=asked.body(model)) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode("utf-8", "replace")
                answer.error = f"HTTP {response.status_code}: {text[:200]}"
                return answer
            async for line in response.aiter_lines():
                _read_line(answer, line)
    except Exception as error:  # a chunk that is none of OpenAI's, too: the others go on
        answer.error = repr(error)
    if not answer.times:
        answer.error = answer.error or "the answer has no text"
    elif not answer.has_ended:
        answer.error = answer.error or f"the answer was cut off: it has no {END}"
    return answer


def _read_line(answer: Answered, line: str) -> None:
    """One line of server-sent events."""
    if answer.lines is not None:
        answer.lines.append((time.perf_counter() - answer.start, line))
    if not line.startswith("data:"):
        return
    data = line.removeprefix("data:").strip()
    if data == END:
        answer.has_ended = True
        return
    chunk = json.loads(data)
    if "error" in chunk:
        answer.error = str(chunk["error"])
    if chunk.get("choices"):
        answer.times.append(time.perf_counter())
    if usage := chunk.get("usage"):
        answer.num_tokens = usage["completion_tokens"]


def report(answers: Sequence[Answered], elapsed_s: float) -> dict[str, Any]:
    """vLLM's keys; times in milliseconds."""
    done = [answer for answer in answers if not answer.error]
    num_in = sum(len(answer.asked.prompt) for answer in done)
    num_out = sum(answer.num_tokens for answer in done)
    rows: dict[str, Any] = {
        "duration": round(elapsed_s, 3),
        "completed": len(done),
        "failed": len(answers) - len(done),
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "request_throughput": round(len(done) / elapsed_s, 3),
        "output_throughput": round(num_out / elapsed_s, 2),
        "total_token_throughput": round((num_in + num_out) / elapsed_s, 2),
    }
    for name, values in (
        ("ttft", [answer.ttft_s for answer in done]),
        ("tpot", [tpot for answer in done if (tpot := answer.tpot_s) is not None]),
        ("itl", [gap for answer in done for gap in answer.itl_s]),
        ("e2el", [answer.e2el_s for answer in done]),
    ):
        rows |= _spread(name, values)
    return rows


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles; nothing of nothing."""
    if not seconds:
        return {}
    rows = {f"mean_{name}_ms": np.mean(seconds), f"median_{name}_ms": np.median(seconds)}
    rows |= {f"p{share}_{name}_ms": np.percentile(seconds, share) for share in PERCENTILES}
    return {key: round(1000 * float(value), 3) for key, value in rows.items()}
