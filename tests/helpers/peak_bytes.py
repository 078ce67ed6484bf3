"""The most bytes that work holds at once in tensors that it makes, on a device that counts none."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Counter(TorchDispatchMode):
    """Sees what each operator gives; not what C code of ours or an operator itself allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._known: dict[int, int] = {}  # bytes, by address

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if _is(x)}
        out = func(*args, **kwargs or {})
        for tensor in filter(_is, tree_leaves(out)):
            storage = tensor.untyped_storage()
            if id(storage) not in given and storage.data_ptr() not in self._known:
                self._known[storage.data_ptr()] = storage.nbytes()
                self._now += storage.nbytes()
                weakref.finalize(storage, self._free, storage.data_ptr())
        self.peak = max(self.peak, self._now)
        return out

    def _free(self, address: int) -> None:
        self._now -= self._known.pop(address)


def _is(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and value.numel() > 0


def peak_bytes_of(work: Callable[[], object]) -> int:
    """The peak of `work`."""
    with _Counter() as counter:
        work()
    return counter.peak
