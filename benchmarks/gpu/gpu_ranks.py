"""gpu_check.py's row for two GPUs: ranks beside one process, and the end of a rank."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from driver import Driver

from benchmarks.gpu.gpu_measure import QWEN_600M, Scale, decoding, offloaded, running, time_decode
from nanoengine import SamplingParams
from nanoengine.errors import EngineError
from nanoengine.loading.model_config import read_model_config
from nanoengine.workers.leading_parts import LeadingDecoder
from nanoengine.workers.leading_rank import LeadingRank

Row = dict[str, Any]
MOST_S = 2.0  # from the death of a rank to the error
# Of log probabilities; other experts move them by 0.2 in the shape of a rehearsal.
MOST_APART = 0.1
# The shape of Qwen3 30B A3B, in a few layers.
MIXTURE = QWEN_600M | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


def two_gpus(large: Path, scale: Scale, parity: Callable[[], Row]) -> Iterator[Row]:
    """Greedy ids of two ranks, resident and streamed, by `parity`. Then, in the shapes of `large`,
    decode steps of one and two ranks, with graphs and without, a mixture of experts, and what a
    killed rank leaves.
    """
    num_gpus = torch.cuda.device_count()
    if not scale.is_rehearsal and num_gpus < 2:
        yield {"skipped": f"it needs 2 GPUs, and PyTorch sees {num_gpus}"}
        return
    yield parity()
    context = min(scale.decode_contexts)
    size = read_model_config(large).kv_bytes_per_token(2)
    resident = {"num_gpu_blocks": context // 256 + 8}
    ways = {
        "resident": resident,
        "resident, no graphs": resident | {"enforce_eager": True},
        "streamed": offloaded(scale, context + 256, size) | {"max_model_len": context + 256},
    }
    for how, settings in ways.items():
        for ranks in (1, 2):
            with running(large, scale, tensor_parallel_size=ranks, **settings) as made:
                step_s, moved = time_decode(made, [context], 10)
                yield {
                    "how": how,
                    "ranks": ranks,
                    "context": context,
                    "step_ms": round(1000 * step_s, 3),
                    "tokens_per_s": round(1 / step_s, 2),
                    "streamed_gb_per_rank": round(moved / 1e9, 3),
                    "link_gb_per_s": made.plan.link_gb_per_s,
                }
    yield mixture(scale.shapes(large.with_name("mixture"), MIXTURE), scale)
    yield killed(large, scale, resident, context)


def mixture(folder: Path, scale: Scale) -> Row:
    """How far apart the log probabilities of one and two ranks are: of a prompt, and of an answer
    while its tokens are the same, in steps with graphs.
    """
    found = []
    params = SamplingParams(temperature=0, max_tokens=16, prompt_logprobs=0, logprobs=0)
    for ranks in (1, 2):
        with running(folder, scale, tensor_parallel_size=ranks, num_gpu_blocks=16) as made:
            [output] = Driver(made).run([[(31 * i) % 1000 for i in range(64)]], params)
            scores = [*(output.prompt_logprobs or ())[1:], *(output.outputs[0].logprobs or ())]
            found.append([next((i, s.logprob) for i, s in (of or {}).items()) for of in scores])
    pairs = [(a, b) for (i, a), (j, b) in zip(*found, strict=True) if i == j]
    apart = max(abs(a - b) for a, b in pairs)
    return {
        "how": "experts",
        "compared": len(pairs),
        "largest_difference": round(apart, 4),
        "ok": len(pairs) >= 63 and apart < MOST_APART,
    }


def killed(large: Path, scale: Scale, settings: dict[str, Any], context: int) -> Row:
    """Seconds from SIGKILL of rank 1, amid decode steps, to the error in this process."""
    with running(large, scale, tensor_parallel_size=2, **settings) as made:
        decoder = made.runner.model
        assert isinstance(decoder, LeadingDecoder)
        ranks = decoder._leader
        assert isinstance(ranks, LeadingRank)
        [pid] = ranks._processes.pids
        seconds = float("inf")
        try:
            with decoding(made, [context]):
                for number in range(1000):
                    if number == 4:
                        os.kill(pid, signal.SIGKILL)
                        start = time.perf_counter()
                    made.step()
        except EngineError:
            seconds = time.perf_counter() - start
    return {"error_after_s": round(seconds, 3), "ok": seconds < MOST_S}
