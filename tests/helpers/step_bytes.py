"""The bytes of an engine's largest step beside weights and KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from driver import small_engine
from peak_bytes import peak_bytes_of

from nanoengine.devices.cpu import CpuDevice


def step_bytes(folder: Path, patch: pytest.MonkeyPatch, **settings: Any) -> tuple[int, int]:
    """What the plan estimates from shapes, and what the step holds, by counting."""

    def planned(**more: Any) -> int:
        made = small_engine(folder, **settings, **more)
        made.close()
        return made.plan.activation_bytes

    estimated = planned()
    with patch.context() as here:
        count_steps(here)
        return estimated, planned(num_gpu_blocks=None)


def count_steps(patch: pytest.MonkeyPatch) -> None:
    """From here on engines on a CPU profile their largest step, as on a GPU."""
    patch.setattr(CpuDevice, "peak_bytes_of", lambda device, work: peak_bytes_of(work))
    patch.setattr(CpuDevice, "computes_later", True)
