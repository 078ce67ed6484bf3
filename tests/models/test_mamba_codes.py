"""Mamba-2 layers, and what stands beside them, as the codes of a GGUF file.

transformers' model holds the numbers that the package gguf makes of the codes. A row of numbers
names its codes, wherever the converter puts the row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import reference, reference_logits
from coded import of_size, random_rows
from driver import Driver, small_engine
from gguf import GGMLQuantizationType as QuantType
from gguf_model import GGUFModel
from marks import needs_compiler
from safetensors.torch import load_file, save_file
from tiny_model import FALCON_H1
from tiny_models import TINY
from torch import Tensor

from nanoengine import SamplingParams
from nanoengine.cli.main import main
from nanoengine.models.stored_codes import FORMATS

pytestmark = [needs_compiler, pytest.mark.usefixtures("fresh_cache")]
PROMPTS = [[i * 7 % 256 for i in range(n)] for n in (9, 130)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
NOT_CODED = ("conv1d.weight", "gate.weight", "router.layer.weight")


@dataclass(frozen=True)
class Case:
    """A row of TINY with other sizes. mix: formats by parts of Hugging Face's names, of which the
    first counts; two of a tensor whose halves become two; other: of all others.
    """

    name: str
    settings: dict[str, Any]
    mix: dict[str, tuple[str, ...]]
    other: str


EXPERTS = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention"],
    "num_hidden_layers": 5,
    "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 96,
}
ONES = {  # Falcon-H1's multipliers
    name: 1.0 if isinstance(value, float) else [1.0] * len(value)
    for name, value in FALCON_H1.items()
    if "multiplier" in name
}
OF_256 = {"hidden_size": 256, "intermediate_size": 256}
IN_Q4_K_M = {
    "in_proj": ("Q5_K",),
    "o_proj": ("Q8_0",),
    "v_proj": ("Q6_K",),
    "down_proj": ("Q6_K",),
}
CASES = {
    "nemotron": Case("nemotron-h", {}, {"out_proj": ("Q8_0",), "up_proj": ("Q5_1",)}, "Q4_0"),
    "nemotron in K-quants": Case("nemotron-h", OF_256 | {"mamba_head_dim": 32}, IN_Q4_K_M, "Q4_K"),
    "nemotron with experts": Case(
        "nemotron-h-moe",
        EXPERTS,
        {"shared_experts.up": ("Q8_0",), "down_proj": ("Q5_0",), "in_proj": ("Q8_0",)},
        "Q4_0",
    ),
    "granite": Case(
        "granite-hybrid-dense",
        {"shared_intermediate_size": 64},
        {"shared_mlp.input": ("Q4_0", "Q8_0"), "out_proj": ("Q4_1",)},
        "Q8_0",
    ),
    # A file has no multipliers: its weights are multiplied.
    "falcon": Case("falcon-h1", ONES, {"out_proj": ("Q8_0",)}, "Q4_0"),
    "falcon in K-quants": Case(
        "falcon-h1",
        OF_256
        | {"mamba_n_heads": 16, "mamba_d_ssm": 256, "mamba_d_head": 16, "head_dim": 64}
        | ONES,
        IN_Q4_K_M,
        "Q4_K",
    ),
    "granite with experts": Case(
        "granite-hybrid",
        OF_256 | {"head_dim": 64, "shared_intermediate_size": 256, "mamba_n_heads": 32},
        IN_Q4_K_M | {"moe.output": ("Q6_K",), "shared_mlp.input": ("Q4_K", "Q5_K")},
        "Q4_K",
    ),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


Written = tuple[Path, Path]


class Codes:
    """Random codes of each format by the numbers that a row of them stands for."""

    def __init__(self) -> None:
        self._by_row: dict[QuantType, dict[bytes, np.ndarray]] = {}

    def numbers(self, shape: torch.Size, kinds: tuple[str, ...], seed: int) -> Tensor:
        """Of random codes, in the formats one after the other."""
        rows = shape.numel() // shape[-1] // len(kinds)
        return torch.cat([self._some(kind, rows, shape[-1], seed) for kind in kinds]).view(shape)

    def _some(self, kind: str, rows: int, columns: int, seed: int) -> Tensor:
        coded = of_size(random_rows(kind, rows, columns, seed), 0.1).rows.numpy()
        numbers = gguf.quants.dequantize(coded, QuantType[kind])
        known = self._by_row.setdefault(QuantType[kind], {})
        known |= {row.tobytes(): codes for row, codes in zip(numbers, coded, strict=True)}
        return torch.from_numpy(numbers)

    def kind_of(self, values: np.ndarray) -> QuantType:
        """That in which all its rows are known; F32: in none."""
        rows = [row.tobytes() for row in values.reshape(-1, values.shape[-1])]
        known = (kind for kind, codes in self._by_row.items() if codes.keys() >= {*rows})
        return next(known, QuantType.F32)

    def find(self, values: np.ndarray, kind: QuantType) -> np.ndarray:
        """In place of gguf's quantize."""
        if kind == QuantType.F32:
            return values
        rows = values.reshape(-1, values.shape[-1])
        codes = np.stack([self._by_row[kind][row.tobytes()] for row in rows])
        return codes.reshape(*values.shape[:-1], -1)


def formats_of(case: Case, name: str, tensor: Tensor) -> tuple[str, ...]:
    """() for numbers."""
    if tensor.dim() < 2 or name.endswith(NOT_CODED):
        return ()
    kinds = next((kinds for part, kinds in case.mix.items() if part in name), (case.other,))
    return kinds if tensor.shape[-1] % FORMATS[kinds[0]][0] == 0 else ()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Case], Written]:
    """A function to a GGUF file, and to a folder with its numbers."""

    def made(case: Case) -> Written:
        source, codes = tmp_path / "source", Codes()
        row = TINY[case.name]
        replace(row, settings=row.settings | case.settings)(source)
        stored = load_file(source / "model.safetensors")
        for seed, (name, tensor) in enumerate(stored.items()):
            kinds = formats_of(case, name, tensor)
            stored[name] = tensor.bfloat16().float()
            if kinds:
                stored[name] = codes.numbers(tensor.shape, kinds, seed)
        save_file(stored, source / "model.safetensors", {"format": "pt"})
        model = GGUFModel(source)
        model.types = {name: codes.kind_of(values) for name, values in model.tensors.items()}
        monkeypatch.setattr(gguf.quants, "quantize", codes.find)
        return model.write(tmp_path / "m.gguf"), source

    return made


def matrices_in(path: Path) -> Iterator[int]:
    """Of each tensor of codes, how many there are: one holds a layer's experts."""
    for each in gguf.GGUFReader(path).tensors:
        if each.tensor_type.name in FORMATS:
            yield int(each.shape[2]) if len(each.shape) == 3 else 1


def distances(path: Path, theirs: Path, dtype: str) -> Tensor:
    """Of each token the root mean square of how far its logits are from transformers', in their
    standard deviation. All matrices that are codes in a file are codes in memory.
    """
    driver = Driver(small_engine(path, dtype=dtype, max_num_batched_tokens=90))
    if path.suffix:
        found = re.findall(r"(\d+) of [A-Z]", driver.engine.plan.quantization)
        assert sum(map(int, found)) == sum(matrices_in(path))
    outputs = driver.run(PROMPTS, GREEDY)
    driver.engine.close()
    model, apart = reference(theirs), []
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        logits = reference_logits(model, prompt + tokens)[len(prompt) - 1 : -1]
        ours = torch.stack(driver.logits[output.request_id])
        apart.append((ours - logits).square().mean(1).sqrt() / logits.std())
    return torch.cat(apart)


@pytest.mark.some(2)
def test_answers_are_transformers(case: Case, write: Callable[[Case], Written]) -> None:
    path, numbers = write(case)
    assert distances(path, numbers, "float32").max() < 1e-5


@pytest.mark.usefixtures("our_products")
def test_answers_in_16_bits(case: Case, write: Callable[[Case], Written]) -> None:
    """Codes are not farther off than rounded numbers. The median: a token is farther off in either
    where its experts are others.
    """
    path, numbers = write(case)
    ours, rounded = (distances(each, numbers, "bfloat16").median() for each in (path, numbers))
    assert ours < max(1.5 * rounded.item(), 0.004)


@pytest.mark.some(3)
@pytest.mark.usefixtures("in_16_bits")
def test_the_plan_knows_what_is_loaded(
    case: Case, write: Callable[[Case], Written], capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = write(case)
    flags = ["--gpu-gib", "0", "--dtype", "bfloat16", "--json"]
    assert main(["plan", str(path), *flags]) == 0
    planned = json.loads(capsys.readouterr().out)["memory"]["RAM"]["weights"]
    engine = small_engine(path, dtype="bfloat16")
    # Sums of quotients; biases of a choice, which stay in fp32, are planned in 16 bits.
    assert engine.plan.weight_bytes == pytest.approx(planned, abs=30)
    engine.close()
