"""The requests of nano-vllm's benchmark, by us and by other engines: parts of gpu_check.py."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers

from benchmarks.gpu.gpu_measure import Row, Scale, read_weights, running, token_bytes
from nanoengine import SamplingParams
from nanoengine.config.engine import GIB
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.loading.model_config import read_model_config
from nanoengine.models.weight_shapes import weight_shapes

ROOT = Path(__file__).parents[2]
NANO_TEMPERATURE = 0.6  # nano-vllm has no greedy decoding
NANO_SECONDS = 200


@dataclass(frozen=True)
class Peers:
    """Where other engines are, None where they are not here. vllm: an interpreter that has it;
    nano_vllm: a folder with its source.
    """

    vllm: str | None = None
    nano_vllm: str | None = None


def requests_of(scale: Scale) -> tuple[list[list[int]], list[int]]:
    """Prompts and output lengths of nano-vllm's benchmark, drawn as it draws them."""
    num, _, longest = scale.workload
    rng = random.Random(0)
    most = 10_000 if not scale.is_rehearsal else 1000
    low = min(100, longest // 2)
    prompts = [[rng.randint(0, most) for _ in range(rng.randint(low, longest))] for _ in range(num)]
    return prompts, [rng.randint(low, longest) for _ in range(num)]


def workload(folder: Path, scale: Scale, read_gb_per_s: float, vllm: str | None = None) -> Row:
    """Requests of random lengths, as nano-vllm's benchmark has them, and some of them beside
    transformers' continuous batching. vllm: an interpreter that has it, to do all of them.
    """
    _, num_beside, longest = scale.workload
    prompts, lengths = requests_of(scale)
    num = len(prompts)
    with running(folder, scale, max_num_seqs=256, max_model_len=4 * longest) as made:
        planned = made.plan.weight_bytes + made.plan.activation_bytes
        planned += made.plan.kv.num_blocks * made.plan.kv.block_bytes
        answer_all(made, prompts[:2], [4, 4])
        answer_all(made, prompts, [2] * num)  # compiles, and captures the largest graphs
        seconds = answer_all(made, prompts, lengths)
        some, short = prompts[:num_beside], [-(-n // 4) for n in lengths[:num_beside]]
        beside = answer_all(made, some, short)
        peak = made.device.peak_memory_mib() * (1 << 20)
        free, total = made.device.memory()
        context = sum(len(p) * n + n * n / 2 for p, n in zip(prompts, lengths, strict=True))
        read = max(lengths) * read_weights(made) + context * token_bytes(made)
    row: Row = {
        "requests": num,
        "output_tokens": sum(lengths),
        "seconds": round(seconds, 2),
        "output_tokens_per_s": round(sum(lengths) / seconds, 1),
        "share_of_read": round(read / seconds / 1e9 / read_gb_per_s, 3),
        "planned_gib": round(planned / GIB, 2),
        "peak_gib": round(peak / GIB, 2),
        "used_share": round(1 - free / total, 3),
    }
    if vllm is not None:
        row["vllm"] = _vllm(vllm, folder, scale, prompts, lengths)
    try:
        theirs = _transformers(folder, scale, some, short)
    except Exception as error:  # a peer that cannot run here is told, not a failed check
        return row | {"transformers": f"{type(error).__name__}: {str(error)[:300]}"}
    return row | {
        "beside_transformers": {
            "requests": num_beside,
            "output_tokens": sum(short),
            "output_tokens_per_s": round(sum(short) / beside, 1),
            "transformers_output_tokens_per_s": round(sum(short) / theirs, 1),
            "ratio": round(theirs / beside, 2),
        }
    }


def answer_all(
    made: LLMEngine, prompts: list[list[int]], lengths: list[int], temperature: float = 0
) -> float:
    """Seconds until all requests are done."""
    for prompt, length in zip(prompts, lengths, strict=True):
        params = SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True)
        made.add_request(prompt, params)
    start = time.perf_counter()
    while made.has_unfinished_requests:
        made.step()
    return time.perf_counter() - start


VLLM = """
import json, sys, time
import vllm
work = json.load(sys.stdin)
llm = vllm.LLM(work["folder"], load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
               max_model_len=work["max_model_len"], max_num_seqs=256, enable_prefix_caching=False)
def answer(lengths):
    params = [vllm.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
              for n in lengths]
    start = time.perf_counter()
    prompts = [{"prompt_token_ids": p} for p in work["prompts"]]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
    return time.perf_counter() - start
answer([2] * len(work["lengths"]))
print(json.dumps({"version": vllm.__version__, "seconds": answer(work["lengths"])}))
"""


def _vllm(
    python: str, folder: Path, scale: Scale, prompts: list[list[int]], lengths: list[int]
) -> Row:
    """All requests by vLLM, random weights in the same shapes."""
    work = {
        "folder": str(folder),
        "max_model_len": 4 * scale.workload[2],
        "prompts": prompts,
        "lengths": lengths,
    }
    run = subprocess.run(
        [python, "-c", VLLM], input=json.dumps(work), capture_output=True, text=True, check=False
    )
    if run.returncode:
        return {"error": run.stderr.strip().splitlines()[-1:]}
    found = json.loads(run.stdout.splitlines()[-1])
    tokens_per_s = round(sum(lengths) / found["seconds"], 1)
    return {"version": found["version"], "output_tokens_per_s": tokens_per_s}


def _transformers(
    folder: Path, scale: Scale, prompts: list[list[int]], lengths: list[int]
) -> float:
    config = transformers.AutoConfig.from_pretrained(folder)
    model_class: Any = transformers.AutoModelForCausalLM
    model = model_class.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model = model.to(scale.device).eval()
    settings = transformers.GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=max(lengths)
    )
    seconds, options = 0.0, {}
    if scale.is_rehearsal:  # else it takes most of the machine's memory for its KV
        limits = transformers.ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=256)
        options["continuous_batching_config"] = limits
    begin = model.continuous_batching_context_manager
    with begin(generation_config=settings, **options) as manager:
        for wanted in ([4] * len(lengths), lengths):  # once to warm up
            start = time.perf_counter()
            for prompt, length in zip(prompts, wanted, strict=True):
                manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1)
            num_released, deadline = len(prompts), start + 150
            while num_released:
                result = manager.get_result(timeout=1)
                num_released -= result is not None and result.is_finished()
                if time.perf_counter() > deadline:
                    raise TimeoutError(f"{num_released} requests unfinished after 150 s")
            seconds = time.perf_counter() - start
    del model
    gc.collect()
    return seconds


def nano_vllm(folder: Path, tokenizer: Path, scale: Scale, source: str | None) -> Row:
    """The requests of nano-vllm's benchmark, by it and by us, sampled at the same temperature.
    tokenizer: a checkpoint that has one. source: a folder with nano-vllm.
    """
    if source is None:
        how = "not run: give --nano-vllm a folder with github.com/GeeeekExplorer/nano-vllm"
        return {"nano_vllm": how}
    prompts, lengths = requests_of(scale)
    most = 4 * scale.workload[2]
    with running(folder, scale, max_num_seqs=256, max_model_len=most) as made:
        answer_all(made, prompts, [2] * len(prompts), NANO_TEMPERATURE)
        ours = answer_all(made, prompts, lengths, NANO_TEMPERATURE)
    theirs = run_nano_vllm(write_weights(folder, tokenizer), source, prompts, lengths)
    tokens = sum(lengths)
    return {
        "requests": len(prompts),
        "output_tokens": tokens,
        "output_tokens_per_s": round(tokens / ours, 1),
        "nano_vllm_output_tokens_per_s": round(tokens / theirs["seconds"], 1),
        "nano_vllm_attention": theirs["attention"],
        "ratio": round(theirs["seconds"] / ours, 2),
    }


def run_nano_vllm(
    model: Path, source: str, prompts: list[list[int]], lengths: list[int]
) -> dict[str, Any]:
    """What run_nano_vllm.py says. Raises RuntimeError with the end of what it wrote if it fails."""
    work = {
        "model": str(model),
        "prompts": prompts,
        "lengths": lengths,
        "temperature": NANO_TEMPERATURE,
    }
    path = os.pathsep.join((source, str(ROOT), os.environ.get("PYTHONPATH", "")))
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.run_nano_vllm"],
        input=json.dumps(work),
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=NANO_SECONDS,
    )
    if run.returncode:
        raise RuntimeError(f"nano-vllm failed: {run.stderr.strip()[-400:]}")
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def write_weights(folder: Path, tokenizer: Path) -> Path:
    """A checkpoint with random weights of the folder's shapes, and a tokenizer."""
    made = folder.with_name(f"{folder.name}-weights")
    made.mkdir(exist_ok=True)
    for file in tokenizer.glob("*token*"):
        shutil.copy(file, made)
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (made / "config.json").write_text(json.dumps(config))
    weights = {
        name: torch.randn(shape, dtype=torch.bfloat16) * 0.02
        for name, shape in weight_shapes(read_model_config(folder)).items()
    }
    safetensors.torch.save_file(weights, made / "model.safetensors")
    return made
