"""Prompts: from a body's bytes to token ids, in threads of their own.

Neither the event loop nor the engine's thread waits for a long text or a slow chat template.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, NoReturn, TypeVar

from nanoengine.engine.request_forms import template_variables
from nanoengine.errors import PromptTooLongError
from nanoengine.llm import LLM
from nanoengine.sampling_params import SamplingParams
from nanoengine.serving.openai_logprobs import TokenBytes
from nanoengine.serving.openai_requests import ChatRequest, CompletionRequest
from nanoengine.serving.refusals import Refusal
from nanoengine.text.detokenizer import token_bytes
from nanoengine.text.tokenizer import Tokenizer

Asked = ChatRequest | CompletionRequest
Result = TypeVar("Result")
NUM_THREADS = 4


@dataclass(frozen=True, slots=True)
class Facts:
    """What a server must know of a loaded model. model: as it was given to the engine; defaults:
    parameters that a body lacks.
    """

    model: str
    tokenizer: Tokenizer
    defaults: SamplingParams
    max_model_len: int

    @classmethod
    def of(cls, llm: LLM) -> Facts:
        """Those of a model. Raises InvalidPromptError if it has no tokenizer."""
        engine = llm.llm_engine
        defaults = engine.inputs.default_params
        return cls(str(engine.config.model), llm.tokenizer, defaults, llm.plan.max_model_len)


class Prompts:
    """Reads bodies and makes prompts of them; `close` ends its threads."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._tokenizer = facts.tokenizer
        self._threads = ThreadPoolExecutor(NUM_THREADS, "nanoengine-prompts")
        self.bytes_of: TokenBytes = cache(partial(token_bytes, facts.tokenizer))

    async def run(self, work: Callable[[], Result]) -> Result:
        """The result of `work`, done in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """End the threads; work that has not begun is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def made_of(self, request: Asked) -> list[dict[str, Any]]:
        """A request's prompts as token ids, as AsyncLLM takes them. Raises RequestErrors."""
        if isinstance(request, ChatRequest):
            text = self.rendered(request.messages, request.template_kwargs)
            return [self._prompt(request, text, is_rendered=True)]
        return [self._prompt(request, prompt, is_rendered=False) for prompt in request.prompts]

    def rendered(self, messages: Any, kwargs: Any, wants_answer: bool = True) -> str:
        """A conversation as text; kwargs: variables of the template. Raises RequestErrors."""
        variables = template_variables(wants_answer, kwargs, None)
        text: str = self._tokenizer.apply_chat_template(messages, **variables)
        return text

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. Raises PromptTooLongError if they are surely too many."""
        limit = self._facts.max_model_len
        most = limit * self._longest_token
        if len(text) > most:
            raise PromptTooLongError(
                f"the prompt has {len(text)} characters, and {limit} tokens (max_model_len), "
                f"the limit, have at most {most}"
            )
        return self._tokenizer.encode(text, add_special_tokens)

    def _prompt(self, request: Asked, given: Any, is_rendered: bool) -> dict[str, Any]:
        # A template has written the special tokens already.
        is_text = isinstance(given, str)
        ids = self.encode(given, add_special_tokens=not is_rendered) if is_text else given
        made = {"prompt_token_ids": ids, "cache_salt": request.cache_salt}
        return made | ({"prompt": given} if is_text else {})

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._tokenizer.backend.get_vocab(with_added_tokens=True)), default=1)


def json_of(body: bytes) -> Any:
    """The value of a JSON text. Raises Refusal if it is none."""
    try:
        return json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise Refusal(400, "invalid_json", f"the body is no JSON: {reason}") from None


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
