"""The collector's pause: nothing is collected inside, and nothing changes for anybody else."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest

from nanoengine.devices.collector import paused


class Node:
    """Refers to itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.me = self


def test_nothing_is_collected_inside_and_everything_afterwards() -> None:
    with paused():
        assert not gc.isenabled()
        alive = weakref.ref(Node())
        kept = [[i] for i in range(5000)]
    assert gc.isenabled() and alive() is not None
    young = {id(x) for generation in (0, 1) for x in gc.get_objects(generation)}
    assert not any(id(x) in young for x in kept[::100])
    gc.collect()
    assert alive() is None


def test_the_pause_ends_with_an_error() -> None:
    with pytest.raises(ValueError, match="inside"), paused():
        raise ValueError("inside")
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_somebody_froze_stays_frozen() -> None:
    """In a process of its own: to freeze here would keep every object of the other tests."""
    script = """
import gc
from nanoengine.devices.collector import paused
gc.freeze()
frozen = gc.get_freeze_count()
with paused():
    pass
assert gc.get_freeze_count() == frozen > 0
import nanoengine
assert gc.isenabled() and gc.get_freeze_count() == frozen
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
