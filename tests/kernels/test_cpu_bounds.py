"""The C kernels touch nothing past their tensors, which end where memory may not be read.

Such a read ends the process, so it happens in one of its own.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from marks import BUILDS, EMULATED, needs_compiler
from paged_batches import chunk_of, int32, make_batch
from torch import Tensor

from nanoengine.context import SoftmaxState
from nanoengine.kernels import cpu_linear
from nanoengine.kernels.call_tape import CallTape
from nanoengine.kernels.cpu_kernels import CpuKernels, MassBuffers
from nanoengine.kernels.cpu_linear import CpuLinear
from nanoengine.kernels.packed_weight import ADD

# Without AVX512-BF16 its instructions are done in C: the reads are the same.
MACHINES = BUILDS if cpu_linear.is_supported() else EMULATED
PAGE = mmap.PAGESIZE
PROT_NONE = 0


def guarded(values: Tensor) -> Tensor:
    """A copy whose last byte is the last one before a page that may not be touched."""
    size = values.numel() * values.itemsize
    whole = -(-size // PAGE) * PAGE
    memory = mmap.mmap(-1, whole + PAGE)
    raw = torch.frombuffer(memory, dtype=torch.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(raw.data_ptr() + whole), PAGE, PROT_NONE) == 0
    out = raw[whole - size : whole].view(values.dtype).view(values.shape)
    return out.copy_(values)


def products(folder: Path, flags: tuple[str, ...]) -> None:
    packer = CpuLinear.load(CallTape(), folder, flags)
    weight = torch.randn(1500, 96).bfloat16()
    linear, gate_up = packer.pack(weight), packer.pack_gate_up(weight, weight)
    for tokens in (1, 5, 16, 17, 33, 70):
        x, residual = (guarded(torch.randn(tokens, n).bfloat16()) for n in (96, 1500))
        want = residual + linear(x.clone())
        linear.multiply(x, residual, ADD)
        assert torch.equal(residual, want)
        gate_up(x)


def attention(folder: Path, flags: tuple[str, ...]) -> None:
    kernels = CpuKernels.load(folder, flags)
    for block_size, q_len in ((5, 7), (5, 1), (16, 30), (70, 70), (1, 6)):
        batch = make_batch([q_len], [70], dtype=torch.bfloat16, block_size=block_size)
        # The sequence's last block, full, is the last of the pool.
        end, last = batch.tables[0][-1], len(batch.k_pool) - 1
        swapped = {end: last, last: end}
        order, table = (
            [swapped.get(b, b) for b in blocks] for blocks in (range(last + 1), batch.tables[0])
        )
        pools = (guarded(pool[order]) for pool in (batch.k_pool, batch.v_pool))
        batch = replace(
            batch, **dict(zip(("k_pool", "v_pool"), pools, strict=True)), tables=[table]
        )
        q = guarded(batch.q.contiguous())
        out = guarded(torch.zeros_like(q))
        state = SoftmaxState(*(guarded(torch.zeros(q.shape[:n])) for n in (2, 2, 3)))
        lengths = batch.query_start(), int32(batch.kv_lens)
        whole = chunk_of(batch, {0: (0, len(table))})
        mass = MassBuffers(
            guarded(torch.zeros(1, len(table))), guarded(torch.zeros(2, *q.shape[:2], len(table)))
        )
        kernels.attend(q, whole, *lengths, state, batch.scale, True, out, mass=mass)
        assert (out.double() - batch.reference()).abs().max() < 0.05
        assert (mass.total.double() - batch.mass()).abs().max() < 0.05 * q_len


@needs_compiler
@pytest.mark.parametrize("build", MACHINES)
def test_nothing_past_the_end_is_touched(build_folder: Path, build: str) -> None:
    command = [sys.executable, __file__, str(build_folder), *MACHINES[build]]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # with our helpers
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


if __name__ == "__main__":
    cpu_linear.is_supported = lambda: True
    products(Path(sys.argv[1]), tuple(sys.argv[2:]))
    attention(Path(sys.argv[1]), tuple(sys.argv[2:]))
