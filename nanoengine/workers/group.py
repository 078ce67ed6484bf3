"""Group: how the ranks of one engine put columns together. And the checks that all groups make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from nanoengine.errors import EngineError
from nanoengine.kernels.call_tape import CallTape

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)


class Group(Protocol):
    """The ranks of one engine, each in a process of its own; rank 0 is in the user's.

    All ranks make the same calls in the same order, with the same widths, rows and dtypes. Tensors
    are on the group's device, of a dtype in DTYPES. Gathers and broadcasts raise EngineError: on
    wrong tensors, and once the group was aborted, a rank has died or one did not come in time. On a
    GPU they are queued on the current stream, and the host does not wait.

    can_replay: whether a step that was recorded with its gathers makes them again when replayed.
    tape: on a CPU, what records them; None: it is not recorded by that.
    """

    rank: int
    size: int
    can_replay: bool

    @property
    def tape(self) -> CallTape | None: ...

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """[rows, widths[rank]] of each rank -> [rows, sum(widths)] on every rank.

        Columns are in order of rank. A part may have strides.
        """
        ...

    def gather_to_first(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        """As gather, for rank 0 alone; the others get None."""
        ...

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's values on every rank.

        The others give a contiguous tensor of that shape and dtype, which is filled and returned.
        """
        ...

    def check(self, waited_s: float = 0.0) -> None:
        """Raises EngineError if queued calls will never end: the group has, or the host has waited
        too long. Without effect on a CPU, where none are queued.
        """
        ...

    def abort(self) -> None:
        """Ends the group, from any thread: who waits, or comes to wait, raises EngineError."""
        ...

    def close(self) -> None:
        """Releases what this rank holds; twice is fine.

        A call in another thread ends as if aborted.
        """
        ...


def check_part(
    part: Tensor, widths: Sequence[int], rank: int, size: int, place: str = "cpu"
) -> None:
    """Raises EngineError unless `part` is what `rank` of `size` gives to a gather. place: the kind
    of device that it is on.
    """
    _check_kind(part, place)
    if len(widths) != size or min(widths) < 0:
        raise EngineError(f"a gather takes a width of each of the {size} ranks: got {[*widths]}")
    if part.dim() != 2 or part.shape[1] != widths[rank]:
        raise EngineError(
            f"rank {rank} gives rows of {widths[rank]} values to a gather: got shape "
            f"{tuple(part.shape)}"
        )


def check_whole(tensor: Tensor, rank: int, place: str = "cpu") -> None:
    """Raises EngineError unless `tensor` is what `rank` gives to a broadcast."""
    _check_kind(tensor, place)
    if rank and not tensor.is_contiguous():
        raise EngineError(
            f"a broadcast fills a contiguous tensor: got shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()}"
        )


def _check_kind(tensor: Tensor, place: str) -> None:
    if tensor.dtype not in DTYPES or tensor.device.type != place:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise EngineError(
            f"ranks exchange tensors of {names} on {place}: got {tensor.dtype} on {tensor.device}"
        )
