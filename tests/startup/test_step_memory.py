"""Steps of kinds that no profile runs, counted: none holds more beside weights and KV than the plan
has for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from driver import small_engine
from marks import needs_compiler
from mtp_models import with_head
from peak_bytes import peak_bytes_of
from rank_threads import RankThreads
from tiny_model import LLAMA_8B

from nanoengine import SamplingParams
from nanoengine.engine.draft_length import PayingDrafts
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.speculative import PromptLookup
from nanoengine.outputs import RequestOutput
from nanoengine.startup import parts
from nanoengine.startup.probe import time_steps
from nanoengine.workers import following_rank, leading_rank

pytestmark = [needs_compiler, pytest.mark.usefixtures("threads_as_before")]
Tiny = Callable[[str], Path]
STREAMED: dict[str, Any] = {
    "num_gpu_blocks": 8,
    "enable_cpu_offload": True,
    "offload_mode": "stream",
    "kv_offload_gib": 0.02,
    "slot_tokens": 32,
    "ring_slots": 2,
    "stream_mib_per_step": 1000.0,
}
MOST = 6.0  # times what the largest step held: of a tiny vocabulary, much is for rows that rest
DRAWN = SamplingParams(top_p=0.9, min_p=0.01, max_tokens=40, ignore_eos=True)


@pytest.fixture(
    params=[
        pytest.param(True, id="C"),
        pytest.param(False, id="PyTorch", marks=pytest.mark.breadth),
    ]
)
def in_c(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether there are C kernels."""
    if not request.param:
        monkeypatch.setattr(parts, "find_kernels", lambda *_: (None, "not here"))
    return bool(request.param)


def wide(folder: Path) -> Path:
    """The config.json of a model in which logits take most."""
    sizes = {"vocab_size": 9000, "hidden_size": 32, "intermediate_size": 32}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps(LLAMA_8B | sizes | layers))
    return folder


def assert_steps_fit(engine: LLMEngine, guesses: bool = False) -> None:
    """No step holds more than is planned, until nothing is left to do. guesses: some are made."""
    peak, outputs = 0, list[RequestOutput]()
    while engine.has_unfinished_requests:
        peak = max(peak, peak_bytes_of(lambda: outputs.extend(engine.step())))
    engine.close()
    assert not any(output.error for output in outputs)
    assert any(output.metrics.num_guessed for output in outputs) == guesses
    assert peak <= engine.plan.activation_bytes <= MOST * peak


def ask(engine: LLMEngine, count: int, params: SamplingParams, length: int = 24) -> None:
    for seed in range(count):
        tokens = [(seed * 7 + place) % 50 + 5 for place in range(length)]
        engine.add_request(tokens, replace(params, seed=seed))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_guesses_of_a_head(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_c: bool, dtype: str
) -> None:
    monkeypatch.setattr(PayingDrafts, "choose", lambda self: 3)
    folder = with_head(tiny("qwen3.5"), tmp_path)
    settings = {"dtype": dtype, "max_num_seqs": 12, "max_num_batched_tokens": 64}
    engine = small_engine(folder, speculative="mtp:3", **settings)
    ask(engine, 12, replace(DRAWN, max_tokens=12))
    assert_steps_fit(engine, guesses=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drafts_with_the_kv_on_the_device(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, in_c: bool, dtype: str
) -> None:
    monkeypatch.setattr(PayingDrafts, "choose", lambda self: 3)
    settings = {"dtype": dtype, "max_num_seqs": 12, "max_num_batched_tokens": 64}
    engine = small_engine(tiny("llama"), **STREAMED, **settings, speculative="resident:3")
    ask(engine, 6, replace(DRAWN, max_tokens=12), length=60)
    assert_steps_fit(engine, guesses=True)


@pytest.mark.parametrize("speculative", ["off", "ngram:8"])
def test_grammars_and_penalties(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_c: bool, speculative: str
) -> None:
    """Whose masks and changed logits lie beside the logits themselves; every second row is drawn,
    so that the rows which are lie apart.
    """
    monkeypatch.setattr(PromptLookup, "guess", lambda self, ids, most: (1,) * most)

    class Anything:
        """A grammar that forbids nothing."""

        def accept(self, token_id: int) -> bool:
            return False

        def masks(self, guesses: tuple[int, ...]) -> list[bytes]:
            return [b"\xff" * 1125] * (len(guesses) + 1)

        def forced(self) -> tuple[int, ...]:
            return ()

    settings = {"max_num_seqs": 40, "max_num_batched_tokens": 400, "speculative": speculative}
    engine = small_engine(wide(tmp_path), load_format="dummy", **settings)
    params = replace(DRAWN, repetition_penalty=1.1, logprobs=5, max_tokens=4)
    for seed in range(40):
        drawn = {"temperature": float(seed % 8 > 0)}
        engine.add_request([7, 8, 9], replace(params, seed=seed, **drawn))
    for seq in engine.scheduler.waiting:
        seq.grammar = Anything()
    assert_steps_fit(engine, speculative != "off")


def test_scores_of_prompts(tmp_path: Path, in_c: bool) -> None:
    """Of many at once, beside the first tokens of others."""
    settings = {"max_num_seqs": 40, "max_num_batched_tokens": 400, "speculative": "off"}
    engine = small_engine(wide(tmp_path), load_format="dummy", **settings)
    ask(engine, 40, replace(DRAWN, prompt_logprobs=20, logprobs=20, max_tokens=3), length=9)
    assert_steps_fit(engine)


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_long_streamed_context(tiny: Tiny, name: str) -> None:
    """64K tokens: of those on the host a step holds what is in the ring, which is planned apart."""
    settings = STREAMED | {"kv_offload_gib": 0.5, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    settings |= {"slot_tokens": 512, "kvcache_block_size": 16}
    engine = small_engine(tiny(name), **settings)
    made = engine.runner, engine.kv, engine.device, [1 << 16], True
    seconds: list[float] = []
    peak = peak_bytes_of(lambda: seconds.extend(time_steps(*made)))
    engine.close()
    assert seconds and peak <= engine.plan.activation_bytes


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_ranks(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Threads here: the one with the output head, and the other, each by itself."""
    peaks = [0]
    do = following_rank.FollowingRank.do

    def counted(self: Any, order: Any, body: bytes) -> None:
        peaks.append(peak_bytes_of(lambda: do(self, order, body)))

    monkeypatch.setattr(leading_rank, "WorkerProcesses", RankThreads)
    monkeypatch.setattr(following_rank.FollowingRank, "do", counted)
    settings = {"max_num_seqs": 12, "max_num_batched_tokens": 256, "tensor_parallel_size": 2}
    engine = small_engine(tiny(name), **settings)
    ask(engine, 12, replace(DRAWN, max_tokens=4))
    assert_steps_fit(engine)
    assert 0 < max(peaks) <= engine.plan.activation_bytes
