"""GGUF conversion: the numbers, the row order, the tokenizer's settings, and damaged files."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from driver import Driver, assert_logits_are_transformers
from gguf import GGMLQuantizationType as QuantType
from gguf_model import SCALINGS, USER_DEFINED, WITH_WINDOWS, GGUFModel, with_scaling
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from nanoengine.config.model import RopeConfig
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.errors import CorruptModelError, ModelLoadError, UnsupportedModelError
from nanoengine.loading import find_model
from nanoengine.loading.checkpoint import CheckpointReader
from nanoengine.loading.generation_config import read_sampling_params
from nanoengine.loading.gguf import convert as gguf_convert
from nanoengine.loading.gguf.convert import convert_gguf, read_gguf_config
from nanoengine.loading.gguf.settings import turned_part
from nanoengine.loading.gguf.structure import check_structure
from nanoengine.loading.model_config import read_model_config
from nanoengine.loading.packaged import packaged_gguf
from nanoengine.models.rope import rotary_pairs
from nanoengine.sampling_params import SamplingParams
from nanoengine.text.tokenizer import Tokenizer

Write = Callable[..., Path]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


@pytest.fixture
def llama(tiny: Callable[[str], Path]) -> GGUFModel:
    return GGUFModel(tiny("llama"))


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The bundled model, converted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield find_model.resolve_model("smollm2-135m")


@pytest.fixture(scope="module")
def real_source() -> gguf.GGUFReader:
    return gguf.GGUFReader(packaged_gguf("smollm2-135m"))


def state(folder: Path) -> dict[str, torch.Tensor]:
    with CheckpointReader(folder) as reader:
        return {name: reader.tensor(name).clone() for name in reader.names()}


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "llama-tied", "llama-bias", "llama-sharded"),
        *("mistral", "phi3", "qwen2", "qwen3", "smollm3", "gemma3", "qwen3-moe", "olmoe"),
    ],
)
def test_a_float_model_comes_back_bit_for_bit(
    tiny: Callable[[str], Path], tmp_path: Path, out: Path, name: str
) -> None:
    line = convert_gguf(GGUFModel(tiny(name)).write(tmp_path / "m.gguf"), out)
    original, converted = state(tiny(name)), state(out)
    assert converted.keys() == original.keys()
    for key, values in converted.items():
        is_moved = name == "gemma3" and key.endswith("norm.weight")  # the file has it with 1 added
        said = original[key] + 1 - 1 if is_moved else original[key]
        assert values.dtype == torch.float32 and torch.equal(values, said), key
    assert line == "F32 GGUF"


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "llama-tied", "llama-bias", "llama-rope-linear", "llama-rope-llama3", "qwen3"),
        *("olmoe", "qwen3-moe"),
    ],
)
def test_the_configuration_comes_back(
    tiny: Callable[[str], Path], tmp_path: Path, out: Path, name: str
) -> None:
    model = GGUFModel(tiny(name))
    original = read_model_config(tiny(name))
    if name == "llama-rope-linear":
        model.settings |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    if name == "llama-rope-llama3":
        model.tensors["rope_freqs.weight"] = llama3_divisors(8.0, original.head_dim)
    convert_gguf(model.write(tmp_path / "m.gguf"), out)
    converted = read_model_config(out)
    different = {"eos_token_ids", "rope", "stored_dtype"}
    for field in original.__dataclass_fields__.keys() - different:
        assert getattr(converted, field) == getattr(original, field), field
    assert converted.eos_token_ids == (1, 3)  # eos_token_id and <|im_end|>
    if name == "llama-rope-llama3":
        assert (converted.rope.kind, converted.rope.factor) == ("llama3", 8.0)
        assert converted.rope.original_max_position == 8192
    else:
        assert converted.rope == original.rope


# name: what llama.cpp's converter writes for the model's RoPE.
@pytest.mark.parametrize("name", SCALINGS)
def test_the_configuration_of_newer_architectures_comes_back(
    tiny: Callable[[str], Path], tmp_path: Path, out: Path, name: str
) -> None:
    original = read_model_config(tiny(name))
    convert_gguf(with_scaling(GGUFModel(tiny(name)), name).write(tmp_path / "m.gguf"), out)
    converted = read_model_config(out)
    # What llama.cpp has in its code: SmolLM3's layers without RoPE, the scale of Gemma's scores.
    different: dict[str, Any] = {
        "gemma3": {"query_pre_attn_scalar": 32},
        "smollm3": {"no_rope_layers": ()},
    }.get(name, {})
    for field in original.__dataclass_fields__.keys() - {"eos_token_ids", "stored_dtype"}:
        expected = different.get(field, getattr(original, field))
        assert getattr(converted, field) == expected, field
    theirs = json.loads((tiny(name) / "config.json").read_text())["rope_parameters"]
    assert bool(original.windows) == (name in WITH_WINDOWS)
    ours = json.loads((out / "config.json").read_text())["rope_scaling"] or {}
    for key in ("long_factor", "short_factor"):
        assert ours.get(key) == theirs.get(key)


@pytest.mark.parametrize("name", ["phi3", "phi3 21", "gemma3", "mistral-window", "mixtral"])
def test_a_converted_model_answers_as_transformers_does(
    tiny: Callable[[str], Path], tmp_path: Path, out: Path, name: str
) -> None:
    """Fused tensors, partial rotary, LongRoPE, windows: read back by transformers and us."""
    kind, _, window = name.partition(" ")
    model = with_scaling(GGUFModel(tiny(kind)), kind)
    if window:
        model.settings["phi3.attention.sliding_window"] = int(window)
    convert_gguf(model.write(tmp_path / "m.gguf"), out)
    assert bool(read_model_config(out).windows) == (name != "phi3")
    config = json.loads((out / "config.json").read_text())
    # transformers' default is a padding token that so small a vocabulary lacks.
    (out / "config.json").write_text(json.dumps(config | {"pad_token_id": None}))
    driver = Driver(LLMEngine(out, dtype="float32", device="cpu", num_gpu_blocks=4))
    outputs = driver.run([[7 * i % 256 for i in range(50)]])
    assert_logits_are_transformers(driver, out, outputs)


@pytest.mark.parametrize("head_dim", [80, 96, 98, 128, 192])
def test_every_part_of_a_head_survives_as_a_quotient(head_dim: int) -> None:
    for turned in range(2, head_dim + 1, 2):
        part = turned_part(turned, head_dim)
        assert rotary_pairs(RopeConfig(1e4, partial_rotary_factor=part), head_dim) == turned // 2


@pytest.mark.parametrize(
    ("settings", "factor"),
    [
        ({"rope.scale_linear": 2.0}, 2.0),
        ({"rope.scaling.type": "linear", "rope.scale_linear": 2.0}, 2.0),
        ({"rope.scaling.factor": 4.0, "rope.scale_linear": 2.0}, 4.0),
        ({"rope.scaling.factor": 0.0, "rope.scale_linear": 2.0}, None),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
    ],
)
def test_a_factor_alone_is_of_a_linear_scaling(
    llama: GGUFModel, tmp_path: Path, out: Path, settings: dict[str, Any], factor: float | None
) -> None:
    """As llama.cpp reads files of 2023 (load_hparams in its src/llama-model.cpp)."""
    llama.settings |= {f"llama.{key}": value for key, value in settings.items()}
    convert_gguf(llama.write(tmp_path / "m.gguf"), out)
    rope = read_model_config(out).rope
    assert (rope.kind, rope.factor) == (("linear", factor) if factor else ("default", 1.0))


@pytest.mark.parametrize(
    ("settings", "tensors"),
    [
        ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, ()),
        ({"llama.rope.scaling.yarn_ext_factor": 1.0}, ()),
        ({"llama.rope.scaling.attn_factor": 1.2}, ()),
        ({"llama.rope.scaling.type": "longrope"}, ()),
        ({}, ("rope_factors_long.weight",)),
        ({"llama.rope.scaling.type": "yarn"}, ("rope_freqs.weight",)),
    ],
)
def test_scalings_that_are_not_whole_are_refused(
    llama: GGUFModel, tmp_path: Path, out: Path, settings: dict[str, Any], tensors: tuple[str, ...]
) -> None:
    llama.settings |= settings
    llama.tensors |= {name: np.ones(8, np.float32) for name in tensors}
    with pytest.raises(UnsupportedModelError, match=r"scaling|Llama 3's rule"):
        convert_gguf(llama.write(tmp_path / "m.gguf"), out)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"attention.temperature_length": 32}, "temperature_length' is not the 16 of"),
        ({"rope.scaling.type": "none"}, "'none' with attention factor 1.0"),
        ({"rope.scaling.yarn_ext_factor": 1.0}, "yarn_ext_factor' is set"),
    ],
)
def test_other_scalings_of_ministral_are_refused(
    tiny: Callable[[str], Path], tmp_path: Path, out: Path, settings: dict[str, Any], match: str
) -> None:
    model = with_scaling(GGUFModel(tiny("ministral3")), "ministral3")
    model.settings |= {f"mistral3.{key}": value for key, value in settings.items()}
    with pytest.raises(UnsupportedModelError, match=match):
        convert_gguf(model.write(tmp_path / "m.gguf"), out)


def test_a_window_as_long_as_the_context_is_none(
    llama: GGUFModel, tmp_path: Path, out: Path
) -> None:
    llama.settings["llama.attention.sliding_window"] = llama.config["max_position_embeddings"]
    convert_gguf(llama.write(tmp_path / "m.gguf"), out)
    assert read_model_config(out).num_layers == 3


def llama3_divisors(factor: float, head_dim: int) -> npt.NDArray[np.float32]:
    """The rule of transformers' `_compute_llama3_parameters`, one frequency at a time."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * 10000.0 ** (i / head_dim)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)


@pytest.mark.parametrize("kind", [QuantType.F16, QuantType.BF16, QuantType.Q8_0, QuantType.Q4_1])
def test_quantised_rows_keep_their_order(
    llama: GGUFModel, tmp_path: Path, out: Path, kind: QuantType
) -> None:
    """Rows are put in order while quantised: the result is as if it were done afterwards."""
    names = [n for n in llama.tensors if "attn_q" in n or "attn_k" in n or n == "token_embd.weight"]
    llama.types = dict.fromkeys(names, kind)
    convert_gguf(llama.write(tmp_path / "m.gguf"), out)
    converted = state(out)
    for name in ("q_proj", "k_proj"):
        stored = llama.tensors[f"blk.1.attn_{name[0]}.weight"]
        rounded = gguf.quants.dequantize(gguf.quants.quantize(stored, kind), kind)
        heads = len(rounded) // 16
        expected = np.empty_like(rounded)
        for row in range(len(rounded)):
            head, place = divmod(row, 16)
            expected[row] = rounded[head * 16 + (place % 8) * 2 + place // 8]
        assert heads in (4, 2)
        got = converted[f"model.layers.1.self_attn.{name}.weight"]
        dtype = torch.float16 if kind == QuantType.F16 else torch.bfloat16
        assert torch.equal(got, torch.from_numpy(expected).to(dtype)) and got.dtype == dtype


@pytest.mark.slow
def test_the_bundled_model_equals_transformers_reading(real: Path) -> None:
    """Every tensor, bit for bit, against transformers' own GGUF reader. By default the same file is
    dequantised by hand (below), and test_real_model.py compares logits with what this reader reads.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(real))
    expected = load_gguf_checkpoint(
        str(packaged_gguf("smollm2-135m")),
        return_tensors=True,
        model_to_load=model,
        torch_dtype=torch.bfloat16,
    )["tensors"]
    converted = state(real)
    assert converted.keys() == expected.keys() and len(converted) == 272
    assert [n for n, values in converted.items() if not torch.equal(values, expected[n])] == []


@pytest.mark.parametrize(("name", "model_type"), [("gemma2", "gemma2"), ("gemma3", "gemma3_text")])
def test_gemma_equals_transformers_reading(
    tiny: Callable[[str], Path], tmp_path: Path, out: Path, name: str, model_type: str
) -> None:
    """Norms are stored with 1 added, by llama.cpp's converter and so for transformers' reader."""
    model = GGUFModel(tiny(name))
    if name in SCALINGS:
        with_scaling(model, name)
    path = model.write(tmp_path / "m.gguf")
    convert_gguf(path, out)
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(out))
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=meta)
    converted = state(out)
    assert read["config"]["model_type"] == model_type
    assert converted.keys() == read["tensors"].keys()
    for name, values in read["tensors"].items():
        assert torch.equal(converted[name], values), name


def q8_0(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Blocks of 34 bytes: a float16 scale, 32 signed bytes."""
    blocks = raw.reshape(-1, 34)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return scale * blocks[:, 2:].view(np.int8).astype(np.float32)


def q4_1(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Blocks of 20 bytes: float16 scale and minimum, 16 bytes whose low halves come first."""
    blocks = raw.reshape(-1, 20)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    low = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    quants = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return scale * quants.astype(np.float32) + low


@pytest.mark.breadth
def test_the_bundled_model_equals_dequantisation_by_hand(
    real: Path, real_source: gguf.GGUFReader
) -> None:
    stored = {tensor.name: tensor for tensor in real_source.tensors}
    converted = state(real)
    for name, hf_name, unpack in (
        ("token_embd.weight", "model.embed_tokens.weight", q8_0),
        ("blk.7.ffn_down.weight", "model.layers.7.mlp.down_proj.weight", q4_1),
        ("blk.29.attn_v.weight", "model.layers.29.self_attn.v_proj.weight", q4_1),
    ):
        values = unpack(np.asarray(stored[name].data)).reshape(converted[hf_name].shape)
        assert torch.equal(converted[hf_name], torch.from_numpy(values).to(torch.bfloat16)), name


def test_the_bundled_model_runs_in_transformers(real: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(real)
    model = AutoModelForCausalLM.from_pretrained(real)
    assert model.dtype == torch.bfloat16 and model.generation_config.eos_token_id == [2, 0]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    ids = tokenizer(text + "The capital of France is", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        logits = model(ids).logits[0, -1]
    assert tokenizer.decode(logits.argmax()) == " Paris"
    assert find_model.describe_weights(real) == "Q4_1 GGUF, dequantised to bfloat16"


# -- tokenizer and settings ------------------------------------------------------------------------


def test_what_it_says_of_sampling_is_a_generation_config(
    llama: GGUFModel, tmp_path: Path, out: Path
) -> None:
    """With the names that the gguf package writes."""
    keys, said = gguf.Keys.General, {"top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.05}
    llama.settings |= {keys.SAMPLING_TEMP: 0.6, keys.SAMPLING_TOP_K: 20}
    names = (keys.SAMPLING_TOP_P, keys.SAMPLING_MIN_P, keys.SAMPLING_PENALTY_REPEAT)
    llama.settings |= dict(zip(names, said.values(), strict=True))
    convert_gguf(llama.write(tmp_path / "m.gguf"), out)
    assert read_sampling_params(out) == SamplingParams(temperature=0.6, top_k=20, **said)


def test_tokenizer_settings_are_honoured(llama: GGUFModel, tmp_path: Path, out: Path) -> None:
    place = llama.tokens.index("þ")
    llama.tokens[place], llama.token_types[place] = "<tool>", USER_DEFINED
    convert_gguf(llama.write(tmp_path / "m.gguf"), out)
    tokenizer = Tokenizer.from_folder(out)
    ids = tokenizer.encode("a<tool><|im_end|>")
    assert ids[0] == 0 and ids[-2:] == [place, 3]
    assert tokenizer.decode(ids) == "a<tool>"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi"
    assert AutoTokenizer.from_pretrained(out)("a<tool><|im_end|>")["input_ids"] == ids


@pytest.mark.parametrize(
    ("pre", "flag", "first"),
    [
        *(("qwen2", None, 1), ("llama-bpe", None, 2), ("llama-bpe", False, 1)),
        *(("smollm", True, 2), ("llama-v3", None, 2), ("dbrx", None, 1)),
        ("glm4", None, 1),
    ],
)
def test_bos_follows_the_flag_or_the_kind_of_tokenizer(
    llama: GGUFModel, tmp_path: Path, out: Path, pre: str, flag: bool | None, first: int
) -> None:
    llama.settings |= {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": flag}
    convert_gguf(llama.write(tmp_path / "m.gguf"), out)
    assert len(Tokenizer.from_folder(out).encode("x")) == first


def test_per_layer_lists_of_equal_sizes_are_read(
    llama: GGUFModel, tmp_path: Path, out: Path
) -> None:
    llama.settings["llama.attention.head_count_kv"] = [2, 2, 2]
    convert_gguf(llama.write(tmp_path / "m.gguf"), out)
    assert read_model_config(out).num_kv_heads == 2


def test_without_a_tokenizer_type_list_end_tokens_are_special(
    llama: GGUFModel, tmp_path: Path, out: Path
) -> None:
    llama.token_types = [1] * len(llama.tokens)
    convert_gguf(llama.write(tmp_path / "m.gguf"), out)
    assert Tokenizer.from_folder(out).decode([3]) == ""


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("llama.attention.scale", 0.5, "scale"),
        ("llama.logit_scale", 0.5, "logit_scale"),
        ("llama.attention.causal", False, "causal' is false"),
        ("llama.rope.scaling.type", "ntk", "'ntk'"),
        ("llama.rope.dimension_count", 8, "dimension_count"),
        ("llama.attention.value_length", 8, "value_length"),
        ("llama.attention.head_count_kv", [1, 2, 2], "differs between layers"),
        (
            "tokenizer.ggml.model",
            "bert",
            "tokenizer model 'bert' is not supported; supported: gemma4, gpt2, llama",
        ),
        ("tokenizer.ggml.pre", "bloom", "'bloom'"),
    ],
)
def test_what_cannot_be_represented_is_refused(
    llama: GGUFModel, tmp_path: Path, out: Path, key: str, value: Any, match: str
) -> None:
    llama.settings[key] = value
    with pytest.raises(UnsupportedModelError, match=match):
        convert_gguf(llama.write(tmp_path / "m.gguf"), out)


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("llama.embedding_length", None, "lacks.*embedding_length"),
        ("llama.embedding_length", 0, "not within 1"),
        ("llama.block_count", 1 << 31, "not within 1"),
        ("llama.block_count", "three", "must be int"),
        ("llama.block_count", 31, "31 layers of 30 tensors"),
        ("llama.expert_count", 8, "lacks.*expert_used_count"),
        ("llama.attention.head_count", 3, "rows, not 3 heads"),
        ("tokenizer.ggml.eos_token_id", 1 << 20, "vocabulary has"),
        ("tokenizer.ggml.add_bos_token", 1, "must be bool"),
    ],
)
def test_impossible_settings_are_refused(
    llama: GGUFModel, tmp_path: Path, out: Path, key: str, value: Any, match: str
) -> None:
    llama.settings[key] = value
    with pytest.raises(CorruptModelError, match=match):
        convert_gguf(llama.write(tmp_path / "m.gguf"), out)


@pytest.mark.parametrize("name", ["qwen2", "llama-bias"])
def test_windows_that_no_config_says_are_refused(
    tiny: Callable[[str], Path], tmp_path: Path, out: Path, name: str
) -> None:
    model = GGUFModel(tiny(name))
    model.settings[f"{model.arch}.attention.sliding_window"] = 20
    with pytest.raises(UnsupportedModelError, match="window"):
        convert_gguf(model.write(tmp_path / "m.gguf"), out)


@pytest.mark.parametrize(
    ("limit", "level", "kind", "growth", "keeps"),
    [
        (1 << 30, "INFO", QuantType.Q4_1, (2.5, 3.3), "quantization=.gguf. keeps"),
        (1, "WARNING", QuantType.Q8_0, (1.7, 1.9), "quantization=.gguf. keeps"),
    ],
)
def test_a_file_that_grows_says_so_before_it_is_written(
    llama: GGUFModel,
    tmp_path: Path,
    out: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
    level: str,
    kind: QuantType,
    growth: tuple[float, float],
    keeps: str,
) -> None:
    monkeypatch.setattr(gguf_convert, "LARGE_GROWTH", limit)
    monkeypatch.setattr(gguf_convert, "GIB", 1000)
    caplog.set_level("INFO", "nanoengine")
    llama.types = {name: kind for name, v in llama.tensors.items() if v.ndim == 2}
    source = llama.write(tmp_path / "m.gguf")
    convert_gguf(source, out)
    written = sum(values.nbytes for values in state(out).values())
    (record,) = caplog.records
    found = re.search(
        rf"the ([\d.]+) GiB of {kind.name} weights become ([\d.]+) GiB", record.message
    )
    assert found is not None and record.levelname == level
    assert float(found[2]) == pytest.approx(written / 1000, abs=0.01)
    assert growth[0] < float(found[2]) / float(found[1]) < growth[1]
    assert re.search(keeps, record.message) and str(out.parent) in record.message


def test_unknown_architectures_are_refused(llama: GGUFModel, tmp_path: Path, out: Path) -> None:
    llama.arch = "mamba"
    with pytest.raises(UnsupportedModelError, match=r"mamba is .*Supported are .*Llama 2"):
        convert_gguf(llama.write(tmp_path / "m.gguf"), out)


def test_unknown_tensors_are_refused(llama: GGUFModel, tmp_path: Path, out: Path) -> None:
    llama.tensors["blk.0.ffn_gate_exps.weight"] = np.zeros((2, 32), np.float32)
    with pytest.raises(UnsupportedModelError, match="ffn_gate_exps"):
        convert_gguf(llama.write(tmp_path / "m.gguf"), out)


def test_rope_divisors_of_another_rule_are_refused(
    llama: GGUFModel, tmp_path: Path, out: Path
) -> None:
    llama.tensors["rope_freqs.weight"] = np.linspace(1, 3, 8, dtype=np.float32)
    with pytest.raises(UnsupportedModelError, match="Llama 3's rule"):
        convert_gguf(llama.write(tmp_path / "m.gguf"), out)


@pytest.mark.parametrize("kind", [QuantType.I32, QuantType.F64])
def test_tensor_types_without_dequantisation_are_refused(
    llama: GGUFModel, tmp_path: Path, out: Path, kind: QuantType
) -> None:
    path = llama.write(tmp_path / "m.gguf")
    path.write_bytes(with_tensor_type(path.read_bytes(), "blk.0.attn_norm.weight", kind.value))
    with pytest.raises(ModelLoadError, match=rf"{kind.name}, which cannot|those before it end"):
        convert_gguf(path, out)


def test_unknown_tensor_types_are_refused(llama: GGUFModel, tmp_path: Path, out: Path) -> None:
    path = llama.write(tmp_path / "m.gguf")
    path.write_bytes(with_tensor_type(path.read_bytes(), "blk.0.attn_norm.weight", 999))
    with pytest.raises(UnsupportedModelError, match="unknown type 999"):
        convert_gguf(path, out)


def with_tensor_type(data: bytes, name: str, kind: int) -> bytes:
    """Change the type of a one-dimensional tensor: name, uint32 dims, uint64 size, uint32 type."""
    place = data.index(name.encode()) + len(name) + 4 + 8
    return data[:place] + struct.pack("<I", kind) + data[place + 4 :]


# -- damaged files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 3, 23, 24, 100, 5000, -4096, -1])
def test_truncated_files_are_refused(
    llama: GGUFModel, tmp_path: Path, out: Path, size: int
) -> None:
    path = llama.write(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CorruptModelError, match=r"truncated|no GGUF"):
        convert_gguf(path, out)


@pytest.mark.parametrize(
    ("place", "value", "match"),
    [
        (0, b"GGML", "no GGUF file"),
        (0, b"\x80\x04\x95\x00", "no GGUF file"),
        (4, struct.pack("<I", 1), "version 1"),
        (4, struct.pack(">I", 3), "version 50331648"),
        (8, struct.pack("<Q", 1 << 60), "tensors"),
        (16, struct.pack("<Q", 1 << 60), "metadata entries"),
        (24, struct.pack("<Q", 1 << 62), "truncated"),
    ],
)
def test_a_damaged_head_is_refused(
    llama: GGUFModel, tmp_path: Path, place: int, value: bytes, match: str
) -> None:
    path = llama.write(tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    data[place : place + len(value)] = value
    path.write_bytes(data)
    with pytest.raises(ModelLoadError, match=match):
        check_structure(path)


@pytest.mark.parametrize("length", [1 << 33, (1 << 64) - 1, 9_999_999])
def test_an_absurd_array_is_refused_at_once(llama: GGUFModel, tmp_path: Path, length: int) -> None:
    """The `gguf` package alone would append to a list until memory ends."""
    path = llama.write(tmp_path / "m.gguf")
    data = path.read_bytes()
    key = b"tokenizer.ggml.token_type"
    place = data.index(key + struct.pack("<I", 9)) + len(key) + 8
    path.write_bytes(data[:place] + struct.pack("<Q", length) + data[place + 8 :])
    start = time.process_time()
    with pytest.raises(CorruptModelError, match=r"array elements|truncated"):
        check_structure(path)
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("key", "counts", "is_refused"),
    [
        ("llama.odd", [100_000], False),
        ("llama.odd", [60_000, 60_000], True),
        ("tokenizer.odd", [120_000], False),
        ("tokenizer.odd", [3_000_000, 3_000_000], True),
    ],
)
def test_arrays_of_metadata_have_a_sum(
    llama: GGUFModel, tmp_path: Path, key: str, counts: list[int], is_refused: bool
) -> None:
    """The `gguf` package makes an object of each element, and nobody may read it."""
    path = llama.write(tmp_path / "m.gguf")
    data = path.read_bytes()
    num_tensors, num_fields = struct.unpack_from("<QQ", data, 8)
    arrays = b""
    for number, count in enumerate(counts):
        name = f"{key}{number}".encode()
        arrays += struct.pack("<Q", len(name)) + name + struct.pack("<IIQ", 9, 0, count)
        arrays += bytes(count)
    head = data[:8] + struct.pack("<QQ", num_tensors, num_fields + len(counts))
    path.write_bytes(head + arrays + data[24:])
    with pytest.raises(CorruptModelError) as told:  # behind them is less than the padding says
        check_structure(path)
    assert ("array elements in the metadata" in str(told.value)) == is_refused


def test_a_shape_is_read_without_the_vocabulary(
    llama: GGUFModel, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The `gguf` package takes seconds for a vocabulary, and a list of models has many."""
    path = llama.write(tmp_path / "m.gguf")
    convert_gguf(path, out)
    converted = json.loads((out / "config.json").read_text(encoding="utf-8"))
    num_parts = 0
    get = gguf.GGUFReader._get

    def counted(*args: Any, **rest: Any) -> Any:
        nonlocal num_parts
        num_parts += 1
        return get(*args, **rest)

    monkeypatch.setattr(gguf.GGUFReader, "_get", counted)
    read = read_gguf_config(path)
    assert read | {"eos_token_id": converted["eos_token_id"]} == converted
    of_the_shape = num_parts
    gguf.GGUFReader(path)
    assert num_parts - of_the_shape > of_the_shape + 2 * converted["vocab_size"]


def tensor_infos(path: Path) -> list[tuple[str, int, int]]:
    """Name of each tensor, its offset, and where in the file that is written."""
    infos = []
    for tensor in gguf.GGUFReader(path).tensors:
        field = tensor.field
        place = field.offset + sum(part.nbytes for part in field.parts[:-1])
        infos.append((tensor.name, int(field.parts[-1][0]), place))
    return infos


def with_bytes(path: Path, place: int, value: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[place : place + len(value)] = value
    path.write_bytes(data)


@pytest.mark.parametrize("change", [32, -32, 1, 1 << 40])
def test_a_wrong_offset_is_refused(llama: GGUFModel, tmp_path: Path, change: int) -> None:
    """A tensor that begins elsewhere inside the file is other weights."""
    path = llama.write(tmp_path / "m.gguf")
    check_structure(path)
    name, offset, place = tensor_infos(path)[4]
    with_bytes(path, place, struct.pack("<Q", offset + change))
    message = f"tensor '{name}' is at offset {offset + change}, but those before it end at {offset}"
    with pytest.raises(CorruptModelError, match=message):
        check_structure(path)


def test_tensors_in_each_others_places_are_refused(llama: GGUFModel, tmp_path: Path) -> None:
    path = llama.write(tmp_path / "m.gguf")
    infos = {name: (offset, place) for name, offset, place in tensor_infos(path)}
    (one, one_place), (two, two_place) = (infos[f"blk.{i}.attn_q.weight"] for i in (0, 1))
    with_bytes(path, one_place, struct.pack("<Q", two))
    with_bytes(path, two_place, struct.pack("<Q", one))
    with pytest.raises(CorruptModelError, match=rf"blk\.0\.attn_q\.weight' is at offset {two}"):
        check_structure(path)


def test_tensors_lie_as_their_alignment_says(llama: GGUFModel, tmp_path: Path, out: Path) -> None:
    llama.alignment = 4096
    path = llama.write(tmp_path / "m.gguf")
    assert {offset % 4096 for _, offset, _ in tensor_infos(path)} == {0}
    convert_gguf(path, out)
    key = b"general.alignment"
    place = path.read_bytes().index(key) + len(key) + 4
    with_bytes(path, place, struct.pack("<I", 2048))
    with pytest.raises(CorruptModelError, match="but those before it end at"):
        check_structure(path)


@pytest.mark.parametrize("value", [0, 24, -1, 32.0, "32"])
def test_a_wrong_alignment_is_refused(llama: GGUFModel, tmp_path: Path, value: Any) -> None:
    llama.settings["general.alignment"] = value if value != -1 else (1 << 32) - 1
    with pytest.raises(CorruptModelError, match="power of two of type uint32"):
        check_structure(llama.write(tmp_path / "m.gguf"))


def test_a_tensor_left_out_of_the_count_is_noticed(llama: GGUFModel, tmp_path: Path) -> None:
    """The data would begin earlier, at what was the last description."""
    path = llama.write(tmp_path / "m.gguf")
    with_bytes(path, 8, struct.pack("<Q", len(llama.tensors) - 1))
    with pytest.raises(CorruptModelError, match=r"the last tensor ends at byte \d+, the file has"):
        check_structure(path)


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        (b"blk.0.attn_k.weight", b"blk.0.attn_v.weight", "the tensor 'blk.0.attn_v.weight'"),
        (b"eos_token_id", b"bos_token_id", "the metadata key 'tokenizer.ggml.bos_token_id'"),
    ],
)
def test_names_that_are_there_twice_are_refused(
    llama: GGUFModel, tmp_path: Path, old: bytes, new: bytes, match: str
) -> None:
    path = llama.write(tmp_path / "m.gguf")
    with_bytes(path, path.read_bytes().index(old), new)
    with pytest.raises(CorruptModelError, match=f"{match} is there twice"):
        check_structure(path)


def test_a_file_system_without_space_is_a_clear_error(
    llama: GGUFModel, tmp_path: Path, fresh_cache: Path
) -> None:
    """The system refuses the first file that is larger than a limit: the tokenizer's."""
    path = llama.write(tmp_path / "m.gguf")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
            find_model.resolve_model(path)
        except ModelLoadError as error:
            status = 0 if "cannot write the converted model" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_damage_anywhere_ends_in_our_own_errors(llama: GGUFModel, tmp_path: Path) -> None:
    """Random bytes over the metadata and the tensor table: an error of ours, or a model."""
    data = llama.write(tmp_path / "m.gguf").read_bytes()
    table_end = data.rindex(b"blk.2.") + 100
    path, rng = tmp_path / "damaged.gguf", random.Random(0)
    outcomes: dict[str, int] = {}
    for number in range(150):
        damaged = bytearray(data)
        for _ in range(rng.choice((1, 1, 3))):
            start = rng.randrange(table_end)
            damaged[start] = rng.randrange(256)
        path.write_bytes(damaged)
        target = tmp_path / f"out{number}"
        target.mkdir()
        try:
            convert_gguf(path, target)
            outcome = "converted"
        except (CorruptModelError, UnsupportedModelError) as error:
            outcome = type(error).__name__
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    assert len(outcomes) == 3, outcomes  # the damage reached all kinds of places
