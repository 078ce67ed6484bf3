"""MachineSpeed: what decode steps cost on this machine, measured once and kept in the cache folder.

Knows how speeds follow from measured steps and where they are kept; cli/measure.py runs the steps.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from nanoengine.devices.cache_folders import cache_folders, is_private, replace_file

FILE = "speed.json"


@dataclass(frozen=True, slots=True)
class Sample:
    """A measured decode step of one short request: its seconds, and its model's size."""

    num_layers: int
    weight_bytes: int
    step_s: float


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """A step reads weights at read_gb_per_s and KV at kv_gb_per_s, copies offloaded KV at
    link_gb_per_s (0: it is read where it lies), and each layer takes layer_us more.

    machine: what it was measured on. is_slowed: other programs used the processor meanwhile.
    held_share: of the bytes of weights in the dtype of activations, what kernels hold and read.
    """

    machine: str
    date: str
    read_gb_per_s: float
    kv_gb_per_s: float
    link_gb_per_s: float
    layer_us: float
    is_slowed: bool
    held_share: float = 1.0


def reading_and_layers(thin: Sample, wide: Sample) -> tuple[float, float]:
    """GB/s at which steps read weights, and seconds that a layer takes beside: what explains the
    steps of a model of many small layers and of one of a few large ones.
    """
    determinant = wide.weight_bytes * thin.num_layers - thin.weight_bytes * wide.num_layers
    byte_s = (wide.step_s * thin.num_layers - thin.step_s * wide.num_layers) / determinant
    layer_s = (wide.weight_bytes * thin.step_s - thin.weight_bytes * wide.step_s) / determinant
    if byte_s <= 0 or layer_s < 0:  # they differ by less than the noise
        byte_s, layer_s = wide.step_s / wide.weight_bytes, 0.0
    return 1e-9 / byte_s, layer_s


def remember_speed(speed: MachineSpeed) -> Path | None:
    """Write it to the cache; returns the file, None if there is no folder to write to."""
    for folder in cache_folders():
        if not is_private(folder):
            continue
        with suppress(OSError):
            replace_file(folder / FILE, json.dumps(asdict(speed), indent=1))
            return folder / FILE
    return None


def remembered_speed(machine: str) -> MachineSpeed | None:
    """What was measured on this machine; None if nothing was, or on another one."""
    for folder in cache_folders():
        with suppress(OSError, ValueError, TypeError):
            speed = MachineSpeed(**json.loads((folder / FILE).read_text(encoding="utf-8")))
            if speed.machine == machine and speed.read_gb_per_s > 0 < speed.kv_gb_per_s:
                return speed
    return None
