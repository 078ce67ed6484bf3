"""The keys of OpenAI's request bodies: what each of them is here, or why it is refused.

Knows names and values alone; openai_requests.py and its like make records of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from nanoengine.errors import MAX_NAME, InvalidParamsError, InvalidPromptError, near_name, shown
from nanoengine.text.known_names import KNOWN, PARAMETER, sentence_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"  # the second one is Anthropic's
# Keys with the name and the meaning of a field of SamplingParams; a chat says logprobs otherwise.
PARAMS = (
    *("temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stop_token_ids"),
    *("max_tokens", "min_tokens", "ignore_eos", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words"),
    *("skip_special_tokens", "include_stop_str_in_output", "logprobs", "structured_outputs"),
    "thinking_token_budget",
)
# Keys of both endpoints that are no parameters. OpenAI's own completions have no
# max_completion_tokens, but load generators send it there.
COMMON = (
    *("model", "stream", "stream_options", "cache_salt", "max_completion_tokens"),
    *("response_format", "return_token_ids"),
)
OWN = {
    CHAT: (
        *("messages", "chat_template_kwargs", "reasoning_effort", "top_logprobs"),
        *("tools", "tool_choice", "parallel_tool_calls", "include_reasoning"),
        *("add_generation_prompt", "continue_final_message"),
    ),
    COMPLETIONS: ("prompt", "echo", "add_special_tokens"),
}
# Keys that do not change the text of the answer: OpenAI's, Anthropic's, vLLM's, SGLang's, and what
# clients of llama.cpp and Ollama add.
IGNORED = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prediction"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *("max_tool_calls", "cache_control", "inference_geo", "speed", "user_profile_id"),
    *("request_id", "rid", "priority", "mm_processor_kwargs", "client_metadata"),
    *("cache_prompt", "id_slot", "timings_per_token", "return_progress", "keep_alive"),
)
Refused = Mapping[str, tuple[tuple[Any, ...], str]]
# What paths call parameters that they have under other names.
ALIASES = {
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking={'budget_tokens': ...}",
    'structured_outputs={"json": schema}': "output_config={'format': ...}",
}
# The key that an endpoint has its prompt in; Anthropic's errors name no key.
PROMPTS = {CHAT: "messages", COMPLETIONS: "prompt", RESPONSES: "input"}
IS_TEXT = "answers are text"
OTHER_FORM = "here it is structured_outputs={{{!r}: ...}}"
IN_KWARGS = "a template that has it takes it in chat_template_kwargs"
FEW = 8  # keys that an error lists
EMPTY: tuple[Any, ...] = ("", [], {})  # such values ask for nothing, whatever their key
# Keys that cannot be obeyed: other values that ask for nothing, and why the rest is refused.
REFUSED: Refused = {
    "suffix": ((), "text can only be added after the prompt"),
    "best_of": ((1,), "answers are not compared; n gives several"),
    "use_beam_search": ((False,), "beam search is LLM.beam_search in Python"),
    "prompt_logprobs": ((), "log-probabilities of prompts: /v1/completions, echo and logprobs"),
    "functions": ((), "here it is tools"),
    "function_call": (("none", "auto"), "here it is tool_choice"),
    "guided_json": ((), OTHER_FORM.format("json")),
    "guided_regex": ((), OTHER_FORM.format("regex")),
    "guided_choice": ((), OTHER_FORM.format("choice")),
    "guided_grammar": ((), OTHER_FORM.format("grammar")),
    "modalities": ((["text"],), IS_TEXT),
    "audio": ((), IS_TEXT),
    "detokenize": ((True,), IS_TEXT),
    "return_tokens_as_token_ids": ((False,), IS_TEXT),
    "prompt_embeds": ((), "a prompt is a text or token ids"),
    "web_search_options": ((), "nothing is searched"),
    "verbosity": (("medium",), IN_KWARGS),
    "enable_thinking": ((), IN_KWARGS),
    "think": ((), IN_KWARGS),
    "documents": ((), IN_KWARGS),
    "chat_template": ((), "another template is a setting of the server, --chat-template"),
}


class KeyRefusedError(InvalidParamsError):
    """A key of a body is unknown or cannot be obeyed. code: which of these, in OpenAI's words."""

    def __init__(self, text: str, key: str, code: str) -> None:
        super().__init__(text)
        self.key = key
        self.code = code


def given_keys(body: object, known: Collection[str], refused: Refused = REFUSED) -> dict[str, Any]:
    """The keys of a body that it must not ignore; null is no value.

    An unknown key is refused, as by OpenAI: it may be a parameter with a slip of the fingers, and
    an answer made without it looks like one made with it. Names of other engines are told what they
    are here, and pass with values that ask for nothing.
    Raises InvalidPromptError if the body is no object, KeyRefusedError for a key.
    """
    given = check_object(body)
    for name, value in given.items():
        if value is None or name in known or name in IGNORED:
            continue
        if name in refused:
            check_refused(name, value, refused[name])
        elif (row := KNOWN.get((PARAMETER, name))) is None or not row.asks_nothing(value):
            raise unknown_key(name, {*known, *refused})
    return {name: given[name] for name in known if given.get(name) is not None}


def check_object(body: object) -> dict[str, Any]:
    """The body, which must be a JSON object. Raises InvalidPromptError for another value."""
    if not isinstance(body, dict):
        raise InvalidPromptError(f"the body must be a JSON object, got {shown(body)}")
    return body


def check_refused(name: str, value: object, row: tuple[tuple[Any, ...], str]) -> None:
    """Raise KeyRefusedError unless the value asks for nothing."""
    neutral, why = row
    if not any(value == each and type(value) is type(each) for each in (*EMPTY, *neutral)):
        text = f"{name}={shown(value)} is not supported: {why}"
        raise KeyRefusedError(text, name, "unsupported_parameter")


def unknown_key(name: str, known: Collection[str], where: str = "") -> KeyRefusedError:
    """The error about a key that nobody knows here. where: follows its name."""
    own = next((path for path, key in PROMPTS.items() if key == name), None)
    hint = f"{own} has it" if own else _hint(name, known, where)
    if not hint and (near := near_name(name, known)):
        hint = f"did you mean {near!r}?"
    if not hint and len(known) <= FEW:
        hint = f"there are {', '.join(sorted(known))}"
    text = f"unknown key {shown(name)}{where}" + (f"; {hint}" if hint else "")
    return KeyRefusedError(text, name[:MAX_NAME], "unknown_parameter")


def _hint(name: str, known: Collection[str], where: str) -> str:
    """What a name is at this path, of whose keys `known` are; "" if nobody has it."""
    sentence = sentence_of(name)
    said = sentence.removeprefix("here it is ") if sentence else name
    here = said.partition("=")[0].partition(",")[0]
    is_elsewhere = here in PARAMS or here == "prompt_logprobs"
    if where or not is_elsewhere or (here in known and here not in REFUSED):
        return sentence
    if here in REFUSED:
        return REFUSED[here][1]
    alias = ALIASES.get(said, ALIASES.get(here, ""))
    if alias.partition("=")[0] in known:
        return f"here it is {alias}"
    return f"{CHAT} has it" + (f", as {said}" if said != name else "")
