"""Calls the kernels of `cpu_kernels.c`: attention, and small operators between products.

Owns their C calling convention; c_build compiles the file. Knows no sequence, no scheduler and no
model: it sees tensors and one KVChunk at a time. `cpu_attention.h` describes the arithmetic, and
why the result does not depend on how KV is split into chunks.
"""

from __future__ import annotations

import ctypes
import math
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nanoengine.context import KVChunk, KVTarget, SoftmaxState
from nanoengine.errors import EngineError
from nanoengine.kernels.c_build import SOURCE, load_library
from nanoengine.kernels.call_tape import CallTape
from nanoengine.models.draw import Draws, likeliest

# One field per member, in that order, of attend_args in cpu_attention.h; of norm_args, rope_args
# and pair_args in cpu_operators.h; of draw_args and likeliest_args in cpu_draw.h.
_ATTEND_ARGS = struct.Struct("=14Q16q2Q3q2d")
_NORM_ARGS = struct.Struct("=3Q10qd")
_ROPE_ARGS = struct.Struct("=8Q9q")
_PAIR_ARGS = struct.Struct("=3Q6q")
_DRAW_ARGS = struct.Struct("=4Q5q")
_LIKELIEST_ARGS = struct.Struct("=3Q5q")
_CANDIDATE_BYTES = 16
MOST_SORTED = 256  # tokens of a row that are put in order one after the other
_ALL_KEYS = (1 << 31) - 1  # INT32_MAX
# What gates go through, by the names of activations.GATED, as in cpu_vectors.h.
ACTIVATIONS = {"silu": 1, "gelu_pytorch_tanh": 2, "clamped_swiglu": 3, "relu2": 4}
_IS_BF16 = {torch.float32: 0, torch.bfloat16: 1}


class Workspace:
    """Buffers that are written and read within one step; allocated anew only to grow."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._last: dict[str, Tensor] = {}  # views: the layers of a step ask for the same ones

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The buffer of this name as `shape`; its content is undefined.

        An older buffer stays valid when a larger one replaces it.
        """
        last = self._last.get(name)
        if last is not None and last.shape == shape:
            return last
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = torch.empty(size, dtype=dtype)
        last = self._last[name] = buffer[:size].view(shape)
        return last


@dataclass(frozen=True, slots=True)
class MassBuffers:
    """Where `attend` adds attention mass, and what it keeps of a layer for that.

    total  float32 [n, blocks] with the last dimension contiguous: block_mass of a ForwardContext;
           no sequence may have keys past the last block
    kept   float32 [2, tokens, heads, blocks], contiguous: the maximum and the sum of each row over
           each block, from the first chunk of a layer to the last; undefined before
    """

    total: Tensor
    kept: Tensor

    @property
    def packed(self) -> tuple[int, ...]:
        """As attend_args has them: pointers and sizes."""
        total = self.total
        return total.data_ptr(), self.kept.data_ptr(), *total.shape, total.stride(0)


class CpuKernels:
    """Bound C functions. Every call releases the GIL and runs on torch's own OpenMP threads."""

    def __init__(self, library: ctypes.CDLL, tape: CallTape | None = None) -> None:
        """tape: records the calls; by default one of its own."""
        self.tape = tape or CallTape(library)
        self._attend, self._rms_norm = library.attend, library.rms_norm
        self._rope_store, self._rotate = library.rope_store, library.rotate
        self._draw, self._likeliest = library.draw, library.likeliest
        self._add, self._gate_mul = library.add, library.gate_mul
        self._sigmoid_mul = library.sigmoid_mul
        of_steps = self._attend, self._rms_norm, self._rope_store, self._rotate
        of_pairs = self._add, self._gate_mul, self._sigmoid_mul
        for function in (*of_steps, *of_pairs, self._draw, self._likeliest):
            function.argtypes = [ctypes.c_char_p]
        self._workspace = Workspace()
        self._argmax = library.argmax
        self._argmax.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 5
        self._has_tiles = library.allow_tiles() == 0
        library.isa.restype = ctypes.c_char_p
        self.isa: str = "amx_bf16" if self._has_tiles else library.isa().decode()

    @classmethod
    def load(
        cls,
        folder: Path | None = None,
        extra_cflags: tuple[str, ...] = (),
        tape: CallTape | None = None,
    ) -> CpuKernels:
        """Compile (or take from the cache) and bind; raises KernelBuildError with the reason."""
        return cls(load_library(SOURCE, folder, extra_cflags), tape)

    def attend(
        self,
        q: Tensor,
        chunk: KVChunk,
        query_start: Tensor,
        kv_lens: Tensor,
        state: SoftmaxState,
        scale: float,
        is_first: bool = False,
        out: Tensor | None = None,
        window: int | None = None,
        mass: MassBuffers | None = None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
    ) -> None:
        """Fold one chunk into the softmax state of the batch, in place. Raises EngineError.

        q                 [tokens, heads, head_dim], float32 or bfloat16; may be a strided view
        chunk             k and v of q's dtype
        query_start       int32 [n + 1], kv_lens int32 [n], of the whole batch
        state             of the batch's rows: -inf, 0 and 0 before the first chunk
        is_first          write those values first, over whatever the state holds
        out               if given, it becomes acc / row_sum afterwards: of q's shape and dtype,
                          contiguous; rows without keys give 0
        window            as in config.AttentionConfig, of this layer
        mass              if given, and the same for all chunks of a layer, the one with `out` adds
                          to its total what the blocks of all chunks got; only without a window
        sinks             float32 [heads], contiguous: is_first writes (sink, 1, 0) instead
        scale, softcap    as AttentionConfig.score_scale and softcap
        """
        k, v = chunk.k, chunk.v
        tokens, heads, head_dim = q.shape
        _, block_size, kv_heads, _ = k.shape
        token_stride, head_stride, _ = q.stride()
        is_bf16 = _checked_is_bf16(q, k, v)
        if mass is not None:
            assert window is None and max(kv_lens.tolist()) <= mass.total.shape[1] * block_size
        pointed_to = (
            *(q, k, v, chunk.seq_index, chunk.first_block, chunk.num_blocks, chunk.block_table),
            *(query_start, kv_lens, state.row_max, state.row_sum, state.acc),
        )
        packed = _ATTEND_ARGS.pack(
            *(tensor.data_ptr() for tensor in pointed_to),
            *(0 if tensor is None else tensor.data_ptr() for tensor in (out, sinks)),
            *(chunk.seq_index.shape[0], chunk.block_table.stride()[0]),
            *(token_stride, head_stride, k.stride()[0], v.stride()[0]),
            *(tokens, heads, kv_heads, head_dim, block_size),
            *(is_bf16, is_first, torch.get_num_threads(), self._has_tiles),
            min(window or _ALL_KEYS, _ALL_KEYS),
            *((0,) * 5 if mass is None else mass.packed),
            *(scale, softcap or 0.0),
        )
        self.tape.call(self._attend, packed, pointed_to, out, mass, sinks)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """out = x / rms(x) * weight over the last dimension, in the steps of LlamaRMSNorm; or, with
        a weight in float32, of Gemma3RMSNorm, which rounds the result alone.

        x, out  [tokens, dim] or [tokens, heads, dim], last dimension contiguous; may be the same
        """
        heads = x.shape[1] if x.dim() == 3 else 1
        packed = _NORM_ARGS.pack(
            *(x.data_ptr(), weight.data_ptr(), out.data_ptr()),
            *(x.shape[0], heads, x.shape[-1]),
            *(x.stride(0), x.stride(-2), out.stride(0), out.stride(-2)),
            *(_IS_BF16[x.dtype], _IS_BF16[weight.dtype], torch.get_num_threads(), eps),
        )
        self.tape.call(self._rms_norm, packed, x, weight, out)

    def rope_store(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, target: KVTarget
    ) -> None:
        """Rotate q and k in place (half-split rotary embedding), then store k and v in the pool.

        q                 [tokens, heads, head_dim]; k, v [tokens, kv_heads, head_dim]; may be views
                          in which heads are adjacent, such as parts of a fused projection
        cos, sin          float32, contiguous, tokens * head_dim / 2 values
        target            slot -1: do not store; v_slots None: store k alone
        """
        pool, k_slots, v_slots = target.pool, target.k_slots, target.v_slots
        tokens, heads, head_dim = q.shape
        packed = _ROPE_ARGS.pack(
            *(q.data_ptr(), k.data_ptr(), v.data_ptr(), cos.data_ptr(), sin.data_ptr()),
            *(k_slots.data_ptr(), 0 if v_slots is None else v_slots.data_ptr(), pool.data_ptr()),
            *(tokens, heads, k.shape[1], head_dim, q.stride(0), k.stride(0), v.stride(0)),
            *(_IS_BF16[q.dtype], torch.get_num_threads()),
        )
        self.tape.call(self._rope_store, packed, q, k, v, cos, sin, k_slots, v_slots, pool)

    def rotate(self, q: Tensor, cos: Tensor, sin: Tensor) -> None:
        """As rope_store, of q alone."""
        tokens, heads, head_dim = q.shape
        packed = _ROPE_ARGS.pack(
            *(q.data_ptr(), 0, 0, cos.data_ptr(), sin.data_ptr(), 0, 0, 0),
            *(tokens, heads, 0, head_dim, q.stride(0), 0, 0),
            *(_IS_BF16[q.dtype], torch.get_num_threads()),
        )
        self.tape.call(self._rotate, packed, q, cos, sin)

    def argmax(self, x: Tensor) -> Tensor:
        """int64 [rows]: where each row of x [rows, dim] is largest, the first place if several."""
        out = torch.empty(x.shape[0], dtype=torch.int64)
        is_bf16, threads = _IS_BF16[x.dtype], torch.get_num_threads()
        self._argmax(x.data_ptr(), out.data_ptr(), *x.shape, x.stride(0), is_bf16, threads)
        return out

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        """As draw.draw, of logits in float32 or bfloat16, rows of which are contiguous."""
        rows, vocab = logits.shape
        threads, scratch = self._candidates(rows, vocab)
        rules, out = draws.rules.contiguous(), torch.empty(rows, dtype=torch.int64)
        assert rules.dtype is torch.float64 and rules.shape == (6, rows) and logits.stride(1) == 1
        packed = _DRAW_ARGS.pack(
            *(logits.data_ptr(), rules.data_ptr(), out.data_ptr(), scratch),
            *(rows, vocab, logits.stride(0), _IS_BF16[logits.dtype], threads),
        )
        self._draw(packed)
        return out

    def likeliest(self, logprobs: Tensor, count: int) -> Tensor:
        """As draw.likeliest; rows are contiguous."""
        if count > MOST_SORTED:
            return likeliest(logprobs, count)
        (rows, vocab), out = logprobs.shape, torch.empty(len(logprobs), count, dtype=torch.int64)
        if not out.numel():
            return out
        threads, scratch = self._candidates(rows, vocab)
        assert logprobs.dtype is torch.float32 and logprobs.stride(1) == 1 and count <= vocab
        self._likeliest(
            _LIKELIEST_ARGS.pack(
                *(logprobs.data_ptr(), out.data_ptr(), scratch),
                *(rows, vocab, logprobs.stride(0), count, threads),
            )
        )
        return out

    def _candidates(self, rows: int, width: int) -> tuple[int, int]:
        """How many threads look for candidates in rows of this width, and where they note them."""
        threads = min(torch.get_num_threads(), max(rows, 1))
        shape = threads, 2 * width, _CANDIDATE_BYTES
        return threads, self._workspace.buffer("candidates", shape, torch.uint8).data_ptr()

    def add(self, x: Tensor, summand: Tensor, gate: Tensor | None = None) -> None:
        """As LayerOps.accumulate."""
        tokens, dim = x.shape
        assert summand.shape == x.shape and x.is_contiguous() and summand.is_contiguous()
        if gate is not None:
            assert gate.dtype is torch.float32
            assert gate.shape == (tokens, 1) and gate.is_contiguous()
        packed = _PAIR_ARGS.pack(
            *(x.data_ptr(), summand.data_ptr(), 0 if gate is None else gate.data_ptr()),
            *(tokens, dim, dim, 0, _IS_BF16[x.dtype], torch.get_num_threads()),
        )
        self.tape.call(self._add, packed, x, summand, gate)

    def gate_mul(self, gate_up: Tensor, activation: str, out: Tensor) -> None:
        """out = activation(gate) * up, as of activations.GATED; clamped_swiglu in fp32 until out is
        rounded. gate_up is [tokens, 2 * dim], out [tokens, dim] contiguous.
        """
        packed = _PAIR_ARGS.pack(
            *(out.data_ptr(), gate_up.data_ptr(), 0, *out.shape, gate_up.stride(0)),
            *(ACTIVATIONS[activation], _IS_BF16[gate_up.dtype], torch.get_num_threads()),
        )
        self.tape.call(self._gate_mul, packed, gate_up, out)

    def sigmoid_mul(self, x: Tensor, gate: Tensor, out: Tensor) -> None:
        """out = x * sigmoid(gate); x and out are [tokens, heads x head_dim], contiguous, gate
        [tokens, heads, head_dim] with adjacent heads.
        """
        packed = _PAIR_ARGS.pack(
            *(out.data_ptr(), x.data_ptr(), gate.data_ptr(), *out.shape, gate.stride(0)),
            *(0, _IS_BF16[x.dtype], torch.get_num_threads()),
        )
        self.tape.call(self._sigmoid_mul, packed, x, gate, out)


def _checked_is_bf16(q: Tensor, k: Tensor, v: Tensor) -> int:
    """1 for bfloat16, 0 for float32. Raises EngineError for other dtypes, or several."""
    is_bf16 = _IS_BF16.get(q.dtype)
    if is_bf16 is None or k.dtype != q.dtype or v.dtype != q.dtype:
        raise EngineError(
            f"CPU attention takes q, k and v of one dtype, float32 or bfloat16: "
            f"got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    return is_bf16
