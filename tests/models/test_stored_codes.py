"""Engines that multiply with the codes of a GGUF file: the model of the dequantised weights.

Codes of K-quants are random, as the package gguf makes none: the same for the same row.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from checkpoints import reference, reference_logits
from coded import any_quantize, coded_checkpoint
from driver import Driver, host_gib
from gguf import GGMLQuantizationType as QuantType
from gguf_model import SCALINGS, GGUFModel, with_scaling
from marks import needs_compiler
from replays import watch_replays
from safetensors.torch import save_file
from tiny_model import TinyModel
from tiny_models import TINY
from torch import Tensor
from transformers import PreTrainedModel

from nanoengine import LLM, SamplingParams
from nanoengine.cli.main import main
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.errors import CorruptModelError
from nanoengine.kernels import c_build, cpu_linear
from nanoengine.kernels.call_tape import CallTape
from nanoengine.kernels.cpu_ops import PackedOps
from nanoengine.kernels.packed_product import PackedAfterAttention
from nanoengine.loading.checkpoint import CheckpointReader
from nanoengine.loading.find_model import resolve_model
from nanoengine.loading.gguf.convert import convert_gguf
from nanoengine.models.stored_codes import CodedRows, CodedWeight, numbers_of

Tiny = Callable[[str], Path]
pytestmark = [needs_compiler, pytest.mark.usefixtures("one_cache")]
PROMPTS = [[i * 7 % 256 for i in range(n)] for n in (9, 130)]
# By the end of a tensor's name in the file; Q4_K_M files mix formats like this.
MIX = {"attn_v": "Q8_0", "attn_output": "Q5_0", "ffn_down": "Q5_1", "token_embd": "Q8_0"}
K_MIX = {"attn_v": "Q6_K", "ffn_down": "Q5_K", "token_embd": "Q6_K", "output": "Q6_K"}


@pytest.fixture(scope="module")
def one_cache(tmp_path_factory: pytest.TempPathFactory, build_folder: Path) -> Iterator[None]:
    """A cache of this file's own; compiled kernels stay elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(c_build, "cache_folders", lambda: iter([build_folder.parent]))
        yield


def kinds(model: GGUFModel, mix: dict[str, str], other: str) -> dict[str, QuantType]:
    """The type of each matrix that has whole blocks."""
    found = {}
    for name, values in model.tensors.items():
        kind = mix.get(name.split(".")[-2], other)
        if values.ndim == 2 and values.shape[1] % in_block(kind) == 0:
            found[name] = QuantType[kind]
    return found


def in_block(kind: str) -> int:
    return int(gguf.GGML_QUANT_SIZES[QuantType[kind]][0])


def written(folder: Path, target: Path, mix: dict[str, str], other: str, name: str = "") -> Path:
    model = GGUFModel(folder)
    if name in SCALINGS:
        with_scaling(model, name)
    model.types = kinds(model, mix, other)
    return model.write(target)


def dequantised(folder: Path, mix: dict[str, str], other: str) -> PreTrainedModel:
    """transformers' model of the numbers that the file's codes stand for."""
    model, file = copy.deepcopy(reference(folder)), GGUFModel(folder)
    types = kinds(file, mix, other)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            kind = types.get(file.names[name])
            if kind is not None:
                blocks = any_quantize(parameter.float().numpy(), kind)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(blocks, kind)))
    return model


def make_engine(path: Path, **settings: Any) -> LLMEngine:
    defaults: dict[str, Any] = {
        "kvcache_block_size": 8,
        "dtype": "float32",
        "device": "cpu",
        "num_gpu_blocks": 64,
    }
    return LLMEngine(path, **(defaults | settings))


def logits_of(path: Path, **settings: Any) -> list[Tensor]:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    settings = {"speculative": "off", "max_num_batched_tokens": 90, "max_num_seqs": 4} | settings
    driver = Driver(make_engine(path, **settings))
    outputs = driver.run(PROMPTS, params)
    driver.engine.close()
    return [torch.stack(driver.logits[output.request_id]) for output in outputs]


def assert_like_transformers(path: Path, model: PreTrainedModel) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    driver = Driver(make_engine(path, max_num_batched_tokens=90, max_num_seqs=4))
    for prompt, output in zip(PROMPTS, driver.run(PROMPTS, params), strict=True):
        tokens = output.outputs[0].token_ids
        logits = reference_logits(model, prompt + tokens)[len(prompt) - 1 : -1]
        ours = torch.stack(driver.logits[output.request_id])
        torch.testing.assert_close(ours, logits, atol=5e-4, rtol=1e-4)
    driver.engine.close()


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3"])
def test_the_engine_equals_transformers_on_dequantised_weights(
    tiny: Tiny, tmp_path: Path, name: str
) -> None:
    """Rows in another order, weights that stay numbers, and fused ones."""
    path = written(tiny(name), tmp_path / "m.gguf", MIX, "Q4_0", name)
    assert_like_transformers(path, dequantised(tiny(name), MIX, "Q4_0"))


@pytest.mark.parametrize(
    "name", [pytest.param("mixtral", marks=pytest.mark.breadth), "qwen3.5-moe"]
)
def test_experts_and_recurrent_layers_in_codes(
    tiny: Tiny, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Logits are those of their numbers, and the plan knew how many bytes they take."""
    model = with_scaling(GGUFModel(tiny(name)), name) if name in SCALINGS else GGUFModel(tiny(name))
    for each, values in model.tensors.items():
        if values.ndim > 1 and values.shape[-1] % 32 == 0:
            model.types[each] = QuantType.Q8_0 if "attn_" in each else QuantType.Q4_1
    path, folder = model.write(tmp_path / "m.gguf"), tmp_path / "numbers"
    folder.mkdir()
    convert_gguf(path, folder, keeps_codes=True)
    with CheckpointReader(folder) as reader:
        assert any(reader.code_format(each) for each in reader.names() if ".experts.2." in each)
        numbers = {
            each: numbers_of(reader.weight(each, torch.float32)).clone() for each in reader.names()
        }
    save_file(numbers, folder / "model.safetensors")
    for ours, theirs in zip(logits_of(path), logits_of(folder), strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-4, rtol=1e-4)
    flags = ["--gpu-gib", "0", "--dtype", "float32", "--json"]
    planned = []
    for more in ((), ("--quantization", "gguf")):
        assert main(["plan", str(path), *flags, *more]) == 0
        planned.append(json.loads(capsys.readouterr().out)["memory"]["RAM"]["weights"])
    engine = make_engine(path)
    assert planned[0] == planned[1] == engine.plan.weight_bytes
    engine.close()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_codes_on_all_tiers(tiny: Tiny, tmp_path: Path, name: str) -> None:
    """Streamed and in place have the bits of resident; the numbers of the codes, rounded as a
    conversion rounds them, give about the same.
    """
    path = written(tiny(name), tmp_path / "m.gguf", MIX, "Q4_0", name)
    resident = logits_of(path)
    for mode in ("stream", "in_place"):
        gib = host_gib(tiny(name), 60, 8)
        found = logits_of(path, num_gpu_blocks=7, kv_offload_gib=gib, offload_mode=mode)
        assert all(map(torch.equal, found, resident))
    assert all(map(torch.equal, logits_of(path, quantization="gguf"), resident))
    converted = logits_of(path, quantization="none")
    torch.testing.assert_close(resident[0][0], converted[0][0], atol=0.2, rtol=0)
    assert not torch.equal(resident[0], converted[0])
    assert all(map(torch.equal, logits_of(resolve_model(path)), converted))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    TinyModel(settings={"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2})(
        folder
    )
    return folder


@pytest.fixture
def k_quants(wide: Path, tmp_path: Path) -> Path:
    return written(wide, tmp_path / "k.gguf", K_MIX, "Q4_K")


def test_k_quants(wide: Path, k_quants: Path) -> None:
    assert_like_transformers(k_quants, dequantised(wide, K_MIX, "Q4_K"))


def test_levels_of_8_bits(wide: Path, tmp_path: Path) -> None:
    """As files called IQ4_XS have them: IQ4_NL where rows are no multiple of 256."""
    mix = {"ffn_down": "IQ4_NL", "token_embd": "Q6_K"}
    path = written(wide, tmp_path / "iq.gguf", mix, "IQ4_XS")
    assert_like_transformers(path, dequantised(wide, mix, "IQ4_XS"))


def test_codes_of_2_and_3_bits(wide: Path, tmp_path: Path) -> None:
    """As files called Q2_K have them."""
    mix = {"ffn_down": "Q3_K", "attn_v": "Q4_K", "attn_output": "Q3_K", "token_embd": "Q6_K"}
    path = written(wide, tmp_path / "m.gguf", mix, "Q2_K")
    assert_like_transformers(path, dequantised(wide, mix, "Q2_K"))


@pytest.mark.usefixtures("in_16_bits")
def test_codes_of_grids(wide: Path, tmp_path: Path) -> None:
    """As files called IQ2_M or IQ3_M have them: each weight has a code of its own in memory."""
    mix = {"ffn_down": "IQ2_S", "ffn_up": "IQ1_M", "attn_v": "IQ3_XXS", "attn_output": "IQ2_XXS"}
    mix |= {"attn_q": "TQ1_0", "token_embd": "IQ2_XS", "output": "IQ1_S"}
    path = written(wide, tmp_path / "m.gguf", mix, "IQ3_S")
    assert_like_transformers(path, dequantised(wide, mix, "IQ3_S"))
    engine = make_engine(path)
    assert "3 of IQ1, 3 of IQ2, 4 of IQ3_S, 2 of IQ3_XXS, 2 of Q2_K;" in str(engine.plan)
    assert "(IQ3_S GGUF, codes in 4.25 bits)" in str(engine.plan)
    engine.close()


def test_a_decode_is_replayed_and_moves_no_bit(
    k_quants: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replays = watch_replays(monkeypatch)
    taped = logits_of(k_quants)
    assert replays
    monkeypatch.setattr(CallTape, "replay", lambda self, key, forward: forward())
    assert all(map(torch.equal, taped, logits_of(k_quants)))


@pytest.mark.some(1)
@pytest.mark.parametrize("of_up", ["Q4_K", "Q6_K"])
def test_a_decode_with_experts_is_replayed_and_moves_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_up: str
) -> None:
    """Gate and up of one format, or of two. The bits are those of the experts one by one, too."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2}
    replace(TINY["qwen3-moe"], settings=TINY["qwen3-moe"].settings | sizes)(tmp_path)
    model, types = GGUFModel(tmp_path), {"gate": "Q4_K", "up": of_up, "down": "Q6_K"}
    for name in model.tensors:
        if "_exps" in name:
            model.types[name] = QuantType[types[name.split("_")[1]]]
    path, replays = model.write(tmp_path / "experts.gguf"), watch_replays(monkeypatch)
    taped = logits_of(path)
    assert replays, "no step was replayed"
    monkeypatch.setattr(CallTape, "replay", lambda self, key, forward: forward())
    assert all(map(torch.equal, taped, logits_of(path)))
    monkeypatch.setattr(PackedOps, "_are_one_call", lambda self, experts: False)
    assert all(map(torch.equal, taped, logits_of(path)))


@pytest.mark.usefixtures("in_16_bits")
def test_the_plan_says_what_is_held(k_quants: Path, tmp_path: Path) -> None:
    """The bytes of the file, whose codes stay, and whose other weights are in float32."""
    engine = make_engine(k_quants)
    tensors = gguf.GGUFReader(k_quants).tensors
    assert {tensor.tensor_type.name for tensor in tensors} == {"Q4_K", "Q5_K", "Q6_K", "F32"}
    assert engine.plan.weight_bytes == sum(int(tensor.n_bytes) for tensor in tensors)
    line = next(line for line in str(engine.plan).splitlines() if "quantised" in line)
    assert "codes as stored: 8 of Q4_K, 2 of Q5_K, 4 of Q6_K; the rest in float32" in line
    assert "the same bits in any batch" in str(engine.plan)
    assert type(engine.runner.model._layers[0].after_attention) is PackedAfterAttention
    engine.close()


def test_packed_integers_become_numbers_where_that_is_asked(tiny: Tiny, tmp_path: Path) -> None:
    ours, theirs = coded_checkpoint(tiny("llama"), tmp_path, {"_proj": "INT4"})
    found = logits_of(ours, quantization="none")
    assert all(map(torch.equal, found, logits_of(theirs)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_where_no_kernel_takes_codes_the_plan_says_why(
    tiny: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    dtype: str,
) -> None:
    """A warning is due where there are no kernels at all: PyTorch alone is much slower."""
    path = written(tiny("llama"), tmp_path / "m.gguf", {}, "Q4_0")
    why = "no C compiler found"
    if dtype == "bfloat16":
        monkeypatch.setattr(cpu_linear, "is_supported", lambda: False)
        why = 'this CPU has no AVX512-BF16: set dtype="float32"'
    else:
        monkeypatch.setattr(c_build.shutil, "which", lambda name: None)
    for quantization in (None, "none"):
        engine = make_engine(path, dtype=dtype, quantization=quantization)
        text = str(engine.plan)
        assert ("Q4_0 GGUF, dequantised to bfloat16" in text) and "quantised   " not in text
        assert (f"dequantised to bfloat16 ({why}" in text) == (quantization is None)
        engine.close()
    slow = "PyTorch computes, several times slower, as our kernels cannot be used: no C compiler"
    told = [r.levelname for r in caplog.records if r.getMessage().startswith(slow)]
    assert told == ["WARNING"] * 2 * (dtype == "float32")


def test_codes_are_packed_from_the_mapped_file(tiny: Tiny, tmp_path: Path) -> None:
    """A copy of each would cut the heap into pieces."""
    folder, _ = coded_checkpoint(tiny("llama"), tmp_path, {"": "Q4_0"})
    with CheckpointReader(folder) as reader:
        weight = reader.weight("model.layers.0.mlp.up_proj.weight", torch.float32)
        assert isinstance(weight, CodedWeight)
        (part,) = weight.parts
        assert isinstance(part, CodedRows)
        maps = Path("/proc/self/maps").read_text().splitlines()
        ranges = [line.split()[0].split("-") for line in maps if f"{folder}/" in line]
        start = part.rows.data_ptr()
        assert any(int(first, 16) <= start < int(last, 16) for first, last in ranges)


@pytest.mark.parametrize("name", ["llama", "qwen2-moe"])
def test_loaded_codes_keep_no_file_mapped(tiny: Tiny, tmp_path: Path, name: str) -> None:
    """Nor are they held twice: not even those of an expert that every row goes to."""
    folder, _ = coded_checkpoint(tiny(name), tmp_path, {"": "Q4_0"})
    with LLM(str(folder), dtype="float32", device="cpu", num_gpu_blocks=4):
        assert f"{folder}/" not in Path("/proc/self/maps").read_text()


def test_a_format_that_nobody_knows_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    convert_gguf(written(tiny("llama"), tmp_path / "m.gguf", {}, "Q4_0"), folder, keeps_codes=True)
    with CheckpointReader(folder) as reader:
        name = "model.layers.0.mlp.up_proj.weight"
        assert (reader.code_format(name), reader.shape(name)) == ("Q4_0", (96, 64))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"Q4_0", b"Q9_9"))
    with pytest.raises(CorruptModelError, match="'codes' of its metadata names no known formats"):
        CheckpointReader(folder)
