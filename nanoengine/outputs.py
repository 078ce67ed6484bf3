"""Outputs of requests, with vLLM's attributes and nano-vllm's `out["text"]`, `out["token_ids"]`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from nanoengine.errors import RequestError


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's natural log-probability in the model's own distribution, before temperature,
    penalties and other adjustments. rank: 1 for the likeliest token.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]  # of one position: its token, then the likeliest tokens


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool in an answer. arguments: the text of a JSON object; with tool_choice "auto"
    the model may have written anything there, and a text that was cut ends in the middle of it.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """An answer of a chat. content: None if there are calls alone. reasoning: what a thinking model
    thought before; "" if it did not.
    """

    content: str | None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The message as the next chat takes it, in OpenAI's form and without the thoughts."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return message


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """New text of the call number `index` of an answer. id, name: where the call begins, else None.
    arguments: joined, they are those of the ToolCall.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """What is new in the message of an answer; joined, the parts are those of the ChatMessage."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One generated text.

    finish_reason: "stop" (end of sequence or a stop), "length", "abort" or "error".
    stop_reason: the stop string or stop token id that matched; None for end of sequence.
    logprobs: of each token, if requested; cumulative_logprob: the sum of the tokens' own.
    message: of a chat, the text's thoughts, content and calls of tools.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    message: ChatMessage | None = field(default=None, compare=False)  # ids of calls are random

    def finished(self) -> bool:
        """Whether the text has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class StreamDelta(str):
    """The new part of one completion. It is a string, its text, with these fields besides; two
    deltas are equal if all fields are, and none is false, as the last one may have no text.

    request_id, index: which completion of which request. text: never holds half a UTF-8 character
    or the start of a stop string, so it may be "". token_ids: the new tokens, also those whose text
    is held back. finish_reason, stop_reason: as in CompletionOutput, on the last delta of a
    completion, else None. error: the error if finish_reason is "error". logprobs: those of
    token_ids, if requested. message: in a chat, what the text says; it may come later.
    """

    request_id: int | str
    index: int = field()  # type: ignore[assignment]  # hides str.index, which nobody needs here
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: RequestError | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    message: MessageDelta | None = field(default=None, compare=False)

    def __new__(cls, request_id: int, index: int, text: str, *_rest: Any, **_fields: Any) -> Self:
        return str.__new__(cls, text)

    def __getnewargs__(self) -> tuple[Any, ...]:  # for copies and pickle
        return self.request_id, self.index, self.text

    __hash__ = str.__hash__

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One text that LLM.beam_search found.

    token_ids: without the prompt, with the end-of-sequence token if that ended the text
    (finish_reason "stop", otherwise "length"). cumulative_logprob: the sum of its tokens'
    log-probabilities; score: that over their number to the power of length_penalty.
    """

    text: str
    token_ids: list[int]
    score: float
    cumulative_logprob: float
    finish_reason: str


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """Result of LLM.beam_search for one prompt: `beam_width` sequences, best score first. If the
    prompt was refused or failed, there are none and `error` is set.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    sequences: list[BeamSearchSequence]
    error: RequestError | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request (time.perf_counter seconds; None until reached) and what it cost.

    num_tokens: generated, in all of its num_completions.
    h2d_bytes, d2h_bytes: its blocks that crossed the link (a shared block counts for each request).
    num_guessed, num_accepted: tokens that were guessed ahead, and those of them that were right.
    num_stalls, num_prefetch_hits: how often its steps waited for a copy, or found it ready.
    peak_streamed: most sequences that read host KV in one of its steps.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_tokens: int = 0
    num_preemptions: int = 0
    h2d_bytes: int = 0
    d2h_bytes: int = 0
    num_guessed: int = 0
    num_accepted: int = 0
    num_stalls: int = 0
    num_prefetch_hits: int = 0
    peak_streamed: int = 0
    num_completions: int = 1

    def plus(self, other: RequestMetrics) -> RequestMetrics:
        """Of a request with these completions, and those of another with the same arrival."""

        def both(choose: Callable[[list[Any]], Any], *names: str) -> dict[str, Any]:
            pairs = {name: (getattr(self, name), getattr(other, name)) for name in names}
            there = {name: [v for v in pair if v is not None] for name, pair in pairs.items()}
            return {name: choose(values) for name, values in there.items() if values}

        summed = ("num_tokens", "num_preemptions", "h2d_bytes", "d2h_bytes", "num_guessed")
        return RequestMetrics(
            self.arrival_time,
            **both(min, "first_scheduled_time", "first_token_time"),
            **both(max, "finished_time", "num_stalls", "num_prefetch_hits", "peak_streamed"),
            **both(sum, *summed, "num_accepted", "num_completions"),
        )

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds between tokens of a completion after the first; None for a single token."""
        num_gaps = (self.num_tokens - self.num_completions) / self.num_completions
        if self.finished_time is None or self.first_token_time is None or num_gaps <= 0:
            return None
        return (self.finished_time - self.first_token_time) / num_gaps

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Result of a request, unfinished only in AsyncLLM's outputs. If it was refused or failed,
    `error` is set and outputs[0].finish_reason is "error".

    num_cached_tokens: tokens of the prompt found in the prefix cache; num_host_cached_tokens: those
    found only on the host. prompt_logprobs: of each token of the prompt, if requested; None for the
    first. request_id: the engine's number, or the name that AsyncLLM's caller gave.
    """

    request_id: int | str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    metrics: RequestMetrics | None = field(default=None, repr=False)
    num_cached_tokens: int = 0
    num_host_cached_tokens: int = 0
    error: RequestError | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def __getitem__(self, key: str) -> Any:
        """`out["text"]` and `out["token_ids"]` of the first completion, as in nano-vllm's dicts."""
        if key not in ("text", "token_ids"):
            raise KeyError(f'{key!r}; a RequestOutput answers "text" and "token_ids"')
        return getattr(self.outputs[0], key)
