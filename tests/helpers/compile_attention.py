"""Compiles Triton attention and fused kernels for GPUs that need not be here, as they are launched,
and says in JSON, a line for each kernel, what became of it:
`python compile_attention.py DTYPE,KV_HEADS,GROUP,HEAD_DIM CAPABILITIES`; of shapes several with /.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
from compile_codes import compiled, spilled_bytes
from paged_batches import context_of, make_batch, whole
from torch import Tensor

from nanoengine.attention import triton_attention
from nanoengine.attention.triton_attention import TritonAttention
from nanoengine.config.attention import AttentionConfig
from nanoengine.context import KVTarget
from nanoengine.kernels.triton_kernels import TritonKernels

SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}  # of a program, at most
CPU = torch.device("cpu")


def attention(shape: tuple[torch.dtype, int, int, int]) -> Callable[[], None]:
    """A decode; one that checks guesses, with mass and a softcap; a prompt; one with a window and a
    softcap.
    """
    dtype, kv_heads, group, head_dim = shape
    how = {"dtype": dtype, "kv_heads": kv_heads, "group": group, "head_dim": head_dim}

    def run(num_queries: int, config: AttentionConfig, has_mass: bool) -> None:
        batch = make_batch([num_queries], [700], block_size=256, **how)
        mass = torch.zeros(1, 3) if has_mass else None
        backend = TritonAttention(config, dtype, CPU, num_queries)
        backend.run(0, batch.q, context_of(batch, whole(batch), mass))

    def calls() -> None:
        plain = AttentionConfig(head_dim)
        run(1, plain, False)
        run(16, AttentionConfig(head_dim, softcap=50.0), True)
        run(300, plain, False)
        run(300, AttentionConfig(head_dim, windows=(200,), softcap=50.0), False)

    return calls


def fused(shape: tuple[torch.dtype, int, int, int]) -> Callable[[], None]:
    """What lies between products."""
    dtype, kv_heads, group, head_dim = shape
    kernels, heads, tokens = TritonKernels(), kv_heads * group, 4

    def made(*sizes: int) -> Tensor:
        return torch.zeros(sizes, dtype=dtype)

    def calls() -> None:
        hidden = heads * head_dim
        x, weight = made(tokens, hidden), made(hidden)
        kernels.rms_norm(x, weight, 1e-6, torch.empty_like(x))
        kernels.rms_norm(x, weight.float(), 1e-6, torch.empty_like(x))
        kernels.add_rms_norm(x, x.clone(), weight, 1e-6, torch.empty_like(x))
        q, k = made(tokens, heads, head_dim), made(tokens, kv_heads, head_dim)
        kernels.rms_norm(q, made(head_dim), 1e-6, torch.empty_like(q))
        angles = torch.zeros(tokens, 1, head_dim // 2)
        slots = torch.zeros(tokens, dtype=torch.int64)
        for v_slots in (slots, None):
            target = KVTarget(made(512, kv_heads, head_dim), slots, v_slots)
            kernels.rope_store(q, k, k, angles, angles, target)
        for activation in ("silu", "gelu_pytorch_tanh", "clamped_swiglu"):
            kernels.gate_mul(made(tokens, 2 * hidden), activation, made(tokens, hidden))

    return calls


def main(shapes: str, capabilities: str) -> None:
    for name in shapes.split("/"):
        dtype, *sizes = name.split(",")
        shape = (getattr(torch, dtype), *map(int, sizes))
        for capability in map(int, capabilities.split(",")):
            triton_attention._shared_memory = lambda _, kib=SHARED_KIB[capability]: kib << 10
            triton_attention.copies_boxes = lambda _, number=capability: number >= 90
            for calls in (attention(shape), fused(shape)):
                for made in compiled(calls, capability):
                    found = {
                        "shape": name,
                        "capability": capability,
                        "kernel": made.metadata.name,
                        "warps": made.metadata.num_warps,
                        "shared_kib": made.metadata.shared / 1024,
                        "most_kib": SHARED_KIB[capability],
                        "spilled": spilled_bytes(made),
                    }
                    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
