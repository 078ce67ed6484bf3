"""Shows what the package logs. Without this, loggers are Python's own: warnings go to stderr.

Every file logs to the logger of its own name, such as nanoengine.loading.find_model, and none
touches the root logger: what a program does with these records is its own affair.
"""

from __future__ import annotations

import logging

from nanoengine.errors import shown

LOG_LEVEL = "NANOENGINE_LOG_LEVEL"
LEVELS = ("debug", "info", "warning", "error")
PACKAGE = "nanoengine"


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
