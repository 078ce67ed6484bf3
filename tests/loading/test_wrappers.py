"""Checkpoints of models for images and text: their text model alone, against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import reference_greedy, reference_logits
from driver import GREEDY, Driver
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
)
from wrapped_models import WRAPPED

from nanoengine import LLM
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.errors import CorruptModelError, RequestError, UnsupportedModelError
from nanoengine.loading.model_config import read_model_config
from nanoengine.loading.wrappers import TEXT_DEFAULTS, WRAPPERS

QWEN_2_5_VL = "Qwen2_5_VLForConditionalGeneration"
PARTS = {
    "Apertus1p5ForConditionalGeneration": "audio_tokenizer, vision_tokenizer",
    "Exaone4_5_ForConditionalGeneration": "visual",
    "Gemma4ForConditionalGeneration": "embed_vision, vision_tower",
    "Glm46VForConditionalGeneration": "visual",
    "Glm4vForConditionalGeneration": "visual",
    "Glm4vMoeForConditionalGeneration": "visual",
    "Idefics3ForConditionalGeneration": "connector, vision_model",
    "LlavaNextForConditionalGeneration": "image_newline, multi_modal_projector, vision_tower",
    "LlavaOnevisionForConditionalGeneration": "image_newline, multi_modal_projector, vision_tower",
    "MiniCPMV4_6ForConditionalGeneration": "merger, vision_tower",
    "MuseGlimmerForConditionalGeneration": "vision_adapter, vision_projection, vision_tower",
    "SmolVLMForConditionalGeneration": "connector, vision_model",
}


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a name of WRAPPED to the checkpoint's folder."""
    made: dict[str, Path] = {}

    def folder_of(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            WRAPPED[name](made[name])
        return made[name]

    return folder_of


def renamed(name: str) -> str:
    """As transformers has a tensor in memory, and as Qwen's checkpoints have it."""
    for stored, ours in (
        ("language_model.model.", "model.language_model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.embed_tokens.", "model.language_model.embed_tokens."),
        ("model.layers.", "model.language_model.layers."),
        ("model.norm.", "model.language_model.norm."),
    ):
        if name.startswith(stored):
            return ours + name.removeprefix(stored)
    return name if name.startswith(("model.", "lm_head.")) else "model." + name


def turned(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With one tensor for the experts of a layer as Qwen3-VL's checkpoints at the hub have it."""
    of_all = ("experts.gate_up_proj", "experts.down_proj")
    return {n: t.mT.contiguous() if n.endswith(of_all) else t for n, t in tensors.items()}


@pytest.mark.some(6)
@pytest.mark.parametrize("is_renamed", [False, True], ids=["as saved", "as in memory"])
@pytest.mark.parametrize("name", WRAPPED)
def test_ids_and_logits_equal_transformers(
    wrapped: Callable[[str], Path], tmp_path: Path, name: str, is_renamed: bool
) -> None:
    path = wrapped(name)
    if is_renamed:
        stored = load_file(path / "model.safetensors")
        tensors = {renamed(n): t for n, t in stored.items()}
        tensors = turned(tensors) if name.startswith("Qwen3VLMoe") else tensors
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        (tmp_path / "config.json").write_text((path / "config.json").read_text())
        path = tmp_path
    said = check_against_transformers(path)
    name = name.split(",")[0]
    assert f"the text model of a {name}" in said
    parts = PARTS.get(name, "visual" if "Qwen" in name else "multi_modal_projector, vision_tower")
    assert f"({parts}) are not loaded" in said


def check_against_transformers(path: Path) -> str:
    """Ids and logits; returns the plan. transformers forgets factors of logits here: Cohere's
    `logit_scale`, by which the text model alone multiplies, and Granite's, by which it divides.
    """
    model = AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    text = model.config.get_text_config()
    scale = getattr(text, "logit_scale", 1.0) / getattr(text, "logits_scaling", 1.0)
    engine = LLMEngine(path, dtype="float32", device="cpu", kvcache_block_size=8, num_gpu_blocks=64)
    driver, prompts = Driver(engine), [[7, 3, 9], [i * 7 % 256 for i in range(40)]]
    for prompt, output in zip(prompts, driver.run(prompts), strict=True):
        tokens = output.outputs[0].token_ids
        assert tokens == reference_greedy(model, prompt, GREEDY.max_tokens, tokens)
        logits = reference_logits(model, prompt + tokens)[len(prompt) - 1 : -1]
        ours = torch.stack(driver.logits[output.request_id])
        torch.testing.assert_close(ours, logits * scale, atol=1e-4, rtol=0)
    return str(engine.plan)


@pytest.mark.parametrize("name", ["Qwen2VLForConditionalGeneration", QWEN_2_5_VL])
@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "mrope", "mrope_section": [4, 2, 2]},
        {"type": "yarn", "mrope_section": [4, 2, 2], "factor": 4.0}
        | {"original_max_position_embeddings": 16},
    ],
    ids=["mrope", "yarn"],
)
def test_the_text_models_keys_may_lie_beside_those_for_images(
    wrapped: Callable[[str], Path], tmp_path: Path, name: str, scaling: dict[str, Any]
) -> None:
    """As in the config.json of Qwen2-VL and Qwen2.5-VL at the hub."""
    content = json.loads((wrapped(name) / "config.json").read_text())
    text = content.pop("text_config")
    del text["rope_parameters"], text["model_type"]
    old = {"rope_scaling": scaling, "rope_theta": 1e6}
    (tmp_path / "config.json").write_text(json.dumps(text | content | old))
    (tmp_path / "model.safetensors").symlink_to(wrapped(name) / "model.safetensors")
    check_against_transformers(tmp_path)


@pytest.mark.parametrize("is_copy", [False, True])
@pytest.mark.parametrize("name", ["llama", "Qwen3_5ForConditionalGeneration"])
def test_a_head_of_its_own_counts_more_than_config_json(
    tiny: Callable[[str], Path],
    wrapped: Callable[[str], Path],
    tmp_path: Path,
    name: str,
    is_copy: bool,
) -> None:
    """As in transformers; one that is the embeddings once more is not held."""
    source = wrapped(name) if name in WRAPPED else tiny(name)
    content = json.loads((source / "config.json").read_text())
    content.pop("tie_word_embeddings")
    content.get("text_config", content)["tie_word_embeddings"] = True
    (tmp_path / "config.json").write_text(json.dumps(content))
    tensors = load_file(source / "model.safetensors")
    if is_copy:
        (embeddings,) = (t for n, t in tensors.items() if n.endswith("embed_tokens.weight"))
        tensors["lm_head.weight"] = embeddings.clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    made = AutoModelForImageTextToText if name in WRAPPED else AutoModelForCausalLM
    model = made.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    engine = LLMEngine(tmp_path, dtype="float32", device="cpu", num_gpu_blocks=8)
    driver, prompt = Driver(engine), [7, 3, 9]
    (output,) = driver.run([prompt])
    right = reference_logits(model, prompt + output.outputs[0].token_ids)[len(prompt) - 1 : -1]
    ours = torch.stack(driver.logits[output.request_id])
    torch.testing.assert_close(ours, right, atol=1e-4, rtol=0)
    assert engine.model_config.tie_word_embeddings == is_copy


def test_a_message_with_an_image_is_refused(wrapped: Callable[[str], Path]) -> None:
    llm = LLM(wrapped("Gemma3ForConditionalGeneration"), device="cpu", num_gpu_blocks=4)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    with pytest.raises(RequestError, match="no images"):
        llm.chat([{"role": "user", "content": [image]}])


def config(folder: Path, **changes: Any) -> Path:
    """A folder with the config.json of a wrapper as the hub has them, with changes."""
    content = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    }
    (folder / "config.json").write_text(json.dumps(content | changes))
    return folder


def test_keys_that_are_left_out_are_transformers_defaults(tmp_path: Path) -> None:
    """google/gemma-3-4b-it's config.json says hardly more than this."""
    ours = read_model_config(config(tmp_path))
    theirs = Gemma3Config.from_pretrained(tmp_path).text_config
    assert (ours.vocab_size, ours.num_heads) == (theirs.vocab_size, theirs.num_attention_heads)
    assert (ours.head_dim, ours.num_kv_heads) == (theirs.head_dim, theirs.num_key_value_heads)
    assert ours.rope.factor == theirs.rope_parameters["full_attention"]["factor"]
    assert ours.tie_word_embeddings and ours.eos_token_ids == (1, 106)


@pytest.mark.parametrize(
    ("wrapper", "kind"),
    [(name, kind) for name, kinds in WRAPPERS.items() for kind in kinds if kind in TEXT_DEFAULTS],
)
def test_a_text_config_may_leave_out_what_its_class_has(
    tmp_path: Path, wrapper: str, kind: str
) -> None:
    """llava-hf/llava-1.5-7b-hf's says no size of a layer."""
    content = {"architectures": [wrapper], "vision_config": {}, "text_config": {"model_type": kind}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    ours, theirs = read_model_config(tmp_path), CONFIG_MAPPING[kind]().get_text_config()
    assert (ours.hidden_size, ours.num_layers) == (theirs.hidden_size, theirs.num_hidden_layers)
    assert (ours.num_heads, ours.vocab_size) == (theirs.num_attention_heads, theirs.vocab_size)
    # A latent is one head.
    assert ours.num_kv_heads == (1 if ours.latent else theirs.num_key_value_heads)
    assert ours.intermediate_size == theirs.intermediate_size
    assert ours.max_position == theirs.max_position_embeddings
    eps = getattr(theirs, "rms_norm_eps", None) or theirs.layer_norm_eps
    assert (ours.rms_norm_eps, ours.rope.theta) == (eps, theirs.rope_parameters["rope_theta"])
    if ours.experts is not None:
        chosen = ours.experts.count, ours.experts.top_k, ours.experts.inner_size
        count = theirs.n_routed_experts if ours.latent else theirs.num_experts
        theirs_chosen = count, theirs.num_experts_per_tok, theirs.moe_intermediate_size
        assert chosen == theirs_chosen


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"text_config": None}, CorruptModelError, "'text_config' of a Gemma3For"),
        ({"text_config": {"model_type": "llama"}}, UnsupportedModelError, "is 'llama', which is"),
        ({"text_config": {"model_type": []}}, UnsupportedModelError, "supported: gemma3_text"),
        ({"quantization_config": {"quant_method": "awq"}}, UnsupportedModelError, "'awq'"),
    ],
)
def test_a_text_model_that_cannot_run_is_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        read_model_config(config(tmp_path, **changes))


@pytest.mark.parametrize("outer", [True, False])
def test_one_of_two_configs_is_enough_to_tie_the_head(
    wrapped: Callable[[str], Path], tmp_path: Path, outer: bool
) -> None:
    """llava-onevision-qwen2-0.5b-ov-hf ties in its `text_config` alone, as transformers does."""
    source = wrapped("LlavaOnevisionForConditionalGeneration")
    content = json.loads((source / "config.json").read_text())
    content["tie_word_embeddings"] = outer
    content["text_config"]["tie_word_embeddings"] = not outer
    (tmp_path / "config.json").write_text(json.dumps(content))
    tensors = load_file(source / "model.safetensors")
    tied = {name: tensor for name, tensor in tensors.items() if "lm_head" not in name}
    save_file(tied, tmp_path / "model.safetensors", {"format": "pt"})
    check_against_transformers(tmp_path)
