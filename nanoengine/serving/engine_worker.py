"""The engine's process of a server: loads the model and answers messages, each a line of JSON.

engine_process.py starts it by workers/, and remote_engine.py says what is answered here:

{"do": "open", "id", "ids", "salt", "params"}   nothing, or the error of the request
{"do": "read", "id", "deltas"}                  its deltas, if they are wanted, and its output
{"do": "close", "id"}                           the request ends, if it has not ended
{"do": "stats" | "blocks" | "health", "id"}, {"do": "room", "id", "num_prompt", "most"}
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from nanoengine.api.async_llm import AsyncLLM
from nanoengine.api.delta_stream import AsyncDeltaStream
from nanoengine.devices.logs import show_logs
from nanoengine.errors import EngineError
from nanoengine.outputs import RequestOutput
from nanoengine.sampling_params import SamplingParams
from nanoengine.serving.engine_messages import MAX_LINE, deltas_of, line_of, message_of, record
from nanoengine.serving.loaded_model import facts_of
from nanoengine.serving.prompts import Facts
from nanoengine.workers.channel import Channel

LOOK_S = 0.05  # between looks at requests that wait for their first step


def main(_: Channel, hello: dict[str, Any]) -> None:
    """Answer at the socket hello["link"] until its other side ends. An EngineError of the start is
    the first message.
    """
    os.set_inheritable(hello["link"], False)
    link = socket.socket(fileno=hello["link"])
    if hello["log_level"] is not None:
        show_logs(hello["log_level"])
    try:
        llm = AsyncLLM(**hello["settings"])
        facts = asyncio.run(llm.call(facts_of))
    except EngineError as error:
        link.sendall(line_of({"error": error}))
        return
    # Who ends a service may signal all its processes; the server gives its requests time to end.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link.sendall(line_of(told_of_model(facts)))
    with closing(llm):
        asyncio.run(answer(llm, facts, link))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # of a server that has waited long enough


def told_of_model(facts: Facts) -> dict[str, Any]:
    """The first message after a start that went well."""
    return {
        "model": facts.model,
        "tokenizer": str(facts.tokenizer.folder),
        "chat_template": facts.tokenizer.given_template,
        "defaults": facts.defaults,
        "max_model_len": facts.max_model_len,
        "kv_config": facts.kv_config,
    }


async def answer(llm: AsyncLLM, facts: Facts, link: socket.socket) -> None:
    """Answer messages until the other side ends; requests that are open then are ended."""
    reader, writer = await asyncio.open_connection(sock=link, limit=MAX_LINE)
    requests = Requests(llm, facts, writer)
    try:
        while (line := await reader.readline()).endswith(b"\n"):
            requests.hear(message_of(line))
    except ConnectionError:  # the server was killed
        pass
    finally:
        writer.close()


def _without_prompt(output: RequestOutput) -> RequestOutput:
    """The server has the prompt."""
    return replace(output, prompt=None, prompt_token_ids=[])


@dataclass(slots=True)
class _Request:
    """A request of the server. reads: whether it wants deltas, once it reads. is_told: the server
    knows that its first step has begun.
    """

    task: asyncio.Task[None]
    reads: asyncio.Future[bool]
    stream: AsyncDeltaStream | None = None
    is_told: bool = False


class Requests:
    """The open requests of a server, and what it asks about the engine. For one event loop."""

    def __init__(self, llm: AsyncLLM, facts: Facts, writer: asyncio.StreamWriter) -> None:
        self._llm = llm
        self._facts = facts
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._open: dict[int, _Request] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # a loop holds its tasks weakly
        self._lines: list[bytes] = []
        self._looking: asyncio.TimerHandle | None = None

    @property
    def num_open(self) -> int:
        """How many requests have not ended."""
        return len(self._open)

    def hear(self, message: dict[str, Any]) -> None:
        """Do what a message asks for."""
        number = message["id"]
        match message["do"]:
            case "open":
                task = self._loop.create_task(self._run(number, message))
                self._open[number] = _Request(task, self._loop.create_future())
                # Here, as a task that is cancelled before it has begun runs none of its lines.
                task.add_done_callback(lambda _: self._open.pop(number))
                self._look_later()
            case "read":
                if number in self._open and not self._open[number].reads.done():
                    self._open[number].reads.set_result(message["deltas"])
            case "close":
                if number in self._open:
                    self._open[number].task.cancel()
            case _:
                task = self._loop.create_task(self._tell(number, message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _run(self, number: int, message: dict[str, Any]) -> None:
        """Open a request and send its output; whatever ends it, nothing of it stays."""
        prompt = {"prompt_token_ids": message["ids"], "cache_salt": message["salt"]}
        try:
            params = record(SamplingParams, message["params"])
            async with await self._llm.stream(prompt, params) as stream:
                asked = self._open[number]
                asked.stream = stream
                self._say(id=number, answer=None)
                await self._send(number, stream, await asked.reads)
        except Exception as error:
            self._say(id=number, error=error)

    async def _send(self, number: int, stream: AsyncDeltaStream, wants_deltas: bool) -> None:
        if not wants_deltas:
            self._say(id=number, output=_without_prompt(await stream.whole()))
            return
        begun = None
        while stream.output is None:
            said: dict[str, Any] = {"id": number, "deltas": deltas_of(await stream.take())}
            if begun is None:
                begun = said["begun"] = _without_prompt(stream.begun())
            if stream.output is not None:
                said["output"] = _without_prompt(stream.output)
            self._say(**said)
            await self._writer.drain()  # a server that is slow to read finds deltas merged

    async def _tell(self, number: int, message: dict[str, Any]) -> None:
        """Answer a question."""
        try:
            self._say(id=number, answer=await self._answer_to(message))
        except Exception as error:
            self._say(id=number, error=error)

    async def _answer_to(self, message: dict[str, Any]) -> Any:
        match message["do"]:
            case "stats":
                return await self._llm.stats()
            case "blocks":
                return await self._llm.block_map()
            case "health":
                return await self._llm.check_health()
            case "room":
                return self._facts.check_room(message["num_prompt"], message["most"])
        raise EngineError(f"a damaged message between processes: {message['do']!r} is unknown")

    def _look_later(self) -> None:
        if self._looking is None:
            self._looking = self._loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        """Say which requests wait no longer: a long prompt may give no token for a while."""
        self._looking = None
        waiting = [(number, asked) for number, asked in self._open.items() if not asked.is_told]
        for number, asked in waiting:
            if asked.stream is None or asked.stream.is_queued:
                self._look_later()
            else:
                asked.is_told = True
                self._say(id=number)

    def _say(self, **said: Any) -> None:
        """Send a message, with all that are said in this round of the loop: those of one step."""
        try:
            line = line_of(said)
        except EngineError as error:  # too long
            line = line_of({"id": said["id"], "error": error})
        if not self._lines:
            self._loop.call_soon(self._flush)
        self._lines.append(line)

    def _flush(self) -> None:
        self._writer.write(b"".join(self._lines))
        self._lines.clear()
