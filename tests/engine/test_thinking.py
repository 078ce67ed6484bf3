"""Thoughts within a budget, and forms that begin after them: transformers' greedy tokens up to the
budget, the marks that end the thoughts, and its greedy tokens after those.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from checkpoints import reference, reference_greedy
from driver import STREAMED, Driver, small_engine
from marks import named
from tool_models import WEATHER, tool_model

from nanoengine import LLM, InvalidParamsError, SamplingParams
from nanoengine.engine.draft_length import PayingDrafts
from nanoengine.text.reasoning import REASONING_SYNTAXES
from nanoengine.text.thinking import ThinkingMarks, ThinkingState
from nanoengine.text.tokenizer import Tokenizer

LAYOUTS: dict[str, dict[str, Any]] = {
    "resident": {},
    "preempted": {"num_gpu_blocks": 14, "decode_reserve_blocks": 0},
    "run ahead": {"runs_ahead": True},
    "guesses": {"speculative": "ngram:3"},
    "drafts": STREAMED | {"debug_kv": True, "speculative": "resident:4", "max_num_seqs": 1},
}
TEXTS = ("abababababab<think>\n", "no thoughts", "abababab<think>")
BUDGET, LENGTH = 9, 30


@pytest.fixture(scope="module")
def folder(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model(tiny("llama"), tmp_path_factory.mktemp("thinking") / "model")


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every streamed step drafts, whether it pays or not."""
    monkeypatch.setattr(PayingDrafts, "choose", lambda self: 4)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("settings", named(LAYOUTS, "resident", "guesses"))
def test_thoughts_end_at_their_budget(folder: Path, settings: dict[str, Any]) -> None:
    tokenizer, model = Tokenizer.from_folder(folder), reference(folder)
    end = tokenizer.encode("</think>", add_special_tokens=False)
    prompts = [tokenizer.encode(text) for text in TEXTS]
    expected = []
    for text, prompt in zip(TEXTS, prompts, strict=True):
        made: list[int] = []
        if "<think>" in text:
            made = reference_greedy(model, prompt, BUDGET) + end
        expected.append(made + reference_greedy(model, prompt + made, LENGTH - len(made)))
    params = SamplingParams(
        temperature=0, max_tokens=LENGTH, ignore_eos=True, thinking_token_budget=BUDGET
    )
    engine = small_engine(folder, **settings)
    outputs = Driver(engine).run(prompts, params)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    engine.close()


def test_a_form_begins_after_the_thoughts(folder: Path) -> None:
    """And an answer that must call a tool thinks first, too."""
    function = {"name": "weather", "parameters": WEATHER}
    asked: dict[str, Any] = {
        "use_tqdm": False,
        "chat_template_kwargs": {"enable_thinking": True},
    }
    talk = [{"role": "user", "content": "hello"}]
    common: dict[str, Any] = {"max_tokens": 150, "thinking_token_budget": BUDGET, "seed": 1}
    with LLM(folder, dtype="float32", num_gpu_blocks=200, kvcache_block_size=8) as llm:
        held = SamplingParams(**common, structured_outputs={"json": WEATHER})
        (output,) = llm.chat(talk, held, **asked)
        message = output.outputs[0].message
        assert message is not None and message.content is not None and message.reasoning
        jsonschema.validate(json.loads(message.content), WEATHER)
        choice = {"type": "function", "function": {"name": "weather"}}
        tools = [{"type": "function", "function": function}]
        free = SamplingParams(**common)
        (output,) = llm.chat(talk, free, tools=tools, tool_choice=choice, **asked)
        made = output.outputs[0].message
        assert made is not None and made.reasoning and made.content is None
        jsonschema.validate(json.loads(made.tool_calls[0].arguments), WEATHER)
        (plain,) = llm.generate("a<think>", held, use_tqdm=False)  # all of the text
        jsonschema.validate(json.loads(plain.outputs[0].text.partition("</think>")[2]), WEATHER)


def test_a_header_stands_between_thoughts_and_a_form(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """As Muse Glimmer's messages have it."""
    opened = "{{ tools }}{{ messages[0].content }}<|start|>assistant to=self<|message|>"
    folder = tool_model(tiny("llama"), tmp_path / "model", opened)
    held = SamplingParams(
        max_tokens=150, thinking_token_budget=BUDGET, seed=1, structured_outputs={"json": WEATHER}
    )
    talk = [{"role": "user", "content": "hello"}]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
    with LLM(folder, dtype="float32", num_gpu_blocks=200, kvcache_block_size=8) as llm:
        (output,) = llm.chat(talk, held, use_tqdm=False)
        text, message = output.outputs[0].text, output.outputs[0].message
        _, header, form = text.partition("<|eom|><|start|>assistant to=user<|message|>")
        assert header and message is not None and message.content == form and message.reasoning
        jsonschema.validate(json.loads(form), WEATHER)
        free = replace(held, structured_outputs=None)
        choice = {"type": "function", "function": {"name": "weather"}}
        (output,) = llm.chat(talk, free, tools=tools, tool_choice=choice, use_tqdm=False)
        made = output.outputs[0].message
        assert made is not None and made.reasoning and made.content is None
        jsonschema.validate(json.loads(made.tool_calls[0].arguments), WEATHER)


def test_a_model_without_thoughts_has_no_budget(tiny: Callable[[str], Path]) -> None:
    with LLM(tiny("llama"), dtype="float32", num_gpu_blocks=20) as llm:
        with pytest.raises(InvalidParamsError, match="thinking_token_budget needs a model that"):
            llm.generate("a", {"thinking_token_budget": 5}, use_tqdm=False)
        with pytest.raises(InvalidParamsError, match="thinking_token_budget must be"):
            llm.generate("a", {"thinking_token_budget": -2}, use_tqdm=False)
        no_limit = SamplingParams(thinking_token_budget=-1, max_tokens=1)  # as for vLLM
        assert no_limit == SamplingParams(max_tokens=1)
        assert llm.generate("a", no_limit, use_tqdm=False)[0].error is None


class Letters:
    """A form: any number of 6, then a 7."""

    def __init__(self) -> None:
        self.has_ended = False

    def accept(self, token_id: int) -> bool:
        assert token_id in (6, 7) and not self.has_ended
        self.has_ended = token_id == 7
        return self.has_ended

    def forced(self) -> tuple[int, ...]:
        return ()

    def masks(self, guesses: tuple[int, ...]) -> list[bytes]:
        made = [bytes([0b11000000])]
        for guess in guesses:
            if guess != 6:
                break
            made.append(made[0])
        return made


@pytest.mark.parametrize("begin", [(1,), (1, 2), (6, 2)])
@pytest.mark.parametrize("end", [(3,), (3, 4, 3)])
@pytest.mark.parametrize("has_form", [False, True])
@pytest.mark.parametrize("header", [(), (2, 0, 4)])
def test_thoughts_by_definition(
    begin: tuple[int, ...], end: tuple[int, ...], has_form: bool, header: tuple[int, ...]
) -> None:
    """Random texts that the masks allow, read again from their tokens alone; 0 ends a text, and 5
    is a space.
    """
    for seed in range(60):
        draw = random.Random(seed)
        is_open, budget = draw.random() < 0.5, draw.choice([None, 0, 1, 5])
        marks = marks_of(begin, end, header)
        state = ThinkingState(marks, is_open, budget, Letters() if has_form else None)
        made: list[int] = []
        while len(made) < 40:
            (mask,) = state.masks(())
            allowed = [i for i in range(8) if mask[0] >> i & 1]
            guesses = tuple(draw.choices([*allowed, *begin, *end], k=3))
            if not made and draw.random() < 0.5:
                guesses = (5, *begin, 4)
            ahead = state.masks(guesses)
            assert ahead[0] == mask
            assert not (forced := state.forced()) or allowed == [forced[0]]
            made.append(guesses[0] if guesses[0] in allowed else draw.choice(allowed))
            is_complete = state.accept(made[-1])
            if is_complete:
                break
            if made[-1] == guesses[0] and len(ahead) > 1:
                assert state.masks(guesses[1:]) == ahead[1:]
        check(made, marks, is_open, budget, has_form)


def marks_of(
    begin: tuple[int, ...], end: tuple[int, ...], header: tuple[int, ...] = ()
) -> ThinkingMarks:
    tokens = bytes([0xFF]), bytes([0xFE])
    return ThinkingMarks(begin, end, header, *tokens, lambda token: token == 5, 8)


def check(
    made: list[int], marks: ThinkingMarks, is_open: bool, budget: int | None, has_form: bool
) -> None:
    begin, end = list(marks.begin), list(marks.end)
    while not (is_open or has_form) and made[:1] == [5]:
        made = made[1:]
    rest = made
    may_begin = not has_form or len(begin) == 1 or begin[0] != 6  # the form's first token
    if has_form and may_begin and not is_open and made[:1] == begin[:1]:
        assert made[: len(begin)] == begin
    if is_open or (may_begin and made[: len(begin)] == begin):
        thoughts = made if is_open else made[len(begin) :]
        places = range(len(thoughts) - len(end) + 1)
        at = next((i for i in places if thoughts[i : i + len(end)] == end), None)
        assert at is not None or budget is None or len(thoughts) < budget + len(end)
        assert at is None or budget is None or at <= budget
        assert not has_form or 0 not in thoughts[:at]
        rest = [] if at is None else thoughts[at + len(end) :]
        if has_form:
            header = [*marks.header]
            assert rest[: len(header)] == header[: len(rest)]
            rest = rest[len(header) :]
    if has_form and rest:
        assert set(rest[:-1]) <= {6} and rest[-1] in (6, 7)


def test_spaces_before_the_thoughts_do_not_count() -> None:
    """As readers of answers skip them; 5 is a space."""
    marks = marks_of((1,), (3,))
    state, text = ThinkingState(marks, False, 2, None), (5, 5, 1, 2, 5)
    free, only_the_end = marks.any_token, bytes([0b1000])
    assert state.masks(text) == [free] * 5 + [only_the_end]
    for token in text:
        assert not state.accept(token)
    assert state.masks(()) == [only_the_end] and state.forced() == (3,)


def test_which_tokens_are_spaces(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    marks = ThinkingMarks.of(REASONING_SYNTAXES[-1], tokenizer, 260, 260, [])
    ids = tokenizer.encode(" \n\ta<", add_special_tokens=False)
    assert [marks.is_space(token_id) for token_id in ids] == [True] * 3 + [False] * 2
