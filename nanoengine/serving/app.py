"""The HTTP application: which path leads where, and what every error becomes."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

import nanoengine
from nanoengine.serving import openapi
from nanoengine.serving.event_stream import DONE, GONE
from nanoengine.serving.guards import KeyGuard
from nanoengine.serving.known_paths import about_path
from nanoengine.serving.messages_answers import MessagesWriter, count_body
from nanoengine.serving.messages_requests import read_count, read_messages
from nanoengine.serving.openai_chunks import ChatChunks, CompletionChunks
from nanoengine.serving.openai_keys import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from nanoengine.serving.openai_requests import read_request
from nanoengine.serving.openapi import body_of, count_schema, request_schema
from nanoengine.serving.page import PAGE, chat_page
from nanoengine.serving.refusals import Refusal
from nanoengine.serving.report import report
from nanoengine.serving.responses_answers import ResponsesWriter
from nanoengine.serving.responses_requests import read_responses
from nanoengine.serving.service import Service, error_response, json_response
from nanoengine.serving.tokens import TokenEndpoints


def make_app(service: Service) -> FastAPI:
    """The application, without FastAPI's own pages: they load scripts from elsewhere."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        reporting = asyncio.create_task(report(service.llm))
        yield
        reporting.cancel()

    app = FastAPI(
        title="nanoengine",
        version=nanoengine.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # to the name that the client gave, without its proxy's scheme
        responses=openapi.RESPONSES_OF_ALL,
    )
    app.router.route_class = _ToldRoute
    _add_errors(app)
    _add_texts(app, service)
    _add_facts(app, service)
    _add_page(app, service)
    TokenEndpoints(service).add_to(app)
    options = service.options
    if options.api_key is not None:
        app.add_middleware(KeyGuard, api_key=options.api_key)
    if options.allow_origins:  # outside of the guard: a browser asks without the key first
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allow_origins,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    return app


def _add_texts(app: FastAPI, service: Service) -> None:
    """The endpoints that generate."""
    defaults = service.facts.defaults
    bytes_of = service.prompts.bytes_of

    def new_id() -> str:
        return uuid.uuid4().hex

    @app.post(CHAT, openapi_extra=body_of(request_schema(CHAT), may_stream=True))
    async def chat(request: Request) -> Response:
        asked = await service.read(request, lambda body: read_request(CHAT, body, defaults))
        writer = ChatChunks(asked, new_id(), service.name, bytes_of, service.prompts.parsers)
        return await service.answer(request, asked, writer, DONE)

    @app.post(COMPLETIONS, openapi_extra=body_of(request_schema(COMPLETIONS), may_stream=True))
    async def completions(request: Request) -> Response:
        asked = await service.read(request, lambda body: read_request(COMPLETIONS, body, defaults))
        writer = CompletionChunks(asked, new_id(), service.name, bytes_of)
        return await service.answer(request, asked, writer, DONE)

    @app.post(RESPONSES, openapi_extra=body_of(request_schema(RESPONSES), may_stream=True))
    async def responses(request: Request) -> Response:
        asked = await service.read(request, lambda body: read_responses(body, defaults))
        parsers = service.prompts.parsers
        writer = ResponsesWriter(asked, new_id(), service.name, bytes_of, parsers)
        return await service.answer(request, asked.chat, writer)

    @app.post(MESSAGES, openapi_extra=body_of(request_schema(MESSAGES), may_stream=True))
    async def messages(request: Request) -> Response:
        asked = await service.read(request, lambda body: read_messages(body, defaults))
        writer = MessagesWriter(asked, new_id(), service.name, service.prompts.parsers)
        return await service.answer(request, asked, writer)

    @app.post(f"{MESSAGES}/count_tokens", openapi_extra=body_of(count_schema()))
    async def count_tokens(request: Request) -> Response:
        asked = await service.read(request, lambda body: read_count(body, defaults))
        (prompt,) = await service.prompts_of(request, asked)
        return json_response(count_body(len(prompt.token_ids)))


def _add_facts(app: FastAPI, service: Service) -> None:
    """The endpoints that tell about the server."""
    model = {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "nanoengine",
        "root": service.facts.model,
        "parent": None,
        "max_model_len": service.facts.max_model_len,
    }

    @app.get("/v1/models")
    @app.get("/v1/models/", include_in_schema=False)  # it would be the model without a name
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return model

    @app.head("/health", response_class=Response, include_in_schema=False)
    @app.get("/health", response_class=Response)
    @app.get("/ping", response_class=Response)
    async def health() -> Response:
        await service.llm.check_health()
        return Response()

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": nanoengine.__version__}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        stats = await service.llm.stats()
        return Response(service.metrics.text(stats), media_type=CONTENT_TYPE_LATEST)


def _add_page(app: FastAPI, service: Service) -> None:
    """The chat page, and what it asks about memory."""
    page = chat_page()

    @app.head(PAGE, include_in_schema=False)
    @app.get(PAGE, include_in_schema=False)
    async def chat_in_a_browser() -> Response:
        return Response(page.body, headers=page.headers, media_type="text/html")

    @app.get("/kv_blocks")
    async def kv_blocks() -> Response:
        return json_response(asdict(await service.llm.block_map()))


def _like(app: FastAPI, asked: str) -> str:
    """The path that differs from this one in its beginning, such as /v1, alone; "" if none does."""
    asked = asked.rstrip("/") or asked
    paths = [
        route.path for route in app.routes if isinstance(route, APIRoute) and len(route.path) > 1
    ]
    return min((p for p in paths if p.endswith(asked) or asked.endswith(p)), key=len, default="")


def _add_errors(app: FastAPI) -> None:
    """Errors before an endpoint is reached."""

    async def of_http(request: Request, error: Exception) -> Response:
        """A path or a method that there is not."""
        status = error.status_code if isinstance(error, HTTPException) else 404
        what = f"{request.method} {request.url.path}"
        meant = _like(app, request.url.path)
        hint = f"did you mean {meant}?" if meant else about_path(request.url.path)
        code, text = {
            404: ("unknown_url", f"there is no {what}; {hint}"),
            405: ("method_not_allowed", f"there is no {what}; the path has another method"),
        }.get(status, ("invalid_request", str(error)))
        headers = getattr(error, "headers", None)
        return error_response(request, Refusal(status, code, text, headers=headers))

    async def gone(_: Request, __: Exception) -> Response:
        """The client left before its body had come."""
        return GONE

    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(HTTPException, of_http)


class _ToldRoute(APIRoute):
    """Answers with the error of an endpoint. A handler of the application would do so, too, but
    Starlette raises an unexpected error once more after it, and the server logs it once more.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def told(request: Request) -> Response:
            try:
                return await handle(request)
            except (HTTPException, ClientDisconnect):
                raise
            except Exception as error:
                return error_response(request, error)

        return told
