"""OpenAI's request bodies become prompts and SamplingParams; outputs become OpenAI's answers."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest

from nanoengine.errors import (
    InvalidParamsError,
    InvalidPromptError,
    PromptTooLongError,
    RequestError,
    TransferError,
)
from nanoengine.outputs import CompletionOutput, RequestOutput
from nanoengine.sampling_params import SamplingParams
from nanoengine.serving.openai_answers import chat_body, completion_body, error_body
from nanoengine.serving.openai_requests import (
    CHAT,
    COMPLETIONS,
    IGNORED,
    OWN,
    PARAMS,
    REFUSED,
    ChatRequest,
    CompletionRequest,
    read_request,
)

DEFAULTS = SamplingParams()
MESSAGES = [{"role": "user", "content": "Hi"}]


def completion(**body: Any) -> CompletionRequest:
    made = read_request(COMPLETIONS, {"prompt": "a"} | body, DEFAULTS)
    assert isinstance(made, CompletionRequest)
    return made


def chat(**body: Any) -> ChatRequest:
    made = read_request(CHAT, {"messages": MESSAGES} | body, DEFAULTS)
    assert isinstance(made, ChatRequest)
    return made


def test_every_key_has_one_meaning() -> None:
    assert set(PARAMS) <= {field.name for field in fields(SamplingParams)}
    groups = [*PARAMS, *IGNORED, *REFUSED, *(name for own in OWN.values() for name in own)]
    assert len(groups) == len(set(groups))


def test_keys_are_parameters_and_null_is_the_default() -> None:
    given = {"temperature": 0.5, "top_p": 0.9, "seed": 7, "stop": ["x"], "n": 2, "max_tokens": 5}
    made = completion(**given, logit_bias={"5": -100}, top_k=None, user="u", model="any")
    expected = SamplingParams(**given, logit_bias={5: -100.0})
    assert (made.params, made.num_completions) == (expected, 2)
    assert completion().params == DEFAULTS
    assert chat(temperature=0, max_completion_tokens=4).params.max_tokens == 4
    kept = read_request(COMPLETIONS, {"prompt": "a"}, SamplingParams(top_k=3))
    assert kept.params.top_k == 3


def test_a_chat_may_fill_the_context_and_a_completion_has_16_tokens() -> None:
    assert (chat().params.max_tokens, completion().params.max_tokens) == (None, 16)
    made = chat(chat_template_kwargs={"enable_thinking": False})
    assert (made.messages, made.template_kwargs) == (MESSAGES, {"enable_thinking": False})


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        ([1, 2], ([1, 2],)),
        (["a", "b"], ("a", "b")),
        ([[1], [2, 3]], ([1], [2, 3])),
    ],
)
def test_prompts_are_texts_ids_or_lists_of_them(prompt: Any, prompts: tuple[Any, ...]) -> None:
    made = completion(prompt=prompt, n=2)
    assert made.prompts == prompts and made.num_completions == 2 * len(prompts)


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], None, 5, [1, "a"], ["a", 1], {"a": 1}])
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidPromptError, match="prompt must be a text"):
        completion(prompt=prompt)


def test_too_many_texts_are_refused() -> None:
    with pytest.raises(InvalidPromptError, match="2 prompts with n=1024 are more than 1024"):
        completion(prompt=["a", "b"], n=1024)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_obeyed_is_refused_unless_it_asks_for_nothing(name: str) -> None:
    neutral, why = REFUSED[name]
    for value in (None, *neutral):
        assert chat(**{name: value}).params == chat().params
    with pytest.raises(InvalidParamsError, match=f"^{name}='some' is not supported: {why}"):
        chat(**{name: "some"})


@pytest.mark.parametrize(
    ("endpoint", "body", "text"),
    [
        (CHAT, {"temprature": 1}, "unknown key 'temprature'; did you mean 'temperature'?"),
        (CHAT, {"qqqqqqqq": 1}, "unknown key 'qqqqqqqq'"),
        (COMPLETIONS, {"messages": MESSAGES}, "unknown key 'messages'"),
        (COMPLETIONS, {"temperature": -1}, "temperature must be between 0 and 100, got -1"),
        (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "differ; give one"),
        (CHAT, {"messages": None}, 'needs "messages"'),
        (CHAT, {"logprobs": True}, "logprobs=True is not supported"),
        (COMPLETIONS, {"logprobs": 0}, "logprobs=0 is not supported"),  # which is not False
        ("/v1/chat/completion", {}, "did you mean /v1/chat/completions?"),
        ("/v1/embeddings", {}, "there is no endpoint '/v1/embeddings'"),
    ],
)
def test_what_is_wrong_is_named(endpoint: str, body: dict[str, Any], text: str) -> None:
    own = {"prompt": "a"} if endpoint == COMPLETIONS else {"messages": MESSAGES}
    with pytest.raises(RequestError, match=re.escape(text)):
        read_request(endpoint, own | body, DEFAULTS)


def test_a_body_is_an_object() -> None:
    with pytest.raises(InvalidPromptError, match="must be a JSON object, got"):
        read_request(CHAT, [MESSAGES], DEFAULTS)


def output(*texts: str) -> RequestOutput:
    made = [CompletionOutput(i, text, [1, 2], "stop") for i, text in enumerate(texts)]
    return RequestOutput(0, "p", [1, 2, 3], made, num_cached_tokens=2)


def test_answers_have_openais_form() -> None:
    body = chat_body("7", "m", output("a", "b"))
    assert body["id"] == "chatcmpl-7" and body["object"] == "chat.completion"
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert body["choices"][1] == {
        "index": 1,
        "message": {"role": "assistant", "content": "b", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
    }


def test_completions_are_numbered_over_all_prompts() -> None:
    body = completion_body("7", "m", [output("a", "b"), output("c", "d")])
    assert body["id"] == "cmpl-7" and body["object"] == "text_completion"
    assert [(c["index"], c["text"]) for c in body["choices"]] == [*enumerate("abcd")]
    assert body["usage"]["total_tokens"] == 14


def test_errors_have_openais_codes() -> None:
    for error, status, code in (
        (PromptTooLongError("x"), 400, "context_length_exceeded"),
        (InvalidParamsError("x"), 400, "invalid_value"),
        (InvalidPromptError("x"), 400, "invalid_prompt"),
        (RequestError("x"), 400, "invalid_request"),
        (TransferError("x"), 500, "server_error"),
    ):
        found, body = error_body(error)
        assert (found, body["error"]["code"], body["error"]["message"]) == (status, code, "x")
