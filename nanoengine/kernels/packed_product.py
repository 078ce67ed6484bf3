"""Products with packed weights, alone and one after the other, each made by one call of C.

cpu_linear.py makes them. Knows no layer and no model.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from nanoengine.errors import EngineError
from nanoengine.kernels.cpu_kernels import Workspace
from nanoengine.kernels.packed_weight import ADD, FLOAT, STORE, PackedWeight
from nanoengine.models.products import RUN

_NUM_CALLS = struct.Struct("=q")  # of calls_t in cpu_panels.h, before its calls


class PackedProduct:
    """Products of the same activations, whose outputs lie one after the other."""

    def __init__(self, weights: tuple[PackedWeight, ...]) -> None:
        self.weights = weights
        self.out_features = sum(weight.outputs for weight in weights)
        self.dtype = weights[0].dtype

    @property
    def num_bytes(self) -> int:
        """What its weights take."""
        return sum(weight.nbytes for weight in self.weights)

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


class PackedHead:
    """The output head, as a products.PartedHead: a run is a panel."""

    def __init__(self, product: PackedLinear) -> None:
        self.product, self.num_runs = product, -(-product.out_features // RUN)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, hidden] -> float32 [rows, vocab]; bfloat16 would make ties of its own."""
        return self.product.in_float(x)

    def of_runs(self, x: Tensor, runs: Tensor) -> Tensor:
        """As PartedHead.of_runs. Raises EngineError for a run outside the vocabulary."""
        out = torch.full((len(x), self.product.out_features), -torch.inf)
        weight = self.product.weight
        call, _rows = weight.call(x, out, FLOAT)
        if weight.library.linear_in_panels(call, runs.data_ptr(), len(runs)):
            raise EngineError(f"a run lies outside the {weight.outputs} tokens of the head")
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


class PackedAfterAttention:
    """LayerOps.after_attention in one call of C. The next layer overwrites the result."""

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
