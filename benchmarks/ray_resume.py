"""Two actors of a Ray job, one of them killed: `python -m benchmarks.ray_resume` (`make ray`).

Three jobs answer the same rows. In the first, an actor gets SIGKILL when a third of the rows is
done, and Ray goes on. In the second the same happens, and at two thirds the job itself is killed;
the third is the second one again, with its checkpoints. All rows must be there once, with the texts
that LLM.generate gives in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.ending import exit_on_sigterm
from nanoengine import LLM, SamplingParams
from nanoengine.bench.report import versions
from nanoengine.errors import EngineError
from nanoengine.ray import Generate
from nanoengine.sampling_params import seeded

Row = dict[str, Any]

TEXTS = Path(__file__).parents[1] / "tests" / "data" / "alice.txt"
PARAMS: Row = {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True}
# One text at a time: where products are PyTorch's, rows beside a row can change its last bits, and
# which rows those are is chance.
SETTINGS: Row = {
    "device": "cpu",
    "dtype": "float32",
    "num_threads": 1,
    "max_num_seqs": 1,
    "max_model_len": 1024,
    "kv_cache_gib": 0.25,
    "measure_speed": False,
    "seed": 3,
}
BATCH = 4
MARK = "RAY_RESUME_JOB"  # a variable of all processes of a job
JOB_S = 240.0
END_S = 60.0


class Noting(Generate):
    """Writes down which process answered which rows; a line is a batch."""

    def __init__(self, notes: str, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._notes = Path(notes) / f"{os.getpid()}.jsonl"
        self._notes.touch()

    async def __call__(self, batch: Any) -> Row:
        """The same batch, noted when it has its answers."""
        answered = await super().__call__(batch)
        with self._notes.open("a") as notes:
            notes.write(json.dumps(list(answered["id"])) + "\n")
        return answered


def write_rows(folder: Path, count: int) -> list[Row]:
    """Rows in a file; two of them cannot be answered."""
    words = 4 * TEXTS.read_text(encoding="utf-8").split()
    rows: list[Row] = [
        {"id": f"row-{number}", "prompt": " ".join(words[13 * number :][: 20 + number % 17])}
        for number in range(count)
    ]
    rows[count // 4]["prompt"] = None
    rows[count // 2]["prompt"] = " ".join(words)
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return rows


def run_job(args: argparse.Namespace) -> None:
    """The job itself, as docs/ray.md shows it."""
    import ray
    from ray.data.checkpoint import CheckpointConfig

    folder = args.job
    for name in ("out", "notes", "checkpoints"):
        (folder / name).mkdir(exist_ok=True)
    ray.init(num_cpus=2, object_store_memory=150 << 20, include_dashboard=False)
    ray.data.DataContext.get_current().checkpoint_config = CheckpointConfig(
        id_column="id",
        checkpoint_path=str(folder / "checkpoints"),
        delete_checkpoint_on_success=False,
    )
    rows = ray.data.read_parquet(str(folder / "in"))
    rows = rows.repartition(target_num_rows_per_block=BATCH)
    answers = rows.map_batches(
        Noting,
        fn_constructor_args=[str(folder / "notes"), args.model, PARAMS],
        fn_constructor_kwargs=SETTINGS,
        batch_size=BATCH,
        num_cpus=0,  # Ray itself reads, filters and writes on its two
        compute=ray.data.ActorPoolStrategy(size=2),
    )
    answers.write_parquet(str(folder / "out"))
    ray.shutdown()


@contextmanager
def started_job(args: argparse.Namespace, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A job in a process of its own; nothing of it is left afterwards."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    # Actors of another job must not be taken for this one's.
    environment |= {"RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0"}
    environment[MARK] = str(folder)
    command = [sys.executable, "-m", "benchmarks.ray_resume", "--job", str(folder)]
    with (folder / "job.log").open("ab") as log:
        process = subprocess.Popen(
            [*command, "--model", args.model], stdout=log, stderr=log, env=environment
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        end_all(folder)


def processes_of(folder: Path) -> list[int]:
    """Processes that were started with this job's variable."""
    mark, found = f"{MARK}={folder}".encode(), []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            variables = (path / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is another user's
            continue
        if mark in variables:
            found.append(int(path.name))
    return found


def end_all(folder: Path) -> None:
    """Wait until Ray's processes have ended; those that stay get SIGKILL."""
    deadline = time.monotonic() + END_S
    while left := processes_of(folder):
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)


def notes_of(folder: Path) -> dict[int, list[str]]:
    """Process -> ids that it has answered."""
    return {
        int(path.stem): [
            name for line in path.read_text().splitlines() for name in json.loads(line)
        ]
        for path in (folder / "notes").glob("*.jsonl")
    }


def wait_for(process: subprocess.Popen[bytes], folder: Path, count: int) -> None:
    """Wait until two actors have answered `count` rows. Raises EngineError if they do not."""
    deadline = time.monotonic() + JOB_S
    while True:
        notes = notes_of(folder)
        if (
            len([ids for ids in notes.values() if ids]) > 1
            and sum(map(len, notes.values())) >= count
        ):
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise EngineError(f"the job did not get so far:\n{(folder / 'job.log').read_text()}")
        time.sleep(0.05)


def kill_an_actor(folder: Path) -> int:
    """SIGKILL for the actor with the most rows; returns how many those are."""
    pid, ids = max(notes_of(folder).items(), key=lambda each: len(each[1]))
    os.kill(pid, signal.SIGKILL)
    return len(ids)


def finish(process: subprocess.Popen[bytes], folder: Path) -> None:
    if process.wait(JOB_S):
        raise EngineError(f"the job failed:\n{(folder / 'job.log').read_text()}")


def rows_in(folder: Path) -> list[Row]:
    """All rows that were written, in whatever order."""
    return [
        row
        for path in (folder / "out").glob("*.parquet")
        for row in pq.read_table(path).to_pylist()
    ]


def expected_rows(model: str, rows: list[Row]) -> dict[str, Row]:
    """The same by LLM.generate, one after the other in one process."""
    made = {}
    with LLM(model, **SETTINGS) as llm:
        for row in rows:
            params = seeded(SamplingParams(**PARAMS), SETTINGS["seed"], row["id"])
            (output,) = llm.generate([row["prompt"]], params, use_tqdm=False)
            made[row["id"]] = {
                "text": output["text"],
                "token_ids": output["token_ids"],
                "finish_reason": output.outputs[0].finish_reason,
            }
    return made


def compared(rows: list[Row], expected: dict[str, Row]) -> Row:
    """How the written rows differ from what one process gives."""
    ids = [row["id"] for row in rows]
    differing = [r["id"] for r in rows if any(r[k] != v for k, v in expected[r["id"]].items())]
    return {
        "rows": len(ids),
        "lost": sorted(expected.keys() - set(ids)),
        "twice": sorted({name for name in ids if ids.count(name) > 1}),
        "differing": sorted(differing),
        "errors": {row["id"]: row["error"].partition(":")[0] for row in rows if row["error"]},
    }


def actor_killed(args: argparse.Namespace, folder: Path) -> Row:
    """An actor is killed, and Ray goes on by itself."""
    with started_job(args, folder) as process:
        wait_for(process, folder, args.rows // 3)
        killed = kill_an_actor(folder)
        finish(process, folder)
    return {"rows_of_the_killed_actor": killed}


def job_killed(args: argparse.Namespace, folder: Path) -> Row:
    """An actor is killed, then the job; the same job again goes on."""
    with started_job(args, folder) as process:
        wait_for(process, folder, args.rows // 3)
        killed = kill_an_actor(folder)
        wait_for(process, folder, 2 * args.rows // 3)
        process.kill()
        process.wait()
    before = len(rows_in(folder))
    for path in (folder / "notes").iterdir():
        path.unlink()
    with started_job(args, folder) as process:
        finish(process, folder)
    again = sum(map(len, notes_of(folder).values()))
    return {
        "rows_of_the_killed_actor": killed,
        "rows_written_before": before,
        "rows_answered_then": again,
    }


SCENARIOS = (actor_killed, job_killed)


def main() -> None:
    """Run the jobs and write what came of them; exit status 1 if a row is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    exit_on_sigterm()
    if args.job:
        run_job(args)
        return
    report: Row = {"settings": {"model": args.model, "rows": args.rows, "actors": 2, **SETTINGS}}
    report |= {"params": PARAMS, "versions": versions("ray", "pyarrow")}
    with tempfile.TemporaryDirectory() as made:
        expected: dict[str, Row] = {}
        for scenario in SCENARIOS:
            name = scenario.__name__
            folder = Path(made) / name
            folder.mkdir()
            rows = write_rows(folder / "in", args.rows)
            seen = scenario(args, folder)
            expected = expected or expected_rows(args.model, rows)
            report[name] = seen | compared(rows_in(folder), expected)
            print(name, json.dumps(report[name]), flush=True)
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")
    found = [report[scenario.__name__] for scenario in SCENARIOS]
    if any(each[wrong] for each in found for wrong in ("lost", "twice", "differing")):
        sys.exit(1)


if __name__ == "__main__":
    main()
