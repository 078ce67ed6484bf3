"""The last layer computes the rows alone whose logits are wanted, and the bits stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from driver import STREAMING
from torch import Tensor

from nanoengine import LLM, SamplingParams
from nanoengine.context import ForwardContext

Tiny = Callable[[str], Path]

RESIDENT = {"device": "cpu", "num_threads": 2, "num_gpu_blocks": 64, "kvcache_block_size": 8}
CHUNKS = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
PROMPTS = [
    [(7 * place * place + number) % 251 for place in range(37 + number)] for number in (0, 5)
]
FAMILIES = (
    "llama",
    "cohere",  # feed-forwards beside attention
    "gemma4",  # layers that end with inputs of their own
    "qwen3-moe",
    "deepseek-v3",  # one row of a token for all heads
    "falcon-h1",  # a mixer beside attention
    "lfm2",  # the last layer has attention, others are recurrent
    "nemotron-h",  # layers without attention or without feed-forward
)


class Watch:
    """What the last layer of an engine is given: rows of feed-forwards, and layers that attend."""

    def __init__(self, llm: LLM) -> None:
        self.rows: list[int] = []
        self.attended: list[int] = []
        runner: Any = llm.llm_engine.runner
        layers, self._attention = runner.model._layers, runner.attention
        last = layers[-1].after_attention

        def after_attention(x: Tensor, attended: Tensor) -> Tensor:
            self.rows.append(len(x))
            out: Tensor = last(x, attended)
            return out

        layers[-1] = replace(layers[-1], after_attention=after_attention)
        runner.attention = self
        self.name, self.can_replay, self.is_batch_invariant = "watched", False, True

    def run(
        self, layer: int, q: Tensor, ctx: ForwardContext, sinks: Tensor | None = None
    ) -> Tensor:
        self.attended.append(layer)
        out: Tensor = self._attention.run(layer, q, ctx, sinks)
        return out


def generated(llm: LLM, prompt_logprobs: int | None) -> list[Any]:
    """Ids and log probabilities. prompt_logprobs: 0 wants all rows of prompts."""
    params = SamplingParams(
        temperature=0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=prompt_logprobs
    )
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs]


@pytest.mark.parametrize("streams", [False, True], ids=["resident", "streamed"])
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.breadth] * (name != "llama")) for name in FAMILIES],
)
def test_outputs_are_those_of_a_step_that_computes_all_rows(
    tiny: Tiny, family: str, streams: bool
) -> None:
    # debug_kv fills the host pool with NaN: seconds where that is as large as it may be.
    settings = STREAMING | {"kv_offload_gib": 0.01} if streams else RESIDENT
    wanted: dict[str, Any] = {"enable_prefix_caching": False, **CHUNKS}
    with LLM(tiny(family), dtype="bfloat16", **(settings | wanted)) as llm:
        watch = Watch(llm)
        of_all = generated(llm, 0)
        assert max(watch.rows) == 16
        watch.rows.clear()
        assert generated(llm, None) == of_all
        assert max(watch.rows) <= 2


def test_amid_a_prompt_the_last_layer_stores_its_kv_and_does_no_more(tiny: Tiny) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    settings: dict[str, Any] = {"dtype": "bfloat16", **CHUNKS}
    with LLM(tiny("llama"), **(RESIDENT | settings)) as llm:
        watch = Watch(llm)
        llm.generate([PROMPTS[0]], params, use_tqdm=False)
        assert watch.attended == [0, 1, 0, 1, 0, 1, 2]  # 16 tokens, 16, and 5
        assert watch.rows == [1]


def test_a_step_of_several_requests_has_a_row_of_each_that_samples(tiny: Tiny) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    settings: dict[str, Any] = {"dtype": "bfloat16", **CHUNKS, "max_num_batched_tokens": 64}
    with LLM(tiny("llama"), **(RESIDENT | settings)) as llm:
        watch = Watch(llm)
        llm.generate(PROMPTS, params, use_tqdm=False)
        # 37 tokens of one prompt and 27 of the other, and then its rest.
        assert watch.rows == [1, 1]
        watch.rows.clear()
        llm.generate([prompt[:20] for prompt in PROMPTS], params, use_tqdm=False)
        assert watch.rows == [2]
