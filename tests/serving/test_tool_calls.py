"""Tools and thoughts over HTTP: OpenAI's messages, whole and streamed, and what is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from live_server import LiveServer, live_server
from tool_models import CALL, TEMPLATE, TOOLS, WEATHER, tool_model

from nanoengine.errors import ConfigError
from nanoengine.outputs import CompletionOutput, Logprob, RequestOutput, StreamDelta
from nanoengine.sampling_params import SamplingParams
from nanoengine.serving.openai_chunks import ChatChunks
from nanoengine.serving.openai_keys import CHAT
from nanoengine.serving.openai_requests import ChatRequest, Streaming, read_request
from nanoengine.serving.options import ServerOptions
from nanoengine.text.answer_parser import ChatParsers
from nanoengine.text.reasoning import reasoning_of
from nanoengine.text.tool_syntax import BY_NAME

HELLO: Any = [{"role": "user", "content": "hello"}]
ASKED: dict[str, Any] = {"messages": HELLO, "tools": TOOLS, "max_tokens": 160, "seed": 1}
PARSERS = ChatParsers(BY_NAME["hermes"], reasoning_of(TEMPLATE), True)
pytestmark = pytest.mark.usefixtures("threads_as_before")


def joined(chunks: list[Any]) -> tuple[dict[str, Any], str | None]:
    """The message that the chunks of one choice make, and why it ended."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    reason = None
    for chunk in chunks:
        (choice,) = chunk["choices"]
        reason = choice["finish_reason"]
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            message[name] = message.get(name, "") + delta.get(name, "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"]) and call["type"] == "function"
                message["tool_calls"].append({**call["function"], "id": call["id"]})
            else:
                assert call["index"] == len(message["tool_calls"]) - 1
                message["tool_calls"][-1]["arguments"] += call["function"]["arguments"]
    return message, reason


def test_a_call_in_a_text(tool_server: LiveServer) -> None:
    """The template's parser reads it; a form makes the model write it."""
    form = {"choice": [f"Hm.\n{CALL}\n{CALL}"]}
    body = ASKED | {"structured_outputs": form, "thinking_token_budget": 0}
    status, answer = tool_server.post(CHAT, **body)
    (choice,) = answer["choices"]
    message = choice["message"]
    assert status == 200 and choice["finish_reason"] == "tool_calls"
    assert message["content"] == "Hm." and message["reasoning_content"] is None
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "now", "arguments": "{}"}
    ] * 2
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    streamed, reason = joined(tool_server.stream(CHAT, **body))
    assert (streamed["content"], reason) == ("Hm.", "tool_calls")
    assert [(c["name"], c["arguments"]) for c in streamed["tool_calls"]] == [("now", "{}")] * 2
    _, alone = tool_server.post(CHAT, **body, parallel_tool_calls=False)
    assert len(alone["choices"][0]["message"]["tool_calls"]) == 1
    _, none = tool_server.post(CHAT, **body, tool_choice="none")
    assert none["choices"][0]["message"]["content"] == f"Hm.\n{CALL}\n{CALL}"
    assert none["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_error_of_a_forms_tokens_names_the_tools(
    tool_server: LiveServer, is_stream: bool
) -> None:
    """Their calls have the form, as the body has no other."""
    body = ASKED | {"tool_choice": "required", "allowed_token_ids": [5], "stream": is_stream}
    status, answer = tool_server.post(CHAT, **body)
    error = answer["error"]
    assert (status, error["param"]) == (400, "tools")
    assert error["message"].startswith("tools with allowed_token_ids leave no token")


def test_an_answer_that_must_call(tool_server: LiveServer) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for seed, choice in enumerate([named, named, "required"]):
        body = ASKED | {"tool_choice": choice, "parallel_tool_calls": False, "seed": seed}
        message, reason = joined(tool_server.stream(CHAT, **body))
        assert (message["content"], reason) == ("", "tool_calls")
        (call,) = message["tool_calls"]
        if choice is named:
            assert call["name"] == "weather"
            jsonschema.validate(json.loads(call["arguments"]), WEATHER)
        _, whole = tool_server.post(CHAT, **body)
        assert whole["choices"][0]["message"]["tool_calls"][0]["function"] == {
            "name": call["name"],
            "arguments": call["arguments"],
        }


def test_results_of_tools_go_back(tool_server: LiveServer) -> None:
    function = {"name": "now", "arguments": '{"utc": true}'}
    call = {"id": "123456789", "type": "function", "function": function}
    talk = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "123456789", "content": [{"type": "text", "text": "5"}]},
    ]
    status, answer = tool_server.post(CHAT, **ASKED | {"messages": talk, "max_tokens": 2})
    assert status == 200, answer


def test_thoughts(tool_server: LiveServer) -> None:
    """The prompt has begun them, and the answer does not end them."""
    body = {"messages": HELLO, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    _, plain = tool_server.post(CHAT, **body)
    assert plain["choices"][0]["message"]["reasoning"] is None
    body |= {"chat_template_kwargs": {"enable_thinking": True}}
    _, whole = tool_server.post(CHAT, **body)
    message = whole["choices"][0]["message"]
    assert message["content"] == "" and message["reasoning_content"] == message["reasoning"] != ""
    streamed, reason = joined(tool_server.stream(CHAT, **body))
    assert streamed["reasoning_content"] == message["reasoning"] and reason == "length"
    _, without = tool_server.post(CHAT, **body, include_reasoning=False)
    assert without["choices"][0]["message"]["reasoning"] is None
    body |= {"thinking_token_budget": 5, "max_tokens": 30, "n": 2, "temperature": 1, "seed": 1}
    counted = {"reasoning_tokens": 10}  # the end of the thoughts is none of them
    _, whole = tool_server.post(CHAT, **body)
    assert whole["usage"]["completion_tokens_details"] == counted
    *_, last = tool_server.stream(CHAT, **body, stream_options={"include_usage": True})
    assert last["usage"]["completion_tokens_details"] == counted


@pytest.mark.parametrize("seed", range(8))
def test_chunks_make_the_whole_answer(seed: int) -> None:
    """However the deltas fall."""
    draw = random.Random(seed)
    arguments = '{"city": "Rome", "days": 2}'
    text = f"hm\n</think>\n\nSo:\n{CALL}\n" + CALL.replace("now", "weather").replace(
        "{}", arguments
    )
    asked = {"messages": HELLO, "tools": TOOLS, "stream": True, "include_reasoning": seed != 5}
    request = read_request(CHAT, asked, SamplingParams())
    assert isinstance(request, ChatRequest) and request.streaming == Streaming()
    cuts = [0, *sorted(draw.choices(range(len(text) + 1), k=draw.randrange(40))), len(text)]
    deltas = [
        StreamDelta(0, 0, text[a:b], (), "stop" if b == cuts[-1] and i == len(cuts) - 2 else None)
        for i, (a, b) in enumerate(pairwise(cuts))
    ]
    made = CompletionOutput(0, text, [], "stop")
    output = RequestOutput(0, "assistant:<think>\n", [5], [made])
    given = request, "7", "m", lambda _: b""
    writer = ChatChunks(*given, PARSERS)
    events = writer.begin(output, 0)
    for delta in deltas:
        events += writer.of([delta], 0)
    streamed, reason = joined([chunk for _, chunk in events])
    (choice,) = ChatChunks(*given, PARSERS).whole([output])["choices"]
    message = choice["message"]
    assert (message["content"], reason, choice["finish_reason"]) == ("So:", *["tool_calls"] * 2)
    assert message["reasoning_content"] == ("hm" if seed != 5 else None)
    for name in ("content", "reasoning_content"):
        assert streamed.get(name, "") == (message[name] or "")
    calls = [(call["name"], call["arguments"]) for call in streamed["tool_calls"]]
    assert calls == [("now", "{}"), ("weather", arguments)]
    assert calls == [tuple(call["function"].values()) for call in message["tool_calls"]]


@pytest.mark.parametrize("seed", range(4))
def test_thoughts_that_are_not_wanted_are_not_in_the_log_probabilities(seed: int) -> None:
    data = [b"h", b"m</thi", b"nk>\n\nS", b"o", b":", b"</s>"]
    text = b"".join(data[:-1]).decode()
    scores = [{i: Logprob(-float(i), 1)} for i in range(len(data))]
    asked = {"messages": HELLO, "stream": True, "logprobs": True, "include_reasoning": False}
    request = read_request(CHAT, asked, SamplingParams())
    assert isinstance(request, ChatRequest)
    made = CompletionOutput(0, text, [*range(len(data))], "stop", logprobs=scores)
    output = RequestOutput(0, "assistant:<think>\n", [5], [made])
    given = request, "7", "m", data.__getitem__
    (choice,) = ChatChunks(*given, PARSERS).whole([output])["choices"]
    own = choice["logprobs"]["content"]
    assert [-entry["logprob"] for entry in own] == [2, 3, 4]

    draw = random.Random(seed)
    counts = [0, *sorted(draw.choices(range(len(data)), k=3)), len(data)]
    ends = [len(b"".join(data[: max(0, count - draw.randrange(2))])) for count in counts[:-1]]
    writer = ChatChunks(*given, PARSERS)
    events = writer.begin(output, 0)
    at = 0
    for (i, j), end in zip(pairwise(counts), [*ends[1:], len(text)], strict=True):
        reason = "stop" if j == len(data) else None
        part = text[at : max(at, end)]
        delta = StreamDelta(0, 0, part, tuple(range(i, j)), reason, logprobs=tuple(scores[i:j]))
        events += writer.of([delta], 0)
        at = max(at, end)
    choices = [chunk["choices"][0] for _, chunk in events]
    found = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert found == own


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tools": "now"}, "tools must be a list of at most 1024, got 'now'"),
        ({"tools": [{"type": "function", "function": {"name": "a.b"}}]}, "must be 1 to 128 of"),
        ({"tools": [], "tool_choice": "required"}, "needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "rm"}}}, "'rm', which is not"),
        ({"tool_choice": "required", "structured_outputs": {"regex": "a"}}, "exclude each"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls must be true or false"),
        ({"functions": [{}]}, "here it is tools"),
    ],
)
def test_what_is_refused(tool_server: LiveServer, body: dict[str, Any], words: str) -> None:
    status, answer = tool_server.post(CHAT, **ASKED | body)
    assert status == 400 and words in answer["error"]["message"]


@pytest.mark.breadth
def test_models_that_have_no_tools_or_write_calls_in_their_own_way(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    with live_server(tiny("llama")) as server:
        status, answer = server.post(CHAT, **ASKED)
        assert status == 400 and "its chat template has none" in answer["error"]["message"]
        assert answer["error"]["param"] == "tools"
    odd = tool_model(tiny("llama"), tmp_path / "odd", TEMPLATE.replace("tool_call>", "odd>"))
    with live_server(odd) as server:
        status, answer = server.post(CHAT, **ASKED)
        assert status == 400 and "--tool-call-parser (openai, glm45" in answer["error"]["message"]
        body = ASKED | {"tool_choice": "required", "parallel_tool_calls": False}
        _, answer = server.post(CHAT, **body)
        assert len(answer["choices"][0]["message"]["tool_calls"]) == 1
    with live_server(odd, tool_call_parser="hermes") as server:
        _, answer = server.post(CHAT, **ASKED, structured_outputs={"choice": [CALL]})
        assert answer["choices"][0]["finish_reason"] == "tool_calls"


def test_parsers_that_there_are_not() -> None:
    with pytest.raises(ConfigError, match=r"tool_call_parser must be one of openai, .* got 'x'"):
        ServerOptions(tool_call_parser="x")
    with pytest.raises(ConfigError, match="reasoning_parser must be one of"):
        ServerOptions(reasoning_parser="x")
