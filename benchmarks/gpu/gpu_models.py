"""All tiny models on a device beside transformers on the CPU, and what is chosen there beside what
the CPU chooses: parts of gpu_check.py.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from checkpoints import reference, reference_logits
from driver import Driver
from mtp_models import with_head
from tiny_models import TINY
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.gpu.gpu_measure import Row, Scale
from nanoengine import LLM, ConfigError, SamplingParams
from nanoengine.engine.draft_length import PayingDrafts
from nanoengine.engine.llm_engine import LLMEngine

Answer = tuple[list[int], list[int]]  # a prompt and the tokens after it
MOST_PROCESSES = 12
IN_REHEARSAL = ("gemma2", "qwen3.5")
# With a head for multi-token prediction; the second has a tensor for each expert.
WITH_HEAD = ("qwen3.5", "glm4-moe", "deepseek-v3")
BLOCK = 8
# How far logits may be off, and how far below the likeliest token a chosen one may be. A wrong
# kernel is off by ones: logits of these models differ by several.
TOLERANCE = 2e-3
SMALL: dict[str, Any] = {
    "kvcache_block_size": BLOCK,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "num_gpu_blocks": 200,
}
STREAMED: dict[str, Any] = {
    "enable_cpu_offload": True,
    "offload_mode": "stream",
    "kv_offload_gib": 0.02,
    "num_gpu_blocks": 8,
    "ring_slots": 2,
    "slot_tokens": 2 * BLOCK,
    "stream_mib_per_step": 1024.0,
    "speculative": "off",
}
# What a request may ask of the choice of its tokens.
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "logprobs": 5, "prompt_logprobs": 3},
    "plain": {"seed": 1},
    "cut": {"seed": 2, "temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "logprobs": 2},
    "penalties": {
        "seed": 3,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
    },
    "biased": {"seed": 4, "logit_bias": {5: 3.0, 6: -100.0}, "min_tokens": 9},
    "allowed": {"seed": 5, "allowed_token_ids": [*range(30, 60)], "bad_words": ["!", "ab"]},
    "three": {"seed": 6, "n": 3},
}
FORM: dict[str, Any] = {"seed": 7, "structured_outputs": {"regex": "[a-f]{4}(yes|no)[0-9]{9}"}}


def prompts(block: int = BLOCK) -> list[list[int]]:
    """Lengths around multiples of the block, one shared beginning."""
    lengths = (1, block - 1, block, block + 1, 2 * block + 1, 7 * block + 4, 15 * block)
    made = [[(i * 31 + n) % 256 for i in range(n)] for n in lengths]
    return [*made, made[5][: 3 * block]]


def all_models(scale: Scale) -> Iterator[Row]:
    """A row for each model of the tests, several at a time in processes of their own: how far the
    logits of its layouts are from transformers' in float32, and in bfloat16 beside transformers'
    own error. Where transformers is too old to have the model, the row says so.
    """
    names = IN_REHEARSAL if scale.is_rehearsal else tuple(TINY)
    num = max(1, min(MOST_PROCESSES, len(names), 3 * (os.cpu_count() or 2) // 4))
    # An error of the GPU breaks its process for good: others take over.
    with multiprocessing.get_context("spawn").Pool(num, maxtasksperchild=4) as pool:
        yield from pool.imap_unordered(partial(model_row, device=scale.device), names)


def model_row(name: str, device: str) -> Row:
    """One model: resident and streamed, in float32 and in bfloat16, and guessing by the head that
    it has.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        try:
            TINY[name](path)
            exact = reference(path)
        except (AttributeError, ImportError, KeyError, ValueError) as error:
            return {"model": name, "not_here": _text(error)}
        parts: dict[str, Callable[[], Row]] = {
            "resident": lambda: in_float32(path, exact, device),
            "streamed": lambda: in_float32(path, exact, device, **STREAMED),
            "bfloat16": lambda: in_bfloat16(path, exact, device),
            "bfloat16_streamed": lambda: in_bfloat16(path, exact, device, **STREAMED),
        }
        if name in WITH_HEAD:
            parts["mtp_head"] = lambda: by_head(path, exact, device)
        if name.startswith("gemma4") and hasattr(transformers, "Gemma4AssistantConfig"):
            parts["assistant"] = lambda: by_assistant(path, exact, device)
        row: Row = {"model": name}
        for part, check in parts.items():
            try:
                row[part] = check()
            except ConfigError as error:
                row[part] = {"refused": _text(error)}
            except Exception as error:  # it must not hide the other parts
                row[part] = {"error": _text(error), "ok": False}
    return row


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:400]}"


def in_float32(path: Path, exact: Any, device: str, **settings: Any) -> Row:
    """How far logits are off, and how far a chosen token is below the likeliest, at most. With
    guesses there are logits of some that were wrong, so only the tokens count.
    """
    made = LLMEngine(path, device=device, dtype="float32", **(SMALL | settings))
    found: Row = {"attention": made.plan.attention}
    ids, ours, counts = answers_of(made)
    theirs = wanted(exact, ids)
    chosen = [torch.tensor(new)[:, None] for _, new in ids]
    below = [b.amax(1) - b.gather(1, new)[:, 0] for b, new in zip(theirs, chosen, strict=True)]
    least = error = float(torch.cat(below).max())
    if not counts["guessed"]:
        error = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
        found["largest_error"] = round(error, 6)
    found |= {"below_the_likeliest": round(least, 6), **counts}
    return found | {"ok": max(error, least) < TOLERANCE}


def by_head(path: Path, exact: Any, device: str) -> Row:
    """Two guesses of its head in each step, however bad they are."""
    folder = with_head(path, path.parent, splits_experts=path.name == "glm4-moe")
    with mock.patch.object(PayingDrafts, "_number", lambda self: 2):
        found = in_float32(folder, exact, device, speculative="mtp:2")
    return found | {"ok": found["ok"] and found["guessed"] > 0}


def by_assistant(path: Path, exact: Any, device: str) -> Row:
    """Two guesses of an assistant in each step, however bad they are."""
    from assistants import write_assistant  # older releases of transformers have none

    folder = write_assistant(path, path.parent / "assistant", has_centroids=True)
    settings = {"speculative": "mtp:2", "draft_model": str(folder)}
    with mock.patch.object(PayingDrafts, "_number", lambda self: 2):
        found = in_float32(path, exact, device, **settings)
    return found | {"ok": found["ok"] and found["guessed"] > 0}


def in_bfloat16(path: Path, exact: Any, device: str, **settings: Any) -> Row:
    """The median error of a row of logits, and that of transformers on the CPU over the same
    tokens. The median: near ties of a router send some tokens elsewhere.
    """
    made = LLMEngine(path, device=device, dtype="bfloat16", **(SMALL | settings))
    ids, ours, _ = answers_of(made)
    load: Any = AutoModelForCausalLM.from_pretrained
    rounded = load(path, dtype=torch.bfloat16, attn_implementation="eager").eval()
    truth = wanted(exact, ids)
    errors = [
        float(torch.cat([(a - b).norm(dim=1) for a, b in zip(rows, truth, strict=True)]).median())
        for rows in (ours, wanted(rounded, ids))
    ]
    return {
        "median_error": round(errors[0], 5),
        "transformers_median_error": round(errors[1], 5),
        "ok": errors[0] < 1.5 * errors[1],
    }


def answers_of(made: LLMEngine) -> tuple[list[Answer], list[Tensor], dict[str, int]]:
    """Prompt and tokens of each request, the logits [tokens, vocab] they were chosen from, and
    counts of bytes that came from the host and of guesses. Closes the engine.
    """
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with closing(made):
        driver = Driver(made)
        outputs = driver.run(prompts(), params)
        moved = made.kv.counters.h2d_bytes
    ids = [(p, o.outputs[0].token_ids) for p, o in zip(prompts(), outputs, strict=True)]
    rows = [torch.stack(driver.logits[output.request_id]).cpu() for output in outputs]
    guessed = sum(o.metrics.num_guessed for o in outputs if o.metrics is not None)
    return ids, rows, {"h2d_bytes": moved, "guessed": guessed}


def wanted(model: Any, ids: list[Answer]) -> list[Tensor]:
    """transformers' logits from which these tokens had to be chosen."""
    return [
        reference_logits(model, prompt + new[:-1])[len(prompt) - 1 :].float() for prompt, new in ids
    ]


def chosen_as_on_cpu(folder: Path, scale: Scale) -> Row:
    """Token ids of requests of all kinds in float32, on the device and on the CPU: sampling depends
    on (seed, position) alone, so they differ only where two tokens are nearly alike. Resident,
    streamed, with guesses from the text, and beams.
    """
    kinds = CHOICES | ({"form": FORM} if importlib.util.find_spec("llguidance") else {})
    text = [i % 7 + 40 for i in range(60)]
    work = [(prompt, kind) for prompt in (*prompts()[3:6], text) for kind in kinds.values()]
    truth = chosen(folder, "cpu", work)
    row: Row = {"kinds": [*kinds]}
    for name, settings in {
        "resident": {},
        "streamed": STREAMED,
        "guessing": {"speculative": "ngram:4"},
    }.items():
        found = chosen(folder, scale.device, work, **settings)
        equal = sum(a == b for a, b in zip(found, truth, strict=True))
        row[name] = {"completions": len(truth), "equal": equal, "ok": equal >= 0.97 * len(truth)}
    return row


def chosen(
    folder: Path, device: str, work: list[tuple[list[int], dict[str, Any]]], **settings: Any
) -> list[list[int]]:
    """The token ids of each completion, then those of beams."""
    with LLM(folder, device=device, dtype="float32", **(SMALL | settings)) as llm:
        params = [SamplingParams(max_tokens=24, ignore_eos=True, **kind) for _, kind in work]
        outputs = llm.generate([prompt for prompt, _ in work], params, use_tqdm=False)
        for output in outputs:
            if output.error is not None:
                raise output.error
        beams = llm.beam_search(prompts()[3:6], beam_width=3, max_tokens=12, use_tqdm=False)
    found = [completion.token_ids for output in outputs for completion in output.outputs]
    return found + [[*beam.token_ids] for output in beams for beam in output.sequences]
