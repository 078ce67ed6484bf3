"""Ascend's operator against dense attention, by way of a stand-in that computes what the operator's
documentation says and complains where it says so. No such device has run the adapter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from paged_batches import Batch, context_of, make_batch, relative_error, split, whole
from torch import Tensor

from nanoengine.attention.ascend_kernel import ascend_kernels
from nanoengine.attention.flash_attention import FlashAttention, make_flash
from nanoengine.attention.select import ORDER, AttentionSetup, make_attention
from nanoengine.config.attention import AttentionConfig
from nanoengine.context import KVChunk
from nanoengine.errors import ConfigError

HEAD_DIM, BLOCK = 128, 128
CPU = torch.device("cpu")
Change = Callable[..., tuple[Tensor, Tensor]]


def operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: list[int] | None = None,
    actual_seq_lengths_kv: list[int] | None = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    num_key_value_heads: int = 0,
    scale: float = 1.0,
    input_layout: str = "BSH",
    block_size: int = 0,
    sparse_mode: int = 0,
    softmax_lse_flag: bool = False,
) -> tuple[Tensor, Tensor]:
    """npu_fused_infer_attention_score for paged KV and the layout TND."""
    assert input_layout == "TND" and softmax_lse_flag
    assert block_table is not None and block_table.dtype == torch.int32 and block_table.dim() == 2
    assert actual_seq_lengths is not None and actual_seq_lengths_kv is not None
    assert all(type(n) is int for n in (*actual_seq_lengths, *actual_seq_lengths_kv))
    for tensor in (query, key, value, block_table):
        assert tensor.is_contiguous()
    assert query.dtype == key.dtype == value.dtype and query.dtype in (torch.bfloat16, torch.half)
    num_tokens, heads, head_dim = query.shape
    assert heads == num_heads and head_dim == 128 and num_heads // num_key_value_heads <= 64
    assert key.shape == value.shape == (len(key), block_size, num_key_value_heads * head_dim)
    if block_size % 128 or block_size > 512:
        raise RuntimeError(f"block_size {block_size} is no multiple of 128 up to 512")
    assert sparse_mode in (0, 3)
    if sparse_mode == 3:
        assert atten_mask is not None and atten_mask.dtype == torch.bool
        assert torch.equal(atten_mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1))
    else:
        assert atten_mask is None
    assert (block_table >= 0).all() and (block_table < len(key)).all()
    assert actual_seq_lengths[-1] == num_tokens
    assert len(actual_seq_lengths) == len(actual_seq_lengths_kv) == len(block_table)
    out, lse = torch.zeros_like(query), torch.full((num_tokens, heads, 1), torch.inf)
    begin = 0
    for end, num_keys, table in zip(
        actual_seq_lengths, actual_seq_lengths_kv, block_table, strict=True
    ):
        blocks = table[: -(-num_keys // block_size)].long()
        keys, values = (
            pool[blocks].view(-1, num_key_value_heads, head_dim)[:num_keys].double()
            for pool in (key, value)
        )
        keys, values = (
            x.repeat_interleave(heads // num_key_value_heads, 1) for x in (keys, values)
        )
        scores = torch.einsum("qhd,khd->qhk", query[begin:end].double(), keys) * scale
        if sparse_mode == 3:
            past_the_last = num_keys - (end - begin) + 1
            hidden = torch.ones(end - begin, num_keys, dtype=torch.bool).triu(past_the_last)
            scores.masked_fill_(hidden[:, None], -torch.inf)
        out[begin:end] = torch.einsum("qhk,khd->qhd", scores.softmax(-1), values).to(query.dtype)
        lse[begin:end] = scores.logsumexp(-1, keepdim=True).float()
        begin = end
    return out, lse


def install(patch: pytest.MonkeyPatch, function: Change = operator) -> None:
    """A package torch_npu that has the operator and nothing else."""
    module: Any = ModuleType("torch_npu")
    module.__version__, module.npu_fused_infer_attention_score = "2.13.0", function
    patch.setitem(sys.modules, "torch_npu", module)


def made(dtype: torch.dtype, block: int = BLOCK) -> tuple[FlashAttention | None, str]:
    return make_flash(ascend_kernels, CPU, dtype, block, AttentionConfig(HEAD_DIM))


def batch(dtype: torch.dtype) -> Batch:
    """A prefill, a chunk after others, a decode; keys that end inside a block and at its end."""
    return make_batch(
        [150, 9, 1, 1], [150, 300, 257, 128], dtype=dtype, head_dim=HEAD_DIM, block_size=BLOCK
    )


def padded(chunk: KVChunk) -> KVChunk:
    """The same with block tables as an engine may pad them: by a block that there is not."""
    past = torch.arange(chunk.block_table.shape[1]) >= chunk.num_blocks[:, None]
    return replace(chunk, block_table=chunk.block_table.masked_fill(past, -1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_whole", [True, False], ids=["one chunk", "chunks"])
def test_equals_dense_attention(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, is_whole: bool
) -> None:
    install(monkeypatch)
    attention, reasons = made(dtype)
    assert attention is not None and not reasons
    assert attention.name == "npu_fused_infer_attention_score of torch_npu 2.13.0"
    given = batch(dtype)
    chunks = [padded(chunk) for chunk in (whole(given) if is_whole else split(given, seed=1))]
    assert len(chunks) == 1 or not is_whole
    found = attention.run(0, given.q, context_of(given, chunks))
    assert relative_error(found, given.reference()) < (0.02 if dtype == torch.bfloat16 else 0.003)


def _other_log(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = operator(*args, **options)
    return out, lse / torch.log(torch.tensor(2.0))


def _top_left(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    if options["sparse_mode"] == 3:
        ends = options["actual_seq_lengths"]
        options["actual_seq_lengths_kv"] = [b - a for a, b in zip([0, *ends], ends, strict=False)]
    return operator(*args, **options)


def _summed_keys(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Takes the lengths of keys for running sums, as it does without blocks."""
    ends = options["actual_seq_lengths_kv"]
    own = [max(1, b - a) for a, b in zip([0, *ends], ends, strict=False)]
    return operator(*args, **options | {"actual_seq_lengths_kv": own})


def _as_elsewhere(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = operator(*args, **options)
    return out, lse.permute(1, 0, 2)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (_other_log, "its log-sum-exp is not that of plain attention"),
        (_top_left, "is not that of plain attention"),
        (_summed_keys, "is not that of plain attention"),
        (_as_elsewhere, "its log-sum-exp has the shape"),
    ],
)
def test_an_operator_that_does_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, function: Change, reason: str
) -> None:
    install(monkeypatch, function)
    attention, reasons = made(torch.float16)
    assert attention is None and reason in reasons


def test_what_it_refuses_is_the_reason_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert made(torch.float16, 640)[1].endswith("block_size 640 is no multiple of 128 up to 512")
    monkeypatch.delattr("torch_npu.npu_fused_infer_attention_score")
    assert made(torch.float16)[1] == "torch_npu has no npu_fused_infer_attention_score"
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    assert made(torch.float16)[1].startswith("torch_npu cannot be imported")


def test_an_npu_takes_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """And plain PyTorch where a model is not for it."""
    install(monkeypatch)
    monkeypatch.setitem(ORDER, "cpu", ORDER["npu"])

    def name(head_dim: int = HEAD_DIM, block: int = BLOCK, wanted: str = "auto") -> str:
        setup = AttentionSetup(CPU, torch.bfloat16, block, AttentionConfig(head_dim))
        return make_attention(wanted, setup)[0].name

    assert name().startswith("npu_fused_infer")
    assert name(head_dim=64).startswith("SDPA")
    assert name(block=64).startswith("SDPA")
    with pytest.raises(ConfigError, match="ascend needs kvcache_block_size to be a multiple of 12"):
        name(block=64, wanted="ascend")
