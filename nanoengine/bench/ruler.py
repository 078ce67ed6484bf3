"""Runs the needle-in-a-haystack samples of niah.py in one engine and reports the scores.

Owns the command line of tests/test_ruler_niah.py, the report and its comparison with another run's;
needle_report.py prints it. Knows the engine only as LLM.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

from nanoengine.api.llm import LLM
from nanoengine.bench.heat_map import draw_heat_map
from nanoengine.bench.needle_report import MODES, TEMPLATES, print_report
from nanoengine.bench.niah import (
    INDUCTION,
    NIAH_TASKS,
    NUM_ANSWER_TOKENS,
    NUM_COPIED,
    NiahBuilder,
    PromptFormat,
    Sample,
    exact_beginning,
    induction_samples,
    parse_indices,
    read_samples,
    string_match_all,
)
from nanoengine.bench.report import check_file, first_difference, versions
from nanoengine.bench.workload import count
from nanoengine.config.engine import NAMES
from nanoengine.errors import ConfigError, EngineError, counted, shown
from nanoengine.loading.find_model import resolve_model
from nanoengine.outputs import RequestOutput
from nanoengine.sampling_params import SamplingParams
from nanoengine.text.tokenizer import Tokenizer


def make_samples(args: argparse.Namespace, tokenizer: Tokenizer) -> list[Sample]:
    """The samples of the command line. Raises ConfigError, InvalidPromptError or RequestError."""
    prompt_format = PromptFormat(tokenizer, args.mode, args.template)
    if args.data_file is not None:
        samples = read_samples(args.data_file, prompt_format)
    else:
        drawn = [sample for length in args.length for sample in _draw(args, length, prompt_format)]
        samples = [replace(sample, index=index) for index, sample in enumerate(drawn)]
    return [samples[index] for index in parse_indices(args.sample_indices, len(samples))]


def _draw(args: argparse.Namespace, length: int, prompt_format: PromptFormat) -> list[Sample]:
    """The samples of one length."""
    if args.task == INDUCTION:
        return induction_samples(prompt_format.tokenizer, length, args.num_samples, args.seed)
    return NiahBuilder(args.task, prompt_format, length, args.seed).samples(args.num_samples)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Answer all samples in one engine and one call; returns the report that --json writes.

    Raises EngineError for bad settings, data or model, before the model is loaded if possible.
    """
    _check_outputs(args)
    samples = make_samples(args, Tokenizer.from_folder(resolve_model(args.model)))
    baseline = None if args.baseline is None else read_baseline(args.baseline, samples)
    max_tokens = args.max_new_tokens
    if max_tokens is None:
        max_tokens = NUM_COPIED if args.task == INDUCTION else NUM_ANSWER_TOKENS
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    with LLM(args.model, **_engine_settings(args)) as llm:
        _check_length(args, llm)
        if not args.quiet:
            lengths = [len(sample.prompt_ids) for sample in samples]
            prompts_of = f"{counted(len(samples), 'prompt')} of"
            print(f"{llm.plan}\n{prompts_of} {min(lengths)}-{max(lengths)} tokens")
        start = time.perf_counter()
        prompts = [sample.prompt_ids for sample in samples]
        outputs = llm.generate(prompts, params, use_tqdm=not args.quiet)
        elapsed = time.perf_counter() - start
        score = exact_beginning if args.task == INDUCTION else string_match_all
        records = [
            _record(sample, output, score(output["text"], sample.outputs))
            for sample, output in zip(samples, outputs, strict=True)
        ]
        report = _summary(records, elapsed) | _engine_figures(llm)
    report["settings"] = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    report["settings"]["max_new_tokens"] = max_tokens
    report["date"] = date.today().isoformat()
    report["versions"] = versions("tokenizers", "wonderwords")
    if baseline is not None:
        report["baseline"] = compare(records, baseline)
    return report | {"samples": records}


def read_baseline(path: Path, samples: Sequence[Sample]) -> dict[int, dict[str, Any]]:
    """Another run's records by sample index, for the samples that both have.

    Raises ConfigError for a file that is no such report or has other prompts.
    """
    try:
        records = {r["index"]: r for r in json.loads(path.read_bytes())["samples"]}
        common = {s.index: records[s.index] for s in samples if s.index in records}
        other = [s.index for s in samples if s.index in common and _digest_differs(s, common)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--baseline {path} is no report of this script: {error!r}") from error
    if other or not common:
        what = f"sample {other[0]} has another prompt there" if other else "no sample in common"
        raise ConfigError(
            f"--baseline {path}: {what}; task, mode, template, length, num-samples, seed and "
            "tokenizer must be the same"
        )
    return common


def _digest_differs(sample: Sample, records: dict[int, dict[str, Any]]) -> bool:
    record = records[sample.index]
    return bool(record["prompt_digest"] != sample.digest) or not isinstance(record["text"], str)


def compare(
    records: Sequence[dict[str, Any]], baseline: dict[int, dict[str, Any]]
) -> dict[str, Any]:
    """How many texts equal the baseline's, and where the others first differ."""
    pairs = [(r, baseline[r["index"]]) for r in records if r["index"] in baseline]
    differing = []
    for here, there in pairs:
        position = first_difference(here["token_ids"], there.get("token_ids"))
        if here["text"] != there["text"] or position is not None:
            differing.append(
                {
                    "index": here["index"],
                    "first_differing_token": position,
                    "text": here["text"],
                    "baseline_text": there["text"],
                }
            )
    same = sum(here["text"] == there["text"] for here, there in pairs)
    return {"compared": len(pairs), "same_texts": same, "differing": differing}


def _record(sample: Sample, output: RequestOutput, score: float) -> dict[str, Any]:
    completion = output.outputs[0]
    return {
        "index": sample.index,
        "score": score,
        "correct": score == 1.0,
        "depth": sample.depth,
        "length": sample.length,
        "prompt_tokens": len(sample.prompt_ids),
        "prompt_digest": sample.digest,
        "outputs": sample.outputs,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "error": None if output.error is None else str(output.error),
        "metrics": _metrics(output),
    }


def _metrics(output: RequestOutput) -> dict[str, Any]:
    """The request's metrics; clock readings become seconds since its arrival."""
    if output.metrics is None:
        return {}
    found: dict[str, Any] = {"num_cached_tokens": output.num_cached_tokens}
    for name, value in asdict(output.metrics).items():
        if not name.endswith("_time"):
            found[name] = value
        elif value is not None:
            seconds = value - output.metrics.arrival_time
            found[name.removesuffix("_time") + "_s"] = round(seconds, 6)
    if output.metrics.tpot_s:
        found["decode_tokens_per_s"] = round(1 / output.metrics.tpot_s, 2)
    return found


def _summary(records: Sequence[dict[str, Any]], elapsed: float) -> dict[str, Any]:
    def median(name: str, since: str | None = None) -> float | None:
        have = [r["metrics"] for r in records if name in r["metrics"]]
        values = [m[name] - (m.get(since, 0.0) if since else 0.0) for m in have]
        return round(statistics.median(values), 4) if values else None

    num_out = sum(len(r["token_ids"]) for r in records)
    num_accepted = sum(r["metrics"].get("num_accepted", 0) for r in records)
    lengths = sorted({r["length"] for r in records})
    by_length = {n: [r for r in records if r["length"] == n] for n in lengths}
    return {
        **_score(records),
        "by_length": [{"length": n} | _score(own) for n, own in by_length.items()],
        "elapsed_s": round(elapsed, 3),
        "median_ttft_s": median("first_token_s"),
        "median_prefill_s": median("first_token_s", since="first_scheduled_s"),
        "median_decode_tokens_per_s": median("decode_tokens_per_s"),
        "output_tokens_per_s": round(num_out / elapsed, 2),
        "tokens_per_pass": round(num_out / max(1, num_out - num_accepted), 3),
    }


def _score(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean score of these samples, 0 to 100, and how many are correct."""
    return {
        "score": round(100 * statistics.fmean(r["score"] for r in records), 2),
        "num_correct": sum(r["correct"] for r in records),
        "num_samples": len(records),
    }


def _engine_figures(llm: LLM) -> dict[str, Any]:
    engine, kv = llm.llm_engine, llm.plan.kv
    return {
        "transfers": asdict(engine.kv.counters) | {"peak_streamed": engine.kv.peak_streamed},
        "kv": {
            "device_bytes": kv.block_bytes * kv.num_blocks,
            "ring_bytes": kv.ring_bytes,
            "host_bytes": kv.host_block_bytes * kv.num_host_blocks,
        },
        "peak_memory_mib": round(engine.device.peak_memory_mib(), 1),
        "plan": str(llm.plan),
    }


def _check_length(args: argparse.Namespace, llm: LLM) -> None:
    """Raises ConfigError for a length that no request can have: each sample would be a miss."""
    plan, longest = llm.plan, max(args.length)
    if args.data_file is None and longest > plan.max_model_len:
        more = f"; {plan.longer}" if plan.longer else ""
        raise ConfigError(
            f"--length {longest} is above the {plan.max_model_len} tokens that a request can have "
            f"({plan.max_model_len_bound}); lower --length{more}"
        )


def _check_outputs(args: argparse.Namespace) -> None:
    """Raises ConfigError for output paths and packages that would fail after the run."""
    for flag, path in (("--json", args.json), ("--plot", args.plot)):
        check_file(flag, path)
    if args.plot is not None:
        try:
            metadata.version("matplotlib")
        except metadata.PackageNotFoundError as error:
            raise ConfigError(
                "--plot draws with matplotlib; pip install 'nanoengine[ruler]'"
            ) from error


def _engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    names = NAMES - {"model", "seed"}  # the seed is that of the draws
    given = {name: value for name, value in vars(args).items() if name in names}
    settings = {name: value for name, value in given.items() if value is not None}
    return settings | {"enable_cpu_offload": args.enable_offload}


def main(
    argv: list[str] | None = None,
    prog: str | None = None,
    kind: type[argparse.ArgumentParser] = argparse.ArgumentParser,
) -> int:
    """Run the command line; returns 0 if the score reaches --min-score, 1 if not, 2 on an error.
    prog: the command's name in its help (None: the file's). kind: of parser.
    """
    args = _parser(prog, kind).parse_args(argv)
    try:
        report = run(args)
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_report(report, args.verbose, args.quiet)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if args.plot is not None:
        draw_heat_map(report, args.plot)
    if not args.quiet:
        for what, path in (("report", args.json), ("picture", args.plot)):
            if path is not None:
                print(f"wrote the {what} {path}")
    return 0 if report["score"] >= args.min_score else 1


def _parser(prog: str | None, kind: type[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    parser = kind(
        prog=prog,
        description="RULER needle in a haystack, built offline, all samples in one engine.",
        epilog=f"example: {prog or 'python tests/test_ruler_niah.py'} --length 8192 "
        "--num-samples 5 --enable-offload --offload-mode stream --num-gpu-blocks 8 "
        "--max-num-seqs 1",
    )
    add = _adder(parser.add_argument_group("samples"))
    add("--model", str, "folder, .gguf file or smollm2-135m", "smollm2-135m")
    tasks = [*NIAH_TASKS, INDUCTION]
    add("--task", str, "induction: with benchmarks/induction.py's model", tasks[0], choices=tasks)
    modes = [*MODES]
    add("--mode", str, "whose haystack sizes and answer prefix", modes[0], choices=modes)
    templates = [*TEMPLATES]
    add("--template", str, "plain text, or the model's chat", templates[0], choices=templates)
    lengths = "tokens of prompt and answer; several as in 1024,2048,4096"
    add("--length", _lengths, lengths, "4096", metavar="TOKENS")
    add("--num-samples", count, "how many to draw of each length", 20)
    add("--seed", int, "of the draws", 42)
    add("--data-file", Path, "RULER jsonl to read instead", metavar="FILE.jsonl")
    add("--sample-indices", str, "run only these: 0-19, or 0,3,7 (default: all)")
    add("--max-new-tokens", count, "of an answer (default: 128; induction: 9)")
    add = _adder(parser.add_argument_group("engine (what is not given, the engine decides)"))
    add("--dtype", str, "float32 or bfloat16")
    add("--quantization", str, "int8, or gguf: the codes of a GGUF are kept")
    parser.add_argument("--enable-offload", action="store_true", help="KV may lie on the host")
    add("--offload-mode", str, "stream or in_place", choices=["auto", "stream", "in_place"])
    add("--kv-offload-gib", float, "host memory for KV")
    add("--kv-offload-dtype", str, "of KV on the host; int8 is lossy", choices=["int8", "bf12"])
    add("--num-gpu-blocks", count, "KV blocks on the device")
    add("--kvcache-block-size", count, "tokens of a block")
    add("--max-model-len", count, "most tokens of a request")
    add("--max-num-seqs", count, "requests running at once")
    add("--speculative", str, "auto, ngram:K, resident:K, mtp:K: guesses, same result")
    add = _adder(parser.add_argument_group("result"))
    add("--min-score", float, "exit 0 only from this score on", 100.0)
    add("--baseline", Path, "--json file of another run, to compare texts with", metavar="FILE")
    add("--json", Path, "write the report here", metavar="FILE")
    add("--plot", Path, "write a heat map, depth x length, here (PNG)", metavar="FILE")
    volume = parser.add_mutually_exclusive_group()
    volume.add_argument("--verbose", action="store_true", help="a line per sample, not per miss")
    volume.add_argument("--quiet", action="store_true", help="the score only")
    return parser


def _adder(group: Any) -> Callable[..., None]:
    def add(flag: str, kind: Any, text: str, default: Any = None, **options: Any) -> None:
        shown = text if default is None else f"{text} (default: %(default)s)"
        group.add_argument(flag, type=kind, help=shown, default=default, **options)

    return add


def _lengths(text: str) -> list[int]:
    """ "1024,2048" as [1024, 2048], each once."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("0*[1-9][0-9]{0,8}", part) for part in parts):
        raise argparse.ArgumentTypeError(f"must be like 4096 or 1024,2048, got {shown(text)}")
    return list(dict.fromkeys(map(int, parts)))
