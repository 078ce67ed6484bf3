"""Clients that come and go at random, against a server whose KV lies on two tiers.

    python benchmarks/proofs/server_storm.py [--seconds 60] [--clients 64]

Some clients read a whole answer, which must be the one that they get alone; others leave after some
bytes, read a byte at a time, or send what is no request. At the end nothing may be left in the
engine, and the process may not have grown. Prints one JSON object; exit code 1 if anything fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from driver import host_gib  # noqa: E402
from live_server import LiveServer, events_of, live_server, request_bytes  # noqa: E402
from tiny_models import TINY  # noqa: E402 (found by the line above)

from nanoengine.serving.openai_keys import COMPLETIONS  # noqa: E402

MOST_GROWTH = 0.02
BROKEN = (
    b"GET /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"POST /v1/completions HTTP/9.9\r\n\r\n",
)


def bodies() -> list[dict[str, Any]]:
    """What clients ask for; some begin alike."""
    made = []
    for number in range(24):
        prompt = [5 + number // 4] * 30 + [20 + number] * (1 + 3 * (number % 5))
        length = 10 + 7 * (number % 9)
        made.append({"prompt": prompt, "max_tokens": length, "temperature": 0, "stream": True})
    return [body | {"ignore_eos": True} for body in made]


def text_of(data: bytes) -> str:
    """The text of a stream's events."""
    return "".join(each["choices"][0]["text"] for each in events_of(data))


class Storm:
    """Clients until a deadline; counts what they did and what went wrong."""

    def __init__(self, server: LiveServer, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._server = server
        self._random = random.Random(seed)
        self._bodies = bodies()
        self._alone = [text_of(server.ask("POST", COMPLETIONS, body)[2]) for body in self._bodies]

    async def run(self, clients: int, seconds: float) -> None:
        """So many clients at a time, for so long."""
        end = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(self._client(end))

    async def _client(self, end: float) -> None:
        kinds = (self._whole, self._whole, self._leaving, self._leaving, self._slow, self._broken)
        while time.monotonic() < end:
            kind = self._random.choice(kinds)
            reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
            try:
                await kind(reader, writer)
                self.counts[kind.__name__.strip("_")] += 1
            except ConnectionError:
                self.counts["refused"] += 1
            finally:
                writer.transport.abort()

    async def _whole(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._compare(writer, reader, 1 << 16)

    async def _slow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._compare(writer, reader, 1)

    async def _leaving(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = self._random.choice(self._bodies) | {"stream": self._random.random() < 0.7}
        data = request_bytes(COMPLETIONS, body)
        writer.write(data[: self._random.choice((len(data), len(data), len(data) // 2))])
        if self._random.random() < 0.7:
            try:
                async with asyncio.timeout(self._random.random() * 0.5):
                    await reader.read(self._random.choice((1, 500, 5000)))
            except TimeoutError:
                return

    async def _broken(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._random.random() < 0.5:
            writer.write(self._random.choice(BROKEN))
        else:
            body = bytearray(json.dumps(self._random.choice(self._bodies)).encode())
            for _ in range(self._random.choice((1, 1, 4))):
                # One of its own bytes often leaves it JSON.
                byte = self._random.choice((self._random.randrange(256), self._random.choice(body)))
                body[self._random.randrange(len(body))] = byte
            writer.write(request_bytes(COMPLETIONS, bytes(body)))
        try:
            async with asyncio.timeout(1.0):
                answer = await reader.read(13)
        except TimeoutError:
            return
        self.counts[f"broken: {answer[9:12].decode() or 'closed'}"] += 1
        if answer[9:10] == b"5":
            self.wrong.append(f"{answer!r} to a broken request")

    async def _compare(
        self, writer: asyncio.StreamWriter, reader: asyncio.StreamReader, size: int
    ) -> None:
        number = self._random.randrange(len(self._bodies))
        writer.write(request_bytes(COMPLETIONS, self._bodies[number]))
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head[:20]:
            self.wrong.append(repr(head[:40]))
            return
        data = b""
        while True:
            length = int(await reader.readline(), 16)
            part = b""
            while len(part) < length:
                part += await reader.read(min(size, length - len(part)))
            data += part
            await reader.readline()
            if not length:
                break
        if text_of(data) != self._alone[number]:
            self.wrong.append(f"request {number} has another text than alone")


def resident_pages() -> int:
    """Memory of this process that lies in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1])


def main() -> int:
    """Run the storm; returns the exit status."""
    parser = argparse.ArgumentParser(description="Clients that come and go at random.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        path = Path(made)
        TINY["llama"](path)
        settings = {
            "num_gpu_blocks": 60,
            "enable_cpu_offload": True,
            "offload_mode": "stream",
            "kv_offload_gib": host_gib(path, 1500, 8),
            "max_num_seqs": 32,
        }
        with live_server(path, settings) as server:
            storm = Storm(server, args.seed)
            asyncio.run(storm.run(args.clients, args.seconds / 3))
            before = resident_pages()
            asyncio.run(storm.run(args.clients, args.seconds * 2 / 3))
            server.wait_until_idle()
            growth = resident_pages() / before - 1
    row = {
        "seconds": args.seconds,
        "clients": args.clients,
        **storm.counts,
        "wrong": len(storm.wrong),
        "rss_growth": round(growth, 4),
    }
    print(json.dumps(row))
    for text in storm.wrong[:5]:
        print(text, file=sys.stderr)
    return 1 if storm.wrong or growth > MOST_GROWTH else 0


if __name__ == "__main__":
    sys.exit(main())
