"""The server as an application that another program serves: Ray Serve, or uvicorn with workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Unpack

from starlette.applications import Starlette

from nanoengine.api.async_llm import AsyncLLM
from nanoengine.config.engine import Settings
from nanoengine.serving.app import make_app
from nanoengine.serving.loaded_model import connected
from nanoengine.serving.options import ServerOptions
from nanoengine.serving.service import running_service


def asgi_app(
    model: str | Path, options: ServerOptions | None = None, **settings: Unpack[Settings]
) -> Starlette:
    """An ASGI application that loads the model when it starts and frees it when it ends.

    model, settings: as for LLM. options: those of the server that do not listen or stop; who serves
    the application does that. At its start it raises ConfigError and ModelLoadError.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with (
            await asyncio.to_thread(AsyncLLM, model, **settings) as llm,
            running_service(connected(llm), options or ServerOptions()) as service,
        ):
            answers = make_app(service)
            async with answers.router.lifespan_context(answers):
                app.mount("/", answers)
                yield

    return Starlette(lifespan=lifespan)
