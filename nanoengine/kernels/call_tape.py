"""CallTape: records the calls of a forward pass and replays them without the Python between.

The CPU's counterpart of a CUDA graph. Consecutive decode steps make the same calls on other
numbers, and the Python between the calls costs a fifth of a step at batch 1: its code and data have
left the caches by the time it runs again.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanoengine.context import ReplayKey
from nanoengine.errors import EngineError

CFunction = Callable[..., int | None]  # of C, or a small one of PyTorch
Args = bytes | tuple[Any, ...]  # the record that a function of C takes; or arguments
Call = tuple[CFunction, Args]
_TAPED = struct.Struct("=2Q")  # one field per member of taped_t in call_tape.h, in that order
# Operators that compute nothing, so a replay can leave them out.
_SHAPING = {"empty", "new_empty", "view", "transpose", "alias"}
_SHAPING |= {"split_with_sizes", "slice", "select", "unbind", "detach"}


class CallTape:
    """Makes calls and records those of the last pass, with the tensors that they point to."""

    def __init__(self, library: ctypes.CDLL | None = None) -> None:
        """library: any that has run_calls of call_tape.h, which makes neighbouring calls of C in a
        replay; None: Python makes each.
        """
        self._run_calls: CFunction | None = None
        if library is not None:
            library.run_calls.argtypes = [ctypes.c_char_p, ctypes.c_int64]
            self._run_calls = library.run_calls
        self._recording: _Pass | None = None
        self._last: _Pass | None = None

    def call(self, function: CFunction, args: Args, *held: object) -> None:
        """function(*args), where a result other than 0 means that memory ran out.

        args: the record, if the function is one of C that takes one. held: what the arguments point
        to. Raises EngineError.
        """
        this = self._recording
        if this is None:
            _make(function, args)
            return
        is_whole = this.is_whole
        _make(function, args)
        this.is_whole = is_whole  # PyTorch may have computed in the call, which is recorded
        this.calls.append((function, args))
        this.held.append(held)

    def replay(self, key: ReplayKey, forward: Callable[[], Tensor]) -> Tensor:
        """As LayerOps.replay; forward() reads the tensors of `key` and nothing else that changes.

        If the last pass had the same key, its calls are made again on these values, and the result
        is its tensor, overwritten. No forward() in which PyTorch computes anything is replayed.
        """
        shapes = [(t.shape, t.dtype) for t in key.tensors]
        whole_key = (torch.get_num_threads(), key.layout, shapes)
        last = self._last
        if last is None or last.key != whole_key:
            return self._record(_Pass(whole_key, key.tensors), forward)
        return last.replay(key.tensors) if last.is_whole else forward()

    def _record(self, this: _Pass, forward: Callable[[], Tensor]) -> Tensor:
        self._last, self._recording = None, this
        try:
            with _Watch(this):
                this.result = forward()
        finally:
            self._recording = None
        this.steps = [*_joined(this.calls, self._run_calls)]
        self._last = this
        return this.result


class _Pass:
    """A recorded pass. is_whole: its calls are all that it computed. steps: the same calls, in as
    few as there can be.
    """

    def __init__(self, key: object, tensors: Sequence[Tensor]) -> None:
        self.key = key
        self.tensors = tensors
        self.calls: list[Call] = []
        self.steps: list[Call] = []
        self.held: list[object] = []
        self.result = torch.empty(0)
        self.is_whole = True

    def replay(self, tensors: Sequence[Tensor]) -> Tensor:
        for mine, given in zip(self.tensors, tensors, strict=True):
            mine.copy_(given)
        for function, args in self.steps:
            _make(function, args)
        return self.result


def _joined(calls: list[Call], run_calls: CFunction | None) -> Iterator[Call]:
    """The calls, in which one of run_calls stands for neighbours that take a record."""
    for takes_record, neighbours in groupby(calls, lambda call: isinstance(call[1], bytes)):
        if run_calls is None or not takes_record:
            yield from neighbours
            continue
        taped = [_TAPED.pack(_address(function), _address(args)) for function, args in neighbours]
        yield run_calls, (b"".join(taped), len(taped))


def _address(pointer: Any) -> int:
    """Of a function of C, or of bytes that live on."""
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether PyTorch computes anything."""

    def __init__(self, this: _Pass) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._this = this

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch would import its compiler at the first step, for more than a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._this.is_whole &= func.overloadpacket.__name__ in _SHAPING
        return func(*args, **(kwargs or {}))


def _make(function: CFunction, args: Args) -> None:
    status = function(args) if isinstance(args, bytes) else function(*args)
    if status:
        raise EngineError("a CPU kernel is out of memory: lower the batch or the context")
