"""Decode, prefill and weights with packed checkpoints as they are, and with their numbers:

    python -m benchmarks.packed_checkpoints [--rounds 3] [--output FILE]

Makes random checkpoints of a few layers: gpt-oss 20B's shape with experts in MXFP4, Llama 3.2 1B's
in AWQ with groups of 128, and in FP8 with blocks of 128 x 128. Each row is a process of its own, in
float32; kinds take turns. Random bytes are no model: the speeds are those of its shape, and equal
ids say that products have the same bits.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.ending import exit_on_sigterm
from nanoengine import LLM, SamplingParams
from nanoengine.bench.report import versions
from nanoengine.config.engine import GIB
from nanoengine.startup import parts

Row = dict[str, Any]
KINDS = ("packed", "numbers")
SHORT, LONG, NEW = 32, 512, 32  # tokens of prompts, and of an answer
COMMON = {"vocab_size": 32000, "head_dim": 64, "num_key_value_heads": 8}
COMMON |= {"max_position_embeddings": 8192}
GPT_OSS = COMMON | {
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_hidden_layers": 2,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "rope_scaling": None,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 128,
    "quantization_config": {"quant_method": "mxfp4"},
}
LLAMA = COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 4,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128},
}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
Tensors = Iterator[tuple[str, torch.Tensor]]


class Draw:
    """Random tensors, the same each time."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def numbers(self, *shape: int) -> torch.Tensor:
        """Small ones, float16."""
        return (torch.randn(shape, generator=self._generator) * 0.02).half()

    def integers(self, low: int, high: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """From `low` to below `high`."""
        return torch.randint(low, high, shape, generator=self._generator).to(dtype)


def _attention(config: Row) -> Iterator[tuple[str, int, int]]:
    """Name, outputs and inputs of each product."""
    hidden, dim = config["hidden_size"], config["head_dim"]
    q, kv = (config[name] * dim for name in ("num_attention_heads", "num_key_value_heads"))
    yield from (("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, q))


def _gpt_oss_layer(config: Row, draw: Draw) -> Tensors:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    count = config["num_local_experts"]
    yield "self_attn.sinks", draw.numbers(config["num_attention_heads"])
    for name, outputs, inputs in _attention(config):
        yield f"self_attn.{name}_proj.weight", draw.numbers(outputs, inputs)
        yield f"self_attn.{name}_proj.bias", draw.numbers(outputs)
    yield "mlp.router.weight", draw.numbers(count, hidden)
    yield "mlp.router.bias", draw.numbers(count)
    for name, outputs in (("gate_up", 2 * inner), ("down", hidden)):
        shape, stem = (count, outputs, hidden // 32), f"mlp.experts.{name}_proj"
        yield f"{stem}_blocks", draw.integers(0, 256, torch.uint8, *shape, 16)
        yield f"{stem}_scales", draw.integers(118, 122, torch.uint8, *shape)
        yield f"{stem}_bias", draw.numbers(count, outputs)


def _products(config: Row) -> Iterator[tuple[str, int, int]]:
    """Of a layer: name, outputs and inputs."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    for name, outputs, inputs in _attention(config):
        yield f"self_attn.{name}_proj", outputs, inputs
    yield from (("mlp.gate_proj", inner, hidden), ("mlp.up_proj", inner, hidden))
    yield "mlp.down_proj", hidden, inner


def _awq_layer(config: Row, draw: Draw) -> Tensors:
    for name, outputs, inputs in _products(config):
        groups, words = inputs // config["quantization_config"]["group_size"], outputs // 8
        yield f"{name}.qweight", draw.integers(-(1 << 31), 1 << 31, torch.int32, inputs, words)
        yield f"{name}.qzeros", torch.full((groups, words), 0x77777777, dtype=torch.int32)
        yield f"{name}.scales", draw.numbers(groups, outputs).abs() / 8 + 0.001


def _fp8_layer(config: Row, draw: Draw) -> Tensors:
    for name, outputs, inputs in _products(config):
        codes = (draw.numbers(outputs, inputs) * 4096).to(torch.float8_e4m3fn)
        yield f"{name}.weight", codes
        yield f"{name}.weight_scale_inv", torch.full((outputs // 128, inputs // 128), 1 / 4000)


# Each with what makes the tensors of a layer.
MODELS: dict[str, tuple[Row, Callable[[Row, Draw], Tensors]]] = {
    "gpt-oss 20B's shape, 2 layers, MXFP4": (GPT_OSS, _gpt_oss_layer),
    "Llama 3.2 1B's shape, 4 layers, AWQ": (LLAMA, _awq_layer),
    "Llama 3.2 1B's shape, 4 layers, FP8": (LLAMA | FP8, _fp8_layer),
}


def make(name: str, folder: Path) -> None:
    """Write a checkpoint of MODELS."""
    config, layer = MODELS[name]
    draw, size, hidden = Draw(), config["vocab_size"], config["hidden_size"]
    tensors = {"model.embed_tokens.weight": draw.numbers(size, hidden)}
    tensors["model.norm.weight"] = torch.ones(hidden)
    if not config.get("tie_word_embeddings"):
        tensors["lm_head.weight"] = draw.numbers(size, hidden)
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = torch.ones(hidden)
        tensors |= {prefix + each: tensor for each, tensor in layer(config, draw)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def measure(folder: str, kind: str) -> Row:
    """Speeds and weights in this process. "numbers": without the kernels of codes."""
    if kind == "numbers":
        parts._code_ops = lambda *_: None
    draw = random.Random(0)
    short, *long = ([draw.randrange(100, 30000) for _ in range(n)] for n in (SHORT, *[LONG] * 3))
    settings: Row = {"dtype": "float32", "kv_cache_gib": 0.5, "max_model_len": 2048}
    with LLM(folder, num_threads=2, **settings) as llm:

        def seconds(prompt: list[int], tokens: int) -> tuple[float, list[int]]:
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            start = time.perf_counter()
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            return time.perf_counter() - start, output.outputs[0].token_ids

        seconds(short, NEW)
        first = statistics.median(seconds(short, 1)[0] for _ in range(3))
        whole = statistics.median(seconds(short, 1 + NEW)[0] for _ in range(3))
        return {
            "decode_tokens_per_s": NEW / (whole - first),
            "prefill_tokens_per_s": LONG / statistics.median(seconds(p, 1)[0] for p in long),
            "weights_gib": llm.plan.weight_bytes / GIB,
            "token_ids": seconds(short, NEW)[1],
        }


def compared(name: str, rounds: int) -> Row:
    """Medians of both kinds of one model, in turns; [least, most] of their ratio."""
    runs: dict[str, list[Row]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        make(name, Path(folder))
        for _ in range(rounds):
            for kind in KINDS:
                command = [sys.executable, "-m", "benchmarks.packed_checkpoints", "--of", folder]
                done = subprocess.run([*command, kind], capture_output=True, text=True, check=True)
                runs[kind].append(json.loads(done.stdout.splitlines()[-1]))
    ids = [run.pop("token_ids") for kind in KINDS for run in runs[kind]]
    row: Row = {"same_ids": all(each == ids[0] for each in ids)}
    for figure in runs["packed"][0]:
        of = {kind: [run[figure] for run in runs[kind]] for kind in KINDS}
        ratios = [a / b for a, b in zip(of["packed"], of["numbers"], strict=True)]
        row[figure] = {kind: round(statistics.median(of[kind]), 3) for kind in KINDS}
        row[figure]["ratio"] = [round(f(ratios), 2) for f in (statistics.median, min, max)]
    return row


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--of", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    exit_on_sigterm()
    if args.of:
        print(json.dumps(measure(*args.of)))
        return
    rows = {name: compared(name, args.rounds) for name in MODELS}
    made = json.dumps({"rows": rows, "rounds": args.rounds, "versions": versions()}, indent=2)
    print(made)
    if args.output:
        args.output.write_text(made + "\n")


if __name__ == "__main__":
    main()
