"""`nanoengine models`: what is on this machine, its size, and whether it runs here; removes one."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from nanoengine.cli.usage import UsageError
from nanoengine.config.engine import EngineConfig, in_gib
from nanoengine.errors import ModelNotFoundError, OutOfMemoryError, near_name, shown

INDENT = " " * 4


def models(args: argparse.Namespace) -> int:
    """List the models, or remove one."""
    if args.action is None:
        return _list(args)
    if args.name is None:
        raise UsageError("nanoengine models rm needs the NAME of a model")
    return _remove(args)


def _list(args: argparse.Namespace) -> int:
    from nanoengine.loading.stored_models import stored_models

    rows = [_row(model) for model in stored_models()]
    disk = disk_use()
    if args.json:
        print(json.dumps({"models": rows, "disk": disk}, indent=2))
        return 0
    for row in rows:
        print(f"{row['name']}  ({in_gib(row['bytes'])}, {row['kind']}{_origin(row)})")
        print(f"{INDENT}{_verdict(row)}")
    if not rows:
        print("no models yet; nanoengine chat smollm2-135m tells how to get one")
    print(f"\nhub's cache       {in_gib(disk['hub_bytes'])} in {disk['hub_folder']}")
    print(
        f"converted models  {in_gib(disk['converted_bytes'])} of at most "
        f"{in_gib(disk['limit_bytes'])} (${disk['limit_variable']}) in {disk['folder']}"
    )
    return 0


def _row(model: Any) -> dict[str, Any]:
    """For a program. runs: on this machine, None if nobody knows; max_tokens: of a request."""
    tokens, problem = _fit(model)
    return {
        "name": model.name,
        "kind": model.kind,
        "origin": model.origin,
        "path": str(model.path),
        "bytes": model.num_bytes,
        "architecture": model.config.architecture if model.config else None,
        "runs": None if tokens is None and not problem else not problem,
        "max_tokens": tokens,
        "problem": problem or None,
    }


def _fit(model: Any) -> tuple[int | None, str]:
    """The longest request that this machine's memory holds, or why the model does not run."""
    if model.config is None:
        return None, model.problem
    from nanoengine.startup.forecast import Forecaster

    try:
        config = EngineConfig(model.name)
        made = Forecaster(config, model.config, _machine(), model.weights).forecast(None)
    except OutOfMemoryError as error:
        return None, str(error)
    return made.longest, ""


def _machine() -> Any:
    """The Hardware that is here; of no speed, which is not asked for."""
    import torch

    from nanoengine.devices.cpu import available_memory, native_dtype
    from nanoengine.startup.forecast import Hardware

    gpu = torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else 0
    dtype = torch.bfloat16 if gpu else native_dtype()[0]
    return Hardware(gpu, available_memory(), 1.0, 1.0, dtype)


def disk_use() -> dict[str, Any]:
    """Folders that grow, with their bytes, for `models` and a program."""
    from huggingface_hub import constants

    from nanoengine.devices.cache_folders import (
        LIMIT_VARIABLE,
        cache_limit,
        disk_bytes,
        folder_in_use,
    )
    from nanoengine.loading.model_cache import conversions

    return {
        "folder": str(folder_in_use() or ""),
        "converted_bytes": sum(each.num_bytes for each in conversions()),
        "limit_bytes": cache_limit(),
        "limit_variable": LIMIT_VARIABLE,
        "hub_folder": constants.HF_HUB_CACHE,
        "hub_bytes": disk_bytes(Path(constants.HF_HUB_CACHE)),
    }


def _origin(row: dict[str, Any]) -> str:
    return f": {row['origin']}" if row["origin"] else ""


def _verdict(row: dict[str, Any]) -> str:
    if row["runs"] is None:
        return "its shape is known after its first use, which joins the parts of the file"
    if row["runs"]:
        return f"runs: {row['architecture']}, up to {row['max_tokens']:,} tokens in one request"
    return f"does not run: {row['problem']}"


def _remove(args: argparse.Namespace) -> int:
    from nanoengine.loading.stored_models import remove_model, stored_models

    found = {model.name: model for model in stored_models()}
    if args.name not in found:
        near = near_name(args.name, found)
        hint = f"did you mean {near}?" if near else "nanoengine models lists them"
        raise ModelNotFoundError(f"there is no model {shown(args.name)} on this machine; {hint}")
    model = found[args.name]
    if not (args.yes or _agrees(f"remove {model.name} ({in_gib(model.num_bytes)}, {model.path})?")):
        print("nothing was removed", file=sys.stderr)
        return 1
    remove_model(model)
    if args.json:
        print(json.dumps({"removed": model.name, "bytes": model.num_bytes}))
    else:
        print(f"removed {model.name}: {in_gib(model.num_bytes)}")
    return 0


def _agrees(question: str) -> bool:
    """Ask on the terminal. Raises UsageError where there is none."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError("there is no terminal to ask on; --yes removes without a question")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
