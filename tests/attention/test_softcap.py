"""The softcap of scores (Gemma 2): softcap * tanh(score / softcap), before any is hidden. Every
backend against float64; and those that cannot do it are passed over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from marks import BUILDS, EMULATED, needs_compiler, smaller
from paged_batches import (
    attend,
    context_of,
    make_batch,
    relative_error,
    small_batch,
    split,
    whole,
)
from torch import Tensor

from nanoengine.attention.cpu_attention import CpuAttention
from nanoengine.attention.select import AttentionSetup, make_attention
from nanoengine.config.attention import ATTENTION_LIMITS, AttentionConfig
from nanoengine.context import AttentionBackend
from nanoengine.errors import ConfigError
from nanoengine.kernels.cpu_kernels import CpuKernels

CPU = torch.device("cpu")
SINKS = torch.tensor([-9.0, 0.3, 2.0])
SOFTCAP = 1.5  # scores have a spread of 1
Make = Callable[[AttentionConfig], AttentionBackend]
PARTITION = 64  # keys of a partition in Triton, see `make`
ISAS = {
    **BUILDS,
    **smaller("avx2", "generic"),
    **EMULATED,
}


@pytest.mark.some(4)
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
@pytest.mark.parametrize("window", [None, 40])
def test_backends_against_float64(make: Make, window: int | None, sinks: Tensor | None) -> None:
    """In one chunk and in many; without the cap it would be far from it. A cap of hidden scores
    would show them again.
    """
    batch = small_batch()
    backend = make(AttentionConfig(24, windows=(window,), softcap=SOFTCAP))
    got = attend(backend, batch, whole(batch), sinks)
    assert relative_error(got, batch.reference(window, sinks, SOFTCAP)[:-1]) < 5e-6
    assert relative_error(got, batch.reference(window, sinks)[:-1]) > 0.02
    assert torch.equal(attend(backend, batch, split(batch, 3), sinks), got)


@pytest.mark.parametrize("softcap", [0.01, 50.0])
def test_scores_far_above_the_cap_and_far_below(make: Make, softcap: float) -> None:
    batch = small_batch()
    batch = replace(batch, q=batch.q * 3)
    backend = make(AttentionConfig(24, scale=0.3, softcap=softcap))
    wanted = replace(batch, q=batch.q * (0.3 * 24**0.5)).reference(softcap=softcap)
    assert relative_error(attend(backend, batch, whole(batch)), wanted[:-1]) < 5e-6


def test_mass_is_of_capped_scores(make: Make) -> None:
    batch = small_batch()
    mass = torch.zeros(len(batch.tables), max(map(len, batch.tables)))
    attend(make(AttentionConfig(24, softcap=SOFTCAP)), batch, split(batch, 1), mass=mass)
    torch.testing.assert_close(mass.double(), batch.mass(None, SOFTCAP), rtol=2e-5, atol=2e-5)


@needs_compiler
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 3e-6), (torch.bfloat16, 8e-3)], ids=str)
@pytest.mark.parametrize("isa", ISAS.items(), ids=ISAS)
def test_the_c_kernel(
    build_folder: Path, isa: tuple[str, tuple[str, ...]], dtype: torch.dtype, limit: float
) -> None:
    """In every mode; one thread or several, one pool or many."""
    kernels = CpuKernels.load(build_folder, isa[1])
    for window in (None, 40):
        batch = small_batch(dtype=dtype, head_dim=32, block_size=80)
        config = AttentionConfig(32, windows=(window,), softcap=SOFTCAP)
        backend = CpuAttention(config, kernels)
        got = attend(backend, batch, whole(batch))
        assert relative_error(got, batch.reference(window, None, SOFTCAP)[:-1]) < limit
        for seed in range(3):
            torch.set_num_threads(1 + seed)
            assert torch.equal(attend(backend, batch, split(batch, seed)), got)


@needs_compiler
@pytest.mark.parametrize("isa", ["native", *smaller("avx2", "generic")])
def test_tanh_is_near_the_exact_one(build_folder: Path, isa: str) -> None:
    """A row with one key has its capped score as its maximum; also what is not finite."""
    kernels = CpuKernels.load(build_folder, ({"native": ()} | ISAS)[isa])
    exact = torch.logspace(-6, 2, 4000, dtype=torch.float64)
    scores = torch.cat((exact, -exact, torch.tensor([0.0, torch.inf, -torch.inf]))).float()
    batch = make_batch(
        [1] * len(scores), [1] * len(scores), dtype=torch.float32, kv_heads=1, group=1, head_dim=1
    )
    batch.k_pool.nan_to_num_().fill_(1.0)
    batch = replace(batch, q=scores.view(-1, 1, 1))
    backend = CpuAttention(AttentionConfig(1, scale=1.0, softcap=1.0), kernels)
    backend.run(0, batch.q, context_of(batch, whole(batch)))
    got = backend._workspace.buffer("row_max", (len(scores), 1), torch.float32)[:, 0].double()
    want = scores.double().tanh()
    assert ((got - want).abs() <= 4e-7 * want.abs()).all()


def test_a_backend_without_it_is_passed_over_or_refused() -> None:
    config = AttentionConfig(64, softcap=50.0)
    setup = AttentionSetup(CPU, torch.float32, 256, config)
    assert make_attention("auto", setup)[0].name == "torch"
    with pytest.raises(ConfigError, match=r"sdpa needs scores without a softcap.* one of 50"):
        make_attention("sdpa", setup)
    for name, limits in ATTENTION_LIMITS.items():
        unmet = limits.unmet("bfloat16", 256, replace(config, head_dim=128))
        assert bool(unmet) == (name not in ("c", "torch", "triton"))
        assert not limits.unmet("bfloat16", 256, AttentionConfig(128))
