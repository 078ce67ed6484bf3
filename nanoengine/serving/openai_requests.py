"""Reads the body of an OpenAI request as plain records: a prompt or messages, and SamplingParams.

Knows the keys of /v1/completions and /v1/chat/completions, and those that vLLM adds; knows no HTTP,
so a batch file and a server can share it. A key that would change the answer and cannot be obeyed
is refused, never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from nanoengine.errors import (
    InvalidParamsError,
    InvalidPromptError,
    RequestError,
    integer,
    near_name,
    shown,
)
from nanoengine.sampling_params import MAX_COMPLETIONS, MAX_LOGPROBS, SamplingParams

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# Keys with the name and the meaning of a field of SamplingParams; a chat says logprobs otherwise.
PARAMS = (
    *("temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stop_token_ids"),
    *("max_tokens", "min_tokens", "ignore_eos", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words"),
    *("skip_special_tokens", "include_stop_str_in_output", "logprobs"),
)
# Keys that do not change the answer.
IGNORED = (
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prediction"),
    *("prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls"),
)
OWN = {
    CHAT: ("messages", "max_completion_tokens", "chat_template_kwargs", "top_logprobs"),
    COMPLETIONS: ("prompt",),
}
# Keys that cannot be obeyed: the values that ask for nothing, and why others are refused.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "stream": ((False,), "the answer comes whole"),
    "stream_options": ((), "the answer comes whole"),
    "suffix": (("",), "text can only be added after the prompt"),
    "echo": ((False,), "the answer does not repeat the prompt"),
    "best_of": ((1,), "answers are not compared; n gives several"),
    "use_beam_search": ((False,), "beam search is LLM.beam_search in Python"),
    "prompt_logprobs": ((), "log-probabilities of prompts are in LLM.generate in Python"),
    "tools": (([],), "calls of tools are not read from the answer"),
    "tool_choice": (("none", "auto"), "calls of tools are not read from the answer"),
    "functions": (([],), "calls of tools are not read from the answer"),
    "function_call": (("none", "auto"), "calls of tools are not read from the answer"),
    "response_format": (({"type": "text"},), "the form of an answer cannot be forced"),
    "structured_outputs": ((), "the form of an answer cannot be forced"),
    "guided_json": ((), "the form of an answer cannot be forced"),
    "guided_regex": ((), "the form of an answer cannot be forced"),
    "guided_choice": ((), "the form of an answer cannot be forced"),
    "guided_grammar": ((), "the form of an answer cannot be forced"),
    "modalities": ((["text"],), "answers are text"),
    "audio": ((), "answers are text"),
    "web_search_options": ((), "nothing is searched"),
    "reasoning_effort": ((), "a template that has it takes it in chat_template_kwargs"),
    "verbosity": (("medium",), "a template that has it takes it in chat_template_kwargs"),
    "documents": (([],), "a template that has it takes it in chat_template_kwargs"),
    "chat_template": ((), "only the model's own template is used"),
    "continue_final_message": ((False,), "an answer begins a message of its own"),
}


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """Texts to complete, as text or token ids, each with `params`."""

    prompts: tuple[str | list[int], ...]
    params: SamplingParams

    @property
    def num_completions(self) -> int:
        """How many texts are wanted."""
        return len(self.prompts) * self.params.n


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation to go on with; the chat template checks the messages and its variables."""

    messages: Any
    params: SamplingParams
    template_kwargs: Any = None

    @property
    def num_completions(self) -> int:
        """How many texts are wanted."""
        return self.params.n


def read_request(
    endpoint: str, body: object, defaults: SamplingParams
) -> CompletionRequest | ChatRequest:
    """The request in a body. defaults: for parameters that it lacks; a chat without max_tokens may
    fill the context.

    Raises InvalidParamsError and InvalidPromptError, and RequestError for another endpoint.
    """
    if endpoint not in OWN:
        near = near_name(endpoint, OWN)
        hint = f"did you mean {near}?" if near else f"there are {' and '.join(OWN)}"
        raise RequestError(f"there is no endpoint {shown(endpoint)}; {hint}")
    if not isinstance(body, dict):
        raise InvalidPromptError(f"the body must be a JSON object, got {shown(body)}")
    given = {name: value for name, value in body.items() if value is not None}
    _check_names(endpoint, given)
    params = {name: given[name] for name in PARAMS if name in given}
    if endpoint == COMPLETIONS:
        made = replace(defaults, **params)
        return CompletionRequest(_prompts(given.get("prompt"), made.n), made)
    if "messages" not in given:
        raise InvalidPromptError('the body of a chat needs "messages"')
    limit = given.get("max_completion_tokens")
    if limit is not None and params.setdefault("max_tokens", limit) != limit:
        raise InvalidParamsError("max_tokens and max_completion_tokens differ; give one of them")
    made = replace(defaults, **{"max_tokens": None} | params | {"logprobs": _of_chat(given)})
    return ChatRequest(given["messages"], made, given.get("chat_template_kwargs"))


def _of_chat(given: dict[str, Any]) -> int | None:
    """How many likeliest tokens a chat wants beside each of its own; None without logprobs."""
    wanted, number = given.get("logprobs", False), given.get("top_logprobs", 0)
    if not isinstance(wanted, bool):
        raise InvalidParamsError(
            f"logprobs of a chat must be true or false, got {shown(wanted)}; top_logprobs says how "
            "many likeliest tokens"
        )
    whole = integer(number)
    if whole is None or not 0 <= whole <= MAX_LOGPROBS:
        raise InvalidParamsError(
            f"top_logprobs must be an integer from 0 to {MAX_LOGPROBS}, got {shown(number)}"
        )
    if whole and not wanted:
        raise InvalidParamsError(f"top_logprobs={whole} needs logprobs=true")
    return whole if wanted else None


def _check_names(endpoint: str, given: dict[str, Any]) -> None:
    """Raise InvalidParamsError for a key that cannot be obeyed, or that nobody knows."""
    known = {*PARAMS, *IGNORED, *OWN[endpoint]}
    for name, value in given.items():
        if name in known:
            continue
        if name not in REFUSED:
            near = near_name(name, known | REFUSED.keys())
            hint = f"; did you mean {near!r}?" if near else ""
            raise InvalidParamsError(f"unknown key {shown(name)}{hint}")
        neutral, why = REFUSED[name]
        if not any(value == each and type(value) is type(each) for each in neutral):
            raise InvalidParamsError(f"{name}={shown(value)} is not supported: {why}")


def _prompts(given: Any, n: int) -> tuple[str | list[int], ...]:
    """One text, ids of one, or a list of texts or ids. Raises InvalidPromptError."""
    are_many = isinstance(given, list) and given and integer(given[0]) is None
    prompts = given if are_many else [given]
    for prompt in prompts:
        is_prompt = isinstance(prompt, str) or (
            isinstance(prompt, list) and all(integer(token_id) is not None for token_id in prompt)
        )
        if not is_prompt or not prompt:
            raise InvalidPromptError(
                "prompt must be a text, a list of token ids, or a list of these, none of them "
                f"empty, got {shown(prompt)}"
            )
    if len(prompts) * n > MAX_COMPLETIONS:
        raise InvalidPromptError(
            f"{len(prompts)} prompts with n={n} are more than {MAX_COMPLETIONS} texts; make more "
            "requests of them"
        )
    return tuple(prompts)
