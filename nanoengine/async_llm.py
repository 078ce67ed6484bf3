"""AsyncLLM: one engine for many concurrent callers, on event loops of any thread.

One thread owns the LLM and is the only one to call it. Callers post functions that it runs between
two steps. It puts new output into a mailbox for each request and wakes the caller's loop. A slow
caller finds all output since its last read merged into one, so nothing waits for it or piles up.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from nanoengine.config import NAMES, Settings, shows_settings
from nanoengine.devices.home_process import HomeProcess, join
from nanoengine.engine.completion import merge_deltas, outputs_of
from nanoengine.engine.output_processor import RequestState
from nanoengine.engine.request_forms import Messages, OneParams, Prompt, TemplateKwargs, Tools
from nanoengine.engine.stats import EngineStats
from nanoengine.engine.streaming import DeltaStream
from nanoengine.errors import (
    EngineClosedError,
    RequestError,
    ends_at_the_user,
    without_our_lines,
)
from nanoengine.llm import LLM
from nanoengine.outputs import RequestOutput, StreamDelta
from nanoengine.text.known_names import ARGUMENT, explains_unknown, translated
from nanoengine.text.tokenizer import Tokenizer

Answer = TypeVar("Answer")


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
        self._engine = _EngineThread(model, settings)
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
        return self._outputs(lambda llm: llm.stream(prompt, sampling_params), request_id)

    @explains_unknown(ARGUMENT, " of chat()")
    def chat(
        self,
        messages: Messages,
        sampling_params: OneParams = None,
        request_id: str | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: TemplateKwargs = None,
        tools: Tools = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one conversation; see generate() and LLM.chat."""
        return self._outputs(
            lambda llm: llm.stream_chat(
                messages, sampling_params, add_generation_prompt, chat_template_kwargs, tools
            ),
            request_id,
        )

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
        try:
            return await self._open(lambda llm: llm.stream(prompt, sampling_params), request_id)
        except RequestError as error:
            raise without_our_lines(error) from error.__cause__

    async def abort(self, request_id: int | str) -> None:
        """End a request and free its memory; its generator yields one last output with
        finish_reason "abort". An unknown id is not an error.
        """
        await self.call(partial(self._engine.abort, request_id))

    async def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer; any thread may use it."""
        return await self.call(lambda llm: llm.tokenizer)

    async def stats(self) -> EngineStats:
        """What LLM.stats gives, between two steps."""
        return await self.call(LLM.stats)

    async def reset_prefix_cache(self) -> None:
        """Drop all cached KV that no running request uses."""
        await self.call(LLM.reset_prefix_cache)

    async def check_health(self) -> None:
        """Raise EngineClosedError if the engine failed or was closed; does not wait for a step."""
        self._engine.check_open()

    def close(self) -> None:
        """End open requests with EngineClosedError, end the thread, free weights and KV.

        Waits for the step that is under way. Closing twice is fine.
        """
        self._close()

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

    async def _open(
        self, open_stream: Callable[[LLM], DeltaStream], request_id: str | None
    ) -> AsyncDeltaStream:
        mailbox = _Mailbox()
        begin = partial(self._engine.begin, mailbox, open_stream, request_id)
        try:
            return AsyncDeltaStream(self._engine, mailbox, *await self.call(begin))
        except BaseException:  # refused, or the caller was cancelled
            self._engine.leave(mailbox)
            raise

    async def _outputs(
        self, open_stream: Callable[[LLM], DeltaStream], request_id: str | None
    ) -> AsyncGenerator[RequestOutput, None]:
        try:
            async with await self._open(open_stream, request_id) as stream:
                begun = stream.begun()
                so_far: list[StreamDelta] = []  # one for each completion
                while stream.output is None:
                    so_far = merge_deltas([*so_far, *await stream.take()])
                    yield stream.output or replace(begun, outputs=outputs_of(so_far))
        except RequestError as error:
            raise without_our_lines(error) from error.__cause__


class AsyncDeltaStream(AsyncIterator[StreamDelta]):
    """Returned by AsyncLLM.stream: the deltas of one request, as they come.

    Leaving it early (close(), the end of an `async with`, dropping it) aborts the request and frees
    its memory. To be used on the event loop that it was made on.
    """

    def __init__(
        self,
        engine: _EngineThread,
        mailbox: _Mailbox,
        request_id: int | str,
        request: RequestState,
    ) -> None:
        self.output: RequestOutput | None = None  # once the request has ended
        self._engine = engine
        self._mailbox = mailbox
        self._request_id = request_id
        self._request = request
        self._ready: deque[StreamDelta] = deque()

    @property
    def is_queued(self) -> bool:
        """True while the request waits for its first step."""
        return self._request.seqs[0].metrics.first_scheduled_time is None

    def begun(self) -> RequestOutput:
        """The output before the first token; from the first delta on with num_cached_tokens, and
        with prompt_logprobs if they are requested.
        """
        asked = self._request
        return RequestOutput(
            self._request_id,
            asked.prompt,
            asked.prompt_token_ids,
            [],
            finished=False,
            num_cached_tokens=asked.seqs[0].num_cached,
            prompt_logprobs=None if self.is_queued else asked.prompt_logprobs,
        )

    async def take(self) -> list[StreamDelta]:
        """Wait for new output: at most one delta for each completion; none after the end.

        Raises the error of the request or the engine.
        """
        if self.output is not None:
            return []
        try:
            deltas, self.output = await self._mailbox.take()
        except RequestError as error:
            raise without_our_lines(error) from error.__cause__
        return deltas

    async def whole(self) -> RequestOutput:
        """Wait for the end; no deltas are made until then. Raises what take() raises."""
        self._mailbox.wants_deltas = False
        while self.output is None:
            await self.take()
        return self.output

    def fail(self, error: Exception) -> None:
        """End the request unless it has ended: whoever reads it gets this error."""
        self._mailbox.put([], error)
        self._mailbox.wake()
        self._engine.leave(self._mailbox)

    def close(self) -> None:
        """End the request unless it has ended; closing twice is fine."""
        self._ready.clear()
        if not self._mailbox.is_done:
            self._mailbox.is_done = True
            self._engine.leave(self._mailbox)

    async def __anext__(self) -> StreamDelta:
        if not self._ready:
            self._ready.extend(await self.take())
        if not self._ready:
            raise StopAsyncIteration
        return self._ready.popleft()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class _Mailbox:
    """New output of one request for its caller; made on the caller's loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.is_done = False  # the caller has the last output or the error, or has left
        self.wants_deltas = True  # False: only the last output
        self._arrived = asyncio.Event()
        self._lock = threading.Lock()
        self._deltas: list[StreamDelta] = []
        self._end: RequestOutput | BaseException | None = None
        self._trace: TracebackType | None = None

    def put(
        self, deltas: list[StreamDelta], end: RequestOutput | BaseException | None = None
    ) -> bool:
        """Merge new output into the unread output. Returns True if the caller must be woken."""
        with self._lock:
            was_empty = not self._deltas and self._end is None
            self._deltas = merge_deltas([*self._deltas, *deltas]) if self._deltas else deltas
            if self._end is None:
                self._end = end
                self._trace = end.__traceback__ if isinstance(end, BaseException) else None
            return was_empty

    def wake(self) -> None:
        """Tell the caller, on its own loop, that there is new output."""
        self._arrived.set()

    async def take(self) -> tuple[list[StreamDelta], RequestOutput | None]:
        """Wait for new output: at most one delta for each completion, and the last output if any.

        Raises the error of the request or the engine.
        """
        while True:
            with self._lock:
                deltas, self._deltas = self._deltas, []
                end = self._end
            self.is_done = end is not None
            if isinstance(end, BaseException):
                raise end.with_traceback(self._trace)  # without frames that other callers added
            if deltas or end is not None:
                return deltas, end
            await self._arrived.wait()
            self._arrived.clear()


class _EngineThread:
    """The thread that owns the LLM. Other threads may call only `post`, `leave` and `stop`."""

    def __init__(self, model: str | Path, settings: Settings) -> None:
        self._home = HomeProcess()
        self._changed = threading.Condition()  # guards the next three
        self._posted: list[tuple[Callable[[LLM], Any], Future[Any]]] = []
        self._is_closed = False
        self._cause: BaseException | None = None
        self._open: dict[_Mailbox, tuple[int | str, DeltaStream]] = {}
        self._by_id: dict[int | str, _Mailbox] = {}
        ready: Future[Any] = Future()
        # A daemon: Python joins other threads before it runs the finalizer that would stop them.
        self._thread = threading.Thread(
            target=self._run, args=(model, settings, ready), name="nanoengine", daemon=True
        )
        self._thread.start()
        try:
            self.plan = ready.result()
        except BaseException:
            self._refuse(None)
            if ready.done():  # otherwise Ctrl-C came here: the thread ends once it has loaded
                self._thread.join()
            raise

    # -- for every thread

    def post(self, function: Callable[[LLM], Answer]) -> Future[Answer]:
        """Have the engine's thread call `function(llm)` before its next step."""
        self._home.check("this engine")
        done: Future[Answer] = Future()
        with self._changed:
            if self._is_closed:
                raise self._refusal()
            self._posted.append((function, done))
            self._changed.notify()
        return done

    def check_open(self) -> None:
        """Raise EngineClosedError if the thread takes no more work."""
        with self._changed:
            if self._is_closed:
                raise self._refusal()

    def leave(self, mailbox: _Mailbox) -> None:
        """End a request whose caller is gone."""
        if not self._home.is_here:
            return
        with self._changed:
            if not self._is_closed:
                self._posted.append((lambda _: self._forget(mailbox), Future()))
                self._changed.notify()

    def stop(self) -> None:
        """End the thread and wait for its end; a forked process has no such thread."""
        if not self._home.is_here:
            return
        self._refuse(None)
        join(self._thread)

    def _refuse(self, cause: BaseException | None) -> None:
        with self._changed:
            self._cause = self._cause or cause
            self._is_closed = True
            self._changed.notify()

    def _refusal(self) -> EngineClosedError:
        if self._cause is None:
            return EngineClosedError("the engine was closed; make a new AsyncLLM")
        refusal = EngineClosedError(f"the engine failed and was closed: {self._cause!r}")
        refusal.__cause__ = self._cause
        return refusal

    # -- in the engine's thread, by `post`

    def begin(
        self,
        mailbox: _Mailbox,
        open_stream: Callable[[LLM], DeltaStream],
        request_id: str | None,
        llm: LLM,
    ) -> tuple[int | str, RequestState]:
        """Queue a request; returns the id that its outputs show, and its state."""
        if request_id is not None and not isinstance(request_id, str):
            raise RequestError(f"request_id must be a string or None, got {request_id!r}")
        if request_id in self._by_id:
            raise RequestError(f"request_id {request_id!r} is in use by an open request")
        stream = open_stream(llm)
        shown = stream.request.request_id if request_id is None else request_id
        self._open[mailbox] = shown, stream
        self._by_id[shown] = mailbox
        return shown, stream.request

    def abort(self, request_id: int | str, llm: LLM) -> None:
        """End a request and tell its caller."""
        mailbox = self._by_id.get(request_id)
        if mailbox is not None:
            _, stream = self._open[mailbox]
            for output in llm.llm_engine.abort(stream.request.request_id):
                self._wake([mailbox] if self._deliver(mailbox, output) else [])

    def _forget(self, mailbox: _Mailbox) -> None:
        """Remove a request for which no caller waits any more."""
        if mailbox in self._open:
            shown, stream = self._open.pop(mailbox)
            del self._by_id[shown]
            stream.close()

    # -- the thread itself

    def _run(self, model: str | Path, settings: Settings, ready: Future[Any]) -> None:
        try:
            llm = LLM(model, **settings)
        except BaseException as error:
            ready.set_exception(error)
            return
        ready.set_result(llm.plan)
        try:
            self._serve(llm)
        except BaseException as error:
            self._refuse(error)
        self._end_all()
        llm.close()

    def _serve(self, llm: LLM) -> None:
        """Run posted functions and step until closed; wait when there is nothing to do."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._posted or self._open or self._is_closed)
                if self._is_closed:
                    return
                posted, self._posted = self._posted, []
            for function, done in posted:
                if not done.set_running_or_notify_cancel():
                    continue
                try:
                    done.set_result(function(llm))
                except BaseException as error:
                    done.set_exception(error)
            if self._open:
                self._step(llm)

    def _step(self, llm: LLM) -> None:
        for mailbox in list(self._open):
            if mailbox.loop.is_closed():  # its caller can no longer end the request
                self._forget(mailbox)
        ended = {output.request_id: output for output in llm.llm_engine.step()}
        self._wake(
            [
                mailbox
                for mailbox, (_, stream) in list(self._open.items())
                if self._deliver(mailbox, ended.get(stream.request.request_id))
            ]
        )

    def _deliver(self, mailbox: _Mailbox, output: RequestOutput | None) -> bool:
        """Put new output of a request into its mailbox; True if the caller must be woken."""
        shown, stream = self._open[mailbox]
        deltas = stream.request.new_deltas() if mailbox.wants_deltas else []
        if output is None:
            return bool(deltas) and mailbox.put(deltas)
        self._forget(mailbox)
        return mailbox.put(deltas, output.error or replace(output, request_id=shown))

    def _wake(self, mailboxes: Iterable[_Mailbox]) -> None:
        """Wake the callers, with one call for each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[_Mailbox]] = {}
        for mailbox in mailboxes:
            by_loop.setdefault(mailbox.loop, []).append(mailbox)
        for loop, group in by_loop.items():
            with suppress(RuntimeError):  # the loop was closed just now
                loop.call_soon_threadsafe(_wake_all, group)

    def _end_all(self) -> None:
        """After the last step, give every waiting caller the reason."""
        with self._changed:
            posted, self._posted = self._posted, []
        for _, done in posted:
            if done.set_running_or_notify_cancel():
                done.set_exception(self._refusal())
        waiting = [box for box in self._open if box.put([], self._cause or self._refusal())]
        self._wake(waiting)


def _wake_all(mailboxes: list[_Mailbox]) -> None:
    for mailbox in mailboxes:
        mailbox.wake()
