"""Forms of answers over HTTP: each API's own key, what each of them means, and what is refused."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from live_server import LiveServer, live_server

from nanoengine import SamplingParams, StructuredOutputsParams
from nanoengine.errors import InvalidParamsError
from nanoengine.serving.messages_requests import read_messages
from nanoengine.serving.openai_keys import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from nanoengine.serving.openai_requests import read_request
from nanoengine.serving.responses_requests import read_responses

HELLO: Any = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}, "n": {"type": "integer", "maximum": 99}},
    "required": ["color", "n"],
    "additionalProperties": False,
}
NAMED = {"name": "answer", "strict": True, "schema": SCHEMA}
FLAT = {"type": "json_schema", **NAMED}
CHAT_FORM = {"type": "json_schema", "json_schema": NAMED}
# Bodies that ask for an answer by SCHEMA, and where its text is.
ASKED: dict[str, tuple[dict[str, Any], Callable[[Any], str]]] = {
    CHAT: (
        {"messages": HELLO, "response_format": CHAT_FORM},
        lambda body: body["choices"][0]["message"]["content"],
    ),
    COMPLETIONS: (
        {"prompt": "hello", "response_format": CHAT_FORM, "max_tokens": 200},
        lambda body: body["choices"][0]["text"],
    ),
    RESPONSES: (
        {"input": "hello", "text": {"format": FLAT}},
        lambda body: body["output"][0]["content"][0]["text"],
    ),
    MESSAGES: (
        {"messages": HELLO, "output_config": {"format": FLAT}, "max_tokens": 200},
        lambda body: body["content"][0]["text"],
    ),
}
pytestmark = pytest.mark.usefixtures("threads_as_before")


def form_of(endpoint: str, body: dict[str, Any]) -> StructuredOutputsParams | None:
    defaults = SamplingParams()
    if endpoint == RESPONSES:
        return read_responses(body, defaults).chat.params.form
    if endpoint == MESSAGES:
        return read_messages(body, defaults).params.form
    return read_request(endpoint, body, defaults).params.form


@pytest.fixture(scope="module")
def server(tiny: Callable[[str], Path]) -> Iterator[LiveServer]:
    with live_server(tiny("llama")) as made:
        yield made
        made.wait_until_idle()


@pytest.mark.parametrize("endpoint", ASKED)
def test_each_api_has_its_own_key(endpoint: str) -> None:
    body, _ = ASKED[endpoint]
    assert form_of(endpoint, body) == StructuredOutputsParams(json=SCHEMA)


@pytest.mark.parametrize(
    ("body", "form"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputsParams(json_object=True)),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutputsParams(regex="a+")),
        ({"structured_outputs": {"choice": ["a"]}}, StructuredOutputsParams(choice=["a"])),
    ],
)
def test_what_a_key_means(body: dict[str, Any], form: StructuredOutputsParams | None) -> None:
    assert form_of(CHAT, {"messages": HELLO} | body) == form
    assert form_of(COMPLETIONS, {"prompt": "a"} | body) == form


@pytest.mark.parametrize(
    ("endpoint", "body", "words"),
    [
        (CHAT, {"response_format": "json"}, "response_format must be .*, got 'json'"),
        (CHAT, {"response_format": {"type": "grammar"}}, "got 'grammar'; structured_outputs takes"),
        (CHAT, {"response_format": FLAT}, r"response_format\.json_schema\.schema must be .* None"),
        (CHAT, {"response_format": CHAT_FORM, "structured_outputs": {"regex": "a"}}, "two forms"),
        (CHAT, {"structured_outputs": {}}, "exactly one of json, regex"),
        (CHAT, {"structured_outputs": {"jsn": 1}}, "did you mean 'json'"),
        (CHAT, {"guided_json": SCHEMA}, r"guided_json=.*here it is structured_outputs=\{'json'"),
        (CHAT, {"ebnf": "a"}, 'here it is structured_outputs={"grammar": text}'),
        (RESPONSES, {"text": []}, "text must be an object"),
        (RESPONSES, {"text": {"frmat": 1}}, "unknown key 'frmat' of text; did you mean 'format'"),
        (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity='low' is not supported"),
        (RESPONSES, {"text": {"format": CHAT_FORM}}, r"text\.format\.schema must be a JSON schema"),
        (MESSAGES, {"output_config": {"form": "low"}}, "output_config may hold a format and"),
        (MESSAGES, {"output_config": {"effort": "lo"}}, r"output_config\.effort must be none, "),
        (MESSAGES, {"output_format": FLAT}, "here it is output_config"),
    ],
)
def test_other_forms_are_refused(endpoint: str, body: dict[str, Any], words: str) -> None:
    kept = ("messages", "input", *(("max_tokens",) if endpoint == MESSAGES else ()))
    plain = {key: value for key, value in ASKED[endpoint][0].items() if key in kept}
    with pytest.raises(InvalidParamsError, match=words):
        form_of(endpoint, plain | body)


@pytest.mark.parametrize("endpoint", ASKED)
def test_answers_have_their_form(server: LiveServer, endpoint: str) -> None:
    body, text_of = ASKED[endpoint]
    status, answer = server.post(endpoint, **body)
    assert status == 200, answer
    jsonschema.validate(json.loads(text_of(answer)), SCHEMA)


def test_a_stream_has_its_form(server: LiveServer) -> None:
    asked = {"messages": HELLO, "structured_outputs": {"regex": "[0-9]{2}-(ab){3}"}, "n": 2}
    texts = ["", ""]
    for chunk in server.stream(CHAT, **asked):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        assert choice["finish_reason"] in (None, "stop")
    assert all(re.fullmatch("[0-9]{2}-(ab){3}", text) for text in texts)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"json": {"type": "banana"}}, "banana"),
        ({"json": {"$ref": "https://example.com/schema"}}, "structured_outputs: json"),
        ({"json": {"$ref": "#"}}, "structured_outputs: json"),
        ({"json": {"not": {"type": "string"}}}, "Unimplemented"),
        ({"json": {"type": "string", "pattern": "a(?=b)"}}, "look-around"),
        ({"json": {"items": {"enum": ["x" * 99] * 999}}}, "may have 65536"),
        ({"regex": "(" * 5000}, "structured_outputs: regex"),
        ({"grammar": "root ::= (" * 500}, "structured_outputs: grammar"),
    ],
)
def test_hostile_forms_are_refused(server: LiveServer, form: Any, words: str) -> None:
    start = time.monotonic()
    status, answer = server.post(COMPLETIONS, prompt="a", structured_outputs=form, max_tokens=4)
    assert (status, answer["error"]["param"]) == (400, "structured_outputs")
    assert words in answer["error"]["message"] and len(answer["error"]["message"]) < 500
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("schema", [{"type": "banana"}, {"enum": ["x" * 99] * 999}])
@pytest.mark.parametrize(
    ("endpoint", "own"),
    [
        *((CHAT, "response_format"), (COMPLETIONS, "response_format")),
        *((RESPONSES, "text.format"), (MESSAGES, "output_config.format")),
    ],
)
def test_errors_about_a_form_name_the_key_that_was_sent(
    server: LiveServer, endpoint: str, own: str, schema: Any, is_stream: bool
) -> None:
    body = json.loads(json.dumps(ASKED[endpoint][0]))
    form = body
    for name in own.split("."):
        form = form[name]
    form.get("json_schema", form)["schema"] = schema
    status, answer = server.post(endpoint, **body, stream=is_stream)
    error = answer["error"]
    assert status == 400 and error["message"].startswith(own)
    assert "structured_outputs" not in error["message"]
    assert endpoint == MESSAGES or error["param"] == own


def test_errors_name_the_form_of_two_that_is_one(server: LiveServer) -> None:
    form = {"regex": "(" * 50}
    plain = {"type": "text"}
    for endpoint, body in (
        (CHAT, {"messages": HELLO, "response_format": plain}),
        (RESPONSES, {"input": "a", "text": {"format": plain}}),
    ):
        status, answer = server.post(endpoint, **body, structured_outputs=form)
        assert (status, answer["error"]["param"]) == (400, "structured_outputs")


def test_an_error_about_the_place_of_a_schema_names_its_key(server: LiveServer) -> None:
    flat = {"type": "json_schema", "schema": 5}
    for endpoint, body, param in (
        (CHAT, {"messages": HELLO, "response_format": flat}, "response_format"),
        (RESPONSES, {"input": "a", "text": {"format": flat}}, "text.format"),
        (RESPONSES, {"input": "a", "text": 5}, "text"),
    ):
        status, answer = server.post(endpoint, **body)
        assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize("salt", [5, "", "\ud800"])
def test_errors_about_a_salt_name_it(server: LiveServer, salt: Any) -> None:
    status, answer = server.post(COMPLETIONS, prompt="a", max_tokens=1, cache_salt=salt)
    assert (status, answer["error"]["param"]) == (400, "cache_salt")


def test_grammars_are_compiled_beside_the_engines_thread(server: LiveServer) -> None:
    threads: set[str] = set()
    grammars = server.on_engine(lambda llm: llm.llm_engine.inputs.grammars)
    whole = grammars._compile

    def noting(source: tuple[str, str]) -> Any:
        threads.add(threading.current_thread().name)
        return whole(source)

    grammars._compile = noting
    try:
        server.post(COMPLETIONS, prompt="a", structured_outputs={"regex": "never seen"})
    finally:
        del grammars._compile
    assert threads and "nanoengine" not in threads
