"""What stands before every endpoint: the key, the server's names, and the limits on a body. Plain
ASGI.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from contextlib import suppress
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from nanoengine.errors import shown
from nanoengine.serving.options import ServerOptions
from nanoengine.serving.page import PAGE
from nanoengine.serving.refusals import Refusal, told_of

OPEN_PATHS = ("/health", "/ping", PAGE)  # load balancers and browsers that open a page have no key
# Ends of names that public registries do not give away.
NEAR = (".localhost", ".internal", ".local", ".lan", ".home.arpa")
IDENTITY = "identity"  # of Content-Encoding: not compressed
MIB = 1 << 20
MAX_DIGITS = 18  # of a body's length: an integer of any more is too large as well


class KeyGuard:
    """Lets requests through that show the key, as a bearer token or as Anthropic's x-api-key."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._digest = _digest(api_key.strip())  # HTTP sends no spaces around a value

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401 without the key."""
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self._app(scope, receive, send)
            return
        refusal = Refusal(
            401,
            "invalid_api_key",
            "the API key is missing or wrong; send it as `Authorization: Bearer KEY`",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await _answer(refusal, scope["path"])(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        if scope["type"] == "http" and scope["path"] in OPEN_PATHS:
            return True
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        # Digests are of one length: the time of the comparison tells nothing about the key.
        return hmac.compare_digest(_digest(given), self._digest)


class NameGuard:
    """Lets requests through that call the server by a name of a machine nearby. A page of another
    site may have its site's name lead here, and is then no other site to the browser.
    """

    def __init__(self, app: ASGIApp, origins: tuple[str, ...]) -> None:
        """origins: of pages that may call."""
        self._app = app
        self._names = {urlsplit(origin).hostname for origin in origins}
        self._is_open = "*" in origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 403 to another name."""
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else ""
        if self._is_open or self._is_near(host):
            await self._app(scope, receive, send)
            return
        refusal = Refusal(
            403,
            "unknown_host",
            f"a server without a key answers to names of this machine, and not to {shown(host)}, "
            "which may be the name of a web page's site; set a key (--api-key), or let its pages "
            "call with --allow-origins",
        )
        await _answer(refusal, scope["path"])(scope, receive, send)

    def _is_near(self, host: str) -> bool:
        """Whether a Host header has no name, an address, or a name that no site can have."""
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        name = name.strip("[]").lower()
        with suppress(ValueError):
            return bool(ip_address(name))
        return "." not in name or name.endswith(NEAR) or name in self._names


def _answer(refusal: Refusal, path: str) -> JSONResponse:
    told = told_of(refusal, path)
    return JSONResponse(told.body, told.status, told.headers)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


async def read_body(request: Request, options: ServerOptions) -> bytes:
    """The body of a request. Raises Refusal if it is no JSON, too large or too slow."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # and so no other web page can call without being asked
        raise Refusal(
            415,
            "unsupported_media_type",
            f"the body must be JSON: send the header Content-Type: application/json, not {kind!r}",
        )
    coding = request.headers.get("content-encoding", IDENTITY).strip().lower()
    if coding != IDENTITY:
        raise Refusal(
            415,
            "unsupported_media_type",
            f"the body is not unpacked: send it without the header Content-Encoding: {coding}",
        )
    most = options.max_body_mib * MIB
    # The connection stays open: what comes of a body that is refused is dropped, for a while. To
    # close it at once would lose the answer.
    too_large = Refusal(
        413,
        "request_too_large",
        f"the body is larger than {options.max_body_mib} MiB; --max-body-mib raises the limit",
    )
    said = request.headers.get("content-length", "")
    if said.isdecimal() and int(said[:MAX_DIGITS]) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(options.read_seconds):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise too_large
    except TimeoutError:
        raise Refusal(
            408,
            "request_timeout",
            f"the body did not arrive within {options.read_seconds:g} s",
            headers={"Connection": "close"},
        ) from None
    return bytes(body)
