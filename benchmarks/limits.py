"""Measures what a machine can do, and what share of it a run used.

Owns the measured limits and the least bytes and FLOP that a decoder needs. Knows the lengths
of prompts and outputs, not how an engine split them into steps.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanoengine.config.model import ModelConfig
from nanoengine.devices.cpu import CpuDevice
from nanoengine.kernels.c_build import KernelBuildError, load_library
from nanoengine.models.weight_shapes import weight_shapes

_FUSED_STEPS = Path(__file__).with_name("fused_steps.c")
WEIGHT_BYTES = 2.0  # of a parameter as a number: float32 ones that bf16 holds are kept so


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured limits of the machine: plain reads from memory, matrix products, and products of
    which the factors may be 8-bit integers.
    """

    read_gb_per_s: float
    matmul_gflop_per_s: float
    int8_gflop_per_s: float


@dataclass(frozen=True, slots=True)
class Model:
    """Inputs of the share of the limit. prefix: tokens that all prompts begin with. weight_bytes,
    kv_bytes: of a parameter, and of a number of KV. rounds_activations: whether products are of
    8-bit integers.
    """

    config: ModelConfig
    prefix: int
    limits: Limits
    weight_bytes: float = WEIGHT_BYTES
    kv_bytes: float = 2.0
    rounds_activations: bool = False

    @property
    def flop_per_s(self) -> float:
        """The limit of its products."""
        limits = self.limits
        rate = limits.int8_gflop_per_s if self.rounds_activations else limits.matmul_gflop_per_s
        return rate * 1e9


def share_of_limits(runs: Sequence[dict[str, Any]], model: Model) -> dict[str, Any]:
    """The least time that the work needs, over the time of the median round.

    P: parameters of all linear layers but the head, H: of the head. Of experts, those of one token:
    a step of several requests may need more. Prefill computes each prompt token that is not cached,
    2 P FLOP, and the head once a request, 2 H. But of the last layer only the last token needs
    more than what makes keys and values. Then step i decodes every request that wants more
    than i tokens: 2 (P + H) FLOP each. It reads all P + H weights once,
    model.weight_bytes each, and the K and V of every context (a shared prefix once). Attention adds
    4 x heads x head_dim FLOP in each layer for each token of context. A layer with a window reads
    and computes no more than that. With B bytes and F FLOP a second:

        least seconds = prefill FLOP / F + sum over steps of max(bytes / B, FLOP / F)
        share_of_limit = least seconds / elapsed
        share_of_read = bytes of all steps / elapsed / B;  share_of_matmul = all FLOP / elapsed / F
    """
    run = sorted(runs, key=lambda run: float(run["seconds"]))[len(runs) // 2]
    requests = [
        (num_in, cached, len(ids))
        for num_in, cached, ids in zip(
            run["input_tokens"], run["num_cached"], run["outputs"], strict=True
        )
    ]
    prefill = sum(_prefill_flop(model.config, *request[:2]) for request in requests)
    steps = decode_steps(model, [(num_in, out) for num_in, _, out in requests])
    read = model.limits.read_gb_per_s * 1e9
    matmul = model.flop_per_s
    num_bytes, flop = sum(b for b, _ in steps), prefill + sum(f for _, f in steps)
    least_s = prefill / matmul + sum(max(b / read, f / matmul) for b, f in steps)
    seconds = float(run["seconds"])
    return {
        "decode_steps": len(steps),
        "decode_gb": rounded(num_bytes / 1e9),
        "gflop": rounded(flop / 1e9),
        "least_s": rounded(least_s),
        "share_of_limit": rounded(least_s / seconds),
        "share_of_read": rounded(num_bytes / seconds / read),
        "share_of_matmul": rounded(flop / seconds / matmul),
    }


def decode_steps(model: Model, requests: Sequence[tuple[int, int]]) -> list[tuple[float, float]]:
    """Bytes and FLOP of every step after prefill; `requests` are (tokens in, tokens out)."""
    config = model.config
    layers, head = _num_parameters(config)
    steps = []
    for i in range(1, max((out for _, out in requests), default=0)):
        contexts = [num_in + i for num_in, out in requests if out > i]
        kv, flop = 0, len(contexts) * 2 * (layers + head)
        for layer in config.attention_layers:
            seen = [min(context, _window(config, layer)) for context in contexts]
            flop += sum(seen) * _attention_flop(config, layer)
            if layer in config.kv_layers:
                # Of the shared tokens, those that a window has not passed.
                shared = [max(0, model.prefix - c + n) for c, n in zip(contexts, seen, strict=True)]
                numbers = config.kv_parts * math.prod(config.shape(layer).kv_heads)
                kv += numbers * (sum(seen) - sum(shared) + max(shared))
        num_bytes = model.weight_bytes * (layers + head) + kv * model.kv_bytes
        steps.append((num_bytes, float(flop)))
    return steps


def _prefill_flop(config: ModelConfig, num_in: int, cached: int) -> float:
    layers, head = _num_parameters(config)
    attention = sum(
        (_pairs(num_in, window) - _pairs(cached, window)) * _attention_flop(config, layer)
        for layer in config.attention_layers
        for window in [_window(config, layer)]
    )
    spared = max(0, num_in - cached - 1) * 2 * _behind_last_keys(config)
    return (num_in - cached) * 2 * layers - spared + 2 * head + attention


def _window(config: ModelConfig, layer: int) -> int:
    """Tokens that a token of this layer sees at most."""
    return (config.windows[layer] if config.windows else None) or config.max_position


def _pairs(num_tokens: int, window: int) -> float:
    """Of each of so many first tokens and of what it sees."""
    first = min(num_tokens, window)
    return first * (first + 1) / 2 + (num_tokens - first) * window


def _attention_flop(config: ModelConfig, layer: int) -> int:
    """FLOP of one query token for each token it attends to."""
    return 4 * config.num_heads * config.shape(layer).head_dim


def _num_parameters(config: ModelConfig, of_all_experts: bool = False) -> tuple[int, int]:
    """Parameters of the linear layers, and of the head; of experts, those of one token."""
    layers = _of_layers(config, ".layers.", of_all_experts)
    return layers, config.hidden_size * config.vocab_size


def _behind_last_keys(config: ModelConfig) -> int:
    """Parameters of the last layer whose products no other layer reads."""
    last = f".layers.{config.num_layers - 1}."
    return sum(_of_layers(config, f"{last}{part}") for part in ("mlp.", "self_attn.o_proj."))


def _of_layers(config: ModelConfig, part: str, of_all_experts: bool = False) -> int:
    """Parameters of the matrices whose names have `part`; of experts, those of one token."""
    others, of_experts = 0, 0
    for name, shape in weight_shapes(config).items():
        if part not in name or len(shape) != 2:
            continue
        if ".experts." in name:
            of_experts += math.prod(shape)
        else:
            others += math.prod(shape)
    if config.experts is not None and not of_all_experts:
        of_experts = of_experts * config.experts.top_k // config.experts.count
    return others + of_experts


def stored_bytes(folder: Path, config: ModelConfig) -> float:
    """Bytes of a parameter in the safetensors files of a folder, packed codes among them."""
    num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return num_bytes / sum(_num_parameters(config, of_all_experts=True))


def measure_limits(
    num_threads: int,
    num_bytes: int = 512 << 20,
    size: int = 2048,
    dtype: torch.dtype = torch.bfloat16,
) -> Limits:
    """Measure all limits as the best of several rounds of plain torch operators.

    Reads: sum, max and products with a vector over `num_bytes` of float32, too many for any cache,
    in large pages where the system has them (1.5 times as fast here). Products: square matrices of
    `size` in `dtype`; in float32 where oneDNN has no bfloat16, where PyTorch is 100 times slower.
    Of float32 also fused steps on registers alone, which PyTorch's library may be far from (1.6
    times on a Zen 3). Of integers, too, where oneDNN has them; the faster ones count.
    """
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        dtype = torch.float32
    before = torch.get_num_threads()
    memory = CpuDevice(num_threads).empty_host((num_bytes // 4,), torch.float32).fill_(1.0)
    rows, vector = memory.view(-1, 1024), torch.ones(1024)
    read_s = min(_best_s(memory.sum), _best_s(memory.max), _best_s(lambda: rows @ vector))
    matrix = torch.randn(size, size).to(dtype)
    matmul_s = _best_s(lambda: matrix @ matrix)
    if dtype is torch.float32:
        matmul_s = min(matmul_s, _fused_s(2 * size**3, num_threads))
    int8_s = matmul_s
    if torch.cpu._is_vnni_supported():
        integers = torch.randint(-128, 128, (size, size), dtype=torch.int8)
        int8_s = min(int8_s, _best_s(lambda: torch._int_mm(integers, integers)))
    torch.set_num_threads(before)
    rates = num_bytes / read_s / 1e9, *(2e-9 * size**3 / each for each in (matmul_s, int8_s))
    return Limits(*map(rounded, rates))


def _fused_s(flop: float, num_threads: int) -> float:
    """Seconds of so many FLOP of float32 on registers alone; infinite without a C compiler."""
    try:
        library = load_library(_FUSED_STEPS)
    except KernelBuildError:
        return math.inf
    library.fused_steps.restype = ctypes.c_double
    arguments = ctypes.c_long(1_000_000), num_threads, ctypes.c_float(0.5)
    seconds = _best_s(lambda: library.fused_steps(*arguments))
    return float(seconds * flop / library.fused_steps(*arguments))


def _best_s(run: Callable[[], Any], rounds: int = 10) -> float:
    best = math.inf
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def rounded(value: float) -> float:
    """Round to four digits."""
    return float(f"{value:.4g}")
