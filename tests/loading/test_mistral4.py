"""What only Mistral 4 has in config.json and in its checkpoints.

Logits and ids in fp32, on every tier and on ranks are tested with the other architectures' (TINY).
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import Driver, small_engine
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, Mistral4Config
from transformers.models.mistral4 import modeling_mistral4

from nanoengine.config.model import LatentConfig, ModelConfig
from nanoengine.errors import ModelLoadError
from nanoengine.loading.model_config import read_model_config
from nanoengine.models.weight_shapes import weight_shapes

Tiny = Callable[[str], Path]
ROPE: dict[str, Any] = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 128.0,
    "llama_4_scaling_beta": 0.1,
    "max_position_embeddings": 1048576,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 8192,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "rope_type": "yarn",
    "type": "yarn",
}
# As of mistralai/Mistral-Small-4-119B-2603.
PUBLISHED: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "text_config": {
        "attention_bias": False,
        "eos_token_id": 2,
        "first_k_dense_replace": 0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "kv_lora_rank": 256,
        "max_position_embeddings": 1048576,
        "model_type": "mistral4",
        "moe_intermediate_size": 2048,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 36,
        "num_key_value_heads": 32,
        "q_lora_rank": 1024,
        "qk_head_dim": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_interleave": True,
        "rope_parameters": ROPE,
        "routed_scaling_factor": 1.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "v_head_dim": 128,
        "vocab_size": 131072,
    },
}


def read(folder: Path, config: dict[str, Any], **changes: Any) -> ModelConfig:
    content = config | {"text_config": config["text_config"] | changes}
    (folder / "config.json").write_text(json.dumps(content))
    return read_model_config(folder)


def test_the_published_config(tmp_path: Path) -> None:
    found = read(tmp_path, PUBLISHED)
    assert found.latent == LatentConfig(1024, 256, 64, 64, 128, takes_turns=True)
    assert (found.rope.num_dims, found.rope.attention_factor) == (64, 1.0)
    assert (found.rope.query_beta, found.rope.original_max_position) == (0.1, 8192)
    assert found.max_position == 1048576 and found.experts is not None
    assert (found.experts.count, found.experts.top_k, found.experts.scoring) == (128, 4, "softmax")
    assert found.experts.renormalises and found.experts.shared_size == 2048
    total = sum(math.prod(shape) for shape in weight_shapes(found).values())
    assert round(total / 1e9, 1) == 119.0  # published: 119.4 with its vision tower


def test_keys_that_are_left_out_are_transformers_defaults(tmp_path: Path) -> None:
    said = {"text_config": {"model_type": "mistral4"}}
    ours, theirs = read(tmp_path, PUBLISHED | said), Mistral4Config()
    assert ours == read(tmp_path, PUBLISHED, eos_token_id=None)
    assert ours.hidden_size == theirs.hidden_size and ours.num_layers == theirs.num_hidden_layers


@pytest.mark.parametrize("share", [0.25, 1e300, True, -1])
def test_another_share_of_a_query_is_refused(tmp_path: Path, share: float) -> None:
    with pytest.raises(ModelLoadError, match="partial_rotary_factor"):
        read(tmp_path, PUBLISHED, rope_parameters=ROPE | {"partial_rotary_factor": share})


def logits_beside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, Any]:
    """Ours, transformers' with scores as Mistral trained them, and transformers' as it is."""
    driver, prompt = Driver(small_engine(folder)), [7 * i % 256 for i in range(40)]
    (output,) = driver.run([prompt])
    driver.engine.close()
    text = torch.tensor([prompt + output.outputs[0].token_ids])
    as_it_is = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    monkeypatch.setattr(modeling_mistral4, "yarn_apply_mscale", lambda rope, scaling: scaling)
    plain = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        theirs = [model(text).logits[0, len(prompt) - 1 : -1] for model in (plain, as_it_is)]
    return torch.stack(driver.logits[output.request_id]), *theirs


def test_the_length_of_training_does_not_sharpen_scores(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `mscale_all_dim` says of DeepSeek's, and transformers reads it of Mistral's."""
    shutil.copytree(tiny("mistral4"), tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    content = json.loads(path.read_text())
    content["text_config"]["rope_parameters"]["mscale_all_dim"] = 1.0
    path.write_text(json.dumps(content))
    ours, plain, as_it_is = logits_beside(tmp_path / "m", monkeypatch)
    torch.testing.assert_close(ours, plain, atol=1e-4, rtol=0)
    assert not torch.allclose(ours, as_it_is, atol=1e-2)


@pytest.mark.parametrize("shape", [(-1,), (-1, 1, 1)])
def test_experts_in_fp8(tiny: Tiny, tmp_path: Path, shape: tuple[int, ...]) -> None:
    """As published: a tensor for all experts of a layer, a scale for each, one of activations."""
    rounded, halves = tmp_path / "8", tmp_path / "32"
    for folder in (rounded, halves):
        shutil.copytree(tiny("mistral4"), folder)
    stored = load_file(rounded / "model.safetensors")
    numbers = dict(stored)
    wholes = [name for name, tensor in stored.items() if tensor.dim() == 3 and "experts" in name]
    assert len(wholes) == 4
    for name in wholes:
        scales = stored[name].abs().amax((1, 2)) / 448
        codes = (stored[name] / scales[:, None, None]).to(torch.float8_e4m3fn)
        stored |= {name: codes, f"{name}_scale_inv": scales.view(shape)}
        stored[f"{name}_activation_scale"] = torch.ones(1)
        numbers[name] = codes.float() * scales[:, None, None]
    save_file(stored, rounded / "model.safetensors", {"format": "pt"})
    save_file(numbers, halves / "model.safetensors", {"format": "pt"})
    config = json.loads((rounded / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "static"}
    (rounded / "config.json").write_text(json.dumps(config))
    outputs = []
    for folder in (rounded, halves):
        driver = Driver(small_engine(folder))
        (output,) = driver.run([[7 * i % 256 for i in range(40)]])
        outputs.append(torch.stack(driver.logits[output.request_id]))
        driver.engine.close()
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-4, rtol=0)
