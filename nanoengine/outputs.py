"""What a request gives back: vLLM's attributes, and nano-vllm's `out["text"]`,
`out["token_ids"]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nanoengine.errors import RequestError
from nanoengine.sequence import RequestMetrics


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's natural log-probability in the model's own distribution, before temperature,
    penalties and the like. rank: 1 for the likeliest token.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs = dict[
    int, Logprob
]  # of one position: the token that stands there, and the likeliest


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One generated text.

    finish_reason: "stop" (end of sequence or a stop), "length", "abort" or "error".
    stop_reason: the stop string or stop token id that matched; None for the model's own end of
    sequence.
    logprobs: of each token, where asked for; cumulative_logprob: the sum of the tokens' own.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One text that LLM.beam_search found.

    token_ids: without the prompt's, and with the end-of-sequence token where that ended it
    (finish_reason "stop"; "length" else). cumulative_logprob: the sum of its tokens'
    log-probabilities; score: that over their number to the power of length_penalty.
    """

    text: str
    token_ids: list[int]
    score: float
    cumulative_logprob: float
    finish_reason: str


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """What LLM.beam_search found for one prompt: `beam_width` sequences, best score first; none
    when the prompt was refused or failed, and `error` says why.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    sequences: list[BeamSearchSequence]
    error: RequestError | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request, finished unless AsyncLLM shows how far it is. `error` is set, and
    outputs[0].finish_reason "error", when it was refused or failed.

    num_cached_tokens of the prompt were found in the prefix cache, num_host_cached_tokens of these
    on the host only. prompt_logprobs, where asked for: of each token of the prompt; None for its
    first. request_id: the engine's number, or the name that AsyncLLM's caller gave it.
    """

    request_id: int | str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    num_host_cached_tokens: int = 0
    error: RequestError | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def __getitem__(self, key: str) -> Any:
        """`out["text"]` and `out["token_ids"]` of the first completion, as nano-vllm's dicts
        have them.
        """
        if key not in ("text", "token_ids"):
            raise KeyError(f'{key!r}; a RequestOutput answers "text" and "token_ids"')
        return getattr(self.outputs[0], key)
