"""AsyncLLM: what callers on event loops use."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack, cast

from nanoengine.api.block_map import BlockMap
from nanoengine.api.chat_rules import ChatRules
from nanoengine.api.delta_stream import AsyncDeltaStream
from nanoengine.api.engine_thread import EngineThread
from nanoengine.api.llm import LLM
from nanoengine.api.outputs_so_far import OutputsSoFar
from nanoengine.api.request_forms import (
    GivenPrompt,
    Messages,
    OneParams,
    Prompt,
    chat_prompt,
    given_prompt,
    is_conversation,
    one_params,
)
from nanoengine.api.stats import EngineStats
from nanoengine.api.streaming import DeltaStream
from nanoengine.api.work_threads import in_own_thread
from nanoengine.config.engine import NAMES, Settings, shows_settings
from nanoengine.errors import RequestError, ends_at_the_user, without_our_lines
from nanoengine.outputs import RequestOutput
from nanoengine.text.answer_parser import ChatParsers
from nanoengine.text.known_methods import explains_methods
from nanoengine.text.known_names import ARGUMENT, explains_unknown, translated
from nanoengine.text.rendering import Rendering, TemplateKwargs, Tools
from nanoengine.text.tokenizer import Tokenizer

Answer = TypeVar("Answer")


@explains_methods()
class AsyncLLM:
    """A loaded model for asyncio; event loops in any number of threads may call it.

    `async with AsyncLLM(...) as llm`, `await aclose()` or `close()` ends its thread and frees it.
    """

    @ends_at_the_user
    @shows_settings
    def __init__(self, model: str | Path, **settings: Unpack[Settings]) -> None:
        """Takes LLM's arguments; returns when the model is loaded. Inside an event loop use `await
        asyncio.to_thread(AsyncLLM, model)`. Raises ConfigError and ModelLoadError.
        """
        self._engine = EngineThread(model, settings)
        # Runs also when this object is collected and when Python exits.
        self._close = weakref.finalize(self, self._engine.stop)

    @classmethod
    @ends_at_the_user
    def from_engine_args(cls, engine_args: object) -> Self:
        """An AsyncLLM from other engines' arguments; see LLM.from_engine_args."""
        return cls(**translated(engine_args, NAMES))

    @property
    def plan(self) -> Any:
        """What start-up decided and allocated; print it to read it."""
        return self._engine.plan

    def __repr__(self) -> str:
        plan = self.plan
        return f"<AsyncLLM {plan.model!r} on {plan.device}, up to {plan.max_model_len} tokens>"

    @explains_unknown(ARGUMENT, " of generate()")
    def generate(
        self,
        prompt: Prompt | Messages,
        sampling_params: OneParams = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt: `async for output in llm.generate("The sea is"): ...`

        prompt: one prompt, as for LLM.stream. request_id: shown on the outputs and used by
        abort(); by default a number. Each output holds the whole text so far; the last one, with
        `finished`, equals LLM.generate's. Cancelling the task or closing the generator aborts it.
        Raises at the first output what LLM.generate raises for the prompt, and RequestError for a
        request_id in use. Raises later TransferError if the request's KV is lost, the engine's
        error if the engine fails, EngineClosedError if it is closed.
        """
        if is_conversation(prompt):
            return self.chat(cast(Messages, prompt), sampling_params, request_id)
        return self._outputs(partial(self._opened, prompt, sampling_params, request_id))

    @explains_unknown(ARGUMENT, " of chat()")
    def chat(
        self,
        messages: Messages,
        sampling_params: OneParams = None,
        request_id: str | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: TemplateKwargs = None,
        tools: Tools = None,
        tool_choice: Any = None,
        continue_final_message: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one conversation; see generate() and LLM.chat. The last output has messages."""
        written = add_generation_prompt, chat_template_kwargs, tools, continue_final_message
        chat = messages, sampling_params, request_id, Rendering(*written), tool_choice
        return self._outputs(partial(self._opened_chat, *chat))

    @explains_unknown(ARGUMENT, " of stream()")
    async def stream(
        self,
        prompt: Prompt | Messages,
        sampling_params: OneParams = None,
        request_id: str | None = None,
    ) -> AsyncDeltaStream:
        """Queue one prompt: `async for delta in await llm.stream("The sea is"): ...`

        Unlike generate(), each delta holds only what is new. Raises at once what LLM.generate
        raises for the prompt.
        """
        if is_conversation(prompt):
            return await self.stream_chat(cast(Messages, prompt), sampling_params, request_id)
        try:
            return await self._opened(prompt, sampling_params, request_id)
        except RequestError as error:
            raise without_our_lines(error) from error.__cause__

    @explains_unknown(ARGUMENT, " of stream_chat()")
    async def stream_chat(
        self,
        messages: Messages,
        sampling_params: OneParams = None,
        request_id: str | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: TemplateKwargs = None,
        tools: Tools = None,
        tool_choice: Any = None,
        continue_final_message: bool = False,
    ) -> AsyncDeltaStream:
        """Queue one conversation; see stream() and LLM.stream_chat."""
        written = add_generation_prompt, chat_template_kwargs, tools, continue_final_message
        chat = messages, sampling_params, request_id, Rendering(*written), tool_choice
        try:
            return await self._opened_chat(*chat)
        except RequestError as error:
            raise without_our_lines(error) from error.__cause__

    async def abort(self, request_id: int | str | Iterable[int | str]) -> None:
        """End a request, or several, and free their memory; each generator yields one last output
        with finish_reason "abort". An unknown id is not an error.
        """
        ids = [request_id] if isinstance(request_id, int | str) else [*request_id]
        await self.call(partial(self._engine.abort, ids))

    async def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer; any thread may use it."""
        return await self.call(lambda llm: llm.tokenizer)

    async def stats(self) -> EngineStats:
        """What LLM.stats gives, between two steps."""
        return await self.call(LLM.stats)

    async def block_map(self) -> BlockMap:
        """What LLM.block_map gives, between two steps."""
        return await self.call(LLM.block_map)

    async def reset_prefix_cache(self) -> bool:
        """What LLM.reset_prefix_cache does, between two steps."""
        return await self.call(LLM.reset_prefix_cache)

    async def check_health(self) -> None:
        """Raise EngineClosedError if the engine failed or was closed; does not wait for a step."""
        self._engine.check_open()

    def close(self) -> None:
        """End open requests with EngineClosedError, end the thread, free weights and KV.

        Waits for the step that is under way. Closing twice is fine.
        """
        self._close()

    def shutdown(self) -> None:
        """close() (vLLM's name)."""
        self.close()

    async def aclose(self) -> None:
        """close() without blocking the event loop."""
        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def call(self, function: Callable[[LLM], Answer]) -> Answer:
        """What `function(llm)` returns: the engine's thread calls it between two steps."""
        return await asyncio.wrap_future(self._engine.post(function))

    async def _opened(
        self, prompt: Any, params: OneParams, request_id: str | None
    ) -> AsyncDeltaStream:
        """The stream of a prompt. A text is encoded in a thread of its own, so that a long one
        holds up neither the caller's loop nor other requests.
        """
        arrival = time.perf_counter()
        await self._prepare(params)
        given = given_prompt(prompt)
        if isinstance(given.prompt, str):
            ids = await asyncio.to_thread(self._engine.inputs.encode, given.prompt)
            salt = given.cache_salt
            prompt = {"prompt_token_ids": ids, "prompt": given.prompt, "cache_salt": salt}
        return await self._begun(lambda llm: llm.stream(prompt, params), request_id, arrival)

    async def _opened_chat(
        self,
        messages: Messages,
        params: OneParams,
        request_id: str | None,
        rendering: Rendering,
        tool_choice: Any,
    ) -> AsyncDeltaStream:
        """The same of a conversation."""
        arrival, defaults = time.perf_counter(), self._engine.inputs.default_params
        rules = await asyncio.to_thread(lambda: ChatRules.of(self._parsers, rendering, tool_choice))
        held = rules.params(one_params(params) or defaults)
        await self._prepare(held)

        def rendered() -> GivenPrompt:
            model = self._engine.inputs.tokenizer, self.plan.max_model_len
            return chat_prompt(*model, messages, rules.rendering)

        request = await asyncio.to_thread(rendered)
        return await self._begun(
            lambda llm: llm.stream_held(request, held, rules), request_id, arrival, rules
        )

    @cached_property
    def _parsers(self) -> ChatParsers:
        return ChatParsers.of(self._engine.inputs.tokenizer)

    async def _prepare(self, params: OneParams) -> None:
        """Compile the grammar of a form, which is kept. It may take seconds, and others wait for
        it: not in asyncio's few threads, for which the process would wait, too.
        """
        given, inputs = one_params(params), self._engine.inputs
        form = None if given is None else given.form
        if form is not None and not inputs.grammars.has(form):
            await in_own_thread(lambda: inputs.grammars.state_of(form))

    async def _begun(
        self,
        open_stream: Callable[[LLM], DeltaStream],
        request_id: str | None,
        arrival: float,
        rules: ChatRules | None = None,
    ) -> AsyncDeltaStream:
        """arrival: when the caller asked; the engine may be in the middle of a long step."""
        mailbox = self._engine.mailbox()
        begin = partial(self._engine.begin, mailbox, open_stream, request_id, arrival)
        try:
            return AsyncDeltaStream(self._engine, mailbox, *await self.call(begin), rules)
        except BaseException:  # refused, or the caller was cancelled
            self._engine.leave(mailbox)
            raise

    async def _outputs(
        self, open_stream: Callable[[], Awaitable[AsyncDeltaStream]]
    ) -> AsyncGenerator[RequestOutput, None]:
        try:
            async with await open_stream() as stream:
                so_far = OutputsSoFar(await stream.take())
                begun = stream.begun()
                while stream.output is None:
                    yield replace(begun, outputs=so_far.outputs())
                    so_far.add(await stream.take())
                rules, output = stream.rules, stream.output
                yield output if rules is None else rules.with_messages(output)
        except RequestError as error:
            raise without_our_lines(error) from error.__cause__
