"""Tokens that a tokenizer has and the model has not: a request that names them harms nobody."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_model import TOKENIZER_SIZE
from transformers import AutoTokenizer

from nanoengine import LLM, SamplingParams
from nanoengine.text.thinking import ThinkingMarks, ThinkingState

PAD = TOKENIZER_SIZE  # as Gemma 3 has one for images
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module", params=["float32", "int8"])
def llm(
    request: Any, tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("spare") / "model"
    shutil.copytree(tiny("llama"), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(folder)
    method = None if request.param == "float32" else "int8"
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "quantization": method}
    with LLM(folder, **settings, kvcache_block_size=8, num_gpu_blocks=64) as made:
        assert made.tokenizer.encode("[PAD]", add_special_tokens=False) == [PAD]
        yield made


def test_a_bad_word_that_cannot_come_changes_nothing(llm: LLM) -> None:
    wanted = llm.generate(["hi"], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    banned = replace(GREEDY, bad_words=["[PAD]", "a[PAD]"])
    (output,) = llm.generate(["hi"], banned, use_tqdm=False)
    assert output.error is None and output.outputs[0].token_ids == wanted


def test_a_form_that_asks_for_one_fails_alone(llm: LLM) -> None:
    form = {"grammar": f'start: "abcd" <[{PAD}]> "e"'}
    held = replace(GREEDY, max_tokens=40, structured_outputs=form)
    failed, other = llm.generate(["hi", "hi"], [held, GREEDY], use_tqdm=False)
    assert failed.outputs[0].text == "abcd" and "leave no token to choose" in str(failed.error)
    assert other.error is None and len(other.outputs[0].token_ids) == 8


def test_nor_is_a_mark_of_thoughts_forced() -> None:
    every = bytes([0xFF])
    marks = ThinkingMarks((1,), (3, 9), (), every, every, lambda token: False, 8)
    state = ThinkingState(marks, True, 1, None)
    state.accept(2)
    assert state.forced() == (3,)
