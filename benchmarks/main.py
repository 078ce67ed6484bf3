"""All benchmarks: `python bench.py offline`; an installed package has only offline and offload.

Logs and the memory plan go to stderr; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import compare, gguf_files, quantization, scaling, tiers
from nanoengine.bench.main import add_commands, common_arguments, make_parser, run
from nanoengine.bench.report import versions


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark named on the command line."""
    parser, commands = make_parser(f"{__doc__}")
    add_commands(commands)
    for module in (tiers, scaling, quantization):
        for sub, measure in module.add_commands(commands):
            common_arguments(sub)
            sub.set_defaults(run=functools.partial(_with_settings, measure))
    compare.add_commands(commands)
    gguf_files.add_command(commands)
    run(parser.parse_args(argv))


def _with_settings(
    measure: Callable[..., dict[str, Any]], args: argparse.Namespace
) -> dict[str, Any]:
    """Run a benchmark of another module and add its settings to the result."""
    rows = measure(args)
    settings = {k: v for k, v in vars(args).items() if v is not None and k not in ("run", "json")}
    return {"workload": settings, "versions": versions(), "threads": torch.get_num_threads()} | rows
