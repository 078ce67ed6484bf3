"""Compiles recurrent layers for GPUs that need not be here, and says in JSON, a line for each
kernel, what became of it: `python compile_recurrence.py DTYPE CAPABILITIES`, several with commas.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from typing import Any

import torch
from compile_codes import compiled, spilled_bytes
from recurrent_layers import make_net, make_state, run_step, some_rows

from nanoengine.config.model import RecurrentConfig
from nanoengine.context import RecurrentState
from nanoengine.kernels.triton_recurrence import recurrence
from nanoengine.models.rules import RecurrentNet

SHAPES = {
    "delta": RecurrentConfig((0,), 2, 4, 128, 128, 4),
    "delta of odd sizes": RecurrentConfig((0,), 1, 3, 80, 96, 4),
    "Kimi": RecurrentConfig((0,), 4, 4, 128, 128, 4, rule="kimi"),
    "Ling": RecurrentConfig((0,), 4, 4, 128, 128, 4, rule="kimi", least_rate=-5.0),
    "Mamba-2": RecurrentConfig((0,), 2, 4, 128, 64, 4, rule="mamba"),
    "Mamba-2 of odd sizes": RecurrentConfig((0,), 1, 3, 80, 96, 3, rule="mamba"),
    "Granite 4 H Micro": RecurrentConfig((0,), 1, 48, 128, 64, 4, rule="mamba"),
    "Mamba-2 of 256": RecurrentConfig((0,), 1, 2, 256, 64, 4, rule="mamba"),
}


def main(dtype_name: str, capabilities: str) -> None:
    dtype = getattr(torch, dtype_name)
    for name, shape in SHAPES.items():
        net, state = make_net(shape), make_state(shape, dtype)

        def step(*lengths: int, net: RecurrentNet = net, state: RecurrentState = state) -> None:
            x, slots = some_rows(net, state.inputs.dtype, *lengths), range(len(lengths))
            run_step(recurrence, net, state, x, [9] * len(lengths), slots)

        for capability in map(int, capabilities.split(",")):
            decode = compiled(lambda step=step: step(1), capability)
            prompt = compiled(lambda step=step: step(1, 1, 1, 16, 257), capability)
            for of_a_decode, of_a_prompt in zip(decode, prompt, strict=True):
                ptx = of_a_prompt.asm["ptx"]
                found = {
                    "shape": name,
                    "capability": capability,
                    "kernel": of_a_prompt.metadata.name,
                    "warps": of_a_prompt.metadata.num_warps,
                    "copied_ahead": len(re.findall(r"cp\.async\.c[ag]", ptx)),
                    "spilled": spilled_bytes(of_a_prompt),
                    "of_a_decode": of(of_a_decode),
                    "of_a_prompt": of(of_a_prompt),
                }
                print(json.dumps(found), flush=True)


def of(made: Any) -> str:
    """A hash of its code."""
    return hashlib.sha256(made.asm["cubin"]).hexdigest()


if __name__ == "__main__":
    main(*sys.argv[1:])
