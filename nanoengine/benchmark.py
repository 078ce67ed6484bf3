"""Offline benchmarks: `python bench.py offline`, or `python -m nanoengine.benchmark offline`.

Logs and the memory plan go to stderr; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

import nanoengine
from nanoengine.llm import LLM
from nanoengine.sampling_params import SamplingParams

# num_seqs, min_input, max_input, min_output, max_output
CPU_WORKLOAD = (32, 64, 512, 64, 256)
GPU_WORKLOAD = (256, 100, 1024, 100, 1024)  # nano-vllm's
WORKLOAD = ("num_seqs", "min_input", "max_input", "min_output", "max_output")


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark named on the command line."""
    args = _parser().parse_args(argv)
    result = args.run(args)
    line = json.dumps(result)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")
    print(line)


def offline(args: argparse.Namespace) -> dict[str, Any]:
    """Random prompts of random lengths, all queued at once, greedy, every output at full length."""
    with _llm(args) as llm:
        for name, value in zip(WORKLOAD, _default_workload(llm), strict=True):
            if getattr(args, name) is None:
                setattr(args, name, value)
        prompts, params = workload(args, llm.llm_engine.model_config.vocab_size)
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        elapsed = time.perf_counter() - start
        num_in = sum(map(len, prompts))
        num_out = sum(len(output.outputs[0].token_ids) for output in outputs)
        return {
            "workload": {
                "name": "offline",
                "model": args.model,
                "seed": args.seed,
                "dtype": str(llm.plan.kv.dtype).removeprefix("torch."),
                "device": llm.llm_engine.device.name,
                **{name: getattr(args, name) for name in WORKLOAD},
                "input_tokens": num_in,
                "output_tokens": num_out,
            },
            "versions": versions(),
            "threads": torch.get_num_threads(),
            "attention": llm.plan.attention,
            "elapsed_s": round(elapsed, 3),
            "output_tokens_per_s": round(num_out / elapsed, 1),
            "total_tokens_per_s": round((num_in + num_out) / elapsed, 1),
            "peak_memory_mib": round(llm.llm_engine.device.peak_memory_mib(), 1),
        }


def workload(
    args: argparse.Namespace, vocab_size: int
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of random token ids and their parameters, a function of the seed and the sizes
    only.
    """
    rng = random.Random(args.seed)
    prompts, params = [], []
    for _ in range(args.num_seqs):
        length = rng.randint(args.min_input, args.max_input)
        prompts.append([rng.randrange(vocab_size) for _ in range(length)])
        max_tokens = rng.randint(args.min_output, args.max_output)
        params.append(SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens))
    return prompts, params


def versions() -> dict[str, str]:
    """What the figures were measured with."""
    return {
        "nanoengine": nanoengine.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def _llm(args: argparse.Namespace) -> LLM:
    settings = {
        name: getattr(args, name)
        for name in (
            "device",
            "dtype",
            "max_num_seqs",
            "max_num_batched_tokens",
            "kv_cache_gib",
            "num_threads",
        )
        if getattr(args, name) is not None
    }
    llm = LLM(args.model, load_format=args.load_format, **settings)
    print(llm.plan, file=sys.stderr)
    return llm


def _default_workload(llm: LLM) -> tuple[int, int, int, int, int]:
    return CPU_WORKLOAD if llm.llm_engine.device.name == "cpu" else GPU_WORKLOAD


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench.py",
        description=__doc__,
        epilog="example: python bench.py offline --num-seqs 8 --max-output 128 --json result.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="WORK")
    sub = commands.add_parser(
        "offline",
        help="many requests queued at once: output tokens per second",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    sub.set_defaults(run=offline)
    sub.add_argument("--model", default="smollm2-135m", help="folder, .gguf file or smollm2-135m")
    sub.add_argument("--device", help='"cpu", "cuda" or "cuda:N"; default: what is here')
    sub.add_argument(
        "--dtype", help='"float32" or "bfloat16"; default: what the device multiplies natively'
    )
    sub.add_argument("--load-format", default="auto", help='"dummy": random weights')
    for name, on_cpu, on_gpu in zip(WORKLOAD, CPU_WORKLOAD, GPU_WORKLOAD, strict=True):
        flag = "--" + name.replace("_", "-")
        sub.add_argument(flag, type=int, help=f"default: {on_cpu} on a CPU, {on_gpu} on a GPU")
    sub.add_argument("--seed", type=int, default=0, help="of prompts and lengths")
    sub.add_argument("--max-num-seqs", type=int, help="requests running at once")
    sub.add_argument("--max-num-batched-tokens", type=int, help="tokens computed in a step")
    sub.add_argument("--kv-cache-gib", type=float, help="KV budget")
    sub.add_argument("--num-threads", type=int, help="CPU threads")
    sub.add_argument("--json", metavar="FILE", help="also write the result here, indented")
    return parser


if __name__ == "__main__":
    main()
