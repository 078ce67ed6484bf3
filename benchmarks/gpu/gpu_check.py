"""`make gpu-check`: what only a GPU can show, in one run that ends with one JSON object.

    python benchmarks/gpu/gpu_check.py [--device cuda] [--json FILE] [--only ROW ...]
        [--longest TOKENS] [--seconds SECONDS]

The link, and the checks and measurements of the other files here. Rows name the attention that ran
and, where a faster one was not taken, why. `--device cpu` rehearses all of it in small shapes.
Needs torch, transformers, safetensors, xxhash, tqdm and numpy, gguf for rows of codes, and no
network.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

if ("--device", "cpu") in pairwise(sys.argv) or "--device=cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported, by transformers

import torch
import transformers

# Works in a checkout that is not installed.
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from tiny_models import TINY

import nanoengine
from benchmarks.gpu.gpu_coded_decode import coded_decode
from benchmarks.gpu.gpu_codes import coded_products
from benchmarks.gpu.gpu_drafts import drafts, resident_drafts, sharing, turns
from benchmarks.gpu.gpu_draws import draws as draws_of_tokens
from benchmarks.gpu.gpu_host import host_attention
from benchmarks.gpu.gpu_kernels import kernels, prefill_share, verify_rows
from benchmarks.gpu.gpu_line import line
from benchmarks.gpu.gpu_measure import (
    LLAMA_8B,
    ON_GPU,
    QWEN_600M,
    REHEARSAL,
    Scale,
    kv_in_12_bits,
    lightly_streamed,
    long_context,
    many_streamed,
    needles,
    resident_decode,
    targets,
)
from benchmarks.gpu.gpu_models import BLOCK, all_models, chosen_as_on_cpu
from benchmarks.gpu.gpu_offloaded_cache import offloaded_cache
from benchmarks.gpu.gpu_ranks import two_gpus
from benchmarks.gpu.gpu_real import real_model
from benchmarks.gpu.gpu_recurrence import recurrent_layers
from benchmarks.gpu.gpu_rows import Run, chosen, is_ok, run_rows, save
from benchmarks.gpu.gpu_tiers import (
    bitwise,
    graphs,
    int8_on_host,
    isolation,
    parity,
    parity_codes,
    parity_with_drafts,
    saved_prefixes,
    teacher_forced,
    trace,
)
from benchmarks.gpu.gpu_workload import Peers, nano_vllm, workload
from benchmarks.induction import write_checkpoint
from nanoengine.devices.select import make_device

# Seconds, where a row takes more than others. KV of 512K tokens is 64 GiB to pin and to fill, that
# of 1M in 12 bits 99.
LIMITS = {
    "all_models": 400.0,
    "workload": 240.0,
    "nano_vllm": 240.0,
    "line": 480.0,
    "drafts": 300.0,
    "resident_drafts": 240.0,
    "long_context": 300.0,
    "coded_products": 400.0,  # most of it to compile
    "two_gpus": 500.0,  # nine starts of two processes
}


def link(device_name: str) -> dict[str, Any]:
    """GB/s of pinned copies in 16 MiB pieces, each way and both at once, and of device reads."""
    device = make_device(device_name, None, copy_workers=True)
    num, piece = (64, 16 << 20) if device_name != "cpu" else (8, 4 << 20)
    host = device.empty_host((2, num, piece), torch.uint8).zero_()
    there = torch.zeros((2, num, piece), dtype=torch.uint8, device=device.torch_device)

    def run(h2d: bool, d2h: bool) -> float:
        device.synchronize()
        start = time.perf_counter()
        for i in range(num):
            if h2d:
                device.h2d.copy(there[0, i], host[0, i])
            if d2h:
                device.d2h.copy(host[1, i], there[1, i])
        for stream in (device.h2d, device.d2h):
            device.compute.wait(stream.record())
        device.synchronize()
        return (h2d + d2h) * num * piece / (time.perf_counter() - start) / 1e9

    def read() -> float:
        device.synchronize()
        start = time.perf_counter()
        there.view(torch.int64).sum()
        device.synchronize()
        return there.nbytes / (time.perf_counter() - start) / 1e9

    best = {
        "h2d_gb_per_s": max(run(True, False) for _ in range(3)),
        "d2h_gb_per_s": max(run(False, True) for _ in range(3)),
        "both_gb_per_s": max(run(True, True) for _ in range(3)),
        "device_read_gb_per_s": max(read() for _ in range(10)),
    }
    device.close_streams()
    return {name: round(value, 2) for name, value in best.items()} | {"ok": True}


def commit() -> str:
    """The checked-out commit, "unknown" outside a repository."""
    run = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return run.stdout.strip() or "unknown"


def heading(device_name: str) -> dict[str, Any]:
    """What was run, and where."""
    device = make_device(device_name, None)
    is_gpu = device_name != "cpu"
    return {
        "hardware": {
            "device": torch.cuda.get_device_name() if is_gpu else platform.processor() or "cpu",
            "memory_gib": round(device.memory()[1] / (1 << 30), 1),
        },
        "versions": {
            "nanoengine": nanoengine.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "rehearsal": not is_gpu,
    }


def make_rows(
    folder: Path, scale: Scale, result: dict[str, Any], peers: Peers, model: str | None = None
) -> dict[str, dict[str, Run]]:
    """The rows by group: a group takes less than ten minutes on an H200. model: a GGUF file."""
    names = ("llama", "long", "qwen3", "smollm3", "gemma3", "8b", "600m", "induction")
    llama, long, qwen, smollm3, gemma3, large, small, induction = (folder / n for n in names)
    for path in (llama, qwen, smollm3, gemma3):
        TINY[path.name](path)
    replace(TINY["llama"], settings={"max_position_embeddings": 4096})(long)
    scale.shapes(large, LLAMA_8B)
    scale.shapes(small, QWEN_600M)
    write_checkpoint(induction)

    def link_speed() -> float:
        return float(result["link"]["h2d_gb_per_s"])

    def read_speed() -> float:
        return float(result["link"]["device_read_gb_per_s"])

    return {
        "checks": {
            "parity_llama": lambda: parity(llama, scale),
            "parity_llama_sdpa": lambda: parity(llama, scale, (2,), attention_backend="sdpa"),
            "parity_codes": lambda: parity_codes(llama, folder, scale),
            "parity_with_drafts": lambda: parity_with_drafts(llama, scale),
            "parity_qwen3": lambda: parity(qwen, scale),
            "parity_smollm3": lambda: parity(smollm3, scale),
            "parity_gemma3": lambda: parity(gemma3, scale),
            "all_models": lambda: all_models(scale),
            "chosen_as_on_cpu": lambda: chosen_as_on_cpu(llama, scale),
            "real_model": lambda: real_model(model, scale),
            "graphs": lambda: graphs(qwen, scale),
            "teacher_forced": lambda: teacher_forced(llama, scale),
            "bitwise_bf16": lambda: bitwise(llama, scale, BLOCK),
            "bitwise_bf16_pages": lambda: bitwise(long, scale, scale.page),
            "trace": lambda: trace(llama, scale),
            "isolation": lambda: isolation(llama, scale, "float32"),
            "isolation_bf16": lambda: isolation(llama, scale, "bfloat16"),
            "isolation_fp16": lambda: isolation(llama, scale, scale.half),
            "int8_on_host": lambda: int8_on_host(llama, scale),
            "saved_prefixes": lambda: saved_prefixes(llama, folder, scale),
            "needles": lambda: needles(induction, scale),
        },
        "ranks": {
            "two_gpus": lambda: two_gpus(
                large, scale, lambda: parity(llama, scale, (2,), tensor_parallel_size=2)
            )
        },
        "line": {
            "offloaded_cache": lambda: offloaded_cache(large, scale, link_speed()),
            "line": lambda: line(large, scale),
        },
        "kernels": {
            "prefill_share": lambda: prefill_share(large, scale),
            "verify_rows": lambda: verify_rows(large, scale),
            "host_attention": lambda: host_attention(scale),
            "kernels": lambda: kernels(scale),
            "coded_products": lambda: coded_products(scale, read_speed()),
            "recurrent_layers": lambda: recurrent_layers(scale),
            "draws": lambda: draws_of_tokens(scale),
        },
        "speeds": {
            "resident_decode": lambda: resident_decode(large, scale, read_speed()),
            "coded_decode": lambda: coded_decode(large, scale, read_speed()),
            "workload": lambda: workload(small, scale, read_speed(), peers.vllm),
            "nano_vllm": lambda: nano_vllm(small, qwen, scale, peers.nano_vllm),
            "lightly_streamed": lambda: lightly_streamed(large, scale, link_speed()),
            "kv_in_12_bits": lambda: kv_in_12_bits(large, scale, link_speed()),
            "many_streamed": lambda: many_streamed(large, scale, link_speed()),
            "sharing": lambda: sharing(large, scale),
        },
        "long": {
            "drafts": lambda: drafts(large, scale),
            "resident_drafts": lambda: resident_drafts(large, scale),
            "turns": lambda: turns(large, scale),
            "long_context": lambda: long_context(large, scale, link_speed()),
        },
    }


def main() -> int:
    """Run every check; 0 if all are ok."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: cuda)")
    parser.add_argument(
        "--json", metavar="FILE", help="also write the result here, indented, after each row"
    )
    parser.add_argument(
        "--seconds", type=float, help="begin no row after these, and say which were not run"
    )
    parser.add_argument(
        "--longest", metavar="TOKENS", type=int, help="leave out contexts above (default: 1M)"
    )
    parser.add_argument("--model", metavar="FILE", help="a GGUF file, beside transformers")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter with vLLM: runs beside us")
    parser.add_argument(
        "--nano-vllm", metavar="FOLDER", help="a checkout of nano-vllm: runs beside us"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="ROW",
        help="rows, or the groups checks, ranks, speeds, line, kernels, long",
    )
    args = parser.parse_args()
    result = heading(args.device)
    file = Path(args.json) if args.json else None
    scale = REHEARSAL if args.device == "cpu" else ON_GPU
    if args.longest:
        scale = scale.up_to(args.longest)
    with tempfile.TemporaryDirectory() as folder:
        peers = Peers(args.vllm, args.nano_vllm)
        groups = make_rows(Path(folder), scale, result, peers, args.model)
        try:
            rows = chosen(groups, args.only)
        except ValueError as error:
            parser.error(str(error))
        rows = {"link": lambda: link(args.device), **rows}
        run_rows(rows, result, LIMITS, file, args.seconds)
    # The last row of a length counts: bfloat16, or float32 where that missed some.
    found = {row["length"]: row["exact"] == row["samples"] for row in result.get("needles", [])}
    result["ok"] = all(found.values()) and is_ok(result, [*rows])
    result["targets"] = targets(result)
    save(result, file)
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
