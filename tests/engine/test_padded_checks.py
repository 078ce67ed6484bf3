"""Where products are not our own, their bits may depend on how many rows a step has. A request that
decodes alone has the same bits whoever guesses its tokens, as its steps are padded.

Products here depend on the number of rows by design, much more than a vendor's.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import Driver, host_gib, small_engine
from fixed_drafts import FixedDrafter, scored
from marks import needs_compiler, needs_no_gpu
from torch import Tensor
from torch.nn import functional

from nanoengine import SamplingParams
from nanoengine.engine.draft_length import PayingDrafts
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.kernels.cpu_ops import CpuOps
from nanoengine.startup import parts, probe

MOST, BLOCK, NUM_TOKENS = 5, 8, 12
PROMPT = [(7 * i + i * i) % 250 + 4 for i in range(90)]
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, seed=3, logprobs=0, ignore_eos=True)
STREAMED = {
    "num_gpu_blocks": 8,
    "enable_cpu_offload": True,
    "slot_tokens": 2 * BLOCK,
    "ring_slots": 2,
    "measure_speed": False,
}
Scored = tuple[list[int], Tensor]


@pytest.fixture(autouse=True)
def products(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of PyTorch, larger by a share for each row of the step. They are rounded once: in fp32
    the place of a row among the others may show, too.
    """

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return (product(x.double(), weight.double()) * (1 + 1e-4 * len(x))).float()

    product = functional.linear
    monkeypatch.setattr(functional, "linear", linear)


def engine(folder: Path, **settings: Any) -> LLMEngine:
    if "enable_cpu_offload" in settings:
        settings["kv_offload_gib"] = host_gib(folder, 40, BLOCK)
    return small_engine(folder, speculative=f"resident:{MOST}", max_num_seqs=8, **settings)


def answer(
    folder: Path,
    patch: pytest.MonkeyPatch,
    prompt: list[int],
    numbers: list[int],
    token: Callable[[int, int], int] | None,
    **settings: Any,
) -> tuple[Scored, int]:
    """The scored tokens of the prompt, and how many guesses were right. numbers: of drafts in each
    step, in turn. token: the draft of (sequence, position); None: by the model.
    """
    turns = cycle(numbers)
    patch.setattr(PayingDrafts, "choose", lambda self: next(turns))
    made = engine(folder, **settings)
    patch.setattr(made.kv, "may_draft", lambda seq: True)
    if token is not None:
        made.runner.drafter = FixedDrafter(token, made.device.tensor)
    outputs = Driver(made).run([prompt], PARAMS)
    made.close()
    return scored(outputs)[0], outputs[0].metrics.num_accepted


@needs_compiler
@pytest.mark.parametrize("settings", [{}, STREAMED], ids=["resident", "streamed"])
def test_bits_depend_on_no_drafter(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(parts, "choose_ops", lambda config, device, kernels, dtype: CpuOps(kernels))
    assert_no_drafter_shows(tiny("llama"), monkeypatch, settings)


@pytest.mark.breadth
@needs_no_gpu
@pytest.mark.parametrize(
    "settings",
    [pytest.param({}, marks=pytest.mark.breadth), STREAMED],
    ids=["resident", "streamed"],
)
def test_nor_do_they_on_a_gpu(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """Where steps of one row a sequence are graphs, and those that check guesses are not."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from any_rows import use_dots_of_any_rows
    from virtual_gpu import VirtualGpu

    use_dots_of_any_rows(monkeypatch)
    monkeypatch.setattr(probe, "NUM_WARMUPS", 0)
    monkeypatch.setattr(probe, "NUM_BLOCKS", 2)
    more = {"device": "cuda", "max_num_batched_tokens": 64, "max_model_len": 128}
    if settings:
        more["num_gpu_blocks"] = 5
    with VirtualGpu() as gpu:
        settings = settings | more
        assert_no_drafter_shows(tiny("llama"), monkeypatch, settings, ("oracle",), PROMPT[:41])
        assert any(graph.num_replays for graph in gpu.graphs)


def assert_no_drafter_shows(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    names: tuple[str, ...] = ("resident", "oracle", "random"),
    prompt: list[int] = PROMPT,
) -> None:
    """The same ids and log probabilities, bit for bit, without guesses and with some."""
    (ids, logprobs), _ = answer(folder, monkeypatch, prompt, [0], None, **settings)
    whole = prompt + ids
    drafters: dict[str, Callable[[int, int], int] | None] = {
        "resident": None,
        "oracle": lambda seq, at: whole[min(at, len(whole) - 1)],
        "random": lambda seq, at: at * 101 % 256,
    }
    for name in names:
        numbers, token = [MOST, 0, 1, 3], drafters[name]
        (found, scores), num_right = answer(folder, monkeypatch, prompt, numbers, token, **settings)
        assert found == ids and torch.equal(scores, logprobs), name
        assert (num_right > NUM_TOKENS // 2) == (name == "oracle") or name == "resident"
