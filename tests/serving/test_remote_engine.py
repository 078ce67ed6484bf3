"""RemoteEngine and the worker's Requests over one socket: records whole, requests ended, errors
told. Both sides run in this process.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from driver import assert_all_free, break_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from live_server import PATIENCE_S, SETTINGS
from paced_engine import standing_still, standing_still_once_one_runs, stepping_to_begin

from nanoengine import AsyncLLM, SamplingParams
from nanoengine import errors as our_errors
from nanoengine.api.block_map import BlockMap, RequestBlocks
from nanoengine.api.stats import EngineStats, TierUse
from nanoengine.errors import EngineClosedError, EngineError, InvalidPromptError, TransferError
from nanoengine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, StreamDelta
from nanoengine.serving.engine_messages import (
    deltas_of,
    error_of,
    line_of,
    message_of,
    record,
)
from nanoengine.serving.engine_worker import LOOK_S, Requests, answer, told_of_model
from nanoengine.serving.loaded_model import facts_of
from nanoengine.serving.remote_engine import RemoteEngine

PROMPT = {"prompt_token_ids": [5, 6, 7], "prompt": "abc", "cache_salt": "s"}
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
pytestmark = pytest.mark.usefixtures("threads_as_before")


@pytest.fixture
def llm(tiny: Callable[[str], Path]) -> Iterator[AsyncLLM]:
    made = AsyncLLM(tiny("llama"), **SETTINGS)
    yield made
    made.close()


@asynccontextmanager
async def remote(llm: AsyncLLM) -> AsyncIterator[RemoteEngine]:
    """Both sides; after the block the worker's has ended, too."""
    facts = await llm.call(facts_of)
    mine, theirs = socket.socketpair()
    told = message_of(line_of(told_of_model(facts)))
    engine = RemoteEngine(mine, told, lambda: EngineError("the process ended"))
    working = asyncio.create_task(answer(llm, facts, theirs))
    async with asyncio.timeout(PATIENCE_S):
        async with engine.connected():
            yield engine
        await working


def run(llm: AsyncLLM, work: Callable[[RemoteEngine], Any]) -> None:
    async def main() -> None:
        async with remote(llm) as engine:
            await work(engine)

    asyncio.run(main())


async def wait_until_free(llm: AsyncLLM) -> None:
    while await llm.call(lambda each: each.llm_engine.has_unfinished_requests):
        await asyncio.sleep(0.005)
    await llm.call(lambda each: assert_all_free(each.llm_engine))


def test_a_stream_is_asyncllms(llm: AsyncLLM) -> None:
    params = replace(GREEDY, logprobs=2, prompt_logprobs=1)

    async def work(engine: RemoteEngine) -> None:
        pairs = []
        for each in (llm, engine):
            await llm.reset_prefix_cache()
            stream = await each.stream(PROMPT, params)
            deltas = await stream.take()
            begun = stream.begun()
            while stream.output is None:
                deltas += await stream.take()
            assert await stream.take() == []
            stream.close()
            pairs.append((deltas, begun, stream.output))
        (mine, my_begun, mine_whole), (theirs, their_begun, their_whole) = pairs
        for name in ("text", "token_ids", "logprobs"):
            joined = [sum((tuple(getattr(d, name)) for d in each), ()) for each in (mine, theirs)]
            assert joined[0] == joined[1] and joined[0]
        assert their_begun == replace(my_begun, request_id=their_begun.request_id)
        assert their_begun.prompt == "abc" and their_begun.prompt_logprobs
        times = their_whole.metrics
        assert times.arrival_time < times.first_token_time < times.finished_time
        cost = replace(mine_whole, request_id=their_whole.request_id, metrics=times)
        assert their_whole == cost

    run(llm, work)


def test_is_queued_until_its_first_step(tiny: Callable[[str], Path]) -> None:
    async def work(engine: RemoteEngine) -> None:
        first = await engine.stream(PROMPT, replace(GREEDY, max_tokens=480))
        second = await engine.stream(PROMPT, GREEDY)
        while first.is_queued:
            await asyncio.sleep(0.005)
        await asyncio.sleep(3 * LOOK_S)
        assert second.is_queued
        first.close()
        while second.is_queued:  # nobody reads it
            await asyncio.sleep(0.005)
        assert second.output is None

    with (
        closing(AsyncLLM(tiny("llama"), **SETTINGS, max_num_seqs=1)) as llm,
        standing_still_once_one_runs(llm),
    ):
        run(llm, work)


def test_what_comes_right_after_the_answer_is_heard(llm: AsyncLLM) -> None:
    """In one read: that a stream is open, and that its request is no longer queued."""

    async def main() -> None:
        told = message_of(line_of(told_of_model(await llm.call(facts_of))))
        mine, theirs = socket.socketpair()
        engine = RemoteEngine(mine, told, lambda: EngineError("the process ended"))
        reader, writer = await asyncio.open_connection(sock=theirs)
        async with asyncio.timeout(PATIENCE_S), engine.connected():
            opening = asyncio.create_task(engine.stream(PROMPT, GREEDY))
            number = message_of(await reader.readline())["id"]
            writer.write(line_of({"id": number, "answer": None}) + line_of({"id": number}))
            assert not (await opening).is_queued
            writer.close()

    asyncio.run(main())


@pytest.mark.parametrize("how", ["close", "drop", "cancel", "fail"])
def test_whatever_ends_a_stream_frees_its_request(llm: AsyncLLM, how: str) -> None:
    async def work(engine: RemoteEngine) -> None:
        params = replace(GREEDY, max_tokens=400)
        if how == "cancel":
            opening = asyncio.create_task(engine.stream(PROMPT, params))
            await asyncio.sleep(0)
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
        else:
            stream = await engine.stream(PROMPT, params)
            assert await stream.take()
            if how == "close":
                stream.close()
                stream.close()
            elif how == "fail":
                stream.fail(TransferError("lost"))
                with pytest.raises(TransferError, match="lost"):
                    await stream.take()
                assert isinstance(stream.error, TransferError)
            del stream
        await engine.stats()  # comes after what was said
        await wait_until_free(llm)
        assert (await engine.stats()).num_output_tokens < 400

    with stepping_to_begin(llm):
        run(llm, work)


def test_a_request_that_is_closed_before_it_has_begun(llm: AsyncLLM) -> None:
    """Both messages come at once."""

    async def main() -> None:
        mine, theirs = socket.socketpair()
        with mine:
            _, writer = await asyncio.open_connection(sock=theirs)
            requests = Requests(llm, await llm.call(facts_of), writer)
            opened = line_of({"do": "open", "id": 3, "ids": [5], "salt": None, "params": GREEDY})
            requests.hear(message_of(opened))
            requests.hear({"do": "close", "id": 3})
            requests.hear({"do": "close", "id": 3})
            async with asyncio.timeout(PATIENCE_S):
                while requests.num_open:
                    await asyncio.sleep(0.005)
            await wait_until_free(llm)
            writer.close()

    asyncio.run(main())


def test_errors_are_of_their_classes(llm: AsyncLLM) -> None:
    async def work(engine: RemoteEngine) -> None:
        with pytest.raises(InvalidPromptError, match="token id 9999 is outside"):
            await engine.stream({"prompt_token_ids": [9999]}, GREEDY)
        await engine.check_health()
        with standing_still(llm):
            stream = await engine.stream(PROMPT, GREEDY)
            await llm.call(break_engine)
        with pytest.raises(EngineError, match="RuntimeError: device lost") as raised:
            await stream.whole()
        assert "device_lost" in str(raised.value.__cause__)  # where it was raised
        with pytest.raises(EngineClosedError, match="device lost"):
            await engine.check_health()
        with pytest.raises(EngineClosedError):
            await engine.stream(PROMPT, GREEDY)

    run(llm, work)


def test_the_end_of_the_worker_reaches_everybody(llm: AsyncLLM) -> None:
    async def main() -> None:
        facts = await llm.call(facts_of)
        mine, theirs = socket.socketpair()
        told = message_of(line_of(told_of_model(facts)))
        engine = RemoteEngine(mine, told, lambda: EngineError("the process was killed"))
        async with asyncio.timeout(PATIENCE_S), engine.connected():
            waiting = asyncio.create_task(engine.stats())
            await asyncio.sleep(0.01)
            theirs.close()
            with pytest.raises(EngineClosedError, match="the process was killed"):
                await waiting
            with pytest.raises(EngineClosedError):
                await engine.stream(PROMPT, GREEDY)

    asyncio.run(main())


# Records as messages and back.

NUMBERS = st.floats() | st.sampled_from([math.nan, math.inf, -math.inf, -0.0])
TEXTS = st.text(st.characters()) | st.sampled_from(["", "\ud800", "a\udfff\n", "é", "\U0001f600"])
IDS = st.integers(0, (1 << 31) - 1)
LOGPROBS = st.dictionaries(IDS, st.builds(Logprob, NUMBERS, IDS, st.none() | TEXTS), max_size=3)
STOPS = st.none() | IDS | TEXTS
REASONS = st.sampled_from([None, "stop", "length", "abort", "error"])
ERRORS = st.builds(lambda kind, text: kind(text), st.sampled_from([TransferError]), TEXTS)


def through(kind: Any, value: Any) -> Any:
    said = deltas_of([value])[0] if isinstance(value, StreamDelta) else value
    return record(kind, message_of(line_of({"value": said}))["value"])


def shown(value: Any) -> str:
    """With NaN, which does not equal itself, and the class of errors."""
    return repr(value) + repr(getattr(value, "metrics", None))


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    st.builds(
        StreamDelta,
        st.integers(0),
        st.integers(0, 9),
        TEXTS,
        st.lists(IDS, max_size=4).map(tuple),
        REASONS,
        STOPS,
        st.none() | ERRORS,
        st.none() | st.lists(LOGPROBS, max_size=3).map(tuple),
    )
)
def test_deltas_go_through(delta: StreamDelta) -> None:
    found = through(StreamDelta, delta)
    assert shown(found) == shown(delta)
    assert str(found) == delta.text


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    st.builds(
        RequestOutput,
        st.integers(0) | TEXTS,
        st.none() | TEXTS,
        st.lists(IDS, max_size=4),
        st.lists(
            st.builds(
                CompletionOutput,
                st.integers(0, 9),
                TEXTS,
                st.lists(IDS, max_size=4),
                REASONS,
                STOPS,
                st.none() | st.lists(LOGPROBS, max_size=3),
                st.none() | NUMBERS,
            ),
            max_size=2,
        ),
        finished=st.booleans(),
        metrics=st.none()
        | st.builds(RequestMetrics, NUMBERS, st.none() | NUMBERS, num_tokens=IDS, h2d_bytes=IDS),
        num_cached_tokens=IDS,
        num_host_cached_tokens=IDS,
        error=st.none() | ERRORS,
        prompt_logprobs=st.none() | st.lists(st.none() | LOGPROBS, max_size=3),
    )
)
def test_outputs_go_through(output: RequestOutput) -> None:
    assert shown(through(RequestOutput, output)) == shown(output)


FORMS = st.sampled_from(
    [
        *({"json": {"é": [1, None]}}, {"json": "{}"}, {"regex": "a"}, {"choice": ["a", "b"]}),
        *({"grammar": "start: /a/"}, {"json_object": True}),
    ]
)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(0.02, 100),
            "top_k": st.integers(-1, 1 << 30),
            "top_p": st.floats(0.001, 1),
            "min_p": st.floats(0, 1),
            "seed": st.none() | st.integers(-(1 << 63), (1 << 64) - 1),
            "stop": st.none() | st.lists(st.text(min_size=1), max_size=3),
            "stop_token_ids": st.none() | st.lists(IDS, max_size=3),
            "ignore_eos": st.booleans(),
            "max_tokens": st.none() | st.integers(50, 99),
            "min_tokens": st.integers(0, 50),
            "skip_special_tokens": st.booleans(),
            "repetition_penalty": st.floats(0.01, 100),
            "presence_penalty": st.floats(-2, 2),
            "frequency_penalty": st.floats(-2, 2),
            "logit_bias": st.none() | st.dictionaries(IDS, st.floats(-100, 100), max_size=3),
            "allowed_token_ids": st.none() | st.lists(IDS, min_size=1, max_size=3),
            "bad_words": st.none() | st.lists(st.text(min_size=1), max_size=3),
            "logprobs": st.none() | st.integers(0, 20),
            "prompt_logprobs": st.none() | st.integers(0, 20),
            "n": st.integers(1, 1024),
            "include_stop_str_in_output": st.booleans(),
            "structured_outputs": st.none() | FORMS,
            "thinking_token_budget": st.none() | st.integers(0, 99),
        },
    )
)
def test_parameters_go_through(given_params: dict[str, Any]) -> None:
    params = SamplingParams(**{"max_tokens": 99} | given_params)
    assert through(SamplingParams, params) == params


def test_every_field_is_among_the_parameters_tried() -> None:
    changed = SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.5,
        min_p=0.1,
        seed=-2,
        stop=["a"],
        stop_token_ids=[1],
        ignore_eos=True,
        max_tokens=None,
        min_tokens=2,
        skip_special_tokens=False,
        repetition_penalty=2,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={4: 1.5},
        allowed_token_ids=[1],
        bad_words=["b"],
        logprobs=1,
        prompt_logprobs=0,
        n=2,
        include_stop_str_in_output=True,
        structured_outputs={"json": {"type": "object"}, "after_thinking": True},
        thinking_token_budget=5,
    )
    plain = SamplingParams()
    same = {name for name in plain.__slots__ if getattr(plain, name) == getattr(changed, name)}
    assert same == {"detokenize"}
    silent = replace(plain, detokenize=False)
    assert [through(SamplingParams, each) for each in (changed, silent)] == [changed, silent]


def test_statistics_go_through() -> None:
    use = TierUse(4, 3, 2, 1)
    stats = EngineStats(("a", "b"), use, None, *range(14), {5: 6, 128: 7})
    for each in (stats, replace(stats, host=use)):
        assert through(EngineStats, each) == each
    blocks = RequestBlocks(3, "running", 4, 5, 5, True, 2, 1, (("device", 2), ("host", 70)))
    each = BlockMap(1.5, 16, 1 << 20, stats, (blocks, blocks))
    assert through(BlockMap, each) == each


def test_errors_go_through() -> None:
    for name, kind in vars(our_errors).items():
        if isinstance(kind, type) and issubclass(kind, EngineError):
            found = error_of(message_of(line_of({"error": kind(f"of {name}")}))["error"])
            assert (type(found), str(found), found.__cause__) == (kind, f"of {name}", None)
    try:
        raise ZeroDivisionError("x")
    except ZeroDivisionError as error:
        found = error_of(message_of(line_of({"error": error}))["error"])
    assert str(found) == "ZeroDivisionError: x" and "raise Zero" in str(found.__cause__)


@pytest.mark.parametrize("line", [b"{\n", b"[]\n", b"\xff\n", b""])
def test_a_damaged_line_is_said(line: bytes) -> None:
    with pytest.raises(EngineError, match="a damaged message between processes"):
        message_of(line)
