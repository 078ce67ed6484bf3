"""The forms in which users give prompts, conversations and sampling parameters; one form of each.

Knows no engine: what it returns or raises is checked further by InputProcessor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from nanoengine.errors import InvalidParamsError, InvalidPromptError, RequestError, counted, shown
from nanoengine.outputs import CompletionOutput, RequestOutput
from nanoengine.sampling_params import SamplingParams
from nanoengine.text.known_names import unknown_name
from nanoengine.text.rendering import Rendering
from nanoengine.text.tokenizer import Tokenizer

Prompt = str | list[int] | dict[str, Any]
OneParams = SamplingParams | Mapping[str, Any] | None
Params = OneParams | Sequence[OneParams]
Messages = list[dict[str, Any]]

PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """A prompt before it is queued: text or ids, the original text, or the error against it."""

    prompt: Any
    text: str | None = None
    cache_salt: Any = None
    error: RequestError | None = None

    def checked(self) -> tuple[Any, str | None, Any]:
        """Prompt, text and cache salt. Raises `error`."""
        if self.error is not None:
            raise self.error
        return self.prompt, self.text, self.cache_salt

    def refused(self, error: RequestError) -> RequestOutput:
        """The output of a prompt that never enters the engine."""
        prompt = self.prompt
        ids = [t for t in prompt if type(t) is int] if isinstance(prompt, list | tuple) else []
        text = prompt if isinstance(prompt, str) else self.text
        return RequestOutput(-1, text, ids, [CompletionOutput(0, "", [], "error")], error=error)


def is_single(prompts: object) -> bool:
    """Whether this is one prompt and no list of them. Raises InvalidPromptError for neither."""
    if isinstance(prompts, str | dict):
        return True
    if not isinstance(prompts, list | tuple):
        raise InvalidPromptError(
            "prompts must be text, token ids, a dict or a list of these, got "
            + type(prompts).__name__
            + ("; call its tolist()" if hasattr(prompts, "tolist") else "")
        )
    return bool(prompts) and all(hasattr(p, "__index__") for p in prompts)


def given_prompt(prompt: Any) -> GivenPrompt:
    """The GivenPrompt of a prompt in any form; a dict without a prompt, or with a key that nobody
    would obey, gives one with an error.
    """
    if not isinstance(prompt, dict):
        return GivenPrompt(prompt)
    salt = prompt.get("cache_salt")
    others = [key for key, value in prompt.items() if value is not None and key not in PROMPT_KEYS]
    if others and any(prompt.get(key) is not None for key in PROMPT_KEYS[:2]):
        error = unknown_name("key", others[0], PROMPT_KEYS, " of a prompt")
        return GivenPrompt(None, error=InvalidPromptError(error))
    ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
    if ids is not None:
        if isinstance(ids, str) or not isinstance(text, str | None):
            error = "prompt_token_ids must be a list of token ids, and prompt their text"
            return GivenPrompt(None, error=InvalidPromptError(f"{error}, got {shown(prompt)}"))
        return GivenPrompt(ids, text, salt)
    if text is not None:
        return GivenPrompt(text, cache_salt=salt)
    keys = sorted(map(str, prompt))
    error = f'a prompt dict needs "prompt" or "prompt_token_ids", got the keys {keys}'
    if "role" in prompt:
        error += "; a list of messages is a conversation: use chat() or stream_chat()"
    return GivenPrompt(None, error=InvalidPromptError(error))


def chat_prompt(
    tokenizer: Tokenizer, max_model_len: int, messages: Any, rendering: Rendering
) -> GivenPrompt:
    """The GivenPrompt of a conversation, rendered and encoded, or with the error against it. Any
    thread may call it.
    """
    try:
        text = rendering.text(tokenizer, messages)
        # The template has already written the special tokens, also the one that begins a sequence.
        return GivenPrompt(tokenizer.encode_within(max_model_len, text, False), text)
    except RequestError as error:
        return GivenPrompt(None, error=error)


def is_conversation(prompt: object) -> bool:
    """Whether this is a list of messages; a prompt has no role."""
    is_list = isinstance(prompt, list | tuple) and bool(prompt)
    return is_list and all(isinstance(m, Mapping) and "role" in m for m in cast(Messages, prompt))


def params_for(params: Params, count: int) -> list[SamplingParams | None]:
    """The parameters of each of `count` prompts. Raises InvalidParamsError."""
    if not isinstance(params, list | tuple):
        return [one_params(params)] * count
    if len(params) != count:
        raise InvalidParamsError(
            f"{counted(count, 'prompt')}, but {counted(len(params), 'sampling parameter')}; give "
            "one for all, or one each"
        )
    return [one_params(each) for each in params]


def one_params(params: object) -> SamplingParams | None:
    """SamplingParams as they are, or made of a dict of their fields. Raises InvalidParamsError."""
    if params is None or isinstance(params, SamplingParams):
        return params
    if not isinstance(params, Mapping) or not all(isinstance(name, str) for name in params):
        raise InvalidParamsError(
            "sampling_params must be a SamplingParams, a dict of its fields, or a list with one "
            f"for each prompt, got {shown(params)}"
        )
    return SamplingParams(**params)
