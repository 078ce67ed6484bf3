"""Checkpoints quantised in the forms of other tools, but for what a list leaves out: of random
codes, for tests of what they take.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType as QuantType
from gguf_model import SCALINGS, GGUFModel, with_scaling
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanoengine.models.stored_codes import NF4_LEVELS

GROUP = 32
LEFT_OUT = ["lm_head", "model.layers.1", "mlp.gate", "down_proj"]
PATTERNS = ["lm_head", r"re:.*layers\.1\..*", r"re:.*down_proj$", r"re:.*mlp\.gate$"]
PRODUCTS = ("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight", "in_proj_qkvz.weight")
INT4 = {"type": "int", "num_bits": 4, "symmetric": True, "strategy": "group", "group_size": GROUP}
FLOAT8 = {"type": "float", "num_bits": 8, "strategy": "channel"}
OF_TENSORS: dict[str, Any] = {"quant_method": "compressed-tensors", "ignore": PATTERNS}
# By name: the quantization_config, and the tensors of a weight of this shape by the ends of names.
KINDS: dict[str, tuple[dict[str, Any], Callable[[int, int], dict[str, Tensor]]]] = {}
KINDS["awq"] = (
    {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP,
        "version": "gemm",
        "modules_to_not_convert": LEFT_OUT,
    },
    lambda outputs, inputs: {
        "qweight": integers(inputs, outputs // 8),
        "qzeros": integers(-(-inputs // GROUP), outputs // 8),
        "scales": halves(-(-inputs // GROUP), outputs),
    },
)
KINDS["gptq"] = (
    {
        "quant_method": "gptq",
        "bits": 8,
        "group_size": GROUP,
        "checkpoint_format": "gptq_v2",
        "modules_to_not_convert": LEFT_OUT,
    },
    lambda outputs, inputs: {
        "qweight": integers(inputs // 4, outputs),
        "qzeros": integers(-(-inputs // GROUP), outputs // 4),
        "scales": halves(-(-inputs // GROUP), outputs),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // GROUP,
    },
)
KINDS["compressed-tensors"] = (
    OF_TENSORS | {"format": "pack-quantized", "config_groups": {"group_0": {"weights": INT4}}},
    lambda outputs, inputs: {
        "weight_packed": integers(outputs, inputs // 8),
        "weight_scale": halves(outputs, -(-inputs // GROUP)),
        "weight_shape": torch.tensor([outputs, inputs]),
    },
)
KINDS["fp8"] = (
    {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP], "ignored_layers": LEFT_OUT},
    lambda outputs, inputs: {
        "weight": halves(outputs, inputs).to(torch.float8_e4m3fn),
        "weight_scale_inv": torch.rand(-(-outputs // GROUP), -(-inputs // GROUP)),
    },
)
KINDS["fp8, rows"] = (
    OF_TENSORS | {"config_groups": {"group_0": {"weights": FLOAT8}}},
    lambda outputs, inputs: {
        "weight": halves(outputs, inputs).to(torch.float8_e4m3fn),
        "weight_scale": torch.rand(outputs, 1),
    },
)
FLOAT4 = {"type": "float", "num_bits": 4, "group_size": 16}
KINDS["nvfp4"] = (
    OF_TENSORS | {"config_groups": {"group_0": {"weights": FLOAT4}}},
    lambda outputs, inputs: {
        "weight_packed": integers(outputs, inputs // 8).view(torch.uint8),
        "weight_scale": halves(outputs, inputs // 16).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.full((1,), 20.0),
    },
)
KINDS["modelopt"] = (
    {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": ["lm_head", "model.layers.1*", "*mlp.gate", "*down_proj"],
    },
    lambda outputs, inputs: {
        "weight": integers(outputs, inputs // 8).view(torch.uint8),
        "weight_scale": halves(outputs, inputs // 16).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.05),
    },
)
KINDS["nf4"] = (
    {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "llm_int8_skip_modules": LEFT_OUT,
    },
    lambda outputs, inputs: {
        "weight": integers(outputs * inputs // 8, 1).view(torch.uint8).view(-1, 1),
        "weight.absmax": torch.rand(outputs * inputs // 64),
        "weight.quant_map": torch.tensor(NF4_LEVELS),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps({"shape": [outputs, inputs], "blocksize": 64}).encode()),
            dtype=torch.uint8,
        ),
    },
)
SIZES = {"nvfp4": 16, "modelopt": 16, "nf4": 64}  # inputs are multiples of it


def integers(*shape: int) -> Tensor:
    return torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int32)


def halves(*shape: int) -> Tensor:
    return torch.rand(shape).half()


def copied(source: Path, folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """The checkpoint with other tensors, in one file, and other settings."""
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if "safetensors" not in path.name:
            (folder / path.name).write_bytes(path.read_bytes())
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def all_tensors(source: Path) -> dict[str, Tensor]:
    return {n: t for path in source.glob("*.safetensors") for n, t in load_file(path).items()}


def in_16_bits(source: Path, folder: Path) -> Path:
    """As models are published."""
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in all_tensors(source).items()}
    return copied(source, folder, tensors, dtype="bfloat16")


def quantised(source: Path, folder: Path, kind: str, is_left: Callable[[str], bool]) -> Path:
    """is_left: whether a matrix of this name stays as it is."""
    config, make = KINDS[kind]
    tensors = all_tensors(source)
    for name, tensor in list(tensors.items()):
        is_whole = tensor.dim() == 2 and tensor.shape[0] % 8 == 0
        is_whole = is_whole and tensor.shape[1] % SIZES.get(kind, 8) == 0
        if is_whole and name.endswith(PRODUCTS) and not is_left(name):
            del tensors[name]
            found = make(*tensor.shape).items()
            tensors |= {name.removesuffix("weight") + end: value for end, value in found}
    return copied(source, folder, tensors, quantization_config=config)


def mixed_gguf(source: Path, path: Path, name: str) -> Path:
    """A GGUF whose matrices take turns in four types. name: of TINY."""
    model = with_scaling(GGUFModel(source), name) if name in SCALINGS else GGUFModel(source)
    kinds = [QuantType.Q8_0, QuantType.Q4_0, QuantType.F16, QuantType.Q5_1]
    matrices = [n for n, values in model.tensors.items() if values.ndim > 1 and "bias" not in n]
    for number, each in enumerate(matrices):
        if model.tensors[each].shape[-1] % 32 == 0 and "gate_inp" not in each:
            model.types[each] = kinds[number % len(kinds)]
    path.parent.mkdir(parents=True)
    return model.write(path)
