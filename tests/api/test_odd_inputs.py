"""What callers pass by mistake or in another type: accepted where it is clear, else refused."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanoengine import LLM, InvalidParamsError, InvalidPromptError, SamplingParams
from nanoengine.text.tokenizer import Tokenizer

Tiny = Callable[[str], Path]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SETTINGS: dict[str, Any] = {"dtype": "float32", "kvcache_block_size": 8, "num_gpu_blocks": 40}


@pytest.fixture(scope="module")
def llm(tiny: Tiny) -> Iterator[LLM]:
    with LLM(tiny("llama"), **SETTINGS) as engine:
        yield engine


@pytest.mark.parametrize(
    "prompt",
    [
        [np.int64(5), np.int32(9)],
        [*np.array([5, 9], dtype=np.uint16)],
        [*torch.tensor([5, 9])],
        {"prompt_token_ids": [np.int64(5), 9]},
    ],
    ids=["numpy", "array", "tensor", "dict"],
)
def test_integers_of_any_type_are_token_ids(llm: LLM, prompt: Any) -> None:
    wanted = llm.generate([5, 9], GREEDY, use_tqdm=False)[0]
    outputs = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert len(outputs) == 1 and outputs[0]["token_ids"] == wanted["token_ids"]
    assert [type(token_id) for token_id in outputs[0].prompt_token_ids] == [int, int]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (np.array([5, 9]), r"call its tolist\(\)"),
        (5, "prompts must be text"),
        ((token_id for token_id in [5, 9]), "prompts must be text"),
        ([True, False], "True, which is no token id"),
        ([5, 10**400], "outside the vocabulary"),
        ([5, 1.0], "a prompt is text or a list of token ids, got int"),
        ({"prompt_token_ids": [5, 1.5]}, "1.5, which is no token id"),
        ({"prompt": "a", "cache_salt": "\ud800"}, "cache_salt must be a non-empty string"),
        ({"prompt": "a", "cache_salt": 5}, "cache_salt must be a non-empty string"),
        ({"prompt": "a", "cache_slat": "x"}, "'cache_slat' of a prompt; did you mean 'cache_salt'"),
        (
            {"prompt_token_ids": [5], "multi_modal_data": {}},
            "'multi_modal_data' of a prompt; images",
        ),
        ({"prompt": "a", 5: 6}, "unknown key 5; the name of a key is a string"),
    ],
    ids=[
        "array",
        "int",
        "generator",
        "bools",
        "huge",
        "mixed",
        "float",
        "surrogate",
        "salt",
        "slip",
        "image",
        "number",
    ],
)
def test_what_is_no_prompt_is_refused(llm: LLM, prompt: Any, words: str) -> None:
    with pytest.raises(InvalidPromptError, match=words):
        for output in llm.generate(prompt, GREEDY, use_tqdm=False):
            raise output.error


@pytest.mark.parametrize("params", [0, 5, "greedy", [5], {5: 0}])
def test_what_are_no_parameters_is_refused(llm: LLM, params: Any) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(InvalidParamsError, match="SamplingParams"):
            call("a", params)


@pytest.mark.parametrize("messages", [{"role": "user", "content": "a"}, 5, None, iter([])])
def test_what_are_no_messages_is_refused(llm: LLM, messages: Any) -> None:
    for call in (llm.chat, llm.stream_chat):
        with pytest.raises(InvalidPromptError, match="messages must be a list"):
            call(messages, GREEDY)


def test_conversations_may_be_tuples(llm: LLM) -> None:
    message = {"role": "user", "content": "a"}
    outputs = llm.chat(((message,), (message,)), GREEDY, use_tqdm=False)  # type: ignore[arg-type]
    assert len(outputs) == 2 and outputs[0]["token_ids"] == outputs[1]["token_ids"]


def test_without_a_console_there_is_no_progress_bar(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert len(llm.generate("a", GREEDY)) == 1
    assert len(llm.beam_search("a", beam_width=2, max_tokens=2)) == 1


def test_half_a_character_at_the_end_is_a_stop_string_too(llm: LLM) -> None:
    """A text that is cut inside of a code point ends with U+FFFD."""
    half = llm.tokenizer.encode("é", add_special_tokens=False)[0]
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 2, "allowed_token_ids": [half]}
    plain = llm.generate("a", SamplingParams(**settings), use_tqdm=False)[0].outputs[0]
    assert (plain.text, plain.finish_reason) == ("\ufffd\ufffd", "length")
    stopped = SamplingParams(**settings, stop=["\ufffd"])
    output = llm.generate("a", stopped, use_tqdm=False)[0].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("", "stop", "\ufffd")
    assert "".join(map(str, llm.stream("a", stopped))) == ""


def test_a_folder_without_a_tokenizer_serves_token_ids(tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("llama"), folder, ignore=shutil.ignore_patterns("*token*"))
    with LLM(tiny("llama"), **SETTINGS) as whole, LLM(folder, **SETTINGS) as bare:
        wanted = whole.generate([5, 9], GREEDY, use_tqdm=False)[0]
        output = bare.generate([5, 9], GREEDY, use_tqdm=False)[0]
        assert (output["token_ids"], output["text"]) == (wanted["token_ids"], "")
        assert [*bare.stream([5, 9], GREEDY)][-1].finish_reason == "length"
        for call in (lambda: bare.generate("a"), lambda: bare.chat([{"role": "user"}])):
            with pytest.raises(InvalidPromptError, match="came without a tokenizer"):
                call()
        for name in ("stop", "bad_words"):
            with pytest.raises(InvalidParamsError, match=f"{name} needs a tokenizer"):
                bare.generate([5], SamplingParams(**{name: "x"}), use_tqdm=False)


@pytest.mark.parametrize("stop", [None, "zzz"], ids=["at the end", "as it comes"])
def test_a_text_that_cannot_be_decoded_fails_its_request_only(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, stop: str | None
) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, stop=stop)
    prompts = [[5, 9], [40, 50]]
    wanted = llm.generate(prompts, params, use_tqdm=False)
    bad, decode = wanted[0]["token_ids"][0], Tokenizer.decode

    def failing(self: Tokenizer, ids: Any, *rest: Any) -> str:
        if bad in ids:
            raise InvalidPromptError("the tokenizer fails")
        return decode(self, ids, *rest)

    assert bad not in wanted[1]["token_ids"]
    monkeypatch.setattr(Tokenizer, "decode", failing)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert isinstance(outputs[0].error, InvalidPromptError)
    assert outputs[0].outputs[0].finish_reason == "error"
    assert outputs[1].error is None and outputs[1]["text"] == wanted[1]["text"]
    llm.llm_engine.kv.check()
