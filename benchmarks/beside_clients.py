"""An offline run beside the clients of a server: the same prompts, and the same work of clients.

A stand-in for the server replays what `bench serve --record` kept, each part when it came, to the
same clients; meanwhile LLM.generate answers the prompts. So the machine does what it does for a
server, but for the server's own HTTP side. `python -m benchmarks.beside_clients RECORDING ...` is
the offline run: it says that it is ready, and begins when it is told to.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanoengine.api.llm import LLM
from nanoengine.errors import EngineError
from nanoengine.sampling_params import SamplingParams

ROOT = Path(__file__).parents[1]


def beside_round(
    recording: Path, clients: list[str], settings: dict[str, Any], log: Path
) -> dict[str, Any]:
    """Throughput of an offline run beside clients, and what these took.

    recording: what a server sent. clients: the command that asked it, without --base-url.
    settings: of the LLM. log: for errors, which overwrite it. Raises EngineError if one of the
    programs fails.
    """
    run = [sys.executable, "-m", "benchmarks.beside_clients", str(recording), json.dumps(settings)]
    stand_in = [sys.executable, "-m", "benchmarks.stand_in", str(recording)]
    with log.open("w") as errors, started(stand_in, errors) as server:
        address = _said(server, log)
        with started(run, errors) as offline:
            _said(offline, log)
            with started([*clients, "--base-url", address], errors) as asking:
                _said(server, log)  # they ask which model there is, which is their first question
                _go(server)
                _go(offline)
                row: dict[str, Any] = json.loads(_said(offline, log))
                found = json.loads(_said(asking, log))
        _go(server)
        cpu_s = json.loads(_said(server, log))
    if found["failed"]:
        raise EngineError(f"the stand-in failed its clients: {found['errors']}")
    names = {"duration": "clients_s", "output_throughput": "clients_output_throughput"}
    row |= {key: found[name] for name, key in names.items()}
    return row | {"client_cpu_s": found["client_cpu_s"], "stand_in_cpu_s": cpu_s}


@contextmanager
def started(command: list[str], errors: Any) -> Iterator[subprocess.Popen[str]]:
    """A program of this checkout, which is killed in the end."""
    pipe = subprocess.PIPE
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=variables
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _said(process: subprocess.Popen[str], log: Path) -> str:
    """The next line that a program prints. Raises EngineError if it ends without one."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        last = log.read_text(errors="replace")[-1000:]
        raise EngineError(f"{process.args!r} has ended; its last words:\n{last}")
    return line.strip()


def _go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def offline(recording: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Answer the recorded prompts at full length, all queued at once, once a line comes at standard
    input; None: it was closed.
    """
    asked = [(each["prompt"], each["max_tokens"]) for each in json.loads(recording.read_text())]
    prompts = [prompt for prompt, _ in asked]
    params = [
        SamplingParams(temperature=0, ignore_eos=True, max_tokens=num_tokens)
        for _, num_tokens in asked
    ]
    with LLM(**settings) as llm:
        few = SamplingParams(temperature=0, ignore_eos=True, max_tokens=8)
        llm.generate([prompt[:-49:-1] for prompt in prompts[:4]], few, use_tqdm=False)
        print("ready", flush=True)
        if not sys.stdin.readline():
            return None
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        elapsed = time.perf_counter() - start
        dtype = str(llm.plan.kv.dtype).removeprefix("torch.")
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    row = {"output_throughput": round(num_tokens / elapsed, 2), "elapsed_s": round(elapsed, 3)}
    return row | {"dtype": dtype}


def main() -> None:
    """Print the row of an offline run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recording", type=Path)
    parser.add_argument("settings", type=json.loads, help="of the LLM, as JSON")
    args = parser.parse_args()
    row = offline(args.recording, args.settings)
    if row is not None:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
