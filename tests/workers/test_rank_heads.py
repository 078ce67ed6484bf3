"""An MTP head on ranks says what it says in one process, and no bit of an answer moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import STREAMED, Driver, small_engine
from fixed_drafts import scored
from marks import needs_compiler
from mtp_models import half_right, watch_head, with_head
from plain_products import use_plain_products
from rank_threads import RankThreads
from torch import Tensor

from nanoengine import SamplingParams
from nanoengine.engine.draft_length import PayingDrafts
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.workers import leading_rank

pytestmark = [needs_compiler, pytest.mark.usefixtures("threads_as_before", "plain_ranks")]

MOST = 3
PROMPTS = [[(7 * i + 3 * j) % 250 + 4 for i in range(n)] for j, n in enumerate((70, 33, 9))]
PARAMS = [
    SamplingParams(max_tokens=24, temperature=0.9 * (j == 1), seed=5, logprobs=2, ignore_eos=True)
    for j in range(3)
]
TIERS = STREAMED | {"num_gpu_blocks": 7, "max_num_seqs": 3}
LAYOUTS: dict[str, dict[str, Any]] = {
    "resident": {},
    "streamed": TIERS | {"ring_slots": 2, "debug_kv": True},
    "in place": TIERS | {"offload_mode": "in_place", "stream_mib_per_step": None},
    "chunks": TIERS | {"max_num_batched_tokens": 9},
}
SPLIT = ("qwen3-next-moe", "glm4-moe")  # with a tensor for each expert
Said = list[tuple[int, int, Tensor]]


@pytest.fixture(scope="module")
def heads(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """As in test_mtp.py."""
    folder = tmp_path_factory.mktemp("heads")
    return lambda name: with_head(tiny(name), folder, splits_experts=name in SPLIT)


@pytest.fixture
def plain_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in test_tensor_parallel.py."""
    monkeypatch.setattr(leading_rank, "WorkerProcesses", RankThreads)
    use_plain_products(monkeypatch)


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Iterator[int]]]:
    """How many guesses are checked from step to step: the last one's next."""
    found: list[Iterator[int]] = []
    monkeypatch.setattr(PayingDrafts, "_number", lambda self: next(found[-1]))
    yield found


def made(path: Path, size: int, **settings: Any) -> LLMEngine:
    """An engine of so many ranks."""
    ranks = {"tensor_parallel_size": size, "num_threads": size, "measure_speed": False}
    return small_engine(path, **ranks | settings)


def run(engine: LLMEngine) -> list[Any]:
    return Driver(engine).run(PROMPTS, PARAMS)


@pytest.mark.some(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(
    "name",
    [
        "qwen3.5",
        *(
            pytest.param(name, marks=pytest.mark.breadth)
            for name in (
                "glm4-moe",
                "qwen3.5-moe",
                "qwen3-next-moe",
                "deepseek-v3",
                "glm4-moe-lite",
            )
        ),
    ],
)
def test_ranks_guess_as_one_process(
    heads: Any, numbers: list[Iterator[int]], name: str, layout: dict[str, Any], dtype: str
) -> None:
    """Ids and log probabilities are those without guesses; the head's logits those of a process."""
    path, settings = heads(name), layout | {"dtype": dtype}
    engine = made(path, 1, **settings)
    expected = scored(run(engine))
    engine.close()
    texts = [prompt + ids for prompt, (ids, _) in zip(PROMPTS, expected, strict=True)]
    said: list[Said] = []
    for size in (1, 2):
        numbers.append(cycle([MOST, MOST, 1, 2, 0]))
        engine = made(path, size, speculative=f"mtp:{MOST}", **settings)
        assert engine.plan.ranks == size
        said.append(watch_head(engine, half_right(texts)))
        outputs = run(engine)
        for (ids, logprobs), (right, as_before) in zip(scored(outputs), expected, strict=True):
            assert ids == right and torch.equal(logprobs, as_before), "it depends on head or ranks"
        guessed = sum(output.metrics.num_guessed for output in outputs)
        assert 10 < sum(output.metrics.num_accepted for output in outputs) < guessed
        engine.close()
    for (*where, row), (*there, other) in zip(*said, strict=True):
        assert where == there and torch.equal(row, other), "the head says something else"


@pytest.mark.some(1)
@pytest.mark.parametrize("layout", [LAYOUTS["resident"], LAYOUTS["streamed"]], ids=str)
def test_a_step_whose_head_does_not_come_runs_again(
    heads: Any, numbers: list[Iterator[int]], layout: dict[str, Any]
) -> None:
    """Rank 0 is interrupted while it samples: others end the step when they hear of the next."""
    found = []
    for is_interrupted in (False, True):
        numbers.append(cycle([MOST]))
        engine = made(heads("glm4-moe"), 2, speculative=f"mtp:{MOST}", **layout)
        driver, sampler, left = Driver(engine), engine.runner.sampler, iter(range(100))
        sample = sampler.sample

        def interrupted(*given: Any, sample: Any = sample, left: Any = left) -> Tensor:
            if next(left) in (2, 5):
                raise KeyboardInterrupt
            return sample(*given)

        if is_interrupted:
            sampler.sample = interrupted
        ids = [
            engine.add_request(each, params) for each, params in zip(PROMPTS, PARAMS, strict=True)
        ]
        outputs: dict[Any, Any] = {}
        for _ in range(3):
            try:
                outputs |= driver.drain()
            except KeyboardInterrupt:
                continue
        found.append(scored([outputs[each] for each in ids]))
        engine.close()
    for (ids, logprobs), (again, as_before) in zip(*found, strict=True):
        assert ids == again and torch.equal(logprobs, as_before)
