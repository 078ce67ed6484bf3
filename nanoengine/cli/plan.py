"""`nanoengine plan`: draws what startup/forecast.py says about a model on a machine."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from nanoengine.cli.flags import engine_config
from nanoengine.cli.interrupts import ended_by_ctrl_c
from nanoengine.cli.usage import UsageError
from nanoengine.config.engine import GIB, EngineConfig, in_gib
from nanoengine.errors import counted
from nanoengine.startup.bars import Bar, Part
from nanoengine.startup.machine_speed import MachineSpeed, remember_speed, remembered_speed
from nanoengine.startup.plan import describe_copies
from nanoengine.text.tokenizer_files import chat_template_of, check_tokenizer_is_there, path_of

# GB/s that are assumed where none are given; printed beside what follows from them.
LINK_GB_PER_S = 25.0  # PCIe 4 x16
GPU_READ_GB_PER_S = 300.0
CPU_READ_GB_PER_S = 20.0


@dataclass(frozen=True, slots=True)
class _Machine:
    """What to plan for. hardware: a Hardware. links: GB/s of copies of each rank, while all copy.
    assumed: sentences. speed: what was measured; None: nothing.
    """

    hardware: Any
    links: tuple[float, ...]
    assumed: list[str]
    speed: MachineSpeed | None


def plan(args: argparse.Namespace) -> int:
    """Print the forecast of the command line; status 1 if the context cannot be reached."""
    config = engine_config(args)
    if args.context and config.max_model_len and args.context > config.max_model_len:
        raise UsageError(
            f"--context {args.context} is above max_model_len={config.max_model_len}; lower "
            "--context, or raise --max-model-len"
        )
    # torch, which the arithmetic names dtypes with, takes a second to import.
    with ended_by_ctrl_c():
        from nanoengine.loading.find_model import check_format, is_gguf, read_config_of
        from nanoengine.loading.lora import read_adapter
        from nanoengine.loading.mtp_names import check_has_mtp, with_mtp
        from nanoengine.loading.stored_weights import read_stored
        from nanoengine.startup.forecast import Forecaster, read_guesser

    found = "gguf" if is_gguf(config.model) else "safetensors"
    check_format(config.model, config.load_format, found)
    if config.tokenizer:
        check_tokenizer_is_there(path_of(config.tokenizer))
    if config.chat_template:
        chat_template_of(config.chat_template)
    model = read_config_of(config.model)
    machine = _machine(args, _measured(args, config), config)
    if config.enable_cpu_offload and not machine.hardware.gpu_bytes:
        machine.assumed.append("KV offload is left out: a CPU has one memory")
    if config.num_mtp:
        model = with_mtp(model)
    stored = read_stored(config.model, model)
    check_has_mtp(model, stored.forms, config.model)
    if config.lora is not None:
        stored = replace(stored, forms=read_adapter(config.lora).forms(stored.forms))
    planner = Forecaster(config, model, machine.hardware, stored, read_guesser(config, model))
    made = planner.forecast(args.context)
    if args.json:
        print(json.dumps(_row(args, made, machine), indent=2))
    else:
        print("\n".join(_lines(args, made, machine)))
    return 1 if made.refusal else 0


def _measured(args: argparse.Namespace, config: EngineConfig) -> MachineSpeed | None:
    """What was measured on this machine, if it is the one to plan for and no speed is given."""
    import torch

    from nanoengine.cli.measure import machine_name, measure_speed
    from nanoengine.devices.cpu import default_threads

    has_gpu = torch.cuda.is_available() and config.device != "cpu"
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


def _gpu_bytes(args: argparse.Namespace, config: EngineConfig, assumed: list[str]) -> int:
    """Memory of each GPU; 0: there is none. assumed: takes a sentence about GPUs that are not here.
    Raises UsageError if `device` wants another.
    """
    import torch

    is_cpu, is_gpu = config.device == "cpu", config.device not in ("cpu", "auto")
    if args.gpu_gib is not None:
        if (is_cpu and args.gpu_gib) or (is_gpu and not args.gpu_gib):
            raise UsageError(
                f"device={config.device!r} contradicts --gpu-gib {args.gpu_gib:g}; leave one of "
                "them out"
            )
        return int(args.gpu_gib * GIB)
    if is_cpu or not torch.cuda.is_available():
        if is_gpu:
            raise UsageError(
                f"device={config.device!r} was asked for, and no such GPU can be seen here; give "
                "--gpu-gib to plan for one that is elsewhere, or take --device cpu"
            )
        return 0
    ranks = config.tensor_parallel_size
    here = range(min(ranks, torch.cuda.device_count()))
    if len(here) < ranks:
        assumed.append(f"{ranks} GPUs, and {len(here)} can be seen here (--gpu-gib)")
    return min(torch.cuda.mem_get_info(index)[1] for index in here)


def _machine(
    args: argparse.Namespace, speed: MachineSpeed | None, config: EngineConfig
) -> _Machine:
    """The machine of the command line, or this one. speed: None: not measured."""
    import torch

    from nanoengine.devices.cpu import available_memory, native_dtype
    from nanoengine.startup.device_limits import why_no_kernels
    from nanoengine.startup.forecast import Hardware

    assumed: list[str] = []
    ranks = config.tensor_parallel_size
    gpu_bytes = _gpu_bytes(args, config, assumed)
    ram_bytes = available_memory() if args.ram_gib is None else int(args.ram_gib * GIB)
    if args.ram_gib is None:
        assumed.append("RAM: what is free here (--ram-gib)")
    read = args.read_gbps
    if read is None and speed is None:
        read = GPU_READ_GB_PER_S if gpu_bytes else CPU_READ_GB_PER_S
        where = "GPU memory" if gpu_bytes else "RAM"
        assumed.append(f"{where} is read at {read:g} GB/s (--read-gbps)")
    links = _links(args, speed, ranks)
    if gpu_bytes:
        assumed += _about_links(args, speed, links)
    if ranks > 1:
        assumed.append("gathers between ranks take no time")
    dtype = torch.bfloat16 if gpu_bytes else native_dtype()[0]
    hardware = Hardware(gpu_bytes, ram_bytes, read or 0.0, min(links), dtype)
    if not gpu_bytes and (reason := why_no_kernels()):
        slower = ", several times slower than planned here" if speed is None else ""
        assumed.append(f"PyTorch computes{slower}: {reason}")
        hardware = replace(hardware, no_kernels=reason)
    if speed is not None:
        hardware = replace(
            hardware,
            read_gb_per_s=speed.read_gb_per_s,
            read_efficiency=1.0,
            kv_gb_per_s=speed.kv_gb_per_s,
            layer_s=speed.layer_us / 1e6,
            held_share=speed.held_share,
        )
    return _Machine(hardware, links, assumed, speed)


def _links(args: argparse.Namespace, speed: MachineSpeed | None, ranks: int) -> tuple[float, ...]:
    """GB/s of copies of each rank. Raises UsageError for as many as there are not."""
    measured = speed.link_gb_per_s if speed is not None else 0.0
    links: tuple[float, ...] = args.link_gbps or (measured or LINK_GB_PER_S,)
    if len(links) not in (1, ranks):
        raise UsageError(
            f"--link-gbps has {len(links)} speeds for --tensor-parallel-size {ranks}; give one, or "
            "one for each rank"
        )
    return links if len(links) == ranks else links * ranks


def _about_links(
    args: argparse.Namespace, speed: MachineSpeed | None, links: tuple[float, ...]
) -> list[str]:
    """What nobody has said or measured of the links."""
    if args.link_gbps is not None:
        return []
    is_measured = speed is not None and speed.link_gb_per_s
    if len(links) == 1:
        text = f"copies from RAM to the GPU at {links[0]:g} GB/s (--link-gbps)"
        return [] if is_measured else [text]
    return [f"copies from RAM to each GPU at {links[0]:g} GB/s while all copy (--link-gbps)"]


def _lines(args: argparse.Namespace, made: Any, machine: _Machine) -> list[str]:
    model, memory, speed = made.model, made.plan, machine.speed
    is_sparse = made.active_bytes < made.whole_bytes
    active = f" ({in_gib(made.active_bytes)} for a token)" if is_sparse else ""
    lines = [
        f"model     {args.model}: {model.architecture}, {counted(model.num_layers, 'layer')}, "
        f"{in_gib(made.whole_bytes)} of weights{active} in {made.held_in}, "
        f"{model.max_position:,} positions"
    ]
    for bar in _bars(made, machine.hardware):
        lines += bar.lines()
    if memory.ranks > 1:
        lines += _lines_of_ranks(made, machine)
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
    if machine.assumed:
        lines.append(f"assumed   {'; '.join(machine.assumed)}")
    settings = "".join(f", {name}={value!r}" for name, value in made.settings.items())
    lines.append(f"settings  LLM({args.model!r}{settings})")
    flags = "".join(f" {_flag(name, value)}" for name, value in made.settings.items())
    lines.append(f"command   nanoengine chat {shlex.quote(args.model)}{flags}")
    return lines


def _lines_of_ranks(made: Any, machine: _Machine) -> list[str]:
    """What each rank holds, what all do, and what is left of each memory."""
    has_gpu = made.plan.has_gpu
    each = [_held(made, num_bytes) for num_bytes in made.weights]
    fullest = max(each, key=lambda held: held["weights"])
    whose = {"GPU": "each GPU", "RAM": "the RAM"}
    left = [
        f"{whose[bar.name]} has {in_gib(bar.free)} left" for bar in _bars(made, machine.hardware)
    ]
    where = "each on a GPU of its own; the RAM is shared" if has_gpu else "which share the RAM"
    lines = [
        f"ranks     {made.plan.ranks} processes, {where}",
        f"each      {_sizes(fullest)}",
        f"together  {_sizes(_sum(each))}",
        f"fits      {', '.join(left)}",
    ]
    if has_gpu:
        lines.append(f"links     {describe_copies(machine.links)}")
    return lines


def _held(made: Any, weight_bytes: int) -> dict[str, int]:
    """Bytes of a rank by what they are. weight_bytes: of its weights."""
    kv = made.plan.kv
    parts = replace(made.plan, weight_bytes=weight_bytes).device_parts("KV")
    host = kv.num_host_blocks * kv.host_block_bytes
    return {part.key: part.num_bytes for part in parts} | {"host_kv": host}


def _sum(each: list[dict[str, int]]) -> dict[str, int]:
    return {name: sum(held[name] for held in each) for name in each[0]}


def _sizes(held: Mapping[str, int]) -> str:
    names = {"step": "a step", "kv": "KV", "ring": "buffer", "host_kv": "KV in RAM"}
    return ", ".join(
        f"{names.get(name, name)} {in_gib(size)}" for name, size in held.items() if size
    )


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
    """What takes which memory, with what is kept back of a GPU: of the fullest one, where there are
    several. RAM is that of all ranks.
    """
    memory, kv = made.plan, made.plan.kv
    label = _kv_label(kv.num_blocks * kv.block_size)
    host = memory.host_parts(_kv_label(kv.num_host_blocks * kv.block_size))
    if not hardware.gpu_bytes:
        *_, snapshots = host
        _, *parts = _of_ranks((*memory.device_parts(label), snapshots), memory.ranks)
        weights = Part("W", "weights", "weights", sum(made.weights))
        return [Bar("RAM", hardware.ram_bytes, (weights, *parts))]
    on_gpu = replace(memory, weight_bytes=max(made.weights)).device_parts(label)
    kept = Part("x", "reserved", "kept back", made.reserved_bytes)
    gpu = Bar("GPU", hardware.gpu_bytes, (*on_gpu, kept))
    return [gpu, Bar("RAM", hardware.ram_bytes, _of_ranks(host, memory.ranks))]


def _of_ranks(parts: tuple[Part, ...], ranks: int) -> tuple[Part, ...]:
    """Parts of one rank as those of all."""
    return tuple(replace(part, num_bytes=part.num_bytes * ranks) for part in parts)


def _kv_label(num_tokens: int) -> str:
    return f"KV of {num_tokens:,} tokens"


def _row(args: argparse.Namespace, made: Any, machine: _Machine) -> dict[str, Any]:
    hardware, speed = machine.hardware, machine.speed
    each = [_held(made, num_bytes) for num_bytes in made.weights]
    return {
        "model": args.model,
        "architecture": made.model.architecture,
        "device": hardware.name,
        "memory": {
            bar.name: {"bytes": bar.total} | {part.key: part.num_bytes for part in bar.parts}
            for bar in _bars(made, hardware)
        },
        "ranks": each,
        "together": _sum(each),
        "longest": made.longest,
        "longest_tokens_per_s": round(made.longest_tokens_per_s, 3),
        "context": made.context,
        "tokens_per_s": round(made.tokens_per_s, 3),
        "limit": "link" if made.is_link_bound else "memory",
        "read_gb_per_s": hardware.read_gb_per_s,
        "link_gb_per_s": hardware.link_gb_per_s,
        "links_gb_per_s": machine.links,
        "assumed": machine.assumed,
        "measured": None if speed is None else asdict(speed),
        "settings": dict(made.settings),
        "refusal": made.refusal or None,
    }


def _flag(name: str, value: object) -> str:
    """A setting as a shell takes it."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {shlex.quote(str(value))}"
