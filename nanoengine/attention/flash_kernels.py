"""The flash kernels that there are, and the trial that shows whether a device can use one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from nanoengine.attention.flash_calls import KernelCall, plan_calls
from nanoengine.context import KVChunk

TRIAL_TOLERANCE = 0.05


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


FindKernels = Callable[[torch.device], tuple[list[FlashKernel], str]]


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
