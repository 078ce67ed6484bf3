"""/v1/messages: Anthropic's bodies become chats, outputs become its answers and events."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from typing import Any

import pytest

from nanoengine.errors import InvalidParamsError, RequestError
from nanoengine.outputs import CompletionOutput, RequestOutput, StreamDelta
from nanoengine.sampling_params import SamplingParams
from nanoengine.serving.messages_answers import MessagesWriter, count_body, messages_error
from nanoengine.serving.messages_requests import KNOWN, REFUSED, read_count, read_messages
from nanoengine.serving.openai_answers import error_body
from nanoengine.serving.openai_keys import EMPTY, IGNORED
from nanoengine.serving.openai_requests import ChatRequest, Streaming
from nanoengine.text.answer_parser import ChatParsers
from nanoengine.text.reasoning import BY_NAME as REASONING
from nanoengine.text.tool_syntax import BY_NAME

DEFAULTS = SamplingParams(top_k=7)
USE = {"type": "tool_use", "id": "c", "name": "now", "input": {}}
ASKED = [{"role": "user", "content": "Hi"}]
TEXT = {"type": "text", "text": "said"}


def read(**body: Any) -> ChatRequest:
    return read_messages({"messages": ASKED, "max_tokens": 9} | body, DEFAULTS)


def count(**body: Any) -> ChatRequest:
    return read_count({"messages": ASKED} | body, DEFAULTS)


def test_every_key_has_one_meaning() -> None:
    groups = [*KNOWN, *REFUSED]
    assert len(groups) == len(set(groups)) and not set(REFUSED) & set(IGNORED)


def test_a_body_is_a_chat() -> None:
    made = read(temperature=0.5, stop_sequences=["x"], stream=True, model="m", metadata={})
    assert made.messages == ASKED
    assert made.params == SamplingParams(max_tokens=9, temperature=0.5, top_k=7, stop=["x"])
    assert (made.streaming, made.model) == (Streaming(), "m")
    thinking = {"enable_thinking": False}
    for made in (read(chat_template_kwargs=thinking), count(chat_template_kwargs=thinking)):
        assert made.rendering.kwargs == thinking
    assert read().params == SamplingParams(max_tokens=9, top_k=7) and read().streaming is None


def test_the_system_text_comes_first_and_blocks_are_texts() -> None:
    blocks = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]
    parts = [{"type": "text", "text": "a"}]
    for system, content in (("Be brief", "Be brief"), (blocks, parts)):
        made = read(system=system, messages=[{"role": "user", "content": blocks}])
        assert made.messages == [
            {"role": "system", "content": content},
            {"role": "user", "content": parts},
        ]
    assert read(system="").messages == ASKED


def talk(*turns: tuple[str, Any]) -> list[Any]:
    return [{"role": role, "content": content} for role, content in turns]


def texts(*parts: str) -> list[Any]:
    return [{"type": "text", "text": text} for text in parts]


def test_turns_of_one_role_are_one() -> None:
    result = {"type": "tool_result", "tool_use_id": "c", "content": "noon"}
    thoughts = {"type": "thinking", "thinking": "hm", "signature": ""}
    asked = talk(
        *(("user", "a"), ("user", texts("b", "c"))),
        *(("assistant", [thoughts, *texts("d")]), ("assistant", [USE])),
        *(("user", "e"), ("user", [result])),
        *(("assistant", "f"), ("user", "g")),
    )
    function = {"name": "now", "arguments": "{}"}
    assert read(messages=asked).messages == [
        {"role": "user", "content": texts("a", "b", "c")},
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": texts("d"),
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "noon"},
        {"role": "user", "content": "e"},
        {"role": "assistant", "content": "f"},
        {"role": "user", "content": "g"},
    ]


@pytest.mark.parametrize("kind", ["redacted_thinking", "thinking"])
def test_an_answer_of_thoughts_alone_says_nothing(kind: str) -> None:
    block = {"type": kind, "data": "x", "thinking": "hm"}
    messages = read(messages=talk(("user", "a"), ("assistant", [block]), ("user", "b"))).messages
    thoughts = {"reasoning_content": "hm"} if kind == "thinking" else {}
    assert messages[1] == {"role": "assistant", "content": ""} | thoughts
    twice = talk(("user", "a"), ("assistant", [block]), ("assistant", [block]), ("user", "b"))
    assert read(messages=twice).messages[1]["content"] == ""
    more = talk(("user", "a"), ("assistant", [block]), ("assistant", "c"), ("user", "b"))
    made = read(messages=more).messages[1]
    assert made == {"role": "assistant", "content": texts("c")} | thoughts


def test_an_answer_goes_on_with_the_assistants_last_message() -> None:
    said = {"role": "assistant", "content": "He"}
    made = read(messages=[*ASKED, said])
    assert made.messages[-1] == said
    rendering = made.rendering
    assert (rendering.add_generation_prompt, rendering.continue_final_message) == (False, True)
    assert read().rendering.add_generation_prompt and not read().rendering.continue_final_message


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_obeyed_is_refused_unless_it_asks_for_nothing(name: str) -> None:
    neutral, why = REFUSED[name]
    for value in (None, *EMPTY, *neutral):
        assert read(**{name: value}) == read()
    with pytest.raises(InvalidParamsError, match=f"^{name}='some' is not supported: {why}"):
        read(**{name: "some"})


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"max_tokens": None}, "max_tokens is required"),
        ({"max_tokens": 0}, "max_tokens must be between 1 and"),
        ({"think": False}, "unknown key 'think'; whether a model thinks, and how much, its chat"),
        ({"do_sample": False}, "unknown key 'do_sample'; temperature=0 takes the likeliest token"),
        ({"temperature": 1.5}, "temperature must be a number from 0 to 1, got 1.5"),
        ({"temperature": "hot"}, "temperature must be a number from 0 to 1, got 'hot'"),
        ({"stop_sequences": [""]}, "stop_sequences must be a non-empty string or a list"),
        ({"stop_sequences": ["x" * 1001]}, "stop_sequences holds a text of 1001 characters"),
        ({"stop_sequences": ["x"] * 65}, "stop_sequences: at most 64 strings, got 65"),
        ({"messages": []}, "messages must be a list of messages, got []"),
        ({"messages": [5]}, "messages[0] must have a role, user or assistant, got 5"),
        ({"messages": [{"role": "tool"}]}, "messages[0] must have a role, user or assistant"),
        (
            {"messages": [*ASKED, {"role": "assistant", "content": [USE]}]},
            "the last message calls tools: send their results after it, or a message of the user",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            """messages[0].content[0] must be {"type": "text", "text": "..."}, got {'type': 'im""",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            """messages[0].content[0] must be {"type": "text", "text": "..."}, got {'type'""",
        ),
        ({"messages": [{"role": "assistant", "content": []}]}, "messages[0].content must be a"),
        ({"messages": [{"role": "user"}]}, "messages[0].content must be a text or a list"),
        ({"system": [{"type": "image"}]}, "system[0] must be {"),
        ({"stop": "x"}, "unknown key 'stop'; here it is stop_sequences"),
        ({"stop_words": "x"}, "unknown key 'stop_words'; here it is stop_sequences"),
        ({"n": 2}, "unknown key 'n'; /v1/chat/completions has it"),
        ({"min_p": 0.1}, "unknown key 'min_p'; /v1/chat/completions has it"),
        ({"repeat_penalty": 1.2}, "; /v1/chat/completions has it, as repetition_penalty"),
        ({"response_format": {"type": "json"}}, "; here it is output_config={'format': ...}"),
        ({"guided_regex": "a"}, 'completions has it, as structured_outputs={"regex": pattern}'),
        ({"reasoning_max_tokens": 5}, "; here it is thinking={'budget_tokens': ...}"),
        ({"echo": True}, "unknown key 'echo'; log-probabilities of prompts: /v1/completions, echo"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError, match=re.escape(text)):
        read(**body)


def test_counting_needs_no_limit() -> None:
    asked = count(system="Be brief", model="m")
    assert asked.messages == read(system="Be brief").messages and asked.model == "m"
    assert count_body(5) == {"input_tokens": 5}


def output(reason: str = "stop", stop: int | str | None = None) -> RequestOutput:
    made = CompletionOutput(0, "ab", [1, 2], reason, stop)
    return RequestOutput(0, "p", [1, 2, 3], [made], num_cached_tokens=2)


def test_an_answer_is_a_message() -> None:
    assert MessagesWriter(read(), "7", "m", ChatParsers()).whole([output()]) == {
        "id": "msg_7",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "ab"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 1,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": 2,
        },
    }


@pytest.mark.parametrize(
    ("made", "max_tokens", "reason", "sequence"),
    [
        (output("stop", 5), 9, "end_turn", None),
        (output("stop", "x"), 9, "stop_sequence", "x"),
        (output("length"), 2, "max_tokens", None),
        (output("length"), 9, "model_context_window_exceeded", None),
    ],
)
def test_why_a_text_ended(
    made: RequestOutput, max_tokens: int, reason: str, sequence: str | None
) -> None:
    body = MessagesWriter(read(max_tokens=max_tokens), "7", "m", ChatParsers()).whole([made])
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)


def test_the_events_of_a_stream_are_the_answer() -> None:
    made = MessagesWriter(read(), "7", "m", ChatParsers())
    before = RequestOutput(0, "p", [1, 2, 3], [], finished=False)
    events = made.begin(before, 0)
    for delta in (StreamDelta(0, 0, "", (1,)), StreamDelta(0, 0, "ab", (2,), "stop")):
        events += made.of([delta], 0)
    events += made.end([output()])
    assert [name for name, _ in events] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert all(data["type"] == name for name, data in events)
    data = [data for _, data in events]
    whole = made.whole([output()])
    assert data[0]["message"]["usage"]["input_tokens"] == 3
    assert data[3]["delta"]["text"] == whole["content"][0]["text"]
    assert data[5]["usage"] == whole["usage"]
    assert data[0]["message"] | data[5]["delta"] == whole | {
        "content": [],
        "usage": data[0]["message"]["usage"],
    }


def test_thoughts_are_signed() -> None:
    """Just before they end: clients send back what is signed."""
    parsers = ChatParsers(reasoning=REASONING["deepseek_r1"])
    made = MessagesWriter(read(), "7", "m", parsers)
    text = "<think>hm</think>yes"
    before = RequestOutput(0, "p", [1, 2, 3], [], finished=False)
    events = made.begin(before, 0)[2:] + made.of([StreamDelta(0, 0, text, (1,), "stop")], 0)
    names = [data.get("delta", data)["type"] for _, data in events]
    signed = ["content_block_start", "thinking_delta", "signature_delta", "content_block_stop"]
    assert names == [*signed, "content_block_start", "text_delta", "content_block_stop"]
    assert events[0][1]["content_block"]["signature"] == ""
    whole = replace(output(), outputs=[replace(output().outputs[0], text=text)])
    assert all(data["delta"]["signature"] for _, data in events[2:3])
    assert made.whole([whole])["content"][0]["signature"]


@pytest.mark.parametrize(
    "arguments",
    ['{"a": "b"}', '{"a": broken}', '{"a": "line\nbreak"}', "{'a': 1}", '{"a": "xy'],
)
def test_a_streamed_call_is_the_whole_one(arguments: str) -> None:
    """And an object of JSON, without which Anthropic's client raises."""
    parsers = ChatParsers(BY_NAME["hermes"], shows_tools=True)
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    made = MessagesWriter(read(tools=tools), "7", "m", parsers)
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    made.begin(RequestOutput(0, "p", [1, 2, 3], [], finished=False), 0)
    events = made.of([StreamDelta(0, 0, text, (1,), "stop")], 0)
    (whole,) = made.whole([replace(output(), outputs=[replace(output().outputs[0], text=text)])])[
        "content"
    ]
    streamed = [json.loads(data["delta"]["partial_json"]) for _, data in events[1:-1]]
    assert streamed == [whole["input"]]


KEPT = {"type": "clear_thinking_20251015", "keep": "all"}


@pytest.mark.parametrize("reader", [read_messages, read_count])
@pytest.mark.parametrize("managed", [{}, {"edits": []}, {"edits": [KEPT, KEPT]}])
def test_a_context_that_is_kept_whole_passes(managed: Any, reader: Any) -> None:
    """As Claude Code asks for it."""
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}
    assert reader(body | {"context_management": managed}, SamplingParams()).messages


@pytest.mark.parametrize(
    "managed",
    [
        {"edits": [KEPT | {"keep": {"value": 1}}]},
        {"edits": [KEPT | {"type": "clear_tool_uses_20250919"}]},
        {"edits": ["a"]},
        {"edits": [KEPT], "compact": True},
    ],
)
def test_one_that_is_to_be_cut_does_not(managed: Any) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}
    with pytest.raises(InvalidParamsError, match=r"context_management.*not cut or made shorter"):
        read_messages(body | {"context_management": managed}, SamplingParams())


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_errors_have_anthropics_types(status: int, kind: str) -> None:
    body = {"error": {"message": "no", "type": "server_error", "param": None, "code": "c"}}
    assert messages_error(status, body)["error"] == {"type": kind, "message": "no"}


def test_a_client_is_told_that_conversations_are_not_kept() -> None:
    """In the form by which Anthropic's runner of tools sends them whole."""
    with pytest.raises(InvalidParamsError) as caught:
        read(thread={"type": "create"})
    told = messages_error(*error_body(caught.value))["error"]
    assert told["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }
    with pytest.raises(InvalidParamsError) as caught:
        read(container="a")
    assert "details" not in messages_error(*error_body(caught.value))["error"]


def test_an_error_in_a_stream_is_an_event() -> None:
    """Of the type that it has as a status."""
    for status in (400, 500, 503):
        body = {"error": {"message": "no", "type": "x", "param": None, "code": "c"}}
        ((name, data),) = MessagesWriter(read(), "7", "m", ChatParsers()).failed(status, body)
        assert (name, data) == ("error", messages_error(status, body))


def test_many_messages_of_one_role_take_no_time_each() -> None:
    """A body may have half a million; joined one by one, 200,000 would copy 160 GB."""
    begun = time.process_time()
    (user, assistant, last) = read(
        messages=[
            *talk(*[("user", "a")] * 200_000),
            *talk(("assistant", [{"type": "thinking", "thinking": "ab"}] * 200_000 + [TEXT])),
            *talk(("user", "b")),
        ]
    ).messages
    assert time.process_time() - begun < 5
    assert len(user["content"]) == 200_000 and last["content"] == "b"
    assert assistant == {
        "role": "assistant",
        "reasoning_content": "ab" * 200_000,
        "content": [TEXT],
    }
