"""What is said about models that cannot be loaded, by their names and their first bytes alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoengine.errors import CorruptModelError, ModelNotFoundError
from nanoengine.loading.checkpoint import CheckpointReader
from nanoengine.loading.find_model import resolve_model
from nanoengine.loading.gguf.structure import check_structure
from nanoengine.loading.refused import (
    about_architecture,
    about_name,
    about_quantization,
    families,
)
from nanoengine.models.architectures import ARCHITECTURES

# By classes of transformers and by names in a GGUF.
KINDS = {
    "a mixture of experts": (
        "gpt-oss "
        "DeepseekForCausalLM DeepseekV32ForCausalLM deepseek2 Llama4ForCausalLM "
        "PhiMoEForCausalLM qwen2moe"
    ),
    "recurrent or linear attention": (
        "Qwen3NextForCausalLM qwen3next Qwen3_5ForCausalLM qwen35 MambaForCausalLM mamba2 "
        "JambaForCausalLM lfm3 granitehybrid "
        "RwkvForCausalLM MiniMaxForCausalLM"
    ),
    "only text models are supported": (
        "Gemma3nForConditionalGeneration clip InternVLChatModel "
        "Qwen2_5_VLForConditionalGeneration qwen2vl Qwen3VLMoeForConditionalGeneration "
        "Qwen3_5ForConditionalGeneration Phi4MMForCausalLM "
        "LlavaForConditionalGeneration MllamaForConditionalGeneration"
    ),
    "an encoder with a decoder": "T5ForConditionalGeneration WhisperForConditionalGeneration",
    "generates no text": "BertModel bert RobertaForMaskedLM Qwen3ForSequenceClassification",
    "another Gemma": "Gemma3nForCausalLM gemma3n",
    "Phi-1 or Phi-2": "PhiForCausalLM phi2",
    "is not supported; run it": "GPT2LMHeadModel OlmoForCausalLM FalconForCausalLM",
}


@pytest.mark.parametrize(
    ("kind", "name"), [(k, n) for k, names in KINDS.items() for n in names.split()]
)
def test_an_architecture_is_named_with_what_works_instead(kind: str, name: str) -> None:
    text = about_architecture(name)
    assert f"the architecture {name} is " in text and kind in text
    instead = text.partition("; ")[2]
    assert instead.startswith(("take ", "run ")) and families() in instead


def test_what_is_supported_is_said_in_names_that_users_know() -> None:
    for name in ("Llama 2", "Qwen 1.5", "Qwen 3", "Gemma 3", "Phi-3", "Mistral 7B", "SmolLM3"):
        assert name in families()
    assert all(row.models for row in ARCHITECTURES.values())
    assert "ForCausalLM" not in families()


@pytest.mark.parametrize(
    ("method", "instead"),
    [
        *((name, '"int8", or a GGUF') for name in ("awq", "gptq", "mxfp4", "auto-round")),
        *((name, '"int8" for weights of 8 bits') for name in ("ptpc_fp8", "compressed-tensors")),
        *((name, '"int8"') for name in ("bitsandbytes", "quanto")),
    ],
)
def test_quantised_weights_are_named_with_what_works_instead(method: str, instead: str) -> None:
    text = about_quantization({"quant_method": method, "bits": 4})
    assert f"'quantization_config' says '{method}'" in text
    assert "16-bit original" in text and f"quantization={instead}" in text


@pytest.mark.parametrize(
    "config", [{}, {"group_size": 64, "bits": 4}, {"quant_method": 5}, [], "x"]
)
def test_a_quantization_without_a_name_is_shown(config: object) -> None:
    assert "quantization_config" in about_quantization(config)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama3.2:1b", "tag of Ollama"),
        ("smollm2:135m", "did you mean 'smollm2-135m'"),
        ("bartowski/X-GGUF:Q4_K_M", 'hf download bartowski/X-GGUF --include "*Q4_K_M*.gguf"'),
        ("hf.co/bartowski/X-GGUF:Q8_0", 'hf download bartowski/X-GGUF --include "*Q8_0*.gguf"'),
        ("bartowski/X-GGUF", "hf download bartowski/X-GGUF"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/", "give its id, 'Qwen/Qwen3-0.6B'"),
        ("https://example.org/x.gguf", "download the file"),
        ("s3://bucket/model", "download the file"),
        ("/models/x.gguf", "check the path"),
        ("./nope.gguf", "check the path"),
        ("models/mymodel.gguf", "check the path"),
        ("~/none", "check the path"),
        ("llama", 'a hub id such as "Qwen/Qwen3-0.6B"'),
    ],
)
def test_a_name_of_another_program_is_explained(name: str, words: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model(name)
    assert words in str(caught.value) and name.strip("~") in str(caught.value)


def test_plain_names_get_no_sentence_of_their_own() -> None:
    assert about_name("llama") == "" == about_name("org/model")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
        (b"<!doctype html><html>a page, not a file</html>", "it is a web page"),
        (b"GGUF" + bytes(20), "get the file again"),
        (b"", "get the file again"),
    ],
)
def test_a_file_of_weights_that_is_something_else_says_what_to_do(
    tmp_path: Path, content: bytes, words: str
) -> None:
    gguf, weights = tmp_path / "m.gguf", tmp_path / "model.safetensors"
    gguf.write_bytes(content[:4] if words == "get the file again" else content)
    weights.write_bytes(content)
    with pytest.raises(CorruptModelError, match=words):
        check_structure(gguf)
    with pytest.raises(CorruptModelError, match=words):
        CheckpointReader(tmp_path)
