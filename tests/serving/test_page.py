"""The chat page and what it asks: nothing from elsewhere, and nothing beside its own scripts runs.

test_page_in_browser.py looks at it in a browser.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from live_server import LiveServer, live_server

from nanoengine.serving.openai_keys import COMPLETIONS

pytestmark = pytest.mark.usefixtures("threads_as_before")
LOADS = ("src", "href", "action", "data", "srcset", "poster")


class Parts(HTMLParser):
    """The texts of scripts and styles, and what attributes load or run."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: dict[str, str] = {}
        self.loads: list[str] = []
        self.runs: list[str] = []
        self._tag = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        self.loads += [value or "" for name, value in attrs if name in LOADS]
        self.runs += [name for name, _ in attrs if name.startswith("on") or name == "style"]

    def handle_data(self, data: str) -> None:
        if self._tag in ("script", "style") and data.strip():
            assert self._tag not in self.texts
            self.texts[self._tag] = data


@pytest.fixture(scope="module")
def server(tiny: Callable[[str], Path]) -> Iterator[LiveServer]:
    with live_server(tiny("llama"), api_key="secret", engine_process=True) as made:
        yield made


def test_the_page_holds_all_it_needs(server: LiveServer) -> None:
    status, headers, data = server.ask("GET", "/")
    assert status == 200 and headers["content-type"] == "text/html; charset=utf-8"
    parts = Parts(data.decode())
    assert parts.loads == ["data:,"] and parts.runs == []
    script, style = parts.texts["script"], parts.texts["style"]
    assert not re.search(r"https?://[a-z]|@import|url\(", script + style)
    # What makes code or markup of a text.
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|Function\(", script
    )


def test_its_policy_lets_only_its_own_text_run(server: LiveServer) -> None:
    _, headers, data = server.ask("GET", "/")
    parts = Parts(data.decode())
    policy = dict(
        each.strip().split(" ", 1) for each in headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for kind in ("script", "style"):
        digest = hashlib.sha256(parts.texts[kind].encode()).digest()
        assert policy[f"{kind}-src"] == f"'sha256-{base64.b64encode(digest).decode()}'"
    assert headers["x-content-type-options"] == "nosniff"


def test_the_page_needs_no_key_and_what_it_asks_does(server: LiveServer) -> None:
    """A browser cannot send a key when it opens a page; the page holds nothing of the model."""
    for path in ("/kv_blocks", "/v1/models", "//", "/index.html"):
        assert server.get(path)[0] == 401, path
    status, body = server.get("/kv_blocks", Authorization="Bearer secret")
    assert status == 200 and body["requests"] == [] and body["block_size"] == 8


def test_blocks_of_an_open_request(tiny: Callable[[str], Path]) -> None:
    asked = {"prompt": [5] * 40, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    with live_server(tiny("llama")) as server:
        with server.connect(COMPLETIONS, **asked, stream=True) as link:
            assert link.recv(100)
            (request,) = server.get("/kv_blocks")[1]["requests"]
        server.wait_until_idle()
        assert server.get("/kv_blocks")[1]["requests"] == []
    (place, count), *empty = request["runs"]
    assert place == "device" and count == -(-request["num_computed"] // 8)
    assert [place for place, _ in empty] in ([], ["empty"])
    assert request["num_prompt_tokens"] == 40 and request["status"] == "running"
