"""The tiny models of beside_llama.py, each written as a GGUF file.

Most are those that tests have (tests/helpers/tiny_models.py), with the settings that llama.cpp's
own reader asks for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

import numpy as np  # noqa: E402 (the lines above say where the others are)
import torch  # noqa: E402
from gguf import GGMLQuantizationType as QuantType  # noqa: E402
from gguf_model import (  # noqa: E402
    ARCHITECTURES,
    SCALINGS,
    GGUFModel,
    keys_and_values_apart,
    with_scaling,
)
from gguf_rounded import rounded  # noqa: E402
from mtp_models import head_of, write_head  # noqa: E402
from tiny_model import YARN_ROPE  # noqa: E402
from tiny_models import TINY  # noqa: E402

from nanoengine.models.rope import yarn_attention_factor  # noqa: E402

Change = Callable[[GGUFModel], None]
# llama.cpp takes GELU from a table of 16 bits.
EXACT, HALF_GELU = 3e-4, 1e-1
# Blocks of K-quants have 256 numbers of a row.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


def unchanged(model: GGUFModel) -> None:
    """The file that a converter writes."""


@dataclass(frozen=True)
class Case:
    """A model of TINY. settings: of its configuration, where llama.cpp knows fewer forms.

    change: of the file. tolerance: of the difference of logits, over their spread. known: why ours
    and theirs differ, with the proof. drafts: it has a layer more, for multi-token prediction.
    forms: those (llama_ftype) in which llama.cpp writes the weights one after the other; llama.cpp
    reads the last, and the engine the one before.
    """

    tiny: str
    settings: dict[str, Any] = field(default_factory=dict)
    change: Change = unchanged
    tolerance: float = EXACT
    known: str = ""
    drafts: bool = False
    forms: tuple[int, ...] = ()


def in_codes(kind: str) -> Change:
    """Of layers: their matrices, but routers."""

    def change(model: GGUFModel) -> None:
        for name, values in model.tensors.items():
            is_matrix = values.ndim == 2 and values.shape[1] > 1 and "gate_inp" not in name
            if is_matrix and name.startswith("blk."):
                model.types[name] = QuantType[kind]

    return change


def with_settings(**settings: Any) -> Change:
    """In the file; two underscores are a point."""

    def change(model: GGUFModel) -> None:
        for key, value in settings.items():
            model.settings[f"{model.arch}.{key.replace('__', '.')}"] = value

    return change


def with_divisors(model: GGUFModel) -> None:
    """Those of Llama 3's rule, a factor of 8."""
    turns = 8192 / (2 * np.pi * 10000.0 ** (np.arange(0, 16, 2) / 16))
    share = np.clip((turns - 1) / 3, 0, 1)
    model.tensors["rope_freqs.weight"] = (1 / ((1 - share) / 8 + share)).astype(np.float32)


def fused_qkv(model: GGUFModel) -> None:
    """As `--fuse-qkv` of the converter has it."""
    for layer in range(model.config["num_hidden_layers"]):
        for kind in ("weight", "bias"):
            names = [f"blk.{layer}.attn_{part}.{kind}" for part in "qkv"]
            if all(name in model.tensors for name in names):
                parts = [model.tensors.pop(name) for name in names]
                model.tensors[f"blk.{layer}.attn_qkv.{kind}"] = np.concatenate(parts)


def fused_experts(model: GGUFModel) -> None:
    """As `--fuse-gate-up-exps` of the converter has it."""
    for name in [name for name in model.tensors if "ffn_gate_exps.weight" in name]:
        parts = [model.tensors.pop(name), model.tensors.pop(name.replace("gate", "up"))]
        model.tensors[name.replace("gate", "gate_up")] = np.concatenate(parts, axis=1)


def queries_of_a_short_vector(model: GGUFModel) -> None:
    """As published models have them: [heads x size, hidden] becomes two products and a norm."""
    rank, rng = 40, np.random.default_rng(7)
    for name in [name for name in model.tensors if name.endswith(".attn_kv_a_norm.weight")]:
        layer = name.removesuffix(".attn_kv_a_norm.weight")
        rows, hidden = model.tensors.pop(f"{layer}.attn_q.weight").shape
        shapes = {"attn_q_a": (rank, hidden), "attn_q_b": (rows, rank), "attn_q_a_norm": (rank,)}
        for part, shape in shapes.items():
            values = torch.tensor(rng.normal(float(len(shape) == 1), 0.2, shape)).bfloat16()
            model.tensors[f"{layer}.{part}.weight"] = values.float().numpy()
    with_settings(attention__q_lora_rank=rank)(model)


def attention_behind_the_last(model: GGUFModel) -> None:
    """Ling's file says which layers have attention; the head for guesses has."""
    model.settings["bailingmoe3.attention.head_count_kv"].append(1)


# Nemotron 3 has no layers with a feed-forward, of which a file would have no size.
EXPERTS_ALONE = [
    *("linear_attention", "moe", "full_attention", "moe", "linear_attention"),
    *("moe", "linear_attention", "full_attention"),
]
# Of four layers the last sees all keys, as in llama.cpp's code.
EVERY_FOURTH = {
    "num_hidden_layers": 4,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"],
}
# By the name of TINY; None: llama.cpp has no such models.
OTHERWISE: dict[str, dict[str, Any] | None] = {
    "afmoe": EVERY_FOURTH | {"global_attn_every_n_layers": 4},
    "arcee": {"mlp_bias": False},
    "cohere": {"attention_bias": False, "tie_word_embeddings": True},
    "deepseek-v2": {"q_lora_rank": 40},
    "deepseek-v3-dense": {"n_group": 1, "topk_group": 1},
    "dots1": {"num_key_value_heads": 4},
    "ernie-moe": {"moe_layer_end_index": 2},
    "exaone4": {"num_hidden_layers": 64, "sliding_window_pattern": 4},
    "exaone-moe": EVERY_FOURTH | {"sliding_window_pattern": 4, "num_shared_experts": 1},
    "falcon-h1-norm": {
        "mamba_norm_before_gate": False,
        "tie_word_embeddings": False,
        **dict.fromkeys(
            ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"), False
        ),
    },
    "gemma3-softcap": {"attention_bias": False},
    "gemma4-shared": {"num_kv_shared_layers": 2},
    "glm4-moe-lite": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "kimi-linear-dense": None,
    "ling-2": {"attention_bias": False},
    "ling-unbounded": None,
    "lfm2": {"conv_bias": False},
    "llama-sharded": None,
    "mellum": {
        "mlp_layer_types": ["sparse"] * 3,
        "rope_parameters": {
            "full_attention": YARN_ROPE,
            "sliding_attention": {"rope_type": "default", "rope_theta": YARN_ROPE["rope_theta"]},
        },
    },
    "nemotron-h-moe": {"layers_block_type": EXPERTS_ALONE, "num_hidden_layers": 8},
    "olmo2": {"attention_bias": False},
    "olmo3": EVERY_FOURTH
    | {
        "rope_parameters": {
            "full_attention": YARN_ROPE,
            "sliding_attention": {"rope_type": "default", "rope_theta": YARN_ROPE["rope_theta"]},
        }
    },
    "qwen2-moe": {"decoder_sparse_step": 1},
    "qwen3-moe": {"mlp_only_layers": []},
    "qwen3-next": None,
    "qwen3-next-moe": {"mlp_only_layers": []},
    "vaultgemma": None,
}
BETAS = "llama.cpp reads 'yarn_beta_fast' of mistral3 and grok alone"
FACTORS = "llama.cpp reads neither 'yarn_attn_factor' nor 'yarn_beta_fast' of laguna"
RAMP = "llama.cpp rounds the ends of YaRN's ramp to whole pairs, which OpenAI's code does not"
NO_WINDOW = "llama.cpp reads no window of {}; its converter writes none"
KNOWN = {
    "arcee": BETAS,
    "deepseek-v2": "llama.cpp chooses groups by their two best experts, as V3; V2 by the best one",
    "gpt-oss": RAMP,
    "mellum": BETAS,
    **dict.fromkeys(("laguna", "laguna-dense"), FACTORS),
    "mistral-window": NO_WINDOW.format("llama"),
    "mixtral": NO_WINDOW.format("llama"),
    "olmo3": BETAS,
    "qwen2": BETAS,
}
USUAL_YARN = {"rope__scaling__yarn_beta_fast": 32.0}
YARN = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 4.0,
    "rope__scaling__original_context_length": 64,
}
F32 = 0
FTYPES = {"F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q4_K_M": 15}
FTYPES |= {"Q5_K_M": 17, "Q6_K": 18, "Q2_K": 10, "Q3_K_M": 12, "IQ4_NL": 25, "IQ4_XS": 30}
FTYPES |= {"BF16": 32, "IQ3_S": 26, "TQ1_0": 36, "TQ2_0": 37}
# Of random codes, as llama.cpp makes none without a sample of activations.
RANDOM = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS")


# Of vocabularies, by name. The models' own patterns are in tests/text/test_tokenizer.py.
MARKS = "llama.cpp counts no mark as a letter of this pattern, the model's own does"
DIGITS = "llama.cpp's digits of groups are those of ASCII, and an underscore ends a number"
NOR_CASES = "llama.cpp's own splitter takes no mark as a letter and parts no words by case"
REFUSED = "of a model that the engine does not run"
END = "to llama.cpp </s> is a special token of any vocabulary"
LIKE_GPT_4O = ("gpt-4o", "kanana2", "llama4", "minimax-m2", "talkie", "tekken")
KNOWN_TEXTS = {
    **{f"gpt2, {name}": MARKS for name in LIKE_GPT_4O},
    **{f"gpt2, {name}": DIGITS for name in ("afmoe", "tiny_aya", "cohere2moe")},
    "gpt2, deepseek-coder": "to llama.cpp the ideographic space is none of the ideographs' range",
    "gpt2, kimi-k2": NOR_CASES,
    "gpt2, deepseek-llm": "llama.cpp takes runs of digits, the model's own pattern single ones",
    **{f"ggml-vocab-{n}.gguf": REFUSED for n in ("bert-bge", "falcon", "nomic-bert-moe")},
    **{f"ggml-vocab-{n}.gguf": END for n in ("qwen2", "qwen35")},
}
FUSED: tuple[str, ...] = (
    "llama",
    "llama-bias",
    "qwen2",
    "qwen3",
    "qwen3-moe",
    "qwen3.5",
    "granite-hybrid",
    "lfm2",
)
FUSED += (
    "ernie",
    "glm4",
    "gpt-oss",
    "gemma2",
    "gemma3",
    "gemma4-shared",
    "nemotron-h",
    "minimax-m2",
)
FUSED += ("falcon-h1", "kimi-linear")


def variants() -> dict[str, Case]:
    """What files of one architecture may have beside the usual."""
    arcee, mellum, olmo3, v2 = (
        OTHERWISE[name] or {} for name in ("arcee", "mellum", "olmo3", "deepseek-v2")
    )
    linear = {"rope__scaling__type": "linear", "rope__scaling__factor": 2.0}
    long = {"rope__scaling__original_context_length": 64}
    by_factor = USUAL_YARN | {"rope__scaling__attn_factor": 1.3}
    own_factor = USUAL_YARN | {"rope__scaling__yarn_attn_factor": yarn_attention_factor(4.0)}
    phi3 = "llama.cpp has switched Phi-3's window off"

    def gemma3(**settings: Any) -> Case:
        return replace(usual("gemma3"), change=with_settings(**settings))

    found = {
        "llama, linear RoPE": Case("llama", {}, with_settings(**linear)),
        "llama, Llama 3's RoPE": Case("llama", {}, with_divisors),
        "llama, YaRN": Case("llama", {}, with_settings(**YARN)),
        "arcee, usual YaRN": Case("arcee", arcee, with_settings(**USUAL_YARN)),
        "mellum, usual YaRN": Case("mellum", mellum, with_settings(**USUAL_YARN)),
        "olmo3, usual YaRN": Case("olmo3", olmo3, with_settings(**USUAL_YARN)),
        "qwen2, usual YaRN": Case("qwen2", {}, with_settings(**USUAL_YARN)),
        "qwen2, attn_factor": Case("qwen2", {}, with_settings(**by_factor)),
        "laguna, usual YaRN": Case("laguna", {}, with_settings(**own_factor)),
        "gpt-oss, usual YaRN": Case("gpt-oss", {}, with_settings(**USUAL_YARN), known=RAMP),
        "deepseek-v2, one group": Case("deepseek-v2", v2 | {"n_group": 1, "topk_group": 1}),
        "phi3, long factors": Case("phi3", {}, with_settings(**long)),
        "phi3, window": Case("phi3", {}, with_settings(attention__sliding_window=21), known=phi3),
        "gemma3, linear RoPE": gemma3(**linear),
        "gemma3, softcap": gemma3(final_logit_softcapping=5.0),
        "mixtral, no window": Case("mixtral", {}, with_settings(attention__sliding_window=0)),
    }
    for name in FUSED:
        found[f"{name}, fused qkv"] = replace(usual(name), change=fused_qkv)
    for name in ("deepseek-v3", "qwen3-next-moe", "qwen3.5-moe"):
        found[f"{name}, fused experts"] = Case(name, OTHERWISE.get(name) or {}, fused_experts)
    for name in ("qwen3.5", "qwen3-next-moe", "glm4-moe", "deepseek-v3"):
        found[f"{name}, MTP"] = Case(name, OTHERWISE.get(name) or {}, drafts=True)
    found["ling, MTP"] = Case("ling", {}, attention_behind_the_last, drafts=True)
    found["ling, short queries"] = Case("ling", {}, queries_of_a_short_vector)
    for name, ftype in FTYPES.items():
        found[f"llama in {name}"] = Case("llama", WIDE, forms=(ftype, F32))
    for name in RANDOM:
        found[f"llama in {name}"] = Case("llama", WIDE, in_codes(name), forms=(F32,))
    wide = WIDE | dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 256)
    forms = FTYPES["Q4_K_M"], F32
    of_laguna = with_settings(**own_factor)
    found["laguna in Q4_K_M"] = Case("laguna", wide, of_laguna, forms=forms)
    of_cohere = WIDE | {"intermediate_size": 256, "prefix_dense_intermediate_size": 256}
    found["cohere2-moe in Q4_K_M"] = Case("cohere2-moe", of_cohere, forms=forms)
    of_muse = {"text_config": TINY["muse-glimmer"].settings["text_config"] | WIDE}
    found["muse-glimmer in Q4_K_M"] = Case("muse-glimmer", of_muse, forms=forms)
    of_ling = WIDE | {"v_head_dim": 64, "moe_intermediate_size": 256}
    found["ling in Q4_K"] = Case("ling", of_ling, in_codes("Q4_K"), forms=(F32,))
    found["ling in Q4_K_M"] = Case("ling", of_ling, forms=forms)
    of_ling_2 = WIDE | {"attention_bias": False, "moe_intermediate_size": 256}
    found["ling-2 in Q4_K_M"] = Case("ling-2", of_ling_2, forms=forms)
    return found


def usual(name: str) -> Case:
    """The model of TINY as it is."""
    tolerance = HALF_GELU if name.startswith(("gemma", "starcoder2")) else EXACT
    return Case(name, OTHERWISE.get(name) or {}, tolerance=tolerance, known=KNOWN.get(name, ""))


def cases() -> dict[str, Case]:
    """By the names of rows."""
    found = {}
    for name, row in TINY.items():
        settings = OTHERWISE.get(name, {})
        if row.architecture in ARCHITECTURES and settings is not None:
            found[name] = usual(name)
    return found | variants()


def make_file(case: Case, folder: Path) -> Path:
    """The GGUF file in F32, its numbers those that bfloat16 holds."""
    source = folder / "source"
    source.mkdir(parents=True)
    row = TINY[case.tiny]
    replace(row, settings=row.settings | case.settings)(source)
    path = rounded(source, folder / "rounded")
    if case.drafts:
        head = head_of(path)
        for weight in head.state_dict().values():
            weight.copy_(weight.bfloat16())
        path = write_head(path, folder / "both", head, as_layer=True)
    model = GGUFModel(path)
    if case.tiny in SCALINGS:
        model = with_scaling(model, case.tiny)
    if any(name.endswith(".attn_kv_b.weight") for name in model.tensors):
        keys_and_values_apart(model)  # llama.cpp crashes on kimi-linear's where they are together
    if case.drafts:
        layers = model.config["num_hidden_layers"]
        with_settings(block_count=layers + 1, nextn_predict_layers=1)(model)
    case.change(model)
    return model.write(folder / "model.gguf")
