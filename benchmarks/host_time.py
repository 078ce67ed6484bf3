"""Host time of attention in a streamed decode step: `python -m benchmarks.host_time [--json FILE]`.

On a GPU a step that streams little waits for the host, which lays out and launches each layer's
attention and copies. Here kernels and copies do nothing, so what is left is Python; what Triton and
CUDA take for a launch comes on top. The shape is that of a model of 8B: 32 layers, and a request of
128 blocks, of which 17 are streamed in two fills and read between two runs on the device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from nanoengine.attention import triton_attention
from nanoengine.attention.triton_attention import TritonAttention
from nanoengine.bench.report import versions
from nanoengine.config.attention import AttentionConfig
from nanoengine.context import ForwardContext
from nanoengine.devices.copy_streams import Convert, DoneEvent, Event, InlineStream
from nanoengine.devices.cpu import CpuDevice
from nanoengine.kv.kv_memory import KVMemory
from nanoengine.kv.kv_spec import KVSpec
from nanoengine.kv.step_kv import StepKV
from nanoengine.kv.step_plan import (
    DEVICE,
    HOST,
    Part,
    SequenceSpan,
    SlotWrite,
    StepPlan,
    StepTransfers,
)

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 32, 32, 8, 128
BLOCKS, BLOCK_SIZE, SLOT_BLOCKS, RING_SLOTS = 128, 4, 16, 4  # the size of a block changes nothing
STREAMED = SLOT_BLOCKS + 1
STEPS, WARM = 100, 20


class NoStream(InlineStream):
    """Copies nothing."""

    def copy(
        self, dst: Tensor, src: Tensor, owner: object = None, convert: Convert | None = None
    ) -> None:
        return

    def wait(self, event: Event) -> None:
        return


class NoKernel:
    """As a kernel of Triton, which it does not launch."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: None


def main() -> None:
    """Print the microseconds of a layer, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {"versions": versions(), "us_of_a_layer": measure()}
    print(json.dumps(found))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


def measure() -> dict[str, float]:
    """Median, least and most of STEPS steps."""
    device = CpuDevice(1)
    device.compute, device.h2d, device.d2h = (NoStream(name) for name in ("compute", "h2d", "d2h"))
    spec = KVSpec(
        heads=((KV_HEADS, HEAD_DIM),) * LAYERS,
        num_blocks=BLOCKS - STREAMED + 1,
        block_size=BLOCK_SIZE,
        dtype=torch.bfloat16,
        num_host_blocks=STREAMED,
        ring_slots=RING_SLOTS,
        slot_blocks=SLOT_BLOCKS,
    )
    memory = KVMemory(spec, device)
    assert memory.offload is not None
    stores: list[list[Event]] = [[DoneEvent()] * LAYERS for _ in range(2)]
    for slot in range(STREAMED):
        memory.offload.stored.host[slot] = stores[slot % 2]
    attention = TritonAttention(AttentionConfig(HEAD_DIM), torch.bfloat16, torch.device("cpu"))
    seconds = []
    with (
        patch.object(triton_attention, "decode", NoKernel()),
        patch.object(triton_attention, "merge", NoKernel()),
    ):
        for _ in range(WARM + STEPS):
            start = time.perf_counter()
            step(memory, attention)
            seconds.append(time.perf_counter() - start)
    memory.close()
    times = [1e6 * each / LAYERS for each in seconds[WARM:]]
    found = {"median": statistics.median(times), "min": min(times), "max": max(times)}
    return {name: round(value, 1) for name, value in found.items()}


def plan() -> StepPlan:
    """The first block is on the device, the next ones are streamed, the rest is on the device."""
    fills = tuple(range(SLOT_BLOCKS)), (SLOT_BLOCKS,)
    last = BLOCKS - STREAMED - 1
    return StepPlan(
        num_tokens=1,
        num_rows=0,
        writes=(SlotWrite(0, last, 1, 1),),
        write_slots=(last,),
        reads=(
            Part(DEVICE, (SequenceSpan(0, 0, (0,)),)),
            Part(HOST, (SequenceSpan(0, 1, tuple(range(SLOT_BLOCKS))),), fills[0]),
            Part(HOST, (SequenceSpan(0, 1 + SLOT_BLOCKS, (0,)),), fills[1]),
            Part(DEVICE, (SequenceSpan(0, 1 + STREAMED, tuple(range(1, last + 1))),)),
        ),
        transfers=StepTransfers(
            fills=fills, block_ids={slot: slot for slot in range(STREAMED)}, is_decode=True
        ),
    )


def step(memory: KVMemory, attention: TritonAttention) -> None:
    """What the host does for attention in all layers of a step."""
    planned, num_keys = plan(), BLOCKS * BLOCK_SIZE - 2
    kv: Any = StepKV.open(planned, memory, memory.start(planned.transfers))
    ids, query_start = torch.zeros(1, dtype=torch.int64), torch.tensor([0, 1], dtype=torch.int32)
    kv_lens = torch.tensor([num_keys], dtype=torch.int32)
    ctx = ForwardContext(ids, ids, query_start, kv_lens, ((1, num_keys),), ids, kv, attention)
    q = torch.zeros(1, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    for layer in range(LAYERS):
        kv.target(layer)
        attention.run(layer, q, ctx)
    assert kv.finish()


if __name__ == "__main__":
    main()
