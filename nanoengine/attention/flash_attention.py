"""Attention by a flash kernel: plans the calls of a step and merges their results.

A kernel call is either non-causal or bottom-right causal, so the queries over a span of keys are
split in two: queries past the span see all of it, queries inside it see it up to themselves. Each
result comes with its log-sum-exp and is merged in fp32 (the split softmax of Dao et al., arXiv
2205.14135). The split of a context into chunks changes the rounding; the time of their arrival does
not. Knows only chunks and lengths, not pools or the schedule.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from nanoengine.config.attention import AttentionConfig
from nanoengine.context import ForwardContext, KVChunk, SoftmaxState, Spans, packed
from nanoengine.devices.device import to_device

TRIAL_TOLERANCE = 0.05

Lengths = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One kernel call over a chunk, for n sequences; the same for every layer of a step.

    rows          the query tokens of the step: a slice, or int64 [queries] if not consecutive
    query_start   int32 [n + 1]: sequence i has queries [query_start[i], query_start[i + 1]) of the
                  call, at least one
    key_start     int32 [n + 1]: the running sum of num_keys
    num_keys      int32 [n]: keys of each sequence in the chunk, at least one
    block_table   int32 [n, blocks]: the blocks that hold them
    lengths       (queries, keys) of each sequence, for kernels driven from Python
    causal        the last query of a sequence sees all of these keys, the one before sees one fewer
    """

    rows: slice | Tensor
    query_start: Tensor
    key_start: Tensor
    num_keys: Tensor
    block_table: Tensor
    lengths: tuple[tuple[int, int], ...]
    max_queries: int
    max_keys: int
    causal: bool


class FlashKernel(Protocol):
    """A paged attention kernel that returns its log-sum-exp."""

    name: str

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attention of q [queries, heads, head_dim] over pools [blocks, block_size, kv_heads,
        head_dim], of q's dtype and shape, and its natural log-sum-exp, fp32 [heads, queries].

        The caller may overwrite both. A row without keys has the output 0 and an infinite
        log-sum-exp of either sign. Rows past num_keys are not read.
        """
        ...


class FlashAttnKernel:
    """flash_attn_varlen_func of the package flash-attn."""

    def __init__(self, function: Callable[..., Any], version: str, num_splits: int | None) -> None:
        self.name = f"flash-attn {version}{_splits_text(num_splits)}"
        self._function = function
        self._options = {} if num_splits is None else {"num_splits": num_splits}

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse, _ = self._function(
            q,
            k,
            v,
            cu_seqlens_q=call.query_start,
            cu_seqlens_k=call.key_start,
            max_seqlen_q=call.max_queries,
            max_seqlen_k=call.max_keys,
            softmax_scale=scale,
            causal=call.causal,
            return_attn_probs=True,
            block_table=call.block_table,
            **self._options,
        )
        return out, lse


class VarlenKernel:
    """torch.nn.attention.varlen.varlen_attn."""

    def __init__(
        self, function: Callable[..., Any], want_lse: object, version: str, num_splits: int | None
    ) -> None:
        """want_lse: the module's AuxRequest that makes it return the log-sum-exp."""
        self.name = f"varlen_attn of torch {version}{_splits_text(num_splits)}"
        self._function = function
        self._want_lse = want_lse
        self._options = {} if num_splits is None else {"num_splits": num_splits}

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = self._function(
            q,
            k,
            v,
            call.query_start,
            call.key_start,
            call.max_queries,
            call.max_keys,
            return_aux=self._want_lse,
            scale=scale,
            window_size=(-1, 0) if call.causal else (-1, -1),
            enable_gqa=True,
            seqused_k=call.num_keys,
            block_table=call.block_table,
            **self._options,
        )
        return out, lse


class SdpaKernel:
    """The operators behind PyTorch's scaled_dot_product_attention, which does not return the
    log-sum-exp. Runs one sequence at a time and gathers its blocks. These operators are not public;
    `try_kernel` finds out if they change.
    """

    def __init__(self, device: torch.device) -> None:
        self.name = f"SDPA of torch {torch.__version__}"
        self._is_gpu = device.type != "cpu"

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, scale: float
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q)
        lse = q.new_empty((q.shape[1], len(q)), dtype=torch.float32)
        stop = 0
        for (num_queries, num_keys), table in zip(call.lengths, call.block_table, strict=True):
            blocks = table[: -(-num_keys // k.shape[1])]
            keys, values = (
                pool.index_select(0, blocks).flatten(0, 1)[:num_keys] for pool in (k, v)
            )
            rows = slice(stop, stop := stop + num_queries)
            out[rows], lse[:, rows] = self._attend(q[rows], keys, values, call.causal, scale)
        return out, lse

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """They align causality at the top left, so keys that all queries see get their own call."""
        seen_by_all = len(k) - len(q)
        if not causal or len(q) == 1:
            return self._call(q, k, v, False, scale)
        own, lse = self._call(q, k[seen_by_all:], v[seen_by_all:], True, scale)
        if not seen_by_all:
            return own, lse
        before, lse_before = self._call(q, k[:seen_by_all], v[:seen_by_all], False, scale)
        both = torch.logaddexp(lse, lse_before)
        weight, weight_before = ((part - both).exp().T.unsqueeze(-1) for part in (lse, lse_before))
        return (own * weight + before * weight_before).to(q.dtype), both

    def _call(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Call the operator with the query heads of a KV head as a batch that shares its keys."""
        num_queries, heads, head_dim = q.shape
        group = heads // k.shape[1]
        grouped = q.view(num_queries, -1, group, head_dim).permute(2, 1, 0, 3)
        k, v = (x.transpose(0, 1).unsqueeze(0).expand(group, -1, -1, -1) for x in (k, v))
        if self._is_gpu:
            call = torch.ops.aten._scaled_dot_product_efficient_attention
            out, lse, *_ = call(grouped, k, v, None, True, 0.0, causal, scale=scale)
        else:
            call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            out, lse = call(grouped, k, v, 0.0, causal, scale=scale)
        lse = lse[..., :num_queries]  # a GPU's rows are padded
        return out.permute(2, 1, 0, 3).flatten(1, 2), lse.transpose(0, 1).flatten(0, 1)


class FlashAttention:
    """Runs a flash kernel over the chunks of a layer and merges the results in fp32."""

    can_replay = False
    is_batch_invariant = False

    def __init__(self, scale: float, kernel: FlashKernel, device: torch.device) -> None:
        self.name = kernel.name
        self._scale = scale
        self._kernel = kernel
        self._state = MergedState.on(device)
        self._plans: list[_ChunkPlan] = []
        self._gathered = torch.empty(0, device=device)

    def run(
        self, layer: int, q: Tensor, ctx: ForwardContext, sinks: Tensor | None = None
    ) -> Tensor:
        self._state.start(q, sinks)
        for position, chunk in enumerate(ctx.kv.read(layer)):
            for call in self._calls(position, chunk, ctx.lengths):
                queries = self._queries(q, call.rows)
                out, lse = self._kernel.attend(queries, chunk.k, chunk.v, call, self._scale)
                self._state.merge(call.rows, out, lse)
        return self._state.result(q.dtype)

    def _calls(self, position: int, chunk: KVChunk, lengths: Lengths) -> tuple[KernelCall, ...]:
        """The calls over chunk number `position` of this step, planned once for all layers."""
        if position < len(self._plans):
            plan = self._plans[position]
            # Identical objects have equal values, so a plan is only used for its own step.
            if plan.spans is chunk.spans and plan.lengths is lengths:
                return plan.calls
            del self._plans[position:]
        self._plans.append(_ChunkPlan(chunk.spans, lengths, plan_calls(chunk, lengths)))
        return self._plans[-1].calls

    def _queries(self, q: Tensor, rows: slice | Tensor) -> Tensor:
        if isinstance(rows, slice):
            return q[rows]
        if self._gathered.dtype != q.dtype:
            self._gathered = q.new_empty(0)
        room = self._gathered.resize_((len(rows), *q.shape[1:]))
        return torch.index_select(q, 0, rows, out=room)


@dataclass(frozen=True, slots=True)
class _ChunkPlan:
    spans: Spans
    lengths: Lengths
    calls: tuple[KernelCall, ...]


@dataclass(frozen=True, slots=True)
class MergedState(SoftmaxState):
    """Partial results so far, as a softmax over log-sum-exps, in buffers of one backend.

    The storage grows with the largest step and is kept; `scratch` is for merges.
    """

    scratch: tuple[Tensor, ...]
    # Finite, so that merging two rows without keys does not compute inf - inf.
    lowest: ClassVar[float] = torch.finfo(torch.float32).min

    @classmethod
    def on(cls, device: torch.device) -> Self:
        """A state without rows."""
        row_max, row_sum, acc, *scratch = (
            torch.empty(0, dtype=torch.float32, device=device) for _ in range(7)
        )
        return cls(row_max, row_sum, acc, tuple(scratch))

    def merge(self, rows: slice | Tensor, out: Tensor, lse: Tensor) -> None:
        """Merge what a kernel returned for `rows`; overwrites lse."""
        lse = lse.T.nan_to_num_(nan=torch.nan, posinf=-torch.inf, neginf=-torch.inf)
        new_max, *copies = self.scratch
        new_max.resize_(lse.shape)
        if isinstance(rows, slice):
            _merge(self.row_max[rows], self.row_sum[rows], self.acc[rows], out, lse, new_max)
            return
        parts = (self.row_max, self.row_sum, self.acc)
        for part, copy in zip(parts, copies, strict=True):
            torch.index_select(part, 0, rows, out=copy.resize_((len(rows), *part.shape[1:])))
        _merge(copies[0], copies[1], copies[2], out, lse, new_max)
        for part, copy in zip(parts, copies, strict=True):
            part.index_copy_(0, rows, copy)

    def result(self, dtype: torch.dtype) -> Tensor:
        """The attention output, a new tensor [tokens, heads, head_dim]."""
        out = torch.empty_like(self.acc, dtype=dtype)
        return torch.div(self.acc, self.row_sum.unsqueeze(-1), out=out)


def _merge(
    row_max: Tensor, row_sum: Tensor, acc: Tensor, out: Tensor, lse: Tensor, new_max: Tensor
) -> None:
    """Fold (out, lse [rows, heads]) into the rows, in place; lse and new_max are scratch."""
    torch.maximum(row_max, lse, out=new_max)
    decay = row_max.sub_(new_max).exp_()
    weight = lse.sub_(new_max).exp_()
    row_sum.mul_(decay).add_(weight)
    acc.mul_(decay.unsqueeze(-1)).addcmul_(out, weight.unsqueeze(-1))
    row_max.copy_(new_max)


# -- which calls a chunk needs ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Ask:
    """Consecutive queries of one sequence and the span of keys they see in one call."""

    span: int  # which of the chunk's spans
    rows: range  # tokens of the step
    num_keys: int


def plan_calls(chunk: KVChunk, lengths: Lengths) -> tuple[KernelCall, ...]:
    """The calls, two at most, for the step's queries over the keys of a chunk.

    Queries before a span get no call with it; spans without keys get no call at all.
    """
    block_size = chunk.k.shape[1]
    stops = list(accumulate(num_queries for num_queries, _ in lengths))
    asks: dict[bool, list[_Ask]] = {False: [], True: []}
    for number, (index, first, blocks) in enumerate(chunk.spans):
        (num_queries, kv_len), stop = lengths[index], stops[index]
        begin, end = first * block_size, min((first + len(blocks)) * block_size, kv_len)
        if begin >= end:
            continue
        full, causal = seen_by(begin, end, num_queries, kv_len)
        for is_causal, positions in ((False, full), (True, causal)):
            if positions:
                row = stop - kv_len
                rows = range(row + positions.start, row + positions.stop)
                asks[is_causal].append(_Ask(number, rows, end - begin))
    return tuple(_call(chunk, found, is_causal) for is_causal, found in asks.items() if found)


def seen_by(begin: int, end: int, num_queries: int, kv_len: int) -> tuple[range, range]:
    """Positions of the queries that see all keys in [begin, end), and of those that see the keys up
    to their own position; the last of these sees all.

    The queries are the sequence's last `num_queries` positions before kv_len.
    """
    start = kv_len - num_queries
    if end <= start + 1:
        return range(start, kv_len), range(0)
    return range(end, kv_len), range(max(start, begin), end)


def _call(chunk: KVChunk, asks: Sequence[_Ask], causal: bool) -> KernelCall:
    device = chunk.k.device
    queries, keys = [len(ask.rows) for ask in asks], [ask.num_keys for ask in asks]
    query_start, key_start, num_keys = packed(
        partial(to_device, device=device),
        ([*accumulate(queries, initial=0)], [*accumulate(keys, initial=0)], keys),
        torch.int32,
    )
    table = chunk.block_table
    if len(asks) < len(chunk.spans):
        table = table[to_device([ask.span for ask in asks], torch.int64, device)]
    return KernelCall(
        rows=_rows(asks, device),
        query_start=query_start,
        key_start=key_start,
        num_keys=num_keys,
        block_table=table,
        lengths=tuple(zip(queries, keys, strict=True)),
        max_queries=max(queries),
        max_keys=max(keys),
        causal=causal,
    )


def _rows(asks: Sequence[_Ask], device: torch.device) -> slice | Tensor:
    if all(before.rows.stop == after.rows.start for before, after in pairwise(asks)):
        return slice(asks[0].rows.start, asks[-1].rows.stop)
    return to_device([row for ask in asks for row in ask.rows], torch.int64, device)


# -- which kernel is there -------------------------------------------------------------------------


FindKernels = Callable[[torch.device], tuple[list[FlashKernel], str]]


def make_flash(
    find: FindKernels,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int,
    config: AttentionConfig,
) -> tuple[FlashAttention | None, str]:
    """The first kernel that passes a trial on the device, and reasons against those before it."""
    kernels, missing = find(device)
    refusals = [missing] if missing else []
    for kernel in kernels:
        refusal = try_kernel(kernel, device, dtype, block_size, config.head_dim)
        if not refusal:
            return FlashAttention(config.score_scale, kernel, device), "; ".join(refusals)
        refusals.append(f"{kernel.name}: {refusal}")
    return None, "; ".join(refusals)


def flash_attn_kernels(device: torch.device) -> tuple[list[FlashKernel], str]:
    """The kernels of the package flash-attn, or the reason for having none."""
    try:
        module = import_module("flash_attn")  # optional, and only of use on a GPU
    except (ImportError, OSError) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "flash_attn"
        return [], "flash-attn is not installed" if missing else f"flash-attn: {_first_line(error)}"
    function: Callable[..., Any] | None = getattr(module, "flash_attn_varlen_func", None)
    if function is None:
        return [], "flash-attn has no flash_attn_varlen_func"
    if lacks := _lacks(function, ("block_table", "return_attn_probs")):
        return [], f"flash_attn_varlen_func of flash-attn lacks {lacks}"
    version = getattr(module, "__version__", "of unknown version")
    return [FlashAttnKernel(function, version, splits) for splits in _splits(function)], ""


def varlen_kernels(device: torch.device) -> tuple[list[FlashKernel], str]:
    """PyTorch's varlen kernel, or the reason for having none.

    Like flash-attn's, its window is measured from the end of a call's keys, so calls that are
    merged would need a different window for each sequence.
    """
    module = import_module("torch.nn.attention.varlen")  # slow, and only of use on a GPU
    function, version = module.varlen_attn, torch.__version__
    if lacks := _lacks(function, ("block_table", "seqused_k", "enable_gqa", "return_aux")):
        return [], f"varlen_attn of torch {version} lacks {lacks}"
    want_lse = module.AuxRequest(lse=True)
    return [VarlenKernel(function, want_lse, version, splits) for splits in _splits(function)], ""


def sdpa_kernels(device: torch.device) -> tuple[list[FlashKernel], str]:
    """PyTorch's SDPA operators, for any block size and dtype."""
    return [SdpaKernel(device)], ""


def _lacks(function: Callable[..., Any], wanted: tuple[str, ...]) -> str:
    """The wanted parameters that the function lacks, as text."""
    known = inspect.signature(function).parameters
    return ", ".join(name for name in wanted if name not in known)


def _splits(function: Callable[..., Any]) -> tuple[int | None, ...]:
    """Values of num_splits to try: one split keeps a result free of the rest of the batch.

    torch 2.12 has the parameter but refuses every value.
    """
    return (1, None) if "num_splits" in inspect.signature(function).parameters else (None,)


def _splits_text(num_splits: int | None) -> str:
    return "" if num_splits is None else f", num_splits={num_splits}"


def try_kernel(
    kernel: FlashKernel, device: torch.device, dtype: torch.dtype, block_size: int, head_dim: int
) -> str:
    """The reason why the kernel cannot be used, "" if it can.

    Compares a causal prefill, a non-causal prefill and two decodes over blocks out of order with
    plain attention. So it rejects top-left causality and other kinds of log-sum-exp.
    """
    most, generator = 2 * block_size, torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(shape, generator=generator).to(device, dtype)
        for shape in ((5, 2, head_dim), *[(2, block_size, 1, head_dim)] * 2)
    )
    k[0, -1] = 2 * q[3, :1]  # the last key counts for the first query that sees them all
    k[0, -2] = 2 * q[1, :1]  # and the last one of the second decode for it
    index, table = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [[1, 0]] * 2))
    spans = ((0, 0, (1,)), (1, 0, (1, 0)))
    chunk = KVChunk(k, v, index, index, index, table.to(device), spans)
    for lengths, visible in (
        (((3, 5), (2, most + 2)), [3, 4, 5, most, most]),
        (((1, 7), (1, most - 1)), [7, most - 1]),
    ):
        expected = _plain_attention(q[: len(visible)], k, v, visible, head_dim**-0.5)
        for call in plan_calls(chunk, lengths):
            assert isinstance(call.rows, slice)
            try:
                got = kernel.attend(q[call.rows], k, v, call, head_dim**-0.5)
            except (RuntimeError, TypeError, ValueError) as error:
                return _first_line(error)
            if problem := _difference(got, (expected[0][call.rows], expected[1][:, call.rows])):
                return problem
    return ""


def _difference(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> str:
    """How a kernel's output or log-sum-exp differs from the expected one, "" if it does not."""
    for name, ours, plain in zip(("output", "log-sum-exp"), got, expected, strict=True):
        if ours.shape != plain.shape:
            return f"its {name} has the shape {list(ours.shape)}, not {list(plain.shape)}"
        if not torch.allclose(ours.float(), plain, rtol=0, atol=TRIAL_TOLERANCE):
            return f"its {name} is not that of plain attention"
    return ""


def _plain_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: list[int], scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of row i over the first visible[i] keys of the blocks 1, 0 of one KV head."""
    keys, values = (x.float().flip(0).flatten(0, 2) for x in (k, v))
    scores = q.float().transpose(0, 1) @ keys.T * scale
    limits = torch.tensor(visible, device=q.device).unsqueeze(1)
    scores = scores.masked_fill(torch.arange(len(keys), device=q.device) >= limits, -torch.inf)
    return (scores.softmax(-1) @ values).transpose(0, 1), scores.logsumexp(-1)


def _first_line(error: Exception) -> str:
    """The error text, short enough for the plan."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:120]
