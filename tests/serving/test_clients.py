"""The official clients of OpenAI and Anthropic, against a live server: `make clients`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from driver import break_engine
from live_server import LiveServer, live_server
from tool_models import TOOLS

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
pytestmark = [pytest.mark.clients, pytest.mark.usefixtures("threads_as_before")]

MESSAGES: Any = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}]
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    "response_schema_conformance",
)
LONG: Any = {"model": "tiny", "prompt": "a", "max_tokens": 300, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server(tiny: Callable[[str], Path]) -> Iterator[LiveServer]:
    with live_server(tiny("llama"), api_key="k", max_open_texts=8) as made:
        yield made
        made.wait_until_idle()


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[Any]:
    url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=url, api_key="k", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def tool_client(tool_server: LiveServer) -> Iterator[Any]:
    url = f"http://127.0.0.1:{tool_server.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def claude(server: LiveServer) -> Iterator[Any]:
    url = f"http://127.0.0.1:{server.port}"
    with anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as made:
        yield made


def test_chat(client: Any) -> None:
    asked = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 12, "temperature": 0}
    answer = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2, seed=1)
    (choice,) = answer.choices
    assert choice.finish_reason in ("length", "stop") and choice.message.role == "assistant"
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=options))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == choice.message.content
    assert chunks[-1].usage.total_tokens == answer.usage.total_tokens


def test_chat_by_the_helper_for_streams(client: Any) -> None:
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        with pytest.raises(openai.LengthFinishReasonError) as caught:
            stream.get_final_completion()
    final = caught.value.completion
    assert {"chunk", "content.delta", "content.done"} <= kinds
    whole = client.chat.completions.create(**asked)
    assert final.choices[0].message.content == whole.choices[0].message.content


def test_completions(client: Any) -> None:
    asked: Any = {"model": "tiny", "prompt": ["a", "b"], "n": 2, "seed": 5, "max_tokens": 8}
    whole = client.completions.create(**asked, echo=True, logprobs=1)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [choice.text[0] for choice in whole.choices] == ["a", "a", "b", "b"]
    assert whole.choices[0].logprobs.token_logprobs[0] is None
    found = [""] * 4
    for chunk in client.completions.create(**asked, echo=True, stream=True):
        found[chunk.choices[0].index] += chunk.choices[0].text
    assert found == [choice.text for choice in whole.choices]


def test_responses(client: Any) -> None:
    asked: Any = {"model": "tiny", "input": "hi", "max_output_tokens": 16, "temperature": 0}
    whole = client.responses.create(**asked, instructions="Be brief.")
    with client.responses.stream(**asked, instructions="Be brief.") as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
    assert text == whole.output_text and whole.usage.input_tokens > 0


def test_answers_in_a_form(client: Any, claude: Any) -> None:
    """By the helpers that make a schema of a class, and read the answer as one."""
    pydantic = pytest.importorskip("pydantic")
    color = Literal["red", "green"]
    Answer = pydantic.create_model("Answer", color=(color, ...), even=(bool, ...))
    asked: Any = {"model": "tiny", "messages": MESSAGES}
    chat = client.chat.completions.parse(**asked, response_format=Answer)
    assert chat.choices[0].message.parsed.color in ("red", "green")
    with client.chat.completions.stream(**asked, response_format=Answer) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Answer)
    response = client.responses.parse(model="tiny", input="hi", text_format=Answer)
    assert isinstance(response.output_parsed, Answer)
    schema = Answer.model_json_schema() | {"additionalProperties": False}
    form = {"format": {"type": "json_schema", "schema": schema}}
    message = claude.messages.create(
        model="tiny", max_tokens=200, messages=MESSAGES[1:], extra_body={"output_config": form}
    )
    assert Answer.model_validate_json(message.content[0].text)
    with pytest.raises(openai.BadRequestError, match="banana"):
        client.chat.completions.create(
            **asked, extra_body={"structured_outputs": {"json": {"type": "banana"}}}
        )


def test_tools(tool_client: Any) -> None:
    asked: Any = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "seed": 3}
    named = {"type": "function", "function": {"name": "weather"}}
    whole = tool_client.chat.completions.create(**asked, tool_choice=named)
    (choice,) = whole.choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "weather")
    assert json.loads(call.function.arguments).keys() == {"city", "days"}
    with tool_client.chat.completions.stream(**asked, tool_choice=named) as stream:
        final = stream.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments
    # What came back goes on.
    talk = [*MESSAGES, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "sun"}]
    next_one = tool_client.chat.completions.create(**asked | {"messages": talk, "max_tokens": 4})
    assert next_one.choices[0].message.role == "assistant"


def test_tools_of_responses(tool_client: Any) -> None:
    flat = [{"type": "function", "strict": True, **tool["function"]} for tool in TOOLS]
    asked: Any = {"model": "tiny", "tools": flat, "tool_choice": "required", "temperature": 0}
    asked["parallel_tool_calls"] = False
    whole = tool_client.responses.create(**asked, input="hi")
    (call,) = whole.output
    with tool_client.responses.stream(**asked, input="hi") as stream:
        (streamed,) = stream.get_final_response().output
    assert (call.name, call.arguments) == (streamed.name, streamed.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    talk = [{"role": "user", "content": "hi"}, call, result]
    next_one = tool_client.responses.create(
        model="tiny", tools=flat, input=talk, max_output_tokens=16
    )
    assert next_one.output


def test_tools_of_messages(tool_server: LiveServer) -> None:
    url = f"http://127.0.0.1:{tool_server.port}"
    tools = [{"name": "weather", "input_schema": TOOLS[0]["function"]["parameters"]}]
    asked: Any = {"model": "tiny", "max_tokens": 160, "tools": tools}
    hello: Any = {"role": "user", "content": "hi"}
    thinking = {"type": "enabled", "budget_tokens": 5}
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as claude:
        choice = {"type": "any", "disable_parallel_tool_use": True}
        chosen = asked | {"tool_choice": choice, "thinking": thinking}
        with claude.messages.stream(**chosen, messages=[hello]) as stream:
            made = stream.get_final_message()
        thoughts, use = made.content
        assert (thoughts.type, use.type, made.stop_reason) == ("thinking", "tool_use", "tool_use")
        assert use.input.keys() == {"city", "days"}
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "sun"}
        talk = [hello, {"role": "assistant", "content": made.content}]
        talk.append({"role": "user", "content": [result]})
        next_one = claude.messages.create(**asked | {"max_tokens": 4}, messages=talk)
        assert next_one.content


def test_the_runner_of_tools(tool_server: LiveServer) -> None:
    """It asks for a conversation that the server keeps, and goes on without."""
    calls = []

    @anthropic.beta_tool
    def now() -> str:
        """The time."""
        calls.append("now")
        return "noon"

    url = f"http://127.0.0.1:{tool_server.port}"
    asked: Any = {"model": "tiny", "max_tokens": 160, "tools": [now], "max_iterations": 2}
    asked["tool_choice"] = {"type": "tool", "name": "now"}
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as claude:
        made = claude.beta.messages.tool_runner(
            messages=[{"role": "user", "content": "hi"}], **asked
        )
        assert [message.stop_reason for message in made] == ["tool_use"] * 2
    assert calls


def test_models(client: Any) -> None:
    (model,) = client.models.list()
    assert model.id == "tiny" and client.models.retrieve("tiny").max_model_len == 512


def test_leaving_a_stream_ends_its_request(client: Any, server: LiveServer) -> None:
    with client.completions.create(**LONG, stream=True) as stream:
        next(iter(stream))
    server.wait_until_idle()


def test_messages(claude: Any) -> None:
    asked: Any = {"model": "tiny", "max_tokens": 12, "system": "Be brief."}
    asked["extra_body"] = {"temperature": 0}
    asked["messages"] = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert whole.stop_reason in ("max_tokens", "end_turn")
    counted = claude.messages.count_tokens(
        model="tiny", system=asked["system"], messages=asked["messages"]
    )
    usage = whole.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


@pytest.mark.parametrize(
    ("given", "kind", "code"),
    [
        ({"prompt": [5] * 600}, "BadRequestError", "context_length_exceeded"),
        ({"top_p": 7}, "BadRequestError", "invalid_value"),
        ({"suffix": "x"}, "BadRequestError", "unsupported_parameter"),
        ({"model": "other"}, "NotFoundError", "model_not_found"),
        ({"n": 9, "temperature": 1}, "BadRequestError", "invalid_value"),
    ],
)
def test_errors(client: Any, given: dict[str, Any], kind: str, code: str) -> None:
    with pytest.raises(getattr(openai, kind)) as caught:
        client.completions.create(**{"model": "tiny", "prompt": "a"} | given)
    assert caught.value.code == code and caught.value.type == "invalid_request_error"
    assert caught.value.message


def test_a_wrong_key(client: Any, claude: Any) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        client.with_options(api_key="x").models.list()
    assert caught.value.code == "invalid_api_key"
    with pytest.raises(anthropic.AuthenticationError):
        claude.with_options(api_key="x").messages.create(
            model="tiny", max_tokens=1, messages=[{"role": "user", "content": "a"}]
        )


def test_too_much_at_once_is_a_rate_limit(client: Any, server: LiveServer) -> None:
    with client.completions.create(**LONG, n=8, stream=True):
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="tiny", prompt="a")
        assert caught.value.code == "rate_limit_exceeded"
        assert caught.value.response.headers["retry-after"] == "1"
        # By itself the client asks again, and by then the other may have ended.
        assert client.with_options(max_retries=10).completions.create(model="tiny", prompt="a")
    server.wait_until_idle()


def test_claudes_errors(claude: Any) -> None:
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    for given, kind in (
        ({"extra_body": {"temperature": 9}}, anthropic.BadRequestError),
        ({"model": "other"}, anthropic.NotFoundError),
        ({"tools": [{"name": "f", "input_schema": {}}]}, anthropic.BadRequestError),  # no template
    ):
        with pytest.raises(kind):
            claude.messages.create(**asked | given)


def test_an_error_in_the_middle_of_a_stream_raises(tiny: Callable[[str], Path]) -> None:
    with live_server(tiny("llama")) as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            stream = client.completions.create(**LONG, n=4, stream=True)
            next(iter(stream))
            server.on_engine(break_engine)
            with pytest.raises(openai.APIError, match="internal error"):
                list(stream)
            with pytest.raises(openai.InternalServerError) as caught:
                client.completions.create(model="tiny", prompt="a")
            assert caught.value.status_code == 503 and caught.value.code == "engine_closed"


def test_the_documents_paths_give_no_5xx_and_what_it_says(
    server: LiveServer, tmp_path: Path
) -> None:
    """What schemathesis makes of /openapi.json: right bodies, wrong ones, none."""
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run"),
            f"http://127.0.0.1:{server.port}/openapi.json",
            *("--checks", ",".join(CHECKS), "--max-examples", "40", "--seed", "1"),
            *("--header", "Authorization: Bearer k", "--phases", "examples,coverage,fuzzing"),
            *("--request-timeout", "60", "--no-color"),
        ],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=tmp_path,  # it keeps a cache
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    server.wait_until_idle()
