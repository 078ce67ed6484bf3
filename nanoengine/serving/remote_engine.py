"""RemoteEngine: the engine of another process, as the server calls it; RemoteStream: its streams.

They hold no engine and no process: they know the messages, which engine_worker.py answers. Imports
no torch.
"""

from __future__ import annotations

import asyncio
import socket
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from nanoengine.api.block_map import BlockMap
from nanoengine.api.stats import EngineStats
from nanoengine.engine.completion import merge_deltas
from nanoengine.errors import EngineClosedError, EngineError
from nanoengine.outputs import RequestOutput, StreamDelta
from nanoengine.sampling_params import SamplingParams
from nanoengine.serving.engine_messages import MAX_LINE, error_of, line_of, message_of, record
from nanoengine.serving.event_stream import ended
from nanoengine.serving.prompts import Facts
from nanoengine.text.tokenizer import Tokenizer


class RemoteEngine:
    """An Engine behind a socket, for one event loop; see `connected`."""

    def __init__(
        self, link: socket.socket, told: dict[str, Any], why_ended: Callable[[], Exception]
    ) -> None:
        """told: the worker's first message. why_ended: why nobody answers any more; may block."""
        self.facts = Facts(
            told["model"],
            Tokenizer.from_folder(Path(told["tokenizer"]), told["chat_template"]),
            record(SamplingParams, told["defaults"]),
            told["max_model_len"],
            told["kv_config"],
            self._check_room,
        )
        self._link = link
        self._why_ended = why_ended
        self._ids = count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        # A stream that nobody holds any more ends its request.
        self._streams: weakref.WeakValueDictionary[int, RemoteStream] = (
            weakref.WeakValueDictionary()
        )
        self._is_closed = False
        self._cause: Exception | None = None

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[RemoteEngine, Facts]]:
        """Talk to the worker on this event loop, until the block ends."""
        self._loop = asyncio.get_running_loop()
        reader, self._writer = await asyncio.open_connection(sock=self._link, limit=MAX_LINE)
        hearing = asyncio.create_task(self._hear(reader))
        try:
            yield self, self.facts
        finally:
            await ended(hearing)
            self._end(None)
            self._writer.close()

    async def stream(self, prompt: dict[str, Any], sampling_params: SamplingParams) -> RemoteStream:
        """Queue one prompt, {"prompt_token_ids": ids} and perhaps "prompt" and "cache_salt"; raises
        what AsyncLLM.stream raises.
        """
        number = next(self._ids)
        made = RemoteStream(prompt, lambda **said: self._say(id=number, **said), self._loop)
        self._streams[number] = made
        ids, salt = prompt["prompt_token_ids"], prompt.get("cache_salt")
        try:
            await self._ask(number, do="open", ids=ids, salt=salt, params=sampling_params)
        except BaseException:  # refused, or the caller was cancelled
            made.close()
            raise
        return made

    async def stats(self) -> EngineStats:
        """Those of the engine, between two steps."""
        return record(EngineStats, await self._ask(next(self._ids), do="stats"))

    async def block_map(self) -> BlockMap:
        """Where the blocks of the engine's requests lie, between two steps."""
        return record(BlockMap, await self._ask(next(self._ids), do="blocks"))

    async def check_health(self) -> None:
        """Raise EngineClosedError if the engine failed or was closed, or its process ended."""
        await self._ask(next(self._ids), do="health")

    def _check_room(self, num_prompt: int, max_tokens: int) -> None:
        if num_prompt + max_tokens > self.facts.max_model_len:  # the engine says what would help
            asked = self._ask(next(self._ids), do="room", num_prompt=num_prompt, most=max_tokens)
            asyncio.run_coroutine_threadsafe(asked, self._loop).result()

    async def _ask(self, number: int, **said: Any) -> Any:
        """The worker's answer to a message. Raises its error, and EngineClosedError."""
        if self._is_closed:
            raise self._refusal()
        answer = self._calls[number] = self._loop.create_future()
        try:
            self._say(id=number, **said)
            return await answer
        finally:
            self._calls.pop(number, None)

    def _say(self, **said: Any) -> None:
        if not self._is_closed:
            self._writer.write(line_of(said))

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        """Give what the worker says to who waits for it, until the worker ends."""
        try:
            with suppress(ConnectionError):
                while (line := await reader.readline()).endswith(b"\n"):
                    self._take(message_of(line))
            cause = await asyncio.to_thread(self._why_ended)
        except Exception as error:  # a damaged message, which no later one mends
            cause = error
        self._end(cause)

    def _take(self, message: dict[str, Any]) -> None:
        number = message["id"]
        answer = self._calls.get(number)
        # An answer that is done has a caller who has not run since, or who was cancelled.
        if answer is None or answer.done():
            if (stream := self._streams.get(number)) is not None:
                stream.put(message)
        elif "error" in message:
            answer.set_exception(error_of(message["error"]))
        else:
            answer.set_result(message.get("answer"))

    def _end(self, cause: Exception | None) -> None:
        """Nothing is said or heard any more: give everybody who waits the reason."""
        if self._is_closed:
            return
        self._is_closed, self._cause = True, cause
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(self._refusal())
        for stream in list(self._streams.values()):
            stream.fail(cause or self._refusal())

    def _refusal(self) -> EngineClosedError:
        if self._cause is None:
            return EngineClosedError("the engine was closed")
        if isinstance(self._cause, EngineClosedError):
            return EngineClosedError(str(self._cause))
        refusal = EngineClosedError(f"the engine failed and was closed: {self._cause!r}")
        refusal.__cause__ = self._cause
        return refusal


class RemoteStream:
    """A TokenStream whose request is in another process."""

    def __init__(
        self, prompt: dict[str, Any], say: Callable[..., None], loop: asyncio.AbstractEventLoop
    ) -> None:
        """say: sends a message about this request, on `loop`."""
        self.output: RequestOutput | None = None  # once the request has ended
        self.error: Exception | None = None  # once take() has raised it
        self.is_queued = True
        self._prompt = prompt
        self._say = say
        self._loop = loop
        self._is_read = False
        self._begun = RequestOutput(-1, None, [], [], finished=False)
        self._deltas: list[StreamDelta] = []
        self._end: RequestOutput | Exception | None = None
        self._arrived = asyncio.Event()

    def begun(self) -> RequestOutput:
        """The output before the first token; from the first delta on with what AsyncDeltaStream's
        has.
        """
        return self._with_prompt(self._begun)

    async def take(self) -> list[StreamDelta]:
        """Wait for new output: at most one delta for each completion; none after the end.

        Raises the error of the request or the engine.
        """
        self._read(deltas=True)
        while self.output is None:
            deltas, self._deltas = self._deltas, []
            if isinstance(self._end, Exception):
                self.error = self._end
                raise self._end
            self.output = self._end
            if deltas or self._end is not None:
                return deltas
            await self._arrived.wait()
            self._arrived.clear()
        return []

    async def whole(self) -> RequestOutput:
        """Wait for the end; no deltas are made until then. Raises what take() raises."""
        self._read(deltas=False)
        while self.output is None:
            await self.take()
        return self.output

    def put(self, message: dict[str, Any]) -> None:
        """Take in a message about this request."""
        if self._end is not None:
            return
        self.is_queued = False
        if "begun" in message:
            self._begun = record(RequestOutput, message["begun"])
        new = [record(StreamDelta, delta) for delta in message.get("deltas", ())]
        self._deltas = merge_deltas([*self._deltas, *new]) if self._deltas else new
        if "error" in message:
            self._end = error_of(message["error"])
        elif "output" in message:
            self._end = self._with_prompt(record(RequestOutput, message["output"]))
        if new or self._end is not None:
            self._arrived.set()

    def fail(self, error: Exception) -> None:
        """End the request unless it has ended: whoever reads it gets this error."""
        if self._end is None:
            self._end = error
            self._arrived.set()
            self._say(do="close")

    def close(self) -> None:
        """End the request unless it has ended; closing twice is fine."""
        self.fail(EngineError("the stream was closed"))

    def _read(self, deltas: bool) -> None:
        """Ask for the output, once."""
        if not self._is_read:
            self._is_read = True
            self._say(do="read", deltas=deltas)

    def _with_prompt(self, output: RequestOutput) -> RequestOutput:
        """The output with the prompt, which the worker does not send back."""
        ids = list(self._prompt["prompt_token_ids"])
        return replace(output, prompt=self._prompt.get("prompt"), prompt_token_ids=ids)

    def __del__(self) -> None:
        if self._end is None:
            with suppress(RuntimeError):  # the loop is closed, and the engine soon is
                self._loop.call_soon_threadsafe(partial(self._say, do="close"))
