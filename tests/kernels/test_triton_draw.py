"""Tokens drawn by interpreted Triton, against PyTorch, which sorts. The compiler makes code for
GPUs that are not here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled import compiled_by
from draw_rules import RULES, runs_as_fast
from kernel_bounds import check_kernels
from marks import needs_no_gpu
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from nanoengine.engine.sampler import draw_key
from nanoengine.kernels import triton_draw
from nanoengine.kernels.gpu_ops import GpuOps
from nanoengine.models.draw import Draws, draw
from nanoengine.sampling_params import SamplingParams

pytestmark = needs_no_gpu
HELPER = Path(__file__).parents[1] / "helpers" / "compile_draw.py"
VOCAB = 1100  # five pieces, the last of them short


@pytest.fixture(autouse=True)
def small_and_inside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small pieces; no kernel touches memory beside the tensors that it was given, and new memory
    is NaN: what an earlier draw left there may be right.
    """
    check_kernels(monkeypatch)
    monkeypatch.setattr(triton_draw, "PIECE", 256)
    monkeypatch.setattr(triton_draw, "COUNTED", 64)
    monkeypatch.setattr(triton_draw, "COLLECTED", 256)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def draws_of(params: list[SamplingParams], keys: list[int]) -> Draws:
    return Draws.of(params, keys, lambda x, dtype: torch.tensor(x, dtype=dtype))


def some_logits(rows: int, dtype: torch.dtype) -> Tensor:
    """Rows that lie apart; some have many equal logits, some few tokens."""
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(rows, 2 * VOCAB, generator=generator).to(dtype)[:, VOCAB:]
    logits[::3] = logits[::3].round()
    logits[1::3, 100:] = -torch.inf
    return logits


def assert_drawn(got: Tensor, logits: Tensor, draws: Draws) -> None:
    """As PyTorch draws, or a token that is as fast."""
    want = draw(logits, draws)
    for row in (got != want).nonzero().flatten().tolist():
        assert runs_as_fast(got[row], want[row], logits[row].float(), draws, row), row


@pytest.mark.some(3)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.breadth)]
)
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_as_pytorch_draws(dtype: torch.dtype, rules: dict[str, Any]) -> None:
    logits, keys = some_logits(4, dtype), [draw_key(7, position) for position in range(4)]
    keys[2:] = [0, (1 << 64) - 1]
    draws = draws_of([SamplingParams(**rules)] * 4, keys)
    assert_drawn(GpuOps(None).draw(logits, draws), logits, draws)


@pytest.mark.breadth
def test_a_row_is_drawn_alone() -> None:
    """Beside rows with other rules, NaN and infinity, all of them."""
    params = [SamplingParams(**rules) for rules in RULES.values()] + [SamplingParams(top_k=3)] * 4
    rows = len(params)
    logits, keys = some_logits(rows, torch.float32), [draw_key(1, at) for at in range(rows)]
    logits[-4], logits[-3, 5], logits[-2, 9], logits[-1] = (
        -torch.inf,
        torch.inf,
        torch.nan,
        torch.nan,
    )
    together = triton_draw.draw(logits, draws_of(params, keys))
    for row in range(rows):
        alone = draws_of(params[row : row + 1], keys[row : row + 1])
        assert triton_draw.draw(logits[row : row + 1], alone)[0] == together[row]
    assert_drawn(together[:-4], logits[:-4], draws_of(params[:-4], keys[:-4]))
    assert ((together >= 0) & (together < VOCAB)).all()


# All of them are collected, or too many.
@pytest.mark.parametrize("vocab", [200, pytest.param(700, marks=pytest.mark.breadth)])
def test_of_equal_logits_the_first_are_kept(vocab: int) -> None:
    logits, keys = torch.zeros(12, vocab), [draw_key(1, at) for at in range(12)]
    for rules, kept in (
        ({"top_k": 2}, 2),
        ({"top_p": 3 / vocab}, 3),
        ({"top_k": 5, "top_p": 0.4}, 2),
    ):
        drawn = triton_draw.draw(logits, draws_of([SamplingParams(**rules)] * 12, keys))
        assert {*drawn.tolist()} == {*range(kept)}


@pytest.mark.breadth
@pytest.mark.parametrize(
    "capabilities", ["90", pytest.param("80,89,120", marks=pytest.mark.breadth)]
)
def test_it_compiles_for_a_gpu(capabilities: str) -> None:
    made = compiled_by(str(HELPER), capabilities)
    search = {"largest", "count", "collect", "last_kept"}
    assert {each["kernel"] for each in made} == {"race", "fastest", *search}
    assert max(each["spilled"] for each in made) <= 64  # bytes of a thread
