"""A server without an engine: `python -m benchmarks.stand_in RECORDING`.

Sends what `bench serve --record` kept of a server's answers, each part as long after its request as
it came then. Prints its address; a line when it is asked for its models, to which it answers when a
line comes at standard input; and after another line the seconds of CPU that it took since. It ends
when standard input is closed.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

Event = tuple[float, bytes]  # seconds after the request; the text of one event
MODELS = b'{"object": "list", "data": [{"id": "stand-in"}]}'


def events_of(lines: list[tuple[float, str]]) -> list[Event]:
    """Recorded lines as events, each with the blank line that ends it."""
    events: list[Event] = []
    begun: list[tuple[float, str]] = []
    for at, line in lines:
        if line:
            begun.append((at, line))
        elif begun:
            text = "\n".join(each for _, each in begun)
            events.append((begun[0][0], f"{text}\n\n".encode()))
            begun = []
    return events


class StandIn:
    """Answers requests with recorded events."""

    def __init__(self, recording: list[dict[str, Any]]) -> None:
        self._events = {tuple(each["prompt"]): events_of(each["lines"]) for each in recording}
        self.may_answer = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """All requests of one connection."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                start = time.perf_counter()
                if head.startswith("post"):
                    size = int(head.partition("content-length:")[2].split()[0])
                    body = json.loads(await reader.readexactly(size))
                    await self._replay(writer, self._events[tuple(body["prompt"])], start)
                else:
                    print("asked", flush=True)
                    await self.may_answer.wait()
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(MODELS))
                    writer.write(MODELS)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has left
        finally:
            writer.close()

    async def _replay(
        self, writer: asyncio.StreamWriter, events: list[Event], start: float
    ) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        for at, event in events:
            await asyncio.sleep(start + at - time.perf_counter())
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        writer.write(b"0\r\n\r\n")
        await writer.drain()


async def main() -> None:
    """Serve until standard input is closed."""
    stand_in = StandIn(json.loads(Path(sys.argv[1]).read_text()))
    server = await asyncio.start_server(stand_in.serve, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    loop = asyncio.get_running_loop()
    begun = 0.0
    while await loop.run_in_executor(None, sys.stdin.readline):
        if stand_in.may_answer.is_set():
            print(round(time.process_time() - begun, 2), flush=True)
        begun = time.process_time()
        stand_in.may_answer.set()


if __name__ == "__main__":
    asyncio.run(main())
