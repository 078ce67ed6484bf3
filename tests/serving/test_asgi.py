"""The server as an application that another program serves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from live_server import SETTINGS

from nanoengine import LLM, ModelNotFoundError, SamplingParams
from nanoengine.serving.asgi import asgi_app
from nanoengine.serving.options import ServerOptions

pytestmark = pytest.mark.usefixtures("threads_as_before")


async def ask(app: Any, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Status and JSON of one request, given to the application itself."""
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://x") as client:
        answer = await client.request(method, path, json=body)
    return answer.status_code, json.loads(answer.content or b"null")


def test_the_application_answers_while_it_lives(tiny: Callable[[str], Path]) -> None:
    asked = {"prompt": "the sea", "temperature": 0, "max_tokens": 5, "ignore_eos": True}

    async def work() -> list[tuple[int, Any]]:
        app = asgi_app(tiny("llama"), ServerOptions(served_model_name="small"), **SETTINGS)
        async with app.router.lifespan_context(app):
            calls = ("GET", "/health", None), ("POST", "/v1/completions", asked)
            found = [await ask(app, *call) for call in (*calls, ("GET", "/nothing", None))]
        return [*found, await ask(app, *calls[0])]

    health, answer, nothing, ended = asyncio.run(work())
    with LLM(tiny("llama"), **SETTINGS) as llm:
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        expected = llm.generate("the sea", params, use_tqdm=False)[0]["text"]
    assert health[0] == 200 and nothing[0] == 404 and ended[0] == 503
    assert answer[1]["choices"][0]["text"] == expected and answer[1]["model"] == "small"


def test_a_model_that_is_not_there_ends_the_start() -> None:
    async def work() -> None:
        app = asgi_app("nowhere/at/all")
        async with app.router.lifespan_context(app):
            raise AssertionError("it started")

    with pytest.raises(ModelNotFoundError):
        asyncio.run(work())
