"""A prompt's log-likelihoods, read from an answer as lm-eval reads them, are transformers'."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import reference, reference_logits

from nanoengine import LLM
from nanoengine.sampling_params import SamplingParams
from nanoengine.serving.openai_chunks import CompletionChunks
from nanoengine.serving.openai_keys import COMPLETIONS
from nanoengine.serving.openai_requests import CompletionRequest, read_request
from nanoengine.text.detokenizer import token_bytes

SETTINGS: dict[str, Any] = {"num_threads": 1, "dtype": "float32", "kvcache_block_size": 8}


def read_choice(choice: dict[str, Any], num_context: int) -> tuple[float, bool]:
    """The sum over the tokens after the context but for the generated one, and whether each of
    them is the likeliest.
    """
    own = choice["logprobs"]["token_logprobs"][num_context:-1]
    likeliest = choice["logprobs"]["top_logprobs"][num_context:-1]
    pairs = zip(own, likeliest, strict=True)
    return sum(own), all(token == max(top.values()) for token, top in pairs)


def wanted(model: Any, ids: list[int], num_context: int) -> tuple[float, bool]:
    """The same from transformers' logits."""
    logprobs = torch.log_softmax(reference_logits(model, ids).double(), dim=-1)[:-1]
    own = logprobs.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)[num_context - 1 :]
    likeliest = logprobs.max(dim=1).values[num_context - 1 :]
    return float(own.sum()), bool((own == likeliest).all())


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_log_likelihoods_are_transformers(tiny: Callable[[str], Path], name: str) -> None:
    folder, draw = tiny(name), random.Random(5)
    model = reference(folder)
    prompts = [[draw.randrange(3, 250) for _ in range(length)] for length in (2, 9, 40)]
    # One that goes on as the model itself would, so that its tokens are the likeliest.
    greedy = prompts[1] + [int(reference_logits(model, prompts[1])[-1].argmax())]
    asked = {"prompt": [*prompts, greedy], "temperature": 0, "max_tokens": 1, "seed": 1234}
    request = read_request(COMPLETIONS, asked | {"logprobs": 1, "echo": True}, SamplingParams())
    assert isinstance(request, CompletionRequest)
    with LLM(folder, **SETTINGS) as llm:
        outputs = llm.generate(list(request.prompts), request.params, use_tqdm=False)
        bytes_of = functools.partial(token_bytes, llm.tokenizer)
        body = CompletionChunks(request, "1", "m", bytes_of).whole(outputs)
    for choice, ids in zip(body["choices"], asked["prompt"], strict=True):
        num_context = len(ids) - 1 if ids is greedy else max(1, len(ids) // 2)
        total, are_likeliest = read_choice(choice, num_context)
        expected = wanted(model, ids, num_context)
        assert total == pytest.approx(expected[0], abs=1e-3)
        assert are_likeliest == expected[1] == (ids is greedy)
