"""Products with packed weights, of numbers or of codes, and fused operators, in `cpu_linear.c`.

Owns the packed copy of a weight and the C calling convention. Knows no layer and no model. The
layout, and the rule that makes a row's bits independent of its batch, are in `cpu_linear.c`.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from nanoengine.errors import EngineError
from nanoengine.kernels.c_build import KernelBuildError, cpu_flags, load_library
from nanoengine.kernels.call_tape import CallTape
from nanoengine.kernels.cpu_kernels import Workspace
from nanoengine.models.experts import Router
from nanoengine.models.stored_codes import FORMATS, HELD_BYTES, CodedRows, CodedWeight, Weight

SOURCE = Path(__file__).with_name("cpu_linear.c")
# As in cpu_linear.c: outputs of a panel, outputs of gate and up that take turns, k of a matrix
# tile, bytes of normed rows that fit a thread, the epilogues, and the modes of the dtypes.
_PANEL = 64
_TURN = 16
_TILE_K = 32
_PRIVATE_BYTES = 64 << 10
STORE, ADD, FLOAT = 0, 1, 2
_MODES = {torch.float32: "F32", torch.bfloat16: "BF16_PAIRS"}
# The dtypes of numbers that are held in 16 bits and multiplied in float32.
_NARROW = {torch.bfloat16: "BF16", torch.float16: "F16"}
# What gates of a packed weight go through, by transformers' names, as in cpu_vectors.h.
ACTIVATIONS = {"silu": 1, "gelu_pytorch_tanh": 2}
# The formats of cpu_codes.h, in its order.
_FORMATS = {name: number for number, name in enumerate(("", *FORMATS, *_NARROW.values()))}
_GROUP = 32
# One field per member of weight_t and call_t in cpu_linear.c, in that order.
_WEIGHT = struct.Struct("=3Q5qd")
_CALL = struct.Struct("=4Q5q")
# The same of experts_t.
_EXPERTS = struct.Struct("=11Q4q")
_ARENA_BYTES = 64 << 20
_PAGE_BYTES = 2 << 20


def is_supported() -> bool:
    """Whether this CPU multiplies pairs of bfloat16 (AVX512-BF16); float32 runs on all."""
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
        activation: str,
        is_tiled: bool,
        dtype: torch.dtype,
        code_format: str,
    ) -> None:
        norm_weight, eps = norm or (None, 0.0)
        self.dtype = dtype
        self.library, self.panels, self.bias, self.norm_weight = library, panels, bias, norm_weight
        self.outputs, self.inputs = shape
        pointers = (0 if t is None else t.data_ptr() for t in (panels, bias, norm_weight))
        kinds = ACTIVATIONS.get(activation, 0), is_tiled, _FORMATS[code_format]
        record = _WEIGHT.pack(*pointers, *shape, *kinds, eps)
        self._record = ctypes.create_string_buffer(record)
        self.address = ctypes.addressof(self._record)
        self.tape = tape

    def call(self, x: Tensor, out: Tensor, epilogue: int) -> tuple[bytes, Tensor | None]:
        """out (epilogue) norm(x) W^T as C takes it, and the scratch memory that points to.

        x [tokens, inputs] and out [tokens, outputs] may have strides between rows.
        """
        tokens, width = x.shape
        x_stride, step = x.stride()
        name = str(self.dtype).removeprefix("torch.")
        if width != self.inputs or x.dtype is not self.dtype or step != 1:
            raise EngineError(
                f"a packed product takes {name} rows of {self.inputs} values side by side: got "
                f"{x.dtype}, shape {tuple(x.shape)}, strides {x.stride()}"
            )
        if epilogue == ADD and (
            out.shape != (tokens, self.outputs) or out.dtype is not self.dtype or out.stride(1) != 1
        ):
            raise EngineError(
                f"a product of {tokens} rows is added to {name} rows of {self.outputs} values "
                f"side by side: got {out.dtype}, shape {tuple(out.shape)}, strides {out.stride()}"
            )
        normed = None
        if self.norm_weight is not None and tokens * width * x.itemsize > _PRIVATE_BYTES:
            normed = x.new_empty(tokens, width)
        packed = _CALL.pack(
            self.address,
            x.data_ptr(),
            out.data_ptr(),
            0 if normed is None else normed.data_ptr(),
            x_stride * x.itemsize,
            out.stride(0) * out.itemsize,
            tokens,
            epilogue,
            torch.get_num_threads(),
        )
        return packed, normed


class PackedProduct:
    """Products of the same activations, whose outputs lie one after the other."""

    def __init__(self, weights: tuple[PackedWeight, ...]) -> None:
        self._weights = weights
        self.in_features = weights[0].inputs
        self.out_features = sum(weight.outputs for weight in weights)
        self.dtype = weights[0].dtype

    @property
    def num_bytes(self) -> int:
        """What its weights take."""
        return sum(weight.panels.nbytes for weight in self._weights)

    @property
    def weight(self) -> PackedWeight:
        """The weight of a product that has one."""
        (weight,) = self._weights
        return weight

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in_features] -> [tokens, out_features], in the dtype of the activations."""
        out = x.new_empty(x.shape[0], self.out_features)
        self.multiply(x, out, STORE)
        return out

    def multiply(self, x: Tensor, out: Tensor, epilogue: int) -> None:
        """out (epilogue) the product; x and out may have strides between rows."""
        self.run(self.calls(x, out, epilogue), x, out)

    def run(self, calls: list[tuple[bytes, Tensor | None]], *held: object) -> None:
        """Make calls of this product and of others in one call of C. held: see CallTape."""
        packed, weight = b"".join(call for call, _ in calls), self._weights[0]
        weight.tape.call(weight.library.linear, (packed, len(calls)), held, calls)

    def calls(self, x: Tensor, out: Tensor, epilogue: int) -> list[tuple[bytes, Tensor | None]]:
        """A call of C for each of the products, see PackedWeight.call."""
        if len(self._weights) == 1:
            return [self._weights[0].call(x, out, epilogue)]
        parts = torch.split(out, [weight.outputs for weight in self._weights], dim=1)
        return [
            weight.call(x, part, epilogue)
            for weight, part in zip(self._weights, parts, strict=True)
        ]


class PackedLinear(PackedProduct):
    """norm(x) @ weight.T + bias: fp32 sums, rounded once. Made by `CpuLinear.pack`."""

    def in_float(self, x: Tensor) -> Tensor:
        """[tokens, in_features] -> [tokens, out_features], the float32 sums themselves."""
        out = torch.empty(x.shape[0], self.out_features)
        self.multiply(x, out, FLOAT)
        return out

    def gather_rows(self, token_ids: Tensor) -> Tensor:
        """Rows of the weight itself, [n, in_features]; int64 [n], contiguous. For embeddings.

        Raises EngineError for an id outside the rows.
        """
        if token_ids.dtype is not torch.int64 or not token_ids.is_contiguous():
            raise EngineError(f"token ids are contiguous int64, got {token_ids.dtype}")
        weight = self.weight
        out = torch.empty(len(token_ids), weight.inputs, dtype=self.dtype)
        if weight.library.gather_rows(
            weight.address,
            token_ids.data_ptr(),
            len(token_ids),
            out.data_ptr(),
            torch.get_num_threads(),
        ):
            raise EngineError(f"a token id lies outside the {weight.outputs} rows of the embedding")
        return out


class PackedGateUp(PackedProduct):
    """activation(gate(x)) * up(x) of two fused products. Made by `CpuLinear.pack_gate_up`.

    Rounds where the unfused steps do: both products, the activation, and the result.
    """


class PackedAfterAttention:
    """LayerOps.after_attention in one call of C. Made by `CpuLinear.after_attention`.

    The next layer overwrites the result.
    """

    def __init__(
        self,
        workspace: Workspace,
        products: tuple[PackedLinear, PackedGateUp, PackedLinear],
        next_qkv: PackedLinear | None,
    ) -> None:
        """products: out, gate and up, and down."""
        self._out, self._gate_up, self._down = products
        self._next_qkv = next_qkv
        self._workspace = workspace

    def __call__(self, x: Tensor, attended: Tensor) -> Tensor:
        """x [tokens, hidden], attended [tokens, heads x head_dim], in the dtype of the result."""
        tokens = x.shape[0]
        gated = self._buffer("gated", tokens, self._gate_up)
        steps = [
            *self._out.calls(attended, x, ADD),
            *self._gate_up.calls(x, gated, STORE),
            *self._down.calls(gated, x, ADD),
        ]
        result = x
        if self._next_qkv is not None:
            result = self._buffer("qkv", tokens, self._next_qkv)
            steps += self._next_qkv.calls(x, result, STORE)
        self._out.run(steps, x, attended, gated, result)
        return result

    def _buffer(self, name: str, tokens: int, product: PackedProduct) -> Tensor:
        return self._workspace.buffer(name, (tokens, product.out_features), product.dtype)


class PackedExperts:
    """The experts of a layer, for all rows in one call of C. Made by `CpuLinear.experts`."""

    def __init__(
        self,
        workspace: Workspace,
        router: Router,
        experts: Sequence[tuple[PackedGateUp, PackedLinear]],
    ) -> None:
        """experts: of gate, up and down, each a product of one weight."""
        self._workspace, self._router, self._experts = workspace, router, experts
        addresses = ([each.weight.address for each in part] for part in zip(*experts, strict=True))
        self._gate_up, self._down = (torch.tensor(part) for part in addresses)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]. Rounds where `models.experts` does."""
        ids, weights = self._router(x)
        tokens, top_k = ids.shape
        gate_up, down = (each.weight for each in self._experts[0])
        dtype = gate_up.dtype
        if x.dtype is not dtype or x.shape[1] != gate_up.inputs or not x.is_contiguous():
            name = str(dtype).removeprefix("torch.")
            raise EngineError(
                f"packed experts take contiguous {name} rows of {gate_up.inputs} values: got "
                f"{x.dtype}, shape {tuple(x.shape)}, strides {x.stride()}"
            )
        choices, count, buffer = tokens * top_k, len(self._experts), self._workspace.buffer
        out = torch.empty_like(x)
        held = (
            *(self._gate_up, self._down, x, ids.contiguous(), weights.contiguous(), out),
            buffer("sorted", (choices, gate_up.inputs), dtype),
            buffer("by expert", (choices, down.inputs), dtype),
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

    def __init__(
        self, library: ctypes.CDLL, tape: CallTape, dtype: torch.dtype, with_codes: bool
    ) -> None:
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
        self.dtype = dtype
        self.with_codes = with_codes
        self.saved_bytes = 0  # by holding numbers in 16 bits
        self._has_tiles = dtype is torch.bfloat16 and library.allow_tiles() == 0

    @classmethod
    def load(
        cls,
        tape: CallTape,
        folder: Path | None = None,
        extra_cflags: tuple[str, ...] = (),
        dtype: torch.dtype = torch.bfloat16,
        with_codes: bool = False,
    ) -> CpuLinear:
        """Compile (or take from the cache) and bind.

        dtype: of activations, bfloat16 or float32. with_codes: weights may be codes, too.
        Raises KernelBuildError with the reason: this CPU, or a compiler that is too old for it.
        """
        if dtype is torch.bfloat16 and not is_supported():
            raise KernelBuildError('this CPU has no AVX512-BF16: set dtype="float32"')
        flags = (
            f"-DMODE={_MODES[dtype]}",
            f"-DWITH_CODES={int(with_codes)}",
            f"-DWITH_NUMBERS={int(dtype is torch.float32)}",
        )
        library = load_library(SOURCE, folder, (*extra_cflags, *flags))
        if dtype is torch.bfloat16 and not library.has_pairs():
            raise KernelBuildError("the C compiler knows no AVX512-BF16: install gcc 10 or newer")
        return cls(library, tape, dtype, with_codes)

    def pack(
        self,
        weight: Weight,
        bias: Tensor | None = None,
        norm: tuple[Tensor, float] | None = None,
    ) -> PackedLinear:
        """Pack weight [outputs, inputs] and bias [outputs] on the CPU, in the dtype of activations;
        or the codes of a weight, as they are.

        norm: (weight [inputs], eps) of an RMSNorm of the activations before the product.
        """
        parts = weight.parts if isinstance(weight, CodedWeight) else (weight,)
        if bias is not None:
            self._check(bias, weight.shape[:1])
        biases = () if bias is None else torch.split(bias, [_shape(part)[0] for part in parts])
        return PackedLinear(
            tuple(self._pack((part,), biases[i : i + 1], norm) for i, part in enumerate(parts))
        )

    def pack_gate_up(
        self,
        gate: Weight,
        up: Weight,
        biases: tuple[Tensor, Tensor] | None = None,
        norm: tuple[Tensor, float] | None = None,
        activation: str = "silu",
    ) -> PackedGateUp | None:
        """Pack gate and up, each [outputs, inputs], into one weight; else as `pack`.

        activation: a key of ACTIVATIONS. None: they are not codes of one format each.
        """
        (gate_part, *more_gate), (up_part, *more_up) = (
            each.parts if isinstance(each, CodedWeight) else (each,) for each in (gate, up)
        )
        if more_gate or more_up or _format(gate_part) != _format(up_part):
            return None
        return PackedGateUp((self._pack((gate_part, up_part), biases or (), norm, activation),))

    def experts(
        self, router: Router, weights: Iterable[tuple[Tensor, Tensor, Tensor]]
    ) -> PackedExperts:
        """weights: gate, up and down of each expert, as `pack_gate_up` and `pack` take them."""
        packed = [
            (PackedGateUp((self._pack((gate, up), (), None, "silu"),)), self.pack(down))
            for gate, up, down in weights
        ]
        return PackedExperts(self._workspace, router, packed)

    def after_attention(
        self,
        out: PackedLinear,
        gate_up: PackedGateUp,
        down: PackedLinear,
        next_qkv: PackedLinear | None,
    ) -> PackedAfterAttention:
        """As LayerOps.after_attention."""
        return PackedAfterAttention(self._workspace, (out, gate_up, down), next_qkv)

    def _pack(
        self,
        weights: tuple[CodedRows | Tensor, ...],
        biases: tuple[Tensor, ...],
        norm: tuple[Tensor, float] | None,
        activation: str = "",
    ) -> PackedWeight:
        shape, code_format = _shape(weights[0]), _format(weights[0])
        for weight in weights:
            self._check(weight, shape)
        for bias in biases:
            self._check(bias, shape[:1])
        if norm is not None:
            self._check(norm[0], shape[1:])
        narrow = self.narrowed(weights)
        if narrow:
            code_format = _NARROW[narrow[0].dtype]
        if not narrow and code_format and not self.with_codes:
            raise EngineError("codes are packed by kernels that were loaded with_codes")
        outputs, inputs = shape
        columns = -(-outputs // _TURN) * _TURN * len(weights)
        num_panels = -(-columns // _PANEL)
        itemsize = self.dtype.itemsize
        row_bytes = -(-inputs * itemsize // 4) * 4
        if narrow:
            row_bytes = inputs * narrow[0].itemsize
        elif code_format:
            row_bytes = inputs // FORMATS[code_format][0] * HELD_BYTES[code_format]
        panels = self._arena.allocate(num_panels * _PANEL * row_bytes)
        if inputs * itemsize % 4 or num_panels * _PANEL != outputs * len(weights):
            panels.zero_()  # products read the padding, too
        packed = PackedWeight(
            self._library,
            self._tape,
            panels,
            _pack_biases(biases, num_panels * _PANEL) if biases else None,
            norm and (norm[0].contiguous(), norm[1]),
            (outputs, inputs),
            activation,
            self._has_tiles and inputs % _TILE_K == 0,
            self.dtype,
            code_format,
        )
        for which, weight in enumerate(narrow or weights):
            rows = (weight.rows if isinstance(weight, CodedRows) else weight).contiguous()
            stride = rows.stride(0) * rows.itemsize
            threads = torch.get_num_threads()
            self._library.pack(packed.address, rows.data_ptr(), stride, which, threads)
        return packed

    def narrowed(self, weights: tuple[CodedRows | Tensor, ...]) -> tuple[Tensor, ...]:
        """The same numbers in 16 bits, counted as saved; () if they do not fit, or inputs are no
        whole groups.
        """
        numbers = [weight for weight in weights if isinstance(weight, Tensor)]
        if self.dtype is not torch.float32 or len(numbers) < len(weights):
            return ()
        if numbers[0].shape[1] % _GROUP:
            return ()
        for dtype in _NARROW:
            narrow = tuple(weight.to(dtype) for weight in numbers)
            if all(map(torch.equal, map(Tensor.float, narrow), numbers)):
                self.saved_bytes += sum(each.nbytes for each in narrow)
                return narrow
        return ()

    def _check(self, weight: CodedRows | Tensor, shape: tuple[int, ...]) -> None:
        rows = weight.rows if isinstance(weight, CodedRows) else weight
        dtype = torch.uint8 if isinstance(weight, CodedRows) else self.dtype
        if (
            rows.dtype is not dtype
            or rows.device.type != "cpu"
            or _shape(weight) != tuple(shape)
            or 0 in shape
        ):
            name = str(dtype).removeprefix("torch.")
            raise EngineError(
                f"weights to pack are {name} on the CPU, here of shape {tuple(shape)}: got "
                f"{rows.dtype} on {rows.device}, shape {_shape(weight)}"
            )


def _shape(weight: CodedRows | Tensor) -> tuple[int, ...]:
    if isinstance(weight, CodedRows):
        return len(weight.rows), weight.num_inputs
    return tuple(weight.shape)


def _format(weight: CodedRows | Tensor) -> str:
    return weight.format if isinstance(weight, CodedRows) else ""


def _pack_biases(biases: tuple[Tensor, ...], columns: int) -> Tensor:
    """float32 [columns], in the order of the panels: those of gate and up take turns."""
    pad = -len(biases[0]) % _TURN
    parts = [functional.pad(bias.float(), (0, pad)).view(-1, _TURN) for bias in biases]
    packed = torch.stack(parts, dim=1).flatten()
    return functional.pad(packed, (0, columns - len(packed)))
