"""Ascend's attention operator, torch_npu's npu_fused_infer_attention_score, as a flash kernel.

Written from the operator's documentation; no such device has run it. flash_kernels.py compares it
with plain attention when an engine starts, and merges its results.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from nanoengine.attention.flash_calls import KernelCall
from nanoengine.attention.flash_kernels import FlashKernel

OPERATOR = "npu_fused_infer_attention_score"
NO_MASK, BOTTOM_RIGHT_CAUSAL = 0, 3  # values of sparse_mode
MASK_SIZE = 2048  # of the one mask that a causal call takes, whatever its lengths


class AscendKernel:
    """The operator over paged KV, with sequences end to end (its layout TND)."""

    def __init__(self, function: Callable[..., Any], version: str, device: torch.device) -> None:
        self.name = f"{OPERATOR} of torch_npu {version}"
        self._function = function
        hidden = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool).triu(1)
        self._mask = hidden.to(device)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Lengths are lists of the host: those of queries are running sums, those of keys not. The
        padding of the block table, which may be negative, is made a block that exists.
        """
        out, lse = self._function(
            q.contiguous(),
            k.flatten(2),
            v.flatten(2),
            atten_mask=self._mask if call.causal else None,
            actual_seq_lengths=list(accumulate(queries for queries, _ in call.lengths)),
            actual_seq_lengths_kv=[keys for _, keys in call.lengths],
            block_table=call.block_table.clamp_min(0),
            num_heads=q.shape[1],
            num_key_value_heads=k.shape[2],
            scale=scale,
            input_layout="TND",
            block_size=k.shape[1],
            sparse_mode=BOTTOM_RIGHT_CAUSAL if call.causal else NO_MASK,
            softmax_lse_flag=True,
        )
        return out, lse.squeeze(-1).T


def ascend_kernels(device: torch.device) -> tuple[list[FlashKernel], str]:
    """The operator, or the reason for having none."""
    try:
        module = import_module("torch_npu")
    except (ImportError, OSError) as error:
        return [], f"torch_npu cannot be imported: {error}"
    function: Callable[..., Any] | None = getattr(module, OPERATOR, None)
    if function is None:
        return [], f"torch_npu has no {OPERATOR}"
    version = getattr(module, "__version__", "of unknown version")
    return [AscendKernel(function, version, device)], ""
