"""What only gpt-oss has: experts in MXFP4, clamped, with biases; and its keys in config.json.

Its logits and ids on every tier are tested with the other architectures' (TINY).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from checkpoints import reference
from driver import Driver, assert_greedy, assert_logits_are_transformers, small_engine
from marks import needs_compiler, needs_no_gpu
from replays import watch_replays
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from nanoengine import SamplingParams
from nanoengine.cli.main import main
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.errors import ModelLoadError, UnsupportedModelError, WeightMismatchError
from nanoengine.loading.checkpoint import CheckpointReader, check_names
from nanoengine.loading.experts_json import expert_parts
from nanoengine.loading.model_config import read_model_config
from nanoengine.models.stored_codes import CodedWeight
from nanoengine.models.weight_shapes import weight_shapes
from nanoengine.startup import parts

Tiny = Callable[[str], Path]
MXFP4_NAMES = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
PROMPTS = [[7, 9, 5] * 9, [i * 7 % 256 for i in range(60)], [3], [7, 9, 5] * 9]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SMALL = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "max_model_len": 64}


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def both_kinds(tiny: Tiny, tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint with random experts in MXFP4, and the same as transformers unpacks it."""
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    for folder in (packed, plain):
        copytree(tiny("gpt-oss"), folder)
    stored, generator = load_file(plain / "model.safetensors"), torch.Generator().manual_seed(0)
    others = dict(stored)
    for name, whole in list(stored.items()):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            count, columns, rows = whole.shape
            shape = count, rows, columns // 32
            codes = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(121, 127, shape, generator=generator, dtype=torch.uint8)
            unpacked = convert_moe_packed_tensors(codes, scales, dtype=torch.float32)
            others[name] = unpacked.contiguous()
            del stored[name]
            stored |= {f"{name}_blocks": codes, f"{name}_scales": scales}
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    save_file(others, plain / "model.safetensors", {"format": "pt"})
    change_config(packed, quantization_config={"quant_method": "mxfp4"})
    return packed, plain


@pytest.mark.parametrize("has_kernels", [pytest.param(True, marks=needs_compiler), False])
def test_experts_in_mxfp4(
    tiny: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    has_kernels: bool,
) -> None:
    """Every tensor has transformers' bits. On a CPU they stay codes; elsewhere the plan says by how
    much they have grown.
    """
    if not has_kernels:
        monkeypatch.setattr(parts, "_code_ops", lambda *_: None)
    packed, plain = both_kinds(tiny, tmp_path)
    config, replays = read_model_config(packed), watch_replays(monkeypatch)
    with CheckpointReader(packed) as ours, CheckpointReader(plain) as theirs:
        for reader in (ours, theirs):
            reader.rename(expert_parts(config, reader))
            check_names(weight_shapes(config), reader)
        for name, shape in weight_shapes(config).items():
            tensor = ours.tensor(name)
            assert tensor.shape == ours.shape(name) == shape
            assert torch.equal(tensor.float(), theirs.tensor(name)), name
            weight = ours.weight(name, torch.float32)
            if isinstance(weight, CodedWeight):
                assert torch.equal(weight.numbers(), tensor.float())
                assert weight.nbytes == tensor.numel() * 18 // 32
            assert isinstance(weight, CodedWeight) == name.endswith(MXFP4_NAMES)
        assert ours.num_bytes() < theirs.num_bytes()
    driver = Driver(LLMEngine(packed, dtype="float32", num_gpu_blocks=64, kvcache_block_size=8))
    outputs = driver.run(PROMPTS, GREEDY)
    assert_greedy(plain, PROMPTS, outputs, GREEDY.max_tokens or 0)
    assert replays or not has_kernels
    plan = str(driver.engine.plan)
    assert ("MXFP4, dequantised: " in plan) is not has_kernels
    assert ("codes as stored: 45 of MXFP4; the rest in float32" in plan) is has_kernels
    if has_kernels:
        flags = ["--gpu-gib", "0", "--dtype", "float32", "--json"]
        assert main(["plan", str(packed), *flags]) == 0
        planned = json.loads(capsys.readouterr().out)["memory"]["RAM"]["weights"]
        assert planned == pytest.approx(driver.engine.plan.weight_bytes, rel=0.01)
    driver.engine.close()


@pytest.mark.breadth
@needs_no_gpu
def test_experts_in_mxfp4_on_a_gpu(tiny: Tiny, tmp_path: Path) -> None:
    """They stay codes there, too, and answers are those of the numbers."""
    virtual_gpu = pytest.importorskip("virtual_gpu", reason="Triton is not installed")
    packed, plain = both_kinds(tiny, tmp_path)
    with virtual_gpu.VirtualGpu():
        engine = small_engine(packed, device="cuda", **SMALL)
        assert "codes as stored: 45 of MXFP4; the rest in float32" in str(engine.plan)
        driver = Driver(engine)
        outputs = driver.run(PROMPTS[:1], replace(GREEDY, max_tokens=3))
        engine.close()
    assert_greedy(plain, PROMPTS[:1], outputs, 3)
    assert_logits_are_transformers(driver, plain, outputs)


def drop_scales(tensors: dict[str, torch.Tensor], name: str) -> None:
    del tensors[f"{name}_scales"]


def shorten_scales(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[f"{name}_scales"] = tensors[f"{name}_scales"][:, 1:].contiguous()


def lose_rows(tensors: dict[str, torch.Tensor], name: str) -> None:
    for kind in ("blocks", "scales"):
        tensors[f"{name}_{kind}"] = tensors[f"{name}_{kind}"][:, 2:].contiguous()


def widen(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[f"{name}_scales"] = tensors[f"{name}_scales"].float()


@pytest.mark.parametrize("damage", [drop_scales, shorten_scales, lose_rows, widen])
def test_damaged_mxfp4_is_refused(tiny: Tiny, tmp_path: Path, damage: Callable[..., None]) -> None:
    packed, _ = both_kinds(tiny, tmp_path)
    tensors = load_file(packed / "model.safetensors")
    damage(tensors, "model.layers.1.mlp.experts.gate_up_proj")
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    kind = UnsupportedModelError if damage is widen else WeightMismatchError
    with pytest.raises(ModelLoadError, match=r"experts\.(0\.gate|gate_up)_proj") as caught:
        LLMEngine(packed, dtype="float32")
    assert isinstance(caught.value, kind)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_gpu_blocks": 12, "decode_reserve_blocks": 0, "max_num_batched_tokens": 11},
        {"num_gpu_blocks": 64, "speculative": "ngram:4"},
    ],
    ids=["preempted, in chunks", "guesses"],
)
def test_ids_and_logits_equal_transformers(tiny: Tiny, settings: dict[str, Any]) -> None:
    path = tiny("gpt-oss")
    small = {"dtype": "float32", "kvcache_block_size": 8, "max_num_seqs": 5}
    driver = Driver(LLMEngine(path, **small | settings))
    for _ in range(2):  # the second time the prefix cache serves
        outputs = driver.run(PROMPTS, GREEDY)
        assert_greedy(path, PROMPTS, outputs, GREEDY.max_tokens or 0)
        assert_logits_are_transformers(driver, path, outputs)
    assert any(output.num_cached_tokens for output in outputs)
    if "decode_reserve_blocks" in settings:
        assert any(output.metrics.num_preemptions for output in outputs)
    driver.engine.close()


def test_a_clamp_that_shows(tiny: Tiny, tmp_path: Path) -> None:
    """Gates and ups far beyond 7, where the tiny checkpoint's seldom are."""
    folder = tmp_path / "large"
    copytree(tiny("gpt-oss"), folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "gate_up_proj" in name:
            tensor *= 20 if name.endswith("bias") else 2
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    driver = Driver(LLMEngine(folder, dtype="float32", num_gpu_blocks=64, kvcache_block_size=8))
    outputs = driver.run(PROMPTS[:2], GREEDY)
    assert_greedy(folder, PROMPTS[:2], outputs, GREEDY.max_tokens or 0)
    driver.engine.close()
    reference.cache_clear()


# -- config.json


def test_keys_are_read_as_transformers_does(tiny: Tiny, tmp_path: Path) -> None:
    """With the keys of the published checkpoints, and with few of them."""
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    scaling = {"rope_type": "yarn", "factor": 16.0, "truncate": False, "beta_fast": 32.0}
    scaling |= {"beta_slow": 1.0, "original_max_position_embeddings": 4096}
    few = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 300}
    few |= {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 3}
    few |= {"intermediate_size": 32}
    for changes in (
        {},
        {"rope_scaling": None, "rope_parameters": None},
        {"rope_parameters": {}},
        {"rope_scaling": scaling},
        {"rope_scaling": scaling, "layer_types": kinds, "sliding_window": 9, "rope_theta": 1000.0},
    ):
        (tmp_path / "config.json").write_text(json.dumps(few | changes))
        ours, theirs = read_model_config(tmp_path), GptOssConfig.from_pretrained(tmp_path)
        assert (ours.head_dim, ours.num_kv_heads) == (theirs.head_dim, theirs.num_key_value_heads)
        assert ours.attention_bias and ours.rms_norm_eps == theirs.rms_norm_eps
        assert ours.max_position == theirs.max_position_embeddings
        assert ours.windows == tuple(
            theirs.sliding_window if kind == "sliding_attention" else None
            for kind in theirs.layer_types
        )
        rope = theirs.rope_parameters
        assert (ours.rope.kind, ours.rope.theta) == (rope["rope_type"], rope["rope_theta"])
        assert (ours.rope.factor, ours.rope.truncate) == (
            rope.get("factor", 1.0),
            rope.get("truncate", True),
        )
        assert ours.experts is not None and ours.experts.has_bias and ours.experts.renormalises
        assert (ours.experts.count, ours.experts.top_k) == (
            theirs.num_local_experts,
            theirs.num_experts_per_tok,
        )


@pytest.mark.parametrize(
    ("model", "changes", "match"),
    [
        ("gpt-oss", {"swiglu_limit": 5.0}, "'swiglu_limit' is 5.0"),
        ("gpt-oss", {"swiglu_alpha": 1.0}, "'swiglu_alpha' is 1.0"),
        ("gpt-oss", {"quantization_config": {"quant_method": "awq"}}, "awq"),
        ("llama", {"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
    ],
)
def test_what_is_not_computed_is_refused(
    tiny: Tiny, tmp_path: Path, model: str, changes: dict[str, Any], match: str
) -> None:
    copytree(tiny(model), tmp_path / "changed")
    change_config(tmp_path / "changed", **changes)
    with pytest.raises(UnsupportedModelError, match=match):
        read_model_config(tmp_path / "changed")
