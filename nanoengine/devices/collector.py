"""Keeps Python's cyclic garbage collector from scanning permanent objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Pause the collector; objects made meanwhile move to the oldest generation afterwards.

    Importing PyTorch and this package makes half a million objects. Scanning them repeatedly takes
    a seventh of the import time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # otherwise the caller's own frozen objects would be unfrozen
            gc.freeze()
            gc.unfreeze()  # moves all objects to the oldest generation without a scan
        if was_enabled:
            gc.enable()
