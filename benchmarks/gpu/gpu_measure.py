"""The measurements of `make gpu-check`: decode, prefill and batches in the shapes of real models
with random weights and KV, a workload beside transformers, and retrieval on the induction
checkpoint.

Each function returns a row or a list of rows for the JSON; gpu_check.py calls them.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tiny_model
import torch

from benchmarks.gpu.gpu_rows import free_memory
from nanoengine import SamplingParams
from nanoengine.bench.niah import Sample, induction_samples
from nanoengine.config.engine import GIB
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.kv.kv_cache import HybridKVCacheManager
from nanoengine.loading.model_config import read_model_config
from nanoengine.models.weight_shapes import weight_shapes
from nanoengine.sequence import Admission, Sequence, SequenceStatus
from nanoengine.startup.probe import PROBE_ID, fill_random, probe_sequence

LLAMA_8B = tiny_model.LLAMA_8B | {
    "model_type": "llama",
    "max_position_embeddings": 1 << 20,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
QWEN_600M = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
# The same kinds of work where there is no GPU.
SMALL = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
Row = dict[str, Any]
Fill = Callable[[HybridKVCacheManager, Sequence, bool], None]
BUDGET_GB = 24


@dataclass(frozen=True)
class Scale:
    """How large the work is: on a GPU, or in a rehearsal without one."""

    device: str
    is_rehearsal: bool  # there is no GPU
    decode_contexts: tuple[int, ...]
    prefill_lengths: tuple[int, ...]
    chunk: int
    device_gib: float
    batch: tuple[int, int]  # requests, tokens each
    resident_batches: tuple[tuple[int, int], ...]
    workload: tuple[int, int, int]  # requests, requests beside transformers, longest
    needles: tuple[tuple[int, int], ...]  # samples, length
    line_contexts: tuple[int, ...]  # of the line of decode speed over context
    packed_contexts: tuple[int, ...]  # of the same, with KV in 12 bits on the host
    num_out: int  # tokens of an answer whose bits or ids are compared
    page: int  # tokens of a block in the comparison with large blocks
    num_neighbours: int  # requests before the one that must be as alone

    @property
    def greedy(self) -> SamplingParams:
        """Of the answers that are compared."""
        return SamplingParams(temperature=0, max_tokens=self.num_out, ignore_eos=True)

    @property
    def half(self) -> str:
        """float16, which is not supported on a CPU."""
        return "float32" if self.is_rehearsal else "float16"

    def up_to(self, longest: int) -> Scale:
        """The same without contexts of more tokens, for less memory or time; the shortest stay."""

        def cut(lengths: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(n for n in lengths if n <= longest) or lengths[:1]

        return replace(
            self,
            decode_contexts=cut(self.decode_contexts),
            prefill_lengths=cut(self.prefill_lengths),
            needles=tuple(n for n in self.needles if n[1] <= longest) or self.needles[:1],
            line_contexts=cut(self.line_contexts),
            packed_contexts=tuple(n for n in self.packed_contexts if n <= longest),
        )

    def shapes(self, folder: Path, config: dict[str, Any]) -> Path:
        """A folder with the config alone."""
        folder.mkdir(exist_ok=True)
        config = config | SMALL if self.is_rehearsal else config
        (folder / "config.json").write_text(json.dumps(config))
        return folder


ON_GPU = Scale(
    device="cuda",
    is_rehearsal=False,
    decode_contexts=(32_768, 131_072, 524_288),
    prefill_lengths=(32_768, 65_536, 131_072),
    chunk=8192,
    device_gib=1.0,
    batch=(8, 32_768),
    resident_batches=((1, 1024), (8, 1024), (64, 1024), (256, 512)),
    workload=(256, 64, 1024),
    needles=((100, 32_768), (10, 131_072), (3, (1 << 20) - 16)),
    line_contexts=tuple(8192 << n for n in range(7)),  # 512K: 64 GiB of RAM
    packed_contexts=((1 << 20) - 1024,),  # 99 GiB; of 1M with what is generated
    num_out=24,
    page=256,  # what flash kernels ask of a block
    num_neighbours=49,
)
REHEARSAL = Scale(
    device="cpu",
    is_rehearsal=True,
    decode_contexts=(1024,),
    prefill_lengths=(1024,),
    chunk=256,
    device_gib=0.001,
    batch=(2, 1024),
    resident_batches=((1, 256), (4, 256)),
    workload=(4, 2, 32),
    needles=((2, 2048),),
    line_contexts=(256, 512, 1024),
    packed_contexts=(1024,),
    num_out=5,
    page=32,
    num_neighbours=9,
)


@contextmanager
def running(folder: Path, scale: Scale, **settings: Any) -> Iterator[LLMEngine]:
    """An engine with random weights of the folder's shapes, closed and freed at the end."""
    defaults: dict[str, Any] = {
        "load_format": "dummy",
        "device": scale.device,
        "dtype": "bfloat16",
        "enable_prefix_caching": False,
        "max_num_batched_tokens": scale.chunk,
        "max_num_seqs": 64,
        "stream_mib_per_step": 1e6,
        "measure_speed": not scale.is_rehearsal,  # takes a second
    }
    made = LLMEngine(folder, **(defaults | settings))
    try:
        yield made
    finally:
        made.close()
        del made
        free_memory()


def offloaded(scale: Scale, num_tokens: int, token_bytes: int) -> dict[str, Any]:
    """Settings of an engine that keeps so many tokens on the host."""
    gib = (num_tokens + 32 * 256) * token_bytes / GIB
    streams = {"enable_cpu_offload": True, "offload_mode": "stream"}
    return streams | {"kv_cache_gib": scale.device_gib, "kv_offload_gib": gib}


def card(scale: Scale) -> dict[str, Any]:
    """Settings: as much device memory as a card of BUDGET_GB gives by default, a share of this
    card's.
    """
    if scale.is_rehearsal:
        return {"kv_cache_gib": scale.device_gib}
    share = 0.9 * BUDGET_GB * 1e9 / torch.cuda.mem_get_info()[1]
    settings = {"kv_cache_gib": None, "gpu_memory_utilization": share}
    return settings | {"max_num_batched_tokens": 2048}


@contextmanager
def capped(scale: Scale) -> Iterator[None]:
    """PyTorch may allocate BUDGET_GB of the device, and no more."""
    if scale.is_rehearsal:
        yield
        return
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(BUDGET_GB * 1e9 / torch.cuda.mem_get_info()[1])
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def token_bytes(made: LLMEngine) -> int:
    """KV of one token, all layers."""
    return made.plan.kv.block_bytes // made.plan.kv.block_size


def read_weights(made: LLMEngine) -> int:
    """Bytes of the weights that a decode step reads: all but the embedding's."""
    shapes = weight_shapes(made.model_config)
    is_tied = made.model_config.tie_word_embeddings
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    unread = 0 if is_tied else sizes["model.embed_tokens.weight"]
    return 2 * (sum(sizes.values()) - unread)


@contextmanager
def decoding(made: LLMEngine, lengths: list[int], fill: Fill = fill_random) -> Iterator[None]:
    """Running requests with KV of random numbers; with offload, all on the host at first: the first
    step brings what fits to the device. fill: puts the numbers there.
    """
    seqs = [  # each has its first token, and no end
        probe_sequence(PROBE_ID - i, num_tokens, num_prompt=num_tokens - 1)
        for i, num_tokens in enumerate(lengths)
    ]
    made.kv.reset_budget()
    for seq in seqs:
        assert made.kv.admit(seq) is Admission.ADMITTED
        fill(made.kv, seq, bool(made.plan.kv.num_host_blocks))
        seq.status = SequenceStatus.RUNNING
    made.scheduler.running += seqs
    try:
        yield
    finally:
        made.scheduler.abort(seqs)
        made.step()


def time_decode(made: LLMEngine, lengths: list[int], num_steps: int) -> tuple[float, float]:
    """Seconds of a decode step, and bytes from the host in one; means, as steps overlap."""
    with decoding(made, lengths):
        for _ in range(4):
            made.step()
        made.kv.reset_counters()
        start = time.perf_counter()
        for _ in range(num_steps):
            made.step()
        seconds = time.perf_counter() - start
        return seconds / num_steps, made.kv.counters.h2d_bytes / num_steps


def resident_decode(folder: Path, scale: Scale, read_gb_per_s: float) -> list[Row]:
    """Decode steps of resident batches: weights and KV that they read, against what the device
    reads.
    """
    rows = []
    longest = max(n * length for n, length in scale.resident_batches)
    with running(folder, scale, num_gpu_blocks=2 * longest // 256 + 8, max_num_seqs=256) as made:
        for num, length in scale.resident_batches:
            step_s, _ = time_decode(made, [length] * num, 50)
            read = read_weights(made) + num * length * token_bytes(made)
            rows.append(
                {
                    "requests": num,
                    "context": length,
                    "step_ms": round(1000 * step_s, 3),
                    "tokens_per_s": round(num / step_s, 1),
                    "read_gb_per_s": round(read / step_s / 1e9, 1),
                    "share_of_read": round(read / step_s / 1e9 / read_gb_per_s, 3),
                }
            )
    return rows


def long_context(folder: Path, scale: Scale, link_gb_per_s: float) -> Row:
    """Prefill and decode of one long request, all on the device and with little of it there."""
    decode, prefill = scale.decode_contexts, scale.prefill_lengths
    most = max(*decode, *prefill)
    start = time.perf_counter()
    with running(folder, scale, num_gpu_blocks=most // 256 + 8) as made:
        startup_s = {"resident": round(time.perf_counter() - start, 2)}
        size = token_bytes(made)
        resident = {
            "prefill": {n: time_prefill(made, n) for n in prefill},
            "decode": {n: time_decode(made, [n], 10)[0] for n in decode},
        }
    rows: Row = {"prefill": [], "decode": []}
    settings = offloaded(scale, most, size) | {"max_model_len": most + 256}
    start = time.perf_counter()
    with running(folder, scale, **settings) as made:
        startup_s["offloaded"] = round(time.perf_counter() - start, 2)
        rows["startup_s"] = startup_s  # random weights, kernels compiled before or not
        rows["plan"] = str(made.plan).splitlines()
        for n in prefill:
            streamed_s, resident_s = time_prefill(made, n), resident["prefill"][n]
            rows["prefill"].append(
                {
                    "context": n,
                    "resident_tokens_per_s": round(n / resident_s, 1),
                    "offloaded_tokens_per_s": round(n / streamed_s, 1),
                    "offloaded_to_resident": round(resident_s / streamed_s, 3),
                }
            )
        for n in decode:
            step_s, moved = time_decode(made, [n], 5)
            least_s = max(moved / link_gb_per_s / 1e9, resident["decode"][n])
            rows["decode"].append(
                {
                    "context": n,
                    "resident_step_ms": round(1000 * resident["decode"][n], 2),
                    "step_ms": round(1000 * step_s, 2),
                    "tokens_per_s": round(1 / step_s, 2),
                    "streamed_gb": round(moved / 1e9, 3),
                    "streamed_gb_per_s": round(moved / step_s / 1e9, 2),
                    "share_of_link": round(moved / step_s / 1e9 / link_gb_per_s, 3),
                    "mean_piece_mib": mean_piece_mib(made),
                    "least_to_measured": round(least_s / step_s, 3),
                }
            )
        if not scale.is_rehearsal:
            rows["trace"] = trace_step(made, decode[0])
        slot_tokens = made.plan.kv.slot_blocks * made.plan.kv.block_size
    # Larger slots carry the state of attention over less often, and take memory.
    n = prefill[len(prefill) // 2]
    settings = offloaded(scale, n, size) | {"max_model_len": n + 256}
    with running(folder, scale, slot_tokens=2 * slot_tokens, **settings) as made:
        rows["prefill_slots_twice_as_large"] = {
            "context": n,
            "slot_tokens": 2 * slot_tokens,
            "offloaded_to_resident": round(resident["prefill"][n] / time_prefill(made, n), 3),
        }
    return rows


def kv_in_12_bits(folder: Path, scale: Scale, link_gb_per_s: float) -> list[Row]:
    """Decode steps whose KV comes from the host as it is, and in 12 bits a number. link_gb_per_s:
    of copies; the 12 bits are read by a kernel.
    """
    rows: list[Row] = []
    contexts = scale.decode_contexts[:2]
    for dtype in (None, "bf12"):
        size = 2 * read_model_config(folder).kv_bytes_per_token(2)
        settings = offloaded(scale, max(contexts), size) | {"max_model_len": max(contexts) + 256}
        with running(folder, scale, **settings, kv_offload_dtype=dtype) as made:
            for n in contexts:
                step_s, moved = time_decode(made, [n], 5)
                rows.append(
                    {
                        "context": n,
                        "kv_offload_dtype": dtype,
                        "tokens_per_s": round(1 / step_s, 2),
                        "streamed_gb": round(moved / 1e9, 3),
                        "share_of_link": round(moved / step_s / 1e9 / link_gb_per_s, 3),
                    }
                )
    for exact, packed in zip(rows, rows[len(contexts) :], strict=False):
        packed["over_exact"] = round(packed["tokens_per_s"] / exact["tokens_per_s"], 3)
    return rows


def lightly_streamed(folder: Path, scale: Scale, link_gb_per_s: float) -> list[Row]:
    """Decode of a request that streams an eighth of what is on the device: where launching kernels
    would take longer than the copies. With one graph a layer, and kernel by kernel.
    """
    rows = []
    size = read_model_config(folder).kv_bytes_per_token(2)
    context = int(9 / 8 * scale.device_gib * GIB / size)
    for enforce_eager in (False, True):
        settings = offloaded(scale, context + 256, size)
        settings |= {"max_model_len": context + 256, "enforce_eager": enforce_eager}
        with running(folder, scale, **settings) as made:
            step_s, moved = time_decode(made, [context], 20)
        copy_s = moved / link_gb_per_s / 1e9
        rows.append(
            {
                "context": context,
                "enforce_eager": enforce_eager,
                "step_ms": round(1000 * step_s, 3),
                "copies_ms": round(1000 * copy_s, 3),
                "share_of_link": round(copy_s / step_s, 3),
            }
        )
    return rows


def time_prefill(made: LLMEngine, length: int) -> float:
    """Seconds to the first token of a prompt of random tokens; the second of two."""
    rng, seconds = random.Random(length), 0.0
    vocab = made.model_config.vocab_size
    for num_tokens in (min(length, 4 * made.plan.max_num_batched_tokens), length):
        prompt = rng.choices(range(vocab), k=num_tokens)
        made.add_request(prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        start = time.perf_counter()
        while made.has_unfinished_requests:
            made.step()
        seconds = time.perf_counter() - start
    return seconds


def trace_step(made: LLMEngine, context: int) -> Row:
    """Of streamed decode steps: the share in which copies run, kernels run, and neither does."""
    with decoding(made, [context]):
        for _ in range(4):
            made.step()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(3):
                made.step()
            made.device.synchronize()
    spans: dict[str, list[tuple[float, float]]] = {"copy": [], "compute": []}
    for event in profile.events():
        if event.device_type.name == "CUDA":
            kind = "copy" if "Memcpy HtoD" in event.name else "compute"
            spans[kind].append((event.time_range.start, event.time_range.end))
    both = spans["copy"] + spans["compute"]
    wall = max(end for _, end in both) - min(start for start, _ in both)
    shares = {kind: round(_covered(found) / wall, 3) for kind, found in spans.items()}
    pieces = [end - start for start, end in spans["copy"]]
    return {
        "context": context,
        "wall_ms": round(wall / 1000, 2),
        **shares,
        "neither": round(1 - _covered(both) / wall, 3),
        "num_copies": len(pieces),
    }


def _covered(spans: list[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def many_streamed(folder: Path, scale: Scale, link_gb_per_s: float) -> Row:
    """Several long requests in each step, with room on the device for one of them."""
    num, length = scale.batch
    size = read_model_config(folder).kv_bytes_per_token(2)
    settings = offloaded(scale, num * (length + 256), size)
    settings["kv_cache_gib"] = length * size / GIB
    settings["max_model_len"] = length + 256
    with running(folder, scale, **settings) as made:
        step_s, moved = time_decode(made, [length] * num, 5)
        peak, piece_mib = made.kv.peak_streamed, mean_piece_mib(made)
    return {
        "requests": num,
        "context": length,
        "device_kv_gib": round(settings["kv_cache_gib"], 2),
        "step_ms": round(1000 * step_s, 1),
        "tokens_per_s": round(num / step_s, 2),
        "streamed_gb_per_s": round(moved / step_s / 1e9, 2),
        "share_of_link": round(moved / step_s / 1e9 / link_gb_per_s, 3),
        "mean_piece_mib": piece_mib,
        "peak_streamed": peak,
    }


def mean_piece_mib(made: LLMEngine) -> float:
    """What a copy into the ring is of, on average."""
    counters = made.kv.counters
    return round(counters.fill_bytes / max(1, counters.num_fill_copies) / (1 << 20), 2)


def targets(result: Row) -> Row:
    """What was aimed at, and the worst that was measured."""
    found: Row = {}

    def least(name: str, aim: float, values: list[float]) -> None:
        if values:
            found[name] = {"least": min(values), "aim": aim, "met": min(values) >= aim}

    long = result.get("long_context", {"prefill": [], "decode": []})
    work = result.get("workload", {})
    decode = [row["share_of_read"] for row in result.get("resident_decode", [])]
    least("offloaded_to_resident_prefill", 0.98, _column(long["prefill"], "offloaded_to_resident"))
    least("least_to_measured_decode", 0.95, _column(long["decode"], "least_to_measured"))
    least("mean_piece_mib", 4, _column(long["decode"], "mean_piece_mib"))
    least("resident_decode_share_of_read", 0.7, decode[:1])
    least("times_transformers", 5, _column([work.get("beside_transformers", {})], "ratio"))
    least("times_offloaded_cache", 1, _column(result.get("offloaded_cache", []), "ratio"))
    least("times_nano_vllm", 1, _column([result.get("nano_vllm", {})], "ratio"))
    least("prefill_share", 0.6, _column(result.get("prefill_share", [])[-1:], "share_of_dense"))
    for row in result.get("drafts", []):
        least(f"drafts_at_{row['context']}", 0.9, _column([*row["right"].values()], "share"))
    if work:
        off = abs(work["peak_gib"] / work["planned_gib"] - 1)
        least("memory_as_planned", 0.98, [round(1 - off, 3)])
    return found


def _column(rows: list[Row], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def needles(folder: Path, scale: Scale) -> list[Row]:
    """Exact retrieval with most KV on the host, bfloat16 first."""
    rows = []
    for num, length in scale.needles:
        for dtype in ("bfloat16", "float32"):
            row = _needles(folder, scale, num, length, dtype)
            rows.append(row)
            if row["exact"] == num:
                break
    return rows


def _needles(folder: Path, scale: Scale, num: int, length: int, dtype: str) -> Row:
    size = 512 * (2 if dtype == "bfloat16" else 4)
    at_once = max(1, min(num, (1 << 20) // length))
    settings = offloaded(scale, at_once * (length + 256), size) | {
        "load_format": "auto",
        "dtype": dtype,
        "kv_cache_gib": None,
        "num_gpu_blocks": max(8, min(2 * scale.chunk, length // 4) // 256 + 2),
        "max_num_seqs": min(at_once, 16),
        "max_model_len": length + 16,
    }
    with running(folder, scale, **settings) as made:
        samples = induction_samples(made.inputs.tokenizer, length, num, seed=0)
        params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        ids: dict[int | str, Sample] = {}
        for sample in samples:
            ids[made.add_request(sample.prompt_ids, params)] = sample
        start, exact = time.perf_counter(), 0
        while made.has_unfinished_requests:
            for output in made.step():
                exact += output.outputs[0].text.strip() == ids[output.request_id].outputs[0]
        row = {
            "samples": num,
            "length": length,
            "dtype": dtype,
            "exact": exact,
            "attention": made.plan.attention,
            "device_tokens": made.plan.kv.num_blocks * made.plan.kv.block_size,
            "peak_streamed": made.kv.peak_streamed,
            "h2d_gb": round(made.kv.counters.h2d_bytes / 1e9, 2),
            "seconds": round(time.perf_counter() - start, 1),
        }
    return row
