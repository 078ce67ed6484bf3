"""Makes products with packed weights, of numbers or of codes, and fused operators: `cpu_linear.c`.

Binds its functions. Knows no layer and no model. The rule that makes a row's bits
independent of its batch is in `cpu_linear.c`.
"""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import torch
from torch import Tensor

from nanoengine.kernels.c_build import KernelBuildError, Source, cpu_flags, load_library
from nanoengine.kernels.call_tape import CallTape
from nanoengine.kernels.cpu_kernels import Workspace
from nanoengine.kernels.packed_product import PackedGateUp, PackedLinear
from nanoengine.kernels.packed_weight import WeightPacker, held_bits
from nanoengine.models.experts import Routing
from nanoengine.models.stored_codes import CodedWeight, Weight, format_of

SOURCE = Path(__file__).with_name("cpu_linear.c")
# Of activations, as in cpu_panels.h.
_MODES = {torch.float32: "F32", torch.bfloat16: "BF16_PAIRS"}
NO_BFLOAT16 = 'this CPU has no AVX512-BF16: set dtype="float32"'
# One field per member of route_t in cpu_router.h, in that order.
_ROUTE = struct.Struct("=6Q10q2d")


def is_supported() -> bool:
    """Whether this CPU multiplies pairs of bfloat16 (AVX512-BF16); float32 runs on all."""
    return b"avx512_bf16" in cpu_flags().split()


def why_not(dtype: torch.dtype) -> str:
    """Why this CPU has no products of such activations; "" if it has."""
    lacks = dtype is torch.bfloat16 and not is_supported()
    return NO_BFLOAT16 if lacks else ""


def products_source(dtype: torch.dtype, formats: frozenset[str], rounds_rows: bool) -> Source:
    """What is compiled for `CpuLinear.load` of these."""
    flags = (
        f"-DMODE={_MODES[dtype]}",
        f"-DHELD={held_bits(formats, dtype):#x}",
        f"-DWITH_ROUNDED={int(rounds_rows)}",
    )
    return Source(SOURCE, flags)


class CpuLinear:
    """Bound C functions, and the memory that packed weights go to."""

    def __init__(
        self,
        library: ctypes.CDLL,
        tape: CallTape,
        dtype: torch.dtype,
        formats: frozenset[str],
        rounds_rows: bool,
    ) -> None:
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        for function in (library.linear, library.experts, library.route):
            function.argtypes = [ctypes.c_char_p]
        self._route = library.route
        library.linear_in_panels.argtypes = [ctypes.c_char_p, pointer, integer]
        library.gather_rows.argtypes = [pointer, pointer, integer, pointer, integer]
        has_tiles = dtype is torch.bfloat16 and library.allow_tiles() == 0
        self.workspace, self._tape = Workspace(), tape
        self._packer = WeightPacker(
            library, tape, self.workspace, dtype, formats, has_tiles, rounds_rows
        )
        self.dtype = dtype
        self.takes_codes = bool(formats)

    @property
    def holds_12_bits(self) -> bool:
        """Whether weights in bfloat16 are held in 12 bits each, where their numbers allow it."""
        return self._packer.holds_12_bits

    @property
    def saved_bytes(self) -> int:
        """Saved by holding numbers in 16 bits, or in 12."""
        return self._packer.saved_bytes

    @classmethod
    def load(
        cls,
        tape: CallTape,
        folder: Path | None = None,
        extra_cflags: tuple[str, ...] = (),
        dtype: torch.dtype = torch.bfloat16,
        formats: frozenset[str] = frozenset(),
        rounds_rows: bool = False,
    ) -> CpuLinear:
        """Compile (or take from the cache) and bind.

        dtype: of activations, bfloat16 or float32. formats: keys of FORMATS; weights may be codes
        of these, too. Each takes GCC almost half a second.
        rounds_rows: products with codes are of rows rounded to 8 bits, see cpu_int8.h.
        Raises KernelBuildError with the reason: this CPU, or a compiler that is too old for it.
        """
        if lack := why_not(dtype):
            raise KernelBuildError(lack)
        source = products_source(dtype, formats, rounds_rows)
        library = load_library(source.path, folder, (*extra_cflags, *source.extra_cflags))
        if dtype is torch.bfloat16 and not library.has_pairs():
            raise KernelBuildError("the C compiler knows no AVX512-BF16: install gcc 10 or newer")
        return cls(library, tape, dtype, formats, rounds_rows)

    def pack(
        self, weight: Weight, bias: Tensor | None = None, norm: tuple[Tensor, float] | None = None
    ) -> PackedLinear:
        """Pack weight [outputs, inputs] and bias [outputs] on the CPU, in the dtype of activations;
        or the codes of a weight, as they are.

        norm: (weight [inputs], eps) of an RMSNorm of the activations before the product; with a
        weight in float32 only its result is rounded.
        """
        parts = weight.parts if isinstance(weight, CodedWeight) else (weight,)
        if bias is not None:
            self._packer.check(bias, weight.shape[:1])
        biases = () if bias is None else torch.split(bias, [part.shape[0] for part in parts])
        pack = self._packer.pack
        return PackedLinear(
            tuple(pack((part,), biases[i : i + 1], norm) for i, part in enumerate(parts))
        )

    def pack_gate_up(
        self,
        gate: Weight,
        up: Weight,
        bias: Tensor | None = None,
        norm: tuple[Tensor, float] | None = None,
        activation: str = "silu",
    ) -> PackedGateUp | None:
        """Pack gate and up, each [outputs, inputs], into one weight; else as `pack`.

        bias: [2 x outputs], of gate, then of up. activation: a key of ACTIVATIONS. None: they are
        not codes of one format each.
        """
        (gate_part, *more_gate), (up_part, *more_up) = (
            each.parts if isinstance(each, CodedWeight) else (each,) for each in (gate, up)
        )
        if more_gate or more_up or format_of(gate_part) != format_of(up_part):
            return None
        biases = () if bias is None else bias.chunk(2)
        packed = self._packer.pack((gate_part, up_part), biases, norm, activation)
        return PackedGateUp((packed,))

    def narrowed(self, weight: Tensor) -> Tensor:
        """The same numbers, in 16 bits where a packed weight would hold them so."""
        (held,) = self._packer.narrowed([weight])
        return held

    def route(self, routing: Routing, logits: Tensor) -> tuple[Tensor, Tensor]:
        """As models.experts.route; logits contiguous."""
        config, choice_bias, scale = routing.config, routing.choice_bias, routing.scale
        rows, count = logits.shape
        ids = torch.empty((rows, config.top_k), dtype=torch.int64)
        weights = torch.empty((rows, config.top_k), dtype=torch.float32)
        shape = (rows, 2 * count + config.num_groups)
        scratch = self.workspace.buffer("scores", shape, torch.float32)
        packed = _ROUTE.pack(
            logits.data_ptr(),
            *(0 if tensor is None else tensor.data_ptr() for tensor in (choice_bias, scale)),
            *(tensor.data_ptr() for tensor in (ids, weights, scratch)),
            *(rows, count, config.top_k),
            *(config.num_groups, config.top_groups, config.group_best),
            *(config.scoring == "sigmoid", config.biases_logits, config.renormalises),
            torch.get_num_threads(),
            *(config.scaling, config.least_sum),
        )
        self._tape.call(self._route, packed, logits, choice_bias, scale, ids, weights, scratch)
        return ids, weights
