"""Odd bodies and broken connections by the hundred, with seeds: each is answered or refused, no
other request notices, and nothing is left in the engine.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, live_server, request_bytes
from test_malformed_bodies import COUNT, KNOWN, ODD, WHOLE

from nanoengine.serving.openai_keys import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from nanoengine.serving.tokens import OF_CHAT, OF_PROMPT, OF_TOKENS

TALK = [{"role": "user", "content": "a"}]
SHORT = {CHAT: "max_tokens", COMPLETIONS: "max_tokens", RESPONSES: "max_output_tokens"}
BODIES: dict[str, dict[str, Any]] = {
    path: body | {"stream": False, SHORT.get(path, "max_tokens"): 3} for path, body in WHOLE.items()
}
ENDPOINTS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    *((path, body, KNOWN[path]) for path, body in BODIES.items()),
    ("/tokenize", {"prompt": "a"}, OF_PROMPT),
    ("/tokenize", {"messages": TALK}, OF_CHAT),
    ("/detokenize", {"tokens": [5]}, OF_TOKENS),
]
VALUES: list[Any] = [
    *(1 << 31, 1 << 64, -(1 << 70), 1e-320, -1e308, "x" * 200_000, "\0", ["a"] * 100, [["a"]]),
    *([10**9], [[1, 2], [3]], {"99999": 5}, {"-1": 5}, {"5": 1e308}, {"5": None}, {"٥": 1}),
    *({"regex": "("}, {"json": {"$ref": "#"}}, {"grammar": "start: start"}, {"choice": ["a"] * 99}),
    *({"type": "json_object"}, {"type": "enabled", "budget_tokens": -1}, [TALK[0]] * 500),
    *([{"type": "function", "function": {"name": "f"}}], [{"name": "f", "input_schema": {}}]),
    *({"effort": "none"}, {"include_usage": True}, "required", "none", {"type": "any"}),
    *ODD,
]
NUM_BODIES, NUM_CLIENTS, PATIENCE_S = 1200, 200, 60.0


@pytest.fixture(scope="module")
def server(tiny: Callable[[str], Path]) -> Iterator[LiveServer]:
    with live_server(tiny("llama"), {"num_gpu_blocks": 60}) as made:
        yield made
        made.wait_until_idle()


def odd_bodies(seed: int) -> Iterator[tuple[str, bytes]]:
    """A path and a body with one to four odd values under keys that are known there."""
    luck = random.Random(seed)
    for _ in range(NUM_BODIES):
        path, body, names = luck.choice(ENDPOINTS)
        changes = {name: luck.choice(VALUES) for name in luck.choices(names, k=luck.randint(1, 4))}
        yield path, json.dumps(body | changes).encode()


async def answer_to(port: int, data: bytes) -> tuple[int, bytes]:
    """Status and body; of a stream all its chunks."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        body = (
            await reader.readexactly(int(length))
            if length
            else await reader.readuntil(b"\r\n0\r\n\r\n")
        )
        return int(head.split()[1]), body
    finally:
        writer.close()


@pytest.mark.breadth
@pytest.mark.filterwarnings("ignore:the role")
def test_odd_bodies_are_answered_or_refused_in_words(server: LiveServer) -> None:
    found: Counter[int] = Counter()

    async def client(asked: Iterator[tuple[str, bytes]]) -> None:
        for path, body in asked:
            answering = answer_to(server.port, request_bytes(path, body))
            status, answer = await asyncio.wait_for(answering, PATIENCE_S)
            found[status] += 1
            assert status in (200, 400, 404), (status, path, body[:500], answer)
            if status != 200:
                message = json.loads(answer)["error"]["message"]
                assert message and "Extension" not in message, (path, body[:500], message)

    async def clients() -> None:
        asked = odd_bodies(seed=1)
        await asyncio.gather(*(client(asked) for _ in range(8)))

    asyncio.run(clients())
    assert found.total() == NUM_BODIES and min(found[200], found[400], found[404]) > 10
    server.wait_until_idle()


def reset(writer: asyncio.StreamWriter) -> None:
    """Leave without a goodbye."""
    link: socket.socket = writer.get_extra_info("socket")
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


LONG = {
    CHAT: {"messages": TALK, "max_tokens": 40},
    COMPLETIONS: {"prompt": "a", "max_tokens": 40},
    RESPONSES: {"input": "a", "max_output_tokens": 40},
    MESSAGES: {"messages": TALK, "max_tokens": 40},
}


async def leaving(port: int, luck: random.Random, kind: str) -> None:
    """A client that goes in mid-body or in mid-stream, sends bytes slowly, or what is no body."""
    path = luck.choice(list(LONG))
    data = request_bytes(path, LONG[path] | {"stream": True})
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        if kind == "part of a request":
            writer.write(data[: luck.randrange(1, len(data))])
        elif kind == "part of a body, and an end":
            writer.write(data[:-3])
            writer.write_eof()
            await reader.read()
        elif kind == "a broken chunk":
            head = data.partition(b"Content-Length")[0]
            writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabczzzz\r\n\r\n")
            assert (await reader.read(12)).endswith(b"400")
        elif kind == "the beginning of a stream":
            writer.write(data)
            await reader.readuntil(b"data: ")
        elif kind == "bytes that are no text":
            writer.write(request_bytes(path, b'{"prompt": "\xff\xc3"}'))
            assert (await reader.read(12)).endswith(b"400")
        else:
            for start in range(0, len(data), 16):
                writer.write(data[start : start + 16])
                await asyncio.sleep(0.002)
            await reader.readuntil(b"\r\n0\r\n\r\n")
        await writer.drain()
        if luck.random() < 0.5:
            reset(writer)
    finally:
        writer.close()


KINDS = (
    *("part of a request", "part of a body, and an end", "a broken chunk"),
    *("the beginning of a stream", "bytes that are no text", "a slow body"),
)


def test_a_storm_of_clients_that_leave_harms_no_other(server: LiveServer) -> None:
    body = {"prompt": "The sea", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    alone = server.post(COMPLETIONS, **body)[1]["choices"]

    async def storm() -> list[Any]:
        luck, room = random.Random(2), asyncio.Semaphore(24)

        async def one(kind: str) -> None:
            async with room, asyncio.timeout(PATIENCE_S):
                with suppress(ConnectionError):  # it sends to who has answered and closed
                    await leaving(server.port, luck, kind)

        async def other() -> Any:
            status, answer = await answer_to(server.port, request_bytes(COMPLETIONS, body))
            assert status == 200, answer
            return json.loads(answer)["choices"]

        kinds = [KINDS[number % len(KINDS)] for number in range(NUM_CLIENTS)]
        leavers = [asyncio.create_task(one(kind)) for kind in kinds]
        answers = [await other() for _ in range(8)]
        await asyncio.gather(*leavers)
        return answers

    assert asyncio.run(storm()) == [alone] * 8
    server.wait_until_idle()


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (COMPLETIONS, b'{"prompt": "a", "seed": %s}' % (b"9" * 5000), "a number has 5000 digits"),
        (CHAT, {"messages": 5}, "got 5"),
        (CHAT, {"messages": TALK, "max_new_tokens": 0}, "here it is max_tokens"),
        (CHAT, {"messages": TALK, "random_seed": 0}, "here it is seed"),
        (CHAT, {"messages": TALK, "bad_words": ["\ud800"]}, "bad_words holds a lone surrogate"),
        (CHAT, {"messages": TALK, "stop": "\ud800"}, "stop holds a lone surrogate"),
        (CHAT, {"messages": TALK, "stop_token_ids": [5, "a"]}, "stop_token_ids[1] must be an int"),
        (COMPLETIONS, {"prompt": "a", "structured_outputs": {"json": {"$ref": "#"}}}, "no text"),
        (
            RESPONSES,
            {"input": [{"role": 5, "content": "a"}]},
            "input[0].role must be a text",
        ),
        (RESPONSES, {"input": "a", "reasoning": {"depth": 5}}, "there are effort, summary"),
        (MESSAGES, {"messages": TALK, "max_tokens": 5, "system": False}, "system must be a text"),
        (
            MESSAGES,
            {"messages": TALK, "max_tokens": 5, "thinking": {"type": "enabled"}},
            "thinking needs budget_tokens",
        ),
        (COUNT, {"messages": TALK, "system": 0}, "system must be a text"),
        ("/tokenize", {"messages": TALK, "tools": False}, "tools must be a list"),
    ],
)
def test_an_error_says_which_part_of_the_body_it_is_about(
    server: LiveServer, path: str, body: Any, message: str
) -> None:
    status, _, answer = server.ask("POST", path, body)
    assert status == 400 and message in json.loads(answer)["error"]["message"], answer


def test_a_compressed_body_is_refused(server: LiveServer) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    status, _, answer = server.ask("POST", COMPLETIONS, body, Content_Encoding="gzip")
    assert status == 415 and b"without the header Content-Encoding: gzip" in answer
    assert server.ask("POST", COMPLETIONS, body, Content_Encoding="identity")[0] == 200
