"""OpenAI's request bodies become prompts and SamplingParams; outputs become OpenAI's answers."""

from __future__ import annotations

import math
import re
from dataclasses import fields, replace
from typing import Any

import pytest

from nanoengine.errors import (
    InvalidParamsError,
    InvalidPromptError,
    PromptTooLongError,
    RequestError,
    TransferError,
)
from nanoengine.outputs import CompletionOutput, Logprob, RequestOutput
from nanoengine.sampling_params import SamplingParams
from nanoengine.serving.openai_answers import error_body
from nanoengine.serving.openai_chunks import ChatChunks, CompletionChunks
from nanoengine.serving.openai_keys import (
    CHAT,
    COMMON,
    COMPLETIONS,
    EMPTY,
    IGNORED,
    OWN,
    PARAMS,
    REFUSED,
)
from nanoengine.serving.openai_requests import (
    MAX_BIASES,
    ChatRequest,
    CompletionRequest,
    Streaming,
    read_request,
)
from nanoengine.text.answer_parser import ChatParsers

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
    own = (name for names in OWN.values() for name in names)
    groups = [*PARAMS, *COMMON, *IGNORED, *REFUSED, *own]
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
    assert (made.messages, made.rendering.kwargs) == (MESSAGES, {"enable_thinking": False})


def test_an_effort_is_a_variable_of_the_template() -> None:
    """As vLLM passes it on; what chat_template_kwargs says goes before."""
    low = {"reasoning_effort": "low", "enable_thinking": True}
    assert chat(reasoning_effort="low").rendering.kwargs == low
    assert chat(reasoning_effort=None).rendering.kwargs is None
    none = {"reasoning_effort": "none", "enable_thinking": False}
    assert chat(reasoning_effort="none").rendering.kwargs == none
    off = {"enable_thinking": False}
    assert chat(reasoning_effort="low", chat_template_kwargs=off).rendering.kwargs == low | off
    with pytest.raises(InvalidParamsError, match=r"reasoning_effort must be none, .*got 'lo'"):
        chat(reasoning_effort="lo")


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        (["", "a"], ("", "a")),
        ([1, 2], ([1, 2],)),
        (["a", "b"], ("a", "b")),
        ([[1], [2, 3]], ([1], [2, 3])),
    ],
)
def test_prompts_are_texts_ids_or_lists_of_them(prompt: Any, prompts: tuple[Any, ...]) -> None:
    made = completion(prompt=prompt, n=2)
    assert made.prompts == prompts and made.num_completions == 2 * len(prompts)


@pytest.mark.parametrize("prompt", [[], [[]], None, 5, [1, "a"], ["a", 1], {"a": 1}])
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidPromptError, match="prompt must be a text"):
        completion(prompt=prompt)


def test_too_many_texts_are_refused() -> None:
    with pytest.raises(InvalidPromptError, match="2 prompts with n=1024 are more than 1024"):
        completion(prompt=["a", "b"], n=1024)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_obeyed_is_refused_unless_it_asks_for_nothing(name: str) -> None:
    neutral, why = REFUSED[name]
    for value in (None, *EMPTY, *neutral):
        assert chat(**{name: value}).params == chat().params
    with pytest.raises(InvalidParamsError, match=f"^{name}='some' is not supported: {why}"):
        chat(**{name: "some"})


@pytest.mark.parametrize(
    ("endpoint", "body", "text"),
    [
        (CHAT, {"temprature": 1}, "unknown key 'temprature'; did you mean 'temperature'?"),
        (CHAT, {"qqqqqqqq": 1}, "unknown key 'qqqqqqqq'"),
        (COMPLETIONS, {"messages": MESSAGES}, "'messages'; /v1/chat/completions has it"),
        (CHAT, {"prompt": "a"}, "unknown key 'prompt'; /v1/completions has it"),
        (CHAT, {"add_special_tokens": True}, "a chat has the special tokens of its template"),
        (CHAT, {"think": False}, "think=False is not supported: a template that has it"),
        (COMPLETIONS, {"best_of": True}, "best_of=True is not supported: answers are not"),
        (COMPLETIONS, {"temperature": -1}, "temperature must be between 0 and 100, got -1"),
        (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "differ; give one"),
        (CHAT, {"max_completion_tokens": -1}, "max_completion_tokens must be between 1 and"),
        (CHAT, {"messages": None}, 'needs "messages"'),
        (CHAT, {"logprobs": 5}, "logprobs of a chat must be true or false, got 5; top_logprobs"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs=2 needs logprobs=true"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "an integer from 0 to 20, got 21"),
        (CHAT, {"logprobs": True, "top_logprobs": True}, "an integer from 0 to 20, got True"),
        (COMPLETIONS, {"logprobs": True}, "logprobs must be an integer"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs must be between 0 and 20, got 21"),
        (COMPLETIONS, {"top_logprobs": 1}, "unknown key 'top_logprobs'; here it is logprobs"),
        (
            CHAT,
            {"echo": True},
            "; log-probabilities of prompts: /v1/completions, echo and logprobs",
        ),
        (
            CHAT,
            {"return_ppl": True},
            "; log-probabilities of prompts: /v1/completions, echo and logprobs",
        ),
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


def test_logprobs_are_a_number_in_a_completion_and_two_keys_in_a_chat() -> None:
    assert [completion(**body).params.logprobs for body in ({}, {"logprobs": 0})] == [None, 0]
    assert completion(logprobs=5).params.logprobs == 5
    for body, wanted in (
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": None, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ):
        assert chat(**body).params.logprobs == wanted


def test_streams_salts_and_models_are_kept() -> None:
    whole = chat()
    assert (whole.streaming, whole.cache_salt, whole.model) == (None, None, None)
    for read in (chat, completion):
        made = read(stream=True, cache_salt="a", model="m", max_completion_tokens=7)
        assert (made.streaming, made.cache_salt, made.model) == (Streaming(), "a", "m")
        assert made.params.max_tokens == 7
        assert read(stream=False).streaming is None
    options = {"include_usage": True, "include_obfuscation": False}
    assert chat(stream=True, stream_options=options).streaming == Streaming(include_usage=True)
    options = {"continuous_usage_stats": True}
    assert chat(stream=True, stream_options=options).streaming == Streaming(continuous_usage=True)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"stream": 1}, "stream must be true or false, got 1"),
        ({"stream_options": {"include_usage": True}}, "stream_options needs stream=true"),
        ({"stream": True, "stream_options": 5}, "stream_options must be an object, got 5"),
        (
            {"stream": True, "stream_options": {"include_usag": True}},
            "unknown key 'include_usag' of stream_options; did you mean 'include_usage'?",
        ),
        (
            {"stream": True, "stream_options": {"include_usage": "yes"}},
            "include_usage must be true or false, got 'yes'",
        ),
        ({"cache_salt": ""}, "cache_salt must be a text that is not empty, got ''"),
        ({"model": 5}, "model must be a text that is not empty, got 5"),
        ({"echo": "yes"}, "echo must be true or false, got 'yes'"),
        ({"max_tokens": 0}, "max_tokens must be between 1 and"),
        ({"max_tokens": False, "echo": True}, "max_tokens must be an integer, got False"),
        (
            {"logit_bias": {str(i): 1 for i in range(MAX_BIASES + 1)}},
            "logit_bias names 1025 tokens, and may name 1024",
        ),
        ({"logit_bias": [[0, 1]] * 1025}, "logit_bias names 1025 tokens, and may name 1024"),
        ({"stop": "x" * 1001}, "stop holds a text of 1001 characters; the limit is 1000"),
        ({"bad_words": ["x" * 1001]}, "bad_words holds a text of 1001 characters"),
    ],
)
def test_what_is_wrong_in_a_completion_is_named(body: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParamsError, match=re.escape(text)):
        completion(**body)


def test_a_developers_message_is_a_systems() -> None:
    said = [{"role": "developer", "content": "Be brief"}, *MESSAGES]
    assert chat(messages=said).messages == [{"role": "system", "content": "Be brief"}, *MESSAGES]
    assert said[0]["role"] == "developer"
    for odd in (5, "Hi", [5]):
        assert chat(messages=odd).messages == odd  # the chat template says what is wrong


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"chat_template": "{{ x }}"}, "may not hold 'chat_template'; it may: enable_thinking, "),
        ({"tokenize": True}, "may not hold 'tokenize'"),
        ({"bos_token": ""}, "may not hold 'bos_token'"),
        (
            {"enable_thinkin": True},
            "may not hold 'enable_thinkin'; did you mean 'enable_thinking'?",
        ),
        ([], "chat_template_kwargs must be an object, got []"),
    ],
)
def test_template_variables_are_those_of_models(given: Any, text: str) -> None:
    with pytest.raises(InvalidParamsError, match=re.escape(text)):
        chat(chat_template_kwargs=given)


# Bodies as clients send them; what they leave out is OpenAI's own.
CLIENTS: dict[str, dict[str, Any]] = {
    "vllm bench serve": {
        "repetition_penalty": 1.0,
        "max_tokens": 8,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    },
    "guidellm": {"max_tokens": 8, "max_completion_tokens": 8, "ignore_eos": True, "stop": None},
    "lm-eval": {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True},
    "SillyTavern": {
        "best_of": 1,
        "echo": False,
        "logit_bias": {},
        "stop": [],
        "suffix": "",
        "use_beam_search": False,
        "length_penalty": 1,
        "early_stopping": False,
        "spaces_between_special_tokens": True,
        "guided_grammar": "",
        "guided_json": {},
        "guided_choice": [],
    },
}


@pytest.mark.parametrize("client", CLIENTS)
def test_completions_of_clients_pass(client: str) -> None:
    completion(model="m", **CLIENTS[client])


def test_chats_of_clients_pass() -> None:
    """A chat page, a library and an editor; all that they can send but does not apply here."""
    chat(
        model="m",
        stream=True,
        stream_options={"include_usage": True},
        user="u",
        metadata={"chat": "1"},
        n=1,
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=False,
        function_call="none",
        response_format={"type": "text"},
        logit_bias={},
        store=False,
        service_tier="auto",
        prompt_cache_key="k",
        modalities=["text"],
        prediction={"type": "content", "content": "x"},
    )


def test_names_of_other_engines_pass_if_they_ask_for_nothing() -> None:
    """Clients of llama.cpp send all of its parameters, at their defaults."""
    assert chat(mirostat=0, typical_p=None, grammar="", cache_prompt=True).params == chat().params
    text = "unknown key 'repeat_penalty'; here it is repetition_penalty"
    with pytest.raises(InvalidParamsError, match=text):
        chat(repeat_penalty=1.1)


@pytest.mark.parametrize("value", [False, 0, 0.0])
@pytest.mark.parametrize("read", [chat, completion])
def test_no_sampling_is_asked_for_by_the_temperature(read: Any, value: object) -> None:
    """transformers' and LMDeploy's name: an answer that was drawn would look like the likeliest."""
    assert read(do_sample=True).params == read().params
    with pytest.raises(InvalidParamsError, match="unknown key 'do_sample'; temperature=0 takes"):
        read(do_sample=value)


def output(*texts: str) -> RequestOutput:
    made = [CompletionOutput(i, text, [1, 2], "stop") for i, text in enumerate(texts)]
    return RequestOutput(0, "p", [1, 2, 3], made, num_cached_tokens=2)


def chat_whole(request: ChatRequest, output: RequestOutput) -> dict[str, Any]:
    return ChatChunks(request, "7", "m", PIECES.__getitem__, ChatParsers()).whole([output])


def completion_whole(request: CompletionRequest, outputs: list[RequestOutput]) -> dict[str, Any]:
    return CompletionChunks(request, "7", "m", PIECES.__getitem__).whole(outputs)


def test_answers_have_openais_form() -> None:
    body = chat_whole(chat(), output("a", "b"))
    assert body["id"] == "chatcmpl-7" and body["object"] == "chat.completion"
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert body["choices"][1] == {
        "index": 1,
        "message": {
            "role": "assistant",
            "content": "b",
            "refusal": None,
            "reasoning_content": None,
            "reasoning": None,
        },
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }


# "é" comes in two tokens; 5 ends the text and is no part of it.
PIECES = {1: b" a", 2: b"\xc3", 3: b"\xa9b", 4: "ß".encode(), 5: b"</s>"}


def wants(num_likeliest: int) -> ChatRequest:
    return chat(logprobs=True, top_logprobs=num_likeliest)


def scored(num_likeliest: int) -> RequestOutput:
    """ "aé b" as 1, 2, 3, 5; the first is the likeliest, the others are not among the likeliest."""
    likeliest = {1: Logprob(-0.5, 1), 4: Logprob(-1.5, 2)}
    taken = dict(list(likeliest.items())[:num_likeliest])
    rows = [taken | {i: Logprob(-2.5, 7)} for i in (2, 3, 5)]
    rows[1][3] = Logprob(-math.inf, 7)
    first = taken or {1: likeliest[1]}
    made = CompletionOutput(0, " aéb", [1, 2, 3, 5], "stop", logprobs=[first, *rows])
    return RequestOutput(0, "p", [1], [made])


def test_a_chat_has_an_entry_for_each_token() -> None:
    body = chat_whole(wants(2), scored(2))
    found = body["choices"][0]["logprobs"]
    a = {"token": " a", "logprob": -0.5, "bytes": [32, 97]}
    s = {"token": "ß", "logprob": -1.5, "bytes": [195, 159]}
    assert found == {
        "content": [
            a | {"top_logprobs": [a, s]},
            {"token": "\\xc3", "logprob": -2.5, "bytes": [195], "top_logprobs": [a, s]},
            {"token": "\\xa9b", "logprob": -9999.0, "bytes": [169, 98], "top_logprobs": [a, s]},
            {"token": "</s>", "logprob": -2.5, "bytes": [*b"</s>"], "top_logprobs": [a, s]},
        ],
        "refusal": None,
    }
    body = chat_whole(wants(0), scored(0))
    alone = body["choices"][0]["logprobs"]
    assert [each["top_logprobs"] for each in alone["content"]] == [[]] * 4
    assert bytes(b for each in alone["content"] for b in each["bytes"]) == " aéb</s>".encode()


def test_a_completion_has_parallel_lists() -> None:
    body = completion_whole(completion(), [scored(1)])
    assert body["choices"][0]["logprobs"] == {
        "tokens": [" a", "\\xc3", "\\xa9b", "</s>"],
        "token_logprobs": [-0.5, -2.5, -9999.0, -2.5],
        "top_logprobs": [
            {" a": -0.5},
            {" a": -0.5, "\\xc3": -2.5},
            {" a": -0.5, "\\xa9b": -9999.0},
            {" a": -0.5, "</s>": -2.5},
        ],
        "text_offset": [0, 2, 2, 4],
    }


def test_completions_are_numbered_over_all_prompts() -> None:
    outputs = [output("a", "b"), output("c", "d")]
    body = completion_whole(completion(), outputs)
    assert body["id"] == "cmpl-7" and body["object"] == "text_completion"
    assert [(c["index"], c["text"]) for c in body["choices"]] == [*enumerate("abcd")]
    assert body["usage"]["total_tokens"] == 14


def echoed(prompt: str | None, logprobs: bool = True) -> RequestOutput:
    """Three tokens of a prompt and two of an answer; the second of each is not the likeliest."""
    likeliest = Logprob(-0.5, 1)
    rows = [{1: likeliest}, {1: likeliest, 3: Logprob(-2.5, 7)}]
    made = CompletionOutput(0, " aß", [1, 4], "length", logprobs=[rows[0], {4: Logprob(0, 1)}])
    scores = [None, {2: Logprob(-1, 1)}, rows[1]] if logprobs else None
    return RequestOutput(0, prompt, [1, 2, 3], [made], prompt_logprobs=scores)


def test_echo_repeats_the_prompt_and_scores_its_tokens() -> None:
    """The prompt has three tokens: a space too many, as some tokenizers add, and "é" in two."""
    asked = completion(echo=True, logprobs=1)
    assert asked.echo and asked.params.prompt_logprobs == 1
    choice = completion_whole(asked, [echoed("aéb")])["choices"][0]
    assert choice == {
        "index": 0,
        "text": "aéb aß",
        "logprobs": {
            "tokens": [" a", "\\xc3", "\\xa9b", " a", "ß"],
            "token_logprobs": [None, -1, -2.5, -0.5, 0],
            "top_logprobs": [
                None,
                {"\\xc3": -1},
                {" a": -0.5, "\\xa9b": -2.5},
                {" a": -0.5},
                {"ß": 0},
            ],
            "text_offset": [0, 1, 1, 3, 5],
        },
        "finish_reason": "length",
        "stop_reason": None,
    }


def test_echo_alone_gives_the_prompt_and_no_token() -> None:
    asked = completion(echo=True, logprobs=1, max_tokens=0, prompt=[1, 2, 3])
    assert asked.echo_only and asked.params.max_tokens == 1
    body = completion_whole(asked, [echoed(None)])
    choice = body["choices"][0]
    assert choice["text"] == " aéb" and choice["logprobs"]["text_offset"] == [0, 2, 2]
    assert len(choice["logprobs"]["token_logprobs"]) == 3
    assert body["usage"]["completion_tokens"] == 0 and body["usage"]["total_tokens"] == 3
    unscored = completion(echo=True)
    assert not unscored.echo_only and unscored.params.prompt_logprobs is None
    output = replace(echoed("p", logprobs=False), outputs=[CompletionOutput(0, "q", [1], "stop")])
    body = completion_whole(unscored, [output])
    assert (body["choices"][0]["text"], body["choices"][0]["logprobs"]) == ("pq", None)


def test_of_tokens_that_look_the_same_the_likeliest_is_told() -> None:
    """Otherwise a token could seem the likeliest by the lower number of its double."""
    position = {1: Logprob(-0.5, 1), 6: Logprob(-3, 2)}
    made = CompletionOutput(0, " a", [6], "length", logprobs=[position])
    pieces = PIECES | {6: b" a"}
    writer = CompletionChunks(completion(), "7", "m", pieces.__getitem__)
    body = writer.whole([RequestOutput(0, "p", [1], [made])])
    found = body["choices"][0]["logprobs"]
    assert (found["token_logprobs"], found["top_logprobs"]) == ([-3], [{" a": -0.5}])


def test_errors_have_openais_codes() -> None:
    for error, status, code in (
        (InvalidParamsError("x"), 400, "invalid_value"),
        (InvalidPromptError("x"), 400, "invalid_prompt"),
        (RequestError("x"), 400, "invalid_request"),
        (TransferError("x"), 500, "server_error"),
    ):
        found, body = error_body(error)
        assert (found, body["error"]["code"], body["error"]["message"]) == (status, code, "x")


def test_langchain_and_litellm_know_a_prompt_that_is_too_long() -> None:
    status, body = error_body(PromptTooLongError("600 tokens"))
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    for words in ("prompt is too long", "this model's maximum context length is", "600 tokens"):
        assert words in body["error"]["message"]


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"temprature": 1}, "unknown_parameter", "temprature"),
        ({"repeat_penalty": 1.1}, "unknown_parameter", "repeat_penalty"),
        ({"suffix": "a"}, "unsupported_parameter", "suffix"),
        ({"tools": [{}]}, "invalid_value", "tools"),
        ({"temperature": -1}, "invalid_value", "temperature"),
        ({"n": 2, "temperature": 0}, "invalid_value", "n"),
        ({"logit_bias": {"5": 101}}, "invalid_value", "logit_bias"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"stream_options": {}}, "invalid_value", "stream_options"),
        ({"messages": None}, "invalid_prompt", "messages"),
        ({"x" * 100: 1}, "unknown_parameter", "x" * 64),
    ],
)
def test_errors_name_their_key(body: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**body)
    error = error_body(caught.value, CHAT)[1]["error"]
    assert (error["code"], error["param"]) == (code, param)


def test_errors_about_prompts_name_the_key_of_their_endpoint() -> None:
    for error, params in (
        (PromptTooLongError("x"), ["messages", "prompt", None]),
        (InvalidParamsError("the x"), [None, None, None]),
    ):
        for endpoint, param in zip((CHAT, COMPLETIONS, None), params, strict=True):
            assert error_body(error, endpoint)[1]["error"]["param"] == param
