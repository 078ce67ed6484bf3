"""Tools and thoughts of /v1/responses and /v1/messages: bodies become chats, answers are lists of
items, and their events fit the official types.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from live_server import live_server
from pydantic import TypeAdapter
from starlette.responses import JSONResponse
from tool_models import CALL, TEMPLATE, TOOLS, tool_model

from nanoengine.errors import InvalidParamsError, RequestError
from nanoengine.outputs import CompletionOutput, Logprob, RequestOutput, StreamDelta
from nanoengine.sampling_params import SamplingParams
from nanoengine.serving.messages_answers import MessagesWriter
from nanoengine.serving.messages_requests import read_count, read_messages
from nanoengine.serving.openai_keys import CHAT, MESSAGES, RESPONSES
from nanoengine.serving.openai_requests import ChatRequest, read_request
from nanoengine.serving.responses_answers import ResponsesWriter
from nanoengine.serving.responses_requests import read_responses
from nanoengine.text.answer_parser import ChatParsers
from nanoengine.text.reasoning import reasoning_of
from nanoengine.text.tool_syntax import BY_NAME
from nanoengine.text.tools import ToolUse

ASKED: Any = [{"role": "user", "content": "Hi"}]
PARSERS = ChatParsers(BY_NAME["hermes"], reasoning_of(TEMPLATE), True)
SCHEMA = TOOLS[0]["function"]["parameters"]
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
CLAUDES: list[dict[str, Any]] = [
    {"name": "weather", "input_schema": SCHEMA, "type": "custom"},
    {"name": "now", "input_schema": {"type": "object"}},
]
TEXT = f"hm\n</think>\n\nSo:\n{CALL}\n"


def test_tools_are_those_of_a_chat() -> None:
    made = read_responses({"input": "Hi", "tools": FLAT}, SamplingParams()).chat
    assert made.tools == ToolUse(tuple(TOOLS))
    named = {"type": "function", "name": "now"}
    body = {"input": "Hi", "tools": FLAT, "tool_choice": named, "parallel_tool_calls": False}
    chosen = read_responses(body, SamplingParams()).chat.tools
    assert chosen is not None and (chosen.choice, chosen.is_parallel) == ("now", False)
    for choice, meant, is_parallel in (
        (None, "auto", True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any"}, "required", True),
        ({"type": "tool", "name": "now"}, "now", True),
    ):
        body = {"messages": ASKED, "max_tokens": 9, "tools": CLAUDES, "tool_choice": choice}
        use = read_messages(body, SamplingParams()).tools
        assert use is not None and (use.choice, use.is_parallel) == (meant, is_parallel)
        assert use.schemas == {"weather": SCHEMA, "now": {"type": "object"}}
        assert read_count(body, SamplingParams()).tools == use
    none = {"messages": ASKED, "max_tokens": 9, "tools": CLAUDES, "tool_choice": {"type": "none"}}
    assert read_messages(none, SamplingParams()).tools is None


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_choice_of_some_tools_is_as_if_there_were_no_others(mode: str) -> None:
    named = {"mode": mode, "tools": [{"type": "function", "function": {"name": "now"}}]}
    body = {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": named}}
    asked = read_request(CHAT, body | {"messages": ASKED}, SamplingParams())
    assert isinstance(asked, ChatRequest) and asked.tools == ToolUse((TOOLS[1],), mode)
    flat = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "now"}]}
    body = {"input": "Hi", "tools": FLAT, "tool_choice": flat}
    response = read_responses(body, SamplingParams())
    assert response.chat.tools == asked.tools and response.repeated["tool_choice"] == flat


@pytest.mark.parametrize(
    ("allowed", "words"),
    [
        (
            None,
            "allowed_tools must be an object with a mode, auto or required, and tools, got None",
        ),
        ({"mode": "none", "tools": TOOLS}, "allowed_tools must be an object with a mode"),
        ({"mode": "auto", "tools": []}, "allowed_tools must be an object with a mode"),
        ({"mode": "auto", "tools": ["now"]}, "names None, which is not one of tools"),
        ({"mode": "auto", "tools": [{"function": {"name": "rm"}}]}, "names 'rm', which is not one"),
        ({"mode": "auto", "tools": [{"function": {"name": ["x"]}}]}, "names ['x'], which is not"),
    ],
)
def test_a_choice_of_some_tools_that_is_wrong(allowed: Any, words: str) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    body = {"messages": ASKED, "tools": TOOLS, "tool_choice": choice}
    with pytest.raises(RequestError, match=re.escape(words)):
        read_request(CHAT, body, SamplingParams())


def test_calls_and_results_are_messages_of_a_chat() -> None:
    function = {"name": "now", "arguments": '{"utc": true}'}
    call = {"id": "c", "type": "function", "function": function}
    chat = [
        *ASKED,
        {"role": "assistant", "reasoning_content": "hm", "content": "So:", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "noon"},
    ]
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": "So:"},
        {"type": "function_call", "call_id": "c", **function},
        {"type": "function_call_output", "call_id": "c", "output": "noon"},
        {"type": "reasoning", "summary": []},
    ]
    assert read_responses({"input": items}, SamplingParams()).chat.messages == chat
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "So:"},
        {"type": "tool_use", "id": "c", "name": "now", "input": {"utc": True}},
    ]
    result = {"type": "tool_result", "tool_use_id": "c", "content": "noon"}
    talk = [
        *ASKED,
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [result, {"type": "text", "text": "Go on"}]},
    ]
    made = read_messages({"messages": talk, "max_tokens": 9}, SamplingParams()).messages
    chat[1]["content"] = [{"type": "text", "text": "So:"}]
    assert made == [*chat, {"role": "user", "content": [{"type": "text", "text": "Go on"}]}]


def test_thinking_is_a_budget_and_a_variable_of_the_template() -> None:
    body = {"messages": ASKED, "max_tokens": 9}
    made = read_messages(
        body | {"thinking": {"type": "enabled", "budget_tokens": 5}}, SamplingParams()
    )
    assert made.params.thinking_token_budget == 5
    assert made.rendering.kwargs == {"enable_thinking": True}
    off = read_messages(body | {"thinking": {"type": "disabled"}}, SamplingParams())
    assert off.rendering.kwargs == {"enable_thinking": False}
    assert off.params.thinking_token_budget is None
    low = {"output_config": {"effort": "low"}}
    variables = {"reasoning_effort": "low", "enable_thinking": True}
    assert read_messages(body | low, SamplingParams()).rendering.kwargs == variables
    off = read_messages(body | low | {"thinking": {"type": "disabled"}}, SamplingParams())
    assert off.rendering.kwargs == variables | {"enable_thinking": False}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            {"tools": [{"type": "web_search_20250305", "name": "w"}]},
            'tools[0] must be {"name": ..., "input_schema": ...}, got \'web_search_20250305\'',
        ),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name must be 1 to 128"),
        ({"tools": [{"name": "a", "input_schema": 5}]}, "tools[0].input_schema must be the JSON"),
        ({"tools": CLAUDES, "tool_choice": "auto"}, "tool_choice must be an object whose type is"),
        ({"tools": CLAUDES, "tool_choice": {"type": "tool"}}, "which is not one of tools"),
        ({"tool_choice": {"type": "any"}}, "needs tools"),
        ({"thinking": {"type": "enabled"}}, "thinking needs budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens must be"),
        ({"thinking": 5}, "thinking must be an object whose type is enabled or disabled"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a"}]}]},
            "messages[0].content[0] must be",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "a"}]}]},
            "messages[0].content[0] needs the id of the call",
        ),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=re.escape(words)):
        read_messages({"messages": ASKED, "max_tokens": 9} | body, SamplingParams())


def parts(seed: int, reason: str = "stop") -> tuple[list[StreamDelta], RequestOutput]:
    """An answer in random parts, and whole."""
    draw = random.Random(seed)
    cuts = [0, *sorted(draw.choices(range(len(TEXT) + 1), k=draw.randrange(40))), len(TEXT)]
    pairs = list(pairwise(cuts))
    deltas = [StreamDelta(0, 0, TEXT[a:b], ()) for a, b in pairs[:-1]]
    deltas.append(StreamDelta(0, 0, TEXT[slice(*pairs[-1])], (), reason))
    made = CompletionOutput(0, TEXT, [], reason)
    return deltas, RequestOutput(0, "assistant:<think>\n", [5], [made])


@pytest.mark.some(1)
@pytest.mark.parametrize("seed", range(4))
def test_a_response_of_three_items(seed: int) -> None:
    responses = pytest.importorskip("openai.types.responses")
    deltas, output = parts(seed)
    request = read_responses({"input": "Hi", "tools": FLAT}, SamplingParams())
    writer = ResponsesWriter(request, "7", "m", lambda _: b"", PARSERS)
    events = writer.begin(output, 0)
    for delta in deltas:
        events += writer.of([delta], 0)
    events += writer.end([output])
    for name, data in events:
        made = TypeAdapter(responses.ResponseStreamEvent).validate_python(data)
        assert made.type == name
    final = events[-1][1]["response"]
    thoughts, message, call = final["output"]
    assert thoughts["content"][0]["text"] == "hm" and message["content"][0]["text"] == "So:"
    assert (call["name"], call["arguments"], call["status"]) == ("now", "{}", "completed")
    done = [data["item"] for name, data in events if name == "response.output_item.done"]
    assert done == final["output"]
    for index, kind in enumerate(("reasoning_text", "output_text", "function_call_arguments")):
        said = [d for n, d in events if n == f"response.{kind}.delta"]
        assert {data["output_index"] for data in said} == {index}
        assert "".join(d["delta"] for d in said) == ("hm", "So:", "{}")[index]
    whole = writer.whole([output])
    responses.Response.model_validate(whole)
    assert whole["output"][:2] == final["output"][:2]
    assert whole["tools"] == FLAT and whole["status"] == "completed"


def test_only_the_last_item_of_an_answer_is_cut() -> None:
    """Also where the others end with the same text."""
    made = CompletionOutput(0, TEXT, [], "length")
    output = RequestOutput(0, "assistant:<think>\n", [5], [made])
    request = read_responses({"input": "Hi", "tools": FLAT}, SamplingParams())
    writer = ResponsesWriter(request, "7", "m", lambda _: b"", PARSERS)
    events = [*writer.begin(output, 0), *writer.of([StreamDelta(0, 0, TEXT, (), "length")], 0)]
    events += writer.end([output])
    done = [data["item"] for name, data in events if name == "response.output_item.done"]
    assert [item["status"] for item in done] == ["completed", "completed", "incomplete"]
    assert done == events[-1][1]["response"]["output"]


@pytest.mark.parametrize("seed", range(4))
def test_log_probabilities_are_those_of_each_texts_own_tokens(seed: int) -> None:
    """Not of thoughts, calls, marks and the end, whether the answer is whole or a stream."""
    call = "<tool_call>{", '"name": "now", "arguments": {}}', "</tool_call>"
    pieces = ["h", "m\n</thi", "nk>\n\nS", "o", ":\n", *call, "\nDo", "ne \xc3", "\xa9", "</s>"]
    data = [piece.encode("latin-1") for piece in pieces]
    text = b"".join(data[:-1]).decode()
    scores = [{i: Logprob(-float(i), 1)} for i in range(len(pieces))]
    made = CompletionOutput(0, text, [*range(len(pieces))], "stop", logprobs=scores)
    output = RequestOutput(0, "assistant:<think>\n", [5], [made])
    request = read_responses({"input": "Hi", "tools": FLAT, "top_logprobs": 1}, SamplingParams())
    whole = ResponsesWriter(request, "7", "m", data.__getitem__, PARSERS).whole([output])
    _, first, _, second = whole["output"]
    found = [
        [-entry["logprob"] for entry in item["content"][0]["logprobs"]] for item in (first, second)
    ]
    assert (first["content"][0]["text"], second["content"][0]["text"]) == ("So:", "\nDone é")
    assert found == [[2, 3, 4], [8, 9, 10]]

    draw = random.Random(seed)
    cuts = [0, *sorted(draw.choices(range(len(text)), k=6)), len(text)]
    starts = [len(b"".join(data[:i]).decode("utf-8", "ignore")) for i in range(len(data))]
    # A token comes with the first of its text, if not before.
    counts = [sum(start < cut for start in starts) for cut in cuts[:-1]] + [len(data)]
    writer = ResponsesWriter(request, "7", "m", data.__getitem__, PARSERS)
    events = writer.begin(output, 0)
    for (begin, end), (i, j) in zip(pairwise(cuts), pairwise(counts), strict=True):
        reason = "stop" if j == len(data) else None
        delta = StreamDelta(0, 0, text[begin:end], tuple(range(i, j)), reason)
        events += writer.of([replace(delta, logprobs=tuple(scores[i:j]))], 0)
    done = [d["item"] for n, d in events if n == "response.output_item.done"]
    assert [done[1]["content"], done[3]["content"]] == [first["content"], second["content"]]
    for index, numbers in ((1, found[0]), (3, found[1])):
        said = [d for n, d in events if n == "response.output_text.delta"]
        entries = [e for d in said if d["output_index"] == index for e in d["logprobs"]]
        assert [-entry["logprob"] for entry in entries] == numbers


@pytest.mark.parametrize("written", ['{"a": NaN}', '{"a": [1}', "[" * 9000 + "]" * 9000])
def test_arguments_that_are_no_json_are_given_as_they_were_written(written: str) -> None:
    """NaN among them: an answer could not say it."""
    body = {"messages": ASKED, "max_tokens": 9, "tools": CLAUDES}
    writer = MessagesWriter(read_messages(body, SamplingParams()), "7", "m", PARSERS)
    text = f'<tool_call>{{"name": "now", "arguments": {{"b": {written}}}}}</tool_call>'
    made = CompletionOutput(0, text, [], "stop")
    whole = writer.whole([RequestOutput(0, "", [5], [made])])
    (call,) = whole["content"]
    assert call["input"]["arguments"].startswith('{"b": ' + written[:8])
    JSONResponse(whole)


@pytest.mark.parametrize("seed", range(4))
def test_a_message_of_three_blocks(seed: int) -> None:
    types = pytest.importorskip("anthropic.types")
    deltas, output = parts(seed)
    body = {"messages": ASKED, "max_tokens": 9, "tools": CLAUDES}
    writer = MessagesWriter(read_messages(body, SamplingParams()), "7", "m", PARSERS)
    events = writer.begin(output, 0)
    for delta in deltas:
        events += writer.of([delta], 0)
    events += writer.end([output])
    for name, data in events:
        if name != "ping":
            made = TypeAdapter(types.RawMessageStreamEvent).validate_python(data)
            assert made.type == name
    blocks = [d["content_block"] for n, d in events if n == "content_block_start"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
    said, signed = ["", "", ""], []
    for delta in (d for n, d in events if n == "content_block_delta"):
        kind, text = delta["delta"].values()
        if kind == "signature_delta":
            signed.append((delta["index"], bool(text), said[0]))
        else:
            said[delta["index"]] += text
    assert said == ["hm", "So:", "{}"]
    assert signed == [(0, True, "hm")]  # thoughts are signed once, when they are all said
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"
    whole = types.Message.model_validate(writer.whole([output]))
    assert whole.stop_reason == "tool_use" and whole.content[2].input == {}
    assert whole.content[0].signature


def test_over_http(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    with live_server(tool_model(tiny("llama"), tmp_path / "model")) as server:
        named = {"type": "function", "name": "weather"}
        body: dict[str, Any] = {"input": "Hi", "tools": FLAT, "tool_choice": named}
        status, answer = server.post(RESPONSES, **body)
        (call,) = answer["output"]
        assert status == 200 and json.loads(call["arguments"]).keys() == {"city", "days"}
        body = {"messages": ASKED, "max_tokens": 160, "tools": CLAUDES}
        body["tool_choice"] = {"type": "tool", "name": "weather"}
        body["thinking"] = {"type": "enabled", "budget_tokens": 6}
        status, answer = server.post(MESSAGES, **body)
        thoughts, use = answer["content"]
        assert (thoughts["type"], use["name"], status) == ("thinking", "weather", 200)
        assert use["input"].keys() == {"city", "days"} and answer["stop_reason"] == "tool_use"
        deep: dict[str, Any] = {"type": "object"}
        for _ in range(400):
            deep = {"type": "object", "properties": {"a": deep}}
        tools = [{"type": "function", "name": "deep", "parameters": deep}]
        status, answer = server.post(RESPONSES, input="Hi", tools=tools, tool_choice="required")
        assert status == 400, answer
        server.wait_until_idle()


# -- spaces of tools

SPACE: dict[str, Any] = {
    "type": "namespace",
    "name": "agents",
    "description": "Of agents.",
    "tools": [{"type": "function", "name": "close", "parameters": {"type": "object"}}],
}
OFFLINE = {"type": "web_search", "external_web_access": False}


def test_functions_of_a_space_have_a_name_of_both() -> None:
    """For the model; the answer names space and function, as the conversation does."""
    said = {"type": "function_call", "call_id": "1", "namespace": "agents", "name": "close"}
    items = [{"role": "user", "content": "a"}, said | {"arguments": "{}"}]
    request = read_responses({"input": items, "tools": [SPACE, OFFLINE]}, SamplingParams())
    assert request.chat.tools is not None
    assert [*request.chat.tools.schemas] == ["agents__close"]
    assert request.repeated["tools"] == [SPACE, OFFLINE]
    (call,) = request.chat.messages[-1]["tool_calls"]
    assert call["function"]["name"] == "agents__close"
    one = {"type": "function", "namespace": "agents", "name": "close"}
    body = {"input": items, "tools": [SPACE, *FLAT], "tool_choice": one}
    must = read_responses(body, SamplingParams()).chat.tools
    body["tool_choice"] = {"type": "allowed_tools", "mode": "required", "tools": [one]}
    some = read_responses(body, SamplingParams()).chat.tools
    assert must is not None and some is not None
    assert must.choice == "agents__close" and [*some.schemas] == ["agents__close"]
    text = '<tool_call>{"name": "agents__close", "arguments": {}}</tool_call>'
    output = RequestOutput(0, "p", [1], [CompletionOutput(0, text, [1], "stop")], finished=True)
    whole = ResponsesWriter(request, "7", "m", lambda _: b"", PARSERS).whole([output])
    (made,) = whole["output"]
    assert (made["namespace"], made["name"], made["arguments"]) == ("agents", "close", "{}")
    writer = ResponsesWriter(request, "7", "m", lambda _: b"", PARSERS)
    events = writer.begin(output, 0) + writer.of([StreamDelta(0, 0, text, (1,), "stop")], 0)
    named = [data.get("item", data) for _, data in events]
    found = [(each["namespace"], each["name"]) for each in named if "namespace" in each]
    assert found and set(found) == {("agents", "close")}


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        (SPACE | {"name": 5}, "tools[0] must have a name and a list of tools"),
        (SPACE | {"tools": None}, "tools[0] must have a name and a list of tools"),
        (SPACE | {"tools": [OFFLINE]}, "tools[0].tools must be functions"),
        (SPACE | {"name": "a b"}, "tools[0].name must be 1 to 128"),
        (OFFLINE | {"external_web_access": True}, "the server runs no tools of its own"),
        ({"type": "web_search"}, "the server runs no tools of its own"),
    ],
)
def test_other_spaces_and_searches_are_refused(tool: Any, text: str) -> None:
    with pytest.raises(InvalidParamsError, match=re.escape(text)):
        read_responses({"input": "a", "tools": [tool]}, SamplingParams())
