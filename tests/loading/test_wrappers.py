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
from tiny_model import COMMON, HYBRID, HYBRID_EXPERTS, TinyModel
from tiny_models import TINY
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Gemma3Config

from nanoengine import LLM
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.errors import CorruptModelError, RequestError, UnsupportedModelError
from nanoengine.loading.model_config import read_model_config

VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
GEMMA = COMMON | {"query_pre_attn_scalar": 24, "sliding_window": 13, "pad_token_id": None}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
WRAPPED = {
    "Gemma3ForConditionalGeneration": TinyModel(
        "gemma3",
        {"text_config": GEMMA, "vision_config": VISION, "mm_tokens_per_image": 4},
    ),
    "Gemma4ForConditionalGeneration": TinyModel(
        "gemma4",
        {
            "text_config": COMMON
            | TINY["gemma4-shared"].settings
            | {"model_type": "gemma4_text", "pad_token_id": 0},
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "position_embedding_size": 64,
            },
            "audio_config": None,
        },
    ),
    "Lfm2VlForConditionalGeneration": TinyModel(
        "lfm2_vl",
        {
            "text_config": COMMON
            | TINY["lfm2"].settings
            | {"model_type": "lfm2", "tie_word_embeddings": True},
            "vision_config": {
                "model_type": "siglip2_vision_model",
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_patches": 16,
            },
            "projector_hidden_size": 32,
        },
    ),
    "Qwen3_5ForConditionalGeneration": TinyModel(
        "qwen3_5",
        {
            "text_config": COMMON | HYBRID | {"model_type": "qwen3_5_text"},
            "vision_config": QWEN_VISION,
        },
    ),
    "Qwen3_5MoeForConditionalGeneration": TinyModel(
        "qwen3_5_moe",
        {
            "text_config": COMMON | HYBRID | HYBRID_EXPERTS | {"model_type": "qwen3_5_moe_text"},
            "vision_config": QWEN_VISION,
        },
    ),
    "Qwen3VLForConditionalGeneration": TinyModel(
        "qwen3_vl",
        {
            "text_config": COMMON
            | {
                "model_type": "qwen3_vl_text",
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 5e6,
                    "mrope_section": [4, 2, 2],
                    "mrope_interleaved": True,
                },
            },
            "vision_config": QWEN_VISION | {"deepstack_visual_indexes": [0]},
        },
    ),
    # Its head is not tied to its embeddings.
    "Mistral3ForConditionalGeneration": TinyModel(
        "mistral3",
        {
            "text_config": COMMON | {"model_type": "mistral", "sliding_window": None},
            "vision_config": VISION | {"model_type": "pixtral", "head_dim": 16},
            "tie_word_embeddings": False,
        },
    ),
    "Mistral3ForConditionalGeneration, ministral3": TinyModel(
        "mistral3",
        {
            "text_config": COMMON | TINY["ministral3"].settings | {"model_type": "ministral3"},
            "vision_config": VISION | {"model_type": "pixtral", "head_dim": 16},
            "tie_word_embeddings": False,
        },
    ),
}
PARTS = {"Gemma4ForConditionalGeneration": "embed_vision, vision_tower"}


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
    ):
        if name.startswith(stored):
            return ours + name.removeprefix(stored)
    return name if name.startswith(("model.", "lm_head.")) else "model." + name


@pytest.mark.parametrize("is_renamed", [False, True], ids=["as saved", "as in memory"])
@pytest.mark.parametrize("name", WRAPPED)
def test_ids_and_logits_equal_transformers(
    wrapped: Callable[[str], Path], tmp_path: Path, name: str, is_renamed: bool
) -> None:
    path = wrapped(name)
    model = AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    if is_renamed:
        stored = load_file(path / "model.safetensors")
        save_file(
            {renamed(n): t for n, t in stored.items()},
            tmp_path / "model.safetensors",
            {"format": "pt"},
        )
        (tmp_path / "config.json").write_text((path / "config.json").read_text())
        path = tmp_path
    engine = LLMEngine(path, dtype="float32", device="cpu", kvcache_block_size=8, num_gpu_blocks=64)
    driver, prompts = Driver(engine), [[7, 3, 9], [i * 7 % 256 for i in range(40)]]
    for prompt, output in zip(prompts, driver.run(prompts), strict=True):
        tokens = output.outputs[0].token_ids
        assert tokens == reference_greedy(model, prompt, GREEDY.max_tokens, tokens)
        logits = reference_logits(model, prompt + tokens)[len(prompt) - 1 : -1]
        ours = torch.stack(driver.logits[output.request_id])
        torch.testing.assert_close(ours, logits, atol=1e-4, rtol=0)
    said = str(engine.plan)
    name = name.split(",")[0]
    assert f"the text model of a {name}" in said
    parts = PARTS.get(name, "visual" if "Qwen" in name else "multi_modal_projector, vision_tower")
    assert f"({parts}) are not loaded" in said


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
