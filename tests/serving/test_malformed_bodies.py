"""Whatever JSON a client sends, a reader makes a request of it or refuses it in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from nanoengine.errors import RequestError
from nanoengine.sampling_params import SamplingParams
from nanoengine.serving import messages_requests, openai_keys, responses_requests
from nanoengine.serving.messages_answers import messages_error
from nanoengine.serving.messages_requests import read_count, read_messages
from nanoengine.serving.openai_answers import error_body
from nanoengine.serving.openai_keys import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from nanoengine.serving.openai_requests import read_request
from nanoengine.serving.prompts import json_of
from nanoengine.serving.refusals import Refusal
from nanoengine.serving.responses_requests import read_responses

# With these a body is a request, so that what else it has is looked at.
WHOLE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "a"}], "stream": True},
    COMPLETIONS: {"prompt": "a", "stream": True, "echo": True},
    RESPONSES: {"input": "a"},
    MESSAGES: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5},
}
COUNT = f"{MESSAGES}/count_tokens"
WHOLE[COUNT] = WHOLE[MESSAGES]
READERS: dict[str, Callable[[Any], Any]] = {
    CHAT: lambda body: read_request(CHAT, body, SamplingParams()),
    COMPLETIONS: lambda body: read_request(COMPLETIONS, body, SamplingParams()),
    RESPONSES: lambda body: read_responses(body, SamplingParams()),
    MESSAGES: lambda body: read_messages(body, SamplingParams()),
    COUNT: lambda body: read_count(body, SamplingParams()),
}
REFUSED = {
    CHAT: openai_keys.REFUSED,
    COMPLETIONS: openai_keys.REFUSED,
    RESPONSES: responses_requests.REFUSED,
    MESSAGES: messages_requests.REFUSED,
    COUNT: messages_requests.REFUSED,
}
KNOWN = {
    CHAT: (*openai_keys.PARAMS, *openai_keys.COMMON, *openai_keys.OWN[CHAT]),
    COMPLETIONS: (*openai_keys.PARAMS, *openai_keys.COMMON, *openai_keys.OWN[COMPLETIONS]),
    RESPONSES: responses_requests.KNOWN,
    MESSAGES: messages_requests.KNOWN,
    COUNT: messages_requests.KNOWN,
}
DEEP: list[Any] = []
for _ in range(900):
    DEEP = [DEEP]
PLAIN = (False, True, 0, -1, 5, 1 << 70, 0.5, 1e308, float("nan"), float("inf"), "", "a", "\ud800")
PARTS = ({"type": "text"}, {"type": "text", "text": 5}, {"type": ["a"]}, {"text": "a"}, {})
ITEMS = (
    *("user", "assistant", "system"),
    *({"role": role, "content": "a"} for role in (*PLAIN, [], {})),
    *({"role": "user", "content": content} for content in (*PLAIN, [], {})),
    *({"role": "user", "content": [part]} for part in (*PLAIN, *PARTS, [])),
    *({"type": kind} for kind in (*PLAIN, [], {})),
)
ODD = (
    *PLAIN,
    *([each] for each in (*PLAIN, *PARTS, *ITEMS, None, [], [0], [None])),
    *({"a": each} for each in (*PLAIN, [], {})),
    *({str(i): 1 for i in range(n)} for n in (0, 1, 2000)),
    {"include_usage": 5},
    {"enable_thinking": DEEP},
    DEEP,
)


@pytest.mark.some(1)
@pytest.mark.parametrize("endpoint", READERS)
def test_every_key_with_every_odd_value_is_read_or_refused(endpoint: str) -> None:
    READERS[endpoint](WHOLE[endpoint])
    names = {*KNOWN[endpoint], *REFUSED[endpoint], *openai_keys.IGNORED, "mirostat", "x", ""}
    bodies = [WHOLE[endpoint] | {name: value} for name in names for value in ODD]
    for body in [*bodies, *ODD]:
        try:
            READERS[endpoint](body)
        except RequestError as error:
            status, told = error_body(error, endpoint)
            assert status == 400 and told["error"]["message"]
            json.dumps([told, messages_error(status, told)])


@pytest.mark.parametrize("text", ['{"a": 1e999}', '{"a": -1E+400}', '{"a": NaN}', "[Infinity]"])
def test_a_number_that_no_answer_could_repeat_is_no_json(text: str) -> None:
    with pytest.raises(Refusal, match=r"is no number of JSON|is too large for a number"):
        json_of(text.encode())
    assert json_of(b'{"a": 1e308, "b": 1e-999}') == {"a": 1e308, "b": 0.0}
