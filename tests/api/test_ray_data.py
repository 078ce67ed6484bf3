"""nanoengine.ray.Generate in jobs of Ray (`make ray`): what Arrow makes of its columns, and what a
second run does with the rows of the first.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")
pa = pytest.importorskip("pyarrow")
pytest.importorskip("ray.data")

import pyarrow.dataset  # noqa: E402 (found by the lines above)
import pyarrow.parquet  # noqa: E402
from ray.data.checkpoint import CheckpointConfig  # noqa: E402

from nanoengine import LLM, SamplingParams  # noqa: E402
from nanoengine.ray import Generate  # noqa: E402
from nanoengine.sampling_params import seeded  # noqa: E402

pytestmark = pytest.mark.ray
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "kvcache_block_size": 8,
    "num_gpu_blocks": 60,
    "num_threads": 1,
    "max_num_seqs": 1,  # its products may depend on the batch
    "seed": 5,
}
PARAMS = {"temperature": 1.0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGTERM)
    ray.init("local", num_cpus=2, object_store_memory=150 << 20, include_dashboard=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()
    signal.signal(signal.SIGTERM, handler)  # Ray leaves its own


def answer(source: Path, target: Path, model: Path) -> None:
    rows = ray.data.read_parquet(str(source)).repartition(target_num_rows_per_block=4)
    rows.map_batches(
        Generate,
        fn_constructor_args=[model, PARAMS],
        fn_constructor_kwargs=SETTINGS,
        batch_size=4,
        num_cpus=0,
        compute=ray.data.ActorPoolStrategy(size=2),
    ).write_parquet(str(target))


def written(folder: Path) -> dict[Any, dict[str, Any]]:
    """The rows of a folder by id; each must be there once."""
    rows = pyarrow.dataset.dataset(str(folder)).to_table().to_pylist()
    found = {row["id"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def test_a_job_and_the_same_job_again(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Arrow's lists and nulls go in, texts and lists come out; the second run adds what is new."""
    source, target = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    prompts: list[Any] = [[5, 6, 7 + number] for number in range(10)] + [None, [], [-1]]
    rows = [{"id": number, "prompt": prompt} for number, prompt in enumerate(prompts)]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows[:6]), source / "a.parquet")
    ray.data.DataContext.get_current().checkpoint_config = CheckpointConfig(
        id_column="id",
        checkpoint_path=str(tmp_path / "checkpoints"),
        delete_checkpoint_on_success=False,
    )
    answer(source, target, tiny("llama"))
    first = {path.name for path in target.iterdir()}
    assert written(target).keys() == set(range(6))
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), source / "a.parquet")
    answer(source, target, tiny("llama"))
    found = written(target)
    assert first < {path.name for path in target.iterdir()} and len(found) == len(rows)
    with LLM(tiny("llama"), **SETTINGS) as llm:
        params = [seeded(SamplingParams(**PARAMS), 5, str(number)) for number in range(10)]
        expected = llm.generate(prompts[:10], params, use_tqdm=False)
    for number, output in enumerate(expected):
        row = found[number]
        assert (row["text"], row["token_ids"], row["error"]) == (
            output["text"],
            output["token_ids"],
            "",
        )
    assert all(found[number]["error"] and not found[number]["text"] for number in (10, 11, 12))
