"""The chat page: one document that holds its style and its scripts, and loads nothing.

chat.html is its frame; store.js keeps conversations, text.js shows text, blocks.js shows where KV
blocks lie, chat.js talks to the server. A policy in its headers lets nothing else run.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from importlib.resources import files

PAGE = "/"
SCRIPTS = ("store.js", "text.js", "blocks.js", "chat.js")


@dataclass(frozen=True, slots=True)
class Document:
    """What a browser gets."""

    body: bytes
    headers: dict[str, str]


def chat_page() -> Document:
    """The page, with the headers that guard it."""
    style = _read("style.css")
    script = "".join(map(_read, SCRIPTS))
    page = _read("chat.html").replace("/* style.css */", style).replace("/* scripts */", script)
    policy = (
        "default-src 'none'",
        f"script-src {_hash_of(script)}",
        f"style-src {_hash_of(style)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
    headers = {
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Document(page.encode(), headers)


def _read(name: str) -> str:
    return (files(__name__) / name).read_text(encoding="utf-8")


def _hash_of(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
