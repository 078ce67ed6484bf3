"""Prompts: from a body's bytes to token ids, in threads of their own.

Neither the event loop nor the engine's thread waits for a long text or a slow chat template.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, TypeVar

from nanoengine.api.work_threads import WorkThreads
from nanoengine.errors import InvalidParamsError
from nanoengine.sampling_params import SamplingParams
from nanoengine.serving.openai_logprobs import TokenBytes
from nanoengine.serving.openai_requests import ChatRequest, CompletionRequest
from nanoengine.serving.options import ServerOptions
from nanoengine.serving.refusals import Refusal
from nanoengine.text.answer_parser import ChatParsers
from nanoengine.text.checked_json import strict_json
from nanoengine.text.detokenizer import token_bytes
from nanoengine.text.rendering import Rendering
from nanoengine.text.tokenizer import Tokenizer

Asked = ChatRequest | CompletionRequest
Result = TypeVar("Result")
NUM_THREADS = 4
# Of what the texts of one answer repeat: characters, and those of a log-probability and of an id in
# JSON.
MAX_REPEATED, SCORE, ID = 1 << 26, 32, 8


@dataclass(frozen=True, slots=True)
class Facts:
    """What a server must know of a loaded model. model: as it was given to the engine; defaults:
    parameters that a body lacks; kv_config: sizes of the KV cache, as /metrics names them;
    check_room: raises PromptTooLongError unless the context has room for so many tokens of a prompt
    and of its answer; threads that are not the event loop's may call it.
    """

    model: str
    tokenizer: Tokenizer
    defaults: SamplingParams
    max_model_len: int
    kv_config: Mapping[str, str]
    check_room: Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt as AsyncLLM takes it, its token ids, and the parameters that it goes with."""

    prompt: dict[str, Any]
    token_ids: list[int]
    params: SamplingParams


class Prompts:
    """Reads bodies and makes prompts of them; `close` ends its threads."""

    def __init__(self, facts: Facts, options: ServerOptions) -> None:
        self._facts = facts
        self._options = options
        self._tokenizer = facts.tokenizer
        self._threads = WorkThreads(NUM_THREADS, "nanoengine-prompts")
        self._for_large = WorkThreads(1, "nanoengine-large-prompts")
        self.bytes_of: TokenBytes = cache(partial(token_bytes, facts.tokenizer))

    async def run(self, work: Callable[[], Result], is_large: bool = False) -> Result:
        """The result of `work`, done in one of the threads. is_large: it is about a large body, and
        other such bodies alone wait for it.
        """
        return await (self._for_large if is_large else self._threads).run(work)

    def close(self) -> None:
        """End the threads; work that has not begun is dropped."""
        self._threads.close()
        self._for_large.close()

    def made_of(self, request: Asked) -> list[Prepared]:
        """A request's prompts. Raises RequestErrors."""
        if isinstance(request, ChatRequest):
            if isinstance(request.messages, list):  # each takes a token, and long to write
                self._facts.check_room(len(request.messages), 1)
            params = self.parsers.params(request.params, request.tools)
            request = replace(request, params=params)
            text = self.rendered(request.messages, request.rendering)
            # The template has written the special tokens already.
            return [self._prompt(request, text, add_special_tokens=False)]
        add = request.add_special_tokens
        prompts = [self._prompt(request, prompt, add) for prompt in request.prompts]
        check_repeats(request, prompts)
        return prompts

    def rendered(self, messages: Any, rendering: Rendering) -> str:
        """A conversation as text. Raises RequestErrors."""
        return rendering.text(self._tokenizer, messages)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. Raises PromptTooLongError if they are surely too many."""
        limit = self._facts.max_model_len
        return self._tokenizer.encode_within(limit, text, add_special_tokens)

    def _prompt(self, request: Asked, given: Any, add_special_tokens: bool) -> Prepared:
        is_text = isinstance(given, str)
        ids = self.encode(given, add_special_tokens) if is_text else given
        made = {"prompt_token_ids": ids, "cache_salt": request.cache_salt}
        made |= {"prompt": given} if is_text else {}
        return Prepared(made, ids, self._params(request, len(ids)))

    def _params(self, request: Asked, num_prompt: int) -> SamplingParams:
        """A request's parameters for a prompt of so many tokens. Raises PromptTooLongError."""
        params, limit = request.params, self._facts.max_model_len
        if params.max_tokens is None or num_prompt >= limit:  # the engine refuses such a prompt
            return params
        if request.may_be_cut:
            return replace(params, max_tokens=min(params.max_tokens, limit - num_prompt))
        self._facts.check_room(num_prompt, params.max_tokens)
        return params

    @cached_property
    def parsers(self) -> ChatParsers:
        """Of the model's answers."""
        options = self._options
        return ChatParsers.of(self._tokenizer, options.tool_call_parser, options.reasoning_parser)


def check_repeats(request: CompletionRequest, prompts: list[Prepared]) -> None:
    """Raise InvalidParamsError if prompts, their ids and log-probabilities, which each of the texts
    of an answer repeats, would be too much to write. One text may always have them.
    """
    params = request.params
    each = 0 if params.prompt_logprobs is None else SCORE * (params.prompt_logprobs + 1)
    each += ID if request.has_token_ids else 0
    texts = sum(len(made.prompt.get("prompt", "")) for made in prompts)
    num_tokens = sum(len(made.token_ids) for made in prompts)
    total = params.n * ((max(texts, num_tokens) if request.echo else 0) + each * num_tokens)
    if total > MAX_REPEATED and request.num_completions > 1:
        what = "echo" if request.echo else "return_token_ids"
        raise InvalidParamsError(
            f"{what}: the {request.num_completions} texts would repeat about {total} characters of "
            f"prompts, their ids and log-probabilities, and may repeat {MAX_REPEATED}; ask for "
            "fewer texts or log-probabilities in one request"
        )


def json_of(body: bytes) -> Any:
    """The value of a JSON text. Raises Refusal if it is none."""
    try:
        return strict_json(body.decode())  # of a message's bytes json would read UTF-16, too
    except ValueError as error:
        raise Refusal(400, "invalid_json", f"the body is no JSON: {error}") from None
