"""Who may be in an engine and until when: closing, Ctrl-C, forks, engines that nobody closes.

benchmarks/proofs/storms.py does the same many times at random instants.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from driver import assert_all_free
from paced_engine import stepping_as_read

from nanoengine import LLM, SamplingParams
from nanoengine.api.async_llm import AsyncLLM
from nanoengine.api.turns import Turn, Turns
from nanoengine.devices.copy_streams import WorkerStream
from nanoengine.errors import (
    EngineClosedError,
    EngineError,
    ForkedProcessError,
    OutOfMemoryError,
)
from nanoengine.kv.step_kv import StepKV

Tiny = Callable[[str], Path]
Threads = Callable[[], set[threading.Thread]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SETTINGS: dict[str, Any] = {"dtype": "float32", "kvcache_block_size": 8, "num_gpu_blocks": 40}
STREAM: dict[str, Any] = SETTINGS | {
    "num_gpu_blocks": 2,
    "enable_cpu_offload": True,
    "offload_mode": "stream",
    "kv_offload_gib": 0.01,
    "slot_tokens": 8,
    "debug_copy_delay_ms": 2.0,
}
LONG = [5] * 60


@pytest.fixture
def llm(tiny: Tiny) -> Iterator[LLM]:
    with LLM(tiny("llama"), **SETTINGS) as engine:
        yield engine


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own SIGINT handler, also where the test run was started with SIGINT ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.fixture
def our_threads() -> Threads:
    """The engines' threads that came since the test began."""
    before = set(threading.enumerate())
    return lambda: {t for t in threading.enumerate() if "nanoengine" in t.name} - before


class SlowSteps:
    """Steps of an engine that wait in the middle until they are let go."""

    def __init__(self, llm: LLM) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self._step = llm.llm_engine.step
        llm.llm_engine.step = self._slow  # type: ignore[method-assign]

    def _slow(self) -> Any:
        self.begun.set()
        assert self.go_on.wait(60)
        return self._step()


def await_true(condition: Callable[[], object]) -> None:
    """Wait for what comes and stays."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def in_thread(function: Callable[[], object]) -> tuple[threading.Thread, list[Any]]:
    """Runs it, and what it returned or raised."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def test_closing_from_another_thread_waits_for_the_step_and_ends_the_call(
    tiny: Tiny, our_threads: Threads
) -> None:
    llm = LLM(tiny("llama"), **STREAM)
    steps = SlowSteps(llm)
    generating, results = in_thread(lambda: llm.generate([LONG], GREEDY, use_tqdm=False))
    assert steps.begun.wait(60)
    with pytest.raises(EngineError, match="in use by another thread"):
        llm.generate("x", GREEDY, use_tqdm=False)
    with pytest.raises(EngineError, match="in use by another thread"):
        llm.reset_prefix_cache()
    closing, closed = in_thread(llm.close)
    await_true(lambda: llm._turns._is_closing)
    closing.join(0.1)
    assert closing.is_alive() and not closed  # the step is still under way
    steps.go_on.set()
    generating.join(60)
    closing.join(60)
    assert closed == [None] and isinstance(results[0], EngineClosedError)
    assert not our_threads()
    with pytest.raises(EngineClosedError):
        llm.generate("x", GREEDY, use_tqdm=False)


def test_closing_inside_a_step_is_left_to_its_end(llm: LLM) -> None:
    """As a signal handler or a collected object may do it: waiting would be for itself."""
    step = llm.llm_engine.step

    def closing() -> Any:
        llm.close()
        return step()

    llm.llm_engine.step = closing  # type: ignore[method-assign]
    with pytest.raises(EngineClosedError):
        llm.generate("x", GREEDY, use_tqdm=False)


@pytest.mark.parametrize("lock", ["engine", "mailbox"])
def test_closing_an_async_engine_where_its_lock_is_held(tiny: Tiny, lock: str) -> None:
    """As a signal handler may do it: the engine's thread cannot end before the lock is released."""
    llm = AsyncLLM(tiny("llama"), **SETTINGS)

    async def close() -> None:
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        stream = await llm.stream("x", params)
        held = llm._engine._changed if lock == "engine" else stream._mailbox._lock

        def closing() -> None:
            with held:
                llm.close()

        assert ends(closing)
        with pytest.raises(EngineClosedError):
            async for _ in stream:
                pass

    with stepping_as_read(llm):
        asyncio.run(asyncio.wait_for(close(), 60))
    llm._engine._thread.join(60)
    assert not llm._engine._thread.is_alive()


class Called:
    """What Turns asked of an engine; `during` is called in the middle of each abort."""

    def __init__(self, during: Callable[[], object] = lambda: None) -> None:
        self.aborted: list[list[int]] = []
        self.num_closed = 0
        self._during = during
        self.turns = Turns(lambda: None, self._abort, self._close)

    def _abort(self, ids: list[int]) -> None:
        self.aborted.append(ids)
        self._during()

    def _close(self) -> None:
        self.num_closed += 1


def ends(function: Callable[[], object]) -> bool:
    """Whether it returns in a thread, which is left alone if not."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(60)
    return not thread.is_alive()


def test_closing_while_an_abandoned_request_is_ended() -> None:
    """As a signal handler may do it in the thread whose finalizer ends the request."""
    called = Called(lambda: called.turns.close())
    assert ends(lambda: called.turns.abandon(1))
    assert called.aborted == [[1]] and called.num_closed == 1


@pytest.mark.parametrize("when", ["acquire", "release"])
@pytest.mark.parametrize("call", ["turn", "abandon"])
def test_closing_where_the_lock_is_just_taken_or_still_held(when: str, call: str) -> None:
    """A signal may come between any two lines."""
    called, is_first = Called(), [True]
    turns, lock = called.turns, called.turns._lock

    class Signalled:
        def acquire(self, *args: Any, **kwargs: Any) -> bool:
            is_taken = lock.acquire(*args, **kwargs)
            self.signal("acquire")
            return is_taken

        def release(self) -> None:
            self.signal("release")
            lock.release()

        def __enter__(self) -> None:
            self.acquire()

        def __exit__(self, *_: object) -> None:
            self.release()

        def signal(self, where: str) -> None:
            if where == when and is_first:
                is_first.clear()
                turns.close()

    def use() -> None:
        turns.begin()
        turns.end()

    turns._lock = Signalled()  # type: ignore[assignment]
    assert ends(use if call == "turn" else lambda: turns.abandon(1))
    assert called.num_closed and not is_first
    with pytest.raises(EngineClosedError):
        turns.begin()


@pytest.mark.parametrize("call", ["close", "abandon", "turn"])
def test_no_memory_where_the_lock_is_held_does_not_leave_it_held(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python needs memory for the call itself."""
    called, let_go, is_first = Called(), Turns._let_go, [True]
    turns = called.turns

    def use() -> None:
        turns.begin()
        turns.end()

    def no_memory(self: Turns, *rest: Any) -> None:
        if is_first:
            is_first.clear()
            raise MemoryError
        let_go(self, *rest)

    monkeypatch.setattr(Turns, "_let_go", no_memory)
    calls = {"close": turns.close, "abandon": lambda: turns.abandon(1), "turn": use}
    with pytest.raises(MemoryError):
        calls[call]()
    assert ends(turns.close) and called.num_closed == 1


@pytest.mark.parametrize("call", ["abandon", "turn"])
def test_an_abort_that_is_cut_in_half_closes_the_engine(call: str) -> None:
    """A stream is dropped, and memory runs out while its blocks are released."""
    wholes = [True]

    def no_memory() -> None:
        wholes[0] = False
        raise MemoryError("blocks")

    called = Called(no_memory)
    turns = called.turns
    turns.is_whole = lambda: wholes[0]
    with pytest.raises(MemoryError):
        if call == "abandon":
            turns.abandon(1)
        else:
            with Turn(turns):
                no_memory()
    assert called.num_closed == 1
    with pytest.raises(EngineClosedError, match="failed and was closed: MemoryError"):
        turns.begin()


def test_a_call_waits_while_another_thread_ends_an_abandoned_request() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slowly() -> None:
        begun.set()
        assert go_on.wait(60)

    called = Called(slowly)
    finalizer, _ = in_thread(lambda: called.turns.abandon(1))
    assert begun.wait(60)
    calling, results = in_thread(called.turns.begin)
    calling.join(0.1)
    is_waiting = calling.is_alive()
    go_on.set()
    finalizer.join(60)
    calling.join(60)
    assert is_waiting and results == [None]


def test_requests_abandoned_in_a_turn_are_ended_at_once() -> None:
    called = Called()
    called.turns.begin()
    for request_id in range(3):
        called.turns.abandon(request_id)
    assert not called.aborted
    called.turns.end()
    assert called.aborted == [[0, 1, 2]]


def test_a_closed_stream_of_copies_refuses_work_that_nobody_would_do() -> None:
    stream = WorkerStream("h2d")
    stream.close()
    with pytest.raises(EngineClosedError):
        stream.record()
    stream.close()


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("kind", ["generate", "beam_search", "refused", "stream"])
def test_ctrl_c_in_the_last_step_is_not_lost(
    llm: LLM, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, one = llm.llm_engine, SamplingParams(temperature=0, max_tokens=1)
    name = "add_request" if kind == "refused" else "step"
    function = getattr(engine, name)

    def interrupting(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return function(*args)

    calls: dict[str, Callable[[], object]] = {
        "generate": lambda: llm.generate("a", one, use_tqdm=False),
        "beam_search": lambda: llm.beam_search("a", beam_width=2, max_tokens=1, use_tqdm=False),
        "refused": lambda: llm.generate([""], one, use_tqdm=False),
        "stream": lambda: list(llm.stream("a", one)),
    }
    with monkeypatch.context() as patch:
        patch.setattr(engine, name, interrupting)
        with pytest.raises(KeyboardInterrupt):
            calls[kind]()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not engine.has_unfinished_requests
    assert_all_free(engine)


@pytest.mark.usefixtures("interruptible")
def test_a_second_ctrl_c_breaks_the_step_and_a_third_does_not_break_the_cleaning(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, abort, went_on = llm.llm_engine, llm.llm_engine.abort, []

    def impatient() -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        went_on.append(1)

    def aborting(ids: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return abort(ids)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", impatient)
        patch.setattr(engine, "abort", aborting)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("a", GREEDY, use_tqdm=False)
    assert not went_on and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_all_free(engine)


@pytest.mark.parametrize("where", ["schedule", "finish", "end"])
@pytest.mark.usefixtures("interruptible")
def test_a_second_ctrl_c_does_not_cut_bookkeeping_in_half(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """In the scheduler, where a step waits for its copies, and where it counts what was written."""
    engine, went_on = llm.llm_engine, []
    part = {"schedule": engine.scheduler, "finish": StepKV, "end": engine.kv._heat}[where]
    work = getattr(part, where)

    def impatient(*given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        went_on.append(1)
        return work(*given)

    with monkeypatch.context() as patch:
        patch.setattr(part, where, impatient)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("a", GREEDY, use_tqdm=False)
    assert went_on == [1] and not engine.has_unfinished_requests
    assert_all_free(engine)


def refused_memory(*_: Any) -> Any:
    raise OutOfMemoryError("host memory for KV blocks 0 to 9 could not be allocated")


@pytest.mark.parametrize("where", ["the host pool", "the scheduler", "the prefix cache"])
def test_a_step_that_fails_in_its_bookkeeping_closes_the_engine(
    tiny: Tiny, our_threads: Threads, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Blocks may be counted as stored that are not: who reads them later would get other text."""
    llm = LLM(tiny("llama"), **STREAM)
    kv = llm.llm_engine.kv
    broken: tuple[Any, str] = {
        "the host pool": (kv.memory.offload.host, "block"),  # type: ignore[union-attr]
        "the scheduler": (llm.llm_engine.scheduler, "_admit_waiting"),
        "the prefix cache": (kv._prefix_cache, "publish"),
    }[where]
    other = llm.stream([7] * 20, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    next(other)
    monkeypatch.setattr(*broken, refused_memory)
    with pytest.raises(OutOfMemoryError, match="host memory"):
        llm.generate([LONG, [8] * 60], GREEDY, use_tqdm=False)
    for call in (lambda: next(other), lambda: llm.generate("x", GREEDY), llm.stats):
        with pytest.raises(EngineClosedError, match="failed and was closed: OutOfMemoryError"):
            call()
    assert not our_threads()
    llm.close()


def test_a_snapshot_that_fails_closes_the_engine(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would count as taken, and later requests would go on from what lay in its place."""
    with LLM(tiny("qwen3.5"), **SETTINGS) as llm:
        monkeypatch.setattr(llm.llm_engine.kv.memory, "save_state", refused_memory)
        with pytest.raises(OutOfMemoryError, match="host memory"):
            llm.generate([LONG], GREEDY, use_tqdm=False)
        monkeypatch.undo()
        with pytest.raises(EngineClosedError, match="failed and was closed: OutOfMemoryError"):
            llm.generate([LONG], GREEDY, use_tqdm=False)


def in_fork(function: Callable[[], bool]) -> int:
    """Exit status of a fork that calls it: 0 for True, 1 for False, 2 if it raised."""
    pid = os.fork()
    if not pid:
        try:
            os._exit(0 if function() else 1)
        finally:
            os._exit(2)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    pytest.fail("the forked process did not end")


def refuses(call: Callable[[], object]) -> bool:
    try:
        call()
    except ForkedProcessError:
        return True
    return False


def test_a_fork_is_refused_and_the_engine_unharmed(tiny: Tiny, two_threads: None) -> None:
    path = tiny("llama")
    with LLM(path, **STREAM, num_threads=2) as llm:
        before = llm.generate([LONG], GREEDY, use_tqdm=False)[0]["token_ids"]
        stream = llm.stream(LONG, GREEDY)
        next(stream)

        def fork() -> bool:
            is_refused = refuses(lambda: llm.generate([LONG], GREEDY, use_tqdm=False))
            is_refused &= refuses(lambda: next(stream))
            is_refused &= refuses(lambda: LLM(path, **SETTINGS, num_threads=2))
            llm.close()
            with LLM(path, **SETTINGS, num_threads=1) as own:
                return is_refused and len(own.generate("x", GREEDY, use_tqdm=False)) == 1

        assert in_fork(fork) == 0
        rest = [token for delta in stream for token in delta.token_ids]
        assert rest == before[1:]
        assert llm.generate([LONG], GREEDY, use_tqdm=False)[0]["token_ids"] == before


def test_a_fork_of_an_async_engine_is_refused(tiny: Tiny) -> None:
    llm = AsyncLLM(tiny("llama"), **SETTINGS)

    def fork() -> bool:
        is_refused = refuses(lambda: llm._engine.post(lambda _: None))
        llm.close()
        return is_refused

    try:
        assert in_fork(fork) == 0
    finally:
        llm.close()


def test_an_engine_that_nobody_closes_leaves_no_thread(tiny: Tiny, our_threads: Threads) -> None:
    llm = LLM(tiny("llama"), **STREAM)
    llm.generate([LONG], GREEDY, use_tqdm=False)
    assert our_threads()
    del llm
    gc.collect()
    assert not our_threads()


@pytest.mark.parametrize("where", ["ranks.load_parts", "llm_engine.predict_speed"])
def test_a_start_that_fails_leaves_no_thread(
    tiny: Tiny, where: str, our_threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"nanoengine.engine.{where}", failing)
    with pytest.raises(KeyboardInterrupt) as raised:
        LLM(tiny("llama"), **STREAM)
    assert raised.value and not our_threads()
