"""`nanoengine plan`: draws what startup/forecast.py says about a model on a machine."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from nanoengine.cli.flags import engine_config
from nanoengine.cli.usage import UsageError
from nanoengine.config.engine import GIB, EngineConfig
from nanoengine.startup.bars import Bar, Part
from nanoengine.startup.machine_speed import MachineSpeed, remember_speed, remembered_speed

# GB/s that are assumed where none are given; printed beside what follows from them.
LINK_GB_PER_S = 25.0  # PCIe 4 x16
GPU_READ_GB_PER_S = 300.0
CPU_READ_GB_PER_S = 20.0


def plan(args: argparse.Namespace) -> int:
    """Print the forecast of the command line; status 1 if the context cannot be reached."""
    config = engine_config(args)
    # torch, which the arithmetic names dtypes with, takes a second to import.
    from nanoengine.loading.find_model import read_codes_of, read_config_of
    from nanoengine.startup.forecast import Forecaster

    model = read_config_of(config.model)
    speed = _measured(args, config)
    hardware, assumed = _hardware(args, speed)
    codes = read_codes_of(config.model) if config.quantization in (None, "gguf") else {}
    made = Forecaster(config, model, hardware, codes).forecast(args.context)
    if args.json:
        print(json.dumps(_row(args, made, hardware, assumed, speed), indent=2))
    else:
        print("\n".join(_lines(args, made, hardware, assumed, speed)))
    return 1 if made.refusal else 0


def _measured(args: argparse.Namespace, config: EngineConfig) -> MachineSpeed | None:
    """What was measured on this machine, if it is the one to plan for and no speed is given."""
    import torch

    from nanoengine.cli.measure import machine_name, measure_speed
    from nanoengine.devices.cpu import default_threads

    has_gpu = torch.cuda.is_available()
    is_here = args.gpu_gib is None or (args.gpu_gib == 0 and not has_gpu)
    if args.measure and not (is_here and args.read_gbps is None):
        raise UsageError("--measure measures this machine; leave --gpu-gib and --read-gbps out")
    if not is_here or args.read_gbps is not None:
        return None
    gpu = torch.cuda.get_device_name() if has_gpu else ""
    machine = machine_name(gpu, config.num_threads or default_threads())
    if args.measure:
        print("measuring decode steps on this machine ...", file=sys.stderr, flush=True)
        speed = measure_speed(machine, "cuda" if has_gpu else "cpu", config.num_threads)
        remember_speed(speed)
        return speed
    return remembered_speed(machine)


def _hardware(args: argparse.Namespace, speed: MachineSpeed | None) -> tuple[Any, list[str]]:
    """The Hardware to plan for, and sentences about what was assumed. speed: None: not measured."""
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
    if link is None and speed is not None:
        link = speed.link_gb_per_s or None
    if read is None and speed is None:
        read = GPU_READ_GB_PER_S if gpu_bytes else CPU_READ_GB_PER_S
        where = "GPU memory" if gpu_bytes else "RAM"
        assumed.append(f"{where} is read at {read:g} GB/s (--read-gbps)")
    if link is None:
        link = LINK_GB_PER_S
        if gpu_bytes:
            assumed.append(f"copies from RAM to the GPU at {link:g} GB/s (--link-gbps)")
    dtype = torch.bfloat16 if gpu_bytes else native_dtype()[0]
    if speed is None:
        return Hardware(gpu_bytes, ram_bytes, read, link, dtype), assumed
    read, kv, layer_s = speed.read_gb_per_s, speed.kv_gb_per_s, speed.layer_us / 1e6
    return Hardware(gpu_bytes, ram_bytes, read, link, dtype, 1.0, kv, layer_s), assumed


def _lines(
    args: argparse.Namespace,
    made: Any,
    hardware: Any,
    assumed: list[str],
    speed: MachineSpeed | None,
) -> list[str]:
    from nanoengine.startup.forecast import held_dtype  # imports torch

    model, memory = made.model, made.plan
    is_sparse = made.active_bytes < memory.weight_bytes
    active = f" ({_gib(made.active_bytes)} for a token)" if is_sparse else ""
    method = made.settings.get("quantization")
    dtype = str(held_dtype(model, memory.kv.dtype, hardware)).removeprefix("torch.")
    bits = f"{dtype} and {method}" if method else dtype
    lines = [
        f"model     {args.model}: {model.architecture}, {model.num_layers} layers, "
        f"{_gib(memory.weight_bytes)} of weights{active} in {bits}, "
        f"{model.max_position:,} positions"
    ]
    for bar in _bars(made, hardware):
        lines += bar.lines()
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
    if speed is not None:
        lines.append(f"measured  {_describe(speed)}")
    if assumed:
        lines.append(f"assumed   {'; '.join(assumed)}")
    settings = "".join(f", {name}={value!r}" for name, value in made.settings.items())
    lines.append(f"settings  LLM({args.model!r}{settings})")
    flags = "".join(f" {_flag(name, value)}" for name, value in made.settings.items())
    lines.append(f"command   nanoengine chat {args.model}{flags}")
    return lines


def _describe(speed: MachineSpeed) -> str:
    """What was measured, and when."""
    link = f", copies at {speed.link_gb_per_s:g} GB/s" if speed.link_gb_per_s else ""
    busy = "; other programs used the processor, so this machine may be faster"
    return (
        f"on this machine on {speed.date}: weights are read at {speed.read_gb_per_s:g} GB/s, KV at "
        f"{speed.kv_gb_per_s:g} GB/s{link}, a layer takes {speed.layer_us:g} us more (--measure)"
        f"{busy if speed.is_slowed else ''}"
    )


def _bars(made: Any, hardware: Any) -> list[Bar]:
    """What takes which memory, with what is kept back of a GPU."""
    memory, kv = made.plan, made.plan.kv
    parts = memory.device_parts(_kv_label(kv.num_blocks * kv.block_size))
    if not hardware.gpu_bytes:
        return [Bar("RAM", hardware.ram_bytes, parts)]
    kept = Part("x", "reserved", "kept back", made.reserved_bytes)
    label = _kv_label(kv.num_host_blocks * kv.block_size)
    host = Part("K", "kv", label, kv.num_host_blocks * kv.host_block_bytes)
    gpu = Bar("GPU", hardware.gpu_bytes, (*parts, kept))
    return [gpu, Bar("RAM", hardware.ram_bytes, (host,))]


def _kv_label(num_tokens: int) -> str:
    return f"KV of {num_tokens:,} tokens"


def _row(
    args: argparse.Namespace,
    made: Any,
    hardware: Any,
    assumed: list[str],
    speed: MachineSpeed | None,
) -> dict[str, Any]:
    return {
        "model": args.model,
        "architecture": made.model.architecture,
        "device": hardware.name,
        "memory": {
            bar.name: {"bytes": bar.total} | {part.key: part.num_bytes for part in bar.parts}
            for bar in _bars(made, hardware)
        },
        "longest": made.longest,
        "longest_tokens_per_s": round(made.longest_tokens_per_s, 3),
        "context": made.context,
        "tokens_per_s": round(made.tokens_per_s, 3),
        "limit": "link" if made.is_link_bound else "memory",
        "read_gb_per_s": hardware.read_gb_per_s,
        "link_gb_per_s": hardware.link_gb_per_s,
        "assumed": assumed,
        "measured": None if speed is None else asdict(speed),
        "settings": dict(made.settings),
        "refusal": made.refusal or None,
    }


def _flag(name: str, value: object) -> str:
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag} {value}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
