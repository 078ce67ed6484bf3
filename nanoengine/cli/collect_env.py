"""`nanoengine collect-env`: versions and hardware, for a bug report. Shows no secrets."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
from importlib import metadata

import nanoengine
from nanoengine.cli.flags import OTHER_VARIABLES, PREFIX
from nanoengine.config.engine import GIB, NAMES, in_gib
from nanoengine.errors import ConfigError, counted

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "gguf",
    "numpy",
    "flash-attn",
)
# Variables with our prefix whose values are shown: the server's key is a secret, and others may be
# another program's.
OURS = {PREFIX + name.upper() for name in (*NAMES, *OTHER_VARIABLES) if name != "api_key"}
VARIABLES = ("CC", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HF_HUB_CACHE", "HF_HUB_OFFLINE")


def collect_env(args: argparse.Namespace) -> int:
    """Print what is installed and what the machine is."""
    found = environment()
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    width = max(map(len, found))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in found.items()))
    return 0


def environment() -> dict[str, str]:
    """Names to values, in the order to print."""
    import torch

    from nanoengine.devices.cpu import available_memory

    found = {
        "nanoengine": nanoengine.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "CPU": f"{counted(os.cpu_count() or 1, 'core')}, {torch.backends.cpu.get_cpu_capability()}",
        "RAM": f"{available_memory() / GIB:.1f} GiB available",
        "GPU": _gpus(),
        "C compiler": shutil.which(os.environ.get("CC", "cc")) or "none",
        "cache": _cache(),
    }
    found |= {name: _version(name) for name in PACKAGES}
    named = sorted(name for name in os.environ if name.startswith(PREFIX))
    variables = [name for name in (*VARIABLES, *named) if name in os.environ]
    shown = {*VARIABLES, *OURS}
    return found | {
        f"${name}": os.environ[name] if name in shown else "set, and not shown"
        for name in variables
    }


def _cache() -> str:
    """The folder of converted models and compiled kernels, and how full it is."""
    from nanoengine.devices.cache_folders import (
        LIMIT_VARIABLE,
        cache_limit,
        disk_bytes,
        folder_in_use,
    )

    folder = folder_in_use()
    if folder is None:
        return "none"
    try:
        limit = f"{cache_limit() / GIB:g} GiB (${LIMIT_VARIABLE})"
    except ConfigError as error:
        limit = str(error)
    return f"{folder}: {in_gib(disk_bytes(folder))} of at most {limit}"


def _gpus() -> str:
    import torch

    names = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    shown = [f"{found.name} ({found.total_memory / GIB:.1f} GiB)" for found in names]
    return ", ".join(shown) or "none"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
