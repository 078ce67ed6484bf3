"""What we send has the form that the official clients' types have, without keys they do not know.

Skipped without the packages `openai` and `anthropic`, which only the tests of clients install.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from nanoengine.api.outputs_so_far import OutputsSoFar
from nanoengine.outputs import Logprob, RequestOutput, StreamDelta
from nanoengine.sampling_params import SamplingParams
from nanoengine.serving.messages_answers import MessagesWriter, count_body, messages_error
from nanoengine.serving.messages_requests import read_messages
from nanoengine.serving.openai_chunks import ChatChunks, CompletionChunks
from nanoengine.serving.openai_keys import CHAT, COMPLETIONS
from nanoengine.serving.openai_requests import ChatRequest, CompletionRequest, read_request
from nanoengine.serving.responses_answers import ResponsesWriter
from nanoengine.serving.responses_requests import read_responses
from nanoengine.text.answer_parser import ChatParsers

openai_types = pytest.importorskip("openai.types")
openai_chat = pytest.importorskip("openai.types.chat")
openai_responses = pytest.importorskip("openai.types.responses")
anthropic_types = pytest.importorskip("anthropic.types")
pydantic = pytest.importorskip("pydantic")

MESSAGES = [{"role": "user", "content": "Hi"}]
OF_VLLM = {"stop_reason", "reasoning", "reasoning_content"}
PIECES = {1: b" a", 2: b"b"}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def fits(kind: Any, data: dict[str, Any]) -> Any:
    """The data as the client's record. Raises if a value has another type or a key is unknown, but
    for those that vLLM's answers have, too.
    """
    made = checker(kind).validate_python(data, strict=True)
    assert {*unknown_keys(made)} <= OF_VLLM, data
    return made


@functools.cache
def checker(kind: Any) -> Any:
    """Made once for each type, which takes a while."""
    return pydantic.TypeAdapter(kind)


def unknown_keys(value: Any) -> list[str]:
    """Keys that the client's types do not have, at any depth."""
    if isinstance(value, pydantic.BaseModel):
        inner = [unknown_keys(getattr(value, name)) for name in type(value).model_fields]
        return [*(value.model_extra or {}), *(name for names in inner for name in names)]
    if isinstance(value, list):
        return [name for each in value for name in unknown_keys(each)]
    return []


def scored(*tokens: int) -> list[dict[int, Logprob]]:
    return [{token: Logprob(-float(token), 1)} for token in tokens]


def deltas(index: int = 0, reason: str = "stop", with_logprobs: bool = True) -> list[StreamDelta]:
    rows = [tuple(scored(token)) if with_logprobs else None for token in (1, 2)]
    return [
        StreamDelta(0, index, " a", (1,), logprobs=rows[0]),
        StreamDelta(0, index, "b", (2,), reason, logprobs=rows[1]),
    ]


def output(made: list[StreamDelta]) -> RequestOutput:
    outputs = OutputsSoFar(made).outputs()
    scores = None if made[0].logprobs is None else [None, *scored(2)]
    return RequestOutput(0, "p", [1, 2], outputs, num_cached_tokens=1, prompt_logprobs=scores)


@pytest.mark.parametrize("with_logprobs", [False, True])
def test_chats(with_logprobs: bool) -> None:
    asked = {"logprobs": True, "top_logprobs": 1} if with_logprobs else {}
    body = {"messages": MESSAGES, "n": 2} | STREAM | asked
    request = read_request(CHAT, body, SamplingParams())
    assert isinstance(request, ChatRequest)
    parts = [deltas(i, with_logprobs=with_logprobs) for i in range(2)]
    given = request, "7", "m", PIECES.__getitem__, ChatParsers()
    whole = output([*parts[0], *parts[1]])
    writer = ChatChunks(*given)
    fits(openai_chat.ChatCompletion, writer.whole([whole]))
    events = writer.of(parts[0], 0) + writer.of(parts[1], 0) + writer.end([whole])
    for _, chunk in events:
        fits(openai_chat.ChatCompletionChunk, chunk)


@pytest.mark.parametrize("with_logprobs", [False, True])
def test_completions(with_logprobs: bool) -> None:
    """Where OpenAI's own answers break its types, ours do: no reason in a chunk that is not the
    last, and no log-probability of a prompt's first token.
    """
    asked = {"logprobs": 1} if with_logprobs else {}
    body = {"prompt": "p", "echo": True} | STREAM | asked
    request = read_request(COMPLETIONS, body, SamplingParams())
    assert isinstance(request, CompletionRequest)
    made = deltas(with_logprobs=with_logprobs)
    whole = output(made)
    writer = CompletionChunks(request, "7", "m", PIECES.__getitem__)
    events = writer.begin(whole, 0) + writer.of(made, 0) + writer.end([whole])
    for answer in [writer.whole([whole]), *(chunk for _, chunk in events)]:
        for choice in answer["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
            for name in ("token_logprobs", "top_logprobs") if choice["logprobs"] else ():
                row = choice["logprobs"][name]
                choice["logprobs"][name] = row[1:] if row[0] is None else row
        fits(openai_types.Completion, answer)


@pytest.mark.parametrize(("reason", "asked"), [("stop", {}), ("length", {"top_logprobs": 1})])
def test_responses(reason: str, asked: dict[str, Any]) -> None:
    body = {"input": "Hi", "instructions": "Be brief", "metadata": {"a": "b"}, "user": "u"}
    request = read_responses(body | asked, SamplingParams(max_tokens=5))
    made = deltas(reason=reason, with_logprobs=bool(asked))
    whole = output(made)
    writer = ResponsesWriter(request, "7", "m", PIECES.__getitem__, ChatParsers())
    answer = fits(openai_responses.Response, writer.whole([whole]))
    assert answer.output_text == " ab"
    error = {"message": "no", "type": "server_error", "param": None, "code": "server_error"}
    events = writer.begin(whole, 0) + writer.of(made, 0) + writer.end([whole])
    for name, data in [*events, *writer.failed(500, {"error": error})]:
        assert fits(openai_responses.ResponseStreamEvent, data).type == name


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_messages(reason: str) -> None:
    request = read_messages({"messages": MESSAGES, "max_tokens": 9}, SamplingParams())
    made = deltas(reason=reason, with_logprobs=False)
    whole = output(made)
    writer = MessagesWriter(request, "7", "m", ChatParsers())
    fits(anthropic_types.Message, writer.whole([whole]))
    for name, data in writer.begin(whole, 0) + writer.of(made, 0) + writer.end([whole]):
        if name != "ping":  # the client drops it by its name
            assert fits(anthropic_types.RawMessageStreamEvent, data).type == name
    fits(anthropic_types.MessageTokensCount, count_body(5))
    body = {"error": {"message": "no", "type": "server_error", "param": None, "code": "c"}}
    for status in (400, 401, 403, 404, 429, 500, 503):
        fits(anthropic_types.ErrorResponse, messages_error(status, body))
