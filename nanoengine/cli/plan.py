"""`nanoengine plan`: draws what startup/forecast.py says about a model on a machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nanoengine.cli.flags import engine_config
from nanoengine.config import GIB

WIDTH = 60  # characters of a bar
# GB/s that are assumed where none are given; printed beside what follows from them.
LINK_GB_PER_S = 25.0  # PCIe 4 x16
GPU_READ_GB_PER_S = 300.0
CPU_READ_GB_PER_S = 20.0


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a bar: its letter, its key in JSON, what it is, and how much."""

    letter: str
    key: str
    label: str
    num_bytes: int


def plan(args: argparse.Namespace) -> int:
    """Print the forecast of the command line; status 1 if the context cannot be reached."""
    config = engine_config(args)
    # torch, which the arithmetic names dtypes with, takes a second to import.
    from nanoengine.loading.find_model import read_config_of
    from nanoengine.startup.forecast import Forecaster

    model = read_config_of(config.model)
    hardware, assumed = _hardware(args)
    made = Forecaster(config, model, hardware).forecast(args.context)
    if args.json:
        print(json.dumps(_row(args, made, hardware, assumed), indent=2))
    else:
        print("\n".join(_lines(args, made, hardware, assumed)))
    return 1 if made.refusal else 0


def _hardware(args: argparse.Namespace) -> tuple[Any, list[str]]:
    """The Hardware to plan for, and sentences about what was assumed."""
    import torch

    from nanoengine.devices.cpu import available_memory, native_dtype
    from nanoengine.startup.forecast import Hardware

    assumed = []
    gpu_bytes = 0 if args.gpu_gib is None else int(args.gpu_gib * GIB)
    if args.gpu_gib is None and torch.cuda.is_available():
        gpu_bytes = torch.cuda.mem_get_info()[1]
    ram_bytes = available_memory() if args.ram_gib is None else int(args.ram_gib * GIB)
    if args.ram_gib is None:
        assumed.append("RAM: what is free here (--ram-gib)")
    read, link = args.read_gbps, args.link_gbps
    if read is None:
        read = GPU_READ_GB_PER_S if gpu_bytes else CPU_READ_GB_PER_S
        where = "GPU memory" if gpu_bytes else "RAM"
        assumed.append(f"{where} is read at {read:g} GB/s (--read-gbps)")
    if link is None:
        link = LINK_GB_PER_S
        if gpu_bytes:
            assumed.append(f"copies from RAM to the GPU at {link:g} GB/s (--link-gbps)")
    dtype = torch.bfloat16 if gpu_bytes else native_dtype()[0]
    return Hardware(gpu_bytes, ram_bytes, read, link, dtype), assumed


def _lines(args: argparse.Namespace, made: Any, hardware: Any, assumed: list[str]) -> list[str]:
    model, memory = made.model, made.plan
    lines = [
        f"model     {args.model}: {model.architecture}, {model.num_layers} layers, "
        f"{_gib(memory.weight_bytes)} of weights in {memory.dtype.partition(' ')[0]}, "
        f"{model.max_position:,} positions"
    ]
    for name, total, parts in _bars(made, hardware):
        lines += _bar(name, total, parts)
    lines.append(
        f"longest   {made.longest:,} tokens in one request, at about "
        f"{made.longest_tokens_per_s:.3g} tok/s"
    )
    if made.refusal:
        lines.append(f"too long  {made.refusal}")
    why = "the link's speed" if made.is_link_bound else "the memory's speed"
    lines.append(
        f"speed     about {made.tokens_per_s:.3g} tok/s when one request has {made.context:,} "
        f"tokens; {why} is the limit"
    )
    if assumed:
        lines.append(f"assumed   {'; '.join(assumed)}")
    settings = "".join(f", {name}={value!r}" for name, value in made.settings.items())
    lines.append(f"settings  LLM({args.model!r}{settings})")
    flags = "".join(f" {_flag(name, value)}" for name, value in made.settings.items())
    lines.append(f"command   nanoengine chat {args.model}{flags}")
    return lines


def _bars(made: Any, hardware: Any) -> list[tuple[str, int, list[Part]]]:
    """Name, bytes and parts of each memory."""
    memory, kv = made.plan, made.plan.kv
    on_device = kv.num_blocks * kv.block_bytes
    tokens = kv.num_blocks * kv.block_size
    parts = [
        Part("W", "weights", "weights", memory.weight_bytes),
        Part("S", "step", "a step", memory.activation_bytes),
        Part("K", "kv", f"KV of {tokens:,} tokens", on_device),
        Part("R", "ring", "ring", kv.ring_bytes),
    ]
    if not hardware.gpu_bytes:
        return [("RAM", hardware.ram_bytes, parts)]
    parts.append(Part("x", "reserved", "kept back", made.reserved_bytes))
    on_host = kv.num_host_blocks * kv.host_block_bytes
    host_tokens = kv.num_host_blocks * kv.block_size
    host = [Part("K", "kv", f"KV of {host_tokens:,} tokens", on_host)]
    return [("GPU", hardware.gpu_bytes, parts), ("RAM", hardware.ram_bytes, host)]


def _bar(name: str, total: int, parts: Iterable[Part]) -> list[str]:
    """A line of letters, one for each part of the memory, and a line that names them."""
    there = [part for part in parts if part.num_bytes]
    free = max(0, total - sum(part.num_bytes for part in there))
    drawn = ""
    filled = 0
    for part in there:
        filled += part.num_bytes
        end = min(WIDTH, max(len(drawn) + 1, round(WIDTH * filled / total)))
        drawn += part.letter * (end - len(drawn))
    named = [f"{part.letter} {part.label} {_gib(part.num_bytes)}" for part in there]
    return [
        f"{name}  {total / GIB:6.1f} GiB [{drawn:.<{WIDTH}}]",
        f"{'':10}{', '.join([*named, f'. free {_gib(free)}'])}",
    ]


def _row(args: argparse.Namespace, made: Any, hardware: Any, assumed: list[str]) -> dict[str, Any]:
    return {
        "model": args.model,
        "architecture": made.model.architecture,
        "device": hardware.name,
        "memory": {
            name: {"bytes": total} | {part.key: part.num_bytes for part in parts}
            for name, total, parts in _bars(made, hardware)
        },
        "longest": made.longest,
        "longest_tokens_per_s": round(made.longest_tokens_per_s, 3),
        "context": made.context,
        "tokens_per_s": round(made.tokens_per_s, 3),
        "limit": "link" if made.is_link_bound else "memory",
        "read_gb_per_s": hardware.read_gb_per_s,
        "link_gb_per_s": hardware.link_gb_per_s,
        "assumed": assumed,
        "settings": dict(made.settings),
        "refusal": made.refusal or None,
    }


def _flag(name: str, value: object) -> str:
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag} {value}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
