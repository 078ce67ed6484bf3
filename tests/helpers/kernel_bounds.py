"""Holds interpreted Triton kernels to the tensors that they are given: what they read or write
beside these may be there on a CPU, and ends a GPU's process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor


class OutOfBoundsError(AssertionError):
    """A kernel touches memory of no tensor that it was given."""


class _Extents:
    """From the first to past the last byte of each tensor, overlapping ones joined."""

    def __init__(self, name: str, values: Iterable[object]) -> None:
        self.name = name
        tensors = [each for each in values if isinstance(each, Tensor) and each.numel()]
        joined: list[list[int]] = []
        for start, end in sorted(map(_extent, tensors)):
            if joined and start <= joined[-1][1]:
                joined[-1][1] = max(end, joined[-1][1])
            else:
                joined.append([start, end])
        self._starts, self._ends = np.array(joined, np.int64).reshape(-1, 2).T.copy()

    def check(self, what: str, pointers: Any, mask: Any, size: int) -> None:
        """Raise OutOfBoundsError for one of the pointers to `size` bytes; mask: which are used."""
        used: npt.NDArray[np.int64] = np.asarray(pointers).astype(np.int64)
        if mask is not None:
            used = used[np.broadcast_to(np.asarray(mask, bool), used.shape)]
        found = np.searchsorted(self._starts, used, "right") - 1
        is_inside = (found >= 0) & (used + size <= self._ends[found])
        if not is_inside.all():
            raise OutOfBoundsError(f"{self.name}: a {what} outside the tensors that it was given")


def _extent(tensor: Tensor) -> tuple[int, int]:
    places = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (places + 1) * tensor.element_size()


class _Checked:
    """Triton's functions that touch memory, each access checked."""

    def __init__(self, inner: Any, current: threading.local) -> None:
        self._inner, self._current = inner, current

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._current.extents.check("load", pointers, mask, np.dtype(dtype).itemsize)
        return self._inner.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, values: Any, mask: Any) -> Any:
        self._current.extents.check("store", pointers, mask, values.dtype.itemsize)
        return self._inner.store(pointers, values, mask)


def check_kernels(patch: pytest.MonkeyPatch) -> None:
    """From here on a kernel that leaves its tensors raises OutOfBoundsError, as the cause of
    Triton's error.
    """
    from triton.runtime import interpreter

    launch, current = interpreter.GridExecutor.__call__, threading.local()

    def checked(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            current.extents = _Extents(kernel.fn.__name__, [*args, *kwargs.values()])
        return launch(kernel, *args, **kwargs)

    patch.setattr(interpreter.GridExecutor, "__call__", checked)
    patch.setattr(interpreter, "_interpreter", _Checked(interpreter._interpreter, current))
