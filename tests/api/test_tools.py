"""LLM.chat with tools: what the template sees, which calls are read, and answers that must call."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tool_models import CALL, TEMPLATE, TOOLS, WEATHER, tool_model

from nanoengine import (
    LLM,
    AsyncLLM,
    ChatMessage,
    InvalidParamsError,
    RequestOutput,
    SamplingParams,
    StreamDelta,
)
from nanoengine.text.answer_parser import ChatParsers
from nanoengine.text.rendering import Rendering
from nanoengine.text.tool_syntax import BY_NAME
from nanoengine.text.tools import read_tools

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "kvcache_block_size": 8,
    "num_gpu_blocks": 260,
    "num_threads": 1,
}
TALK = [{"role": "user", "content": "hello"}]
PARAMS = SamplingParams(max_tokens=160, seed=1)
WRITTEN = CALL.replace("now", "weather").replace("{}", '{"city": "Rome", "days": 3}')
pytestmark = pytest.mark.usefixtures("threads_as_before")


@pytest.fixture(scope="module")
def llm(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tool_model(tiny("llama"), tmp_path_factory.mktemp("tools") / "model")
    with LLM(folder, **SETTINGS) as made:
        yield made


def answer(llm: LLM, text: str, **rest: Any) -> ChatMessage:
    """The message of a model that writes this text."""
    form = SamplingParams(max_tokens=160, seed=1, structured_outputs={"choice": [text]})
    (output,) = llm.chat(TALK, form, use_tqdm=False, **rest)
    assert output.outputs[0].text == text
    message = output.outputs[0].message
    assert message is not None
    return message


def test_calls_are_read(llm: LLM) -> None:
    message = answer(llm, f"Hm.\n{CALL}", tools=TOOLS)
    (call,) = message.tool_calls
    assert (message.content, call.name, call.arguments) == ("Hm.", "now", "{}")
    assert len(call.id) == 9 and call.id.isalnum()
    talk = [*TALK, message.as_dict(), {"role": "tool", "tool_call_id": call.id, "content": "noon"}]
    (output,) = llm.chat(talk, PARAMS, use_tqdm=False, tools=TOOLS)
    assert output.prompt is not None
    written = '<tool_call>{"name": "now", "arguments": {}}</tool_call>\ntool: noon\n'
    assert f"assistant: Hm.{written}" in output.prompt


@pytest.mark.parametrize("choice", [None, "required"])
def test_an_answer_on_an_event_loop(llm: LLM, choice: Any) -> None:
    """The last output is LLM.chat's, and those before it hold no messages."""
    text = {"choice": [f"Hm.\n{CALL}"]}
    params = PARAMS if choice else SamplingParams(max_tokens=160, seed=1, structured_outputs=text)
    rest: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice}
    (wanted,) = llm.chat(TALK, params, use_tqdm=False, **rest)

    async def answers(made: AsyncLLM) -> list[RequestOutput]:
        return [output async for output in made.chat(TALK, params, **rest)]

    with closing(AsyncLLM(llm.llm_engine.config.model, **SETTINGS)) as made:
        *before, last = asyncio.run(answers(made))
    assert all(output.outputs[0].message is None for output in before)
    (ours,), (theirs,) = last.outputs, wanted.outputs
    assert ours.text == theirs.text and ours.message is not None and theirs.message is not None
    assert [c.arguments for c in ours.message.tool_calls] == [
        c.arguments for c in theirs.message.tool_calls
    ]
    assert ours.message.tool_calls and ours.message.content == theirs.message.content


def joined(deltas: list[StreamDelta]) -> tuple[str, str, str, list[tuple[str, str]]]:
    """The text, and the content, the thoughts and the calls of the message."""
    content = reasoning = ""
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        new = delta.message
        assert new is not None
        content, reasoning = content + new.content, reasoning + new.reasoning
        for call in new.tool_calls:
            if call.name is not None:
                assert call.index == len(calls) and call.id
                calls.append((call.name, ""))
            name, arguments = calls[call.index]
            calls[call.index] = name, arguments + call.arguments
    return "".join(deltas), content, reasoning, calls


def test_deltas_say_what_is_new_of_the_message(llm: LLM) -> None:
    """Joined, they are LLM.chat's; two completions with thoughts, and with calls that must come."""
    text = {"choice": [f"So:\n{CALL}\n{CALL}"]}
    common: dict[str, Any] = {"max_tokens": 170, "seed": 3, "n": 2, "thinking_token_budget": 6}
    rest: dict[str, Any] = {"tools": TOOLS, "chat_template_kwargs": {"enable_thinking": True}}
    free = SamplingParams(**common, structured_outputs=text), None
    for params, choice in (free, (SamplingParams(**common), "required")):
        rest["tool_choice"] = choice
        (whole,) = llm.chat(TALK, params, use_tqdm=False, **rest)

        async def streamed(made: AsyncLLM, params: SamplingParams = params) -> list[StreamDelta]:
            return [delta async for delta in await made.stream_chat(TALK, params, **rest)]

        with closing(AsyncLLM(llm.llm_engine.config.model, **SETTINGS)) as made:
            both = [*llm.stream_chat(TALK, params, **rest)], asyncio.run(streamed(made))
        for deltas, output in itertools.product(both, whole.outputs):
            message = output.message
            assert message is not None and message.tool_calls and message.reasoning
            calls = [(call.name, call.arguments) for call in message.tool_calls]
            wanted = output.text, message.content or "", message.reasoning, calls
            assert joined([delta for delta in deltas if delta.index == output.index]) == wanted
    assert all(delta.message is None for delta in llm.stream("x", {"max_tokens": 2}))


def test_without_tools_a_text_is_a_text(llm: LLM) -> None:
    assert answer(llm, CALL) == answer(llm, CALL, tools=TOOLS, tool_choice="none")
    assert answer(llm, CALL) == ChatMessage(CALL)
    (output,) = llm.chat(TALK, PARAMS, use_tqdm=False, tools=TOOLS, tool_choice="none")
    assert output.prompt == "user: hello\nassistant:"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_an_answer_that_must_call(llm: LLM, choice: Any) -> None:
    """A model of random weights writes calls that fit their schemas."""
    talks = [[{"role": "user", "content": f"{number}"}] for number in range(4)]
    params = [SamplingParams(max_tokens=160, seed=number) for number in range(4)]
    found = set()
    for output in llm.chat(talks, params, use_tqdm=False, tools=TOOLS, tool_choice=choice):
        (made,) = output.outputs
        assert made.message is not None and made.message.content is None
        calls = made.message.tool_calls
        whole = calls if made.finish_reason == "stop" else calls[:-1]
        for call in whole:
            found.add(call.name)
            schema = WEATHER if call.name == "weather" else {"maxProperties": 0}
            jsonschema.validate(json.loads(call.arguments), schema)
    assert found == ({"weather", "now"} if choice == "required" else {"now"})


def deep(words: str) -> str:
    """A mark of DeepSeek's."""
    return f"<\uff5c{words}\uff5c>".replace(" ", "\u2581")


HELD = '{"name": "weather", "arguments": {"city": "Rome", "days": 3}}'
HELD_CALLS = {
    "lfm2": f"<|tool_call_start|>[{HELD}, {HELD}]<|tool_call_end|>",
    "hunyuan_a13b": f"<tool_calls>[{HELD}, {HELD}]</tool_calls>",
    "nemotron_v2": f"<TOOLCALL>[{HELD}, {HELD}]</TOOLCALL>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    '<|tool_call_argument_begin|>{"city": "Rome", "days": 3}<|tool_call_end|>'
    "<|tool_calls_section_end|>",
    "phi4_mini_json": f"functools[{HELD}, {HELD}]",
    "cohere_command3": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "weather", '
    '"parameters": {"city": "Rome", "days": 3}}]<|END_ACTION|>',
    "apertus": '<|tools_prefix|>[{"weather": {"city": "Rome", "days": 3}}, '
    '{"weather": {"city": "Rome", "days": 3}}]<|tools_suffix|>',
    "deepseek_v3": deep("tool calls begin")
    + deep("tool call begin")
    + f"function{deep('tool sep')}weather\n```json\n"
    + '{"city": "Rome", "days": 3}\n```'
    + deep("tool call end")
    + deep("tool calls end"),
    "deepseek_v31": deep("tool calls begin")
    + (deep("tool call begin") + f"weather{deep('tool sep')}" + '{"city": "Rome", "days": 3}')
    + deep("tool call end")
    + deep("tool calls end"),
}


@pytest.mark.parametrize("name", HELD_CALLS)
def test_calls_that_must_come_are_in_the_form_of_their_family(llm: LLM, name: str) -> None:
    parsers = ChatParsers(BY_NAME[name], shows_tools=True)
    use = read_tools(TOOLS, "required")
    form = parsers.params(SamplingParams(), use).form
    assert form is not None
    state = llm.llm_engine.inputs.grammars.state_of(replace(form, after_thinking=False))
    text = HELD_CALLS[name]
    for written in (text, text.replace("Rome", "Oslo"), text.replace("3", "12")):
        token_ids = tuple(llm.tokenizer.encode(written, add_special_tokens=False))
        assert (len(state.masks(token_ids)) == len(token_ids)) == (written == text)
    calls = parsers.message(text, "", use).tool_calls
    assert {(call.name, call.arguments) for call in calls} == {
        ("weather", '{"city": "Rome", "days": 3}')
    }


@pytest.mark.parametrize(("sign", "mark_ids"), [("", [2]), ("[ARGS]", [0, 2])])
def test_a_call_that_must_come_begins_with_its_special_tokens(
    tiny: Callable[[str], Path], tmp_path: Path, sign: str, mark_ids: list[int]
) -> None:
    """Mistral's marks are tokens of their own, never their characters."""
    template = TEMPLATE.replace("<tool_call>", "[TOOL_CALLS]").replace("<think>", sign)
    folder = tool_model(tiny("llama"), tmp_path / "model", template)
    for path in folder.glob("*token*.json"):
        text = path.read_text().replace("<|im_start|>", "[TOOL_CALLS]")
        path.write_text(text.replace("<s>", "[ARGS]"))
    params = [SamplingParams(max_tokens=160, seed=seed) for seed in range(4)]
    with LLM(folder, **SETTINGS) as llm:
        outputs = llm.chat([TALK] * 4, params, use_tqdm=False, tools=TOOLS, tool_choice="required")
    for output in outputs:
        (made,) = output.outputs
        assert made.token_ids[0] == 2 and {*made.token_ids} & {0, 2} == {*mark_ids}
        assert made.message is not None
        if made.finish_reason == "stop":
            assert made.message.content is None
            for call in made.message.tool_calls:
                schema = WEATHER if call.name == "weather" else {"maxProperties": 0}
                jsonschema.validate(json.loads(call.arguments), schema)
    assert any(output.outputs[0].finish_reason == "stop" for output in outputs)


@pytest.mark.parametrize(
    ("tools", "choice", "words"),
    [
        (None, "required", "tool_choice='required' needs tools"),
        (TOOLS, "always", 'tool_choice must be "none"'),
        (TOOLS, {"type": "function", "function": {"name": "no"}}, "'no', which is not one of"),
        (TOOLS, {"type": "custom"}, "tool_choice must be"),
        (TOOLS, {"type": "allowed_tools"}, "tool_choice: allowed_tools must be an object"),
        ([*TOOLS, TOOLS[1]], "auto", "tools holds 'now' twice"),
        ([{"type": "web_search"}], "auto", r"tools\[0\] must be .* got 'web_search'"),
        ([{"name": "f"}], "auto", r"tools\[0\] must be"),
        ([{"type": "function", "function": {"name": "f", "strict": 1}}], "auto", "strict must be"),
        ([{"type": "function", "function": {"name": "a b"}}], "auto", r"name must be 1 to 128"),
        ([{"type": "function", "function": {"name": "a" * 129}}], "auto", "name must be 1 to 128"),
        (TOOLS * 513, "auto", "at most 1024, got 1026"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
            "auto",
            "parameters must be the JSON schema of an object",
        ),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
            "required",
            'structured_outputs: .*"not"',
        ),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"title": "a" * 70000}}}],
            "required",
            "tool_choice='required'.*may have 65536",
        ),
    ],
)
def test_what_cannot_be_called_is_refused(llm: LLM, tools: Any, choice: Any, words: str) -> None:
    with pytest.raises(InvalidParamsError, match=words):
        llm.chat(TALK, PARAMS, use_tqdm=False, tools=tools, tool_choice=choice)


def test_an_answer_in_a_form_or_calls(llm: LLM) -> None:
    """With "auto" the model may choose: some texts of random weights are calls, some the form."""
    schema = {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2}
    asked = SamplingParams(
        max_tokens=200, n=12, seed=4, temperature=2, structured_outputs={"json": schema}
    )
    (output,) = llm.chat(TALK, asked, use_tqdm=False, tools=TOOLS, tool_choice="auto")
    kinds = set()
    for made in output.outputs:
        message = made.message
        assert message is not None
        kinds.add(bool(message.tool_calls))
        if made.finish_reason == "stop" and message.tool_calls:
            assert message.content is None and message.tool_calls[0].name in ("weather", "now")
        elif made.finish_reason == "stop" and message.content is not None:
            jsonschema.validate(json.loads(message.content), schema)
    assert kinds == {True, False}


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("any text, <tool_call> in it", ""),
        (f"So:\n{CALL}\n{CALL} done", ""),
        (CALL.replace("now", "weather"), "}}\n</tool_call>"),
        (WRITTEN, ""),
        (f"a {WRITTEN}\n{WRITTEN}", ""),
        (WRITTEN.replace(" ", "").replace("\n", ""), ""),
        (WRITTEN.replace(" 3", " 30"), "0}}\n</tool_call>"),
        (f"{WRITTEN}\n" + WRITTEN.replace("Rome", "Oslo"), 'Oslo", "days": 3}}\n</tool_call>'),
        (WRITTEN.replace("}}", ', "more": 1}}'), ', "more": 1}}\n</tool_call>'),
    ],
)
def test_calls_of_strict_tools_fit_their_schemas(llm: LLM, text: str, rest: str) -> None:
    """With "auto", once their names are written; `now` is not strict. rest: what does not fit."""
    strict = {"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}
    rules = llm.chat_rules(Rendering(tools=[strict, TOOLS[1]]))
    form = rules.params(SamplingParams()).form
    assert (
        form is not None
        and llm.chat_rules(Rendering(tools=TOOLS)).params(SamplingParams()).form is None
    )
    token_ids = tuple(llm.tokenizer.encode(text, add_special_tokens=False))
    masks = llm.llm_engine.inputs.grammars.state_of(form).masks(token_ids)
    assert len(token_ids) == len(text) and len(masks) - 1 == len(text) - len(rest)
    (output,) = llm.chat(TALK, PARAMS, use_tqdm=False, tools=[strict])
    assert len(output.outputs[0].token_ids) > 1


@pytest.mark.parametrize(
    ("more", "takes"),
    [
        ({}, False),
        ({"additionalProperties": False}, False),
        ({"additionalProperties": True}, True),
        ({"additionalProperties": {"type": "integer"}}, True),
        ({"allOf": [{"properties": {"more": {"type": "integer"}}}]}, True),
    ],
)
def test_a_call_has_no_arguments_beyond_its_schema(
    llm: LLM, more: dict[str, Any], takes: bool
) -> None:
    """Unless the schema lets it. A call that must come, and one of a strict tool."""
    schema = {key: v for key, v in WEATHER.items() if key != "additionalProperties"} | more
    function = TOOLS[0]["function"] | {"parameters": schema, "strict": True}
    text = WRITTEN.replace("}}", ', "more": 1}}')
    token_ids = tuple(llm.tokenizer.encode(text, add_special_tokens=False))
    for choice in ("auto", "required"):
        rules = llm.chat_rules(
            Rendering(tools=[{"type": "function", "function": function}]), choice
        )
        form = replace(rules.params(SamplingParams()).form, after_thinking=False)
        masks = llm.llm_engine.inputs.grammars.state_of(form).masks(token_ids)
        assert (len(masks) - 1 == len(text)) == takes


def test_a_strict_tool_may_have_formats_of_its_own(llm: LLM) -> None:
    function = TOOLS[0]["function"]
    city = {"city": {"type": "string", "format": "city-name"}}
    schema = function["parameters"] | {"properties": function["parameters"]["properties"] | city}
    tool = {"type": "function", "function": function | {"parameters": schema, "strict": True}}
    for choice in ("auto", "required"):
        (output,) = llm.chat(TALK, PARAMS, use_tqdm=False, tools=[tool], tool_choice=choice)
        assert output.error is None and output.outputs[0].token_ids


def test_a_form_and_a_call_exclude_each_other(llm: LLM) -> None:
    params = SamplingParams(structured_outputs={"regex": "a"})
    with pytest.raises(InvalidParamsError, match="exclude each other"):
        llm.chat(TALK, params, use_tqdm=False, tools=TOOLS, tool_choice="required")


def test_a_call_that_must_come_needs_no_form_in_json(llm: LLM) -> None:
    """There is no content that could have it; instructor sends both, and vLLM takes the call."""
    asked: Any = {"use_tqdm": False, "tools": TOOLS, "tool_choice": "required"}
    (wanted,) = llm.chat(TALK, PARAMS, **asked)
    for form in ({"json": {"type": "object"}}, {"json_object": True}):
        (found,) = llm.chat(TALK, replace(PARAMS, structured_outputs=form), **asked)
        assert found["token_ids"] == wanted["token_ids"]
