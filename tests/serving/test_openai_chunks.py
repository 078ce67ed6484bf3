"""The chunks of a stream, joined, are the whole answer, however the deltas fall."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine.api.outputs_so_far import OutputsSoFar
from nanoengine.outputs import Logprob, RequestOutput, StreamDelta, TokenLogprobs
from nanoengine.sampling_params import SamplingParams
from nanoengine.serving.openai_chunks import NO_REASONING, ChatChunks, CompletionChunks
from nanoengine.serving.openai_requests import ChatRequest, CompletionRequest, Streaming
from nanoengine.text.answer_parser import ChatParsers

# Letters, parts of "é", an end of the text.
PIECES = [b"a", b" b", b"\xc3", b"\xa9", "ßc".encode(), b"</s>"]
HEAD = ("id", "created", "model", "system_fingerprint")
IDS = {"token_ids", "prompt_token_ids"}

TOKENS = st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=8)
USAGES = st.builds(Streaming, st.booleans(), st.booleans())


def token_bytes(token_id: int) -> bytes:
    return PIECES[token_id]


def scores(tokens: Sequence[int]) -> list[TokenLogprobs]:
    likeliest = {0: Logprob(-0.5, 1), 1: Logprob(-1.0, 2)}
    return [likeliest if i in likeliest else {**likeliest, i: Logprob(-3.0, 9)} for i in tokens]


def deltas_of(draw: random.Random, index: int, tokens: list[int], scored: bool) -> list[Any]:
    """A completion in random parts; its text follows its tokens at some distance."""
    text = b"".join(map(token_bytes, tokens)).decode("utf-8", "replace")
    text = text[: draw.randrange(len(text) + 1)]  # a stop may cut it
    parts = draw.randint(1, len(tokens))
    cuts = [0, *sorted(draw.choices(range(len(tokens) + 1), k=parts - 1)), len(tokens)]
    chars = [0, *sorted(draw.choices(range(len(text) + 1), k=parts - 1)), len(text)]
    rows = scores(tokens)
    return [
        StreamDelta(
            7,
            index,
            text[chars[i] : chars[i + 1]],
            tuple(tokens[cuts[i] : cuts[i + 1]]),
            "stop" if i == parts - 1 else None,
            None,
            None,
            tuple(rows[cuts[i] : cuts[i + 1]]) if scored else None,
        )
        for i in range(parts)
    ]


def shuffled(draw: random.Random, lines: list[list[Any]]) -> list[Any]:
    """The lines merged into one, each in its own order."""
    order = [number for number, line in enumerate(lines) for _ in line]
    draw.shuffle(order)
    iterators = [iter(line) for line in lines]
    return [next(iterators[number]) for number in order]


def joined(chunks: list[dict[str, Any]], streaming: Streaming, **empty: Any) -> dict[str, Any]:
    """The whole answer that chunks make. empty: a choice before its first chunk."""
    assert all({name: chunk[name] for name in HEAD} == head(chunks[0]) for chunk in chunks)
    usage = chunks.pop() if streaming.include_usage else {"choices": [], "usage": None}
    assert usage["choices"] == []
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        assert ("usage" in chunk) == (streaming.include_usage or streaming.continuous_usage)
        (part,) = chunk["choices"]
        choice = choices.setdefault(part["index"], {"index": part["index"], **empty})
        assert choice["finish_reason"] is None  # nothing follows the last chunk of a choice
        for name in ("finish_reason", "stop_reason"):
            choice[name] = part[name]
        choice["text"] += part.get("text", "") + part.get("delta", {}).get("content", "")
        choice["roles"] = (*choice.get("roles", ()), part.get("delta", {}).get("role"))
        choice["logprobs"] = added(choice["logprobs"], part["logprobs"])
        for name in IDS & part.keys():
            choice[name] = [*choice.get(name, []), *part[name]]
    ordered = [choices[index] for index in sorted(choices)]
    ids = {name: chunk[name] for chunk in chunks for name in IDS & chunk.keys()}
    return head(chunks[0]) | {"choices": ordered, "usage": usage["usage"]} | ids


def head(chunk: dict[str, Any]) -> dict[str, Any]:
    return {name: chunk[name] for name in HEAD}


def added(old: dict[str, Any] | None, new: dict[str, Any] | None) -> dict[str, Any] | None:
    if old is None or new is None:
        return old or new
    return {name: None if old[name] is None else old[name] + new[name] for name in old}


@settings(derandomize=True, deadline=None)
@given(st.lists(TOKENS, min_size=1, max_size=3), st.booleans(), st.booleans(), USAGES, st.randoms())
def test_the_chunks_of_a_chat_are_the_answer(
    made: list[list[int]], scored: bool, has_ids: bool, streaming: Streaming, draw: random.Random
) -> None:
    params = SamplingParams(n=len(made), logprobs=2 if scored else None)
    request = ChatRequest([], params, streaming=streaming, has_token_ids=has_ids)
    lines = [deltas_of(draw, index, tokens, scored) for index, tokens in enumerate(made)]
    output = RequestOutput(7, "p", [0, 1, 2], OutputsSoFar(chain(*lines)).outputs())
    writer = ChatChunks(request, "7", "m", token_bytes, ChatParsers())
    body = writer.whole([output])
    ids = [choice.get("token_ids") for choice in body["choices"]]
    assert ids == (made if has_ids else [None] * len(made))
    assert body.get("prompt_token_ids") == ([0, 1, 2] if has_ids else None)

    events = writer.begin(output, 0)
    for delta in shuffled(draw, lines):
        events += writer.of([delta], 0)
    if streaming.continuous_usage:
        assert events[-1][1]["usage"]["total_tokens"] == body["usage"]["total_tokens"]
    chunks = [chunk for _, chunk in events + writer.end([output])]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}

    found = joined(chunks, streaming, text="", logprobs=None, finish_reason=None)
    for choice in found["choices"]:
        roles = choice.pop("roles")
        assert roles[0] == "assistant" and set(roles[1:]) <= {None}
        content = {"content": choice.pop("text"), "refusal": None}
        choice["message"] = {"role": roles[0], **content, **NO_REASONING}
    check(found, body, streaming)


@settings(derandomize=True, deadline=None)
@given(
    st.lists(st.lists(TOKENS, min_size=2, max_size=2), min_size=1, max_size=2),
    st.booleans(),
    st.sampled_from(["", "echo", "echo_only"]),
    st.booleans(),
    USAGES,
    st.randoms(),
)
def test_the_chunks_of_a_completion_are_the_answer(
    made: list[list[list[int]]],
    scored: bool,
    echo: str,
    has_ids: bool,
    streaming: Streaming,
    draw: random.Random,
) -> None:
    """Two texts for each prompt; the first prompt is a text, the second one ids."""
    params = SamplingParams(n=2, logprobs=1 if scored else None)
    flags = {"echo": bool(echo), "echo_only": echo == "echo_only", "streaming": streaming}
    prompts_given = tuple("pq"[: len(made)])
    request = CompletionRequest(prompts_given, params, **flags, has_token_ids=has_ids)
    prompts = [[0, 2, 3], [4]][: len(made)]
    lines, outputs = [], []
    for number, texts in enumerate(made):
        parts = [deltas_of(draw, index, tokens, scored) for index, tokens in enumerate(texts)]
        prompt_scores = [None, *scores(prompts[number][1:])] if scored and echo else None
        made_of = OutputsSoFar(chain(*parts)).outputs()
        text = None if number else "aé"
        outputs.append(
            RequestOutput(7, text, prompts[number], made_of, prompt_logprobs=prompt_scores)
        )
        lines.append([(number, delta) for delta in shuffled(draw, parts)])
    writer = CompletionChunks(request, "7", "m", token_bytes)
    body = writer.whole(outputs)
    expected = [] if echo == "echo_only" else [ids for texts in made for ids in texts]
    ids = [choice.get("token_ids") for choice in body["choices"]]
    assert ids == (expected or [[]] * len(ids) if has_ids else [None] * len(ids))
    if has_ids:
        assert [choice["prompt_token_ids"] for choice in body["choices"][::2]] == prompts

    events = [event for n, output in enumerate(outputs) for event in writer.begin(output, n)]
    for number, delta in shuffled(draw, lines):
        events += writer.of([delta], number)
    if streaming.continuous_usage:
        assert events[-1][1]["usage"]["total_tokens"] == body["usage"]["total_tokens"]
    chunks = [chunk for _, chunk in events + writer.end(outputs)]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}

    found = joined(chunks, streaming, text="", logprobs=None, finish_reason=None)
    for choice in found["choices"]:
        assert set(choice.pop("roles")) == {None}
    check(found, body, streaming)


def check(found: dict[str, Any], body: dict[str, Any], streaming: Streaming) -> None:
    """Equal, but for what streams say otherwise."""
    usage, object_, created = body.pop("usage"), body.pop("object"), body.pop("created")
    assert object_ in ("chat.completion", "text_completion")
    assert abs(found.pop("created") - created) <= 1
    assert found.pop("usage") == (usage if streaming.include_usage else None)
    assert found == body


def test_a_delta_whose_text_is_held_back_makes_no_chunk() -> None:
    request = ChatRequest([], SamplingParams(), streaming=Streaming())
    writer = ChatChunks(request, "7", "m", token_bytes, ChatParsers())
    first, second = (StreamDelta(7, 0, "", (token,)) for token in (1, 2))
    assert [chunk["choices"][0]["delta"] for _, chunk in writer.of([first], 0)] == [
        {"role": "assistant", "content": ""}
    ]
    assert writer.of([second], 0) == []
