"""Products with packed weights, of numbers or of codes, and fused operators, in `cpu_linear.c`.

Owns the C calling convention. Knows no layer and no model. The rule that makes a row's bits
independent of its batch is in `cpu_linear.c`.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from nanoengine.config.model import ExpertsConfig
from nanoengine.errors import EngineError
from nanoengine.kernels.c_build import KernelBuildError, cpu_flags, load_library
from nanoengine.kernels.call_tape import CallTape
from nanoengine.kernels.cpu_kernels import Workspace
from nanoengine.kernels.packed_weight import (
    ACTIVATIONS,
    ADD,
    CALL,
    FLOAT,
    GROUP,
    PAIR_ROWS,
    ROUNDED_GROUP_BYTES,
    STORE,
    PackedWeight,
    WeightPacker,
    format_of,
    shape_of,
)
from nanoengine.models.experts import Map, Router
from nanoengine.models.stored_codes import CodedWeight, Weight

SOURCE = Path(__file__).with_name("cpu_linear.c")
# Of activations, as in cpu_linear.c.
_MODES = {torch.float32: "F32", torch.bfloat16: "BF16_PAIRS"}
_NUM_CALLS = struct.Struct("=q")  # of calls_t in cpu_linear.c, before its calls
# One field per member of experts_t in cpu_linear.c, in that order.
_EXPERTS = struct.Struct("=14Q5q")
_ROUTE = struct.Struct("=6Q9qd")  # and of route_t in cpu_router.h


def is_supported() -> bool:
    """Whether this CPU multiplies pairs of bfloat16 (AVX512-BF16); float32 runs on all."""
    return b"avx512_bf16" in cpu_flags().split()


class PackedProduct:
    """Products of the same activations, whose outputs lie one after the other."""

    def __init__(self, weights: tuple[PackedWeight, ...]) -> None:
        self.weights = weights
        self.in_features = weights[0].inputs
        self.out_features = sum(weight.outputs for weight in weights)
        self.dtype = weights[0].dtype

    @property
    def num_bytes(self) -> int:
        """What its weights take."""
        return sum(weight.panels.nbytes for weight in self.weights)

    @property
    def has_one_weight(self) -> bool:
        """Whether all of it is of one format."""
        return len(self.weights) == 1

    @property
    def weight(self) -> PackedWeight:
        """The weight of a product that has one."""
        (weight,) = self.weights
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
        packed = b"".join((_NUM_CALLS.pack(len(calls)), *(call for call, _ in calls)))
        weight = self.weights[0]
        weight.tape.call(weight.library.linear, packed, held, calls)

    def calls(self, x: Tensor, out: Tensor, epilogue: int) -> list[tuple[bytes, Tensor | None]]:
        """A call of C for each of the products, see PackedWeight.call."""
        if len(self.weights) == 1:
            return [self.weights[0].call(x, out, epilogue)]
        parts = torch.split(out, [weight.outputs for weight in self.weights], dim=1)
        return [
            weight.call(x, part, epilogue) for weight, part in zip(self.weights, parts, strict=True)
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


class PackedHeads:
    """A product for each head, of its own activations, in one call of C."""

    def __init__(self, heads: list[PackedLinear]) -> None:
        self._heads = heads

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, heads, in_features] -> [tokens, heads, out_features]; x may have strides."""
        out = x.new_empty(*x.shape[:2], self._heads[0].out_features)
        calls = [
            call
            for i, head in enumerate(self._heads)
            for call in head.calls(x[:, i], out[:, i], STORE)
        ]
        self._heads[0].run(calls, x, out)
        return out


class PackedGateUp(PackedProduct):
    """activation(gate(x)) * up(x) of two fused products. Made by `CpuLinear.pack_gate_up`.

    Rounds where the unfused steps do: both products, the activation, and the result.
    """


class PackedApart:
    """activation(gate(x)) * up(x), where gate and up are two weights: of two formats."""

    def __init__(self, both: PackedLinear, gated: Map, activation: str) -> None:
        """both: gate and up. gated: LayerOps.gated(activation)."""
        self.weights, self.activation = both.weights, ACTIVATIONS[activation]
        self._both, self._gated = both, gated

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in_features] -> [tokens, out_features]."""
        return self._gated(self._both(x))

    @property
    def are_halves(self) -> bool:
        """Whether its weights are gate and up, each of one format."""
        gate, *others = (weight.outputs for weight in self.weights)
        return others == [gate]


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


# Gate and up, and down of one weight.
PackedExpert = tuple[PackedGateUp | PackedApart, PackedLinear]


class PackedExperts:
    """The experts of a layer, for all rows in one call of C. Made by `CpuLinear.experts`."""

    def __init__(
        self,
        workspace: Workspace,
        router: Router,
        experts: Sequence[PackedExpert],
        before: Map | None = None,
    ) -> None:
        """experts: all with gate and up in one weight, or all with two. before: as of Experts."""
        self._workspace, self._router, self._before = workspace, router, before
        each = [(*gate_up.weights, down.weight) for gate_up, down in experts]
        first, self._experts = experts[0][0], each
        self._activation = first.activation if isinstance(first, PackedApart) else 0
        self._addresses = [
            torch.tensor([weight.address for weight in part]) for part in zip(*each, strict=True)
        ]

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]. Rounds where `models.experts` does."""
        ids, weights = self._router(x)
        x = x if self._before is None else self._before(x)
        tokens, top_k = ids.shape
        gate_up, *up, down = self._experts[0]
        dtype = gate_up.dtype
        if x.dtype is not dtype or x.shape[1] != gate_up.inputs or not x.is_contiguous():
            name = str(dtype).removeprefix("torch.")
            raise EngineError(
                f"packed experts take contiguous {name} rows of {gate_up.inputs} values: got "
                f"{x.dtype}, shape {tuple(x.shape)}, strides {x.stride()}"
            )
        choices, count, buffer = tokens * top_k, len(self._experts), self._workspace.buffer
        out = x.new_empty(x.shape)
        of_gate_up, *of_up, of_down = self._addresses
        held = (
            *(of_gate_up, of_up[0] if up else None, of_down),
            *(x, ids.contiguous(), weights.contiguous(), out),
            buffer("sorted", (choices, gate_up.inputs), dtype),
            buffer("by expert", (choices, down.inputs), dtype),
            buffer("apart", (choices, 2 * down.inputs), dtype) if up else None,
            buffer("places", (choices,), torch.int64),
            buffer("starts", (count + 1,), torch.int64),
            buffer("calls", ((2 + len(up)) * min(count, choices), CALL.size), torch.uint8),
            buffer("made", (self._made_bytes(choices),), torch.uint8),
        )
        numbers = count, top_k, tokens, self._activation, torch.get_num_threads()
        addresses = (0 if tensor is None else tensor.data_ptr() for tensor in held)
        packed = _EXPERTS.pack(*addresses, *numbers)
        gate_up.tape.call(gate_up.library.experts, packed, held)
        return out

    def _made_bytes(self, rows: int) -> int:
        """Of so many rows of the hidden or the inner size, rounded or in blocks for each expert."""
        blocks = rows + PAIR_ROWS * min(rows, len(self._experts))
        each = [*chain(*self._experts)]
        rounded = max((weight.inputs for weight in each if weight.is_rounded), default=0)
        arranged = max((weight.inputs for weight in each if weight.is_left), default=0)
        itemsize = each[0].dtype.itemsize
        return max(rows * rounded // GROUP * ROUNDED_GROUP_BYTES, blocks * arranged * itemsize)


class CpuLinear:
    """Bound C functions, and the memory that packed weights go to."""

    def __init__(
        self,
        library: ctypes.CDLL,
        tape: CallTape,
        dtype: torch.dtype,
        with_codes: bool,
        rounds_rows: bool,
    ) -> None:
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        for function in (library.linear, library.experts, library.route):
            function.argtypes = [ctypes.c_char_p]
        self._route = library.route
        library.gather_rows.argtypes = [pointer, pointer, integer, pointer, integer]
        has_tiles = dtype is torch.bfloat16 and library.allow_tiles() == 0
        self._workspace, self._tape = Workspace(), tape
        self._packer = WeightPacker(
            library, tape, self._workspace, dtype, with_codes, has_tiles, rounds_rows
        )
        self.dtype = dtype
        self.with_codes = with_codes

    @property
    def saved_bytes(self) -> int:
        """Saved by holding numbers in 16 bits."""
        return self._packer.saved_bytes

    @classmethod
    def load(
        cls,
        tape: CallTape,
        folder: Path | None = None,
        extra_cflags: tuple[str, ...] = (),
        dtype: torch.dtype = torch.bfloat16,
        with_codes: bool = False,
        rounds_rows: bool = False,
    ) -> CpuLinear:
        """Compile (or take from the cache) and bind.

        dtype: of activations, bfloat16 or float32. with_codes: weights may be codes, too.
        rounds_rows: products with codes are of rows rounded to 8 bits, see cpu_int8.h.
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
        return cls(library, tape, dtype, with_codes, rounds_rows)

    def pack(
        self,
        weight: Weight,
        bias: Tensor | None = None,
        norm: tuple[Tensor, float] | None = None,
    ) -> PackedLinear:
        """Pack weight [outputs, inputs] and bias [outputs] on the CPU, in the dtype of activations;
        or the codes of a weight, as they are.

        norm: (weight [inputs], eps) of an RMSNorm of the activations before the product; with a
        weight in float32 only its result is rounded.
        """
        parts = weight.parts if isinstance(weight, CodedWeight) else (weight,)
        if bias is not None:
            self._packer.check(bias, weight.shape[:1])
        biases = () if bias is None else torch.split(bias, [shape_of(part)[0] for part in parts])
        pack = self._packer.pack
        return PackedLinear(
            tuple(pack((part,), biases[i : i + 1], norm) for i, part in enumerate(parts))
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
        if more_gate or more_up or format_of(gate_part) != format_of(up_part):
            return None
        packed = self._packer.pack((gate_part, up_part), biases or (), norm, activation)
        return PackedGateUp((packed,))

    def narrowed(self, weight: Tensor) -> Tensor:
        """The same numbers, in 16 bits where a packed weight would hold them so."""
        (held,) = self._packer.narrowed([weight])
        return held

    def experts(
        self,
        router: Router,
        experts: Sequence[PackedExpert],
        before: Map | None = None,
    ) -> PackedExperts:
        """experts: as of PackedExperts. before: as of Experts."""
        return PackedExperts(self._workspace, router, experts, before)

    def route(
        self,
        config: ExpertsConfig,
        logits: Tensor,
        choice_bias: Tensor | None,
        scale: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """As models.experts.route; logits contiguous."""
        rows, count = logits.shape
        ids = torch.empty((rows, config.top_k), dtype=torch.int64)
        weights = torch.empty((rows, config.top_k), dtype=torch.float32)
        shape = (rows, 2 * count + config.num_groups)
        scratch = self._workspace.buffer("scores", shape, torch.float32)
        packed = _ROUTE.pack(
            logits.data_ptr(),
            *(0 if tensor is None else tensor.data_ptr() for tensor in (choice_bias, scale)),
            *(tensor.data_ptr() for tensor in (ids, weights, scratch)),
            *(rows, count, config.top_k),
            *(config.num_groups, config.top_groups, config.group_best),
            config.scoring == "sigmoid",
            config.renormalises,
            torch.get_num_threads(),
            config.scaling,
        )
        self._tape.call(self._route, packed, logits, choice_bias, scale, ids, weights, scratch)
        return ids, weights

    def after_attention(
        self,
        out: PackedLinear,
        gate_up: PackedGateUp,
        down: PackedLinear,
        next_qkv: PackedLinear | None,
    ) -> PackedAfterAttention:
        """As LayerOps.after_attention."""
        return PackedAfterAttention(self._workspace, (out, gate_up, down), next_qkv)
