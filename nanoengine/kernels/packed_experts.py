"""The experts of a layer over packed weights, for all rows in one call of C; on a rank in two."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from nanoengine.errors import EngineError
from nanoengine.kernels.cpu_kernels import ACTIVATIONS, Workspace
from nanoengine.kernels.packed_product import PackedGateUp, PackedLinear
from nanoengine.kernels.packed_weight import CALL, GROUP, PAIR_ROWS, ROUNDED_GROUP_BYTES
from nanoengine.models.experts import Map, Router

# One field per member of experts_t in cpu_experts.h, in that order.
_EXPERTS = struct.Struct("=15Q6q")
BOTH, GATES, DOWNS = range(3)  # which half of a call, as in cpu_experts.h


class PackedApart:
    """activation(gate(x)) * up(x), where gate and up are two weights: of two formats. Or relu2 of
    up(x), where there is no gate.
    """

    def __init__(self, both: PackedLinear, gated: Map, activation: str) -> None:
        """both: gate and up, or up. gated: LayerOps.gated(activation)."""
        self.weights, self.activation = both.weights, ACTIVATIONS[activation]
        self._both, self._gated = both, gated

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in_features] -> [tokens, out_features]."""
        return self._gated(self._both(x))

    @property
    def is_one_call(self) -> bool:
        """Whether its weights are gate and up, or up, each of one format."""
        first, *others = (weight.outputs for weight in self.weights)
        return others == ([] if self.activation == ACTIVATIONS["relu2"] else [first])


# Gate and up, and down of one weight.
PackedExpert = tuple[PackedGateUp | PackedApart, PackedLinear]


class PackedExperts:
    """The experts of a layer in one call of C, which a rank cuts in two where it gathers."""

    def __init__(
        self,
        workspace: Workspace,
        router: Router,
        experts: Sequence[PackedExpert],
        gather: Map | None,
    ) -> None:
        """experts: all with gate and up in one weight, all with two, or all with up alone. gather:
        as of Experts.
        """
        self._workspace, self._router, self._gather = workspace, router, gather
        each = [(*gate_up.weights, down.weight) for gate_up, down in experts]
        first, self._experts = experts[0][0], each
        self._activation = first.activation if isinstance(first, PackedApart) else 0
        self._addresses = [
            torch.tensor([weight.address for weight in part]) for part in zip(*each, strict=True)
        ]

    def __call__(self, x: Tensor) -> Tensor:
        """As Experts; rounds where that does."""
        ids, weights, x = self._router(x)
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
        out, inner = x.new_empty(tokens, down.outputs), gate_up.outputs
        gated = buffer("by expert", (choices, inner), dtype)
        of_gate_up, *of_up, of_down = self._addresses
        first = (
            *(of_gate_up, of_up[0] if up else None, of_down),
            *(x, ids.contiguous(), weights.contiguous(), out),
            *(buffer("sorted", (choices, gate_up.inputs), dtype), gated),
        )
        last = (
            buffer("apart", (choices, 2 * inner), dtype) if up else None,
            buffer("places", (choices,), torch.int64),
            buffer("starts", (count + 1,), torch.int64),
            buffer("calls", ((2 + len(up)) * min(count, choices), CALL.size), torch.uint8),
            buffer("made", (self._made_bytes(choices),), torch.uint8),
        )
        sizes = count, top_k, tokens, self._activation, torch.get_num_threads()

        def call(half: int, whole: Tensor) -> None:
            held = (*first, whole, *last)
            addresses = (0 if tensor is None else tensor.data_ptr() for tensor in held)
            packed = _EXPERTS.pack(*addresses, *sizes, half)
            gate_up.tape.call(gate_up.library.experts, packed, held)

        if self._gather is None:
            call(BOTH, gated)
        else:
            call(GATES, gated)
            call(DOWNS, self._gather(gated))
        return out

    def _made_bytes(self, rows: int) -> int:
        """Of so many rows of the hidden or the inner size, rounded or in blocks for each expert."""
        blocks = rows + PAIR_ROWS * min(rows, len(self._experts))
        each = [*chain(*self._experts)]
        rounded = max((weight.inputs for weight in each if weight.form.is_rounded), default=0)
        arranged = max((weight.inputs for weight in each if weight.is_left), default=0)
        itemsize = each[0].dtype.itemsize
        return max(rows * rounded // GROUP * ROUNDED_GROUP_BYTES, blocks * arranged * itemsize)
