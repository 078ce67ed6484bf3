"""The progress bar of a call: a widget in a notebook that has ipywidgets, else a line of text.

Knows of requests how many ended, and how much of the other prompts was computed.
"""

from __future__ import annotations

import functools
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from tqdm import TqdmWarning

from nanoengine.outputs import RequestOutput
from nanoengine.sequence import Sequence

READ_EVERY_S = 0.5  # a step may take a millisecond


def progress_bar(what: str, total: int, use_tqdm: bool | Callable[..., Any]) -> Any:
    """A tqdm bar; hidden in a program without stderr. use_tqdm: True, or what makes one."""
    bar = use_tqdm if callable(use_tqdm) else _bar_class()
    is_hidden = not use_tqdm or not total or sys.stderr is None
    return bar(total=total, desc=what, disable=True) if is_hidden else bar(total=total, desc=what)


class RequestProgress:
    """What a bar of requests shows beside their number."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._start = self._shown = time.perf_counter()
        self._num_in = self._num_out = 0

    def add(self, output: RequestOutput) -> None:
        """A request ended."""
        self._num_in += len(output.prompt_token_ids)
        self._num_out += sum(len(made.token_ids) for made in output.outputs)
        self._bar.set_postfix_str(self._rates(), refresh=False)
        self._bar.update()

    def read(self, unfinished: Callable[[], Iterable[Sequence]]) -> None:
        """A step ended. unfinished: the sequences of all others, asked for now and then."""
        now = time.perf_counter()
        if self._bar.disable or now - self._shown < READ_EVERY_S:
            return
        self._shown = now
        seqs = [seq for seq in unfinished() if seq.prompt_owner is None]
        total = sum(seq.num_prompt_tokens for seq in seqs)
        done = sum(min(seq.num_computed, seq.num_prompt_tokens) for seq in seqs)
        if done < total:
            more = f"; {self._rates()}" if self._num_in else ""
            self._bar.set_postfix_str(f"{done} of {total} tokens of prompts read{more}")

    def _rates(self) -> str:
        elapsed = time.perf_counter() - self._start
        return f"in {self._num_in / elapsed:.0f} tok/s, out {self._num_out / elapsed:.0f} tok/s"


@functools.cache
def _bar_class() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TqdmWarning)  # it misses widgets in most notebooks
        from tqdm.auto import tqdm
    return tqdm
