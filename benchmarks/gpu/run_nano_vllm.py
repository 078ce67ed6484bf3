"""Runs requests through nano-vllm in a process of its own: `python -m benchmarks.gpu.run_nano_vllm`
with its source on the path. Reads JSON from stdin, and prints one line of JSON.

In: model (a folder), prompts (token ids), lengths (output tokens), temperature. Out: seconds, and
the attention that ran.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any


def attention() -> str:
    """flash-attn if it is here; else our stand-in takes its name."""
    try:
        return f"flash-attn {importlib.import_module('flash_attn').__version__}"
    except ImportError:
        stand_in = "benchmarks.gpu.flash_stand_in"
        sys.modules["flash_attn"] = importlib.import_module(stand_in)
        return "a stand-in for flash-attn: PyTorch's SDPA and our Triton kernels"


def main() -> None:
    """Answer a short request first, as nano-vllm's own benchmark does, and time the rest."""
    work: dict[str, Any] = json.load(sys.stdin)
    found = attention()
    nano: Any = importlib.import_module("nanovllm")
    engine = nano.LLM(work["model"], enforce_eager=False, max_model_len=4096)

    def answer(prompts: list[list[int]], lengths: list[int]) -> float:
        params = [
            nano.SamplingParams(temperature=work["temperature"], max_tokens=n, ignore_eos=True)
            for n in lengths
        ]
        start = time.perf_counter()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert [len(output["token_ids"]) for output in outputs] == lengths
        return seconds

    answer([prompt[::-1] for prompt in work["prompts"][:2]], [4, 4])  # no prefix of those timed
    seconds = answer(work["prompts"], work["lengths"])
    print(json.dumps({"seconds": seconds, "attention": found}))


if __name__ == "__main__":
    main()
