"""Service: what all endpoints share. It owns the prompts' threads, the open requests, the metrics.

An endpoint reads a body into a request (`read`), and gives it with its writer to `answer`, which
generates the texts and sends them whole or as events.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    ExitStack,
    asynccontextmanager,
)
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from nanoengine.errors import shown
from nanoengine.outputs import StreamDelta
from nanoengine.serving.answer_forms import OWN_FORM
from nanoengine.serving.engine import Engine, TokenStream
from nanoengine.serving.event_stream import GONE, EventStream, ended, event, unless_gone
from nanoengine.serving.guards import read_body
from nanoengine.serving.metrics import Metrics
from nanoengine.serving.open_requests import OpenRequests
from nanoengine.serving.openai_answers import Event
from nanoengine.serving.openai_requests import named_as_given
from nanoengine.serving.options import ServerOptions
from nanoengine.serving.prompts import Asked, Facts, Prepared, Prompts, json_of
from nanoengine.serving.refusals import Refusal, told_of
from nanoengine.serving.writers import Writer

Result = TypeVar("Result")
LARGE_BODY = 1 << 20  # bytes


class Service:
    """Answers requests with one engine, on one event loop; see `running_service`."""

    def __init__(self, llm: Engine, facts: Facts, options: ServerOptions) -> None:
        self.llm = llm
        self.facts = facts
        self.options = options
        self.created = int(time.time())
        self.name = options.served_model_name or facts.model
        self.prompts = Prompts(facts, options)
        self.open = OpenRequests(options.max_open_texts, options.queue_seconds)
        self.metrics = Metrics(options.metrics_prefix, self.name, facts.kv_config)

    async def read(self, request: Request, understand: Callable[[Any], Any]) -> Any:
        """What `understand` makes of a body's JSON, in a thread. Raises its errors, Refusal and
        ClientDisconnect.
        """
        body = await read_body(request, self.options)
        request.state.is_large = len(body) > LARGE_BODY
        return await self._in_thread(request, lambda: understand(json_of(body)))

    async def _in_thread(self, request: Request, work: Callable[[], Result]) -> Result:
        """The result of work for a request, until its client leaves or the server ends."""
        running = self.prompts.run(work, request.state.is_large)
        made = await self._unless_gone(request, running)
        if made is None:
            raise ClientDisconnect
        return made

    async def _unless_gone(
        self, request: Request, work: Coroutine[Any, Any, Result]
    ) -> Result | None:
        """As unless_gone, until the server ends."""
        return await unless_gone(request, work, self.open.until_end())

    def check_model(self, name: str | None) -> None:
        """Raise Refusal for the name of another model; without a name this one is meant."""
        if name is not None and name not in (self.name, self.facts.model):
            raise Refusal(
                404,
                "model_not_found",
                f"the model {shown(name)} is not here; this server has {self.name!r}",
                "model",
            )

    async def prompts_of(self, request: Request, asked: Asked) -> list[Prepared]:
        """The prompts of a request for this model. Raises Refusal, RequestErrors and
        ClientDisconnect.
        """
        self.check_model(asked.model)
        return await self._in_thread(request, lambda: self.prompts.made_of(asked))

    async def answer(
        self, request: Request, asked: Asked, writer: Writer, last: bytes = b""
    ) -> Response:
        """Generate the texts; send them whole, or as events if that is wanted. last: what a stream
        ends with.
        """
        with _form_named(asked), ExitStack() as held:
            prompts = await self.prompts_of(request, asked)
            if asked.streaming is None:
                answer = await self._unless_gone(request, self._whole(asked, prompts, writer))
                return GONE if answer is None else answer
            streams = await self._unless_gone(request, self._streams(asked, prompts, held))
            if streams is None:
                return GONE
            return EventStream(
                self._events(asked, streams, writer, last),
                held.pop_all(),
                self.options.keep_alive_seconds,
                self.options.stall_seconds,
                lambda error: error_response(request, error),
                lambda error: _failure(writer, error) + last,
            )

    async def _streams(
        self, asked: Asked, prompts: list[Prepared], held: ExitStack
    ) -> list[TokenStream]:
        """The streams of all prompts, closed with `held`. Raises why one of them is refused."""
        held.enter_context(self.open.room_for(asked.num_completions))
        arrival = time.perf_counter()
        begun = (self.llm.stream(each.prompt, each.params) for each in prompts)
        found = await asyncio.gather(*begun, return_exceptions=True)
        streams, refused = [], []
        for prompt, each in zip(prompts, found, strict=True):
            if isinstance(each, BaseException):
                refused.append(each)
                continue
            sizes = len(prompt.token_ids), prompt.params.n
            held.enter_context(self.metrics.counted(each, *sizes, arrival))
            held.enter_context(self.open.watched(each))
            streams.append(each)
        if refused:
            raise refused[0]
        return streams

    async def _whole(self, asked: Asked, prompts: list[Prepared], writer: Writer) -> Response:
        with ExitStack() as held:
            streams = await self._streams(asked, prompts, held)
            waiting = [asyncio.ensure_future(stream.whole()) for stream in streams]
            try:
                outputs = await asyncio.gather(*waiting)
            finally:
                await ended(*waiting)
        # Many texts with log-probabilities take long to write: streams must not wait for them.
        return await self.prompts.run(lambda: json_response(writer.whole(outputs)))

    async def _events(
        self, asked: Asked, streams: list[TokenStream], writer: Writer, last: bytes
    ) -> AsyncGenerator[bytes, None]:
        """The events of a stream. Raises its error."""
        begun: set[int] = set()  # prompts whose first deltas have come
        with _form_named(asked):
            async for index, deltas in _deltas(streams):
                self.metrics.came(streams[index], deltas)
                events: list[Event] = []
                if index not in begun:
                    begun.add(index)
                    events += writer.begin(streams[index].begun(), index)
                events += writer.of(deltas, index)
                if events:
                    yield _joined(events)
        outputs = [stream.output for stream in streams if stream.output is not None]
        yield _joined(writer.end(outputs)) + last


def _form_named(asked: Asked) -> AbstractContextManager[None]:
    """The engine reads the form of an answer; its errors say what the body calls it."""
    return named_as_given({OWN_FORM: asked.form_key})


def json_response(body: dict[str, Any], status: int = 200) -> Response:
    """A body as JSON in ASCII, which can hold any text, also half of a surrogate pair."""
    return Response(json.dumps(body).encode(), status, media_type="application/json")


def error_response(request: Request, error: Exception) -> Response:
    """An error in the form of the request's path, with its status and headers."""
    told = told_of(error, request.url.path)
    response = json_response(told.body, told.status)
    response.headers.update(told.headers)
    return response


def _failure(writer: Writer, error: Exception) -> bytes:
    told = told_of(error)
    return _joined(writer.failed(told.status, told.body))


async def _deltas(streams: Sequence[TokenStream]) -> AsyncIterator[tuple[int, list[StreamDelta]]]:
    """New deltas of any of the streams, each time with its number, until all have ended."""
    if len(streams) == 1:  # the common case, without a task for each wait
        while deltas := await streams[0].take():
            yield 0, deltas
        return
    waiting = {asyncio.ensure_future(s.take()): index for index, s in enumerate(streams)}
    try:
        while waiting:
            ready, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in ready:
                index = waiting.pop(task)
                if deltas := task.result():
                    yield index, deltas
                if streams[index].output is None:
                    waiting[asyncio.ensure_future(streams[index].take())] = index
    finally:
        await ended(*waiting)


def _joined(events: list[Event]) -> bytes:
    return b"".join(event(data, name) for name, data in events)


@asynccontextmanager
async def running_service(
    engine: AbstractAsyncContextManager[tuple[Engine, Facts]], options: ServerOptions
) -> AsyncIterator[Service]:
    """A service for this event loop, until the block ends. engine: connects to it."""
    async with engine as (llm, facts):
        service = Service(llm, facts, options)
        try:
            yield service
        finally:
            service.prompts.close()
