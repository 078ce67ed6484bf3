"""Compiles the kernel that reads KV in 12 bits for GPUs that need not be here, and says in JSON, a
line each, what became of it: `python compile_bf12.py KV_HEADS,HEAD_DIM CAPABILITIES`.
"""

from __future__ import annotations

import json
import re
import sys

import torch
from compile_codes import compiled, spilled_bytes

from nanoengine.devices.triton_bf12 import unpack_bf12
from nanoengine.kv.kv_codec import HEADER, OTHER, WHOLE, ZERO, Bf12Codec


def main(heads: str, capabilities: str) -> None:
    kv_heads, head_dim = map(int, heads.split(","))
    block = (2, 16, kv_heads, head_dim)

    def calls() -> None:
        target = torch.zeros(block, dtype=torch.bfloat16)
        source = torch.zeros(Bf12Codec().host_block(block), dtype=torch.uint8)
        unpack_bf12(target, source, HEADER=HEADER, ZERO=ZERO, OTHER=OTHER, WHOLE=WHOLE)

    for capability in map(int, capabilities.split(",")):
        for made in compiled(calls, capability):
            ptx = made.asm["ptx"]
            found = {
                "capability": capability,
                "wide_loads": len(re.findall(r"ld\.global\S*\.(?:v[24]\.)?b(?:32|64)", ptx)),
                "spilled": spilled_bytes(made),
            }
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
