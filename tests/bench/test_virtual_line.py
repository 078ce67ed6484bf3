"""The line of decode speed over context in virtual time (benchmarks/gpu/virtual_line.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from marks import needs_no_gpu

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks.gpu import virtual_line
from benchmarks.gpu.gpu_measure import REHEARSAL


@pytest.mark.slow
@needs_no_gpu
def test_it_takes_as_long_as_the_h200_did() -> None:
    """32K resident: 6.07 ms there. 64K streamed: what does not fit crosses the link, 54.3 GB/s."""
    contexts = (32_768 // virtual_line.TOKENS, 65_536 // virtual_line.TOKENS)
    scale = replace(REHEARSAL, device="cuda", line_contexts=contexts)
    about, *rows = virtual_line.rows_of(scale)
    assert about["longest"] == 36_864 and "36865 tokens" in about["refusal"]
    speeds = {(row["how"], row["context"]): row["tokens_per_s"] for row in rows}
    assert 1000 / speeds["resident", 32_768] == pytest.approx(6.07, rel=0.06)
    seconds = (65_536 - 36_864) * virtual_line.TOKEN_BYTES / 54.3e9
    assert 1 / speeds["streamed", 65_536] == pytest.approx(seconds, rel=0.2)
    assert speeds["drafts", 65_536] > 3 * speeds["streamed", 65_536]
    hashes = {(row["context"], row["hash"]) for row in rows}
    assert len(hashes) == len(contexts)
