"""Reads the body of an OpenAI request as plain records: a prompt or messages, and SamplingParams.

Knows no HTTP, so a batch file and a server can share it. A key that would change the answer and
cannot be obeyed is refused, never ignored; openai_keys.py has the tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
from nanoengine.serving.answer_forms import OWN_FORM, form_key, form_of
from nanoengine.serving.openai_keys import CHAT, COMMON, OWN, PARAMS, given_keys, unknown_key
from nanoengine.text.rendering import Rendering
from nanoengine.text.tools import ToolUse, read_tools

MAX_BIASES = 1024
MAX_WORD = 1000  # characters of a stop or of a bad word: the engine searches them in every step
# Variables of chat templates that models have; others could stand for the template's own arguments.
TEMPLATE_VARIABLES = (
    *("enable_thinking", "thinking", "thinking_budget", "preserve_thinking", "clear_thinking"),
    *("reasoning_effort", "model_identity", "date_string", "documents", "controls"),
    *("tools", "builtin_tools", "custom_tools", "xml_tools", "python_tools"),
    *("tools_in_user_message", "custom_instructions"),
)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")


@dataclass(frozen=True, slots=True)
class Streaming:
    """The answer is wanted in chunks. include_usage: one more chunk tells the tokens of all;
    continuous_usage: each chunk tells the tokens so far.
    """

    include_usage: bool = False
    continuous_usage: bool = False


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """Texts to complete, as text or token ids, each with `params`.

    echo: the answer begins with the prompt; echo_only: and ends with it, so what is generated (the
    engine needs one token) is dropped. may_be_cut: max_tokens may reach beyond the context. model:
    the name in the body, which nobody has checked. form_key: what the body calls the form of the
    answer. has_token_ids: the answer has those of prompts and texts. add_special_tokens: whether a
    text gets those that the tokenizer adds.
    """

    prompts: tuple[str | list[int], ...]
    params: SamplingParams
    echo: bool = False
    echo_only: bool = False
    may_be_cut: bool = False
    cache_salt: str | None = None
    streaming: Streaming | None = None
    model: str | None = None
    form_key: str = OWN_FORM
    has_token_ids: bool = False
    add_special_tokens: bool = True

    @property
    def num_completions(self) -> int:
        """How many texts are wanted."""
        return len(self.prompts) * self.params.n


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation to go on with. rendering: how the chat template writes it, which checks the
    messages and the values of its variables. may_be_cut: max_tokens may reach beyond the context.
    model: the name in the body, which nobody has checked. form_key: what the body calls the form of
    the answer. tools: that the model may call; None if there are none. shows_reasoning: whether the
    answer has the thoughts; has_token_ids: those of the prompt and of its texts.
    """

    messages: Any
    params: SamplingParams
    rendering: Rendering = field(default_factory=Rendering)
    may_be_cut: bool = False
    cache_salt: str | None = None
    streaming: Streaming | None = None
    model: str | None = None
    form_key: str = OWN_FORM
    tools: ToolUse | None = None
    shows_reasoning: bool = True
    has_token_ids: bool = False

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
    given = given_keys(body, {*PARAMS, *COMMON, *OWN[endpoint]})
    return _chat(given, defaults) if endpoint == CHAT else _completion(given, defaults)


def _completion(given: dict[str, Any], defaults: SamplingParams) -> CompletionRequest:
    params, echo = _params(given), read_flag(given, "echo")
    # OpenAI's way to ask for no more than the log-probabilities of a prompt.
    echo_only = echo and integer(params.get("max_tokens")) == 0
    if echo_only:
        params["max_tokens"] = 1
    if echo:
        params["prompt_logprobs"] = params.get("logprobs")
    made = params_from(defaults, params, _names(given))
    prompts = _prompts(given.get("prompt"), made.n)
    may_be_cut = "max_tokens" not in params  # nobody asked for the default
    return CompletionRequest(
        *(prompts, made, echo, echo_only, may_be_cut),
        **common_keys(given),
        has_token_ids=read_flag(given, "return_token_ids"),
        add_special_tokens=read_flag(given, "add_special_tokens", True),
    )


def _chat(given: dict[str, Any], defaults: SamplingParams) -> ChatRequest:
    if "messages" not in given:
        raise InvalidPromptError('the body of a chat needs "messages"')
    params = {"max_tokens": None} | _params(given) | {"logprobs": _chat_logprobs(given)}
    is_parallel = read_flag(given, "parallel_tool_calls", True)
    use = read_tools(given.get("tools"), given.get("tool_choice"), is_parallel)
    return ChatRequest(
        plain_messages(given["messages"]),
        params_from(defaults, params, _names(given)),
        read_rendering(given, use),
        **common_keys(given),
        tools=use,
        shows_reasoning=read_flag(given, "include_reasoning", True),
        has_token_ids=read_flag(given, "return_token_ids"),
    )


def _params(given: dict[str, Any]) -> dict[str, Any]:
    """Fields of SamplingParams, which checks them."""
    params = {name: given[name] for name in PARAMS if name in given} | form_of(given)
    limit = given.get("max_completion_tokens")
    if limit is not None and params.setdefault("max_tokens", limit) != limit:
        raise InvalidParamsError("max_tokens and max_completion_tokens differ; give one of them")
    return params


def _names(given: dict[str, Any]) -> dict[str, str]:
    """What the body calls fields."""
    newer = "max_completion_tokens"
    limit = {} if given.get(newer) is None or "max_tokens" in given else {"max_tokens": newer}
    return {OWN_FORM: form_key(given)} | limit


def common_keys(given: dict[str, Any]) -> dict[str, Any]:
    """Fields that the requests of all endpoints have. Raises InvalidParamsError."""
    return {
        "cache_salt": read_text(given, "cache_salt"),
        "streaming": _streaming(given),
        "model": read_text(given, "model"),
        "form_key": form_key(given),
    }


def read_text(given: dict[str, Any], name: str) -> str | None:
    """A key whose value is a text that is not empty. Raises InvalidParamsError for another one."""
    value = given.get(name)
    if value is not None and not (isinstance(value, str) and value):
        raise InvalidParamsError(f"{name} must be a text that is not empty, got {shown(value)}")
    return value


def read_flag(given: dict[str, Any], name: str, default: bool = False) -> bool:
    """A key that is true or false. Raises InvalidParamsError for another value."""
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidParamsError(f"{name} must be true or false, got {shown(value)}")
    return value


def read_object(given: dict[str, Any], name: str) -> dict[str, Any] | None:
    """A key whose value is an object. Raises InvalidParamsError for another one."""
    value = given.get(name)
    if value is not None and not isinstance(value, dict):
        raise InvalidParamsError(f"{name} must be an object, got {shown(value)}")
    return value


def _streaming(given: dict[str, Any]) -> Streaming | None:
    is_wanted, options = read_flag(given, "stream"), read_object(given, "stream_options")
    if options is None:
        return Streaming() if is_wanted else None
    if not is_wanted:
        raise InvalidParamsError("stream_options needs stream=true")
    for name in options:
        if name not in STREAM_OPTIONS:
            raise unknown_key(name, STREAM_OPTIONS, " of stream_options")
    usage, continuous, _ = (read_flag(options, name) for name in STREAM_OPTIONS)
    return Streaming(usage, continuous)


def _chat_logprobs(given: dict[str, Any]) -> int | None:
    """How many likeliest tokens a chat wants beside each of its own; None without logprobs."""
    wanted = given.get("logprobs", False)
    if not isinstance(wanted, bool):
        raise InvalidParamsError(
            f"logprobs of a chat must be true or false, got {shown(wanted)}; top_logprobs says how "
            "many likeliest tokens"
        )
    number = top_logprobs(given)
    if number and not wanted:
        raise InvalidParamsError(f"top_logprobs={number} needs logprobs=true")
    return number if wanted else None


def top_logprobs(given: dict[str, Any]) -> int:
    """How many likeliest tokens are wanted beside each. Raises InvalidParamsError."""
    number = given.get("top_logprobs", 0)
    whole = integer(number)
    if whole is None or not 0 <= whole <= MAX_LOGPROBS:
        raise InvalidParamsError(
            f"top_logprobs must be an integer from 0 to {MAX_LOGPROBS}, got {shown(number)}"
        )
    return whole


def plain_messages(messages: Any) -> Any:
    """The messages with the roles that templates know: a developer's message is a system's."""
    if not isinstance(messages, list):
        return messages
    return [
        {**each, "role": "system"}
        if isinstance(each, dict) and each.get("role") == "developer"
        else each
        for each in messages
    ]


def text_content(content: Any, kinds: tuple[str, ...], where: str) -> str | list[dict[str, str]]:
    """A message's content with its parts as a chat has them. kinds: types of parts that are texts.

    Raises InvalidPromptError for another content or part.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidPromptError(
            f"{where} must be a text or a list of text parts, got {shown(content)}"
        )
    return [text_part(part, kinds, f"{where}[{index}]") for index, part in enumerate(content)]


def text_part(
    part: Any,
    kinds: tuple[str, ...],
    where: str,
    hint: str = "no images, files or calls of tools are read",
) -> dict[str, str]:
    """A part of a message's content as a chat has it. Raises InvalidPromptError for another part,
    which says the hint.
    """
    text = part.get("text") if isinstance(part, dict) and part.get("type") in kinds else None
    if not isinstance(text, str):
        raise InvalidPromptError(
            f'{where} must be {{"type": "{kinds[0]}", "text": "..."}}, got {shown(part)}; {hint}'
        )
    return {"type": "text", "text": text}


def params_from(
    defaults: SamplingParams, given: dict[str, Any], names: Mapping[str, str]
) -> SamplingParams:
    """The defaults with fields changed. names: what the body calls fields; errors say it, too.

    Raises InvalidParamsError.
    """
    with named_as_given(names):
        _check_sizes(given)
        return replace(defaults, **given)


@contextmanager
def named_as_given(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about fields say what the body calls them: `names`, by field."""
    try:
        yield
    except InvalidParamsError as error:
        text = str(error)
        own = next((name for name in names if re.match(rf"{name}\b", text)), None)
        if own is None or names[own] == own:
            raise
        raise InvalidParamsError(names[own] + text.removeprefix(own)) from None


def _check_sizes(given: dict[str, Any]) -> None:
    """Raise InvalidParamsError for what would keep the engine from others' requests for long."""
    biases = given.get("logit_bias")
    if isinstance(biases, dict | list) and len(biases) > MAX_BIASES:
        raise InvalidParamsError(
            f"logit_bias names {len(biases)} tokens, and may name {MAX_BIASES}; allowed_token_ids "
            "has no such limit"
        )
    for name in ("stop", "bad_words"):
        words = given.get(name)
        for word in words if isinstance(words, list) else [words]:
            if isinstance(word, str) and len(word) > MAX_WORD:
                raise InvalidParamsError(
                    f"{name} holds a text of {len(word)} characters; the limit is {MAX_WORD}"
                )


def template_kwargs(body: dict[str, Any]) -> dict[str, Any] | None:
    """The variables of the chat template in a body. Raises InvalidParamsError."""
    given = read_object(body, "chat_template_kwargs")
    for name in given or ():
        if name not in TEMPLATE_VARIABLES:
            near = near_name(name, TEMPLATE_VARIABLES)
            hint = f"did you mean {near!r}?" if near else f"it may: {', '.join(TEMPLATE_VARIABLES)}"
            raise InvalidParamsError(f"chat_template_kwargs may not hold {shown(name)}; {hint}")
    return given


def read_rendering(given: dict[str, Any], use: ToolUse | None) -> Rendering:
    """How the body of a chat wants it written. use: its tools. Raises InvalidParamsError."""
    return Rendering(
        read_flag(given, "add_generation_prompt", True),
        with_effort(template_kwargs(given), given.get("reasoning_effort"), "reasoning_effort"),
        None if use is None else use.tools,
        read_flag(given, "continue_final_message"),
    )


def with_effort(
    variables: dict[str, Any] | None, effort: object, where: str
) -> dict[str, Any] | None:
    """Adds to a template's variables how much to think, and whether, as vLLM does; what is given
    there goes before. where: the key that effort is from. Raises InvalidParamsError.
    """
    if effort is None:
        return variables
    if effort not in EFFORTS:
        raise InvalidParamsError(f"{where} must be {', '.join(EFFORTS)}, got {shown(effort)}")
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"} | (variables or {})


def _prompts(given: Any, n: int) -> tuple[str | list[int], ...]:
    """One text, ids of one, or a list of texts or ids. Raises InvalidPromptError."""
    are_many = isinstance(given, list) and given and integer(given[0]) is None
    prompts = given if are_many else [given]
    for prompt in prompts:
        are_ids = isinstance(prompt, list) and all(integer(each) is not None for each in prompt)
        if not isinstance(prompt, str) and not (prompt and are_ids):
            raise InvalidPromptError(
                "prompt must be a text, a list of token ids that is not empty, or a list of these, "
                f"got {shown(prompt)}"
            )
    if len(prompts) * n > MAX_COMPLETIONS:
        raise InvalidPromptError(
            f"{len(prompts)} prompts with n={n} are more than {MAX_COMPLETIONS} texts; make more "
            "requests of them"
        )
    return tuple(prompts)
