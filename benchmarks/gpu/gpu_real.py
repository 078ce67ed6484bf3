"""A real checkpoint on a device beside transformers: a part of gpu_check.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.gpu.gpu_measure import Row, Scale
from benchmarks.quantization import TEXT, perplexity
from nanoengine import LLM, SamplingParams

PROMPT_TOKENS = (20, 100, 333, 700)
ANSWER_TOKENS = 32
TEXT_TOKENS = 1500  # whose perplexity is measured
MEMORY: dict[str, dict[str, Any]] = {
    "resident": {"kvcache_block_size": 32, "num_gpu_blocks": 256},
    "streamed": {
        "kvcache_block_size": 32,
        "num_gpu_blocks": 16,
        "max_num_batched_tokens": 256,
        "offload_mode": "stream",
        "kv_offload_gib": 0.5,
    },
}
# By name: settings of the weights, and whether these have the numbers that transformers reads.
WEIGHTS: dict[str, tuple[dict[str, Any], bool]] = {
    "float32": ({"dtype": "float32", "quantization": "none"}, True),
    "bfloat16": ({"dtype": "bfloat16", "quantization": "none"}, False),
    "codes": ({"dtype": "bfloat16", "quantization": "gguf"}, False),
}
NEAR_TIE = 1e-3  # of two logits in float32


def real_model(file: str | None, scale: Scale) -> Row:
    """Greedy answers to pieces of the text of bench.py quantization, and its perplexity, resident
    and streamed, by how weights are held, beside transformers in float32. file: a GGUF file.

    A token is right where transformers, after the same tokens, finds none that is likelier. In
    float32 all have to be; else perplexity may be off by 1 %.
    """
    if file is None:
        return {"real_model": "not run: give --model a GGUF file"}
    exact = transformers_model(Path(file), scale.device)
    row: Row = {"model": Path(file).name}
    for name, (settings, is_exact) in WEIGHTS.items():
        for memory, others in MEMORY.items():
            with LLM(file, device=scale.device, **settings, **others) as llm:
                part = row[f"{name}, {memory}"] = beside(llm, exact, is_exact)
                part["ok"] &= (part["h2d_bytes"] > 0) == (memory == "streamed")
    return row


def transformers_model(file: Path, device: str) -> Any:
    """In float32."""
    load: Any = AutoModelForCausalLM.from_pretrained
    model = load(file.parent, gguf_file=file.name, dtype=torch.float32)
    return model.eval().to(device)


def beside(llm: LLM, exact: Any, is_exact: bool) -> Row:
    """What one engine makes of the text."""
    text = llm.tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    prompts = [text[-n:] for n in PROMPT_TOKENS]
    num_right, missed = 0, 0.0
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = output.outputs[0].token_ids
        logits = logits_of(exact, prompt + answer[:-1])[len(prompt) - 1 :]
        below = logits.amax(1) - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        num_right += int((below <= NEAR_TIE).sum())
        missed = max(missed, float(below.max()))
    num_tokens = len(prompts) * ANSWER_TOKENS
    found, truth = perplexity(llm, text[:TEXT_TOKENS]), true_perplexity(exact, text[:TEXT_TOKENS])
    return {
        "attention": llm.plan.attention,
        "weights": llm.plan.quantization,
        "h2d_bytes": llm.llm_engine.kv.counters.h2d_bytes,
        "tokens": num_tokens,
        "right": num_right,
        "largest_miss": round(missed, 5),
        "perplexity": round(found, 4),
        "transformers_perplexity": round(truth, 4),
        "ok": abs(found / truth - 1) < 0.01 and (num_right == num_tokens or not is_exact),
    }


def logits_of(model: Any, ids: list[int]) -> Tensor:
    """float32 [tokens, vocab] on the CPU."""
    with torch.inference_mode():
        there: Tensor = model(torch.tensor([ids], device=model.device), use_cache=False).logits[0]
    return there.float().cpu()


def true_perplexity(model: Any, ids: list[int]) -> float:
    """Of the text by transformers."""
    scores = logits_of(model, ids)[:-1].log_softmax(-1)
    return float(scores.gather(1, torch.tensor(ids[1:])[:, None]).mean().neg().exp())
