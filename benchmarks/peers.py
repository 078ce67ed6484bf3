"""Runs one engine on one workload in its own process: `PYTHON peers.py KIND WORK.json`.

Sets up every engine of `bench.py compare` at its best. PYTHON is the interpreter in which that
engine is installed, so only the standard library is imported at the top, and nanoengine only for
the kind "nanoengine". Knows nothing of rounds, ratios or other engines.

Prints {"event": "first token"} once anything was generated, then one line with the results:
{"version": ..., "peak_memory_mib": ..., "parts": {name: {"seconds", "input_tokens", "num_cached",
"outputs"}}}, lists with one entry a request. The engine's own output goes to stderr.
"""

from __future__ import annotations

import glob
import importlib
import itertools
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

# (prompts, tokens to generate for each) -> (generated tokens, tokens found in a prefix cache)
Generate = Callable[[list[list[int]], list[int]], tuple[list[list[int]], list[int]]]

LLAMA_TYPES = {"f32": 0, "bf16": 30}  # GGML_TYPE_F32, GGML_TYPE_BF16
STARTED_AGAIN = "NANOENGINE_PEER_STARTED_AGAIN"
# The step sizes that gave the fastest prefill; other settings are the engines' defaults.
OPENVINO_TOKENS_A_STEP = 2048


@dataclass(frozen=True)
class Work:
    """One workload from benchmarks/compare.py. `model` is what this kind of engine loads.

    parts: names of equal runs over the prompts, one after the other. kv: "bf16", "f32" or
    "default", the engine's own choice. dtype: "bfloat16" or "float32". keeps_codes: of a GGUF file.
    activations: "int8", of 8 bits where they meet codes. sampling: temperature, top_k and top_p of
    all prompts; {}: greedy.
    """

    model: str
    prompts: list[list[int]]
    max_tokens: list[int]
    parts: list[str]
    warm_up: list[list[int]]
    warm_up_tokens: int
    num_threads: int
    kv_gib: int
    max_model_len: int
    prefix_caching: bool
    kv: str
    dtype: str
    keeps_codes: bool
    activations: str
    sampling: dict[str, float]


@dataclass(frozen=True)
class Engine:
    """A loaded engine. `generate` ignores end-of-text tokens."""

    version: str
    generate: Generate


def main(argv: list[str]) -> None:
    """Load the engine, warm it up and time each part."""
    kind, path = argv
    work = Work(**json.loads(Path(path).read_text(encoding="utf-8")))
    if kind == "vllm":
        _preload_for_vllm(work.num_threads)
    out = _own_stdout()
    engine = ENGINES[kind](work)
    if work.warm_up:
        engine.generate(work.warm_up, [work.warm_up_tokens] * len(work.warm_up))
        _say(out, {"event": "first token"})
    parts = {}
    for name in work.parts:
        start = time.perf_counter()
        outputs, num_cached = engine.generate(work.prompts, work.max_tokens)
        seconds = time.perf_counter() - start
        _say(out, {"event": "first token"})
        parts[name] = {
            "seconds": seconds,
            "input_tokens": [len(prompt) for prompt in work.prompts],
            "num_cached": num_cached,
            "outputs": outputs,
        }
    _say(out, {"version": engine.version, "peak_memory_mib": peak_memory_mib(), "parts": parts})
    out.flush()
    os._exit(0)  # some engines take seconds to shut down, and some crash in it


def _own_stdout() -> TextIO:
    """Keep standard output for this file; all other output goes to standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


def _say(out: TextIO, message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()


def peak_memory_mib() -> float:
    """Peak resident set of this process.

    On Linux getrusage's figure includes the process that started this one, so /proc is read first.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        (kib,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(kib) / 1024
    except (OSError, ValueError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / (1 << 20)


def _nanoengine(work: Work) -> Engine:
    nanoengine = importlib.import_module("nanoengine")
    llm = nanoengine.LLM(
        work.model,
        dtype=work.dtype,
        quantization="gguf" if work.keeps_codes else "none",
        activation_dtype=work.activations or None,
        device="cpu",
        num_threads=work.num_threads,
        kv_cache_gib=work.kv_gib,
        enable_prefix_caching=work.prefix_caching,
    )
    print(llm.plan)
    sampling = work.sampling or {"temperature": 0}

    def generate(
        prompts: list[list[int]], max_tokens: list[int]
    ) -> tuple[list[list[int]], list[int]]:
        params = [
            nanoengine.SamplingParams(ignore_eos=True, max_tokens=count, **sampling)
            for count in max_tokens
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for error in (output.error for output in outputs if output.error):
            raise error
        return [o.outputs[0].token_ids for o in outputs], [o.num_cached_tokens for o in outputs]

    return Engine(nanoengine.__version__, generate)


def _vllm(work: Work) -> Engine:
    os.environ |= {
        # One process: the second one of the default setting would keep one of two cores busy.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(work.kv_gib),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    vllm = importlib.import_module("vllm")
    llm = vllm.LLM(
        work.model,
        dtype=work.dtype,
        max_model_len=work.max_model_len,
        enable_prefix_caching=work.prefix_caching,
    )
    sampling = work.sampling or {"temperature": 0}

    def generate(
        prompts: list[list[int]], max_tokens: list[int]
    ) -> tuple[list[list[int]], list[int]]:
        params = [
            vllm.SamplingParams(ignore_eos=True, max_tokens=n, detokenize=False, **sampling)
            for n in max_tokens
        ]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        num_cached = [output.num_cached_tokens or 0 for output in outputs]
        return [list(output.outputs[0].token_ids) for output in outputs], num_cached

    return Engine(vllm.__version__, generate)


def _preload_for_vllm(num_threads: int) -> None:
    """Restart this process with the OpenMP and malloc that vLLM's CPU guide wants preloaded.

    vLLM does this for its worker processes, which are switched off here. Without OMP_NUM_THREADS it
    uses one thread.
    """
    if STARTED_AGAIN in os.environ:
        return
    found = [
        *glob.glob(os.path.join(sys.prefix, "lib", "libiomp5.so"))[:1],
        *glob.glob("/usr/lib/*/libtcmalloc_minimal.so.4")[:1],
    ]
    cores = sorted(os.sched_getaffinity(0))[:num_threads]
    settings = {
        STARTED_AGAIN: "1",
        "LD_PRELOAD": os.environ.get("LD_PRELOAD", ":".join(found)),
        "OMP_NUM_THREADS": str(num_threads),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{','.join(map(str, cores))}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
    }
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | settings)


def _transformers(work: Work) -> Engine:
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    torch.set_num_threads(work.num_threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        work.model,
        dtype=getattr(torch, work.dtype),
        attn_implementation="sdpa",
        local_files_only=True,
    )

    def generate(
        prompts: list[list[int]], max_tokens: list[int]
    ) -> tuple[list[list[int]], list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        count = max(max_tokens)
        settings = transformers.GenerationConfig(
            do_sample=bool(work.sampling),
            max_new_tokens=count,
            min_new_tokens=count,
            pad_token_id=0,
            **work.sampling,
        )
        with torch.inference_mode():
            rows = model.generate(ids, attention_mask=mask, generation_config=settings).tolist()
        outputs = [
            row[width : width + wanted] for row, wanted in zip(rows, max_tokens, strict=True)
        ]
        return outputs, [0] * len(prompts)

    return Engine(transformers.__version__, generate)


def _llama_cpp(work: Work) -> Engine:
    llama_cpp = importlib.import_module("llama_cpp")
    kv_type = LLAMA_TYPES.get(work.kv)
    types = {} if kv_type is None else {"type_k": kv_type, "type_v": kv_type}
    llm = llama_cpp.Llama(
        work.model,
        n_ctx=work.max_model_len,
        n_threads=work.num_threads,
        n_threads_batch=work.num_threads,
        verbose=False,
        **types,
    )

    def generate(
        prompts: list[list[int]], max_tokens: list[int]
    ) -> tuple[list[list[int]], list[int]]:
        outputs = [
            list(itertools.islice(llm.generate(prompt, temp=0.0), count))
            for prompt, count in zip(prompts, max_tokens, strict=True)
        ]
        return outputs, [0] * len(prompts)

    return Engine(llama_cpp.__version__, generate)


def _openvino(work: Work) -> Engine:
    openvino = importlib.import_module("openvino")
    genai = importlib.import_module("openvino_genai")
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = work.kv_gib
    scheduler.max_num_batched_tokens = OPENVINO_TOKENS_A_STEP
    scheduler.enable_prefix_caching = work.prefix_caching
    types = {"bf16": openvino.Type.bf16, "f32": openvino.Type.f32}
    properties = {
        "INFERENCE_PRECISION_HINT": types["bf16" if work.dtype == "bfloat16" else "f32"],
        "INFERENCE_NUM_THREADS": work.num_threads,
    }
    if work.kv in types:
        properties["KV_CACHE_PRECISION"] = types[work.kv]
    if work.kv in types and not work.activations:
        # Beside weights in codes it makes 8-bit integers of activations by default.
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
    pipe = genai.ContinuousBatchingPipeline(work.model, scheduler, "CPU", properties)

    def generate(
        prompts: list[list[int]], max_tokens: list[int]
    ) -> tuple[list[list[int]], list[int]]:
        numpy = importlib.import_module("numpy")
        inputs = [openvino.Tensor(numpy.array([p], dtype=numpy.int64)) for p in prompts]
        settings = []
        for count in max_tokens:
            config = genai.GenerationConfig()
            config.max_new_tokens, config.min_new_tokens = count, count
            config.ignore_eos, config.do_sample = True, bool(work.sampling)
            for name, value in work.sampling.items():
                setattr(config, name, value)
            settings.append(config)
        results = pipe.generate(inputs, settings)
        return [list(r.m_generation_ids[0]) for r in results], [0] * len(prompts)

    return Engine(genai.__version__, generate)


ENGINES: dict[str, Callable[[Work], Engine]] = {
    "nanoengine": _nanoengine,
    "vllm": _vllm,
    "transformers": _transformers,
    "llama.cpp": _llama_cpp,
    "openvino": _openvino,
}


if __name__ == "__main__":
    # File names in this folder would hide other packages.
    sys.path = [
        path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent
    ]
    main(sys.argv[1:])
