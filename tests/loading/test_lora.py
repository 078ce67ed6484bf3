"""LoRA adapters, as peft makes and saves them: logits are those of peft's model, unmerged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_reference
from driver import Driver, small_engine
from gguf import GGMLQuantizationType as QuantType
from gguf_model import GGUFModel
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from test_nf4 import make as nf4
from wrapped_models import WRAPPED

from nanoengine import LLM, SamplingParams
from nanoengine.config.engine import EngineConfig
from nanoengine.errors import ConfigError, ModelLoadError
from nanoengine.loading.checkpoint import CheckpointReader
from nanoengine.loading.find_model import resolve_model
from nanoengine.loading.lora import read_adapter

Tiny = Callable[[str], Path]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPT = [(7 * i) % 256 for i in range(40)]


def adapter_of(folder: Path, target: Path, **settings: Any) -> PeftModel:
    """A random adapter of the model in `folder`, saved into `target`."""
    defaults = {"r": 4, "lora_alpha": 8, "target_modules": ALL}
    torch.manual_seed(11)
    model = get_peft_model(load_reference(folder), LoraConfig(**(defaults | settings))).eval()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            centre = 1.0 if "norm" in name else 0.0
            values = torch.randn_like(parameter) * 0.2 + centre
            parameter.data = parameter.data.abs() + 0.3 if "magnitude" in name else values
    model.save_pretrained(target)
    return model


def ours(
    folder: Path, adapter: Path | None, **settings: Any
) -> tuple[torch.Tensor, list[int], str]:
    lora = {} if adapter is None else {"lora": str(adapter)}
    engine = small_engine(folder, **lora, **settings)
    driver = Driver(engine)
    (output,) = driver.run([PROMPT])
    plan = str(engine.plan)
    engine.close()
    return torch.stack(driver.logits[output.request_id]), output.outputs[0].token_ids, plan


def theirs(model: PeftModel, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + tokens])).logits[0]
    found: torch.Tensor = logits[len(PROMPT) - 1 : -1]
    return found


KINDS: dict[str, dict[str, Any]] = {
    "all": {},
    "some": {"target_modules": ["q_proj", "v_proj"], "r": 16, "lora_alpha": 16},
    "rank-stabilised": {"use_rslora": True},
    "weight-decomposed": {"use_dora": True},
    "patterns": {
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 7},
        "alpha_pattern": {"proj": 90, "o_proj": 3, "layers.1.mlp.up_proj": 20},
    },
    "one layer": {"layers_to_transform": [1]},
    "ends": {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["embed_tokens", "norm"]},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_peft(tiny: Tiny, tmp_path: Path, kind: str) -> None:
    model = adapter_of(tiny("llama"), tmp_path, **KINDS[kind])
    logits, tokens, plan = ours(tiny("llama"), tmp_path)
    torch.testing.assert_close(logits, theirs(model, tokens), atol=1e-4, rtol=0)
    with model.disable_adapter():
        assert not torch.allclose(logits, theirs(model, tokens), atol=1e-1)
    assert f"with the LoRA adapter {tmp_path} (rank" in plan


TARGETS = {
    "llama-bias": ALL,
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gemma3": ALL,
    "qwen3.5": ["q_proj", "in_proj_qkv", "in_proj_z", "out_proj", "down_proj"],
    "nemotron-h": ["in_proj", "q_proj", "up_proj", "down_proj"],
    "deepseek-v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    "lfm2": ["in_proj", "out_proj", "w1", "w2", "w3"],
    "gpt-oss": ["q_proj", "k_proj", "v_proj", "o_proj"],
}


@pytest.mark.parametrize("name", TARGETS)
def test_other_architectures(tiny: Tiny, tmp_path: Path, name: str) -> None:
    """Whose checkpoints have weights under other names, or several as one."""
    model = adapter_of(tiny(name), tmp_path, target_modules=TARGETS[name])
    logits, tokens, _ = ours(tiny(name), tmp_path)
    torch.testing.assert_close(logits, theirs(model, tokens), atol=2e-4, rtol=0)
    with model.disable_adapter():
        assert not torch.allclose(logits, theirs(model, tokens), atol=1e-1)


def test_the_plan_says_that_an_adapter_has_a_tokenizer(tiny: Tiny, tmp_path: Path) -> None:
    adapter_of(tiny("llama"), tmp_path)
    said = "its tokenizer is not taken: give that folder as tokenizer, too"
    assert said not in ours(tiny("llama"), tmp_path)[2]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny("llama") / name, tmp_path)
    assert said in ours(tiny("llama"), tmp_path)[2]
    assert said not in ours(tiny("llama"), tmp_path, tokenizer=str(tmp_path))[2]


def test_biases_that_were_trained(tiny: Tiny, tmp_path: Path) -> None:
    model = adapter_of(tiny("llama-bias"), tmp_path, bias="lora_only", target_modules=["q_proj"])
    logits, tokens, _ = ours(tiny("llama-bias"), tmp_path)
    torch.testing.assert_close(logits, theirs(model, tokens), atol=1e-4, rtol=0)


def test_experts_of_older_checkpoints(tiny: Tiny, tmp_path: Path) -> None:
    """Adapters of transformers 4 name each expert, as checkpoints at the hub do."""
    source, names = tiny("qwen3-moe"), ("gate_proj", "up_proj", "down_proj")
    folder, adapter = tmp_path / "m", tmp_path / "a"
    shutil.copytree(source, folder)
    model = adapter_of(source, adapter, target_modules=["q_proj"])
    changes, weights = (
        load_file(adapter / "adapter_model.safetensors"),
        load_file(folder / "model.safetensors"),
    )
    for name in [n for n in weights if ".experts." in n and n.split(".")[-2] in names]:
        outputs, inputs = weights[name].shape
        low, high = torch.randn(4, inputs), torch.randn(outputs, 4) * 0.05
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        changes |= {f"{stem}.lora_A.weight": low, f"{stem}.lora_B.weight": high}
        weights[name] = weights[name] + 8 / 4 * (high @ low)
    save_file(changes, adapter / "adapter_model.safetensors", {"format": "pt"})
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    logits, tokens, _ = ours(source, adapter)
    merged = PeftModel.from_pretrained(load_reference(folder), tmp_path / "a").eval()
    torch.testing.assert_close(logits, theirs(merged, tokens), atol=1e-4, rtol=0)
    assert not torch.allclose(logits, theirs(model, tokens), atol=1e-1)


def test_the_text_model_of_one_for_images(tmp_path: Path) -> None:
    """Changes of layers for images are left out, as those layers are."""
    folder = tmp_path / "m"
    WRAPPED["Mistral3ForConditionalGeneration"](folder)
    model = adapter_of(folder, tmp_path / "a", target_modules="all-linear")
    changes = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert any("vision" in name for name in changes)
    logits, tokens, _ = ours(folder, tmp_path / "a")
    torch.testing.assert_close(logits, theirs(model, tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("start", ["model.decoder.", "text.model.", "transformer."])
def test_names_of_no_part_of_such_a_model_are_refused(tmp_path: Path, start: str) -> None:
    """They might be of an adapter that does nothing."""
    folder = tmp_path / "m"
    WRAPPED["Mistral3ForConditionalGeneration"](folder)
    adapter_of(folder, tmp_path / "a", target_modules=["q_proj"])
    path = tmp_path / "a" / "adapter_model.safetensors"
    texts = {name: t for name, t in load_file(path).items() if "vision" not in name}
    stem = "base_model.model.model.language_model."
    renamed = {name.replace(stem, f"base_model.model.{start}"): t for name, t in texts.items()}
    assert not renamed.keys() & texts.keys()
    save_file(renamed, path, {"format": "pt"})
    with pytest.raises(ModelLoadError, match="tensors which the model has not"):
        small_engine(folder, lora=str(tmp_path / "a"))


def test_an_adapter_of_images_alone_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    WRAPPED["Mistral3ForConditionalGeneration"](folder)
    adapter_of(folder, tmp_path / "a", target_modules="all-linear")
    path = tmp_path / "a" / "adapter_model.safetensors"
    save_file({n: t for n, t in load_file(path).items() if "vision" in n}, path, {"format": "pt"})
    with pytest.raises(ModelLoadError, match="changes no weight of this model"):
        small_engine(folder, lora=str(tmp_path / "a"))


def merged(folder: Path, adapter: Path, target: Path) -> Path:
    """A checkpoint with the sums of peft's merge_and_unload."""
    shutil.copytree(folder, target)
    whole = PeftModel.from_pretrained(load_reference(folder), adapter).merge_and_unload()
    whole.save_pretrained(target)
    return target


def test_int8_makes_codes_of_the_sums(tiny: Tiny, tmp_path: Path) -> None:
    adapter_of(tiny("llama"), tmp_path / "a")
    target = merged(tiny("llama"), tmp_path / "a", tmp_path / "m")
    logits, tokens, plan = ours(tiny("llama"), tmp_path / "a", quantization="int8")
    right, right_tokens, _ = ours(target, None, quantization="int8")
    assert tokens == right_tokens and "int8 (lossy)" in plan
    torch.testing.assert_close(logits, right, atol=0.05, rtol=0)  # a code may be the next one


def in_numbers(codes: Path, target: Path) -> Path:
    """A GGUF that keeps its codes, as the numbers that these stand for."""
    shutil.copytree(codes, target)
    with CheckpointReader(codes) as reader:
        tensors = {name: reader.numbers(name, torch.float32).clone() for name in reader.names()}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.parametrize("targets", [ALL, ["q_proj", "down_proj"]], ids=["all", "two"])
@pytest.mark.parametrize("kind", ["GGUF", "NF4"])
def test_codes_become_numbers(tiny: Tiny, tmp_path: Path, kind: str, targets: list[str]) -> None:
    """A QLoRA adapter is of a model in 4 bits; what it leaves stays codes."""
    adapter = tmp_path / "a"
    adapter_of(tiny("llama"), adapter, target_modules=targets)
    if kind == "GGUF":
        model = GGUFModel(tiny("llama"))
        matrices = [name for name, values in model.tensors.items() if values.ndim == 2]
        model.types = dict.fromkeys(matrices, QuantType.Q8_0)
        coded = model.write(tmp_path / "m.gguf")
        plain = in_numbers(resolve_model(coded, keeps_codes=True), tmp_path / "plain")
    else:
        coded, plain, _ = nf4(tiny("llama"), tmp_path)
    logits, tokens, plan = ours(coded, adapter)
    layers = 3 * (len(ALL) - len(targets))
    count = layers + 2 * (kind == "GGUF")  # its embeddings and its head are codes, too
    assert (f"codes as stored: {count} of " in plan) == (count > 0)
    right, right_tokens, _ = ours(merged(plain, adapter, tmp_path / "merged"), None)
    assert tokens == right_tokens
    torch.testing.assert_close(logits, right, atol=1e-4, rtol=0)


def test_ranks_add_the_same(tiny: Tiny, tmp_path: Path) -> None:
    adapter_of(tiny("llama"), tmp_path)
    alone, tokens, _ = ours(tiny("llama"), tmp_path)
    with LLM(
        tiny("llama"), lora=tmp_path, tensor_parallel_size=2, dtype="float32", num_gpu_blocks=64
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=len(tokens), ignore_eos=True, logprobs=1)
        (output,) = llm.generate([PROMPT], params)
    assert output.outputs[0].token_ids == tokens
    assert output.outputs[0].logprobs is not None
    first = next(iter(output.outputs[0].logprobs[0].values())).logprob
    assert first == pytest.approx(alone[0].log_softmax(0).max().item(), abs=1e-4)


# -- refused


def edited(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"peft_type": "IA3"}, "'peft_type' is 'IA3'; only LORA"),
        ({"init_lora_weights": "pissa_niter_16"}, "changes the model, too"),
        ({"fan_in_fan_out": True}, "'fan_in_fan_out' is True"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "'target_parameters' is"),
        ({"alpha_pattern": {"(a|aa)+": 1}}, "only names of modules"),
        ({"alpha_pattern": [1]}, "no object"),
        ({"alpha_pattern": {"q_proj": "1"}}, "not a positive number"),
        ({"lora_alpha": 0}, "not a positive number"),
        ({"use_dora": True}, "'use_dora' is True, and .* no lora_magnitude_vector"),
        ({"use_rslora": 3}, "neither true nor false"),
    ],
)
def test_a_config_that_is_not_read(
    tiny: Tiny, tmp_path: Path, changes: dict[str, Any], match: str
) -> None:
    adapter_of(tiny("llama"), tmp_path, target_modules=["q_proj"])
    edited(tmp_path, **changes)
    with pytest.raises(ModelLoadError, match=match):
        read_adapter(str(tmp_path))


STEM = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "shape", "match"),
    [
        (f"{STEM}.lora_B.bias", (64,), "is not supported; merge"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", (4, 64), "is not supported; merge"),
        (f"{STEM}.lora_A.weight", (3, 64), "no lora_A of .* with a lora_B"),
        (f"{STEM}.lora_A.weight", (0, 64), "no lora_A of .* with a lora_B"),
        ("base_model.model.x", (4, 4), "is not supported; merge"),
        (f"{STEM}.lora_A.weight", (4, 4, 64), "no lora_A of .* with a lora_B"),
        (
            f"{STEM}.lora_A.weight",
            (4, 32),
            r"whose shapes differ: .* is \[64, 64\], and \[64, 32\]",
        ),
        (f"{STEM}.lora_magnitude_vector", (64,), "'use_dora' is False, and .* a lora_magn"),
        (f"{STEM.replace('q_', 'n_')}.weight", (4, 4), "1 tensors which the model has not: .*n_pr"),
        ("base_model.model.model.embed_tokens.weight", (259, 64), "whose shapes differ: .*259"),
    ],
)
def test_tensors_that_do_not_fit(
    tiny: Tiny, tmp_path: Path, name: str, shape: tuple[int, ...], match: str
) -> None:
    adapter_of(tiny("llama"), tmp_path, target_modules=["q_proj"])
    path = tmp_path / "adapter_model.safetensors"
    save_file(load_file(path) | {name: torch.ones(shape)}, path, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=match):
        small_engine(tiny("llama"), lora=str(tmp_path))


def test_an_adapter_of_tied_embeddings_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    adapter_of(tiny("llama-tied"), tmp_path, target_modules=["q_proj", "embed_tokens"])
    with pytest.raises(ModelLoadError, match=r"ties them.*merge_and_unload"):
        small_engine(tiny("llama-tied"), lora=str(tmp_path))


def test_an_adapter_of_all_experts_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    """Whose weights are entries of one tensor in the checkpoint."""
    adapter_of(tiny("mixtral"), tmp_path, target_modules=["q_proj"])
    path, name = tmp_path / "adapter_model.safetensors", "experts.down_proj.lora_"
    stem = f"base_model.model.model.layers.0.mlp.{name}"
    tensors = {f"{stem}A.weight": torch.ones(4, 48), f"{stem}B.weight": torch.ones(64, 4)}
    save_file(load_file(path) | tensors, path, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"which the model has not: .*experts"):
        small_engine(tiny("mixtral"), lora=str(tmp_path))


def test_what_is_no_adapter(tiny: Tiny, tmp_path: Path) -> None:
    for folder in (tiny("llama"), tmp_path / "nothing"):
        with pytest.raises(ConfigError, match=r"has no adapter_config.json; give the folder"):
            small_engine(tiny("llama"), lora=str(folder))
    adapter_of(tiny("llama"), tmp_path / "a")
    (tmp_path / "a" / "adapter_model.safetensors").rename(tmp_path / "a" / "adapter_model.bin")
    with pytest.raises(ModelLoadError, match="pickled weights"):
        small_engine(tiny("llama"), lora=str(tmp_path / "a"))


def test_random_weights_take_no_adapter() -> None:
    with pytest.raises(ConfigError, match="LoRA adapter"):
        EngineConfig("m", lora="a", load_format="dummy")
