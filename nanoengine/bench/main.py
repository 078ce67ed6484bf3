"""Benchmarks: `python bench.py offline`, or `nanoengine bench offline`.

Logs and the memory plan go to stderr; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanoengine.api.llm import LLM
from nanoengine.bench.report import check_file, first_difference, versions
from nanoengine.bench.workload import check_lengths, count, positive, random_requests
from nanoengine.config.attention import ATTENTION_LIMITS
from nanoengine.errors import EngineError
from nanoengine.outputs import RequestOutput
from nanoengine.sampling_params import SamplingParams

# num_seqs, min_input, max_input, min_output, max_output
CPU_WORKLOAD = (32, 64, 512, 64, 256)
GPU_WORKLOAD = (256, 100, 1024, 100, 1024)  # nano-vllm's
WORKLOAD = ("num_seqs", "min_input", "max_input", "min_output", "max_output")


class DefaultsFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Says a default after the help of each flag that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def main(
    argv: list[str] | None = None,
    prog: str = "bench.py",
    kind: type[argparse.ArgumentParser] = argparse.ArgumentParser,
) -> None:
    """Run the benchmark named on the command line. prog: the command's name in its help. kind: of
    parser.
    """
    parser, commands = make_parser(f"{__doc__}", prog, kind)
    add_commands(commands)
    run(parser.parse_args(argv))


def run(args: argparse.Namespace) -> None:
    """Run the parsed command and print its result. Raises ConfigError for a file that could not be
    written then.
    """
    for name in ("json", "record"):
        check_file(f"--{name}", getattr(args, name, None))
    result = args.run(args)
    print(json.dumps(result))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")


def offline(args: argparse.Namespace) -> dict[str, Any]:
    """Answer random prompts of random lengths, all queued at once, greedy, at full length."""
    for name, value in zip(WORKLOAD, _default_workload(args.device), strict=True):
        if getattr(args, name) is None:
            setattr(args, name, value)
    check_lengths(args)
    with make_llm(args) as llm:
        prompts, params = workload(args, llm.llm_engine.model_config.vocab_size)
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
        start = time.perf_counter()
        outputs = answered(llm.generate(prompts, params))
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


def answered(outputs: list[RequestOutput]) -> list[RequestOutput]:
    """These outputs. Raises the first error of a request: what failed has no speed."""
    for output in outputs:
        if output.error is not None:
            raise output.error
    return outputs


def offload(args: argparse.Namespace) -> dict[str, Any]:
    """Run the same long requests resident, read in place, and streamed, one mode after the other.

    Decode speed is the number of tokens after the first over their time. Every mode must give the
    same tokens; a row shows at which token each request first differs from the resident run.
    """
    on_cpu = args.device in (None, "cpu")
    rows: dict[str, dict[str, Any]] = {}
    resident: list[list[int]] = []
    blocks_each = -(-(args.input_len + args.output_len) // args.kvcache_block_size)
    num_blocks = (blocks_each + 1) * args.num_seqs + 2
    for mode in ("resident", "in_place", "stream") if on_cpu else ("resident", "stream"):
        with make_llm(args, **offload_settings(args, mode, num_blocks)) as llm:
            outputs = _run_long(args, llm)
            rows[mode] = _offload_row(llm, outputs)
        ids = [output.outputs[0].token_ids for output in outputs]
        resident = resident or ids
        rows[mode]["first_difference"] = list(map(first_difference, ids, resident))
        speed = rows[mode]["decode_tokens_per_s"] / rows["resident"]["decode_tokens_per_s"]
        rows[mode]["decode_ratio_to_resident"] = round(speed, 3)
    names = ("input_len", "output_len", "num_seqs", "num_gpu_blocks", "kvcache_block_size")
    return {
        "workload": {
            "name": "offload",
            "model": args.model,
            "seed": args.seed,
            **{name: getattr(args, name) for name in names},
        },
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "memcpy_gb_per_s": round(memcpy_gb_per_s(), 2),
        **rows,
    }


def serve(args: argparse.Namespace) -> dict[str, Any]:
    """Ask a running server."""
    try:
        from nanoengine.bench.serve import run_serve  # imports the HTTP client
    except ModuleNotFoundError as error:
        raise EngineError(
            f"the benchmark of servers needs {error.name}: pip install 'nanoengine[server]'"
        ) from error
    check_lengths(args)
    return run_serve(args)


def _run_long(args: argparse.Namespace, llm: LLM) -> list[RequestOutput]:
    rng = random.Random(args.seed)
    vocab = llm.llm_engine.model_config.vocab_size
    prompts: list[Any] = [
        [rng.randrange(vocab) for _ in range(args.input_len)] for _ in range(args.num_seqs)
    ]
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=args.output_len)
    llm.generate(prompts[0][:8], SamplingParams(max_tokens=2), use_tqdm=False)
    llm.llm_engine.kv.reset_counters()
    return answered(llm.generate(prompts, params))


def offload_settings(
    args: argparse.Namespace, mode: str, resident_blocks: int = 0, **more: Any
) -> dict[str, Any]:
    """Engine settings of the KV tiers from the command line, without prefix caching.

    mode: "resident" (`resident_blocks` device blocks), "device only", or an offload_mode. more:
    settings of all modes.
    """
    settings = {"kvcache_block_size": args.kvcache_block_size, "enable_prefix_caching": False}
    settings |= more
    if mode == "resident":
        return settings | {"num_gpu_blocks": resident_blocks}
    settings["num_gpu_blocks"] = args.num_gpu_blocks
    if mode == "device only":
        return settings
    return settings | {
        "enable_cpu_offload": True,
        "offload_mode": mode,
        "kv_offload_gib": args.kv_offload_gib,
    }


def _offload_row(llm: LLM, outputs: list[RequestOutput]) -> dict[str, Any]:
    """Figures of one mode. Decode time begins when every request has its first token."""
    metrics = [output.metrics for output in outputs if output.metrics]
    num_in = sum(len(output.prompt_token_ids) for output in outputs)
    first = max(m.first_token_time or 0.0 for m in metrics)
    prefill_s = first - min(m.arrival_time for m in metrics)
    step_s = statistics.median(m.tpot_s or 0.0 for m in metrics)
    kv = llm.llm_engine.kv
    row: dict[str, Any] = {
        "prefill_tokens_per_s": round(num_in / prefill_s, 1),
        "decode_tokens_per_s": round(len(outputs) / step_s, 2),
        "tpot_ms": round(1000 * step_s, 2),
        "h2d_gb": round(kv.counters.h2d_bytes / 1e9, 3),
        "d2h_gb": round(kv.counters.d2h_bytes / 1e9, 3),
        "num_stalls": kv.counters.num_stalls,
        "num_prefetch_hits": kv.counters.num_prefetch_hits,
        "peak_streamed": kv.peak_streamed,
        "device_kv_mib": round(kv.spec.num_blocks * kv.spec.block_bytes / (1 << 20), 1),
    }
    if costs := llm.llm_engine.decode_costs:
        num_blocks = -(-len(outputs[0].prompt_token_ids) // kv.spec.block_size)
        on_host = max(0, len(outputs) * num_blocks - kv.spec.num_blocks)
        row["predicted_tokens_per_s"] = round(costs.tokens_per_s(num_blocks, kv.spec.num_blocks), 2)
        if llm.plan.copy_gb_per_s:
            row["link_gb_per_s"] = round(llm.plan.copy_gb_per_s, 2)
            row["decode_h2d_gb_per_s"] = round(on_host * kv.spec.load_bytes / step_s / 1e9, 2)
    return row


def memcpy_gb_per_s() -> float:
    """Speed of plain 3 MiB copies between two buffers by one thread, the best of three rounds."""
    num_bytes, piece = 256 << 20, 3 << 20
    source, target = (np.ones(num_bytes, dtype=np.uint8) for _ in range(2))
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for at in range(0, num_bytes, piece):
            np.copyto(target[at : at + piece], source[at : at + piece])
        best = min(best, time.perf_counter() - start)
    return num_bytes / best / 1e9


def workload(
    args: argparse.Namespace, vocab_size: int
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of random token ids and their parameters, from the seed and the sizes only."""
    prompts, params = [], []
    for prompt, max_tokens in random_requests(args, args.num_seqs, vocab_size):
        prompts.append(prompt)
        params.append(SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens))
    return prompts, params


def make_llm(args: argparse.Namespace, **more: Any) -> LLM:
    """Load the model of the command line and print its plan. more: further settings."""
    settings = {"quantization": args.quantization} | more
    settings |= {
        name: getattr(args, name)
        for name in (
            "device",
            "dtype",
            "max_num_seqs",
            "max_num_batched_tokens",
            "kv_cache_gib",
            "num_threads",
            "attention_backend",
        )
        if getattr(args, name, None) is not None
    }
    llm = LLM(args.model, load_format=args.load_format, **settings)
    print(llm.plan, file=sys.stderr)
    return llm


def _default_workload(device: str | None) -> tuple[int, int, int, int, int]:
    """Those of the device that the model will run on."""
    is_cpu = device == "cpu" or (device in (None, "auto") and not torch.cuda.is_available())
    return CPU_WORKLOAD if is_cpu else GPU_WORKLOAD


def make_parser(
    description: str,
    prog: str = "bench.py",
    kind: type[argparse.ArgumentParser] = argparse.ArgumentParser,
) -> tuple[argparse.ArgumentParser, Any]:
    """The parser, of this kind, and the object that takes subcommands."""
    parser = kind(
        prog=prog,
        description=description,
        epilog="example: %(prog)s offline --num-seqs 8 --max-output 128 --json result.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser, parser.add_subparsers(required=True, metavar="WORK")


def add_commands(commands: Any) -> None:
    """Add the benchmarks of an installed package."""
    for name, add_arguments, text in (
        ("offline", _offline_arguments, "many requests queued at once: output tokens per second"),
        ("offload", _offload_arguments, "long requests resident, in place and streamed"),
    ):
        sub = commands.add_parser(name, help=text, formatter_class=DefaultsFormatter)
        add_arguments(sub)
        common_arguments(sub)
    _serve_arguments(
        commands.add_parser(
            "serve",
            help="clients of a server: throughput and latencies",
            formatter_class=DefaultsFormatter,
        )
    )


def _offline_arguments(sub: argparse.ArgumentParser) -> None:
    sub.set_defaults(run=offline)
    for name, on_cpu, on_gpu in zip(WORKLOAD, CPU_WORKLOAD, GPU_WORKLOAD, strict=True):
        flag = "--" + name.replace("_", "-")
        sub.add_argument(flag, type=count, help=f"default: {on_cpu} on a CPU, {on_gpu} on a GPU")
    sub.add_argument("--max-num-seqs", type=int, help="requests running at once")
    sub.add_argument("--kv-cache-gib", type=float, help="KV budget")


def _offload_arguments(sub: argparse.ArgumentParser) -> None:
    sub.set_defaults(run=offload, max_num_seqs=None, kv_cache_gib=None)
    sub.add_argument("--input-len", type=count, default=8000, help="tokens of each prompt")
    sub.add_argument("--output-len", type=count, default=32, help="tokens to generate for each")
    sub.add_argument("--num-seqs", type=count, default=1, help="requests at once")
    sub.add_argument("--num-gpu-blocks", type=int, default=8, help="device blocks when offloading")
    sub.add_argument("--kvcache-block-size", type=int, default=256, help="tokens of a block")
    sub.add_argument("--kv-offload-gib", type=float, default=2.0, help="host KV")


def _rate(text: str) -> float | None:
    return None if text == "inf" else positive(text)  # vLLM's name for "at once"


def _serve_arguments(sub: argparse.ArgumentParser) -> None:
    sub.set_defaults(run=serve)
    add = sub.add_argument
    add("--base-url", default="http://127.0.0.1:8000", help="of the server, with or without /v1")
    add("--served-model-name", help="what the server calls the model (default: its first)")
    add("--api-key", help="of the server")
    add("--vocab-size", type=count, default=32000, help="prompts are ids below it")
    add("--num-prompts", type=count, default=32, help="requests in all")
    add("--max-concurrency", type=count, help="requests open at once (default: all)")
    rate = "requests a second, at random times; inf: at once (default: inf)"
    add("--request-rate", type=_rate, help=rate)
    add("--min-input", type=count, default=64, help="tokens of a prompt, at least")
    add("--max-input", type=count, default=512, help="and at most")
    add("--min-output", type=count, default=64, help="tokens of an answer, at least")
    add("--max-output", type=count, default=256, help="and at most")
    add("--seed", type=int, default=0, help="of prompts, lengths and times")
    add("--timeout", type=positive, default=600.0, help="seconds without a byte")
    add("--json", metavar="FILE", help="also write the result here, indented")
    add("--record", metavar="FILE", help="write each line of the answers here, with its time")


def common_arguments(sub: argparse.ArgumentParser) -> None:
    """Add the options that every benchmark of one engine has."""
    sub.add_argument("--model", default="smollm2-135m", help="folder, .gguf file or smollm2-135m")
    sub.add_argument("--device", help='"cpu", "cuda" or "cuda:N" (default: what is here)')
    sub.add_argument("--dtype", help='"float32" or "bfloat16" (default: the native one)')
    sub.add_argument("--load-format", default="auto", help='"dummy": random weights')
    sub.add_argument("--quantization", help="of the weights: gguf, int8 or none")
    sub.add_argument("--seed", type=int, default=0, help="of prompts and lengths")
    sub.add_argument("--max-num-batched-tokens", type=int, help="tokens computed in a step")
    sub.add_argument("--num-threads", type=int, help="CPU threads")
    backends = ", ".join(ATTENTION_LIMITS)
    sub.add_argument("--attention-backend", default="auto", help=f"instead of auto: {backends}")
    sub.add_argument("--json", metavar="FILE", help="also write the result here, indented")
