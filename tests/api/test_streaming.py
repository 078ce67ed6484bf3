"""Text as it comes: deltas joined are the text, stops never leak, a stream left early leaves
nothing.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from driver import assert_all_free, device_lost, fail_copies, host_gib
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine import LLM, InvalidPromptError, PromptTooLongError, SamplingParams, StreamDelta
from nanoengine.api.streaming import DeltaStream
from nanoengine.engine.completion import merge_deltas
from nanoengine.engine.output_processor import RequestState
from nanoengine.errors import EngineClosedError, EngineError, TransferError
from nanoengine.outputs import CompletionOutput, RequestMetrics
from nanoengine.sequence import Request, Sequence, SequenceOutput
from nanoengine.text.answer_pieces import HeldBack, num_held_back
from nanoengine.text.detokenizer import IncrementalDetokenizer
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
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(tiny("llama"), **SETTINGS) as made:
        yield made
        assert_all_free(made.llm_engine)


@pytest.fixture(scope="module")
def tokenizer(tiny: Callable[[str], Path]) -> Tokenizer:
    return Tokenizer.from_folder(tiny("llama"))


def generated(llm: LLM, prompt: Any, params: SamplingParams) -> CompletionOutput:
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]


def joined(deltas: list[StreamDelta]) -> CompletionOutput:
    """What the deltas of one completion add up to."""
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    ids = [token_id for delta in deltas for token_id in delta.token_ids]
    last = deltas[-1]
    return CompletionOutput(0, "".join(map(str, deltas)), ids, last.finish_reason, last.stop_reason)


def held_by_definition(text: str, stops: list[str]) -> int:
    ends = [text[len(text) - n :] for n in range(len(text) + 1)]
    return max(len(e) for e in ends if not e or any(s.startswith(e) and s != e for s in stops))


words = st.text("ab", min_size=1, max_size=5)


@settings(derandomize=True, deadline=None)
@given(st.text("ab", max_size=12), st.lists(words, max_size=3))
def test_what_is_held_back_is_the_longest_beginning_of_a_stop(text: str, stops: list[str]) -> None:
    assert num_held_back(text, stops) == held_by_definition(text, stops)
    held = HeldBack(stops)
    for end in range(len(text) + 1):
        assert held.num(text[:end]) == held_by_definition(text[:end], stops)


def test_long_stops_cost_a_step_no_more_than_short_ones() -> None:
    """64 of 1,000 characters, whose beginnings a client may have the model write, took 34 ms."""
    stops = [f"{'a' * 990}{number:010}" for number in range(64)]
    text, held = f"{'a' * 900}b" * 2, HeldBack(stops)
    begun = time.process_time()
    for end in range(900, len(text)):
        assert held.num(text[:end]) == (0 if text[end - 1] == "b" else end % 901)
    assert time.process_time() - begun < 3


def test_no_delta_comes_before_the_scores_of_the_prompt(tiny: Callable[[str], Path]) -> None:
    """A recurrent state is shared through the prefix cache alone, where whoever scores the prompt
    finds nothing: other completions have tokens long before it.
    """
    prompt = [(7 * i) % 250 + 4 for i in range(33)]
    params = SamplingParams(n=3, seed=0, max_tokens=4, ignore_eos=True, prompt_logprobs=0)
    chunks = {"kvcache_block_size": 8, "max_num_batched_tokens": 12, "max_num_seqs": 4}
    chunks |= {"max_num_partial_prefills": 3, "max_long_partial_prefills": 3}
    with LLM(tiny("qwen3.5"), **SETTINGS | chunks) as llm:
        (whole,) = llm.generate([prompt], params, use_tqdm=False)
        with llm.stream(prompt, params) as stream:
            next(stream)
            assert any(seq.num_cached for seq in stream.request.seqs)
            assert stream.request.prompt_logprobs == whole.prompt_logprobs


def test_a_step_lets_all_streams_go_on(llm: LLM) -> None:
    streams = [llm.stream([5, 6, last], GREEDY) for last in (7, 8)]
    num_steps = 0
    while not all(stream.request.has_ended for stream in streams):
        llm.step()
        num_steps += 1
    assert num_steps <= GREEDY.max_tokens + 2  # both in the same steps
    for last, stream in zip((7, 8), streams, strict=True):
        assert joined(list(stream)) == generated(llm, [5, 6, last], GREEDY)
    llm.step()  # with nothing to do


def sequence(tokenizer: Tokenizer, num_tokens: int, **params: Any) -> Sequence:
    sampling = SamplingParams(**params)
    return Sequence(
        seq_id=7,
        token_ids=[0],
        num_prompt_tokens=1,
        request=Request(sampling, 0, frozenset(sampling.stop_ids), 1 + num_tokens),
        metrics=RequestMetrics(0.0),
        output=SequenceOutput(text_stream=IncrementalDetokenizer(tokenizer)),
    )


@settings(derandomize=True, deadline=None)
@given(
    text=st.text("aéb🙂", min_size=1, max_size=16),
    stops=st.lists(st.text("aéb🙂", min_size=1, max_size=4), max_size=3),
    min_tokens=st.integers(0, 6),
    taken=st.lists(st.booleans(), min_size=64, max_size=64),
)
def test_deltas_over_random_splits_never_show_a_stop_or_half_a_code_point(
    tokenizer: Tokenizer, text: str, stops: list[str], min_tokens: int, taken: list[bool]
) -> None:
    """Bytes are tokens. The right answer is found in the whole text, not as it comes."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    min_tokens = min(min_tokens, len(ids))
    seq = sequence(tokenizer, len(ids), stop=stops, min_tokens=min_tokens, max_tokens=len(ids))
    # A stop counts where its last byte comes after min_tokens; the first to end wins, of those
    # that end together the first to begin.
    hits = [
        (len(text[:end].encode()), at, stop)
        for stop in stops
        for at in range(len(text))
        if text.startswith(stop, at)
        for end in [at + len(stop)]
        if len(text[:end].encode()) > min_tokens
    ]
    whole = text[: min(hits)[1]] if hits else text
    stream, deltas, num_fed = RequestState([seq], tokenizer), [], 0
    for token_id, take in zip(ids, taken, strict=False):
        if seq.is_finished:
            break
        seq.append(token_id)
        num_fed += 1
        if not take:
            continue
        deltas += stream.new_deltas()
        shown = "".join(map(str, deltas))
        assert whole.startswith(shown)
        if not seq.is_finished:
            complete = tokenizer.decode(ids[:num_fed]).rstrip("�")
            assert shown == complete[: len(complete) - held_by_definition(complete, stops)]
    deltas += stream.new_deltas()
    assert stream.has_ended and stream.is_given_out and stream.new_deltas() == []
    end = joined(deltas)
    assert stream.output().outputs == [end]
    assert (end.text, end.token_ids) == (whole, ids[:num_fed])
    assert end.stop_reason == (min(hits)[2] if hits else None)
    assert merge_deltas(deltas) == [
        StreamDelta(7, 0, end.text, tuple(end.token_ids), end.finish_reason, end.stop_reason)
    ]


def test_deltas_of_several_completions_are_told_apart() -> None:
    deltas = [
        StreamDelta(1, 0, "a", (1,)),
        StreamDelta(1, 1, "x", (9,)),
        StreamDelta(1, 0, "b", (2,), "length"),
        StreamDelta(2, 0, "q", (4,)),
    ]
    assert merge_deltas(deltas) == [
        StreamDelta(1, 0, "ab", (1, 2), "length"),
        StreamDelta(1, 1, "x", (9,)),
        StreamDelta(2, 0, "q", (4,)),
    ]


def in_turns(streams: list[DeltaStream]) -> list[list[StreamDelta]]:
    """All deltas of each, read one from each in turn."""
    found: list[list[StreamDelta]] = [[] for _ in streams]
    for row in zip_longest(*streams):
        for deltas, delta in zip(found, row, strict=True):
            deltas += [delta] if delta else []
    return found


def test_deltas_add_up_to_what_generate_gives(llm: LLM) -> None:
    """Random text with every way to end: length, a stop string, a stop token, end of sequence."""
    free = [
        {"temperature": 2.0, "seed": seed, "max_tokens": 30, "ignore_eos": True}
        for seed in range(8)
    ]
    texts = llm.generate(["x"] * 8, [SamplingParams(**f) for f in free], use_tqdm=False)
    each = []
    for seed, text in enumerate(output["text"] for output in texts):
        for extra in (
            {"stop": ["never there", text[16:19]]},
            {"stop": [text[9:10], text[5:11]], "min_tokens": 8},
            {"stop_token_ids": list(range(seed * 10, seed * 10 + 30))},
            {"ignore_eos": False, "temperature": 3.0, "skip_special_tokens": False},
        ):
            each.append(SamplingParams(**(free[seed] | extra)))
    expected = [o.outputs[0] for o in llm.generate(["x"] * len(each), each, use_tqdm=False)]
    assert [joined(d) for d in in_turns([llm.stream("x", params) for params in each])] == expected
    assert {(end.finish_reason, type(end.stop_reason)) for end in expected} == {
        ("length", type(None)),
        ("stop", str),
        ("stop", int),
        ("stop", type(None)),
    }


def test_a_delta_comes_with_every_token(llm: LLM) -> None:
    deltas = list(llm.stream({"prompt": "Hi"}, GREEDY))
    assert [len(delta.token_ids) for delta in deltas] == [1] * 12
    assert {(delta.request_id, delta.index) for delta in deltas} == {(deltas[0].request_id, 0)}


@pytest.mark.parametrize("speculative", [None, "ngram:3"])
def test_logprobs_come_with_their_tokens(
    tiny: Callable[[str], Path], speculative: str | None
) -> None:
    """Also of guessed tokens, those past an end left out."""
    few = [5, 16, 27]  # among few symbols a random model's text repeats itself
    params = SamplingParams(
        temperature=0, max_tokens=30, ignore_eos=True, logprobs=2, allowed_token_ids=few
    )
    prompt = {"prompt_token_ids": few * 6}
    with LLM(tiny("llama"), **SETTINGS, speculative=speculative) as llm:
        expected = generated(llm, prompt, params)
        llm.reset_prefix_cache()  # or another shape of step would round otherwise
        deltas = list(llm.stream(prompt, params))
        plain = list(llm.stream(prompt, GREEDY))
    assert all(len(delta.logprobs or ()) == len(delta.token_ids) for delta in deltas)
    assert [scores for delta in deltas for scores in delta.logprobs or ()] == expected.logprobs
    assert any(len(delta.token_ids) > 1 for delta in deltas) == (speculative is not None)
    (whole,) = merge_deltas(deltas)
    assert list(whole.logprobs or ()) == expected.logprobs
    assert all(delta.logprobs is None for delta in plain)


def test_chat_is_streamed_too(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    expected = llm.chat(messages, GREEDY, use_tqdm=False)[0].outputs[0]
    assert joined(list(llm.stream_chat(messages, GREEDY))) == expected
    with pytest.raises(InvalidPromptError):
        llm.stream_chat([{"role": "user"}], GREEDY)


def test_streams_and_generate_share_the_steps(llm: LLM) -> None:
    prompts = ["one", "another", "a third that is longer"]
    expected = [generated(llm, prompt, LONG) for prompt in prompts]
    num_steps, step = 0, llm.llm_engine.step

    def counting() -> Any:
        nonlocal num_steps
        num_steps += 1
        return step()

    llm.llm_engine.step = counting  # type: ignore[method-assign]
    try:
        streams = [llm.stream(prompt, LONG) for prompt in prompts]
        assert list(map(joined, in_turns(streams))) == expected
    finally:
        del llm.llm_engine.step
    assert num_steps <= 42  # not three times forty

    stream = llm.stream(prompts[0], LONG)
    first = [next(stream)]
    assert generated(llm, prompts[1], LONG) == expected[1]
    rest = list(stream)
    assert joined(first + rest) == expected[0]
    assert len(rest) == 1  # what came while generate() ran comes at once


def leave_by_break(stream: Iterator[StreamDelta]) -> None:
    for _ in stream:
        break


def leave_by_close(stream: Any) -> None:
    next(stream)
    stream.close()
    stream.close()
    assert list(stream) == []


def leave_by_with(stream: Any) -> None:
    with stream:
        next(stream)


def leave_by_cycle(stream: Any) -> None:
    next(stream)
    cycle = [stream]
    cycle.append(cycle)
    del stream


def never_begin(stream: Any) -> None:
    del stream


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "leave", [leave_by_break, leave_by_close, leave_by_with, leave_by_cycle, never_begin]
)
def test_a_stream_that_is_left_frees_its_request(llm: LLM, leave: Callable[[Any], None]) -> None:
    engine = llm.llm_engine
    expected = generated(llm, "goes on", LONG)
    other = llm.stream("goes on", LONG)
    deltas = [next(other)]
    leave(llm.stream("a prompt of some length", LONG))
    gc.collect()
    assert [seq.seq_id for seq in engine.scheduler.running] == [deltas[0].request_id]
    assert not engine.scheduler.waiting
    engine.kv.check()
    assert joined(deltas + list(other)) == expected
    assert_all_free(engine)


def test_garbage_within_a_step_waits_for_its_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, streams = llm.llm_engine, [llm.stream("left", LONG)]
    next(streams[0])
    step = engine.step

    def dropping() -> Any:
        streams.clear()
        assert engine.scheduler.running  # this very step may be about it
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", dropping)
        generated(llm, "other", GREEDY)
    assert not streams and not engine.has_unfinished_requests
    assert_all_free(engine)


@pytest.mark.parametrize("mode", ["stream", "in_place"])
def test_streams_over_two_tiers(tiny: Callable[[str], Path], llm: LLM, mode: str) -> None:
    prompts = [[(7 * i + n) % 250 + 4 for i in range(n)] for n in (50, 61)]
    expected = [generated(llm, prompt, LONG) for prompt in prompts]
    settings = {"num_gpu_blocks": 6, "enable_cpu_offload": True, "offload_mode": mode}
    host = host_gib(tiny("llama"), 60, BLOCK)
    with LLM(tiny("llama"), **SETTINGS | settings, kv_offload_gib=host) as small:
        streams = [small.stream(prompt, LONG) for prompt in prompts]
        for _ in range(5):
            for stream in streams:
                assert next(stream).finish_reason is None
        streams[0].close()
        small.llm_engine.kv.check()
        assert joined(list(small.stream(prompts[1], LONG))) == expected[1]
        del stream, streams
        assert_all_free(small.llm_engine)
        assert joined(list(small.stream(prompts[0], LONG))) == expected[0]


def test_a_step_that_runs_ahead_gives_the_same_deltas(
    tiny: Callable[[str], Path], llm: LLM
) -> None:
    text = generated(llm, "ahead", LONG).text
    each = [LONG, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=text[11:14])]
    expected = [generated(llm, "ahead", params) for params in each]
    with LLM(tiny("llama"), **SETTINGS) as made:
        made.llm_engine.runs_ahead = True
        streams = [made.stream("ahead", params) for params in each]
        assert [joined(list(stream)) for stream in streams] == expected
        left = made.stream("ahead", LONG)
        next(left)
        left.close()
        assert_all_free(made.llm_engine)


def test_a_bad_prompt_raises_at_once_what_generate_raises(llm: LLM) -> None:
    cases: list[tuple[Any, type[Exception], str]] = [
        ({"prompt_token_ids": []}, InvalidPromptError, "empty"),
        (3, InvalidPromptError, "prompts must be"),
        ({"x": 1}, InvalidPromptError, "prompt_token_ids"),
        ([5] * 600, PromptTooLongError, "600 tokens"),
        (["a", "b"], InvalidPromptError, "a list of 2; open a stream for each"),
    ]
    for prompt, error, words in cases:
        with pytest.raises(error, match=words):
            llm.stream(prompt, GREEDY)
    assert not llm.llm_engine.has_unfinished_requests


def test_a_failed_copy_ends_its_stream_alone(tiny: Callable[[str], Path]) -> None:
    """Every copy fails: the request that reads the host ends, one that fits goes on."""
    host = host_gib(tiny("llama"), 60, BLOCK)
    settings = {"num_gpu_blocks": 6, "enable_cpu_offload": True, "offload_mode": "stream"}
    with LLM(tiny("llama"), **SETTINGS | settings, kv_offload_gib=host) as small:
        stream = small.stream([9] * 40, LONG)
        next(stream)
        fail_copies(small.llm_engine.device.h2d, set(range(1000)))
        with pytest.raises(TransferError):
            list(stream)
        assert list(stream) == []
        assert joined(list(small.stream("hi", GREEDY))).finish_reason == "length"


def test_a_failing_step_ends_the_stream_that_stepped(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generated(llm, "other", LONG)
    other, stream = llm.stream("other", LONG), llm.stream("mine", LONG)
    deltas = [next(other), next(other)]
    next(stream)

    with monkeypatch.context() as patch:
        patch.setattr(llm.llm_engine.runner, "launch", device_lost)
        with pytest.raises(RuntimeError, match="device lost"):
            list(stream)
    assert [seq.seq_id for seq in llm.llm_engine.scheduler.running] == [deltas[0].request_id]
    assert joined(deltas + list(other)) == expected


def test_ctrl_c_in_a_stream_ends_it_between_steps(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    step = llm.llm_engine.step

    def interrupting() -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return step()

    stream = llm.stream("a", GREEDY)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(llm.llm_engine, "step", interrupting)
            with pytest.raises(KeyboardInterrupt):
                next(stream)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert not llm.llm_engine.has_unfinished_requests and list(stream) == []
    assert_all_free(llm.llm_engine)


def test_a_second_thread_is_refused_while_one_is_inside(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, go_on, found = threading.Event(), threading.Event(), []
    step = llm.llm_engine.step

    def waiting() -> Any:
        inside.set()
        assert go_on.wait(60)
        return step()

    monkeypatch.setattr(llm.llm_engine, "step", waiting)
    left = llm.stream("left", GREEDY)
    thread = threading.Thread(target=lambda: found.append(generated(llm, "x", GREEDY)))
    thread.start()
    assert inside.wait(60)
    for call in (lambda: llm.generate("y", use_tqdm=False), lambda: llm.stream("y")):
        with pytest.raises(EngineError, match=r"another thread.*AsyncLLM"):
            call()
    left.close()  # may come from any thread; it waits for its turn
    assert llm.llm_engine.has_unfinished_requests
    go_on.set()
    thread.join(60)
    monkeypatch.undo()
    assert found[0] == generated(llm, "x", GREEDY)
    assert_all_free(llm.llm_engine)


def test_a_stream_of_a_closed_engine_says_so(tiny: Callable[[str], Path]) -> None:
    with LLM(tiny("llama"), **SETTINGS) as made:
        stream = made.stream("a", GREEDY)
        next(stream)
    with pytest.raises(EngineClosedError):
        next(stream)
    with pytest.raises(EngineClosedError):
        made.stream("a", GREEDY)


def test_without_a_tokenizer_there_are_ids(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny("llama") / "config.json").read_bytes())
    with LLM(tmp_path, load_format="dummy", **SETTINGS) as made:
        expected = generated(made, [1, 2, 3], GREEDY)
        assert joined(list(made.stream([1, 2, 3], GREEDY))) == expected
        assert expected.text == ""


def test_every_completion_is_streamed(llm: LLM) -> None:
    """Several of a prompt, each with its own stop, kept in the text or not; one without text."""
    asked: dict[str, Any] = {"max_tokens": 14, "ignore_eos": True, "seed": 3, "n": 3}
    for more in ({}, {"include_stop_str_in_output": True}, {"detokenize": False}):
        stops = {} if "detokenize" in more else {"stop": ["a", "B", "é", "z"]}
        params = SamplingParams(**asked, **stops, **more)
        found: dict[int, list[StreamDelta]] = {}
        for delta in llm.stream("many", params):
            found.setdefault(delta.index, []).append(delta)
        expected = llm.generate("many", params, use_tqdm=False)[0].outputs
        for made in expected:
            got = joined(found[made.index])
            assert (got.text, got.token_ids) == (made.text, made.token_ids)
            assert (got.finish_reason, got.stop_reason) == (made.finish_reason, made.stop_reason)
