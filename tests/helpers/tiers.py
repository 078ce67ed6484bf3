"""Prompts with KV on the device, in place and streamed, for tests that compare the bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from driver import Driver, host_gib
from torch import Tensor

from nanoengine import SamplingParams
from nanoengine.engine.llm_engine import LLMEngine

PROMPTS = [[7 + i, *range(5, 5 + length)] for i, length in enumerate((3, 40, 17, 70))]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
BLOCK = 8
# Of 24 blocks the windows of all four keep 14 in Gemma 3, and a step writes 4.
OFFLOAD = {"enable_cpu_offload": True, "num_gpu_blocks": 18, "stream_mib_per_step": 1e6}
LAYOUTS: dict[str, dict[str, Any]] = {
    "resident": {"num_gpu_blocks": 100},
    "in place": OFFLOAD | {"offload_mode": "in_place"},
    "stream": OFFLOAD | {"offload_mode": "stream", "slot_tokens": 2 * BLOCK, "ring_slots": 2},
}


def run(
    folder: Path, dtype: str = "bfloat16", **settings: Any
) -> tuple[Driver, list[list[int]], list[Tensor]]:
    """The driver, and of each prompt the ids, prompt and output, and the logits."""
    if "enable_cpu_offload" in settings:
        settings["kv_offload_gib"] = host_gib(folder, 200, BLOCK)
    engine = LLMEngine(
        folder,
        dtype=dtype,
        kvcache_block_size=BLOCK,
        max_num_batched_tokens=24,
        max_num_seqs=4,
        num_threads=1,
        **settings,
    )
    driver = Driver(engine)
    outputs = driver.run(PROMPTS, PARAMS)
    engine.close()
    ids = [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]
    return driver, ids, [torch.stack(driver.logits[output.request_id]) for output in outputs]
