"""The progress bar of a call: a widget in a notebook that has ipywidgets, else a line of text."""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any

from tqdm import TqdmWarning


def progress_bar(what: str, total: int, is_wanted: bool) -> Any:
    """A tqdm bar; hidden in a program without stderr."""
    bar = _bar_class()
    return bar(total=total, desc=what, disable=not is_wanted or sys.stderr is None)


@functools.cache
def _bar_class() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TqdmWarning)  # it misses widgets in most notebooks
        from tqdm.auto import tqdm
    return tqdm
