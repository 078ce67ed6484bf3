"""What all tests of a process share, and whose change would show in other files' numbers."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


def shared_state() -> dict[str, Any]:
    """Settings of the process by name. Not the number of threads: each engine sets it."""
    logger = logging.getLogger("nanoengine")
    return {
        "dtype": torch.get_default_dtype(),
        "precision of products": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "denormals": bool(torch.tensor(1e-40) * 1),
        "operators": {name: id(each) for name, each in vars(functional).items() if callable(each)},
        "import path": [*sys.path],
        "environment": {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"},
        "folder": os.getcwd(),
        "logs": (logger.level, [handler.name for handler in logger.handlers]),
        "signals": [signal.getsignal(number) for number in SIGNALS],
    }


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What has changed, by name, with both values. What is new does not count: libraries add
    variables and functions when they are first used.
    """
    found = []
    for name, was in before.items():
        now = after[name]
        if isinstance(was, dict):
            keys = [key for key in was if was[key] != now.get(key)]
            was, now = ({key: each.get(key) for key in keys} for each in (was, now))
        if was != now:
            found.append(f"{name}: {was} -> {now}")
    return found
