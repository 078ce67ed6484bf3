"""`nanoengine plan --measure`: runs decode steps of two small models of random weights."""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import nanoengine
from nanoengine.cli.interrupts import ended_by_ctrl_c
from nanoengine.devices.cpu import processor_name
from nanoengine.devices.waiting import WaitingShare
from nanoengine.errors import EngineError, counted
from nanoengine.startup.machine_speed import MachineSpeed, Sample, reading_and_layers

_SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8192,
    "head_dim": 64,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
}
# Many small layers, as in SmolLM2-135M, and a few large ones, as in Llama-3.2-1B: 0.2 and 0.5 GB.
THIN = _SHAPE | {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
WIDE = _SHAPE | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
SETTINGS = {
    "load_format": "dummy",
    "num_gpu_blocks": 34,
    "kv_offload_gib": 0.25,
    "max_num_seqs": 1,
    "measure_speed": False,
}
NUM_BLOCKS = 33  # of a request's KV
NUM_TRIES = 3


@dataclass(frozen=True, slots=True)
class _Measured:
    """A decode step of a shape, GB/s at which it reads KV (0: hidden by noise) and at which KV is
    copied (0: it is not), whether other programs used the processor, and as of MachineSpeed.
    """

    sample: Sample
    kv_gb_per_s: float
    link_gb_per_s: float
    is_slowed: bool
    held_share: float


def machine_name(gpu: str, num_threads: int) -> str:
    """What a measured speed depends on. gpu: the name of the GPU, "" without one."""
    import torch

    place = gpu or f"{processor_name()}, {counted(num_threads, 'thread')}"
    return f"{place}; torch {torch.__version__}, nanoengine {nanoengine.__version__}"


def measure_speed(machine: str, device: str, num_threads: int | None) -> MachineSpeed:
    """Run the steps, which takes some seconds. device, num_threads: the engine's settings.

    Raises EngineError if other programs leave too little of the processor.
    """
    settings = SETTINGS | {"device": device, "num_threads": num_threads}
    thin, wide = (_measured(shape, settings) for shape in (THIN, WIDE))
    read_gb_per_s, layer_s = reading_and_layers(thin.sample, wide.sample)
    return MachineSpeed(
        machine=machine,
        date=date.today().isoformat(),
        read_gb_per_s=round(read_gb_per_s, 2),
        kv_gb_per_s=round(thin.kv_gb_per_s or read_gb_per_s, 2),
        link_gb_per_s=round(thin.link_gb_per_s, 2),
        layer_us=round(layer_s * 1e6, 2),
        is_slowed=thin.is_slowed or wide.is_slowed,
        held_share=round(wide.held_share, 3),
    )


def _measured(shape: dict[str, Any], settings: dict[str, Any]) -> _Measured:
    """Decode steps of this shape, medians of NUM_TRIES."""
    with ended_by_ctrl_c():
        from nanoengine import LLM  # imports the engine, which takes seconds
        from nanoengine.loading.model_config import read_model_config
        from nanoengine.startup import probe
        from nanoengine.startup.weight_bytes import bytes_of_numbers

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shape), encoding="utf-8")
        with LLM(folder, **settings) as llm:
            engine, waiting = llm.llm_engine, WaitingShare()
            runner, kv, on = engine.runner, engine.kv, engine.device
            found: list[Any] = [None]
            if not probe.is_taken(waiting):
                tries = range(NUM_TRIES)
                found = [probe.measure_decode(runner, kv, on, NUM_BLOCKS, waiting) for _ in tries]
            link_gb_per_s = probe.measure_copy(kv.memory)
            num_bytes, itemsize = llm.plan.weight_bytes, llm.plan.kv.dtype.itemsize
        config = read_model_config(Path(folder))
    if None in found:
        raise EngineError(
            "decode steps could not be measured while other programs use the processor; measure "
            "when it is idle"
        )
    step_s = statistics.median(costs.step_s for costs in found)
    block_s = statistics.median(costs.device_block_s for costs in found)
    return _Measured(
        sample=Sample(kv.spec.num_layers, num_bytes, step_s),
        kv_gb_per_s=kv.spec.block_bytes / block_s / 1e9 if block_s else 0.0,
        link_gb_per_s=link_gb_per_s,
        is_slowed=waiting.is_long(),
        held_share=num_bytes / bytes_of_numbers(config, itemsize),
    )
