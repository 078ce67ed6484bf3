"""What one file of tests would leave to the next is seen."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import changed_references, reference
from shared_state import differences, shared_state
from tiny_models import TINY
from torch.nn import functional


@pytest.mark.parametrize("name", ["llama", "qwen3.5", "mixtral"])
def test_one_bit_of_a_shared_model_is_seen(tmp_path: Path, name: str) -> None:
    """Written past PyTorch, as by a kernel that misses its tensor; seen once."""
    TINY[name](tmp_path)
    weights = [*reference(tmp_path).parameters()]
    assert tmp_path not in changed_references()
    for weight in (weights[0], weights[-1]):
        weight.detach().view(-1).numpy().view("u1")[-1] ^= 1
        assert changed_references() == [tmp_path]
    assert changed_references() == []


@pytest.mark.parametrize("name", ["llama", "qwen3.5"])
def test_a_shared_model_does_not_change_with_its_file(tmp_path: Path, name: str) -> None:
    """As where another test, or another process, writes over the checkpoint."""
    TINY[name](tmp_path)
    reference(tmp_path)
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as stored:
        stored.write(b"\xff" * file.stat().st_size)
    assert changed_references() == []


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "dtype": lambda _: torch.set_default_dtype(torch.float64),
    "precision of products": lambda _: torch.set_float32_matmul_precision("medium"),
    "deterministic": lambda _: torch.use_deterministic_algorithms(True),
    "gradients": lambda _: torch._C._set_grad_enabled(False),
    "denormals": lambda _: torch.set_flush_denormal(True) or None,
    "operators": lambda patch: patch.setattr(functional, "softplus", torch.relu),
    "import path": lambda patch: patch.setattr(sys, "path", [*sys.path, "/else"]),
    "environment": lambda patch: patch.setenv("HF_HUB_OFFLINE", "0"),
    "folder": lambda patch: patch.chdir("/"),
    "signals": lambda _: signal.signal(signal.SIGALRM, signal.SIG_IGN) and None,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_that_stays_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = shared_state()
    assert differences(before, shared_state()) == []
    handler = signal.getsignal(signal.SIGALRM)
    try:
        CHANGES[name](monkeypatch)
        (found,) = differences(before, shared_state())
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
        torch.set_grad_enabled(True)
        torch.set_flush_denormal(False)
        signal.signal(signal.SIGALRM, handler)
        monkeypatch.undo()
    assert found.startswith(f"{name}: ")
    assert differences(before, shared_state()) == []


def test_what_is_gone_from_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else: what libraries add when they are first used is theirs."""
    before = shared_state()
    monkeypatch.setitem(os.environ, "NEW", "1")
    assert differences(before, shared_state()) == []
    monkeypatch.delitem(os.environ, "HF_HUB_OFFLINE")
    assert differences(before, shared_state()) == [
        "environment: {'HF_HUB_OFFLINE': '1'} -> {'HF_HUB_OFFLINE': None}"
    ]
