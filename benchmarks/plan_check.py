"""`python -m benchmarks.plan_check`: what `nanoengine plan` says, against what loads and decodes.

Measures this machine as `nanoengine plan --measure` does, then loads SmolLM2 and dummy weights in
three larger shapes, with all KV on the device and with nearly all of it offloaded, and times decode
steps over random KV. Prints one JSON object; `--json FILE` writes it, too. The machine must be
idle.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from nanoengine.api.llm import LLM
from nanoengine.bench.report import versions
from nanoengine.cli.measure import machine_name, measure_speed
from nanoengine.config.engine import GIB, make_config
from nanoengine.config.model import ModelConfig
from nanoengine.devices.cpu import available_memory, default_threads, native_dtype
from nanoengine.loading.find_model import read_config_of
from nanoengine.startup.forecast import Forecast, Forecaster, Hardware
from nanoengine.startup.machine_speed import MachineSpeed, remember_speed
from nanoengine.startup.probe import time_steps

NUM_ROUNDS = 3
MAX_BYTES_OFF, MAX_SPEED_OFF = 0.03, 0.25
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
# Hidden size, feed-forward, layers, heads, KV heads, vocabulary.
SHAPES = {
    "0.3B": (1024, 2816, 24, 16, 4, 32000),
    "0.6B": (1536, 4096, 22, 24, 8, 32000),
    "1.2B": (2048, 8192, 16, 32, 8, 128256),
}
SMOLLM2 = "smollm2-135m"
NUMBERS = "none"  # what is in bfloat16 is timed so


def main() -> None:
    """Print the JSON object; status 1 if a forecast is too far off."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=8000, help="tokens of the request")
    parser.add_argument("--models", nargs="+", default=[SMOLLM2, *SHAPES], help="which of them")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the result there, too")
    args = parser.parse_args()
    speed = measure_speed(machine_name("", default_threads()), "cpu", None)
    remember_speed(speed)
    rows = [row for name in args.models for row in _rows(name, args.context, speed)]
    is_near = all(row["bytes_off"] <= MAX_BYTES_OFF for row in rows)
    is_near &= all(abs(row["speed_off"]) <= MAX_SPEED_OFF for row in rows)
    found = {"measured": asdict(speed), "versions": versions(), "is_near": is_near, "rows": rows}
    text = json.dumps(found, indent=1)
    print(text)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(text + "\n", encoding="utf-8")
    sys.exit(0 if is_near else 1)


def _rows(name: str, context: int, speed: MachineSpeed) -> Iterator[dict[str, Any]]:
    """A row for each mode of one model."""
    with model_of(name) as (model, load_format):
        made = _forecast(model, context, speed)
        for mode in ("resident", "offloaded"):
            row = _row(model, load_format, made, mode, speed.held_share)
            yield {"model": name, "mode": mode, "context": made.context} | row


@contextmanager
def model_of(name: str) -> Iterator[tuple[str, str]]:
    """The model to load and its load_format; a shape is a folder with a config.json."""
    if name == SMOLLM2:
        yield name, "auto"
        return
    hidden, wide, layers, heads, kv_heads, vocab = SHAPES[name]
    config = LLAMA | {
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield folder, "dummy"


def _forecast(model: str, context: int, speed: MachineSpeed) -> Forecast:
    shape: ModelConfig = read_config_of(model)
    hardware = Hardware(
        gpu_bytes=0,
        ram_bytes=available_memory(),
        read_gb_per_s=speed.read_gb_per_s,
        link_gb_per_s=speed.link_gb_per_s or 1.0,
        auto_dtype=native_dtype()[0],
        read_efficiency=1.0,
        kv_gb_per_s=speed.kv_gb_per_s,
        layer_s=speed.layer_us / 1e6,
        held_share=speed.held_share,
    )
    return Forecaster(make_config(model, {"quantization": NUMBERS}), shape, hardware).forecast(
        context
    )


def _row(
    model: str, load_format: str, made: Forecast, mode: str, held_share: float
) -> dict[str, Any]:
    """Load the model, time its decode steps, compare. held_share: as of MachineSpeed."""
    kv = made.plan.kv
    num_blocks = -(-made.context // kv.block_size) + 2
    settings: dict[str, Any] = {"num_gpu_blocks": num_blocks, "quantization": NUMBERS}
    if mode == "offloaded":  # all but the block that is written
        gib = (num_blocks + 0.5) * kv.block_bytes / GIB
        settings |= {"num_gpu_blocks": 2, "kv_offload_gib": gib}
    predicted = int(made.plan.weight_bytes * held_share) + num_blocks * kv.block_bytes
    with LLM(model, load_format=load_format, measure_speed=False, **settings) as llm:
        engine = llm.llm_engine
        weights, spec = llm.plan.weight_bytes, engine.kv.spec
        host = spec.num_host_blocks * spec.host_block_bytes
        loaded = weights + sum(pool.nbytes for pool in engine.kv.memory.pool) + host
        seconds: list[float] = []
        for _ in range(NUM_ROUNDS):
            lengths = [made.context]
            seconds += time_steps(
                engine.runner, engine.kv, engine.device, lengths, mode == "offloaded"
            )
    step_s = statistics.median(seconds)
    if mode == "offloaded":
        predicted += 2 * kv.block_bytes
    return {
        "threads": torch.get_num_threads(),
        "weight_bytes": weights,
        "predicted_bytes": predicted,
        "loaded_bytes": loaded,
        "bytes_off": round(abs(predicted / loaded - 1), 4),
        "predicted_tokens_per_s": round(made.tokens_per_s, 2),
        "tokens_per_s": round(1 / step_s, 2),
        "step_ms_min_max": [round(min(seconds) * 1e3, 2), round(max(seconds) * 1e3, 2)],
        "speed_off": round(made.tokens_per_s * step_s - 1, 4),
    }


if __name__ == "__main__":
    main()
