"""Another value of any key of config.json is refused, or has transformers' logits: some changes of
each tiny model, of which benchmarks/proofs/config_keys.py makes all.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from other_keys import Change, changes, outcome
from tiny_models import TINY

pytestmark = pytest.mark.breadth
EACH = 8


@pytest.mark.parametrize("name", TINY)
def test_a_change_is_refused_or_equal(
    tiny: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    for number, change in enumerate(random.Random(name).sample(changes(name), EACH)):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = outcome(change, folder, tiny(name))
        assert found.kind != "fails", (change, found)
        assert found.kind != "differs" or change.known, (change, found)


def test_a_difference_is_seen(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Of one that is known."""
    change = Change("phi3", "set", {"original_max_position_embeddings": 256})
    assert change.known
    assert outcome(change, tmp_path, tiny("phi3")).kind == "differs"
