"""The race checks of products still run, and see a fault."""

from __future__ import annotations

import shutil
import sys

import pytest

from benchmarks.proofs.sanitizers import CHECKS, run_check

BY_NAME = {check.name: check for check in CHECKS}


@pytest.mark.breadth
@pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("gcc"), reason="ThreadSanitizer is GCC's"
)
@pytest.mark.parametrize(
    "name", ["threads: kernels", "threads: products of float32", "planted: no wait of experts"]
)
def test_a_check_passes(name: str) -> None:
    verdict = run_check(BY_NAME[name])
    assert not verdict.problem, verdict.output[-2000:]
