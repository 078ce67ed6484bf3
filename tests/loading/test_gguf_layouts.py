"""GGUFs whose tensors llama.cpp's converters change: experts, recurrent layers, sinks,
latent attention.

The files are written as its conversion/deepseek.py, qwen.py, gpt_oss.py, glm.py and gemma.py write
them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import GGUFValue, reference, reference_greedy, reference_logits
from driver import GREEDY, Driver, small_engine
from gguf import GGMLQuantizationType as QuantType
from gguf_model import (
    SCALINGS,
    GGUFModel,
    keys_and_values_apart,
    with_scaling,
)
from gguf_rounded import rounded
from marks import named
from mtp_models import head_logits, head_of, watch_head, write_head
from safetensors.torch import load_file

from nanoengine.engine.draft_length import PayingDrafts
from nanoengine.errors import CorruptModelError, ModelLoadError, UnsupportedModelError
from nanoengine.loading.checkpoint import CheckpointReader
from nanoengine.loading.gguf.convert import convert_gguf, read_gguf_config
from nanoengine.loading.gguf.families import exaone_settings
from nanoengine.loading.gguf.metadata import Metadata
from nanoengine.models.stored_codes import CodedWeight, numbers_of

Tiny = Callable[[str], Path]
NAMES = ("glm4-moe", "gpt-oss", "qwen2-moe", "qwen3.5", "qwen3.5-moe", "qwen3-next-moe")
NAMES += ("gemma4", "gemma4-moe", "gemma4-shared", "deepseek-v2", "deepseek-v3", "glm4-moe-air")
NAMES += ("ernie", "ernie-moe", "exaone4", "exaone4-full", "glm4", "granite", "granite-moe")
NAMES += ("granite-hybrid", "granite-hybrid-dense", "hunyuan", "hunyuan-moe", "lfm2", "lfm2-moe")
NAMES += ("kimi-linear", "ministral3", "nemotron-h", "seed-oss", "apertus", "arcee")
NAMES += ("cohere", "cohere2", "dots1", "falcon-h1", "granite-moe-shared", "minimax-m2")
NAMES += ("gemma", "gemma2", "olmo2", "olmo3", "exaone-moe", "solar-open", "youtu")
NAMES += ("cohere2-moe", "cohere2-moe-shared", "ling", "mellum", "muse-glimmer", "exaone", "ling-2")
NAMES += ("afmoe", "jais2", "minicpm", "laguna", "nemotron", "stablelm", "starcoder2")
BY_DEFAULT = (
    *NAMES[:2],
    "afmoe",
    "apertus",
    "arcee",
    "cohere2",
    "cohere2-moe",
    "minimax-m2",
    "muse-glimmer",
    "ernie-moe",
    "exaone4",
    "falcon-h1",
    "glm4",
    "granite",
    "granite-hybrid",
    "hunyuan",
    "hunyuan-moe",
    "deepseek-v3",
    "kimi-linear",
    "lfm2",
    "lfm2-moe",
    "minicpm",
    "nemotron-h",
    "qwen3.5-moe",
    "gemma",
    "gemma2",
    "gemma4-shared",
    "nemotron",
    "olmo3",
    "stablelm",
    "youtu",
)
PROMPTS = [[7, 3, 9], [i * 7 % 256 for i in range(40)]]
quantize, dequantize = gguf.quants.quantize, gguf.quants.dequantize


def model_of(folder: Path, name: str) -> GGUFModel:
    model = GGUFModel(folder)
    if name in ("deepseek-v3", "kimi-linear", "ling", "youtu"):
        keys_and_values_apart(model)
    return with_scaling(model, name) if name in SCALINGS else model


def converted(model: GGUFModel, folder: Path, **settings: Any) -> Path:
    folder.mkdir()
    convert_gguf(model.write(folder.with_suffix(".gguf")), folder, **settings)
    return folder


def assert_answers_are(theirs: Path, ours: Path) -> None:
    """Logits and greedy ids of our engine beside those of transformers."""
    model = reference(theirs)
    driver = Driver(small_engine(ours))
    for prompt, output in zip(PROMPTS, driver.run(PROMPTS), strict=True):
        tokens = output.outputs[0].token_ids
        assert tokens == reference_greedy(model, prompt, GREEDY.max_tokens or 0, tokens)
        logits = reference_logits(model, prompt + tokens)[len(prompt) - 1 : -1]
        found = torch.stack(driver.logits[output.request_id])
        torch.testing.assert_close(found, logits, atol=1e-4, rtol=0)


@pytest.mark.some(5)
@pytest.mark.parametrize("name", named({name: name for name in NAMES}, *BY_DEFAULT))
def test_answers_are_those_of_the_checkpoint(tiny: Tiny, tmp_path: Path, name: str) -> None:
    source = rounded(tiny(name), tmp_path / "source")
    assert_answers_are(source, converted(model_of(source, name), tmp_path / "out"))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("qwen2", "qwen2vl"), ("qwen3", "qwen3vl"), ("qwen3-moe", "qwen3vlmoe")],
)
def test_the_text_model_of_a_file_for_images(
    tiny: Tiny, tmp_path: Path, name: str, kind: str
) -> None:
    """As llama.cpp reads it (src/models/qwen2vl.cpp, qwen3vl.cpp): with names of its own, sections
    of the rotation, and how many layers get more of an image.
    """
    source = rounded(tiny(name), tmp_path / "source")
    model = model_of(source, name)
    old, model.arch = f"{model.arch}.", kind
    model.settings = {
        f"{kind}.{key.removeprefix(old)}" if key.startswith(old) else key: value
        for key, value in model.settings.items()
    }
    model.settings |= {f"{kind}.rope.dimension_sections": [4, 2, 2, 0]}
    model.settings |= {f"{kind}.n_deepstack_layers": 3} if kind != "qwen2vl" else {}
    assert_answers_are(source, converted(model, tmp_path / "out"))


def test_older_and_newer_files(tiny: Tiny, tmp_path: Path) -> None:
    """One tensor for gates and ups; one for q, k, v and z; a layer that drafts."""
    source = rounded(tiny("qwen3-next-moe"), tmp_path / "source")
    model = model_of(source, "qwen3-next-moe")
    tensors = model.tensors
    for layer in (1, 2):
        both = [tensors.pop(f"blk.{layer}.ffn_{part}_exps.weight") for part in ("gate", "up")]
        tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate(both, axis=1)
    for layer in (0, 1):
        del tensors[f"blk.{layer}.attn_qkv.weight"], tensors[f"blk.{layer}.attn_gate.weight"]
        name = f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight"
        whole = load_file(source / "model.safetensors")[name]
        tensors[f"blk.{layer}.ssm_in.weight"] = whole.numpy()
    model.settings |= {"qwen3next.block_count": 4, "qwen3next.nextn_predict_layers": 1}
    tensors["blk.3.nextn.eh_proj.weight"] = np.ones((64, 128), np.float32)
    tensors["blk.3.attn_q.weight"] = np.ones((64, 64), np.float32)
    assert_answers_are(source, converted(model, tmp_path / "out"))


def test_what_the_converter_of_granite_4_adds_changes_nothing(tiny: Tiny, tmp_path: Path) -> None:
    """llama.cpp calls one without recurrent layers and experts, as 4.0 Micro, a "granite"."""
    source = rounded(tiny("granite"), tmp_path / "source")
    model = model_of(source, "granite")
    model.settings |= {
        "granite.attention.head_count_kv": [2, 2, 2],
        "granite.expert_count": 0,
        "granite.rope.scaling.finetuned": True,
        "granite.ssm.state_size": 256,
    }
    assert_answers_are(source, converted(model, tmp_path / "out"))


@pytest.mark.some(2)
@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-next-moe", "glm4-moe", "deepseek-v3"])
def test_its_own_head_guesses_as_that_of_the_checkpoint(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A GGUF has it as one more layer."""
    monkeypatch.setattr(PayingDrafts, "choose", lambda self: 0)
    monkeypatch.setattr(PayingDrafts, "is_due", True)
    source = rounded(tiny(name), tmp_path / "source")
    head = head_of(source)
    for weight in head.state_dict().values():
        weight.copy_(weight.bfloat16())
    both = write_head(source, tmp_path / "both", head, as_layer=True)
    model = model_of(both, name)
    model.settings |= {
        f"{model.arch}.block_count": 4,
        f"{model.arch}.nextn_predict_layers": 1,
    }
    engine = small_engine(converted(model, tmp_path / "out"), speculative="mtp:1")
    said = watch_head(engine)
    outputs = Driver(engine).run(PROMPTS)
    texts = [p + o.outputs[0].token_ids for p, o in zip(PROMPTS, outputs, strict=True)]
    for seq_id, position, row in said:
        if position <= len(texts[seq_id]):
            right = head_logits(source, texts[seq_id])[position - 2]
            # Which order transformers' sums have depends on the CPU: up to 1.01e-4 was seen.
            torch.testing.assert_close(row, right, atol=2e-4, rtol=0)
    assert len(said) == len(PROMPTS) * (GREEDY.max_tokens or 0)
    engine.close()


@pytest.mark.parametrize("keeps_codes", [False, True])
@pytest.mark.parametrize("name", ["qwen3.5-moe", "qwen3-next-moe", "deepseek-v3"])
def test_rows_and_columns_move_after_they_are_coded(
    tiny: Tiny, tmp_path: Path, name: str, keeps_codes: bool
) -> None:
    """Codes have the numbers of a file that holds these numbers. The columns of Qwen 3.5's outputs
    stay where they are in the file: value heads 0 and 2, which are of two key heads, then 1 and 3.
    """
    coded, plain = model_of(tiny(name), name), model_of(tiny(name), name)
    kind = QuantType.Q8_0
    for each, values in plain.tensors.items():
        if values.ndim > 1 and values.shape[-1] % 32 == 0:
            coded.types[each] = kind
            plain.tensors[each] = dequantize(quantize(values, kind), kind)
    folders = converted(coded, tmp_path / "coded", keeps_codes=keeps_codes), tmp_path / "plain"
    with CheckpointReader(folders[0]) as ours, CheckpointReader(converted(plain, folders[1])) as b:
        assert ours.names() == b.names()
        is_coded = [each for each in ours.names() if ours.code_format(each)]
        assert any(".experts.4." in each for each in is_coded) == keeps_codes
        for each in sorted(ours.names()):
            numbers, theirs = numbers_of(ours.weight(each, torch.float32)), b.tensor(each)
            if keeps_codes and name == "qwen3.5-moe" and "out_proj" in each:
                theirs = torch.cat([theirs.chunk(4, 1)[head] for head in (0, 2, 1, 3)], 1)
            assert torch.equal(numbers.bfloat16(), theirs.bfloat16()), each


@pytest.mark.parametrize("keeps_codes", [False, True])
def test_experts_in_mxfp4_keep_their_numbers(tiny: Tiny, tmp_path: Path, keeps_codes: bool) -> None:
    model = model_of(tiny("gpt-oss"), "gpt-oss")
    names = [name for name in model.tensors if name.endswith("_exps.weight")]
    model.types = dict.fromkeys(names, QuantType.MXFP4)
    folder, path = tmp_path / "out", model.write(tmp_path / "m.gguf")
    folder.mkdir()
    stored = "codes as stored" if keeps_codes else "dequantised to bfloat16"
    assert convert_gguf(path, folder, keeps_codes) == f"MXFP4 GGUF, {stored}"
    with CheckpointReader(folder) as reader:
        for name in names:
            _, layer, part, _ = name.split(".")
            numbers = dequantize(quantize(model.tensors[name], QuantType.MXFP4), QuantType.MXFP4)
            part = part.removeprefix("ffn_").removesuffix("_exps")
            for expert, values in enumerate(numbers):
                ours = f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
                weight = reader.weight(ours, torch.float32)
                assert isinstance(weight, CodedWeight) == keeps_codes
                assert torch.equal(numbers_of(weight).float(), torch.from_numpy(values))


@pytest.mark.parametrize(
    ("name", "key", "value", "match"),
    [
        ("glm4-moe", "glm4moe.expert_gating_func", 1, "'glm4moe.expert_gating_func' is 1"),
        ("minimax-m2", "minimax-m2.expert_gating_func", 1, "'minimax-m2.expert_gating_func' is 1"),
        ("glm4", "glm4.rope.dimension_sections", [8, 12, 12, 0], "dimension_sections' is set"),
        ("deepseek-v2", "deepseek2.expert_gating_func", 3, "'deepseek2.expert_gating_func' is 3"),
        ("deepseek-v2", "deepseek2.expert_weights_norm", True, "without 'expert_weights_norm'"),
        ("deepseek-v2", "deepseek2.rope.dimension_count", 40, "is 40, of 40 numbers"),
        ("deepseek-v3", "deepseek2.attention.value_length_mla", 4, "and that of values have the"),
        ("deepseek-v3", "deepseek2.attention.temperature_scale", 0.1, "temperature_scale' is set"),
        ("qwen3.5", "qwen35.ssm.time_step_rank", 3, "2 key heads, 3 value heads"),
        ("qwen3.5", "qwen35.ssm.state_size", 8, r"'blk\.0\..*rows, not"),
        ("qwen3.5", "qwen35.ssm.inner_size", 32, r"(rows|columns), not"),
        ("qwen3.5", "qwen35.nextn_predict_layers", 3, "0 layers of"),
        ("qwen2-moe", "qwen2moe.expert_weights_scale", 2.5, "'qwen2moe.expert_weights_scale' is"),
    ],
)
def test_what_cannot_be_is_refused(
    tiny: Tiny, tmp_path: Path, name: str, key: str, value: Any, match: str
) -> None:
    model = model_of(tiny(name), name)
    model.settings[key] = value
    with pytest.raises(ModelLoadError, match=match) as caught:
        converted(model, tmp_path / "out")
    assert isinstance(caught.value, CorruptModelError | UnsupportedModelError)


def test_what_llama_cpp_knows_of_gemma_2_by_itself(tiny: Tiny, tmp_path: Path) -> None:
    """In older files neither caps nor a window; and the scale of scores of the model of 27B, which
    is known by its 46 layers (load_arch_hparams in its src/models/gemma2.cpp).
    """
    model = GGUFModel(tiny("gemma2"))
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window"):
        del model.settings[f"gemma2.{key}"]
    config = read_gguf_config(model.write(tmp_path / "old.gguf"))
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (50.0, 30.0)
    assert config["sliding_window"] == 4096
    assert config["query_pre_attn_scalar"] == 32  # of a head
    model.settings["gemma2.block_count"] = 46
    norm = model.tensors["blk.0.attn_norm.weight"]
    model.tensors |= {f"blk.{i}.attn_norm.weight": norm for i in range(3, 46)}
    config = read_gguf_config(model.write(tmp_path / "27b.gguf"))
    assert config["query_pre_attn_scalar"] == 48 // 4
    assert config["layer_types"] == ["sliding_attention", "full_attention"] * 23


@pytest.mark.parametrize(
    ("key", "value", "error", "match"),
    [
        ("attention.sliding_window_pattern", [True], CorruptModelError, "each of 6 layers"),
        ("attention.head_count_kv", [1, 1], CorruptModelError, "each of 6 layers"),
        ("feed_forward_length", [96, 48] * 3, UnsupportedModelError, "twice as much there"),
        ("attention.key_length", 48, UnsupportedModelError, "value_length is 32"),
        ("rope.dimension_count_swa", 8, UnsupportedModelError, "turns 8 of 16 numbers of a head"),
        ("rope.scaling.factor", 2.0, UnsupportedModelError, "RoPE of Gemma 4 that is scaled"),
        ("tokenizer.ggml.model", "gemma5", UnsupportedModelError, "gemma4, gpt2, llama"),
    ],
)
def test_a_gemma_4_that_cannot_be_is_refused(
    tiny: Tiny, tmp_path: Path, key: str, value: Any, error: type[Exception], match: str
) -> None:
    model = GGUFModel(tiny("gemma4-shared"))
    model.settings[key if key.startswith("tokenizer") else f"gemma4.{key}"] = value
    with pytest.raises(error, match=match):
        converted(model, tmp_path / "out")


def test_weights_of_trinitys_experts_that_do_not_add_up_are_refused(
    tiny: Tiny, tmp_path: Path
) -> None:
    model = model_of(tiny("afmoe"), "afmoe")
    model.settings["afmoe.expert_weights_norm"] = False
    with pytest.raises(UnsupportedModelError, match="'route_norm' is False"):
        small_engine(converted(model, tmp_path / "out"))


def test_logits_of_gemma_4_have_a_cap_if_the_file_says_none(tiny: Tiny, tmp_path: Path) -> None:
    model = GGUFModel(tiny("gemma4"))
    del model.settings["gemma4.final_logit_softcapping"]
    config = read_gguf_config(model.write(tmp_path / "m.gguf"))
    assert config["final_logit_softcapping"] == 30.0


def test_a_window_of_exaone_4_that_no_key_says_is_known_by_its_layers() -> None:
    """load_arch_hparams in llama.cpp's src/models/exaone4.cpp."""
    metadata = Metadata(Path("m.gguf"), {"general.architecture": GGUFValue("exaone4")})
    large, small = (exaone_settings(metadata, num_layers) for num_layers in (64, 30))
    assert large["sliding_window"] == 4096 and small["sliding_window"] is None
    assert large["layer_types"][:4] == ["sliding_attention"] * 3 + ["full_attention"]
    assert small["layer_types"] == ["full_attention"] * 30


def test_other_divisors_of_gemma_4_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    model = GGUFModel(tiny("gemma4-shared"))
    model.tensors["rope_freqs.weight"][1] = 2
    with pytest.raises(UnsupportedModelError, match="must be 1 for the first pairs"):
        converted(model, tmp_path / "out")


def test_a_minicpm_that_does_not_say_its_factors_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    """Of 2024: llama.cpp takes factors of its own then."""
    model = GGUFModel(tiny("minicpm"))
    del model.settings["minicpm.logit_scale"]
    with pytest.raises(UnsupportedModelError, match=r"lacks the key 'minicpm\.logit_scale'"):
        converted(model, tmp_path / "m")
