"""Fixtures of the tests of the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from live_server import LiveServer, live_server
from tool_models import tool_model


@pytest.fixture(scope="module")
def tool_server(
    tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    """A server whose model has tools and thoughts, for the tests of a file."""
    folder = tool_model(tiny("llama"), tmp_path_factory.mktemp("tools") / "model")
    with live_server(folder) as made:
        yield made
        made.wait_until_idle()
