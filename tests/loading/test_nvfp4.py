"""Checkpoints in NVFP4 against the formulas of compressed-tensors and ModelOpt, written out here,
and against transformers' logits of the numbers that these give.

compressed-tensors: `_dequantize` of quantization/lifecycle/forward.py divides the scales by the
global scale; ModelOpt: `dequantize` of qtensor/nvfp4_tensor.py multiplies them by it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import (
    Driver,
    assert_bits_of_numbers,
    assert_codes_on_a_gpu,
    assert_logits_are_transformers,
    small_engine,
)
from marks import needs_compiler, needs_no_gpu
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.errors import UnsupportedModelError, WeightMismatchError
from nanoengine.loading.loader import open_checkpoint
from nanoengine.loading.model_config import read_model_config
from nanoengine.loading.nvfp4 import has_nvfp4
from nanoengine.models.stored_codes import CodedWeight, numbers_of
from nanoengine.startup import parts

Tiny = Callable[[str], Path]
Tensors = dict[str, Tensor]
GROUP = 16
FLOAT4 = {"type": "float", "num_bits": 4, "group_size": GROUP, "strategy": "tensor_group"}
FLOAT8 = {"type": "float", "num_bits": 8, "strategy": "channel"}
OF_TENSORS: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {"group_0": {"weights": FLOAT4, "targets": ["Linear"]}},
    "ignore": ["lm_head"],
}
MODELOPT: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "config_groups": {"group_0": {"weights": FLOAT4, "targets": ["Linear"]}},
    "ignore": ["lm_head"],
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
}
MIXED = MODELOPT | {"quant_algo": "MIXED_PRECISION"}
BESIDE: dict[str, Any] = {
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": GROUP,
        "exclude_modules": ["lm_head", "model.layers.9*"],
    },
}
KINDS = ("compressed-tensors", "modelopt", "modelopt, beside")
ALL = ("_proj.weight", "embed_tokens.weight", "head.weight")


def decoded(bits: int) -> float:
    """E2M1: a sign, 2 bits of exponent with a bias of 1, 1 of mantissa."""
    sign, exponent, mantissa = -1 if bits >> 3 else 1, bits >> 1 & 3, bits & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return sign * size


TABLE = torch.tensor([decoded(bits) for bits in range(16)])


def quantised(weight: Tensor, divides: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The bytes, scales and global scale of a weight, and what they say."""
    largest = weight.abs().max().float()
    whole = 6 * 448 / largest if divides else largest / (6 * 448)
    groups = weight.float().unflatten(1, (-1, GROUP))
    scales = groups.abs().amax(2) / 6
    scales = (scales * whole if divides else scales / whole).to(torch.float8_e4m3fn)
    wide = scales.float() / whole if divides else scales.float() * whole
    codes = (groups[..., None] / wide[..., None, None] - TABLE).abs().argmin(3)
    said = (TABLE[codes] * wide[..., None]).flatten(1)
    codes = codes.flatten(1).to(torch.uint8)
    return codes[:, 1::2] << 4 | codes[:, 0::2], scales, whole, said


def make(
    source: Path, folder: Path, kind: str, ends: tuple[str, ...] = ("_proj.weight",)
) -> Tensors:
    """The checkpoint with tensors whose names end so in NVFP4; returns what these say."""
    shutil.copytree(source, folder)
    path, said = folder / "model.safetensors", {}
    tensors, divides = load_file(path), kind == "compressed-tensors"
    for name in [n for n, t in tensors.items() if n.endswith(ends) and is_whole(t)]:
        codes, scales, whole, said[name] = quantised(tensors.pop(name), divides)
        stem = name.removesuffix(".weight")
        tensors[f"{stem}.weight_scale"] = scales
        if divides:
            tensors[f"{stem}.weight_packed"] = codes
            tensors[f"{stem}.weight_global_scale"] = whole[None]
            tensors[f"{stem}.input_global_scale"] = torch.ones(1)
        else:
            tensors |= {name: codes, f"{stem}.weight_scale_2": whole}
            tensors |= {f"{stem}.{each}": torch.ones(()) for each in ("input_scale", "k_scale")}
    save_file(tensors, path)
    if kind == "modelopt, beside":
        (folder / "hf_quant_config.json").write_text(json.dumps(BESIDE))
    else:
        configure(folder, OF_TENSORS if divides else MODELOPT)
    return said


def is_whole(weight: Tensor) -> bool:
    return weight.dim() == 2 and weight.shape[1] % GROUP == 0


def configure(folder: Path, config: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))


def numbers_beside(
    source: Path, folder: Path, kind: str, ends: tuple[str, ...] = ALL
) -> tuple[Path, Path]:
    """The checkpoint in NVFP4, and the same as numbers."""
    said = make(source, folder / "m", kind, ends)
    shutil.copytree(source, folder / "plain")
    path = folder / "plain" / "model.safetensors"
    save_file(load_file(path) | said, path)
    return folder / "m", folder / "plain"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_every_weight_is_what_its_codes_and_scales_say(
    tiny: Tiny, tmp_path: Path, name: str, kind: str
) -> None:
    """Bit by bit, also as codes, which it stays in whole blocks of 64 inputs."""
    said = make(tiny(name), tmp_path / "m", kind)
    config = read_model_config(tmp_path / "m")
    assert config.codes == "NVFP4" and len(said) > 15
    with open_checkpoint(tmp_path / "m", config) as reader:
        assert reader.names() == load_file(tiny(name) / "model.safetensors").keys()
        num_coded = 0
        for each, values in said.items():
            assert reader.shape(each) == values.shape
            assert torch.equal(reader.tensor(each), values), each
            weight = reader.weight(each, torch.float32)
            assert isinstance(weight, CodedWeight) is (values.shape[1] % 64 == 0), each
            assert torch.equal(numbers_of(weight), values), each
            assert reader.form(each) == ("NVFP4" if isinstance(weight, CodedWeight) else "F32")
            num_coded += isinstance(weight, CodedWeight)
        assert num_coded > 10


def coded(folder: Path) -> int:
    """How many weights of a checkpoint stay codes."""
    with open_checkpoint(folder, read_model_config(folder)) as reader:
        return sum(reader.form(name) == "NVFP4" for name in reader.names())


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_answers_are_those_of_the_same_weights_in_float32(
    tiny: Tiny, tmp_path: Path, name: str, kind: str
) -> None:
    """Experts, too; and the plan says what stays codes."""
    ours, plain = numbers_beside(tiny(name), tmp_path, kind)
    driver = Driver(small_engine(ours))
    line = f"codes as stored: {coded(ours)} of NVFP4; the rest in float32"
    assert line in str(driver.engine.plan)
    outputs = driver.run([[7 * i % 256 for i in range(50)], [3, 4]])
    driver.engine.close()
    assert_logits_are_transformers(driver, plain, outputs)


@needs_compiler
@pytest.mark.parametrize("kind", KINDS[:2])
def test_others_of_a_checkpoint_may_be_in_fp8(tiny: Tiny, tmp_path: Path, kind: str) -> None:
    """As in ModelOpt's "mixed precision", and in groups of compressed-tensors."""
    ours, plain = numbers_beside(tiny("llama"), tmp_path, kind, ("up_proj.weight",))
    numbers = load_file(plain / "model.safetensors")
    for name in [name for name in numbers if "self_attn" in name]:
        scales = numbers[name].abs().amax(1, keepdim=True) / 448
        codes = (numbers[name] / scales).to(torch.float8_e4m3fn)
        change(ours, {name: codes, f"{name}_scale": scales})
        numbers[name] = codes.float() * scales
    save_file(numbers, plain / "model.safetensors")
    layers = {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4", "group_size": GROUP}}
    of_modelopt = MIXED | {"quantized_layers": layers}
    groups = {"a": {"weights": FLOAT4}, "b": {"weights": FLOAT8}}
    configure(ours, of_modelopt if kind == "modelopt" else OF_TENSORS | {"config_groups": groups})
    driver = Driver(small_engine(ours))
    assert "12 of FP8" in str(driver.engine.plan) and "3 of NVFP4" in str(driver.engine.plan)
    outputs = driver.run([[7 * i % 256 for i in range(50)], [3, 4]])
    driver.engine.close()
    assert_logits_are_transformers(driver, plain, outputs)


def test_without_kernels_of_codes_they_are_dequantised(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_code_ops", lambda *_: None)
    ours, plain = numbers_beside(tiny("llama"), tmp_path, "modelopt")
    driver = Driver(small_engine(ours))
    assert "NVFP4, dequantised: 0.00 GiB stored are 0.00 GiB in memory" in str(driver.engine.plan)
    outputs = driver.run([[7 * i % 256 for i in range(50)]])
    driver.engine.close()
    assert_logits_are_transformers(driver, plain, outputs)


@needs_compiler
@pytest.mark.usefixtures("our_products")
@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.breadth)])
def test_codes_have_the_bits_of_their_numbers_on_all_tiers(
    tiny: Tiny, tmp_path: Path, dtype: str, kind: str
) -> None:
    ours, plain = numbers_beside(tiny("qwen3-moe"), tmp_path, kind)
    assert_bits_of_numbers(ours, plain, dtype)


@needs_no_gpu
def test_they_stay_codes_on_a_gpu(tiny: Tiny, tmp_path: Path) -> None:
    ours, plain = numbers_beside(tiny("llama"), tmp_path, "compressed-tensors")
    assert_codes_on_a_gpu(ours, plain, f"{coded(ours)} of NVFP4")


@needs_compiler
@pytest.mark.parametrize("name", ["granite-hybrid", "lfm2-moe", "nemotron-h-moe", "qwen3.5"])
def test_tensors_with_names_of_their_own(tiny: Tiny, tmp_path: Path, name: str) -> None:
    """Gates and ups in one tensor, mixers, convolutions."""
    ends = ("_proj.weight", "put_linear.weight", *(f"w{i}.weight" for i in (1, 2, 3)))
    ours, plain = numbers_beside(tiny(name), tmp_path, "modelopt", ends)
    driver = Driver(small_engine(ours))
    outputs = driver.run([[7 * i % 256 for i in range(50)], [3, 4]])
    driver.engine.close()
    assert_logits_are_transformers(driver, plain, outputs)


UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize("whole", [2.0**-64, 2.0**64, 0.0, float("inf")])
def test_global_scales_of_no_usual_size_leave_numbers(
    tiny: Tiny, tmp_path: Path, whole: float
) -> None:
    make(tiny("llama"), tmp_path / "m", "modelopt")
    change(tmp_path / "m", {f"{UP}.weight_scale_2": torch.tensor(whole)})
    with open_checkpoint(tmp_path / "m", read_model_config(tmp_path / "m")) as reader:
        weight = reader.weight(f"{UP}.weight", torch.float32)
        assert isinstance(weight, Tensor) and weight.dtype is torch.float32


def change(folder: Path, tensors: dict[str, Tensor | None]) -> None:
    path = folder / "model.safetensors"
    kept = load_file(path) | tensors
    save_file({name: t for name, t in kept.items() if t is not None}, path)


SCALES = torch.ones(128, 4).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("kind", "tensors", "match"),
    [
        (
            "modelopt",
            {"weight_scale_2": None},
            r"up_proj.weight' is NVFP4 .*; it has neither",
        ),
        (
            "compressed-tensors",
            {"weight_scale_2": torch.ones(1)},
            r"needs '.*weight_global_scale' or '.*weight_scale_2'; it has both",
        ),
        ("modelopt", {"weight_scale_2": torch.tensor(-1.0)}, r"is \[-1.0\], not one number"),
        ("modelopt", {"weight_scale_2": torch.ones(2)}, r"is \[1.0, 1.0\], not one number"),
        ("compressed-tensors", {"weight_global_scale": torch.zeros(1)}, r"is \[0.0\], not one"),
        ("compressed-tensors", {"weight_scale": None}, r"weight_scale' is missing; the scales"),
        ("modelopt", {"weight_scale": SCALES[:5]}, r"weight_scale' is F8_E4M3 \[5, 4\]; the sc"),
        ("modelopt", {"weight_scale": SCALES.float()}, r"weight_scale' is F32 \["),
        ("compressed-tensors", {"weight": torch.ones(128, 64)}, "is there as numbers, too"),
    ],
)
def test_scales_that_do_not_fit_are_refused(
    tiny: Tiny, tmp_path: Path, kind: str, tensors: dict[str, Tensor | None], match: str
) -> None:
    make(tiny("llama"), tmp_path / "m", kind)
    change(tmp_path / "m", {f"{UP}.{end}": tensor for end, tensor in tensors.items()})
    with pytest.raises(WeightMismatchError, match=match):
        LLMEngine(tmp_path / "m", device="cpu")


@pytest.mark.parametrize("packed", [torch.ones(128, 32), torch.ones(2, 128, 32).byte()])
def test_codes_that_are_no_bytes_of_a_matrix_are_refused(
    tiny: Tiny, tmp_path: Path, packed: Tensor
) -> None:
    make(tiny("llama"), tmp_path / "m", "compressed-tensors")
    change(tmp_path / "m", {f"{UP}.weight_packed": packed})
    with (
        open_checkpoint(tmp_path / "m", read_model_config(tmp_path / "m")) as reader,
        pytest.raises(UnsupportedModelError, match=r"weight_packed' is .*; NVFP4 must be U8"),
    ):
        reader.tensor(f"{UP}.weight")


def test_what_quantised_nothing_but_kv_is_numbers(tiny: Tiny, tmp_path: Path) -> None:
    shutil.copytree(tiny("llama"), tmp_path / "m")
    only_kv = BESIDE | {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "m" / "hf_quant_config.json").write_text(json.dumps(only_kv))
    assert read_model_config(tmp_path / "m").codes == ""
    path = tmp_path / "m" / "model.safetensors"
    layer = "model.layers.0.self_attn."
    scales = {f"{layer}{part}_proj.{part}_scale": torch.ones(1) for part in "kv"}
    save_file(load_file(path) | scales, path, {"format": "pt"})
    LLMEngine(tmp_path / "m", device="cpu").close()


@pytest.mark.parametrize(
    ("config", "is_nvfp4"),
    [
        (OF_TENSORS, True),
        (
            OF_TENSORS | {"config_groups": {"a": {"weights": FLOAT4}, "b": {"weights": FLOAT8}}},
            True,
        ),
        (MODELOPT, True),
        (MODELOPT | {"quant_method": "modelopt_fp4", "quant_algo": "W4A16_NVFP4"}, True),
        (MIXED | {"quantized_layers": {"a": {"quant_algo": "FP8"}, "b": MODELOPT}}, True),
        (MODELOPT | {"group_size": 32}, False),
        (MODELOPT | {"quant_algo": "NVFP4_AWQ"}, False),
        (MIXED | {"quantized_layers": {"a": {"quant_algo": "W4A8_AWQ"}, "b": MODELOPT}}, False),
        (MIXED | {"quantized_layers": {"a": 3}}, False),
        (MIXED | {"quantized_layers": 3}, False),
        (OF_TENSORS | {"config_groups": {"a": {"weights": FLOAT4 | {"group_size": 32}}}}, False),
        (OF_TENSORS | {"config_groups": {"a": {"weights": FLOAT4 | {"type": "int"}}}}, False),
        (OF_TENSORS | {"config_groups": {"a": {}}}, False),
        ({"quant_method": "nvfp4"}, False),
    ],
)
def test_which_configs_are_of_nvfp4(
    tiny: Tiny, tmp_path: Path, config: dict[str, Any], is_nvfp4: bool
) -> None:
    assert has_nvfp4(config) is is_nvfp4
    shutil.copytree(tiny("llama"), tmp_path / "m")
    configure(tmp_path / "m", config)
    if is_nvfp4:
        assert read_model_config(tmp_path / "m").codes == "NVFP4"
    else:
        said = config["quant_method"]
        said += f" with {config['quant_algo']}" if "quant_algo" in config else ""
        with pytest.raises(UnsupportedModelError, match=f"'quantization_config' says '{said}'"):
            read_model_config(tmp_path / "m")
