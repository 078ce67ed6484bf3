"""Compiles products of codes for GPUs that need not be here, and says in JSON, a line for each,
what became of them: `python compile_codes.py FORMATS CAPABILITIES`, both with commas.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch
import triton
from coded import random_rows
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nanoengine.kernels import triton_codes
from nanoengine.kernels.code_planes import planes_of

KINDS = {torch.int32: "*i32", torch.int8: "*i8", torch.int64: "*i64"}
# Few rows in parts, many rows, and rows of experts.
CALLS = ((8, 64, 0, True), (128, 128, 0, False), (16, 64, 4, False))


def compiled(name: str, capability: int, call: tuple[int, int, int, bool]) -> Any:
    """The product of 16-bit floats by a format, as `triton_codes.launch` calls it."""
    rows, width, each, is_part = call
    function = triton_codes.product
    names = [parameter.name for parameter in function.params]
    constants: dict[tuple[int, ...], Any] = {}
    types: dict[str, Any] = {"x": "*bf16", "out": "*fp32" if is_part else "*bf16", "bias": "*bf16"}
    divisible = [(names.index(n),) for n in ("x", "out", "bias", "outputs", "inputs", "stride")]
    divisible += [(names.index(n),) for n in ("x_row", "out_row", "span")]
    tiles = [torch.int64] * 4 if each else [None] * 4
    made = planes_of([random_rows(name, 16, 256)]).tensors
    planes = [None if plane is None else plane.dtype for plane in made]
    for tuple_name, dtypes in (("planes", planes), ("tiles", tiles)):
        at = names.index(tuple_name)
        types[tuple_name] = tuple(KINDS[t] if t else "constexpr" for t in dtypes)
        constants |= {(at, i): None for i, t in enumerate(dtypes) if t is None}
        divisible += [(at, i) for i, t in enumerate(dtypes) if t is not None]
    given = {"FORMAT": name, "ROWS": rows, "OUTPUTS": width, "K": triton_codes.BLOCK_K}
    given |= {"EACH": each, "IS_EVEN": True, "IS_PART": is_part}
    constants |= {(names.index(n),): value for n, value in given.items()}
    types = {n: "constexpr" if n in given else types.get(n, "i32") for n in names}
    attributes = {place: [["tt.divisibility", 16]] for place in divisible}
    source = ASTSource(function, types, constants, attributes)
    options = triton_codes.options_of(width)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def main(formats: str, capabilities: str) -> None:
    for name in formats.split(","):
        for capability in map(int, capabilities.split(",")):
            for call in CALLS:
                made = compiled(name, capability, call)
                ptx = made.asm["ptx"]
                found = {
                    "format": name,
                    "capability": capability,
                    "rows": call[0],
                    "shared": made.metadata.shared,
                    "tensor_cores": bool(re.search(r"mma\.sync|wgmma\.mma|tcgen05\.mma", ptx)),
                    "copied_ahead": len(re.findall(r"cp\.async\.c[ag]", ptx)),
                    "rounded": bool(re.search(r"cvt\.rn\.bf16", ptx)),
                    "flushed": ".ftz" in ptx,
                    "spilled": ".local " in ptx,
                }
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
