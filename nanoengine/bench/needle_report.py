"""Prints the report of a needle-in-a-haystack run (ruler.py makes it): score, misses, figures."""

from __future__ import annotations

from typing import Any

from nanoengine.bench.niah import INDUCTION
from nanoengine.errors import counted

MODES = {"nvidia": "prompts as in NVIDIA's RULER", "lm-eval": "prompts as in lm-eval"}
TEMPLATES = {"base": "plain text", "chat": "the model's chat"}


def print_report(report: dict[str, Any], verbose: bool, quiet: bool) -> None:
    """The score, then a line per miss (or per sample), then the figures."""
    print(f"{_what(report['settings'])}: {_score(report)}")
    if quiet:
        return
    if len(report["by_length"]) > 1:
        for row in report["by_length"]:
            print(f"  length {row['length']}: {_score(row)}")
    for record in report["samples"]:
        if verbose or not record["correct"]:
            print(_sample_line(record))
    _print_figures(report)
    if "baseline" in report:
        _print_comparison(report["baseline"])


def _score(row: dict[str, Any]) -> str:
    return f"score {row['score']:.2f}, {row['num_correct']} of {row['num_samples']} correct"


def _what(settings: dict[str, Any]) -> str:
    """The task in words."""
    if settings["data_file"]:
        made = [settings["data_file"]]
    else:
        plural = "s" if len(settings["length"]) > 1 else ""
        made = [settings["task"], f"length{plural} {', '.join(map(str, settings['length']))}"]
    if settings["task"] != INDUCTION:
        made += [MODES[settings["mode"]], TEMPLATES[settings["template"]]]
    return ", ".join(made)


def _print_figures(report: dict[str, Any]) -> None:
    """Times, copies and memory."""
    transfers, kv, mib = report["transfers"], report["kv"], 1 << 20
    print(
        f"first token after {_figure(report['median_ttft_s'])} s, "
        f"{_figure(report['median_prefill_s'])} s of it for reading the prompt, the rest for "
        f"waiting; then {_figure(report['median_decode_tokens_per_s'])} tok/s for each request "
        "(medians)\n"
        f"all answers in {report['elapsed_s']:.1f} s: {report['output_tokens_per_s']:.1f} output "
        f"tok/s, {report['tokens_per_pass']:.2f} tokens for each pass of the model\n"
        f"copied {transfers['h2d_bytes'] / mib:.1f} MiB of KV to the device and "
        f"{transfers['d2h_bytes'] / mib:.1f} MiB back; {transfers['num_prefetch_hits']} copies "
        f"were there in time, for {transfers['num_stalls']} a step waited; at most "
        f"{counted(transfers['peak_streamed'], 'request')} streamed at once\n"
        f"memory {report['peak_memory_mib']:.0f} MiB at most; {kv['device_bytes'] / mib:.1f} MiB "
        f"are reserved for KV on the device, {kv['ring_bytes'] / mib:.1f} MiB for streaming"
    )


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _sample_line(record: dict[str, Any]) -> str:
    depth = "?" if record["depth"] is None else f"{record['depth']:.0f}"
    said = record["error"] or repr(record["text"][:100])
    return (
        f"{'right' if record['correct'] else 'MISS '} sample {record['index']}, depth {depth} %, "
        f"{record['prompt_tokens']} tokens: expected {', '.join(record['outputs'])}; got {said}"
    )


def _print_comparison(found: dict[str, Any]) -> None:
    print(f"baseline: {found['same_texts']} of {counted(found['compared'], 'text')} the same")
    for entry in found["differing"]:
        at = entry["first_differing_token"]
        where = "" if at is None else f" from token {at} on"
        print(
            f"  sample {entry['index']} differs{where}: {entry['text'][:100]!r} here, "
            f"{entry['baseline_text'][:100]!r} there"
        )
