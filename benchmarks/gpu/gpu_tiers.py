"""The engine's answers on a GPU, on each tier, alone and beside others: a part of gpu_check.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from checkpoints import reference, reference_greedy
from driver import Driver
from stream_trace import TraceEntry, traced

from benchmarks.gpu.gpu_measure import Scale
from benchmarks.gpu.gpu_models import BLOCK, prompts
from nanoengine.devices.stream_check import CheckedDevice, CheckedStream, Key
from nanoengine.engine.draft_length import PayingDrafts
from nanoengine.engine.llm_engine import LLMEngine

MOST_OFF_IN_INT8 = 0.1  # of the standard deviation of logits
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
    from coded import coded_checkpoint  # imports gguf

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


def int8_on_host(folder: Path, scale: Scale) -> dict[str, Any]:
    """fp32 logits with host KV in int8 against those of the same streamed steps without."""
    settings = STREAM | {"dtype": "float32"}
    found = []
    for dtype in (None, "int8"):
        made = engine(folder, scale.device, **settings, kv_offload_dtype=dtype)
        first = [logits[:1] for logits in logits_of(Driver(made), prompts(), scale)]
        found.append(torch.cat(first))  # of the same tokens, however these go on
        made.close()
    error = ((found[0] - found[1]).abs().max() / found[0].std()).item()
    return {"largest_error": round(error, 5), "ok": 0 < error < MOST_OFF_IN_INT8}


def saved_prefixes(folder: Path, target: Path, scale: Scale) -> dict[str, Any]:
    """Prompts whose beginnings a file has, which an earlier engine wrote: cached tokens, and fp32
    logits against those of the earlier engine.
    """
    settings = STREAM | {"dtype": "float32", "prefix_cache_file": str(target / "prefixes")}
    found, cached = [], []
    for _ in range(2):
        made = engine(folder, scale.device, **settings)
        driver = Driver(made)
        outputs = driver.run(prompts(), scale.greedy)
        found.append([torch.stack(driver.logits[output.request_id]).cpu() for output in outputs])
        cached.append(sum(output.num_cached_tokens for output in outputs))
        made.close()
    same = all(map(torch.equal, *found))
    return {"cached_tokens": cached, "logits_equal": same, "ok": same and cached[1] > cached[0]}
