"""`python -m benchmarks.gpu.virtual_line FILE`: the line of gpu_line.py without a GPU, in minutes.

Runs it on the GPU made of the CPU (tests/helpers/virtual_gpu.py), in whose virtual time kernels and
copies take as long as those of Llama-3.1-8B shapes took on an H200. One token here stands for
TOKENS there, in bytes and in time. So schedules, transfers, drafts and tokens are those of the
engine; speeds are no measurement, and what a GPU does besides is not in them.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))

from quick_interpreter import speed_up
from virtual_gpu import Costs, VirtualGpu

from benchmarks.gpu.gpu_line import fill_apart, line
from benchmarks.gpu.gpu_measure import LLAMA_8B, REHEARSAL, Row, Scale, decoding, running
from benchmarks.gpu.gpu_rows import save
from nanoengine.startup import memory_plan
from nanoengine.startup.memory_plan import LEAST_RUN_BYTES

TOKENS = 32
BLOCK = 128  # tokens here
DEVICE_BLOCKS = 9  # 36K tokens there: what weights and a step leave of 24 GB
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
TINY_TOKEN_BYTES = 2 * 2 * 16 * 4  # layers, K and V, head_dim, float32
TOKEN_BYTES = 131_072
# Measured on an H200, benchmarks/results/gpu/h200.json: a step without context, reading the KV of a
# thousand tokens, the link.
STEP_S = 4.79e-3
READ_S = 3.84e-3 / 96
LINK_GB_PER_S = 54.3
SETTINGS: dict[str, Any] = {
    "dtype": "float32",  # Triton's interpreter has no products in bfloat16
    "measure_speed": False,
    "kvcache_block_size": BLOCK,
    "kv_cache_gib": None,
    "num_gpu_blocks": DEVICE_BLOCKS,
    "slot_tokens": 16_384 // TOKENS,
    "max_num_batched_tokens": 64,
}


def costs_of(folder: Path, scale: Scale, gpu: VirtualGpu) -> Costs:
    """Costs with which a step here takes as long as one there."""
    gpu.costs = Costs(operation_s=1.0)
    with running(folder, scale, **SETTINGS) as made, decoding(made, [BLOCK], fill_apart):
        for _ in range(4):
            made.step()
        before = gpu.streams[0].busy
        for _ in range(4):
            made.step()
        num_operations = (gpu.streams[0].busy - before) / 4
    block = BLOCK * TOKENS
    return Costs(
        operation_s=STEP_S / num_operations,
        block_s=READ_S * block / 1000 / TINY["num_hidden_layers"],
        link_bytes_per_s=LINK_GB_PER_S * 1e9 * TINY_TOKEN_BYTES / TOKENS / TOKEN_BYTES,
    )


def rows_of(scale: Scale) -> Iterator[Row]:
    """The rows of the line, in tokens and bytes of the model that is stood for."""
    with tempfile.TemporaryDirectory() as name, VirtualGpu() as gpu, ExitStack() as patches:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(LLAMA_8B | TINY))
        virtual = SimpleNamespace(perf_counter=lambda: gpu.host_time)
        least = LEAST_RUN_BYTES * TINY_TOKEN_BYTES // (TOKENS * TOKEN_BYTES)
        patches.enter_context(mock.patch.object(memory_plan, "LEAST_RUN_BYTES", least))
        patches.enter_context(mock.patch("benchmarks.gpu.gpu_drafts.time", virtual))
        patches.enter_context(mock.patch("benchmarks.gpu.gpu_measure.free_memory", lambda: None))
        gpu.costs = costs_of(folder, scale, gpu)
        patches.enter_context(mock.patch("benchmarks.gpu.gpu_line.running", partial(_run, running)))
        for row in line(folder, replace(scale, packed_contexts=())):  # 12 bits are of bfloat16
            yield _grown(row)


def _grown(row: Row) -> Row:
    """A row in tokens and bytes of the model that is stood for."""
    if "context" in row:
        del row["streamed_gb_a_round"]
        return row | {"context": TOKENS * row["context"]}
    here, there = row["longest"], TOKENS * row["longest"]
    refusal = row["refusal"].replace(f"{here + 1}", f"{there + 1}").replace(f"{here}", f"{there}")
    return row | {"longest": there, "token_bytes": TOKEN_BYTES, "refusal": refusal}


def _run(start: Any, folder: Path, scale: Scale, **settings: Any) -> Any:
    """An engine with the settings of this file before those of the line."""
    if "kv_offload_gib" in settings:
        settings["kv_offload_gib"] *= 2  # float32
    return start(folder, scale, **(settings | SETTINGS))


def main(file: Path) -> None:
    """Write the rows, one after the other, as gpu_check.py would."""
    speed_up()
    contexts = tuple((8192 << n) // TOKENS for n in range(7))
    scale = replace(REHEARSAL, device="cuda", line_contexts=contexts)
    result: dict[str, Any] = {
        "rehearsal": True,
        "clock": "virtual",
        "date": time.strftime("%Y-%m-%d"),
        "hardware": {"device": "virtual GPU"},
        "link": {"h2d_gb_per_s": LINK_GB_PER_S},
        "line": [],
    }
    for row in rows_of(scale):
        result["line"].append(row)
        print(row, flush=True)
        save(result, file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
