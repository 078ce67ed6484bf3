"""Does to engines what users and systems do, at random instants, many times: nothing may hang, be
lost or stay behind.

    python benchmarks/proofs/storms.py [NAME ...] [--rounds N] [--interrupts N] [--seed S]
                                       [--json FILE]

Each storm runs in a process of its own that must end in time. After every round all blocks are
free, no thread and no file of ours is left, and the next text is the one that it always was. Prints
a table; exit code 1 if a storm fails.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from nanoengine import LLM, SamplingParams  # noqa: E402 (found by the line above)
from nanoengine.api.async_llm import AsyncLLM  # noqa: E402
from nanoengine.errors import EngineClosedError, EngineError, ForkedProcessError  # noqa: E402

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "kvcache_block_size": 8,
    "num_gpu_blocks": 60,
    "num_threads": 2,
}
STREAM: dict[str, Any] = SETTINGS | {
    "num_gpu_blocks": 3,
    "enable_cpu_offload": True,
    "offload_mode": "stream",
    "kv_offload_gib": 0.01,
    "slot_tokens": 8,
    "debug_copy_delay_ms": 0.5,
}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ONE = SamplingParams(temperature=0, max_tokens=1)
PROMPTS = [[5] * 50, [7, 8, 9], list(range(20, 60))]
ROUND_S = 10  # on a busy machine; a hang is a failure
PATIENCE_S = 60  # of one round


class Storm:
    """Rounds of one kind over one model, and what is asked after each of them."""

    def __init__(self, model: Path, rounds: int, seed: int) -> None:
        self.model = model
        self.rounds = rounds
        self.random = random.Random(seed)
        self.seen: Counter[str] = Counter()

    def tokens(self, llm: LLM) -> list[list[int]]:
        return [o["token_ids"] for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]

    def check(self, llm: LLM, wanted: list[list[int]]) -> None:
        """All is free, and the next text is as before."""
        llm.reset_prefix_cache()
        engine, manager = llm.llm_engine, llm.llm_engine.kv.blocks
        assert not engine.has_unfinished_requests, "a request is left"
        for pool in (manager.device, manager.host):
            assert pool.num_free == pool.num_slots, "blocks are left"
        engine.kv.check()
        assert self.tokens(llm) == wanted, "the next text is another one"


def our_threads() -> list[str]:
    """Names of those that are alive."""
    return [t.name for t in threading.enumerate() if t.name.startswith("nanoengine")]


def no_threads() -> None:
    """None is left, once garbage is collected."""
    gc.collect()
    deadline = time.monotonic() + PATIENCE_S
    while our_threads() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not our_threads(), f"threads are left: {our_threads()}"


@contextmanager
def interrupt_after(seconds: float) -> Iterator[threading.Event]:
    """SIGINT to this process, once. The event says that it was sent."""
    sent = threading.Event()

    def send() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGINT)
        sent.set()

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield sent
    finally:
        thread.join()


def was_interrupted(work: Callable[[], object], seconds: float) -> bool:
    """Whether work, or the moment after it, was interrupted by the one SIGINT that is sent."""
    num_seen = 0
    try:
        with interrupt_after(seconds) as sent:
            try:
                work()
            except KeyboardInterrupt:
                num_seen += 1
            while not sent.wait(0.001):
                pass
            time.sleep(0.001)  # where it comes if `work` was over
    except KeyboardInterrupt:
        num_seen += 1
    assert num_seen <= 1, "one SIGINT was seen twice"
    return num_seen == 1


def interrupts(storm: Storm) -> None:
    """SIGINT at random instants, in turns over every kind of call."""
    with LLM(storm.model, **SETTINGS) as resident, LLM(storm.model, **STREAM) as streamed:
        chat = [{"role": "user", "content": "abc"}]
        kinds: dict[str, tuple[LLM | None, Callable[[], object]]] = {
            "generate": (resident, lambda: storm.tokens(resident)),
            "one token": (
                resident,
                lambda: [resident.generate("a", ONE, use_tqdm=False) for _ in range(5)],
            ),
            "beams": (
                resident,
                lambda: resident.beam_search("ab", beam_width=3, max_tokens=5, use_tqdm=False),
            ),
            "stream": (resident, lambda: list(resident.stream([5] * 30, GREEDY))),
            "chat": (resident, lambda: resident.chat(chat, GREEDY, use_tqdm=False)),
            "offload": (streamed, lambda: storm.tokens(streamed)),
            "start": (None, lambda: LLM(storm.model, **STREAM).close()),
        }
        wanted = {id(llm): storm.tokens(llm) for llm in (resident, streamed)}
        durations = {name: timed(work) for name, (_, work) in kinds.items()}
        threads = our_threads()
        for number in range(storm.rounds):
            name = list(kinds)[number % len(kinds)]
            llm, work = kinds[name]
            seconds = storm.random.uniform(0, 1.1 * durations[name])
            assert was_interrupted(work, seconds), f"a SIGINT during {name} was lost"
            storm.seen[name] += 1
            if llm is not None:
                storm.check(llm, wanted[id(llm)])
            else:
                gc.collect()
                assert our_threads() == threads, f"threads are left: {our_threads()}"
    no_threads()


def timed(work: Callable[[], object]) -> float:
    """Seconds of the second of two runs."""
    work()
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    results: list[object] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def closing(storm: Storm) -> None:
    """Another thread closes the engine, or leaves its `with`, while it generates."""
    for number in range(storm.rounds):
        kind = close_while_at_work(storm, STREAM if number % 4 else SETTINGS, bool(number % 2))
        storm.seen[kind] += 1
        no_threads()


def close_while_at_work(storm: Storm, settings: dict[str, Any], whole: bool) -> str:
    """Whether the call that was under way then was "closed" or had "finished"."""
    llm = LLM(storm.model, **settings)
    storm.tokens(llm)
    stream = llm.stream([5] * 40, GREEDY)
    thread, results = in_thread((lambda: storm.tokens(llm)) if whole else (lambda: list(stream)))
    time.sleep(storm.random.uniform(0, 0.1))
    llm.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "a call did not end"
    if isinstance(results[0], EngineClosedError):
        return "closed"
    assert isinstance(results[0], list), results[0]
    return "finished"


def wait_for(pid: int) -> int:
    """Exit status of a child, which must end in time."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("a forked process did not end")


def forks(storm: Storm) -> None:
    """A fork while another thread may be in the engine: refused there, unharmed here."""
    with LLM(storm.model, **STREAM) as llm:
        wanted = storm.tokens(llm)
        for number in range(storm.rounds):
            thread, results = in_thread(lambda: storm.tokens(llm))
            time.sleep(storm.random.uniform(0, 0.05))
            if number % 2:
                thread.join(PATIENCE_S)
            pid = os.fork()
            if not pid:
                in_fork(storm, llm)
            assert wait_for(pid) == 0, "a fork was not refused"
            thread.join(PATIENCE_S)
            assert results == [wanted], results
            storm.check(llm, wanted)
            storm.seen["refused"] += 1


def in_fork(storm: Storm, llm: LLM) -> None:
    """Ends the forked process, with status 0 if it was refused and could end the usual way."""
    refused = 0
    for call in (lambda: storm.tokens(llm), lambda: LLM(storm.model, **SETTINGS)):
        try:
            call()
        except ForkedProcessError:
            refused += 1
        except BaseException:
            os._exit(3)
    llm.close()
    os._exit(0 if refused == 2 else 1)


def dropped(storm: Storm) -> None:
    """Engines that nobody closes, with a request half way; every other one in a cycle."""
    for number in range(storm.rounds):
        llm = LLM(storm.model, **STREAM)
        stream = llm.stream([5] * 40, GREEDY)
        for _ in range(storm.random.randrange(4)):
            next(stream)
        if number % 2:
            llm.cycle = [llm, stream]  # type: ignore[attr-defined]
        del llm, stream
        no_threads()
        storm.seen["collected"] += 1


def two_engines(storm: Storm) -> None:
    """Two engines at work in two threads give what each gives alone."""
    with LLM(storm.model, **SETTINGS) as one, LLM(storm.model, **STREAM) as other:
        wanted = [storm.tokens(one), storm.tokens(other)]
        for _ in range(storm.rounds):
            thread, results = in_thread(lambda: storm.tokens(other))
            assert storm.tokens(one) == wanted[0], "the first engine gave another text"
            thread.join(PATIENCE_S)
            assert results == [wanted[1]], results
            storm.check(one, wanted[0])
            storm.check(other, wanted[1])
            storm.seen["equal"] += 1


def exits(storm: Storm) -> None:
    """Python ends with engines open: idle, streaming in a daemon thread, or asynchronous."""
    for number in range(storm.rounds):
        kind = ("idle", "at work", "asynchronous")[number % 3]
        delay = storm.random.uniform(0, 0.05)
        pid = os.fork()  # of a process that has computed nothing
        if not pid:
            leave_open(storm, kind, delay)
        assert wait_for(pid) == 0, f"Python did not end well with an engine {kind}"
        storm.seen[kind] += 1


def leave_open(storm: Storm, kind: str, delay: float) -> None:
    """Ends the process as a script does, its engine open."""
    if kind == "asynchronous":
        kept: list[Any] = [AsyncLLM(storm.model, **STREAM)]
    else:
        llm = LLM(storm.model, **STREAM)
        storm.tokens(llm)
        kept = [llm, llm.stream([5] * 40, GREEDY)]
        if kind == "at work":
            threading.Thread(target=lambda: storm.tokens(llm), daemon=True).start()
    time.sleep(delay)
    sys.exit(0 if kept else 1)


def memory(storm: Storm) -> None:
    """Memory runs out while an engine generates. It goes on when there is some again; if it ran out
    in the bookkeeping, the engine is closed and says so.
    """
    settings = SETTINGS | {"num_threads": 1, "num_gpu_blocks": 400}
    llm = LLM(storm.model, **settings)
    wanted = storm.tokens(llm)
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    for _ in range(storm.rounds):
        room = storm.random.choice([0, 1 << 16, 1 << 20, 1 << 22, 1 << 24])
        length = storm.random.randrange(100, 400)
        prompts = [[storm.random.randrange(9, 250) for _ in range(length)] for _ in range(5)]
        try:
            resource.setrlimit(resource.RLIMIT_AS, (held_bytes() + room, most))
            llm.generate(prompts, GREEDY, use_tqdm=False)
            kind = "enough"
        except (MemoryError, RuntimeError, EngineError, OSError) as error:
            kind = f"{type(error).__name__}"
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        storm.seen[kind] += 1
        try:
            storm.check(llm, wanted)
        except EngineClosedError as error:
            assert "the engine failed and was closed" in str(error)
            storm.seen["closed"] += 1
            llm = LLM(storm.model, **settings)
            storm.check(llm, wanted)
    llm.close()
    no_threads()


def held_bytes() -> int:
    """Address space of this process."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


STORMS: dict[str, Callable[[Storm], None]] = {
    "interrupts": interrupts,
    "closing": closing,
    "forks": forks,
    "dropped": dropped,
    "two_engines": two_engines,
    "exits": exits,
    "memory": memory,
}


def run_here(name: str, model: Path, rounds: int, seed: int) -> None:
    """One storm in this process; prints what it saw as JSON."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    storm = Storm(model, rounds, seed)
    STORMS[name](storm)
    print(json.dumps(storm.seen))


def run_storm(name: str, model: Path, rounds: int, seed: int) -> dict[str, Any]:
    """One storm in a process of its own, with a folder of its own for what it may leave."""
    begin = time.perf_counter()
    command = [sys.executable, __file__, name, "--rounds", str(rounds), "--seed", str(seed)]
    with tempfile.TemporaryDirectory() as folder:
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        environment = os.environ | {"TMPDIR": folder, "XDG_CACHE_HOME": cache}
        environment["MALLOC_MMAP_THRESHOLD_"] = "65536"  # tensors: no freed memory again
        result: dict[str, Any] = {"storm": name, "rounds": rounds, "seed": seed, "problem": ""}
        try:
            done = subprocess.run(
                [*command, "--here", str(model)],
                env=environment,
                capture_output=True,
                text=True,
                timeout=PATIENCE_S + ROUND_S * rounds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return result | {"problem": "no end in time", "seconds": ROUND_S * rounds}
        left = [path.name for path in Path(folder).iterdir() if "kernels" not in os.listdir(path)]
    result["seconds"] = round(time.perf_counter() - begin, 1)
    if done.returncode:
        return result | {"problem": f"status {done.returncode}\n{done.stderr[-3000:]}"}
    if left:
        return result | {"problem": f"left behind: {left}"}
    return result | {"seen": json.loads(done.stdout.splitlines()[-1])}


def build_model(folder: Path) -> Path:
    """A tiny random Llama."""
    from tiny_models import TINY  # imports transformers, which the storms do without

    TINY["llama"](folder)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(STORMS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--interrupts", type=int, default=1000, help="rounds of that storm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="a folder (default: a tiny random model)")
    parser.add_argument("--json", type=Path, help="write the results there, too")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = arguments.names or list(STORMS)
    if unknown := set(names) - STORMS.keys():
        parser.error(f"no such storm: {', '.join(unknown)}; there are {', '.join(STORMS)}")
    if arguments.here:
        run_here(names[0], arguments.here, arguments.rounds, arguments.seed)
        return 0
    results = []
    with tempfile.TemporaryDirectory() as name:
        model = arguments.model or build_model(Path(name))
        for storm in names:
            rounds = arguments.interrupts if storm == "interrupts" else arguments.rounds
            results.append(run_storm(storm, model, rounds, arguments.seed))
            print_result(results[-1])
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return int(any(result["problem"] for result in results))


def print_result(result: dict[str, Any]) -> None:
    what = result["problem"] or ", ".join(f"{k} {n}" for k, n in result["seen"].items())
    print(f"{result['storm']:12} {result['rounds']:5} rounds {result['seconds']:6} s  {what}")
    sys.stdout.flush()


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        sys.exit(main())
