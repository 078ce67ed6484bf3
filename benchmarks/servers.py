"""Servers in turn under the same clients, and `bench.py offline`: `python -m benchmarks.servers`.

Starts each server on a port of its own, waits for /health, runs `bench serve` against it in another
process, and ends it. Peers: `--peer vllm=PYTHON`, the interpreter in which it is installed, and
`--peer llama.cpp=PROGRAM,GGUF`, the program llama-server.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.beside_clients import beside_round
from benchmarks.compare import Peer, cpu_name, given_peers, peer_argument
from benchmarks.ending import exit_on_sigterm
from nanoengine.bench.report import versions
from nanoengine.errors import EngineError
from nanoengine.loading.find_model import resolve_model
from nanoengine.loading.model_config import read_model_config

Row = dict[str, Any]

OURS, BESIDE = "nanoengine", "offline beside clients"
START_S, END_S, RUN_S = 600.0, 20.0, 900.0
WARM_UP = {"num_prompts": 4, "min_input": 32, "max_input": 64, "min_output": 4, "max_output": 8}
FIGURES = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")


@dataclass(frozen=True, slots=True)
class Server:
    """A server to start. command: for a port; variables: of its environment."""

    name: str
    command: Callable[[int], list[str]]
    variables: dict[str, str]


def ours(args: argparse.Namespace, name: str = OURS, *flags: str) -> Server:
    """This package's server. flags: beside those that every run has."""

    def command(port: int) -> list[str]:
        known = ["--port", str(port), "--max-num-seqs", "64", "--quiet"]
        known += ["--quantization", "none"]  # as the peers' files in 16 bits
        return [sys.executable, "-m", "nanoengine", "serve", args.model, *known, *flags]

    variables = {"PYTHONPATH": str(Path(__file__).parents[1])}
    return Server(name, command, variables | {"OMP_NUM_THREADS": str(args.num_threads)})


def peer_server(peer: Peer, args: argparse.Namespace) -> Server:
    """Another engine's server, with as many threads."""
    threads = str(args.num_threads)
    if peer.kind == "vllm":

        def vllm(port: int) -> list[str]:
            flags = ["--port", str(port), "--host", "127.0.0.1", "--dtype", args.vllm_dtype]
            flags += ["--max-model-len", "8192", "--max-num-seqs", "64", "--model", peer.model]
            # The command `vllm` of its CPU wheel asks for the name of the other wheel.
            return [peer.python, "-m", "vllm.entrypoints.openai.api_server", *flags]

        # Its default leaves one of two cores to the server's own process.
        variables = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return Server(peer.name, vllm, variables | {"OMP_NUM_THREADS": threads})

    def llama(port: int) -> list[str]:
        slots = args.concurrency  # which divide the context
        flags = ["--host", "127.0.0.1", "--port", str(port), "--threads", threads]
        flags += ["--threads-batch", threads, "--parallel", str(slots)]
        flags += ["--ctx-size", str(slots * (args.max_input + args.max_output + 8))]
        return [peer.python, "--model", peer.model, *flags]

    return Server(peer.name, llama, {})


@contextmanager
def running(server: Server, log: Path) -> Iterator[tuple[str, int, float]]:
    """Its address, its process and the seconds to the first answer of /health."""
    port = _free_port()
    # Bytecode is kept, as an installation does: to compile our sources is a third of a second.
    others = {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE"}
    environment = {k: v for k, v in os.environ.items() if k not in others} | server.variables
    start = time.perf_counter()
    with log.open("wb") as out:
        process = subprocess.Popen(
            server.command(port), stdout=out, stderr=out, env=environment, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        while not _answers(url):
            if process.poll() is not None or time.perf_counter() - start > START_S:
                last = log.read_text(errors="replace")[-2000:]
                raise EngineError(f"{server.name} did not start; its last words:\n{last}")
            time.sleep(0.02)
        yield url, process.pid, time.perf_counter() - start
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def cpu_seconds(pid: int) -> tuple[float, float]:
    """CPU seconds of a process group so far: of all, and of the main thread of `pid`, which in our
    server is the HTTP side.
    """
    tick = os.sysconf("SC_CLK_TCK")

    def used(path: Path) -> tuple[int, float]:
        fields = path.read_text().rpartition(")")[2].split()
        return int(fields[2]), (int(fields[11]) + int(fields[12])) / tick

    total = 0.0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            group, seconds = used(path)
        except OSError:
            continue
        total += seconds if group == pid else 0.0
    return total, used(Path(f"/proc/{pid}/task/{pid}/stat"))[1]


def clients(vocab_size: int, concurrency: int, sizes: dict[str, int]) -> list[str]:
    """The command of `bench serve`, but for the address."""
    command = [sys.executable, "-m", "nanoengine.bench", "serve"]
    command += ["--vocab-size", str(vocab_size), "--max-concurrency", str(concurrency)]
    for name, size in sizes.items():
        command += ["--" + name.replace("_", "-"), str(size)]
    return command


def bench_serve(url: str, command: list[str]) -> Row:
    """What `bench serve` reports. command: see clients."""
    command = [*command, "--base-url", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
    if done.returncode:
        raise EngineError(f"bench serve ended with {done.returncode}: {done.stderr[-1000:]}")
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def serve_round(
    server: Server, args: argparse.Namespace, vocab_size: int, log: Path, recording: Path | None
) -> Row:
    """One start of a server, and its figures. recording: where its answers go; None: nowhere."""
    command = clients_of(args, vocab_size)
    command += [] if recording is None else ["--record", str(recording)]
    with running(server, log) as (url, pid, start_s):
        bench_serve(url, clients(vocab_size, args.concurrency, WARM_UP))
        all_before, main_before = cpu_seconds(pid)
        found = bench_serve(url, command)
        all_after, main_after = cpu_seconds(pid)
    row = {name: found[name] for name in (*FIGURES, "completed", "failed", "client_cpu_s")}
    row |= {"start_s": round(start_s, 2), "server_cpu_s": round(all_after - all_before, 2)}
    if server.name == OURS:
        row["http_cpu_s"] = round(main_after - main_before, 2)
    return row


def clients_of(args: argparse.Namespace, vocab_size: int) -> list[str]:
    """Those that a server is measured with."""
    sizes = {name: getattr(args, name) for name in WARM_UP}
    return clients(vocab_size, args.concurrency, sizes)


def offline_round(args: argparse.Namespace) -> Row:
    """The same work without a server."""
    command = [sys.executable, "bench.py", "offline", "--model", args.model]
    command += ["--max-num-seqs", "64", "--num-threads", str(args.num_threads)]
    command += ["--quantization", "none"]  # as the server
    command += ["--num-seqs", str(args.num_prompts)]
    for name in ("min_input", "max_input", "min_output", "max_output"):
        command += ["--" + name.replace("_", "-"), str(getattr(args, name))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return {"output_throughput": found["output_tokens_per_s"], "dtype": found["workload"]["dtype"]}


def summary(rounds: dict[str, list[Row]]) -> Row:
    """Medians of each server, and our throughput over each other's, round by round; and that of
    each over the offline run beside clients, if there is one.
    """
    rows: Row = {}
    own = [row["output_throughput"] for row in rounds[OURS]]
    for name, runs in rounds.items():
        keys = [key for key in runs[0] if isinstance(runs[0][key], int | float)]
        rows[name] = {key: round(statistics.median(run[key] for run in runs), 3) for key in keys}
        ratios = [mine / run["output_throughput"] for mine, run in zip(own, runs, strict=True)]
        rows[name]["ours_over_it"] = round(statistics.median(ratios), 3)
        rows[name]["spread"] = [round(min(ratios), 3), round(max(ratios), 3)]
        if BESIDE in rounds:
            beside = [row["output_throughput"] for row in rounds[BESIDE]]
            ratios = [run["output_throughput"] / of for run, of in zip(runs, beside, strict=True)]
            rows[name]["over_beside_clients"] = round(statistics.median(ratios), 3)
        rows[name]["rounds"] = runs
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Run the rounds; write the report after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", default="smollm2-135m")
    add("--peer", type=peer_argument, action="append", default=[], help="vllm=... or llama.cpp=...")
    add("--engine-process", action="store_true", help="also our server with that flag")
    add(
        "--offline-beside-clients",
        action="store_true",
        help="also an offline run while a stand-in replays our server's answers to its clients",
    )
    add("--vllm-dtype", default="bfloat16", help="of vLLM: the faster one")
    add("--rounds", type=int, default=3)
    add("--num-threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--concurrency", type=int, default=32)
    sizes = (("num-prompts", 32), ("min-input", 64), ("max-input", 512))
    for name, size in (*sizes, ("min-output", 64), ("max-output", 256)):
        add(f"--{name}", type=int, default=size)
    add("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    exit_on_sigterm()
    folder = resolve_model(args.model)
    vocab_size = read_model_config(folder).vocab_size
    servers = [ours(args)]
    if args.engine_process:
        servers.append(ours(args, f"{OURS}, engine process", "--engine-process"))
    servers += [peer_server(peer, args) for peer in given_peers(args.peer, folder)]
    others = ["offline", *([BESIDE] if args.offline_beside_clients else [])]
    rounds: dict[str, list[Row]] = {name: [] for name in (*(s.name for s in servers), *others)}
    with tempfile.TemporaryDirectory() as logs:
        log, recording = Path(logs, "log"), Path(logs, "recording")
        for number in range(args.rounds):
            for server in servers:
                kept = recording if server.name == OURS and args.offline_beside_clients else None
                row = serve_round(server, args, vocab_size, log, kept)
                note(rounds, number, server.name, row)
            note(rounds, number, "offline", offline_round(args))
            if args.offline_beside_clients:
                as_served: Row = {"model": args.model, "num_threads": args.num_threads}
                as_served |= {"max_num_seqs": 64, "quantization": "none"}
                command = clients_of(args, vocab_size)
                note(rounds, number, BESIDE, beside_round(recording, command, as_served, log))
            hidden = ("peer", "output")
            settings = {name: str(v) for name, v in vars(args).items() if name not in hidden}
            about = {"settings": settings, "cpu": cpu_name(), "versions": versions()}
            report = about | {"servers": summary(rounds)}
            args.output.write_text(json.dumps(report, indent=2) + "\n")
    for name, row in summary(rounds).items():
        if args.offline_beside_clients and name not in others:
            print(f"{name}: {row['over_beside_clients']} of {BESIDE}")


def note(rounds: dict[str, list[Row]], number: int, name: str, row: Row) -> None:
    """Keep and print what a round of one of them gave."""
    rounds[name].append(row)
    print(number, name, json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
