"""Compiles the draw of tokens for GPUs that need not be here, and says in JSON, a line for each
kernel, what became of it: `python compile_draw.py CAPABILITIES`, with commas.
"""

from __future__ import annotations

import json
import sys

import torch
from compile_codes import compiled, spilled_bytes

from nanoengine.kernels import triton_draw
from nanoengine.models.draw import Draws
from nanoengine.sampling_params import SamplingParams

ROWS, VOCAB = 5, 151_936
RULES = (SamplingParams(), SamplingParams(top_k=20, top_p=0.9, min_p=0.01))


def draw_all() -> None:
    """From all tokens, and from some."""
    for dtype in (torch.bfloat16, torch.float32):
        logits = torch.zeros(ROWS, VOCAB, dtype=dtype)
        for params in RULES:
            draws = Draws.of(
                [params] * ROWS, [1] * ROWS, lambda x, dtype: torch.tensor(x, dtype=dtype)
            )
            triton_draw.draw(logits, draws)


def main(capabilities: str) -> None:
    for capability in map(int, capabilities.split(",")):
        for made in compiled(draw_all, capability):
            found = {
                "capability": capability,
                "kernel": made.metadata.name,
                "spilled": spilled_bytes(made),
            }
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
