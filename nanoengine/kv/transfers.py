"""What a step moves between the tiers, what failed of it, and what was moved in all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nanoengine.kv.step_plan import Load, Store


@dataclass(slots=True)
class TransferCounters:
    """Bytes that crossed the link, those of fills among them and in how many copies, and how often
    compute found its data ready or had to wait.
    """

    h2d_bytes: int = 0
    d2h_bytes: int = 0
    fill_bytes: int = 0
    num_fill_copies: int = 0
    num_stalls: int = 0
    num_prefetch_hits: int = 0


@dataclass(frozen=True, slots=True)
class StepTransfers:
    """What one step moves. fills: host slots of each ring fill. fills_of: for each layer the
    numbers of those that it reads, in order; () if every layer reads all.

    write_slots: device slots that this step's K and V are written to. owners: whose the content of
    a host slot is, to be told when a copy of it fails. is_decode: one token a sequence, so that
    copies take as long as the arithmetic.
    """

    stores: tuple[Store, ...] = ()
    loads: tuple[Load, ...] = ()
    fills: tuple[tuple[int, ...], ...] = ()
    write_slots: tuple[int, ...] = ()
    owners: Mapping[int, object] = field(default_factory=dict)
    is_decode: bool = False
    fills_of: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class FailedTransfer:
    """Copies that could not be made. lost: the host copy is bad (a store failed), not just what
    was read from it.
    """

    owners: tuple[object, ...]
    lost: bool
    reason: str
