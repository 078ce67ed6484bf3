"""Recurrent layers whose projections are codes: the model of the numbers that they stand for.

A GGUF of Qwen 3.5 has the value heads in another order than Hugging Face, also in the columns of
the output projection, where a block of codes is wider than a head. The numbers beside which logits
are compared have been put in order before they are stored.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import reference, reference_logits
from coded import coded_checkpoint, of_size, random_rows
from driver import Driver, assert_logits_are_transformers, small_engine
from gguf import GGMLQuantizationType as QuantType
from gguf_model import GGUFModel
from marks import needs_compiler
from replays import watch_replays
from safetensors.torch import load_file
from tiny_model import HYBRID
from tiny_models import TINY
from torch import Tensor

from nanoengine import SamplingParams
from nanoengine.cli.main import main
from nanoengine.kernels.call_tape import CallTape
from nanoengine.loading.gguf import convert
from nanoengine.loading.gguf.convert import convert_gguf
from nanoengine.loading.gguf.tensors import GgufTensor
from nanoengine.loading.model_config import read_model_config
from nanoengine.models.stored_codes import FORMATS

pytestmark = [needs_compiler, pytest.mark.usefixtures("fresh_cache")]
PROMPTS = [[i * 7 % 256 for i in range(n)] for n in (9, 130)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
quantize = gguf.quants.quantize


@dataclass(frozen=True)
class Case:
    """A row of TINY with other sizes. mix: the formats of tensors by the end of their names, F32
    for numbers; other: of all others.
    """

    name: str
    settings: dict[str, Any]
    mix: dict[str, str]
    other: str


def sizes(hidden: int, values: int, heads: int = 4) -> dict[str, Any]:
    """Of a model of whose value heads `heads` belong to 2 key heads."""
    of_heads = {"linear_value_head_dim": values, "linear_num_value_heads": heads}
    return HYBRID | {"hidden_size": hidden, "intermediate_size": 256} | of_heads


EXPERTS = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 32}
OF_Q4_K_M = {"attn_qkv": "Q5_K", "attn_v": "Q6_K", "ssm_alpha": "F32", "ssm_beta": "F32"}
CASES = {
    "blocks of two heads": Case("qwen3.5", sizes(64, 16), {}, "Q4_0"),
    "three tiles": Case(
        "qwen3.5", sizes(64, 16, 6), {"ssm_out": "Q8_0", "attn_qkv": "Q5_1"}, "Q4_1"
    ),
    "K-quants": Case("qwen3.5", sizes(256, 64), OF_Q4_K_M, "Q4_K"),
    "outputs in numbers": Case("qwen3.5", sizes(64, 16), {"ssm_out": "F32"}, "Q5_0"),
    "experts": Case("qwen3.5-moe", sizes(64, 16) | EXPERTS, {"ssm_alpha": "F32"}, "Q8_0"),
    "short convolutions": Case("lfm2-moe", {"moe_intermediate_size": 64}, {}, "Q4_0"),
    "Kimi": Case(
        "kimi-linear",
        {"linear_head_dim": 32, "moe_intermediate_size": 64},
        {"attn_kv_b": "F32"},
        "Q4_0",
    ),
    "Ling": Case(
        "ling", {"head_dim": 32, "moe_intermediate_size": 64}, {"attn_kv_b": "F32"}, "Q5_1"
    ),
    "heads in order": Case("qwen3-next-moe", sizes(64, 16) | EXPERTS, {}, "Q4_1"),
}


def any_quantize(values: np.ndarray, kind: QuantType) -> np.ndarray:
    """The package gguf makes no K-quants."""
    if not kind.name.endswith("_K"):
        return quantize(values, kind)
    rows = random_rows(kind.name, *values.shape, zlib.crc32(values.tobytes()))
    return of_size(rows, 0.1).rows.numpy()


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def file_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Case], Path]:
    monkeypatch.setattr(gguf.quants, "quantize", any_quantize)

    def write(case: Case) -> Path:
        source = tmp_path / "source"
        source.mkdir()
        made = TINY[case.name]
        replace(made, settings=made.settings | case.settings)(source)
        model = GGUFModel(source)
        for name, values in model.tensors.items():
            kind = case.mix.get(name.split(".")[-2], case.other)
            if values.ndim > 1 and kind != "F32" and values.shape[-1] % FORMATS[kind][0] == 0:
                model.types[name] = QuantType[kind]
        return model.write(tmp_path / "m.gguf")

    return write


def in_numbers(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file's numbers, not rounded, as a conversion without codes orders them."""
    folder.mkdir()
    tensors = convert.hf_tensors

    def exact(*given: Any) -> Iterator[GgufTensor]:
        for each in tensors(*given):
            is_coded = each.quant_type.name in FORMATS
            yield replace(each, dtype="F32") if is_coded else each

    with monkeypatch.context() as patch:
        patch.setattr(convert, "hf_tensors", exact)
        convert_gguf(path, folder)
    return folder


def answers(path: Path, **settings: Any) -> list[Tensor]:
    """The logits of each prompt's tokens."""
    driver = Driver(small_engine(path, max_num_batched_tokens=90, max_num_seqs=4, **settings))
    outputs = driver.run(PROMPTS, GREEDY)
    driver.engine.close()
    return [torch.stack(driver.logits[output.request_id]) for output in outputs]


@pytest.mark.some(3)
def test_answers_are_those_of_the_numbers(
    case: Case, file_of: Callable[[Case], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All matrices that are codes in the file are codes in memory, but routers."""
    path = file_of(case)
    engine, num_coded = small_engine(path), 0
    for each in gguf.GGUFReader(path).tensors:
        if each.tensor_type.name in FORMATS and "ffn_gate_inp" not in each.name:
            # One tensor holds a layer's experts; another b and a of Qwen3-Next.
            num_coded += int(each.shape[2]) if len(each.shape) == 3 else 1 + ("ssm_ba" in each.name)
    found = re.findall(r"(\d+) of [A-Z]", engine.plan.quantization)
    assert sum(map(int, found)) == num_coded
    engine.close()
    numbers = in_numbers(path, tmp_path / "numbers", monkeypatch)
    for ours, theirs in zip(answers(path), answers(numbers), strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-4, rtol=1e-4)


def test_answers_are_transformers(
    file_of: Callable[[Case], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_of(CASES["K-quants"])
    driver = Driver(small_engine(path))
    outputs = driver.run(PROMPTS, GREEDY)
    driver.engine.close()
    model = reference(in_numbers(path, tmp_path / "numbers", monkeypatch))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        logits = reference_logits(model, prompt + tokens)[len(prompt) - 1 : -1]
        ours = torch.stack(driver.logits[output.request_id])
        torch.testing.assert_close(ours, logits, atol=5e-4, rtol=1e-4)


@pytest.mark.usefixtures("our_products")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_decode_is_replayed_and_moves_no_bit(
    file_of: Callable[[Case], Path], monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    path = file_of(CASES["three tiles"])
    replays = watch_replays(monkeypatch)
    taped = answers(path, dtype=dtype)
    assert replays
    monkeypatch.setattr(CallTape, "replay", lambda self, key, forward: forward())
    assert all(map(torch.equal, taped, answers(path, dtype=dtype)))


@pytest.mark.usefixtures("in_16_bits")
def test_the_plan_knows_what_is_loaded(
    case: Case, file_of: Callable[[Case], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = file_of(case)
    flags = ["--gpu-gib", "0", "--dtype", "float32", "--json"]
    assert main(["plan", str(path), *flags]) == 0
    planned = json.loads(capsys.readouterr().out)["memory"]["RAM"]["weights"]
    engine = small_engine(path)
    assert engine.plan.weight_bytes == pytest.approx(planned, abs=2), "sums of quotients"
    engine.close()


def test_a_conversion_says_how_its_outputs_are_ordered(
    file_of: Callable[[Case], Path], tmp_path: Path
) -> None:
    """Columns have moved where there are no codes, and stayed where there are some."""
    path, stored = file_of(CASES["three tiles"]), {}
    for keeps_codes, tiles in ((False, 1), (True, 3)):
        folder = tmp_path / f"{keeps_codes}"
        folder.mkdir()
        convert_gguf(path, folder, keeps_codes)
        recurrent = read_model_config(folder).recurrent
        assert recurrent is not None and recurrent.out_tiles == tiles
        stored[keeps_codes] = load_file(folder / "model.safetensors")
    name = "model.layers.0.linear_attn.out_proj.weight"
    assert (stored[False][name].dtype, stored[True][name].dtype) == (torch.bfloat16, torch.uint8)


@pytest.mark.parametrize(
    ("name", "said"),
    [("qwen3.5", "8 of FP8, 2 of Q8_0"), ("qwen3-next-moe", "4 of FP8, 2 of Q8_0")],
)
def test_codes_of_a_folder(
    tiny: Callable[[str], Path], tmp_path: Path, name: str, said: str
) -> None:
    """FP8, also of rows that lie head by head; and Q8_0 beside it in the same product."""
    formats = {"in_proj_b": "Q8_0", "in_proj": "FP8", "out_proj": "FP8"}
    ours, theirs = coded_checkpoint(tiny(name), tmp_path, formats)
    driver = Driver(small_engine(ours))
    assert f"codes as stored: {said}; " in driver.engine.plan.quantization
    outputs = driver.run(PROMPTS, GREEDY)
    driver.engine.close()
    assert_logits_are_transformers(driver, theirs, outputs)
