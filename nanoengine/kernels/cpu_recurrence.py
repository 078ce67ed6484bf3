"""Calls the recurrent rules of `cpu_recurrence.c`, which c_build compiles.

Owns their C calling convention. Knows no sequence and no model: it sees the rows of a step, and
the states that it replaces.
"""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import torch
from torch import Tensor

from nanoengine.config.model import AnyRecurrent, ShortConvConfig
from nanoengine.context import ForwardContext, RecurrentState
from nanoengine.kernels.c_build import load_library
from nanoengine.kernels.call_tape import CallTape
from nanoengine.models.delta_net import DeltaNet, KimiNet
from nanoengine.models.mamba import NORMS, MambaNet
from nanoengine.models.rules import RecurrentNet
from nanoengine.models.short_conv import ShortConvNet

SOURCE = Path(__file__).with_name("cpu_recurrence.c")
_DELTA_ARGS = struct.Struct("=14Q12q4d")  # one field per member of delta_args, in that order
_IS_BF16 = {torch.float32: 0, torch.bfloat16: 1}
_RULES = (MambaNet, DeltaNet, ShortConvNet, KimiNet)  # as numbered in cpu_recurrence.c
# Of the nets of these, in the order of delta_args.
_OF_NETS = ("conv", "decay", "dt_bias", "norm", "conv_bias", "skip")


class CpuRecurrence:
    """Bound C functions. Every call releases the GIL and runs on torch's own OpenMP threads."""

    def __init__(self, library: ctypes.CDLL, tape: CallTape) -> None:
        """tape: records the calls."""
        self._tape = tape
        self._gated_delta, self._short_conv = library.gated_delta, library.short_conv
        for function in (self._gated_delta, self._short_conv):
            function.argtypes = [ctypes.c_char_p]

    @classmethod
    def load(
        cls, tape: CallTape, folder: Path | None = None, extra_cflags: tuple[str, ...] = ()
    ) -> CpuRecurrence:
        """Compile (or take from the cache) and bind; raises KernelBuildError with the reason."""
        return cls(load_library(SOURCE, folder, extra_cflags), tape)

    def run(
        self, x: Tensor, net: RecurrentNet, state: RecurrentState, ctx: ForwardContext
    ) -> Tensor:
        """As rules.recurrence, of x in float32 or bfloat16. Raises EngineError."""
        out, mixed = x.new_empty(len(x), net.shape.value_size), None
        if not isinstance(net, ShortConvNet):
            mixed = torch.empty(len(x), net.shape.channels, dtype=torch.float32)
        of_net = [getattr(net, name, None) for name in _OF_NETS]  # a rule may lack some
        pointed_to = (
            *(x, *of_net[:4], state.inputs, state.memory),
            *(state.slots, ctx.query_start, ctx.kv_lens, mixed, out, *of_net[4:]),
        )
        packed = _DELTA_ARGS.pack(
            *(0 if tensor is None else tensor.data_ptr() for tensor in pointed_to),
            *(len(ctx.kv_lens), len(x), x.stride(0), *_heads_of(net.shape), net.shape.conv_size),
            *(_IS_BF16[x.dtype], torch.get_num_threads(), _RULES.index(type(net))),
            NORMS.index(net.shape.norm) if isinstance(net, MambaNet) else 0,
            getattr(net, "eps", 0.0),
            *(getattr(net, name, 1.0) for name in ("gate_by", "step_by")),
            net.shape.least_rate if isinstance(net, KimiNet) else 0.0,
        )
        function = self._short_conv if isinstance(net, ShortConvNet) else self._gated_delta
        self._tape.call(function, packed, pointed_to)
        return out


def _heads_of(shape: AnyRecurrent) -> tuple[int, int, int, int]:
    """Key heads, value heads and their sizes, as cpu_recurrence.c counts channels by them."""
    if isinstance(shape, ShortConvConfig):
        return 0, 1, 0, shape.channels
    return shape.num_key_heads, shape.num_value_heads, shape.key_dim, shape.value_dim
