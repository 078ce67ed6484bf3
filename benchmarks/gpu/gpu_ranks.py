"""gpu_check.py's row for two GPUs: ranks beside one process, and the end of a rank."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.gpu_measure import Scale, decoding, offloaded, running, time_decode
from nanoengine.errors import EngineError
from nanoengine.loading.model_config import read_model_config
from nanoengine.workers.leading_parts import LeadingDecoder
from nanoengine.workers.leading_rank import LeadingRank

Row = dict[str, Any]
MOST_S = 2.0  # from the death of a rank to the error


def two_gpus(large: Path, scale: Scale, parity: Callable[[], Row]) -> Iterator[Row]:
    """Greedy ids of two ranks, resident and streamed, by `parity`. Then, in the shapes of `large`,
    decode steps of one and two ranks, with graphs and without, and what a killed rank leaves.
    """
    num_gpus = torch.cuda.device_count()
    if not scale.is_rehearsal and num_gpus < 2:
        yield {"skipped": f"it needs 2 GPUs, and PyTorch sees {num_gpus}"}
        return
    yield parity()
    context = min(scale.decode_contexts)
    size = read_model_config(large).kv_bytes_per_token(2)
    resident = {"num_gpu_blocks": context // 256 + 8}
    ways = {
        "resident": resident,
        "resident, no graphs": resident | {"enforce_eager": True},
        "streamed": offloaded(scale, context + 256, size) | {"max_model_len": context + 256},
    }
    for how, settings in ways.items():
        for ranks in (1, 2):
            with running(large, scale, tensor_parallel_size=ranks, **settings) as made:
                step_s, moved = time_decode(made, [context], 10)
                yield {
                    "how": how,
                    "ranks": ranks,
                    "context": context,
                    "step_ms": round(1000 * step_s, 3),
                    "tokens_per_s": round(1 / step_s, 2),
                    "streamed_gb_per_rank": round(moved / 1e9, 3),
                    "link_gb_per_s": made.plan.link_gb_per_s,
                }
    yield killed(large, scale, resident, context)


def killed(large: Path, scale: Scale, settings: dict[str, Any], context: int) -> Row:
    """Seconds from SIGKILL of rank 1, amid decode steps, to the error in this process."""
    with running(large, scale, tensor_parallel_size=2, **settings) as made:
        decoder = made.runner.model
        assert isinstance(decoder, LeadingDecoder)
        ranks = decoder._leader
        assert isinstance(ranks, LeadingRank)
        [pid] = ranks._processes.pids
        seconds = float("inf")
        try:
            with decoding(made, [context]):
                for number in range(1000):
                    if number == 4:
                        os.kill(pid, signal.SIGKILL)
                        start = time.perf_counter()
                    made.step()
        except EngineError:
            seconds = time.perf_counter() - start
    return {"error_after_s": round(seconds, 3), "ok": seconds < MOST_S}
