"""AsyncLLM: many callers, on loops of several threads, get LLM.generate's outputs, and leave
nothing behind however they end.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from driver import assert_all_free, break_engine, fail_copies, host_gib
from paced_engine import standing_still, stepping_as_read, stepping_to_begin

from nanoengine import (
    LLM,
    AsyncLLM,
    ConfigError,
    InvalidParamsError,
    InvalidPromptError,
    PromptTooLongError,
    RequestOutput,
    SamplingParams,
    StreamDelta,
)
from nanoengine.api.engine_thread import EngineThread
from nanoengine.engine import completion
from nanoengine.engine.output_processor import RequestState
from nanoengine.errors import (
    EngineClosedError,
    EngineError,
    ModelNotFoundError,
    RequestError,
    TransferError,
)
from nanoengine.text.tokenizer import Tokenizer

BLOCK = 4
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "kvcache_block_size": BLOCK,
    "num_gpu_blocks": 400,
    "num_threads": 1,
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
pytestmark = pytest.mark.usefixtures("threads_as_before")
LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)


@pytest.fixture(scope="module")
def shared(tiny: Callable[[str], Path]) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(tiny("llama"), **SETTINGS)
    yield llm
    llm.close()
    assert_no_thread()


@pytest.fixture(scope="module")
def plain(tiny: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(tiny("llama"), **SETTINGS) as llm:
        yield llm


def run(work: Coroutine[Any, Any, Any]) -> Any:
    async def in_time() -> Any:
        return await asyncio.wait_for(work, 200)

    return asyncio.run(in_time())


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "nanoengine"]


def assert_no_thread(known: int = 0) -> None:
    assert len(engine_threads()) == known


async def collect(llm: AsyncLLM, prompt: Any, params: Any = GREEDY, **more: Any) -> Any:
    """All outputs of one request; each must go on from the one before."""
    outputs: list[RequestOutput] = []
    async for output in llm.generate(prompt, params, **more):
        assert not (outputs and outputs[-1].finished)
        if outputs:
            old, new = outputs[-1].outputs[0], output.outputs[0]
            assert new.text.startswith(old.text) and len(new.text) >= len(old.text)
            assert new.token_ids[: len(old.token_ids)] == old.token_ids
        outputs.append(output)
    assert outputs[-1].finished
    return outputs


async def last(llm: AsyncLLM, prompt: Any, params: Any = GREEDY, **more: Any) -> RequestOutput:
    outputs = await collect(llm, prompt, params, **more)
    return outputs[-1]


async def assert_idle(llm: AsyncLLM) -> None:
    """Nothing is left of any request."""

    def check(inner: LLM) -> None:
        assert not inner.llm_engine.has_unfinished_requests
        assert_all_free(inner.llm_engine)

    await llm.call(check)
    assert not llm._engine._open and not llm._engine._by_id


def same(found: RequestOutput, expected: RequestOutput) -> None:
    assert found.outputs == expected.outputs
    assert (found.prompt, found.prompt_token_ids) == (expected.prompt, expected.prompt_token_ids)
    assert found.finished and found.error is None


def test_fifty_callers_get_what_generate_gives(shared: AsyncLLM, plain: LLM) -> None:
    text = plain.generate("x0", LONG, use_tqdm=False)[0]["text"]
    prompts: list[Any] = [f"x{i}" for i in range(50)]
    prompts[7] = plain.tokenizer.encode("seven")
    prompts[8] = {"prompt": "eight", "cache_salt": "me"}
    each = [
        SamplingParams(temperature=i % 3, seed=i, max_tokens=5 + i, stop=["zz", text[20:22]])
        for i in range(50)
    ]

    async def work() -> list[RequestOutput]:
        found = await asyncio.gather(
            *(last(shared, prompts[i], each[i], request_id=f"r{i}") for i in range(50))
        )
        await assert_idle(shared)
        return found

    found = run(work())
    for i, (output, expected) in enumerate(
        zip(found, plain.generate(prompts, each, use_tqdm=False), strict=True)
    ):
        same(output, expected)
        assert output.request_id == f"r{i}" and output.metrics is not None
    assert {output.outputs[0].finish_reason for output in found} == {"length", "stop"}


def test_outputs_come_as_tokens_come(shared: AsyncLLM) -> None:
    with stepping_as_read(shared):
        outputs = run(collect(shared, "slowly", LONG))
    counts = [len(output.outputs[0].token_ids) for output in outputs]
    assert counts == [*range(1, 301)]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert len({output.request_id for output in outputs}) == 1


def test_logprobs_so_far(shared: AsyncLLM, plain: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    (expected,) = plain.generate("so far", params, use_tqdm=False)[0].outputs

    async def ask() -> None:
        async for output in shared.generate("so far", params):
            (found,) = output.outputs
            num = len(found.token_ids)
            assert found.logprobs == expected.logprobs[:num]
            own = [s[i].logprob for i, s in zip(found.token_ids, found.logprobs, strict=True)]
            assert found.cumulative_logprob == pytest.approx(sum(own), abs=1e-9)
        assert found == expected

    asyncio.run(ask())


def test_logprobs_so_far_are_looked_at_once(
    shared: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_looks = [0]

    class Counted(dict[int, Any]):
        def __getitem__(self, key: int) -> Any:
            num_looks[0] += 1
            return super().__getitem__(key)

    real = completion.token_logprobs
    monkeypatch.setattr(completion, "token_logprobs", lambda *args: Counted(real(*args)))
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=0)
    with stepping_as_read(shared):
        outputs = run(collect(shared, "look", params))
    assert len(outputs) == 60 and 60 <= num_looks[0] <= 2 * 60  # not each time at all so far


def test_a_stream_gives_what_is_new(shared: AsyncLLM, plain: LLM) -> None:
    params = SamplingParams(max_tokens=40, n=2, seed=4, ignore_eos=True, logprobs=0)
    (expected,) = plain.generate("anew", params, use_tqdm=False)

    async def work() -> None:
        texts, ids = ["", ""], [[], []]
        stream = await shared.stream("anew", params, "mine")
        assert stream.output is None and stream.begun().prompt == "anew"
        async for delta in stream:
            assert len(delta.token_ids) == len(delta.logprobs)
            texts[delta.index] += delta
            ids[delta.index] += delta.token_ids
        assert texts == [made.text for made in expected.outputs]
        assert ids == [made.token_ids for made in expected.outputs]
        same(stream.output, expected)
        assert stream.output.request_id == "mine" and await stream.take() == []
        whole = await (await shared.stream("anew", params)).whole()
        assert whole.finished and [made.text for made in whole.outputs] == texts
        with pytest.raises(PromptTooLongError):
            await shared.stream([5] * 600)
        await assert_idle(shared)

    run(work())


def test_a_stream_that_has_begun_knows_its_prompt(shared: AsyncLLM, plain: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1)
    (expected,) = plain.generate("begin", params, use_tqdm=False)

    async def work() -> None:
        stream = await shared.stream("begin", params)
        await stream.take()
        assert not stream.is_queued
        begun = stream.begun()
        assert begun.prompt_logprobs == expected.prompt_logprobs and not begun.finished

    run(work())


def test_every_output_knows_its_prompt(shared: AsyncLLM, plain: LLM) -> None:
    """Also the unfinished ones: what was found in the prefix cache, and the prompt's scores."""
    prompt = [7] * (3 * BLOCK)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    scored = replace(params, prompt_logprobs=1)
    (expected,) = plain.generate([prompt], scored, use_tqdm=False)

    async def work() -> None:
        for output in await collect(shared, prompt, params):
            assert output.num_cached_tokens == len(prompt) - 1
        outputs = await collect(shared, prompt, scored)
        assert len(outputs) > 1 and not outputs[0].finished
        for output in outputs:
            assert output.prompt_logprobs == expected.prompt_logprobs

    run(last(shared, prompt))
    with stepping_as_read(shared):
        run(work())


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_stream_that_is_failed_raises_that(shared: AsyncLLM, is_whole: bool) -> None:
    async def work() -> None:
        stream = await shared.stream("fails", LONG)
        reading = asyncio.ensure_future(stream.whole() if is_whole else collect_deltas(stream))
        await asyncio.sleep(0.01)
        stream.fail(KeyError("why"))
        with pytest.raises(KeyError, match="why"):
            await reading
        await assert_idle(shared)

    with standing_still(shared):
        run(work())


@pytest.mark.parametrize("is_early", [True, False])
def test_who_reads_a_stream_that_is_closed_does_not_wait_for_ever(
    shared: AsyncLLM, is_early: bool
) -> None:
    async def work() -> None:
        stream = await shared.stream("closed", LONG)
        if is_early:
            stream.close()
        reading = asyncio.ensure_future(stream.whole())
        await asyncio.sleep(0.01)
        stream.close()
        with pytest.raises(EngineError, match="the stream was closed"):
            await reading
        await assert_idle(shared)

    with standing_still(shared):
        run(work())


def test_the_first_end_of_a_stream_stays(shared: AsyncLLM) -> None:
    async def work() -> None:
        stream = await shared.stream("fails", LONG)
        stream.fail(KeyError("why"))
        stream.fail(ValueError("later"))
        stream._mailbox.put([])  # as the engine may meanwhile
        with pytest.raises(KeyError, match="why"):
            await stream.take()
        await assert_idle(shared)

    with standing_still(shared):
        run(work())


async def collect_deltas(stream: Any) -> list[Any]:
    return [delta async for delta in stream]


def test_a_stream_that_is_dropped_ends(shared: AsyncLLM) -> None:
    async def work() -> None:
        stream = await shared.stream("dropped", LONG)
        await stream.take()
        del stream
        gc.collect()
        await assert_idle(shared)

    run(work())


def test_health(tiny: Callable[[str], Path]) -> None:
    llm = AsyncLLM(tiny("llama"), **SETTINGS)
    run(llm.check_health())
    llm.close()
    with pytest.raises(EngineClosedError):
        run(llm.check_health())


def test_health_after_a_function_that_closed_the_engine(tiny: Callable[[str], Path]) -> None:
    llm = AsyncLLM(tiny("llama"), **SETTINGS)

    async def work() -> None:
        stream = await llm.stream("open", LONG)
        await stream.take()
        await llm.call(LLM.close)
        with pytest.raises(EngineClosedError, match="was closed; make a new AsyncLLM"):
            while True:
                await stream.take()
        with pytest.raises(EngineClosedError, match="was closed; make a new AsyncLLM"):
            await llm.check_health()

    with stepping_as_read(llm):
        run(work())


def test_chat(shared: AsyncLLM, plain: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]

    async def work() -> None:
        async for output in shared.chat(messages, GREEDY):
            final = output
        same(final, plain.chat(messages, GREEDY, use_tqdm=False)[0])
        assert (await shared.get_tokenizer()).encode("a") == plain.tokenizer.encode("a")

    run(work())


def test_a_request_arrives_when_its_caller_asks(shared: AsyncLLM) -> None:
    """The engine may be in the middle of a long step."""

    async def work(ask: Callable[[], AsyncGenerator[RequestOutput, None]]) -> None:
        busy = asyncio.ensure_future(shared.call(lambda _: time.sleep(0.5)))
        await asyncio.sleep(0.05)
        asked = time.perf_counter()
        output = [each async for each in ask()][-1]
        assert 0 <= output.metrics.arrival_time - asked < 0.2
        assert output.metrics.ttft_s is not None and output.metrics.ttft_s > 0.3
        await busy

    run(work(lambda: shared.generate("a", GREEDY)))
    run(work(lambda: shared.chat([{"role": "user", "content": "a"}], GREEDY)))


def test_deltas_have_the_name_of_their_request(shared: AsyncLLM) -> None:
    async def work() -> list[Any]:
        async with await shared.stream("a", GREEDY, request_id="mine") as stream:
            return [stream.request_id, *[delta.request_id async for delta in stream]]

    assert set(run(work())) == {"mine"}


def test_abort_ends_one_request_with_an_output(shared: AsyncLLM, plain: LLM) -> None:
    async def aborting() -> RequestOutput:
        async for output in shared.generate("left", LONG, request_id="mine"):
            if not output.finished and len(output.outputs[0].token_ids) < 5:
                continue
            await shared.abort("mine")
        return output

    async def work() -> tuple[RequestOutput, RequestOutput]:
        await shared.abort("nobody")
        aborted, other = await asyncio.gather(aborting(), last(shared, "other", LONG))
        await assert_idle(shared)
        return aborted, other

    with stepping_as_read(shared):
        aborted, other = run(work())
    full = plain.generate("left", LONG, use_tqdm=False)[0].outputs[0]
    end = aborted.outputs[0]
    assert aborted.finished and end.finish_reason == "abort" and aborted.request_id == "mine"
    assert len(end.token_ids) == 5
    assert end.token_ids == full.token_ids[: len(end.token_ids)]
    same(other, plain.generate("other", LONG, use_tqdm=False)[0])


def test_several_are_aborted_at_once(shared: AsyncLLM) -> None:
    async def work() -> list[RequestOutput]:
        names = [str(i) for i in range(5)]
        tasks = [asyncio.create_task(last(shared, name, LONG, request_id=name)) for name in names]
        while len((await shared.block_map()).requests) < 5:
            await asyncio.sleep(0.001)
        await shared.abort(name for name in [*names[:4], "1", "nobody"])
        ended = await asyncio.gather(*tasks[:4])
        await shared.abort(["4"])
        return [*ended, await tasks[4]]

    with stepping_to_begin(shared):
        assert {output.outputs[0].finish_reason for output in run(work())} == {"abort"}


def test_a_step_looks_at_no_request_that_waits(
    shared: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, steps = [0], [0]
    new_deltas, step = RequestState.new_deltas, EngineThread._step

    def counted(state: RequestState) -> list[StreamDelta]:
        looks[0] += 1
        return new_deltas(state)

    def counted_step(thread: EngineThread, llm: LLM) -> None:
        steps[0] += 1
        step(thread, llm)

    async def work() -> None:
        with standing_still(shared):
            prompts = ([1, 2 + i % 200] for i in range(400))
            tasks = [asyncio.create_task(last(shared, prompt, GREEDY)) for prompt in prompts]
            while len(shared._engine._open) < 400:
                await asyncio.sleep(0.001)
        await asyncio.gather(*tasks)

    monkeypatch.setattr(RequestState, "new_deltas", counted)
    monkeypatch.setattr(EngineThread, "_step", counted_step)
    run(work())
    assert steps[0] > 50 and looks[0] <= 80 * steps[0]  # 64 run


async def cancelled(llm: AsyncLLM) -> None:
    started = asyncio.Event()

    async def reading() -> None:
        async for _ in llm.generate("gone", LONG):
            started.set()

    task = asyncio.create_task(reading())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def cancelled_at_once(llm: AsyncLLM) -> None:
    task = asyncio.create_task(collect(llm, "gone", LONG))
    await asyncio.sleep(0)  # the request is posted, the engine has not answered
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def closed(llm: AsyncLLM) -> None:
    outputs = llm.generate("gone", LONG)
    await anext(outputs)
    await outputs.aclose()


async def broken_off(llm: AsyncLLM) -> None:
    async for _ in llm.generate("gone", LONG):
        break
    gc.collect()
    await asyncio.sleep(0.01)  # the loop closes the generator in a task of its own


async def timed_out(llm: AsyncLLM) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await collect(llm, "gone", LONG)


@pytest.mark.parametrize("leave", [cancelled, cancelled_at_once, closed, broken_off, timed_out])
def test_a_caller_that_leaves_ends_its_request(
    shared: AsyncLLM, plain: LLM, leave: Callable[[AsyncLLM], Coroutine[Any, Any, None]]
) -> None:
    async def work() -> RequestOutput:
        other = asyncio.create_task(last(shared, "other"))
        await leave(shared)
        found = await other
        await assert_idle(shared)
        return found

    with stepping_as_read(shared):
        same(run(work()), plain.generate("other", GREEDY, use_tqdm=False)[0])


def test_requests_that_are_left_at_the_same_time_are_looked_for_once(
    shared: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[Any]] = []

    async def work() -> None:
        scheduler = await shared.call(lambda llm: llm.llm_engine.scheduler)
        abort, is_held, go_on = scheduler.abort, threading.Event(), threading.Event()

        def hold(_: LLM) -> None:
            is_held.set()
            assert go_on.wait(60)

        def counted(seqs: Any) -> Any:
            calls.append([*seqs])
            return abort(calls[-1])

        streams = await asyncio.gather(*(shared.stream([1, 2, i], LONG) for i in range(20)))
        monkeypatch.setattr(scheduler, "abort", counted)
        waiting = asyncio.ensure_future(shared.call(hold))
        while not is_held.is_set():
            await asyncio.sleep(0.001)
        for stream in streams:
            stream.close()
        go_on.set()
        await waiting
        await assert_idle(shared)

    with standing_still(shared):
        run(work())
    assert [len(seqs) for seqs in calls if seqs] == [20]


def test_a_caller_that_lags_gets_the_newest_and_holds_up_nobody(
    shared: AsyncLLM, plain: LLM
) -> None:
    async def work() -> tuple[list[RequestOutput], RequestOutput]:
        lagging = shared.generate("slow", LONG)
        with stepping_as_read(shared):
            found = [await anext(lagging)]
            (mailbox,) = shared._engine._open
        other = await last(shared, "quick", LONG)
        assert len(mailbox._deltas) == 1
        found += [output async for output in lagging]
        return found, other

    found, other = run(work())
    same(found[-1], plain.generate("slow", LONG, use_tqdm=False)[0])
    same(other, plain.generate("quick", LONG, use_tqdm=False)[0])
    assert len(found) < 100  # of 300 tokens


def test_loops_of_two_threads_at_once(shared: AsyncLLM, plain: LLM) -> None:
    found: dict[str, RequestOutput] = {}

    async def several(name: str) -> None:
        for output in await asyncio.gather(*(last(shared, f"{name}{i}") for i in range(4))):
            found[str(output.prompt)] = output

    threads = [threading.Thread(target=lambda n=name: run(several(n))) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 8
    for prompt, output in found.items():
        same(output, plain.generate(prompt, GREEDY, use_tqdm=False)[0])
    run(assert_idle(shared))


def test_what_ends_within_a_call_reaches_its_caller(shared: AsyncLLM, plain: LLM) -> None:
    """LLM's own methods step the engine, beside open requests: these begin just before."""
    is_held, go_on = threading.Event(), threading.Event()

    def hold(_: LLM) -> None:
        is_held.set()
        assert go_on.wait(60)

    async def work() -> list[Any]:
        holding = asyncio.create_task(shared.call(hold))
        while not is_held.is_set():
            await asyncio.sleep(0.001)
        beside = [asyncio.create_task(last(shared, prompt)) for prompt in ("short", "another")]
        while len(shared._engine._posted) < 2:
            await asyncio.sleep(0.001)
        generating = shared.call(lambda llm: llm.generate("long", LONG, use_tqdm=False))
        calling = asyncio.create_task(generating)
        await asyncio.sleep(0)
        go_on.set()
        await holding
        made = await calling
        beams = await shared.call(lambda llm: llm.beam_search("b", beam_width=2, max_tokens=20))
        found = [*await asyncio.gather(*beside), *made]
        await assert_idle(shared)
        return [found, beams]

    found, beams = run(work())
    expected = plain.generate(["short", "another"], GREEDY, use_tqdm=False)
    expected += plain.generate(["long"], LONG, use_tqdm=False)
    for output, wanted in zip(found, expected, strict=True):
        same(output, wanted)
    assert beams == plain.beam_search("b", beam_width=2, max_tokens=20)


def test_a_loop_that_is_closed_under_its_caller_ends_the_request(
    shared: AsyncLLM, plain: LLM
) -> None:
    loop = asyncio.new_event_loop()
    outputs = shared.generate("gone", LONG)
    loop.run_until_complete(anext(outputs))
    loop.close()
    same(run(last(shared, "other")), plain.generate("other", GREEDY, use_tqdm=False)[0])
    run(assert_idle(shared))


def test_neither_the_engine_nor_the_loop_waits_for_a_text(
    shared: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are encoded, and conversations rendered, in other threads."""
    threads: list[threading.Thread] = []
    talk = [{"role": "user", "content": "a word"}]

    def noting(name: str) -> None:
        real = getattr(Tokenizer, name)

        def noted(self: Tokenizer, text: Any, *args: Any, **kwargs: Any) -> Any:
            if "a word" in str(text):
                threads.append(threading.current_thread())
            return real(self, text, *args, **kwargs)

        monkeypatch.setattr(Tokenizer, name, noted)

    async def work() -> None:
        salted = {"prompt": "a word", "cache_salt": "x"}
        for prompt in ("a word", salted, talk):
            await last(shared, prompt)
            await collect_deltas(await shared.stream(prompt, GREEDY))
        assert [output async for output in shared.chat(talk, GREEDY)]
        await collect_deltas(await shared.stream_chat(talk, GREEDY))

    noting("encode")
    noting("apply_chat_template")
    run(work())
    assert len(threads) == 4 + 2 * 4
    assert not {*threads} & {threading.current_thread(), *engine_threads()}


def test_a_text_of_too_many_characters_is_refused_before_it_is_encoded(
    shared: AsyncLLM, plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = plain.plan.max_model_len
    longest = max(map(len, plain.tokenizer.backend.get_vocab()))
    text = "a" * (limit * longest + 1)
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("it was encoded"))
    talk = [{"role": "user", "content": text}]
    for call in (plain.generate, plain.stream, plain.chat, plain.stream_chat):
        with pytest.raises(PromptTooLongError, match=f"characters, and {limit} tokens"):
            call(talk if "chat" in call.__name__ else text, GREEDY)
    for stream in (shared.stream(text), shared.stream_chat(talk)):
        with pytest.raises(PromptTooLongError, match="characters"):
            run(stream)


def test_bad_requests_raise_what_generate_raises(shared: AsyncLLM) -> None:
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        ({"prompt_token_ids": []}, GREEDY, InvalidPromptError, "empty"),
        ([5] * 600, GREEDY, PromptTooLongError, "600 tokens"),
        (["a", "b"], GREEDY, InvalidPromptError, "one prompt"),
        (3, GREEDY, InvalidPromptError, "prompts must be"),
        ("a", "greedy", InvalidParamsError, "SamplingParams"),
    ]

    async def work() -> None:
        for prompt, params, error, words in cases:
            with pytest.raises(error, match=words):
                await collect(shared, prompt, params)
        first = shared.generate("a", LONG, request_id="same")
        await anext(first)
        with pytest.raises(RequestError, match="'same' is in use"):
            await collect(shared, "b", request_id="same")
        await first.aclose()
        await last(shared, "b", request_id="same")
        with pytest.raises(RequestError, match="a string or None"):
            await collect(shared, "b", request_id=3)
        await assert_idle(shared)

    with stepping_as_read(shared):
        run(work())


def test_an_idle_engine_sleeps(shared: AsyncLLM) -> None:
    async def work() -> float:
        before = await shared.call(lambda _: time.thread_time())
        await asyncio.sleep(0.2)
        return await shared.call(lambda _: time.thread_time()) - before

    assert min(run(work()) for _ in range(3)) < 0.02  # unless it just collects garbage


def test_over_two_tiers(tiny: Callable[[str], Path], plain: LLM) -> None:
    prompts = [[(7 * i + n) % 250 + 4 for i in range(n)] for n in (30, 41, 52)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    settings = {"num_gpu_blocks": 6, "enable_cpu_offload": True, "offload_mode": "stream"}
    host = host_gib(tiny("llama"), 80, BLOCK)

    async def work() -> list[RequestOutput]:
        async with AsyncLLM(tiny("llama"), **SETTINGS | settings, kv_offload_gib=host) as llm:
            assert llm.plan.kv.num_host_blocks
            found = await asyncio.gather(*(last(llm, p, params) for p in prompts))
            await assert_idle(llm)
            # From here on no copy arrives.
            await llm.call(
                lambda inner: fail_copies(inner.llm_engine.device.h2d, set(range(10_000)))
            )
            with pytest.raises(TransferError):
                await last(llm, prompts[2], params)
            await last(llm, "hi")
            return found

    for output, expected in zip(
        run(work()), plain.generate(prompts, params, use_tqdm=False), strict=True
    ):
        same(output, expected)


def test_an_engine_that_fails_tells_everyone(tiny: Callable[[str], Path]) -> None:
    known = len(engine_threads())
    llm = AsyncLLM(tiny("llama"), **SETTINGS)

    async def work() -> None:
        with standing_still(llm):
            tasks = [asyncio.create_task(collect(llm, f"p{i}", LONG)) for i in range(5)]
            while len(llm._engine._open) < 5:
                await asyncio.sleep(0)
            await llm.call(break_engine)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, RuntimeError) and str(result) == "device lost"
        for call in (lambda: collect(llm, "late"), lambda: llm.abort("x"), llm.get_tokenizer):
            with pytest.raises(EngineClosedError, match="device lost") as caught:
                await call()
            assert isinstance(caught.value.__cause__, RuntimeError)
        await llm.aclose()

    run(work())
    assert_no_thread(known)


@pytest.mark.parametrize("from_thread", [False, True])
def test_closing_ends_open_requests(tiny: Callable[[str], Path], from_thread: bool) -> None:
    known = len(engine_threads())
    llm = AsyncLLM(tiny("llama"), **SETTINGS)

    async def work() -> None:
        outputs = llm.generate("open", LONG)
        await anext(outputs)
        waiting = asyncio.create_task(collect(llm, "waits", LONG))
        await asyncio.sleep(0)
        if from_thread:
            await llm.aclose()
        else:
            llm.shutdown()  # vLLM's name of close()
        with pytest.raises(EngineClosedError, match="closed"):
            async for _ in outputs:
                pass
        with pytest.raises(EngineClosedError, match="closed"):
            await waiting
        with pytest.raises(EngineClosedError, match="closed"):
            await collect(llm, "late")
        llm.close()

    with stepping_as_read(llm):
        run(work())
    assert_no_thread(known)


def test_a_start_that_fails_raises_and_leaves_no_thread(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    known = len(engine_threads())
    with pytest.raises(ConfigError, match="no_such_setting"):
        AsyncLLM(tiny("llama"), no_such_setting=1)
    with pytest.raises(ModelNotFoundError):
        AsyncLLM(tmp_path / "none")
    assert_no_thread(known)


def test_one_that_is_dropped_ends_its_thread(tiny: Callable[[str], Path]) -> None:
    known = len(engine_threads())
    llm = AsyncLLM(tiny("llama"), **SETTINGS)
    run(last(llm, "a"))
    assert len(engine_threads()) == known + 1
    del llm
    gc.collect()
    assert_no_thread(known)
