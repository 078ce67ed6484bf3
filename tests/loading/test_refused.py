"""What is said about models that cannot be loaded, by their names alone."""

from __future__ import annotations

import pytest

from nanoengine.errors import ModelNotFoundError
from nanoengine.loading.find_model import resolve_model
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
        *("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM"),
        *("DeepseekV3ForCausalLM", "Llama4ForCausalLM", "OlmoeForCausalLM", "Glm4MoeForCausalLM"),
        *("PhiMoEForCausalLM", "GraniteMoeForCausalLM", "qwen3moe", "gpt-oss", "deepseek2"),
    ),
    "recurrent or linear attention": (
        *("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "MambaForCausalLM", "JambaForCausalLM"),
        *("Lfm2ForCausalLM", "GraniteMoeHybridForCausalLM", "FalconH1ForCausalLM", "qwen3next"),
        *("NemotronHForCausalLM", "RwkvForCausalLM", "lfm2", "falcon-h1", "qwen35", "mamba2"),
    ),
    "only text models are supported": (
        *("Gemma3ForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "qwen2vl"),
        *("Mistral3ForConditionalGeneration", "LlavaForConditionalGeneration", "gemma3n"),
        *("Qwen3VLMoeForConditionalGeneration", "Gemma4ForConditionalGeneration", "clip"),
        *(
            "MllamaForConditionalGeneration",
            "Gemma3nForCausalLM",
            "Qwen3_5ForConditionalGeneration",
        ),
    ),
    "an encoder with a decoder": ("T5ForConditionalGeneration", "WhisperForConditionalGeneration"),
    "generates no text": (
        "BertModel",
        "RobertaForMaskedLM",
        "bert",
        "Qwen3ForSequenceClassification",
    ),
    "an older Gemma": ("Gemma2ForCausalLM", "GemmaForCausalLM", "gemma2"),
    "Phi-1 or Phi-2": ("PhiForCausalLM", "phi2"),
    "not supported": ("GPT2LMHeadModel", "Olmo3ForCausalLM", "GraniteForCausalLM", ""),
}


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, names in KINDS.items() for n in names])
def test_an_architecture_is_named_with_what_works_instead(kind: str, name: str) -> None:
    text = about_architecture(name)
    assert f"the architecture {name or '(none)'} is " in text and kind in text
    instead = text.partition("; ")[2]
    assert instead.startswith(("take ", "run ")) and families() in instead


def test_what_is_supported_is_said_in_names_that_users_know() -> None:
    for name in ("Llama 2", "Qwen 1.5", "Qwen 3", "Gemma 3", "Phi-3", "Mistral 7B", "SmolLM3"):
        assert name in families()
    assert all(row.models for row in ARCHITECTURES.values())
    assert "ForCausalLM" not in families()


@pytest.mark.parametrize(
    ("method", "bits"),
    [
        *((m, "4-bit") for m in ("awq", "gptq", "mxfp4", "auto-round", "hqq")),
        *((m, "8-bit") for m in ("fp8", "fbgemm_fp8")),
        *(
            (m, "of this kind")
            for m in ("bitsandbytes", "compressed-tensors", "modelopt", "quanto")
        ),
    ],
)
def test_quantised_weights_are_named_with_what_works_instead(method: str, bits: str) -> None:
    text = about_quantization({"quant_method": method, "bits": 4})
    assert f"'quantization_config' says '{method}'" in text and bits in text
    assert "16-bit original" in text and 'quantization="int' in text


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
