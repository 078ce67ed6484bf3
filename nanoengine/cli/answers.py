"""What run and chat share: a loaded model with its parameters, and the statistics of an answer."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from nanoengine import SamplingParams, StreamDelta
from nanoengine.cli.flags import SAMPLED
from nanoengine.cli.interrupts import ended_by_ctrl_c
from nanoengine.config.engine import EngineConfig
from nanoengine.errors import counted
from nanoengine.text.tokenizer_files import check_tokenizer_is_there, path_of

READING_S, READING_EVERY_S = 2.0, 0.2
ERASED = "\r\x1b[K"  # the line of a terminal
COLUMNS = 80  # of a terminal that does not say it


@dataclass
class Statistics:
    """Counts and times of answers, one after the other. cut: what cut the last one."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    waiting_s: float = 0.0
    decoding_s: float = 0.0
    decoded_tokens: int = 0
    finish_reason: str | None = None
    cut: str = ""
    _began: float = 0.0
    _latest: float = 0.0

    def begin(self, prompt_tokens: int) -> None:
        """A prompt was queued."""
        self.prompt_tokens += prompt_tokens
        self._began, self._latest = time.perf_counter(), 0.0

    def add(self, delta: StreamDelta) -> None:
        """New tokens came."""
        now = time.perf_counter()
        self.output_tokens += len(delta.token_ids)
        self.finish_reason = delta.finish_reason
        if not delta.token_ids:
            return
        if self._latest:
            self.decoding_s += now - self._latest
            self.decoded_tokens += len(delta.token_ids)
        else:
            self.waiting_s += now - self._began
        self._latest = now

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first over their time; 0 without any."""
        return self.decoded_tokens / self.decoding_s if self.decoding_s else 0.0

    def row(self) -> dict[str, Any]:
        """For a program to read."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "finish_reason": self.finish_reason,
            "first_token_s": round(self.waiting_s, 4),
            "tokens_per_s": round(self.tokens_per_s, 2),
        }

    def __str__(self) -> str:
        speed = f"{self.tokens_per_s:.1f} tok/s" if self.tokens_per_s else "-"
        return (
            f"{counted(self.prompt_tokens, 'token')} in, {self.output_tokens} out; first token "
            f"after {self.waiting_s:.2f} s, then {speed}{'; ' if self.cut else ''}{self.cut}"
        )


class ReadingLine:
    """While it is open: a line on stderr, once READING_S have passed, that says how many tokens of
    a prompt are computed. It is erased in the end.
    """

    def __init__(self, seq: Any) -> None:
        """seq: a Sequence. A thread of our own only looks at it."""
        self._seq = seq
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def _show(self) -> None:
        wait, end = READING_S, ""
        while not self._has_ended.wait(wait):
            total = self._seq.num_prompt_tokens
            done = min(self._seq.num_computed, total)
            text = f"reading the prompt: {done} of {total} tokens"
            end = ERASED
            print(ERASED + text[: _columns() - 1], end="", file=sys.stderr, flush=True)
            wait = READING_EVERY_S
        print(end, end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()


def _columns() -> int:
    """Of the terminal behind stderr: of a line that is longer, only the last row is erased."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or COLUMNS
    except (OSError, ValueError):
        return COLUMNS


class Model:
    """A loaded model, and how its requests are sampled."""

    def __init__(self, llm: Any, params: SamplingParams, is_quiet: bool) -> None:
        self.llm = llm
        self.params = params
        self._is_quiet = is_quiet

    def deltas(self, stream: Any) -> Iterator[StreamDelta]:
        """Those of a stream. Until the first, a terminal shows how much of the prompt is read."""
        is_shown = not self._is_quiet and sys.stderr is not None and sys.stderr.isatty()
        with ReadingLine(stream.request.seqs[0]) if is_shown else nullcontext():
            first = next(stream, None)
        if first is not None:
            yield first
            yield from stream

    def what_cut(self, answer: Statistics) -> str:
        """The limit at which this single answer was cut; "" if it ended by itself."""
        if answer.finish_reason != "length":
            return ""
        most, plan = self.params.max_tokens, self.llm.plan
        if most is not None and answer.output_tokens >= most:
            return f"the answer was cut at {counted(most, 'token')}; --max-tokens allows more"
        return (
            f"the answer was cut, as prompt and answer have {plan.max_model_len} tokens, the limit "
            f"({plan.max_model_len_bound})"
        )

    def say(self, text: str) -> None:
        """A line on stderr, unless --quiet."""
        if not self._is_quiet:
            print(text, file=sys.stderr, flush=True)


@contextmanager
def open_model(
    config: EngineConfig, sampling: dict[str, Any] | None, is_quiet: bool
) -> Iterator[Model]:
    """Load the model and say so on stderr. sampling: fields of SamplingParams that were given in a
    terminal, where the model or SAMPLED chooses the rest; None: requests bring their own.

    Raises ModelNotFoundError, too, for a folder with a model and no tokenizer.
    """
    folder = path_of(config.model)
    if config.tokenizer is None and (folder / "config.json").is_file():  # weights take long
        check_tokenizer_is_there(folder)
    start = time.perf_counter()
    if not is_quiet:
        print(f"loading {config.model} ...", file=sys.stderr, flush=True)
    with ended_by_ctrl_c():
        from nanoengine import LLM  # imports torch, which takes a second

    settings = asdict(config)
    with LLM(settings.pop("model"), **settings) as llm:
        inputs = llm.llm_engine.inputs
        params = inputs.default_params
        if sampling is not None and config.generation_config != "vllm":
            params = inputs.model_sampling_params(SamplingParams(**SAMPLED))
        model = Model(llm, replace(params, **(sampling or {})), is_quiet)
        model.say(
            f"loaded in {time.perf_counter() - start:.1f} s; {llm.plan.device}, {llm.plan.dtype}; "
            f"up to {llm.plan.max_model_len} tokens ({llm.plan.max_model_len_bound})"
        )
        yield model
