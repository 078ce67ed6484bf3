"""Commands that a test runs in its own process."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def own_logs() -> Iterator[None]:
    """A command shows logs from then on, as if the process were its own."""
    logger = logging.getLogger("nanoengine")
    level, handlers = logger.level, [*logger.handlers]
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers
