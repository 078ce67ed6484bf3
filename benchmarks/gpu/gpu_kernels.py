"""Attention and prefill against what the device can do at most: parts of gpu_check.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.flash_stand_in import OneChunk
from benchmarks.gpu.gpu_measure import Row, Scale, decoding, offloaded, running, time_prefill
from nanoengine.attention.flash_calls import plan_calls
from nanoengine.attention.flash_kernels import try_kernel
from nanoengine.attention.select import FLASH_KERNELS, ORDER, AttentionSetup, make_attention
from nanoengine.config.attention import AttentionConfig
from nanoengine.config.model import ModelConfig
from nanoengine.context import ForwardContext, KVChunk
from nanoengine.errors import ConfigError
from nanoengine.loading.model_config import read_model_config
from nanoengine.models.weight_shapes import weight_shapes

ROWS = (1, 2, 5, 9, 17)
BLOCK = 256
NUM_CALLS = 10


def prefill_share(folder: Path, scale: Scale) -> Iterator[Row]:
    """First the rate of a large product of matrices; then what prefill reaches of it, by length.
    Its operations: two for each weight of a layer and token, and causal attention.
    """
    dense = dense_rate(scale)
    yield {"dense_tflop_per_s": round(dense / 1e12, 3)}
    first, *_, last = scale.prefill_lengths[0], *scale.prefill_lengths
    with running(folder, scale, num_gpu_blocks=last // BLOCK + 8) as made:
        for length in sorted({first // 4, first, last}):
            seconds = time_prefill(made, length)
            rate = prefill_operations(made.model_config, length) / seconds
            yield {
                "context": length,
                "tokens_per_s": round(length / seconds, 1),
                "tflop_per_s": round(rate / 1e12, 3),
                "share_of_dense": round(rate / dense, 3),
            }


def dense_rate(scale: Scale) -> float:
    """Operations a second of a product of random bfloat16 matrices."""
    side = 512 if scale.is_rehearsal else 8192
    factors = torch.randn((2, side, side), device=scale.device, dtype=torch.bfloat16)
    return 2 * side**3 / wall_s(lambda: factors[0] @ factors[1], scale)


def prefill_operations(model: ModelConfig, length: int) -> float:
    """Multiplications and additions of a prompt's forward pass, without embedding and head."""
    weights = sum(
        torch.Size(shape).numel()
        for name, shape in weight_shapes(model).items()
        if "embed_tokens" not in name and "lm_head" not in name
    )
    attention = 2 * model.num_heads * model.head_dim * length * model.num_layers
    return float(length) * (2 * weights + attention)


def wall_s(call: Callable[[], object], scale: Scale) -> float:
    """Seconds of a call, the mean of some."""
    num_calls = 2 if scale.is_rehearsal else NUM_CALLS
    for _ in range(3):
        call()
    _wait(scale)
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    _wait(scale)
    return (time.perf_counter() - start) / num_calls


def _wait(scale: Scale) -> None:
    if not scale.is_rehearsal:
        torch.cuda.synchronize()


class WrongGuesses:
    """Guesses as many tokens in each step, always the same one (sequence.Guesser)."""

    is_trusted, is_careful = True, False

    def __init__(self, num_guesses: int) -> None:
        self._guesses = (1,) * num_guesses

    def guess(self, token_ids: object, most: int) -> tuple[int, ...]:
        return self._guesses[:most]

    def record(self, num_guesses: int, num_right: int) -> None:
        """Nothing is learned."""


def verify_rows(folder: Path, scale: Scale) -> Iterator[Row]:
    """Steps that check guesses, of 2 to 17 rows, against steps of one row: resident and streamed,
    none begun before the one before it has ended.
    """
    contexts = scale.decode_contexts[:2]
    most = max(contexts) + 1024
    size = read_model_config(folder).kv_bytes_per_token(2)
    settings = {
        "resident": {"num_gpu_blocks": most // BLOCK + 8},
        "streamed": offloaded(scale, most, size) | {"max_model_len": most},
    }
    for how, memory in settings.items():
        with running(folder, scale, speculative=f"ngram:{max(ROWS) - 1}", **memory) as made:
            for context in contexts:
                with decoding(made, [context]):
                    (seq,) = made.scheduler.running
                    step_ms = {}
                    for rows in ROWS:
                        seq.guesser = WrongGuesses(rows - 1)
                        step_ms[rows] = round(1000 * wall_s(made.step, scale), 3)
                times = {rows: round(ms / step_ms[1], 3) for rows, ms in step_ms.items()}
                yield {"how": how, "context": context, "step_ms": step_ms, "times_one_row": times}


@dataclass(frozen=True)
class Work:
    """Attention of one layer: requests with so many queries and keys each."""

    requests: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def operations(self) -> float:
        """Of a causal pass whose last query sees all keys."""
        seen = self.queries * (2 * self.keys - self.queries + 1) / 2
        return 4.0 * self.requests * self.heads * self.head_dim * seen

    @property
    def read_bytes(self) -> int:
        """Keys and values in bfloat16."""
        return 4 * self.requests * self.keys * self.kv_heads * self.head_dim


def kernels(scale: Scale) -> Iterator[Row]:
    """Attention of one layer by our kernels and by others, kernel time alone: causal prefill, and
    decode of many short and one long request. Others: flash-attn and PyTorch's varlen kernel over
    the same blocks, PyTorch's SDPA over contiguous keys.
    """
    heads, kv_heads = (4, 2) if scale.is_rehearsal else (32, 8)
    length = scale.prefill_lengths[0] // 4
    for head_dim in (64, 128):
        shape = (heads, kv_heads, head_dim)
        for work in (
            Work(1, length, length, *shape),
            Work(1, 4 * length, 4 * length, *shape),
            Work(64 if length > 1024 else 2, 1, 1024, *shape),
            Work(1, 1, 16 * length, *shape),
        ):
            yield kernel_row(work, scale)


def kernel_row(work: Work, scale: Scale) -> Row:
    """The time of each kernel for this work, and TFLOP/s or GB/s; or why it cannot do it."""
    row: Row = dict(vars(work))
    device = torch.device(scale.device)
    for name, made in kernel_calls(work, device).items():
        if isinstance(made, str):
            row[name] = made
            continue
        try:
            seconds = kernel_s(made, device)
        except RuntimeError as error:
            row[name] = str(error).splitlines()[0][:200]
            continue
        row[name] = {"ms": round(1000 * seconds, 4)}
        if work.queries > 1:
            row[name]["tflop_per_s"] = round(work.operations / seconds / 1e12, 2)
        else:
            row[name]["gb_per_s"] = round(work.read_bytes / seconds / 1e9, 1)
    return row


def kernel_calls(work: Work, device: torch.device) -> dict[str, Callable[[], object] | str]:
    """What runs each kernel over the same random numbers; text: why it cannot."""
    q, ctx, chunk = batch(work, device)
    config = AttentionConfig(work.head_dim)
    setup = AttentionSetup(device, q.dtype, BLOCK, config)
    ours, *_ = ORDER[device.type]
    calls: dict[str, Callable[[], object] | str] = {}
    try:
        backend, _ = make_attention("auto" if device.type == "cpu" else ours, setup)
        backend.run(0, q, ctx)  # what is done once a step, for all layers
        calls[backend.name] = partial(backend.run, 1, q, ctx)
    except ConfigError as error:
        calls[ours] = str(error)
    for name in ("flash-attn", "varlen"):
        found, reason = FLASH_KERNELS[name](device)
        for kernel in found:
            reason = try_kernel(kernel, device, q.dtype, BLOCK, work.head_dim)
            if not reason:
                (planned,) = plan_calls(chunk, ctx.lengths)
                calls[name] = partial(
                    kernel.attend, q, chunk.k, chunk.v, planned, config.score_scale
                )
                break
        calls.setdefault(name, reason)
    for which in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        calls[f"sdpa {which.name.lower()}"] = sdpa_call(work, q, chunk, which)
    return calls


def sdpa_call(work: Work, q: Tensor, chunk: KVChunk, which: SDPBackend) -> Callable[[], object]:
    """PyTorch's scaled_dot_product_attention over a contiguous copy of the keys."""
    shape = (work.requests, -1, work.kv_heads, work.head_dim)
    k, v = (
        x.reshape(shape)[:, : work.keys].transpose(1, 2).contiguous() for x in (chunk.k, chunk.v)
    )
    queries = q.view(work.requests, work.queries, work.heads, -1).transpose(1, 2)

    def call() -> object:
        with sdpa_kernel(which):
            return torch.nn.functional.scaled_dot_product_attention(
                queries, k, v, is_causal=work.queries > 1, enable_gqa=True
            )

    return call


def batch(work: Work, device: torch.device) -> tuple[Tensor, ForwardContext, KVChunk]:
    """Random queries, and random KV in blocks as a resident step reads it."""
    num, each = work.requests, -(-work.keys // BLOCK)
    pool_shape = (num * each, 2, BLOCK, work.kv_heads, work.head_dim)
    pool = torch.randn(pool_shape, device=device, dtype=torch.bfloat16)
    shape = (num * work.queries, work.heads, work.head_dim)
    q = torch.randn(shape, device=device, dtype=torch.bfloat16)

    def ints(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    tables = [[*range(i * each, (i + 1) * each)] for i in range(num)]
    chunk = KVChunk(
        pool[:, 0], pool[:, 1], ints([*range(num)]), ints([0] * num), ints([each] * num),
        ints(tables), tuple((i, 0, tuple(table)) for i, table in enumerate(tables)), is_last=True,
    )  # fmt: skip
    none = torch.empty(0, dtype=torch.int64, device=device)
    starts = ints([i * work.queries for i in range(num + 1)])
    lengths = ((work.queries, work.keys),) * num
    kv: Any = OneChunk(chunk)
    attention: Any = None  # the backends are called directly
    kv_lens = ints([work.keys] * num)
    return q, ForwardContext(none, none, starts, kv_lens, lengths, none, kv, attention), chunk


def kernel_s(call: Callable[[], object], device: torch.device) -> float:
    """Seconds that a call's kernels run on a GPU, launches left out; on a CPU, of the call."""
    if device.type == "cpu":
        call()
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(NUM_CALLS):
            call()
        torch.cuda.synchronize()
    spans = [e.time_range for e in profile.events() if e.device_type.name == "CUDA"]
    return float(sum(span.end - span.start for span in spans)) / 1e6 / NUM_CALLS
