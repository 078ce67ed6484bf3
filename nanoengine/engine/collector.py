"""Keeps Python's cyclic garbage collector away from what stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Collects nothing inside; what was made inside counts as old afterwards.

    Importing PyTorch and this package makes half a million objects. To go through them again and
    again takes the collector a seventh of the time of the imports.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # else somebody keeps objects frozen
            gc.freeze()
            gc.unfreeze()  # into the oldest generation, without a look at them
        if was_enabled:
            gc.enable()
