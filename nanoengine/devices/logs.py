"""Shows what the package logs. Without this, loggers are Python's own: warnings go to stderr.

Every file logs to the logger of its own name, such as nanoengine.loading.find_model, and none
touches the root logger: what a program does with these records is its own affair.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from nanoengine.errors import shown

LOG_LEVEL = "NANOENGINE_LOG_LEVEL"
LEVELS = ("debug", "info", "warning", "error")
PACKAGE = "nanoengine"
# extra= of a record about work that takes long and is done once.
LONG_WORK = {"is_long_work": True}


def show_logs(level: str) -> None:
    """Show records of this level and above on stderr, as long as the root logger has no handler,
    which would show them, too. A level that does not exist is a warning and changes nothing.
    """
    logger = logging.getLogger(PACKAGE)
    if level.lower() not in LEVELS:
        logger.warning("%s must be one of %s, got %s", LOG_LEVEL, ", ".join(LEVELS), shown(level))
        return
    logger.setLevel(level.upper())
    if any(handler.name == PACKAGE for handler in logger.handlers):
        return
    handler = logging.StreamHandler()
    handler.name = PACKAGE
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    handler.addFilter(lambda _: not logging.root.handlers)
    logger.addHandler(handler)


@contextmanager
def long_work_shown() -> Iterator[None]:
    """Meanwhile records about LONG_WORK are lines on stderr, each once, as warnings are; not if
    somebody else shows what the package logs.
    """
    logger = logging.getLogger(PACKAGE)
    told: dict[str, logging.LogRecord] = {}  # threads log, too: one step looks and adds

    def has_reader() -> bool:
        return any(each.name == PACKAGE for each in logger.handlers)

    def is_shown(record: logging.LogRecord) -> bool:
        if has_reader() or logging.root.handlers:
            return False
        is_news = told.setdefault(record.getMessage(), record) is record
        is_long_work = hasattr(record, "is_long_work")
        return (is_news and is_long_work) or record.levelno >= logging.WARNING

    level, handler = logger.level, logging.StreamHandler()
    handler.addFilter(is_shown)
    if not (has_reader() or logging.root.handlers):
        logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        if not has_reader():
            logger.setLevel(level)
