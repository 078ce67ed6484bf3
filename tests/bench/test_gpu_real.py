"""The row of gpu_check.py that compares a real checkpoint with transformers, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.gpu import gpu_real
from benchmarks.gpu.gpu_measure import REHEARSAL
from nanoengine.loading.packaged import DEMO_MODEL, packaged_gguf


def test_without_a_file_the_row_says_how_to_name_one() -> None:
    assert "--model" in gpu_real.real_model(None, REHEARSAL)["real_model"]


@pytest.mark.breadth
@pytest.mark.usefixtures("our_products")  # PyTorch's in 16 bits take minutes
def test_the_demo_model_is_as_transformers_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    file = packaged_gguf(DEMO_MODEL)
    monkeypatch.setattr(gpu_real, "PROMPT_TOKENS", (20, 100))
    monkeypatch.setattr(gpu_real, "TEXT_TOKENS", 1100)
    row = gpu_real.real_model(str(file), REHEARSAL)
    parts = {name: part for name, part in row.items() if isinstance(part, dict)}
    assert [part["ok"] for part in parts.values()] == [True] * 6
    assert {part["right"] for name, part in parts.items() if "float32" in name} == {64}
    assert parts["codes, resident"]["weights"].startswith("codes as stored: 210 of Q4_1")

    load = gpu_real.transformers_model

    def other(*args: Any) -> Any:
        model = load(*args)
        with torch.no_grad():
            model.model.layers[3].mlp.down_proj.weight.mul_(1.5)
        return model

    monkeypatch.setattr(gpu_real, "transformers_model", other)
    row = gpu_real.real_model(str(file), REHEARSAL)
    assert not any(part["ok"] for part in row.values() if isinstance(part, dict))
