"""`make gpu-check`: what only a GPU can show, in one run that ends with one JSON object.

    python benchmarks/gpu/gpu_check.py [--device cuda] [--json FILE] [--only ROW ...]
        [--longest TOKENS]

Parity and isolation on the device, what the stream checker saw, the link, and the measurements of
the other files here. Rows name the attention that ran and, where a faster one was not taken, why.
`--device cpu` rehearses all of it in small shapes.
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
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

if ("--device", "cpu") in pairwise(sys.argv) or "--device=cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported, by transformers

import torch
import transformers

# Works in a checkout that is not installed.
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from checkpoints import reference, reference_greedy
from coded import coded_checkpoint
from driver import Driver
from stream_trace import TraceEntry, traced
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
from benchmarks.gpu.gpu_models import BLOCK, all_models, chosen_as_on_cpu, prompts
from benchmarks.gpu.gpu_offloaded_cache import offloaded_cache
from benchmarks.gpu.gpu_ranks import two_gpus
from benchmarks.gpu.gpu_real import real_model
from benchmarks.gpu.gpu_recurrence import recurrent_layers
from benchmarks.gpu.gpu_rows import Run, chosen, is_ok, run_rows, save
from benchmarks.gpu.gpu_workload import Peers, nano_vllm, workload
from benchmarks.induction import write_checkpoint
from nanoengine.devices.select import make_device
from nanoengine.devices.stream_check import CheckedDevice, CheckedStream, Key
from nanoengine.engine.draft_length import PayingDrafts
from nanoengine.engine.llm_engine import LLMEngine

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
# The formats of the layers of a checkpoint, and of its ends.
MIXED = {"embed": "Q8_0", "lm_head": "Q5_0", "v_proj": "INT4", "down": "MXFP4", "_proj": "Q4_1"}
# A fixed share of the link: measured, it would cut up the work differently from run to run.
STREAM: dict[str, Any] = {
    "stream_mib_per_step": 1024.0,
    "enable_cpu_offload": True,
    "offload_mode": "stream",
    "kv_offload_gib": 0.01,
    "num_gpu_blocks": 6,
    "slot_tokens": 2 * BLOCK,
    "debug_kv": True,
    "speculative": "off",  # a rehearsal would draft
}


def engine(folder: Path, device: str, **settings: Any) -> LLMEngine:
    """An engine with small blocks and chunks."""
    defaults = {"kvcache_block_size": BLOCK, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    return LLMEngine(folder, device=device, **(defaults | settings))


def logits_of(driver: Driver, work: list[list[int]], scale: Scale) -> list[torch.Tensor]:
    """The logits that each token of each request was chosen from."""
    outputs = driver.run(work, scale.greedy)
    return [torch.stack(driver.logits[output.request_id]).cpu() for output in outputs]


def queued(made: LLMEngine) -> dict[str, dict[str, int]]:
    """What the checker saw queued on each stream: copies, events recorded, waits for events."""
    streams = (made.device.compute, made.device.h2d, made.device.d2h)
    return {s.name: dict(s.counts) for s in streams if isinstance(s, CheckedStream)}


def are_greedy(folder: Path, answers: list[list[int]], num_out: int) -> bool:
    """Whether the answers to prompts() are those of transformers on the CPU."""
    model = reference(folder)
    each = zip(prompts(), answers, strict=True)
    return all(ids == reference_greedy(model, prompt, num_out, ids) for prompt, ids in each)


def parity(
    folder: Path,
    scale: Scale,
    rings: Sequence[int] = (2, 3, 4),
    numbers: Path | None = None,
    **others: Any,
) -> dict[str, Any]:
    """fp32 greedy ids against transformers on the CPU: resident, and streamed with these rings,
    delays before copies. numbers: the model that transformers reads, if not the same. others:
    settings.
    """
    result: dict[str, Any] = {}
    for ring in (0, *rings):
        streamed = STREAM | {"ring_slots": ring, "debug_copy_delay_ms": 0.2}
        settings = streamed if ring else {"num_gpu_blocks": 200}
        made = engine(folder, scale.device, dtype="float32", **(settings | others))
        driver = Driver(made)
        outputs = driver.run(prompts(), scale.greedy)
        ids = [o.outputs[0].token_ids for o in outputs]
        equal = are_greedy(numbers or folder, ids, scale.num_out)
        result[f"ring_{ring}" if ring else "resident"] = {
            "ids_equal": equal,
            "attention": made.plan.attention,
            "weights": made.plan.quantization,
            "guessed": sum(o.metrics.num_guessed for o in outputs if o.metrics is not None),
            "h2d_bytes": made.kv.counters.h2d_bytes,
            "checked_accesses": getattr(made.device, "num_checked", 0),
            "queued": queued(made),
            "ok": equal and (not ring or made.kv.counters.h2d_bytes > 0),
        }
        made.close()
    return result


def parity_codes(folder: Path, target: Path, scale: Scale) -> dict[str, Any]:
    """The same with weights that stay codes, whose numbers transformers reads."""
    codes, numbers = coded_checkpoint(folder, target, MIXED)
    return parity(codes, scale, (2,), numbers)


def parity_with_drafts(folder: Path, scale: Scale) -> dict[str, Any]:
    """The same with drafts in each streamed step."""
    with mock.patch.object(PayingDrafts, "choose", lambda self: 3):
        found = parity(folder, scale, (2, 3), speculative="resident:3")
    for ring, row in found.items():
        row["ok"] &= (row["guessed"] > 0) == (ring != "resident")
    return found


def bitwise(folder: Path, scale: Scale, block: int) -> dict[str, Any]:
    """bf16 logits, equal bit for bit over ring sizes, delays and poison at the same schedule.

    The chunks stay the same: a flash kernel rounds each, so their borders show in its bits.
    """
    settings = STREAM | {
        "dtype": "bfloat16",
        "kvcache_block_size": block,
        "slot_tokens": 2 * block,
        "max_num_batched_tokens": 5 * block // 2,
    }
    runs, schedules = {}, {}
    attention = ""
    layouts: dict[str, dict[str, Any]] = {
        "ring 2": {"ring_slots": 2},
        "ring 3": {"ring_slots": 3},
        "ring 4": {"ring_slots": 4},
        "ring 4, no poison": {"ring_slots": 4, "debug_kv": False},
        "ring 2, delays": {"ring_slots": 2, "debug_copy_delay_ms": 0.2},
        "ring 4, 12 bits": {"ring_slots": 4, "kv_offload_dtype": "bf12"},
    }
    for name, extra in layouts.items():
        made = engine(folder, scale.device, **(settings | extra))
        driver = Driver(made)
        runs[name] = logits_of(driver, prompts(block), scale)
        schedules[name] = driver.audit.schedule
        attention = made.plan.attention
        streamed = made.kv.counters.h2d_bytes
        made.close()
    first = runs["ring 2"]
    same = {
        name: schedules[name] == schedules["ring 2"]
        and all(torch.equal(a, b) for a, b in zip(first, run, strict=True))
        for name, run in runs.items()
    }
    return {
        "attention": attention,
        "block": block,
        "h2d_bytes": streamed,
        "equal_to_ring_2": same,
        "ok": all(same.values()) and streamed > 0,
    }


def trace(folder: Path, scale: Scale) -> dict[str, Any]:
    """What one streamed decode step queues, stream by stream, in order."""
    settings = STREAM | {"ring_slots": 2, "slot_tokens": 4 * BLOCK}
    made = engine(folder, scale.device, dtype="float32", **settings)
    checked = made.device
    assert isinstance(checked, CheckedDevice)
    made.add_request(prompts()[-2], scale.greedy)
    while not made.scheduler.running or made.scheduler.running[0].num_output_tokens < 2:
        made.step()
    before = queued(made)
    with traced(checked) as queue:
        made.step()
    counts = {
        name: {what: num - before[name].get(what, 0) for what, num in sorted(after.items())}
        for name, after in queued(made).items()
    }
    made.close()
    return {
        "attention": made.plan.attention,
        "queued": counts,
        "left_out": queue.num_left_out,
        "lines": [
            f"{stream}: {', '.join(map(shown, run))}"
            for stream, run in groupby(queue.entries, lambda entry: entry.stream)
        ],
        "ok": counts["h2d"]["copies"] > 0 and not queue.num_left_out,
    }


def shown(entry: TraceEntry) -> str:
    """`read device 0/3` is slot 3 of layer 0; `wait h2d#7`, `record #7`: the stream's 7th event."""
    if entry.operation == "wait":
        return f"wait {entry.other}#{entry.event}"
    if entry.operation == "record":
        return f"record #{entry.event}"
    if entry.operation == "access":
        sides = (("read", entry.reads), ("write", entry.writes))
        return " ".join(f"{verb} {slots(keys)}" for verb, keys in sides if keys)
    return entry.operation


def slots(keys: Sequence[Key]) -> str:
    """Slots of one pool, as layer/slot."""
    return " ".join([keys[0][0], *(f"{layer}/{slot}" for _, layer, slot in keys)])


def isolation(folder: Path, scale: Scale, dtype: str) -> dict[str, Any]:
    """A request of a long-lived streaming engine against the same request in a fresh one."""
    settings = STREAM | {"dtype": dtype, "enable_prefix_caching": False}
    old = engine(folder, scale.device, **settings)
    driver = Driver(old)
    for i in range(scale.num_neighbours):
        request = old.add_request([(i * 7 + j) % 256 for j in range(5 + 2 * i)], scale.greedy)
        for _ in range(i % 4):
            driver.step()
        if i % 3 == 0:
            old.abort(request)
    driver.drain()
    fresh = engine(folder, scale.device, **settings)
    ours, theirs = (logits_of(d, [prompts()[-2]], scale)[0] for d in (driver, Driver(fresh)))
    old.close()
    fresh.close()
    return {"request_50_bitwise_equal": torch.equal(ours, theirs), "ok": torch.equal(ours, theirs)}


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


def teacher_forced(folder: Path, scale: Scale) -> dict[str, Any]:
    """bf16 logits against transformers in fp32, over tokens that we chose; transformers' own bf16
    run with SDPA beside them. Ours may be off by twice as much.
    """
    device = scale.device
    made = engine(folder, device, dtype="bfloat16", num_gpu_blocks=200)
    driver = Driver(made)
    outputs = driver.run(prompts(), scale.greedy)
    load: Callable[..., Any] = transformers.AutoModelForCausalLM.from_pretrained
    exact = load(folder, dtype=torch.float32).to(device)
    rounded = load(folder, dtype=torch.bfloat16, attn_implementation="sdpa").to(device)
    ours, theirs = 0.0, 0.0
    for prompt, output in zip(prompts(), outputs, strict=True):
        ids = torch.tensor([prompt + output.outputs[0].token_ids[:-1]], device=device)
        with torch.inference_mode():
            want, sdpa = (model(ids).logits[0, len(prompt) - 1 :] for model in (exact, rounded))
        got = torch.stack(driver.logits[output.request_id])
        ours = max(ours, (got - want).abs().max().item())
        theirs = max(theirs, (sdpa.float() - want).abs().max().item())
    made.close()
    return {
        "attention": made.plan.attention,
        "largest_error": round(ours, 5),
        "sdpa_largest_error": round(theirs, 5),
        "ok": ours <= 2 * theirs,
    }


def graphs(folder: Path, scale: Scale) -> dict[str, Any]:
    """fp32 greedy ids against transformers with decode steps replayed as CUDA graphs, and not; with
    offload both kinds of steps mix.
    """
    result: dict[str, Any] = {}
    for name, settings in {
        "graphs": {"num_gpu_blocks": 200},
        "eager": {"num_gpu_blocks": 200, "enforce_eager": True},
        "graphs, offload": STREAM | {"debug_kv": False, "num_gpu_blocks": 40},
        "graphs, chunks of 16": {"num_gpu_blocks": 200, "max_num_batched_tokens": 16},
    }.items():
        made = engine(folder, scale.device, dtype="float32", **settings)
        ids = [made.add_request(prompt, scale.greedy) for prompt in prompts()]
        found: dict[int | str, list[int]] = {}
        while made.has_unfinished_requests:
            found |= {o.request_id: o.outputs[0].token_ids for o in made.step()}
        equal = are_greedy(folder, [found[i] for i in ids], scale.num_out)
        result[name] = {"ids_equal": equal, "ok": equal}
        made.close()
    return result


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
    parser.add_argument("--json", metavar="FILE", help="also write the result here, indented")
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
        run_rows({"link": lambda: link(args.device), **rows}, result, LIMITS, file)
    # The last row of a length counts: bfloat16, or float32 where that missed some.
    found = {row["length"]: row["exact"] == row["samples"] for row in result.get("needles", [])}
    result["ok"] = all(found.values()) and is_ok(result, [*rows])
    result["targets"] = targets(result)
    save(result, file)
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
