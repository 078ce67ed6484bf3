"""Drawing tokens from logits, by our Triton kernels and by PyTorch: a part of gpu_check.py."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.gpu_kernels import kernel_s
from benchmarks.gpu.gpu_measure import Row, Scale
from nanoengine import SamplingParams
from nanoengine.models.draw import Draws, draw

VOCAB = 151_936  # Qwen3's
ROWS = (1, 64, 256)
RULES: dict[str, dict[str, Any]] = {
    "all": {},
    "top_k 20, top_p 0.95": {"top_k": 20, "top_p": 0.95},
    "top_p 0.9": {"top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "top_p 0.9, flat": {"top_p": 0.9, "temperature": 10.0},  # too many tokens to collect
}


def draws(scale: Scale) -> Iterator[Row]:
    """A row for each number of rows and rules: kernel time, and how many tokens are the same. Of
    logits in bfloat16, as a head gives them.
    """
    from nanoengine.kernels.triton_draw import draw as ours  # after --device is known

    device = torch.device(scale.device)
    vocab, most = (500, 2) if scale.is_rehearsal else (VOCAB, max(ROWS))
    logits = 3 * torch.randn((most, vocab), device=device, dtype=torch.bfloat16)
    for rows in (rows for rows in ROWS if rows <= most):
        for name, rules in RULES.items():
            some = Draws.of([SamplingParams(**rules)] * rows, [*range(rows)], _tensor(device))
            part = logits[:rows]
            same = int((ours(part, some) == draw(part, some)).sum())
            yield {
                "rows": rows,
                "vocab": vocab,
                "rules": name,
                "triton_us": round(1e6 * kernel_s(partial(ours, part, some), device), 1),
                "pytorch_us": round(1e6 * kernel_s(partial(draw, part, some), device), 1),
                "same": same,
                "ok": same >= 0.99 * rows,
            }


def _tensor(device: torch.device) -> Any:
    def made(values: Any, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return made
