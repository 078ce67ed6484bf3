"""Compiles products of codes for GPUs that need not be here, and says in JSON, a line for each
kernel, what became of it: `python compile_codes.py FORMATS CAPABILITIES DTYPE`, the first two with
commas.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from coded import random_rows
from torch import Tensor
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction, KernelInterface

from nanoengine.kernels.chosen_tiles import ChosenTiles
from nanoengine.kernels.code_planes import planes_of
from nanoengine.kernels.triton_codes import MOST_MULTIPLIED, CodedExperts, TritonCodes
from nanoengine.models.stored_codes import CodedWeight

OUTPUTS, INPUTS = 48, 1024


class AbsentGpu:
    """A driver of Triton: a GPU of some kind, for which code can be made."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(calls: Callable[[], object], capability: int) -> list[Any]:
    """The kernels that these calls would launch."""
    made: list[Any] = []

    def compile_alone(kernel: JITFunction, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            made.append(kernel.run(*args, grid=grid, warmup=True, **options))

        return launch

    driver.set_active(AbsentGpu(capability))
    KernelInterface.__getitem__ = compile_alone
    calls()
    return made


def spilled_bytes(made: Any) -> int:
    """What a thread of the kernel keeps in memory, as it has too few registers. NVIDIA's assembler
    decides that, so PTX does not show it.
    """
    program = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [program, "-res-usage", file.name]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    (stack,) = re.findall(r"STACK:(\d+)", run.stdout)
    return int(stack)


def calls(name: str, dtype: torch.dtype) -> None:
    """One row and few, with a merge; many; more, unpacked; rows of experts, few; a gather."""
    rows = random_rows(name, OUTPUTS, INPUTS)
    weight = CodedWeight((rows,), dtype)
    product = TritonCodes().pack(weight, torch.zeros(OUTPUTS, dtype=dtype))

    def values(tokens: int) -> Tensor:
        return torch.zeros(tokens, INPUTS, dtype=dtype)

    for tokens in (1, 64):
        product(values(tokens))
    product.in_float(values(128))
    product(values(MOST_MULTIPLIED + 1))
    experts = CodedExperts(planes_of([rows, rows]), None)
    experts(values(16), ChosenTiles.of(torch.zeros(16, 2).long(), 2), 2)
    product.gather_rows(torch.arange(4))


def main(formats: str, capabilities: str, dtype: str) -> None:
    for name in formats.split(","):
        for capability in map(int, capabilities.split(",")):
            for made in compiled(lambda name=name: calls(name, getattr(torch, dtype)), capability):
                ptx = made.asm["ptx"]
                found = {
                    "format": name,
                    "capability": capability,
                    "kernel": made.metadata.name,
                    "shared": made.metadata.shared,
                    "tensor_cores": bool(re.search(r"mma\.sync|wgmma\.mma|tcgen05\.mma", ptx)),
                    "copied_ahead": len(re.findall(r"cp\.async\.c[ag]", ptx)),
                    "rounded": bool(re.search(r"cvt\.rn\.bf16", ptx)),
                    "flushed": ".ftz" in ptx,
                    "spilled": spilled_bytes(made),
                }
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
