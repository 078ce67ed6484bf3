"""/v1/responses: bodies become chats, outputs become answers and events."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest

from nanoengine.errors import InvalidParamsError, InvalidPromptError, RequestError
from nanoengine.outputs import CompletionOutput, Logprob, RequestOutput, StreamDelta
from nanoengine.sampling_params import SamplingParams
from nanoengine.serving.openai_answers import error_body
from nanoengine.serving.openai_keys import EMPTY, IGNORED, RESPONSES
from nanoengine.serving.openai_logprobs import ContentLogprobs
from nanoengine.serving.openai_requests import Streaming
from nanoengine.serving.responses_answers import ResponsesWriter
from nanoengine.serving.responses_requests import KNOWN, REFUSED, ResponsesRequest, read_responses
from nanoengine.text.answer_parser import ChatParsers

DEFAULTS = SamplingParams(top_k=7)
PIECES = {1: b" a", 2: b"b"}


def read(**body: Any) -> ResponsesRequest:
    return read_responses({"input": "Hi"} | body, DEFAULTS)


def test_every_key_has_one_meaning() -> None:
    groups = [*KNOWN, *REFUSED]
    assert len(groups) == len(set(groups)) and not set(REFUSED) & set(IGNORED)


def test_a_body_is_a_chat() -> None:
    made = read(max_output_tokens=9, temperature=0.5, stream=True, model="m", cache_salt="s")
    assert made.chat.messages == [{"role": "user", "content": "Hi"}]
    assert made.chat.params == SamplingParams(max_tokens=9, temperature=0.5, top_k=7)
    assert (made.chat.streaming, made.chat.model, made.chat.cache_salt) == (Streaming(), "m", "s")
    thinking = {"enable_thinking": False}
    assert read(chat_template_kwargs=thinking).chat.rendering.kwargs == thinking
    effort = read(reasoning={"effort": "none", "summary": "auto"})
    none = {"reasoning_effort": "none", "enable_thinking": False}
    assert effort.chat.rendering.kwargs == none and effort.repeated["reasoning"]["effort"] == "none"
    plain = read(store=True, include=["reasoning.encrypted_content"], instructions="")
    assert plain.chat == read().chat
    assert plain.chat.params.max_tokens is None and plain.chat.streaming is None


def test_input_is_messages_after_the_instructions() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}]
    made = read(
        instructions="Be brief",
        input=[
            {"role": "developer", "content": "c"},
            {"type": "message", "role": "assistant", "id": "msg_1", "content": parts},
        ],
    )
    assert made.chat.messages == [
        {"role": "system", "content": "Be brief"},
        {"role": "system", "content": "c"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
    ]


def test_log_probabilities_are_asked_for_in_two_ways() -> None:
    wanted = ["message.output_text.logprobs"]
    for body, number in (
        ({}, None),
        ({"top_logprobs": 0}, None),
        ({"include": wanted}, 0),
        ({"top_logprobs": 3}, 3),
        ({"include": wanted, "top_logprobs": 2}, 2),
    ):
        assert read(**body).chat.params.logprobs == number


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
        ({"think": False}, "unknown key 'think'; whether a model thinks, and how much, its chat"),
        ({"do_sample": False}, "unknown key 'do_sample'; temperature=0 takes the likeliest token"),
        ({"input": None}, "input must be a text or a list of messages, got None"),
        ({"input": []}, "input must be a text or a list of messages, got []"),
        ({"input": [5]}, "input[0] must be a message with a role and a content, got 5"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "got 'item_reference'; it may be a"),
        (
            {"input": [{"type": "function_call", "name": "f"}]},
            "needs the id and the name of",
        ),
        ({"input": [{"content": "a"}]}, "input[0] must be a message with a role"),
        (
            {"input": [{"type": "function_call_output", "output": "1"}]},
            "input[0] needs the id of the call that it answers",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            """input[0].content[0] must be {"type": "input_text", "text": "..."}, got {'type'""",
        ),
        ({"input": [{"role": "user"}]}, "input[0].content must be a text or a list of text parts"),
        ({"instructions": ["a"]}, "instructions must be a text, got ['a']"),
        ({"max_output_tokens": 0}, "max_output_tokens must be between 1 and"),
        ({"temperature": 1000}, "temperature must be between 0 and 100, got 1000"),
        ({"top_logprobs": 21}, "top_logprobs must be an integer from 0 to 20, got 21"),
        ({"include": "all"}, "include must be a list of names, got 'all'"),
        ({"max_tokens": 5}, "unknown key 'max_tokens'; here it is max_output_tokens"),
        ({"max_new_tokens": 5}, "unknown key 'max_new_tokens'; here it is max_output_tokens"),
        ({"n_probs": 5}, "unknown key 'n_probs'; here it is top_logprobs"),
        ({"repeat_penalty": 1.2}, "unknown key 'repeat_penalty'; here it is repetition_penalty"),
        ({"n": 2}, "unknown key 'n'; /v1/chat/completions has it"),
        (
            {"previous_response_id": "r"},
            "answers are not kept; send the whole conversation as input",
        ),
        ({"truncation": "auto"}, "not cut or made shorter; send a shorter input"),
        ({"background": True}, "answers are not kept; take a stream, or a connection that waits"),
        ({"prompt": {"id": "a"}}, "prompt={'id': 'a'} is not supported: answers are not kept"),
        ({"messages": []}, "unknown key 'messages'; /v1/chat/completions has it"),
        ({"instruction": "a"}, "unknown key 'instruction'; did you mean 'instructions'?"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError, match=re.escape(text)):
        read(**body)


def test_what_an_answer_repeats_is_not_deep() -> None:
    """What was read at the end of Python's stack cannot be written from a deeper place."""
    deep: list[Any] = []
    for _ in range(61):
        deep = [deep]
    assert read(metadata={"a": deep}).repeated["metadata"] == {"a": deep}
    with pytest.raises(InvalidParamsError, match=r"^metadata is nested too deeply .* 63 levels"):
        read(metadata={"a": [deep]})


def test_errors_name_their_key() -> None:
    for body, param in (
        ({"input": 5}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"instructions": 5}, "instructions"),
        ({"include": "all"}, "include"),
        ({"metadata": 5}, "metadata"),  # the answer repeats it, and must be a response
        ({"user": 5}, "user"),
    ):
        with pytest.raises((InvalidPromptError, InvalidParamsError)) as caught:
            read(**body)
        assert error_body(caught.value, RESPONSES)[1]["error"]["param"] == param


def scored(*tokens: int) -> list[dict[int, Logprob]]:
    return [{token: Logprob(-token, 1)} for token in tokens]


def output(reason: str = "stop") -> RequestOutput:
    made = CompletionOutput(0, " ab", [1, 2], reason, logprobs=scored(1, 2))
    return RequestOutput(0, "p", [1, 2, 3], [made], num_cached_tokens=2)


def writer(**body: Any) -> ResponsesWriter:
    return ResponsesWriter(read(**body), "7", "m", PIECES.__getitem__, ChatParsers())


def test_an_answer_has_one_message() -> None:
    made = writer(instructions="Be brief", metadata={"a": "b"}, temperature=0.5)
    body = made.whole([output()])
    assert (body["id"], body["object"], body["status"]) == ("resp_7", "response", "completed")
    assert (body["instructions"], body["metadata"]) == ("Be brief", {"a": "b"})
    assert (body["temperature"], body["incomplete_details"]) == (0.5, None)
    (message,) = body["output"]
    assert (message["id"], message["role"], message["status"]) == (
        "msg_7",
        "assistant",
        "completed",
    )
    (part,) = message["content"]
    assert (part["type"], part["text"]) == ("output_text", " ab")
    assert [each["bytes"] for each in part["logprobs"]] == [[32, 97], [98]]
    assert body["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 5,
    }
    cut = made.whole([output("length")])
    assert (cut["status"], cut["output"][0]["status"]) == ("incomplete", "incomplete")
    assert cut["incomplete_details"] == {"reason": "max_output_tokens"}


def test_tokens_that_are_not_shown_as_they_are_move_no_others() -> None:
    """An answer may begin without the space of its first token, and without special tokens."""
    tokens = [b"<s>", b" a", b"<s>", b"b", b" c"]
    entries = [{"token": number} for number in range(len(tokens))]
    scores = ContentLogprobs(tokens.__getitem__, hidden={0, 2})
    scores.add(CompletionOutput(0, "ab c", [*range(len(tokens))], "stop"), entries)
    found = [scores.between(start, end) for start, end in ((0, 1), (1, 2), (3, 4))]
    assert found == [entries[:2], entries[2:4], entries[4:]]


def test_each_byte_of_a_broken_character_may_be_shown() -> None:
    """As vocabularies with tokens of single bytes do. Those of several show one for all."""
    tokens = [b"t", b"\xe2", b"\x82", b"a", b"\x82", b"b"]
    entries = [{"token": number} for number in range(len(tokens))]
    for text, ends in (("t\ufffd\ufffda\ufffdb", (0, 1, 4, 6)), ("t\ufffda\ufffdb", (0, 1, 3, 5))):
        scores = ContentLogprobs(tokens.__getitem__)
        scores.add(CompletionOutput(0, text, [*range(len(tokens))], "stop"), entries)
        found = [scores.between(*each) for each in pairwise(ends)]
        assert found == [entries[:1], entries[1:4], entries[4:]]


def test_tokens_that_are_not_shown_are_not_taken_for_text_that_begins_like_them() -> None:
    """Where little of the text has come, and where a character was left without its end."""
    tokens = {0: b"<s>", 1: b"<", 2: b"b", 3: b"\xd6", 4: b"c"}
    parts = [("", 0), ("<", 1), ("b", 2), ("", 3), ("", 0), ("\ufffdc", 4), ("<", 1), ("b", 2)]
    parsers = ChatParsers(special_tokens={"<s>": 0})
    asked = read(include=["message.output_text.logprobs"])
    made = ResponsesWriter(asked, "7", "m", tokens.__getitem__, parsers)
    events = made.begin(output(), 0)
    for text, token in parts:
        delta = StreamDelta(0, 0, text, (token,), logprobs=tuple(scored(token)))
        events += made.of([delta], 0)
    logprobs = [data["logprobs"] for name, data in events if name == "response.output_text.delta"]
    found = [[-entry["logprob"] for entry in entries] for entries in logprobs]
    assert found == [[0, 1], [2], [3, 0, 4], [1], [2]]


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_stream_ends_with_the_answer(reason: str) -> None:
    made = writer(top_logprobs=1)
    deltas = [
        StreamDelta(0, 0, " ", (1,), logprobs=tuple(scored(1))),
        StreamDelta(0, 0, "ab", (2,), reason, logprobs=tuple(scored(2))),
    ]
    events = made.begin(output(), 0)
    for delta in deltas:
        events += made.of([delta], 0)
    events += made.end([output(reason)])
    whole = writer(top_logprobs=1).whole([output(reason)])

    assert [name for name, _ in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed" if reason == "stop" else "response.incomplete",
    ]
    assert [data["sequence_number"] for _, data in events] == list(range(10))
    assert all(data["type"] == name for name, data in events)
    data = [data for _, data in events]
    assert data[0]["response"]["status"] == "in_progress" and data[0]["response"]["output"] == []
    assert "".join(each["delta"] for each in data[4:6]) == data[6]["text"] == " ab"
    assert [*data[4]["logprobs"], *data[5]["logprobs"]] == data[6]["logprobs"]
    assert data[7]["part"] == whole["output"][0]["content"][0] == data[8]["item"]["content"][0]
    for response in (data[9]["response"], whole):
        del response["created_at"], response["completed_at"]
    assert data[9]["response"] == whole


def test_held_back_text_makes_no_event() -> None:
    assert writer().of([StreamDelta(0, 0, "", (1,))], 0) == []


@pytest.mark.parametrize("code", ["server_error", "queue_timeout"])
@pytest.mark.parametrize("is_begun", [True, False])
def test_a_stream_that_fails_ends_with_the_response(is_begun: bool, code: str) -> None:
    made, events = writer(), []
    if is_begun:
        events += made.begin(output(), 0) + made.of([StreamDelta(0, 0, "ab", (1,))], 0)
    error = {"message": "no", "type": "server_error", "param": None, "code": code}
    events += made.failed(503, {"error": error})
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert [name for name, _ in events[:2]] == ["response.created", "response.in_progress"]
    name, data = events[-1]
    response = data["response"]
    assert name == data["type"] == "response.failed" and response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "no"}  # of OpenAI's codes
    said = [(each["status"], each["content"][0]["text"]) for each in response["output"]]
    assert said == ([("incomplete", "ab")] if is_begun else [])
