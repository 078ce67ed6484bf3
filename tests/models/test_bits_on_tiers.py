"""Bits of bfloat16 where KV is on the device, in place and streamed, by our C kernels.

Logits and ids in fp32, on every tier, are in test_exactness.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from driver import assert_tiers_agree
from marks import named, needs_compiler
from replays import watch_replays
from tiers import LAYOUTS, run

DENSE = ("apertus", "arcee", "exaone4", "ernie", "gemma2", "gemma3", "gemma3-softcap", "glm4")
DENSE += ("cohere2", "falcon-h1", "granite", "hunyuan", "lfm2", "ministral3")
NEWER = (
    *("afmoe", "hyperclovax", "nemotron", "stablelm", "starcoder2", "youtu", "mellum"),
    *("exaone-moe", "bamba", "laguna", "lfm3", "olmo-hybrid", "nemotron-h-latent"),
    *("cohere2-moe", "cohere2-moe-shared", "flint", "muse-glimmer", "ling", "ling-unbounded"),
)
EXPERTS = (
    "dots1",
    "granite-moe-shared",
    "minimax-m2",
    "ernie-moe",
    "granite-hybrid",
    "hunyuan-moe",
    "kimi-linear",
    "lfm2-moe",
    "nemotron-h-moe",
)


@needs_compiler
@pytest.mark.usefixtures("our_products")
@pytest.mark.parametrize(
    "name", named({name: name for name in (*DENSE, *EXPERTS, *NEWER)}, *DENSE, *EXPERTS)
)
def test_every_tier_has_the_same_bits_and_decode_steps_are_replayed(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    replays = watch_replays(monkeypatch)
    runs = {layout: run(tiny(name), **settings) for layout, settings in LAYOUTS.items()}
    assert_tiers_agree(runs)
    assert replays
