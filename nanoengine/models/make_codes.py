"""quantization="int8": weights become codes as they are loaded, Q8_0 of GGUF files. Lossy.

Knows no kernel. A block comes from itself alone, so no cut between rows moves a bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanoengine.models.stored_codes import FORMATS, ROUTERS, TAKEN_APART, CodedRows

FORMAT = "Q8_0"
BLOCK, _BLOCK_BYTES = FORMATS[FORMAT]
EMBEDDINGS = "model.embed_tokens.weight"
ENDS = (EMBEDDINGS, "lm_head.weight")
_LARGEST = 127  # of a code
# Matrices in layers whose errors weigh much: routers, and what the decays of a recurrent layer come
# from. And one that no kernel multiplies by as it is.
_AS_THEY_ARE = (
    *ROUTERS,
    *(f"linear_attn.in_proj_{name}.weight" for name in ("b", "a", "ba", "f_a")),
    "linear_attn.f_b_proj.weight",
    *TAKEN_APART,
)
# Weights at a time, in float32; of so many, PyTorch's small operators on blocks take one thread.
_PIECE = 1_000_000


def becomes_codes(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a weight of this name and shape becomes codes. shape: of all its rows or of some."""
    if len(shape) != 2 or shape[1] % BLOCK or name.endswith(_AS_THEY_ARE):
        return False
    return name in ENDS or ".layers." in name


def make_codes(weight: Tensor) -> CodedRows | None:
    """weight: [outputs, inputs] of any floats. None if a scale would not be finite in float16.

    A number is about scale * code: scale = max|block| / 127 in float16, rounded before the codes
    are chosen; the code is the nearest of -127 to 127.
    """
    outputs, inputs = weight.shape
    made = weight.new_empty(outputs, inputs // BLOCK, _BLOCK_BYTES, dtype=torch.uint8)
    num_rows = max(1, _PIECE // inputs)
    for source, target in zip(
        torch.split(weight, num_rows), torch.split(made, num_rows), strict=True
    ):
        blocks = source.float().reshape(len(source), -1, BLOCK)
        scales = (blocks.abs().amax(2, keepdim=True) / _LARGEST).half()
        if not scales.isfinite().all():
            return None
        steps = scales.float().reciprocal_().nan_to_num_(posinf=0)  # a block of zeros has no step
        target[..., :2] = scales.view(torch.uint8)
        codes = (blocks * steps).round_().clamp_(-_LARGEST, _LARGEST)
        target[..., 2:].view(torch.int8).copy_(codes)
    return CodedRows(FORMAT, made.flatten(1))
