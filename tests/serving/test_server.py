"""The server live: clients get what LLM gives, whole and as streams; errors are OpenAI's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import SETTINGS, LiveServer, live_server
from tool_models import TOOLS

import nanoengine
from nanoengine import LLM, SamplingParams
from nanoengine.serving.openai_keys import CHAT, COMPLETIONS, RESPONSES
from nanoengine.serving.openai_keys import MESSAGES as MESSAGES_PATH
from nanoengine.serving.responses_requests import read_responses

MESSAGES = [{"role": "user", "content": "hello"}]
GOES_ON = {"continue_final_message": True}
OPEN = GOES_ON | {"add_generation_prompt": False}
GREEDY = {"temperature": 0, "ignore_eos": True}
pytestmark = pytest.mark.usefixtures("threads_as_before")


@pytest.fixture(scope="module")
def server(tiny: Callable[[str], Path]) -> Iterator[LiveServer]:
    with live_server(tiny("llama"), tokenizer_info=True) as made:
        yield made
        made.wait_until_idle()


@pytest.fixture(scope="module")
def plain(tiny: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(tiny("llama"), **SETTINGS) as llm:
        yield llm


def test_a_chat_is_what_the_model_says(server: LiveServer, plain: LLM) -> None:
    (expected,) = plain.chat(MESSAGES, SamplingParams(max_tokens=9, **GREEDY), use_tqdm=False)
    status, body = server.post(CHAT, messages=MESSAGES, max_tokens=9, model="tiny", **GREEDY)
    assert status == 200
    assert body["object"] == "chat.completion" and body["model"] == "tiny"
    (choice,) = body["choices"]
    assert choice["message"]["content"] == expected["text"]
    assert choice["finish_reason"] == "length"
    num_in = len(expected.prompt_token_ids)
    assert body["usage"]["prompt_tokens"] == num_in
    assert body["usage"]["completion_tokens"] == 9


def test_a_chat_as_a_stream(server: LiveServer) -> None:
    asked = {"messages": MESSAGES, "max_tokens": 20, **GREEDY}
    _, whole = server.post(CHAT, **asked)
    *chunks, last = server.stream(CHAT, **asked, stream_options={"include_usage": True})
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 20
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    text = "".join(delta.get("content", "") for delta in deltas)
    assert text == whole["choices"][0]["message"]["content"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert len({chunk["id"] for chunk in [*chunks, last]}) == 1


def test_several_prompts_and_texts(server: LiveServer) -> None:
    asked = {"prompt": ["one", [5, 6, 7]], "n": 2, "max_tokens": 12, "seed": 3, "ignore_eos": True}
    _, whole = server.post(COMPLETIONS, **asked)
    texts = [choice["text"] for choice in whole["choices"]]
    assert len(texts) == 4 and len(set(texts)) == 4
    found = [""] * 4
    for chunk in server.stream(COMPLETIONS, **asked):
        (choice,) = chunk["choices"]
        found[choice["index"]] += choice["text"]
    assert found == texts


def test_echo_and_logprobs(server: LiveServer, plain: LLM) -> None:
    asked = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 1, **GREEDY}
    _, whole = server.post(COMPLETIONS, **asked)
    (choice,) = whole["choices"]
    params = SamplingParams(max_tokens=1, prompt_logprobs=1, **GREEDY)
    (output,) = plain.generate("abc", params, use_tqdm=False)
    scored = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))
    own = [position[token_id].logprob for token_id, position in scored[1:]]
    lists = choice["logprobs"]
    assert lists["token_logprobs"][0] is None
    assert lists["token_logprobs"][1:-1] == pytest.approx(own)
    assert choice["text"].startswith("abc")
    streamed = server.stream(COMPLETIONS, **asked)
    assert "".join(c["choices"][0]["text"] for c in streamed) == choice["text"]
    joined = [p for c in streamed for p in (c["choices"][0]["logprobs"] or {}).get("tokens", [])]
    assert joined == lists["tokens"]


def test_special_tokens_may_be_left_out(server: LiveServer) -> None:
    asked = {"prompt": "hello", "return_token_ids": True, "max_tokens": 1}
    _, whole = server.post(COMPLETIONS, **asked)
    _, bare = server.post(COMPLETIONS, **asked, add_special_tokens=False)
    with_bos, without = (body["choices"][0]["prompt_token_ids"] for body in (whole, bare))
    assert with_bos[1:] == without and len(with_bos) > 1


def test_token_ids(server: LiveServer, plain: LLM) -> None:
    """vLLM's return_token_ids, whole and in chunks."""
    (chat,) = plain.chat(MESSAGES, SamplingParams(max_tokens=9, **GREEDY), use_tqdm=False)
    asked = {"max_tokens": 9, "return_token_ids": True, **GREEDY}
    _, body = server.post(CHAT, messages=MESSAGES, **asked)
    assert body["prompt_token_ids"] == chat.prompt_token_ids
    assert body["choices"][0]["token_ids"] == chat["token_ids"]
    _, body = server.post(COMPLETIONS, prompt=[5, 6], **asked)
    (choice,) = body["choices"]
    assert choice["prompt_token_ids"] == [5, 6] and len(choice["token_ids"]) == 9
    for path, prompt in ((CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": [5, 6]})):
        _, _, data = server.ask("POST", path, prompt | asked | {"stream": True})
        chunks = [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: {")]
        streamed = [t for chunk in chunks for t in chunk["choices"][0]["token_ids"]]
        assert streamed == (chat["token_ids"] if path == CHAT else choice["token_ids"])


def test_a_response(server: LiveServer, plain: LLM) -> None:
    asked = {"input": "hello", "max_output_tokens": 9, **GREEDY}
    _, chat = server.post(CHAT, messages=MESSAGES, max_tokens=9, **GREEDY)
    status, body = server.post("/v1/responses", **asked)
    text = chat["choices"][0]["message"]["content"]
    assert (status, body["object"]) == (200, "response")
    assert body["output"][0]["content"][0]["text"] == text
    _, headers, data = server.ask("POST", "/v1/responses", asked | {"stream": True})
    assert headers["content-type"].startswith("text/event-stream")
    events = named_events(data)
    assert [name for name, _ in events] == [event["type"] for _, event in events]
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    assert events[0][0] == "response.created" and events[-1][0] == "response.incomplete"
    deltas = [event["delta"] for name, event in events if name == "response.output_text.delta"]
    assert "".join(deltas) == text


def test_a_message(server: LiveServer) -> None:
    asked = {"messages": MESSAGES, "max_tokens": 9, "temperature": 0, "model": "tiny"}
    _, chat = server.post(CHAT, messages=MESSAGES, max_tokens=9, temperature=0)
    text = chat["choices"][0]["message"]["content"]
    status, body = server.post("/v1/messages", **asked)
    assert (status, body["type"]) == (200, "message")
    assert "".join(block["text"] for block in body["content"]) == text
    _, _, data = server.ask("POST", "/v1/messages", asked | {"stream": True})
    events = named_events(data)
    assert (events[0][0], events[-1][0]) == ("message_start", "message_stop")
    deltas = [event["delta"] for name, event in events if name == "content_block_delta"]
    assert "".join(delta["text"] for delta in deltas) == text
    counted = server.post("/v1/messages/count_tokens", messages=MESSAGES, model="tiny")
    assert counted == (200, {"input_tokens": chat["usage"]["prompt_tokens"]})
    status, error = server.post("/v1/messages", **asked | {"model": "x"})
    assert (status, error["type"], error["error"]["type"]) == (404, "error", "not_found_error")


def named_events(data: bytes) -> list[tuple[str, Any]]:
    """Names and JSON of the events of a stream."""
    found = []
    for part in data.decode().removesuffix("\n\n").split("\n\n"):
        name, content = part.split("\n")
        found.append((name.removeprefix("event: "), json.loads(content.removeprefix("data: "))))
    return found


def test_what_is_here(server: LiveServer, tiny: Callable[[str], Path]) -> None:
    status, models = server.get("/v1/models")
    assert status == 200
    (model,) = models["data"]
    assert (model["id"], model["root"], model["object"]) == ("tiny", str(tiny("llama")), "model")
    assert model["max_model_len"] == 512
    assert server.get("/v1/models/tiny") == (200, model)
    assert server.get("/v1/models/") == (200, models)
    assert server.get("/health") == server.get("/ping") == (200, None)
    assert [server.ask("HEAD", path)[0] for path in ("/health", "/")] == [200, 200]
    assert server.get("/version") == (200, {"version": nanoengine.__version__})


def test_tokens(server: LiveServer, plain: LLM) -> None:
    ids = plain.tokenizer.encode("aé")
    status, found = server.post("/tokenize", prompt="aé")
    assert status == 200
    assert found == {"tokens": ids, "count": len(ids), "max_model_len": 512}
    _, bare = server.post("/tokenize", prompt="a", add_special_tokens=False, return_token_strs=True)
    assert (bare["count"], bare["token_strs"]) == (1, ["a"])
    _, chat = server.post("/tokenize", messages=MESSAGES, add_generation_prompt=False)
    text = plain.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False)
    assert server.post("/detokenize", tokens=chat["tokens"]) == (200, {"prompt": text})
    _, info = server.get("/tokenizer_info")
    assert (info["eos_token"], info["bos_token"]) == ("</s>", "<s>")
    assert info["chat_template"].startswith("{% for m in messages %}")


def text_of(server: LiveServer, **body: Any) -> str:
    """The text that /tokenize makes tokens of."""
    status, found = server.post("/tokenize", **body)
    assert status == 200, found
    _, back = server.post("/detokenize", tokens=found["tokens"])
    return str(back["prompt"])


def test_tokens_of_a_message_that_goes_on(server: LiveServer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "So "}]
    before = text_of(server, messages=MESSAGES)
    for content, text in (("So", "So"), ("So ", "So "), (parts, "a\nSo ")):
        messages = [*MESSAGES, {"role": "assistant", "content": content}]
        assert text_of(server, messages=messages, **OPEN) == f"{before}{text}"
        closed = text_of(server, messages=messages, add_generation_prompt=False)
        assert closed.startswith(f"{before}{text}") and len(closed) > len(before + text)


def test_an_answer_goes_on_with_the_last_message(server: LiveServer, plain: LLM) -> None:
    talk = [*MESSAGES, {"role": "assistant", "content": "So"}]
    _, ids = server.post("/tokenize", messages=talk, **OPEN)
    (whole,) = plain.generate(ids["tokens"], SamplingParams(max_tokens=9, **GREEDY), use_tqdm=False)
    status, chat = server.post(CHAT, messages=talk, max_tokens=9, **OPEN, **GREEDY)
    assert status == 200 and chat["choices"][0]["message"]["content"] == whole["text"]
    assert chat["usage"]["prompt_tokens"] == len(ids["tokens"])
    begun = {"messages": talk, "max_tokens": 9, "temperature": 0, "model": "tiny"}
    status, message = server.post("/v1/messages", **begun)
    assert status == 200 and message["content"][0]["text"] == whole["text"]
    counted = server.post("/v1/messages/count_tokens", messages=talk, model="tiny")
    assert counted == (200, {"input_tokens": len(ids["tokens"])})


def test_tokens_with_tools(tool_server: LiveServer) -> None:
    plain = text_of(tool_server, messages=MESSAGES)
    assert text_of(tool_server, messages=MESSAGES, tools=TOOLS) == f"weather now {plain}"
    assert text_of(tool_server, messages=MESSAGES, tools=[]) == plain


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code", "words"),
    [
        ("POST", CHAT, {"messages": MESSAGES, "model": "x"}, 404, "model_not_found", "'x' is not"),
        ("POST", CHAT, {"messages": MESSAGES, "temprature": 1}, 400, "unknown_parameter", "did y"),
        ("POST", CHAT, {"messages": MESSAGES, "top_p": 7}, 400, "invalid_value", "top_p must be"),
        ("POST", CHAT, {"messages": 5}, 400, "invalid_prompt", "messages must be a list"),
        ("POST", CHAT, {"messages": MESSAGES, "tools": [{}]}, 400, "invalid_value", "tools"),
        ("POST", COMPLETIONS, {"prompt": [5] * 600}, 400, "context_length_exceeded", "600 tokens"),
        ("POST", COMPLETIONS, {"prompt": "a" * 9999}, 400, "context_length_exceeded", "9999 char"),
        ("POST", COMPLETIONS, {"prompt": [9999]}, 400, "invalid_prompt", "token id 9999"),
        ("POST", COMPLETIONS, {"prompt": "\ud800"}, 400, "invalid_prompt", "surrogate"),
        ("POST", COMPLETIONS, b'{"prompt": ', 400, "invalid_json", "the body is no JSON"),
        ("POST", COMPLETIONS, b'{"prompt": NaN}', 400, "invalid_json", "NaN is no number"),
        ("POST", COMPLETIONS, b"[" * 99999, 400, "invalid_json", "nested too deeply"),
        ("POST", COMPLETIONS, b'"\xff"', 400, "invalid_json", "the body is no JSON"),
        ("POST", COMPLETIONS, '"a"'.encode("utf-16"), 400, "invalid_json", "the body is no JSON"),
        ("POST", COMPLETIONS, '"a"'.encode("utf-8-sig"), 400, "invalid_json", "UTF-8 BOM"),
        ("POST", COMPLETIONS, [1], 400, "invalid_prompt", "must be a JSON object"),
        ("POST", "/tokenize", {}, 400, "invalid_prompt", "prompt must be a text"),
        ("POST", "/tokenize", {"prompt": "a", "add_special_tokens": 1}, 400, "invalid_value", "tr"),
        ("POST", "/tokenize", {"prompts": "a"}, 400, "unknown_parameter", "did you mean 'prompt'?"),
        ("POST", "/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "unknown_parameter", "u"),
        ("POST", "/tokenize", {"messages": MESSAGES, "tools": [{}]}, 400, "invalid_value", "tools"),
        ("POST", "/tokenize", {"messages": MESSAGES, "tools": TOOLS}, 400, "invalid_value", "none"),
        ("POST", "/tokenize", {"messages": MESSAGES} | GOES_ON, 400, "invalid_value", "is false"),
        ("POST", "/tokenize", {"messages": [5]} | OPEN, 400, "invalid_prompt", "last message"),
        ("POST", "/detokenize", {"tokns": [1]}, 400, "unknown_parameter", "did you mean 'tokens'?"),
        ("POST", "/detokenize", {"tokens": [-1]}, 400, "invalid_prompt", "a list of token ids"),
        ("GET", "/v1/models/x", None, 404, "model_not_found", "this server has 'tiny'"),
        ("GET", CHAT, None, 405, "method_not_allowed", "another method"),
        ("POST", "/chat/completions", {}, 404, "unknown_url", f"did you mean {CHAT}?"),
        ("POST", f"{CHAT}/", {}, 404, "unknown_url", f"did you mean {CHAT}?"),
        ("POST", "/v1/v1/messages", {}, 404, "unknown_url", "did you mean /v1/messages?"),
        ("POST", "/v1/embeddings", {}, 404, "unknown_url", "it computes no embeddings"),
        ("POST", "/v1/images/generations", {}, 404, "unknown_url", "reads and writes text alone"),
        ("GET", "/v1/responses/resp_1", None, 404, "unknown_url", "answers are not kept"),
        ("GET", "/v1/batches", None, 404, "unknown_url", "nanoengine batch IN.jsonl"),
        ("POST", "/api/chat", {}, 404, "unknown_url", "this is no server of Ollama's"),
        ("GET", "/nowhere", None, 404, "unknown_url", "there is no GET /nowhere; GET /openapi"),
    ],
)
def test_an_error_is_openais_object(
    server: LiveServer, method: str, path: str, body: Any, status: int, code: str, words: str
) -> None:
    found, _, data = server.ask(method, path, body)
    error = json.loads(data)["error"]
    assert (found, error["code"]) == (status, code), error
    assert words in error["message"]
    assert error["type"] == "invalid_request_error" and set(error) >= {"param"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": 5}, "messages"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_errors_of_tokens_name_their_key(
    server: LiveServer, path: str, body: dict[str, Any], param: str
) -> None:
    status, found = server.post(path, **body)
    assert (status, found["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": MESSAGES, "max_tokens": 600}, "messages"),
        (CHAT, {"messages": MESSAGES, "max_completion_tokens": 600, "stream": True}, "messages"),
        (COMPLETIONS, {"prompt": [5] * 500, "max_tokens": 13}, "prompt"),
        (COMPLETIONS, {"prompt": [[5], [5] * 500], "max_tokens": 13, "stream": True}, "prompt"),
        (RESPONSES, {"input": "hello", "max_output_tokens": 600}, "input"),
    ],
)
def test_an_answer_that_cannot_have_all_its_tokens_is_refused(
    server: LiveServer, path: str, body: dict[str, Any], param: str
) -> None:
    status, found = server.post(path, **body)
    error = found["error"]
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert "but the limit is 512 (the model's positions)" in error["message"]
    if path == COMPLETIONS:
        assert "prompt and answer may have 500 + 13 = 513 tokens, but" in error["message"]
    server.wait_until_idle()


def test_an_answer_may_fill_the_context(server: LiveServer) -> None:
    asked = {"prompt": [5] * 500, **GREEDY}
    for more in ({"max_tokens": 12}, {}):  # nobody asks for the 16 that are the default
        status, body = server.post(COMPLETIONS, **asked, **more)
        assert (status, body["usage"]["completion_tokens"]) == (200, 12)
        assert body["choices"][0]["finish_reason"] == "length"


def test_where_max_tokens_is_required_an_answer_is_cut(tiny: Callable[[str], Path]) -> None:
    asked = {"messages": MESSAGES, "max_tokens": 600}
    with live_server(tiny("llama"), {"num_gpu_blocks": 6}) as server:
        status, body = server.post(MESSAGES_PATH, **asked)
        assert status == 200
        assert body["stop_reason"] in ("model_context_window_exceeded", "end_turn")
        assert server.post(f"{MESSAGES_PATH}/count_tokens", **asked)[0] == 200
        status, body = server.post(CHAT, **asked)
        assert status == 400
        text = "the limit is 48 (what the KV cache holds); set enable_cpu_offload=True and"
        assert text in body["error"]["message"]


def test_an_error_in_a_stream_that_was_asked_for_comes_with_its_status(server: LiveServer) -> None:
    status, body = server.post(COMPLETIONS, prompt=[[5], [9999]], stream=True)
    assert (status, body["error"]["code"]) == (400, "invalid_prompt")
    server.wait_until_idle()


def test_a_body_of_another_kind_is_refused(server: LiveServer) -> None:
    found, _, data = server.ask("POST", CHAT, b"a=1", Content_Type="text/plain")
    assert found == 415 and b"Content-Type: application/json" in data


def test_the_document_describes_the_bodies_and_the_answers(server: LiveServer) -> None:
    _, document = server.get("/openapi.json")
    for path, key in (
        (CHAT, "messages"),
        (COMPLETIONS, "prompt"),
        ("/v1/responses", "input"),
        ("/v1/messages", "max_tokens"),
        ("/tokenize", "prompt"),
    ):
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert key in body["schema"]["properties"]
        if path == "/v1/responses":  # as its own reader takes it
            form = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
            asked = {"input": [{"role": "user", "content": "a"}], "text": {"format": form}}
            assert asked["text"]["format"].keys() == {
                *body["schema"]["properties"]["text"]["properties"]["format"]["properties"]
            }
            assert read_responses(asked, SamplingParams()).chat.params.form is not None
            assert {"stop", "seed", "include", "top_logprobs"} < body["schema"]["properties"].keys()
    kinds = {
        (CHAT, "post", "200"): {"application/json", "text/event-stream"},
        ("/v1/messages", "post", "200"): {"application/json", "text/event-stream"},
        (CHAT, "post", "default"): {"application/json"},
        ("/tokenize", "post", "200"): {"application/json"},
        ("/metrics", "get", "200"): {"text/plain"},
        ("/health", "get", "200"): set(),
        ("/health", "get", "default"): {"application/json"},
    }
    for (path, method, status), expected in kinds.items():
        answer = document["paths"][path][method]["responses"][status]
        assert answer.get("content", {}).keys() == expected, path
    for path in ("/docs", "/redoc"):
        assert server.get(path)[0] == 404
