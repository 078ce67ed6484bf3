"""What follows from measured steps, and that it is kept for this machine only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nanoengine.startup.machine_speed import (
    FILE,
    MachineSpeed,
    Sample,
    reading_and_layers,
    remember_speed,
    remembered_speed,
)

SPEED = MachineSpeed("here, 2 threads", "2026-11-22", 20.0, 15.0, 0.0, 40.0, False)


def test_two_models_tell_reading_and_layers_apart() -> None:
    def step_s(layers: int, num_bytes: int) -> float:
        return num_bytes / 20e9 + layers * 50e-6

    thin, wide = (Sample(n, size, step_s(n, size)) for n, size in ((30, 2 << 27), (4, 1 << 29)))
    assert reading_and_layers(thin, wide) == (pytest.approx(20.0), pytest.approx(50e-6))


@pytest.mark.parametrize("thin_s", [0.001, 1.0])
def test_where_noise_hides_the_difference_the_large_layers_count(thin_s: float) -> None:
    """A negative time of a layer, and a negative time of a byte."""
    found = reading_and_layers(Sample(30, 1 << 28, thin_s), Sample(4, 1 << 29, 0.025))
    assert found == (pytest.approx((1 << 29) / 0.025 / 1e9), 0.0)


def test_it_is_found_again_on_the_same_machine(fresh_cache: Path) -> None:
    assert remembered_speed(SPEED.machine) is None
    path = remember_speed(SPEED)
    assert path == fresh_cache / "nanoengine" / FILE
    assert remembered_speed(SPEED.machine) == SPEED and remembered_speed("elsewhere") is None
    newer = replace(SPEED, read_gb_per_s=30.0)
    remember_speed(newer)
    assert remembered_speed(SPEED.machine) == newer and len([*path.parent.iterdir()]) == 1


@pytest.mark.parametrize("content", ["", "{", "[1]", "{}", '{"machine": 5}', "null"])
def test_a_damaged_file_counts_as_none(fresh_cache: Path, content: str) -> None:
    path = remember_speed(SPEED)
    assert path is not None
    path.write_text(content)
    assert remembered_speed(SPEED.machine) is None
