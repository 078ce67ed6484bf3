"""Checkpoints of packed integers, written an integer at a time, against transformers' answers with
the numbers that they stand for.

The layouts are those of AutoAWQ's WQLinear_GEMM, AutoGPTQ's QuantLinear and compressed-tensors'
pack_to_int32.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import Driver, assert_logits_are_transformers, small_engine
from marks import named, needs_compiler, needs_no_gpu
from mtp_models import said_of, with_head
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanoengine import SamplingParams
from nanoengine.cli.main import main
from nanoengine.errors import UnsupportedModelError, WeightMismatchError
from nanoengine.loading.left_out import stays_numbers
from nanoengine.loading.model_config import read_model_config
from nanoengine.loading.packed_ints import PackedReader, packed_format
from nanoengine.models.stored_codes import CodedWeight, numbers_of
from nanoengine.startup import parts

Tiny = Callable[[str], Path]
NUM_CODED = 18  # of the products in both_kinds, those with whole blocks
GROUP, AWQ_COLUMNS = 32, (0, 2, 4, 6, 1, 3, 5, 7)
INT4 = {"type": "int", "num_bits": 4, "symmetric": True, "strategy": "group", "group_size": GROUP}
CHANNEL = {"type": "int", "num_bits": 8, "symmetric": True, "strategy": "channel"}


def of_tensors(weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    groups = {"group_0": {"weights": weights}}
    method = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return method | {"config_groups": groups} | more


PRODUCTS = (
    "_proj.weight",
    "_mlp.input_linear.weight",
    "_mlp.output_linear.weight",
    "in_proj_qkv.weight",
    "in_proj_z.weight",
    "in_proj_qkvz.weight",
)
FIRST = ("awq", "gptq", "compressed-tensors")
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
AUTO_ROUND = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "group_size": GROUP,
    "sym": True,
    "data_type": "int",
}
KINDS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
    "gptq": GPTQ | {"desc_act": True},
    "gptq, 8 bits": GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2"},
    "auto-round": AUTO_ROUND,
    "auto-round, awq": AUTO_ROUND
    | {"packing_format": "auto_round:auto_awq", "extra_config": {"lm_head": {"bits": 16}}},
    "compressed-tensors": of_tensors(INT4 | {"symmetric": False}),
    "compressed-tensors, no zeros": of_tensors(INT4),
    "compressed-tensors, 8 bits": of_tensors(CHANNEL),
}


def pack(integers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[rows, columns] as int32 words of a row; order: the column of each place in a word."""
    per_word, (rows, columns) = 32 // bits, integers.shape
    order = order or tuple(range(per_word))
    words = [
        sum(int(integers[row, first + order[i]]) << bits * i for i in range(per_word))
        for row in range(rows)
        for first in range(0, columns, per_word)
    ]
    signed = [word - (1 << 32) if word >> 31 else word for word in words]
    return torch.tensor(signed, dtype=torch.int32).view(rows, -1)


def packed(
    config: dict[str, Any], shape: torch.Size, seed: int
) -> tuple[dict[str, Tensor], Tensor]:
    """Random tensors of a weight by the ends of their names, and the weight [outputs, inputs]."""
    generator = torch.Generator().manual_seed(seed)
    (outputs, inputs), known = shape, packed_format(config)
    assert known is not None
    bits, group = known.bits, known.group or inputs
    top, num_groups = 1 << bits, -(-inputs // group)

    def integers(*sizes: int) -> Tensor:
        return torch.randint(0, top, sizes, generator=generator)

    q, zeros = integers(inputs, outputs), integers(num_groups, outputs)
    scales = (torch.rand(num_groups, outputs, generator=generator) + 0.5) / top
    scales = scales.half().float()
    of_input = torch.arange(inputs) // group
    if config.get("desc_act"):
        of_input = of_input[torch.randperm(inputs, generator=generator)]
    if known.method == "compressed-tensors":
        found = {"weight_packed": pack(q.T, bits), "weight_scale": scales.T.contiguous()}
        if known.has_zeros:
            found["weight_zero_point"] = pack(zeros, bits).T.contiguous()
        else:
            zeros.fill_(top // 2)
        if config.get("desc_act"):
            found["weight_g_idx"] = of_input.int()
        found["weight_shape"] = torch.tensor([outputs, inputs])
    elif known.method == "awq":
        found = {"qweight": pack(q, 4, AWQ_COLUMNS), "qzeros": pack(zeros, 4, AWQ_COLUMNS)}
        found["scales"] = scales.half()
    else:
        stored = (zeros - 1) % top if "checkpoint_format" not in config else zeros
        found = {"qweight": pack(q.T, bits).T.contiguous(), "qzeros": pack(stored, bits)}
        found |= {"scales": scales.half(), "g_idx": of_input.int()}
    weight = torch.empty(outputs, inputs)
    for i in range(inputs):
        weight[:, i] = (q[i] - zeros[of_input[i]]) * scales[of_input[i]]
    return found, weight


def both_kinds(
    tiny: Tiny,
    name: str,
    config: dict[str, Any],
    folder: Path,
    part: str = ".0.",
    other: tuple[str, dict[str, Any]] | None = None,
) -> tuple[Path, Path]:
    """A checkpoint with packed products where names have this part, and the same as numbers. other:
    a part of names where they are packed in another way.
    """
    ours, theirs = folder / "packed", folder / "numbers"
    for each in (ours, theirs):
        shutil.copytree(tiny(name), each)
    stored = load_file(ours / "model.safetensors")
    plain = dict(stored)
    for seed, (each, tensor) in enumerate(list(stored.items())):
        # Of experts the first of each layer, of other products those of the first layer, but for
        # what the decays of a recurrent layer come from.
        if each.endswith(PRODUCTS) and part in each:
            del stored[each]
            is_other = other is not None and other[0] in each
            own = other[1] if other is not None and is_other else config
            found, plain[each] = packed(own, tensor.shape, seed)
            stored |= {each.removesuffix("weight") + end: value for end, value in found.items()}
    save_file(stored, ours / "model.safetensors", {"format": "pt"})
    save_file(plain, theirs / "model.safetensors", {"format": "pt"})
    path = ours / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return ours, theirs


@needs_compiler
@pytest.mark.parametrize("kind", ["awq", "compressed-tensors"])
def test_a_models_own_head_may_be_packed(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    source = with_head(tiny("qwen3.5"), tmp_path)
    ours, theirs = both_kinds(lambda name: source, "", KINDS[kind], tmp_path)
    said = [said_of(path, monkeypatch) for path in (ours, theirs)]
    torch.testing.assert_close(*said, atol=1e-4, rtol=0)
    assert any(name.startswith("mtp.") for name in load_file(ours / "model.safetensors"))


@pytest.mark.parametrize(
    "kind", named({kind: kind for kind in KINDS}, "awq", "gptq", "compressed-tensors")
)
@pytest.mark.parametrize("has_kernels", [pytest.param(True, marks=needs_compiler), False])
def test_answers_are_those_of_the_numbers(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, has_kernels: bool
) -> None:
    """On a CPU integers stay codes, but where a block of inputs has several scales."""
    if not has_kernels:
        monkeypatch.setattr(parts, "_code_ops", lambda *_: None)
    config = KINDS[kind]
    ours, theirs = both_kinds(tiny, "llama-bias", config, tmp_path)
    driver = Driver(small_engine(ours))
    outputs = driver.run([[7 * i % 256 for i in range(50)], [3, 4]])
    assert_logits_are_transformers(driver, theirs, outputs)
    bits = 8 if "8" in kind else 4
    known = packed_format(config)
    assert known is not None
    line = f"{known.method} in {bits} bits, dequantised: "
    if has_kernels and not config.get("desc_act"):
        line = f"codes as stored: 7 of INT{bits}; the rest in float32"
    assert line in str(driver.engine.plan)
    driver.engine.close()


@pytest.mark.some(2)
@needs_compiler
@pytest.mark.parametrize("kind", ["awq", "compressed-tensors"])
@pytest.mark.parametrize(
    ("name", "num_coded"), [("qwen3.5", 6), ("qwen3-next-moe", 9), ("lfm2-moe", 2)]
)
def test_recurrent_layers(tiny: Tiny, tmp_path: Path, name: str, num_coded: int, kind: str) -> None:
    """Rows of codes beside rows of numbers, and rows that lie head by head."""
    ours, theirs = both_kinds(tiny, name, KINDS[kind], tmp_path)
    driver = Driver(small_engine(ours))
    outputs = driver.run([[7 * i % 256 for i in range(50)], [3, 4]])
    assert f"codes as stored: {num_coded} of INT4; " in str(driver.engine.plan)
    assert_logits_are_transformers(driver, theirs, outputs)
    driver.engine.close()


@needs_compiler
def test_the_plan_knows_what_recurrent_layers_have_as_numbers(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left_out = [f"model.layers.0.linear_attn.in_proj_{name}" for name in "ba"]
    config = KINDS["awq"] | {"modules_to_not_convert": [*left_out, "mlp.gate"]}
    ours, _ = both_kinds(tiny, "qwen3.5", config, tmp_path, ".")
    assert main(["plan", str(ours), "--gpu-gib", "0", "--dtype", "float32", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["memory"]["RAM"]["weights"]
    engine = small_engine(ours)
    assert engine.plan.weight_bytes == planned
    engine.close()


@pytest.mark.some(2)
@needs_compiler
@pytest.mark.parametrize(
    "config",
    [
        KINDS["gptq"],
        KINDS["awq"] | {"group_size": 16},
        of_tensors(INT4 | {"actorder": "group"}, desc_act=True),
        GPTQ | {"group_size": -1, "desc_act": True},
    ],
    ids=["desc_act", "groups of 16", "actorder", "one group"],
)
def test_the_plan_knows_what_becomes_numbers(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any]
) -> None:
    ours, _ = both_kinds(tiny, "llama", config, tmp_path, ".")
    assert main(["plan", str(ours), "--gpu-gib", "0", "--dtype", "float32", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["memory"]["RAM"]["weights"]
    engine = small_engine(ours)
    assert engine.plan.weight_bytes == planned
    engine.close()


@needs_no_gpu
@pytest.mark.parametrize("kind", named({kind: kind for kind in KINDS}, "awq"))
def test_they_stay_packed_on_a_gpu(tiny: Tiny, tmp_path: Path, kind: str) -> None:
    virtual_gpu = pytest.importorskip("virtual_gpu", reason="Triton is not installed")
    ours, theirs = both_kinds(tiny, "llama-bias", KINDS[kind], tmp_path)
    with virtual_gpu.VirtualGpu():
        settings = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "max_model_len": 64}
        greedy = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        driver = Driver(small_engine(ours, device="cuda", **settings))
        outputs = driver.run([[7 * i % 256 for i in range(20)]], greedy)
        has_codes = not KINDS[kind].get("desc_act")
        assert ("codes as stored: 7 of INT" in str(driver.engine.plan)) is has_codes
        driver.engine.close()
    assert_logits_are_transformers(driver, theirs, outputs)


EIGHT = {"type": "int", "num_bits": 8, "symmetric": False, "strategy": "channel"}
MIXED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gptq": (GPTQ | {"dynamic": {r"+:.*mlp.*": {"bits": 8}}}, GPTQ | {"bits": 8}),
    "groups of gptq": (GPTQ | {"dynamic": {"+:a": {"group_size": 64}}}, GPTQ | {"group_size": 64}),
    "auto-round": (
        AUTO_ROUND | {"extra_config": {"a": {"bits": 8}, "b": {"bits": 16, "data_type": "fp"}}},
        AUTO_ROUND | {"bits": 8},
    ),
    "compressed-tensors": (
        of_tensors({}, config_groups={"a": {"weights": INT4}, "b": {"weights": EIGHT}}),
        of_tensors(EIGHT),
    ),
}


@needs_compiler
@pytest.mark.parametrize(
    "kind", named({kind: kind for kind in MIXED}, "gptq", "compressed-tensors")
)
def test_weights_may_have_bits_of_their_own(tiny: Tiny, tmp_path: Path, kind: str) -> None:
    """As Laguna XS in INT4, whose config.json says which; the tensors show it."""
    config, other = MIXED[kind]
    ours, theirs = both_kinds(tiny, "llama", config, tmp_path, other=(".mlp.", other))
    driver = Driver(small_engine(ours))
    counts = "7 of INT4" if kind == "groups of gptq" else "4 of INT4, 3 of INT8"
    assert f"codes as stored: {counts}; the rest in float32" in str(driver.engine.plan)
    outputs = driver.run([[7 * i % 256 for i in range(50)], [3, 4]])
    driver.engine.close()
    assert_logits_are_transformers(driver, theirs, outputs)


@pytest.mark.parametrize("kind", ["awq", "gptq"])
def test_experts(tiny: Tiny, tmp_path: Path, kind: str) -> None:
    """A tensor for each expert, and inputs that end inside a group."""
    ours, theirs = both_kinds(tiny, "qwen3-moe", KINDS[kind], tmp_path)
    known = packed_format(KINDS[kind])
    assert known is not None
    expected = load_file(theirs / "model.safetensors")
    num_coded = 0
    with PackedReader(ours, False, known) as reader:
        assert reader.names() == expected.keys()
        for name, values in expected.items():
            assert reader.shape(name) == values.shape
            torch.testing.assert_close(reader.tensor(name), values, atol=1e-6, rtol=0)
            weight = reader.weight(name, torch.float32)
            if isinstance(weight, CodedWeight):
                assert torch.equal(weight.numbers(), values)
                num_coded += 1
        assert reader.num_bytes() < sum(values.nbytes for values in expected.values())
    assert num_coded == (0 if KINDS[kind].get("desc_act") else NUM_CODED)


@pytest.mark.some(3)
@needs_compiler
@pytest.mark.parametrize("kind", FIRST)
@pytest.mark.parametrize("name", ["granite-hybrid", "granite-hybrid-dense"])
def test_a_tensor_of_gates_and_ups(tiny: Tiny, tmp_path: Path, name: str, kind: str) -> None:
    ours, theirs = both_kinds(tiny, name, KINDS[kind], tmp_path)
    stored = load_file(ours / "model.safetensors")
    assert any("shared_mlp.input_linear" in each and "scale" in each for each in stored)
    driver = Driver(small_engine(ours))
    outputs = driver.run([[7 * i % 256 for i in range(50)], [3, 4]])
    driver.engine.close()
    assert_logits_are_transformers(driver, theirs, outputs)


@needs_compiler
def test_a_bias_of_zeros_that_the_model_has_not_is_left_out(tiny: Tiny, tmp_path: Path) -> None:
    """AutoGPTQ stores one for every weight; q, k and v of Qwen 2 have theirs."""
    ours, theirs = both_kinds(tiny, "qwen2", KINDS["gptq"], tmp_path)
    stored = load_file(ours / "model.safetensors")
    stems = {name.removesuffix("qweight") for name in stored if name.endswith(".qweight")}
    biases = {f"{stem}bias": torch.zeros_like(stored[f"{stem}scales"][0]) for stem in stems}
    assert stored["model.layers.0.self_attn.q_proj.bias"].any() and len(biases) == 7
    save_file(biases | stored, ours / "model.safetensors", {"format": "pt"})
    driver = Driver(small_engine(ours))
    outputs = driver.run([[7 * i % 256 for i in range(20)]])
    driver.engine.close()
    assert_logits_are_transformers(driver, theirs, outputs)
    biases["model.layers.0.mlp.up_proj.bias"][-1] = 0.1
    save_file(biases | stored, ours / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        WeightMismatchError, match=r"up_proj\.bias' is not all zeros, and the model"
    ):
        small_engine(ours)


def test_scales_beyond_float16_leave_numbers(tiny: Tiny, tmp_path: Path) -> None:
    ours, _ = both_kinds(tiny, "llama", KINDS["compressed-tensors"], tmp_path)
    known = packed_format(KINDS["compressed-tensors"])
    assert known is not None
    stored = load_file(ours / "model.safetensors")
    stem = "model.layers.0.self_attn.q_proj."
    stored[f"{stem}weight_scale"] *= 1.0001
    save_file(stored, ours / "model.safetensors", {"format": "pt"})
    with PackedReader(ours, False, known) as reader:
        kinds = {
            part: reader.weight(f"{stem}weight".replace("q_", part), torch.float32)
            for part in ("q_", "k_")
        }
        assert isinstance(kinds["k_"], CodedWeight)
        assert torch.equal(numbers_of(kinds["q_"]), reader.tensor(f"{stem}weight"))
        assert not isinstance(kinds["q_"], CodedWeight)


def test_a_weight_that_is_there_twice_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    ours, _ = both_kinds(tiny, "llama", KINDS["awq"], tmp_path)
    stored = load_file(ours / "model.safetensors")
    stored["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(64, 64)
    save_file(stored, ours / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        WeightMismatchError, match=r"q_proj.weight' is there packed, and as numbers"
    ):
        small_engine(ours)


@needs_compiler
@pytest.mark.parametrize("kind", ["awq", "compressed-tensors"])
def test_scales_of_kv_in_8_bits_are_left_out(tiny: Tiny, tmp_path: Path, kind: str) -> None:
    """Other engines may hold the KV of such a checkpoint in FP8; here it stays in the dtype."""
    ours, theirs = both_kinds(tiny, "llama", KINDS[kind], tmp_path)
    stored = load_file(ours / "model.safetensors")
    for layer in range(3):
        for part in "kv":
            stored[f"model.layers.{layer}.self_attn.{part}_scale"] = torch.tensor([0.1])
    save_file(stored, ours / "model.safetensors", {"format": "pt"})
    driver = Driver(small_engine(ours))
    outputs = driver.run([[7 * i % 256 for i in range(20)]])
    driver.engine.close()
    assert_logits_are_transformers(driver, theirs, outputs)


@needs_compiler
def test_a_wrapper_may_name_the_method_for_its_text_model(tiny: Tiny, tmp_path: Path) -> None:
    ours, _ = both_kinds(tiny, "gemma3", KINDS["awq"], tmp_path)
    path = ours / "config.json"
    wrapper = {"architectures": ["Gemma3ForConditionalGeneration"]}
    path.write_text(json.dumps(wrapper | {"text_config": json.loads(path.read_text())}))
    stored = load_file(ours / "model.safetensors")
    stored = {f"language_model.{name}": tensor for name, tensor in stored.items()}
    save_file(stored, ours / "model.safetensors", {"format": "pt"})
    engine = small_engine(ours)
    assert "codes as stored: " in str(engine.plan)
    engine.close()


@needs_compiler
@pytest.mark.parametrize("kind", ["gptq", "compressed-tensors"])
def test_a_list_of_groups_may_be_unset(tiny: Tiny, tmp_path: Path, kind: str) -> None:
    """All -1, as compressed-tensors writes it without an order of the inputs."""
    config = {"gptq": GPTQ, "compressed-tensors": KINDS["compressed-tensors"]}[kind]
    ours, theirs = both_kinds(tiny, "llama", config, tmp_path)
    stored, plain = (load_file(each / "model.safetensors") for each in (ours, theirs))
    end = {"gptq": "g_idx", "compressed-tensors": "weight_g_idx"}[kind]
    for name in plain.keys() - stored.keys():
        unset = torch.full(plain[name].shape[1:], -1, dtype=torch.int32)
        stored[name.removesuffix("weight") + end] = unset
    save_file(stored, ours / "model.safetensors", {"format": "pt"})
    driver = Driver(small_engine(ours))
    outputs = driver.run([[7 * i % 256 for i in range(20)]])
    driver.engine.close()
    assert_logits_are_transformers(driver, theirs, outputs)


@pytest.mark.some(5)
@pytest.mark.parametrize(
    ("end", "change", "error", "match"),
    [
        ("scales", None, WeightMismatchError, "has no scales and zeros of 64 outputs"),
        ("scales", lambda t: t[1:], WeightMismatchError, "in 2 groups of inputs"),
        ("qzeros", lambda t: t[:, 1:], WeightMismatchError, "has no scales and zeros"),
        ("g_idx", lambda t: t * 0, WeightMismatchError, "the groups of inputs are not 2 of 32"),
        ("g_idx", lambda t: t + 7, WeightMismatchError, "the groups of inputs are not 2 of 32"),
        ("g_idx", lambda t: t[1:] * 0 - 1, WeightMismatchError, "the groups of inputs are not 2"),
        ("qweight", lambda t: t.float(), UnsupportedModelError, "packed integers must be I32"),
        ("qweight", lambda t: t[1:], WeightMismatchError, r"q_proj.weight is \[64, 56\], not"),
        ("qweight", lambda t: t[None], WeightMismatchError, r"q_proj.weight is \[1, 8, 64\], not"),
        ("qzeros", lambda t: t.flatten(), WeightMismatchError, "has no scales and zeros"),
        ("qzeros", lambda t: t.float(), WeightMismatchError, "has no scales and zeros"),
        ("weight_zero_point", None, WeightMismatchError, "has no scales and zeros of 64 outputs"),
        ("weight_zero_point", lambda t: t[1:], WeightMismatchError, "has no scales and zeros"),
    ],
)
def test_damage_is_refused(
    tiny: Tiny, tmp_path: Path, end: str, change: Any, error: type[Exception], match: str
) -> None:
    kind = "compressed-tensors" if end.startswith("weight") else "gptq"
    ours, _ = both_kinds(tiny, "llama", KINDS[kind], tmp_path)
    stored = load_file(ours / "model.safetensors")
    name = f"model.layers.0.self_attn.q_proj.{end}"
    tensor = stored.pop(name)
    if change is not None:
        stored[name] = change(tensor).contiguous()
    save_file(stored, ours / "model.safetensors", {"format": "pt"})
    with pytest.raises(error, match=match):
        small_engine(ours)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"},
        {"quant_method": "awq", "bits": 4},
        GPTQ | {"bits": 3},
        GPTQ | {"dynamic": {"-:.*down.*": {}, "+:.*up.*": {"bits": 3}}},
        AUTO_ROUND | {"extra_config": {"a": {"bits": 2}}},
        AUTO_ROUND | {"packing_format": "auto_round:llm_compressor"},
        AUTO_ROUND
        | {"packing_format": "auto_round:auto_awq", "extra_config": {"a": {"group_size": 32}}},
        AUTO_ROUND | {"data_type": "mx_fp"},
        GPTQ | {"dynamic": ["-:.*down.*"]},
        GPTQ | {"group_size": 10**30},
        GPTQ | {"checkpoint_format": "marlin"},
        of_tensors(INT4 | {"symmetric": "no"}),
        of_tensors(INT4 | {"group_size": None}),
        of_tensors(INT4, config_groups={}),
        of_tensors(INT4, format="marlin-24"),
    ],
    ids=str,
)
def test_other_layouts_are_refused(tiny: Tiny, tmp_path: Path, config: dict[str, Any]) -> None:
    shutil.copytree(tiny("llama"), tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    with pytest.raises(UnsupportedModelError, match="were quantised in this way are not read"):
        read_model_config(tmp_path / "m")


def test_rules_that_leave_modules_out_are_read(tiny: Tiny, tmp_path: Path) -> None:
    """GPTQModel's: which tensors are packed says the file, and without one these rules."""
    ours, _ = both_kinds(tiny, "llama", KINDS["gptq"], tmp_path)
    path, dynamic = ours / "config.json", {r"-:.*\.self_attn\..*": {}, ".*": {}}
    content = json.loads(path.read_text())
    content["quantization_config"]["dynamic"] = dynamic
    path.write_text(json.dumps(content))
    small_engine(ours).close()
    left_out = read_model_config(ours).left_out
    assert stays_numbers("model.layers.1.self_attn.q_proj.weight", left_out)
    assert not stays_numbers("model.layers.1.mlp.up_proj.weight", left_out)


ROTATIONS = [
    ({"u": {"apply": [{"location": "weight_output"}, {"location": "output"}]}}, True),
    ({"R1": {"apply": [{"location": "weight_input"}, {"location": "weight_output"}]}}, False),
    ({"R3": {"type": "hadamard"}}, True),
    ({}, False),
]


@pytest.mark.parametrize(("groups", "is_refused"), ROTATIONS)
def test_rotations_of_activations_are_refused(
    tiny: Tiny, tmp_path: Path, groups: dict[str, Any], is_refused: bool
) -> None:
    """As QuIP's and SpinQuant's recipes are written (llm-compressor)."""
    shutil.copytree(tiny("llama"), tmp_path / "m")
    path, config = tmp_path / "m" / "config.json", of_tensors(INT4)
    config["transform_config"] = {"config_groups": groups}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    if is_refused:
        with pytest.raises(UnsupportedModelError, match=r"'transform_config' .*rotates"):
            read_model_config(tmp_path / "m")
    else:
        assert read_model_config(tmp_path / "m").codes == "INT4"
