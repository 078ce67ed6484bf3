"""Products with weights packed for AVX512-BF16 or AMX, and fused operators, in `cpu_linear.c`.

Owns the packed copy of a weight and the C calling convention. Knows no layer and no model. The
layout, and the rule that makes a row's bits independent of its batch, are in `cpu_linear.c`.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from nanoengine.errors import EngineError
from nanoengine.kernels.c_build import KernelBuildError, cpu_flags, load_library
from nanoengine.kernels.call_tape import CallTape
from nanoengine.kernels.cpu_kernels import Workspace
from nanoengine.models.experts import Router

SOURCE = Path(__file__).with_name("cpu_linear.c")
# As in cpu_linear.c: outputs of a panel, lanes of a vector, k of a matrix tile, bytes of normed
# rows that fit a thread, and the epilogues.
_PANEL = 64
_LANES = 16
_TILE_K = 32
_PRIVATE_BYTES = 64 << 10
STORE, ADD, FLOAT = 0, 1, 2
# One field per member of weight_t and call_t in cpu_linear.c, in that order.
_WEIGHT = struct.Struct("=3Q4qd")
_CALL = struct.Struct("=4Q5q")
# The same of experts_t.
_EXPERTS = struct.Struct("=11Q4q")
_ARENA_BYTES = 64 << 20
_PAGE_BYTES = 2 << 20


def is_supported() -> bool:
    """Whether this CPU multiplies pairs of bfloat16 (AVX512-BF16)."""
    return b"avx512_bf16" in cpu_flags().split()


class WeightArena:
    """Allocates memory for packed weights, side by side in large pieces backed by huge pages.

    A product at batch 1 reads every weight once; pages of 2 MiB make that a tenth faster than pages
    of 4 KiB.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._advise = library.advise_huge_pages
        self._advise.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def allocate(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] of undefined content, at a multiple of 64 bytes."""
        if self._used + num_bytes > len(self._piece):
            self._new_piece(max(num_bytes, _ARENA_BYTES))
        begin = self._used
        self._used += -(-num_bytes // 64) * 64
        return self._piece[begin : begin + num_bytes]

    def _new_piece(self, num_bytes: int) -> None:
        """Allocate whole pages: a page that is never touched costs nothing."""
        memory = torch.empty(num_bytes + 2 * _PAGE_BYTES, dtype=torch.uint8)
        skip = -memory.data_ptr() % _PAGE_BYTES
        self._piece = memory[skip : skip + -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES]
        self._used = 0
        self._advise(self._piece.data_ptr(), len(self._piece))


class PackedWeight:
    """A packed weight as C sees it. It keeps the tensors alive that it points to."""

    def __init__(
        self,
        library: ctypes.CDLL,
        tape: CallTape,
        panels: Tensor,
        bias: Tensor | None,
        norm: tuple[Tensor, float] | None,
        shape: tuple[int, int],
        is_gated: bool,
        is_tiled: bool,
    ) -> None:
        norm_weight, eps = norm or (None, 0.0)
        self.library, self.panels, self.bias, self.norm_weight = library, panels, bias, norm_weight
        self.outputs, self.inputs = shape
        self.is_gated = is_gated
        pointers = (0 if t is None else t.data_ptr() for t in (panels, bias, norm_weight))
        record = _WEIGHT.pack(*pointers, *shape, is_gated, is_tiled, eps)
        self._record = ctypes.create_string_buffer(record)
        self.address = ctypes.addressof(self._record)
        self.tape = tape

    def multiply(self, x: Tensor, out: Tensor, epilogue: int) -> None:
        """out (epilogue) norm(x) W^T; x [tokens, inputs] and out [tokens, outputs] may have strides
        between rows.
        """
        call, normed = self.call(x, out, epilogue)
        self.tape.call(self.library.linear, (call, 1), x, out, normed)

    def call(self, x: Tensor, out: Tensor, epilogue: int) -> tuple[bytes, Tensor | None]:
        """The arguments of `multiply` as C takes them, and the scratch memory they point to."""
        tokens, width = x.shape
        x_stride, step = x.stride()
        if width != self.inputs or x.dtype is not torch.bfloat16 or step != 1:
            raise EngineError(
                f"a packed product takes bfloat16 rows of {self.inputs} values side by side: got "
                f"{x.dtype}, shape {tuple(x.shape)}, strides {x.stride()}"
            )
        if epilogue == ADD and (
            out.shape != (tokens, self.outputs)
            or out.dtype is not torch.bfloat16
            or out.stride(1) != 1
        ):
            raise EngineError(
                f"a product of {tokens} rows is added to bfloat16 rows of {self.outputs} values "
                f"side by side: got {out.dtype}, shape {tuple(out.shape)}, strides {out.stride()}"
            )
        normed = None
        if self.norm_weight is not None and tokens * width * 2 > _PRIVATE_BYTES:
            normed = x.new_empty(tokens, width)
        packed = _CALL.pack(
            self.address,
            x.data_ptr(),
            out.data_ptr(),
            0 if normed is None else normed.data_ptr(),
            x_stride * 2,
            out.stride(0) * out.itemsize,
            tokens,
            epilogue,
            torch.get_num_threads(),
        )
        return packed, normed


class PackedLinear:
    """norm(x) @ weight.T + bias: fp32 sums, rounded once. Made by `CpuLinear.pack`."""

    def __init__(self, weight: PackedWeight) -> None:
        self.weight = weight
        self.in_features, self.out_features = weight.inputs, weight.outputs

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in_features] -> [tokens, out_features], bfloat16."""
        out = x.new_empty(x.shape[0], self.out_features)
        self.weight.multiply(x, out, STORE)
        return out

    def in_float(self, x: Tensor) -> Tensor:
        """[tokens, in_features] -> [tokens, out_features], the float32 sums themselves."""
        out = torch.empty(x.shape[0], self.out_features)
        self.weight.multiply(x, out, FLOAT)
        return out

    def gather_rows(self, token_ids: Tensor) -> Tensor:
        """Rows of the weight itself, [n, in_features]; int64 [n], contiguous. For tied embeddings.

        Raises EngineError for an id outside the rows.
        """
        if token_ids.dtype is not torch.int64 or not token_ids.is_contiguous():
            raise EngineError(f"token ids are contiguous int64, got {token_ids.dtype}")
        weight = self.weight
        out = torch.empty(len(token_ids), weight.inputs, dtype=torch.bfloat16)
        if weight.library.gather_rows(
            weight.address,
            token_ids.data_ptr(),
            len(token_ids),
            out.data_ptr(),
            torch.get_num_threads(),
        ):
            raise EngineError(f"a token id lies outside the {weight.outputs} rows of the embedding")
        return out


class PackedGateUp:
    """silu(gate(x)) * up(x) of two fused products. Made by `CpuLinear.pack_gate_up`."""

    def __init__(self, weight: PackedWeight) -> None:
        self.weight = weight
        self.in_features, self.out_features = weight.inputs, weight.outputs

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in_features] -> [tokens, out_features], bfloat16.

        Rounds where the unfused steps do: both products, the silu, and the result.
        """
        out = x.new_empty(x.shape[0], self.out_features)
        self.weight.multiply(x, out, STORE)
        return out


class PackedAfterAttention:
    """LayerOps.after_attention in one call of C. Made by `CpuLinear.after_attention`.

    The next layer overwrites the result.
    """

    def __init__(
        self,
        workspace: Workspace,
        weights: tuple[PackedWeight, PackedWeight, PackedWeight],
        next_qkv: PackedWeight | None,
    ) -> None:
        """weights: of out, of gate and up, and of down."""
        self._out, self._gate_up, self._down = weights
        self._next_qkv = next_qkv
        self._workspace = workspace

    def __call__(self, x: Tensor, attended: Tensor) -> Tensor:
        """x [tokens, hidden], attended [tokens, heads x head_dim]; bfloat16, as is the result."""
        tokens = x.shape[0]
        gated = self._buffer("gated", tokens, self._gate_up)
        steps = [
            self._out.call(attended, x, ADD),
            self._gate_up.call(x, gated, STORE),
            self._down.call(gated, x, ADD),
        ]
        result = x
        if self._next_qkv is not None:
            result = self._buffer("qkv", tokens, self._next_qkv)
            steps.append(self._next_qkv.call(x, result, STORE))
        calls = b"".join(call for call, _ in steps)
        held = x, attended, gated, result, steps
        self._out.tape.call(self._out.library.linear, (calls, len(steps)), held)
        return result

    def _buffer(self, name: str, tokens: int, weight: PackedWeight) -> Tensor:
        return self._workspace.buffer(name, (tokens, weight.outputs), torch.bfloat16)


class PackedExperts:
    """The experts of a layer, for all rows in one call of C. Made by `CpuLinear.experts`."""

    def __init__(
        self,
        workspace: Workspace,
        router: Router,
        experts: Sequence[tuple[PackedGateUp, PackedLinear]],
    ) -> None:
        self._workspace, self._router, self._experts = workspace, router, experts
        addresses = ([each.weight.address for each in part] for part in zip(*experts, strict=True))
        self._gate_up, self._down = (torch.tensor(part) for part in addresses)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden], bfloat16. Rounds where `models.experts` does."""
        ids, weights = self._router(x)
        tokens, top_k = ids.shape
        gate_up, down = (each.weight for each in self._experts[0])
        if x.dtype is not torch.bfloat16 or x.shape[1] != gate_up.inputs or not x.is_contiguous():
            raise EngineError(
                f"packed experts take contiguous bfloat16 rows of {gate_up.inputs} values: got "
                f"{x.dtype}, shape {tuple(x.shape)}, strides {x.stride()}"
            )
        choices, count, buffer = tokens * top_k, len(self._experts), self._workspace.buffer
        out = torch.empty_like(x)
        held = (
            *(self._gate_up, self._down, x, ids.contiguous(), weights.contiguous(), out),
            buffer("sorted", (choices, gate_up.inputs), torch.bfloat16),
            buffer("by expert", (choices, down.inputs), torch.bfloat16),
            buffer("places", (choices,), torch.int64),
            buffer("starts", (count + 1,), torch.int64),
            buffer("calls", (2 * min(count, choices), _CALL.size), torch.uint8),
        )
        numbers = count, top_k, tokens, torch.get_num_threads()
        packed = _EXPERTS.pack(*(tensor.data_ptr() for tensor in held), *numbers)
        gate_up.tape.call(gate_up.library.experts, (packed,), held)
        return out


class CpuLinear:
    """Bound C functions, and the memory that packed weights go to."""

    def __init__(self, library: ctypes.CDLL, tape: CallTape) -> None:
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        self._library = library
        library.linear.argtypes = [ctypes.c_char_p, integer]
        library.linear.restype = None
        library.experts.argtypes = [ctypes.c_char_p]
        library.experts.restype = None
        library.gather_rows.argtypes = [pointer, pointer, integer, pointer, integer]
        library.pack.argtypes = [pointer, pointer, integer, integer, integer]
        library.pack.restype = None
        self._arena = WeightArena(library)
        self._workspace = Workspace()
        self._tape = tape
        self._has_tiles = library.allow_tiles() == 0

    @classmethod
    def load(
        cls, tape: CallTape, folder: Path | None = None, extra_cflags: tuple[str, ...] = ()
    ) -> CpuLinear:
        """Compile (or take from the cache) and bind.

        Raises KernelBuildError with the reason: this CPU, or a compiler that is too old for it.
        """
        if not is_supported():
            raise KernelBuildError("this CPU has no AVX512-BF16: oneDNN multiplies instead")
        library = load_library(SOURCE, folder, extra_cflags)
        if not library.supported():
            raise KernelBuildError("the C compiler knows no AVX512-BF16: install gcc 10 or newer")
        return cls(library, tape)

    def pack(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        norm: tuple[Tensor, float] | None = None,
    ) -> PackedLinear:
        """Pack weight [outputs, inputs] and bias [outputs], both bfloat16 on the CPU.

        norm: (weight [inputs], eps) of an RMSNorm of the activations before the product.
        """
        return PackedLinear(self._pack((weight,), () if bias is None else (bias,), norm))

    def pack_gate_up(
        self,
        gate: Tensor,
        up: Tensor,
        biases: tuple[Tensor, Tensor] | None = None,
        norm: tuple[Tensor, float] | None = None,
    ) -> PackedGateUp:
        """Pack gate and up, each [outputs, inputs], into one weight; else as `pack`."""
        return PackedGateUp(self._pack((gate, up), biases or (), norm))

    def experts(
        self, router: Router, experts: Sequence[tuple[PackedGateUp, PackedLinear]]
    ) -> PackedExperts:
        """Experts of gate, up and down, without norms and biases."""
        return PackedExperts(self._workspace, router, experts)

    def after_attention(
        self,
        out: PackedLinear,
        gate_up: PackedGateUp,
        down: PackedLinear,
        next_qkv: PackedLinear | None,
    ) -> PackedAfterAttention:
        """As LayerOps.after_attention."""
        weights = out.weight, gate_up.weight, down.weight
        next_weight = None if next_qkv is None else next_qkv.weight
        return PackedAfterAttention(self._workspace, weights, next_weight)

    def _pack(
        self,
        weights: tuple[Tensor, ...],
        biases: tuple[Tensor, ...],
        norm: tuple[Tensor, float] | None,
    ) -> PackedWeight:
        shape = weights[0].shape
        for weight in weights:
            _check(weight, shape)
        for bias in biases:
            _check(bias, shape[:1])
        if norm is not None:
            _check(norm[0], shape[1:])
        outputs, inputs = shape
        columns = -(-outputs // _LANES) * _LANES * len(weights)
        num_panels = -(-columns // _PANEL)
        panels = self._arena.allocate(num_panels * _PANEL * -(-inputs // 2) * 4)
        if inputs % 2 or num_panels * _PANEL != outputs * len(weights):
            panels.zero_()  # products read the padding, too
        packed = PackedWeight(
            self._library,
            self._tape,
            panels,
            _pack_biases(biases, num_panels * _PANEL) if biases else None,
            norm and (norm[0].contiguous(), norm[1]),
            (outputs, inputs),
            len(weights) == 2,
            self._has_tiles and inputs % _TILE_K == 0,
        )
        for which, weight in enumerate(weights):
            rows = weight.contiguous()
            self._library.pack(
                packed.address, rows.data_ptr(), inputs, which, torch.get_num_threads()
            )
        return packed


def _pack_biases(biases: tuple[Tensor, ...], columns: int) -> Tensor:
    """float32 [columns], in the order of the panels: vectors of gate and up alternate."""
    pad = -len(biases[0]) % _LANES
    parts = [functional.pad(bias.float(), (0, pad)).view(-1, _LANES) for bias in biases]
    packed = torch.stack(parts, dim=1).flatten()
    return functional.pad(packed, (0, columns - len(packed)))


def _check(weight: Tensor, shape: torch.Size) -> None:
    if (
        weight.dtype is not torch.bfloat16
        or weight.device.type != "cpu"
        or weight.shape != shape
        or 0 in shape
    ):
        raise EngineError(
            f"weights to pack are bfloat16 on the CPU, here of shape {tuple(shape)}: got "
            f"{weight.dtype} on {weight.device}, shape {tuple(weight.shape)}"
        )
