"""Checkpoints in NF4 of bitsandbytes against its formula, written out here, and against
transformers' logits of the numbers that this gives.

The formula is that of bitsandbytes' backends/default/ops.py: `dequantize_4bit`, and
`dequantize_blockwise` for scales of 8 bits.
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
    assert_logits_are_transformers,
    small_engine,
)
from marks import needs_compiler
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributions import Normal

from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.errors import UnsupportedModelError, WeightMismatchError
from nanoengine.loading.loader import open_checkpoint
from nanoengine.loading.model_config import read_model_config
from nanoengine.loading.nf4 import has_nf4
from nanoengine.models.stored_codes import NF4_LEVELS, CodedWeight, numbers_of

Tiny = Callable[[str], Path]
BLOCK, BLOCK_OF_SCALES = 64, 256
CONFIG: dict[str, Any] = {
    "quant_method": "bitsandbytes",
    "_load_in_4bit": True,
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_quant_storage": "uint8",
    "llm_int8_skip_modules": ["lm_head"],
}
OFFSET = 0.0123


def test_the_levels_are_quantiles_of_a_normal_distribution() -> None:
    """QLoRA's rule: 9 above 0 and 8 below, of equal shares, and divided by the largest."""
    first = 0.9677083
    above = Normal(0, 1).icdf(torch.linspace(first, 0.5, 9)[:-1])
    below = -Normal(0, 1).icdf(torch.linspace(first, 0.5, 8)[:-1])
    levels = torch.cat((above, torch.zeros(1), below)).sort().values
    torch.testing.assert_close(torch.tensor(NF4_LEVELS), levels / levels.max(), atol=1e-6, rtol=0)


def quantised(weight: Tensor, is_nested: bool) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a weight by the ends of their names, and what they say."""
    levels, blocks = torch.tensor(NF4_LEVELS), weight.float().view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": "bfloat16"}
    state["shape"] = list(weight.shape)
    tensors = {".absmax": scales, ".quant_map": levels}
    if is_nested:
        of_scales = torch.linspace(-1, 1, 256)
        rest = [each - OFFSET for each in scales.split(BLOCK_OF_SCALES)]
        sizes = torch.stack([each.abs().max() for each in rest])
        codes = [
            (e[:, None] / s - of_scales).abs().argmin(1) for e, s in zip(rest, sizes, strict=True)
        ]
        tensors |= {".absmax": torch.cat(codes).byte(), ".nested_absmax": sizes}
        tensors |= {".nested_quant_map": of_scales}
        state |= {"nested_blocksize": BLOCK_OF_SCALES, "nested_offset": OFFSET}
        scales = torch.cat([of_scales[c] * s for c, s in zip(codes, sizes, strict=True)]) + OFFSET
    codes_of = (blocks[..., None] / scales[:, None, None] - levels).abs().argmin(2)
    said = (levels[codes_of] * scales[:, None]).view_as(weight)
    pairs = codes_of.byte().view(-1, 2)
    tensors[""] = (pairs[:, 0] << 4 | pairs[:, 1])[:, None]
    tensors[".quant_state.bitsandbytes__nf4"] = in_bytes(state)
    return tensors, said


def in_bytes(state: object) -> Tensor:
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def make(
    source: Path, folder: Path, is_nested: bool = True
) -> tuple[Path, Path, dict[str, Tensor]]:
    """The checkpoint in NF4, the same as numbers, and what the tensors say."""
    ours, plain = folder / "m", folder / "plain"
    for each in (ours, plain):
        shutil.copytree(source, each)
    tensors, said = load_file(source / "model.safetensors"), {}
    for name in [
        n for n, t in tensors.items() if n.endswith("_proj.weight") and not t.numel() % 64
    ]:
        made, said[name] = quantised(tensors.pop(name), is_nested)
        tensors |= {name + end: tensor.clone() for end, tensor in made.items()}
    save_file(tensors, ours / "model.safetensors")
    numbers = load_file(source / "model.safetensors") | said
    save_file(numbers, plain / "model.safetensors")
    configure(ours, CONFIG)
    return ours, plain, said


def configure(folder: Path, config: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))


def change(folder: Path, tensors: dict[str, Tensor | None]) -> None:
    path = folder / "model.safetensors"
    kept = load_file(path) | {f"{UP}{end}": tensor for end, tensor in tensors.items()}
    save_file({name: t for name, t in kept.items() if t is not None}, path)


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("is_nested", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "deepseek-v3-dense"])
def test_every_weight_is_what_its_codes_and_scales_say(
    tiny: Tiny, tmp_path: Path, name: str, is_nested: bool
) -> None:
    """Bit by bit, also as codes, which it stays where rows are whole blocks."""
    ours, _, said = make(tiny(name), tmp_path, is_nested)
    config = read_model_config(ours)
    assert config.codes == "NF4" and len(said) > 15
    with open_checkpoint(ours, config) as reader:
        assert reader.names() == load_file(tiny(name) / "model.safetensors").keys()
        for each, values in said.items():
            assert reader.shape(each) == values.shape
            assert torch.equal(reader.tensor(each), values), each
            weight = reader.weight(each, torch.float32)
            assert isinstance(weight, CodedWeight) is (values.shape[1] % BLOCK == 0), each
            assert torch.equal(numbers_of(weight), values), each
            assert reader.form(each) == ("NF4" if isinstance(weight, CodedWeight) else "F32")


@needs_compiler
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_answers_are_those_of_the_same_weights_in_float32(
    tiny: Tiny, tmp_path: Path, name: str
) -> None:
    ours, plain, said = make(tiny(name), tmp_path)
    driver = Driver(small_engine(ours))
    num_coded = sum(values.shape[1] % BLOCK == 0 for values in said.values())
    line = f"codes as stored: {num_coded} of NF4; the rest in float32"
    assert num_coded > 10 and line in str(driver.engine.plan)
    outputs = driver.run([[7 * i % 256 for i in range(50)], [3, 4]])
    driver.engine.close()
    assert_logits_are_transformers(driver, plain, outputs)


@needs_compiler
@pytest.mark.usefixtures("our_products")
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.breadth)])
def test_codes_have_the_bits_of_their_numbers_on_all_tiers(
    tiny: Tiny, tmp_path: Path, dtype: str
) -> None:
    ours, plain, _ = make(tiny("qwen3-moe"), tmp_path)
    assert_bits_of_numbers(ours, plain, dtype)


def test_other_levels_and_blocks_leave_numbers(tiny: Tiny, tmp_path: Path) -> None:
    ours, _, said = make(tiny("llama"), tmp_path)
    change(ours, {".quant_map": torch.tensor(NF4_LEVELS) * 2})
    with open_checkpoint(ours, read_model_config(ours)) as reader:
        weight = reader.weight(UP, torch.float32)
        assert isinstance(weight, Tensor) and torch.equal(weight, said[UP] * 2)
    state = {"shape": list(said[UP].shape), "blocksize": 32, "nested_blocksize": 512}
    change(ours, {".quant_state.bitsandbytes__nf4": in_bytes(state)})
    with open_checkpoint(ours, read_model_config(ours)) as reader:
        assert reader.form(UP) == "F32"


def test_a_block_of_scales_longer_than_the_weight_takes_no_memory(
    tiny: Tiny, tmp_path: Path
) -> None:
    ours, _, said = make(tiny("llama"), tmp_path)
    with open_checkpoint(ours, read_model_config(ours)) as reader:
        held = reader._whole(f"{UP}.quant_state.bitsandbytes__nf4")
    state = json.loads(bytes(held.tolist())) | {"nested_blocksize": 10**23}
    change(ours, {".quant_state.bitsandbytes__nf4": in_bytes(state)})
    with open_checkpoint(ours, read_model_config(ours)) as reader:
        assert torch.equal(reader.tensor(UP), said[UP])


STATE = {"shape": [128, 64], "blocksize": 64}


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({".absmax": None}, r"up_proj.weight.absmax' is missing"),
        ({".quant_map": torch.ones(3)}, r"weight.quant_map' has 3 numbers, not 16"),
        ({".nested_absmax": torch.ones(9)}, r"nested_absmax' has 9 numbers, not 1"),
        ({".quant_map": torch.ones(16).int()}, r"quant_map' is torch.int32, no floats"),
        ({".quant_state.bitsandbytes__nf4": torch.ones(9)}, r"nf4' is torch.float32, not uint8"),
        ({"": torch.ones(5, 1).byte()}, r"holds 10 weights of 4 bits, not the "),
        *(
            ({".quant_state.bitsandbytes__nf4": in_bytes(state)}, "is not the state of a matrix")
            for state in (3, {}, STATE | {"shape": [3]}, STATE | {"blocksize": 0})
        ),
        (
            {".quant_state.bitsandbytes__nf4": in_bytes(STATE | {"nested_offset": "x"})},
            r"'nested_offset': 'x'} is not the state",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    tiny: Tiny, tmp_path: Path, tensors: dict[str, Tensor | None], match: str
) -> None:
    ours, _, _ = make(tiny("llama"), tmp_path)
    change(ours, tensors)
    with pytest.raises(WeightMismatchError, match=match):
        LLMEngine(ours, device="cpu")


@pytest.mark.parametrize(
    "other",
    [
        {"bnb_4bit_quant_type": "fp4"},
        {"load_in_4bit": False, "load_in_8bit": True},
        {"bnb_4bit_quant_storage": "bfloat16"},
    ],
)
def test_other_forms_of_bitsandbytes_are_refused(
    tiny: Tiny, tmp_path: Path, other: dict[str, Any]
) -> None:
    assert has_nf4(CONFIG) and not has_nf4(CONFIG | other)
    shutil.copytree(tiny("llama"), tmp_path / "m")
    configure(tmp_path / "m", CONFIG | other)
    with pytest.raises(UnsupportedModelError, match="says 'bitsandbytes'"):
        read_model_config(tmp_path / "m")
