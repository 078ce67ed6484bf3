"""A tiny checkpoint written as a GGUF, by other code than the engine reads it with."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from coded import any_quantize
from gguf import GGMLQuantizationType as QuantType
from gguf_families import (
    LING,
    MUSE,
    norms_of_muse,
    of_cohere_experts,
    of_ling,
    of_muse,
    usual_name_of_ling,
)
from gguf_mamba import (
    FALCON,
    NEMOTRONS,
    WITH_MAMBA,
    mamba_changed,
    mamba_file_settings,
    nemotron_kind,
    usual_keys,
    with_multipliers,
)
from tokenizers import pre_tokenizers

from nanoengine.loading.checkpoint import CheckpointReader

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
CONTROL, USER_DEFINED = 3, 4
EXPERT_NAMES = {"gate": "ffn_gate_exps", "up": "ffn_up_exps", "down": "ffn_down_exps"}
MIXTRAL_NAMES = {"w1": "gate", "w3": "up", "w2": "down"}
# What converters rename before they ask the map.
RENAMED = {
    ".dt_bias": ".dt_proj.bias",
    ".e_score_correction_bias": ".e_score_correction.bias",
    ".expert_bias": ".expert_bias.bias",
    ".layer_scalar": ".layer_scalar.weight",
    ".sinks": ".sinks.weight",
}
# What they name without it.
UNMAPPED = {
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "final_layernorm.weight": "layer_output_norm.weight",
    **{
        f"shared_mlp.{part}_proj.weight": f"{name.removesuffix('exps')}shexp.weight"
        for part, name in EXPERT_NAMES.items()
    },
}
INTERLEAVED = ("arcee", "granite", "granitemoe", "llama", "mistral3", "smollm3")
INTERLEAVED += ("granitehybrid", "minicpm", MUSE, *NEMOTRONS)
WITH_NORM_OFFSET = ("gemma", "gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe", "qwen3next")
ARCHITECTURES = {
    "AfmoeForCausalLM": "afmoe",
    "ApertusForCausalLM": "apertus",
    "ArceeForCausalLM": "arcee",
    "BailingMoeV2ForCausalLM": "bailingmoe2",
    "BailingMoeV3ForCausalLM": LING,
    "Cohere2ForCausalLM": "cohere2",
    "Cohere2MoeForCausalLM": "cohere2moe",
    "CohereForCausalLM": "command-r",
    **dict.fromkeys(("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"), "deepseek2"),
    **dict.fromkeys(("Glm4MoeLiteForCausalLM", "YoutuForCausalLM"), "deepseek2"),
    "Dots1ForCausalLM": "dots1",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Ernie4_5_MoeForCausalLM": "ernie4_5-moe",
    "Exaone4ForCausalLM": "exaone4",
    "ExaoneForCausalLM": "exaone",
    "ExaoneMoeForCausalLM": "exaone-moe",
    "FalconH1ForCausalLM": FALCON,
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4UnifiedForCausalLM": "gemma4",
    "Glm4ForCausalLM": "glm4",
    "LagunaForCausalLM": "laguna",
    **dict.fromkeys(("Glm4MoeForCausalLM", "SolarOpenForCausalLM"), "glm4moe"),
    "GptOssForCausalLM": "gpt-oss",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeHybridForCausalLM": "granitehybrid",
    "GraniteMoeSharedForCausalLM": "granitemoe",
    "HunYuanDenseV1ForCausalLM": "hunyuan-dense",
    "HunYuanMoEV1ForCausalLM": "hunyuan-moe",
    **dict.fromkeys(("InternLM3ForCausalLM", "IQuestCoderForCausalLM"), "llama"),
    "Jais2ForCausalLM": "jais2",
    "KimiLinearForCausalLM": "kimi-linear",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2moe",
    "LlamaForCausalLM": "llama",
    "MellumForCausalLM": "mellum",
    "MiniCPMForCausalLM": "minicpm",
    "MiniMaxM2ForCausalLM": "minimax-m2",
    "Ministral3ForCausalLM": "mistral3",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "MuseGlimmerForCausalLM": MUSE,
    "NemotronForCausalLM": "nemotron",
    "NemotronHForCausalLM": "nemotron_h",
    **dict.fromkeys(("Olmo2ForCausalLM", "Olmo3ForCausalLM"), "olmo2"),
    "OlmoeForCausalLM": "olmoe",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Qwen3NextForCausalLM": "qwen3next",
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "StableLmForCausalLM": "stablelm",
    "Starcoder2ForCausalLM": "starcoder2",
}
# Of architectures that this release of gguf does not know, those with most of their names.
LIKE = {
    "cohere2moe": "cohere2",
    LING: "kimi-linear",
    "laguna": "llama",
    "mellum": "qwen3moe",
    MUSE: "gemma3",
}
# Keys of an eps, as in conversion/base.py.
LAYER_NORMS = dict.fromkeys(
    ("jais2", "nemotron", "stablelm", "starcoder2"), ("layer_norm_eps", "norm_epsilon", "norm_eps")
)
YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 64, "yarn_beta_fast": 2.0}
SCALINGS: dict[str, dict[str, Any]] = {
    "afmoe": {},
    "arcee": YARN,
    "exaone-moe": {"type": "none"},
    "exaone4": {},
    "gemma3": {},
    "gpt-oss": YARN,
    "mellum": YARN,
    "ministral3": YARN
    | {"factor": 32.0, "original_context_length": 16, "yarn_log_multiplier": 1.0},
    "mistral-window": {},
    "mixtral": {},
    "olmo3": YARN | {"yarn_attn_factor": 1.0 + 0.1 * math.log(4.0)},
    "phi3": {"original_context_length": 512, "attn_factor": 1.2},
    "qwen2": YARN,
    "smollm3": {},
}
WITH_WINDOWS = (
    "afmoe",
    "exaone-moe",
    "exaone4",
    "gemma3",
    "gpt-oss",
    "mellum",
    "mistral-window",
    "mixtral",
    "olmo3",
)


class Names:
    """llama.cpp's names of Hugging Face tensors, by the maps of its converters: that of an
    architecture, Llama's for dense layers among others, and GLM's for multi-token prediction.
    """

    def __init__(self, arch: str, num_layers: int) -> None:
        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        # Trinity has a gate that others have, too.
        first = kinds[LIKE.get(arch, arch)]
        asked = [first, gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.AFMOE, gguf.MODEL_ARCH.GLM4_MOE]
        self._maps = [gguf.get_tensor_name_map(kind, num_layers) for kind in asked]

    def __getitem__(self, name: str) -> str:
        """Raises KeyError for a tensor that no map has."""
        if name.startswith("model.layers."):
            _, _, layer, part = name.split(".", 3)
            if part in UNMAPPED:
                return f"blk.{layer}.{UNMAPPED[part]}"
        for end, renamed in RENAMED.items():
            if name.endswith(end):
                name = name.removesuffix(end) + renamed
        for each in (name, name.replace("block_sparse_moe", "mlp")):
            for names in self._maps:
                if found := names.get_name(each, (".weight", ".bias")):
                    return str(found)
        raise KeyError(name)


def _by_number(name: str) -> list[str]:
    """Order in which 2 comes before 10."""
    return [part.zfill(6) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def interleaved(values: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Rows of q or k as llama.cpp stores them: a head's two halves, row beside row."""
    rows = []
    head_dim = len(values) // num_heads
    for head in range(num_heads):
        for i in range(head_dim // 2):
            rows += [values[head * head_dim + i], values[head * head_dim + head_dim // 2 + i]]
    return np.stack(rows)


class GGUFModel:
    """A checkpoint folder written as a GGUF, with every part open to change before `write`."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        name = self.config["architectures"][0]
        self.arch = ARCHITECTURES[name.replace("ForConditionalGeneration", "ForCausalLM")]
        self.config |= self.config.get("text_config", {})
        if self.arch in NEMOTRONS:
            self.arch = nemotron_kind(self.config)
            self.config |= usual_keys(self.config)
        if self.arch in ("kimi-linear", LING):
            self.config |= _usual_keys_of_kimi(self.config)
        if self.arch in ("afmoe", "exaone-moe"):
            self.config["n_shared_experts"] = self.config["num_shared_experts"]
        if self.arch == "afmoe":
            self.config |= {
                "first_k_dense_replace": self.config["num_dense_layers"],
                "routed_scaling_factor": self.config["route_scale"],
                **{"n_group": None, "topk_group": None, "norm_topk_prob": True},
            }
        self.types: dict[str, QuantType] = {}
        self.alignment: int | None = None
        self.names = Names(self.arch, self.config["num_hidden_layers"] + 1)
        self.tensors = self._tensors(folder)
        if self.arch == "gemma4":
            full = self.config["rope_parameters"]["full_attention"]
            pairs = _of_gemma4(self.config)["gemma4.attention.key_length"] // 2
            divisors = np.full(pairs, 1e30, np.float32)
            divisors[: int(pairs * full["partial_rotary_factor"])] = 1
            self.tensors["rope_freqs.weight"] = divisors
        self.settings = self._settings()
        if self.arch == "apertus":
            _take_activations_out(self)
        if self.arch.startswith("hunyuan"):
            _scale_theta(self)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        alphabet[alphabet.index("ÿ")] = "ab"  # a merge; the byte 255 is in no text
        padding = [f"[PAD{i}]" for i in range(self.config["vocab_size"] - len(SPECIAL) - 256)]
        self.tokens = [*SPECIAL, *alphabet, *padding]
        self.token_types = [CONTROL] * len(SPECIAL) + [1] * (len(self.tokens) - len(SPECIAL))

    def _tensors(self, folder: Path) -> dict[str, npt.NDArray[Any]]:
        tensors = {}
        names = self.names
        with CheckpointReader(folder) as reader:
            for name in sorted(reader.names(), key=_by_number):
                if ".vision_" in name:
                    continue
                values = reader.tensor(name).float().numpy().copy()
                name = name.replace("model.language_model.", "model.")
                if self.arch == FALCON:
                    values = with_multipliers(self.config, name, values)
                if self.arch in WITH_MAMBA and not re.search(r"_proj\.|moe\.\w+_linear", name):
                    changed = mamba_changed(self.config, name, values)
                    tensors |= {names[each]: v for each, v in changed.items()}
                    continue
                if name.endswith("shared_mlp.input_linear.weight"):
                    layer = name.split(".")[2]
                    gate, up = np.split(values, 2)
                    tensors |= {f"blk.{layer}.ffn_gate_shexp.weight": gate}
                    tensors |= {f"blk.{layer}.ffn_up_shexp.weight": up}
                    continue
                for ours, theirs in (("input", "gate_up"), ("output", "down")):
                    linear = f"block_sparse_moe.{ours}_linear.weight"
                    name = name.replace(linear, f"block_sparse_moe.experts.{theirs}_proj")
                name = name.replace("experts.e_score", "gate.e_score")  # Laguna's
                if ".experts." in name:
                    self._add_expert(tensors, name, values)
                    continue
                if ".conv.conv.weight" in name:
                    values = values.squeeze(1)
                if self.arch == LING:
                    name = usual_name_of_ling(self.config, name)
                if name.endswith("self_attn.A_log"):
                    values = np.exp(values).reshape(-1, 1) if self.arch == LING else -np.exp(values)
                if "_conv1d." in name:  # as conversion/kimi_linear.py has it
                    values = values.reshape(1, len(values), 1, -1)
                if ".linear_attn." in name:
                    changed = self._recurrent(name, values)
                    tensors |= {names[each]: v for each, v in changed.items()}
                    continue
                if self.arch in WITH_NORM_OFFSET and name.endswith("norm.weight"):
                    values += 1
                if self.arch == MUSE and name.endswith("layernorm.weight"):
                    values += 1
                if self.arch in INTERLEAVED and (".q_proj." in name or ".k_proj." in name):
                    heads = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
                    values = interleaved(values, self.config[heads])
                if ".act_fn." in name:
                    tensors[name] = values
                    continue
                tensors[names[name]] = values
        if self.arch == MUSE:
            tensors |= norms_of_muse(self.config)
        for name in [name for name, values in tensors.items() if isinstance(values, list)]:
            tensors[name] = np.stack(tensors[name])  # one by one: they may be many
        return tensors

    def _recurrent(self, name: str, values: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
        """A tensor of a recurrent layer as llama.cpp's converter for Qwen changes it
        (Qwen3NextModel and _LinearAttentionVReorderBase in its conversion/qwen.py).
        """
        keys, heads = (self.config[f"linear_num_{kind}_heads"] for kind in ("key", "value"))
        key_dim, dim = (self.config[f"linear_{kind}_head_dim"] for kind in ("key", "value"))
        prefix, _, part = name.partition("linear_attn.")
        if part == "in_proj_qkvz.weight":
            kinds: list[list[npt.NDArray[Any]]] = [[], [], [], []]
            each = heads // keys * dim
            for of_key_head in np.split(values, keys):
                ends = np.cumsum([key_dim, key_dim, each])
                for kind, rows in zip(kinds, np.split(of_key_head, ends), strict=True):
                    kind.append(rows)
            q, k, v, z = (np.concatenate(kind) for kind in kinds)
            whole = {"in_proj_qkv.weight": np.concatenate((q, k, v)), "in_proj_z.weight": z}
            return {f"{prefix}linear_attn.{each}": rows for each, rows in whole.items()}
        if part == "A_log":
            values = -np.exp(values)
        if part == "conv1d.weight":
            values = values.squeeze(1)
        if self.arch != "qwen3next":
            size = (
                1 if part in ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight") else dim
            )
            # The second value head of every key head comes after the first of all.
            turns = [g * heads // keys + j for j in range(heads // keys) for g in range(keys)]
            order = [head * size + i for head in turns for i in range(size)]
            first = 2 * keys * key_dim
            if part == "out_proj.weight":
                values = values[:, order]
            elif part in ("in_proj_qkv.weight", "conv1d.weight"):
                values = np.concatenate((values[:first], values[first:][order]))
            elif part != "norm.weight":
                values = values[order]
        return {name: np.ascontiguousarray(values)}

    def _add_expert(self, tensors: dict[str, Any], name: str, values: npt.NDArray[Any]) -> None:
        """A tensor of one expert, or a fused one of all of a layer; names arrive sorted."""
        layer, rest = name.split(".")[2], name.partition(".experts.")[2].split(".")
        if self.arch == "gemma4":
            part = rest[0].removesuffix("_proj")
            tensors[f"blk.{layer}.ffn_{part}_exps.weight"] = values
            return
        if self.arch == "gpt-oss":
            part, _, is_bias = rest[0].partition("_proj")
            values = values if is_bias else values.swapaxes(1, 2)
            parts = {"down": values}
            if part == "gate_up":  # they take turns
                parts = {"gate": values[:, ::2], "up": values[:, 1::2]}
            kind = "bias" if is_bias else "weight"
            tensors |= {
                f"blk.{layer}.{EXPERT_NAMES[p]}.{kind}": np.ascontiguousarray(v)
                for p, v in parts.items()
            }
            return
        if len(rest) == 1:
            parts = {rest[0].removesuffix("_proj"): values}
            if rest[0] == "gate_up_proj":
                parts = dict(zip(("gate", "up"), np.split(values, 2, axis=1), strict=True))
            tensors |= {f"blk.{layer}.{EXPERT_NAMES[p]}.weight": v for p, v in parts.items()}
            return
        part = MIXTRAL_NAMES.get(rest[1], rest[1].removesuffix("_proj"))
        stacked = f"blk.{layer}.{EXPERT_NAMES[part]}.weight"
        before = tensors.setdefault(stacked, [])
        assert int(rest[0]) == len(before)
        before.append(values)

    def _settings(self) -> dict[str, Any]:
        config, arch = self.config, self.arch
        rope = config["rope_parameters"]
        rope = rope.get("full_attention", rope)
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        counts = ("num_local_experts", "n_routed_experts", "num_experts")
        experts = next((config[key] for key in counts if config.get(key)), None)
        of_experts = {
            f"{arch}.expert_count": experts,
            f"{arch}.expert_used_count": config.get("num_experts_per_tok"),
            f"{arch}.expert_feed_forward_length": config.get("moe_intermediate_size"),
            f"{arch}.expert_shared_feed_forward_length": config.get(
                "shared_expert_intermediate_size", config.get("shared_intermediate_size")
            ),
        }
        if arch in ("gpt-oss", "minimax-m2"):
            of_experts[f"{arch}.expert_feed_forward_length"] = config["intermediate_size"]
        if arch == "minimax-m2":
            of_experts["minimax-m2.expert_gating_func"] = 2
        if arch == "bailingmoe2":
            of_experts["bailingmoe2.expert_shared_feed_forward_length"] = config[
                "moe_intermediate_size"
            ]
        if "n_shared_experts" in config:
            by_softmax = config["architectures"] == ["DeepseekV2ForCausalLM"]
            of_experts |= {
                f"{arch}.expert_shared_count": config["n_shared_experts"],
                f"{arch}.expert_group_count": config["n_group"],
                f"{arch}.expert_group_used_count": config["topk_group"],
                f"{arch}.expert_gating_func": 1 if by_softmax else 2,
                f"{arch}.expert_weights_norm": config.get("norm_topk_prob", False),
                f"{arch}.expert_weights_scale": float(config["routed_scaling_factor"]),
                f"{arch}.leading_dense_block_count": config.get(
                    "first_k_dense_replace", config.get("mlp_layer_types", ()).count("dense")
                ),
            }
        of_rules = {}
        if heads := config.get("linear_num_value_heads"):
            of_rules = {
                f"{arch}.ssm.conv_kernel": config["linear_conv_kernel_dim"],
                f"{arch}.ssm.state_size": config["linear_key_head_dim"],
                f"{arch}.ssm.group_count": config["linear_num_key_heads"],
                f"{arch}.ssm.time_step_rank": heads,
                f"{arch}.ssm.inner_size": heads * config["linear_value_head_dim"],
                # Those of published models have attention in every so many-th layer.
                f"{arch}.full_attention_interval": config["layer_types"].index("full_attention")
                + 1,
            }
            if arch != "qwen3next":
                pairs = int(head_dim * rope.get("partial_rotary_factor", 1)) // 2
                sections = [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0]
                of_rules[f"{arch}.rope.dimension_sections"] = sections
        return (
            (of_experts if experts else {})
            | of_rules
            | {
                f"{arch}.embedding_length": config["hidden_size"],
                f"{arch}.feed_forward_length": config["intermediate_size"],
                f"{arch}.block_count": config["num_hidden_layers"],
                f"{arch}.context_length": config["max_position_embeddings"],
                f"{arch}.attention.head_count": config["num_attention_heads"],
                f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
                f"{arch}.attention.key_length": head_dim,
                f"{arch}.attention.value_length": head_dim,
                f"{arch}.rope.dimension_count": int(
                    head_dim * rope.get("partial_rotary_factor", 1)
                ),
                f"{arch}.rope.freq_base": float(rope["rope_theta"]),
                f"{arch}.attention.layer_norm_rms_epsilon": config.get("rms_norm_eps")
                or config.get("norm_eps"),
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": "qwen2",
                "tokenizer.ggml.bos_token_id": 0,
                "tokenizer.ggml.eos_token_id": 1,
                "tokenizer.ggml.add_bos_token": True,
                "tokenizer.chat_template": "{{ messages[0]['content'] }}",
            }
            | (_of_cohere(config, arch) if "logit_scale" in config else {})
            | (of_cohere_experts(config) if arch == "cohere2moe" else {})
            | (of_muse(config) if arch == MUSE else {})
            | (of_ling(config) if arch == LING else {})
            | (_of_gemma2(config) if arch == "gemma2" else {})
            | (_of_layer_norm(config, arch) if arch in LAYER_NORMS else {})
            | (_of_gemma4(config) if arch == "gemma4" else {})
            | (_of_ernie(config) if arch == "ernie4_5-moe" else {})
            | (_of_granite(config, arch) if arch.startswith(("granite", "minicpm")) else {})
            | (_of_deepseek(config) if arch == "deepseek2" else {})
            | (_of_kimi(config) if arch == "kimi-linear" else {})
            | (_of_laguna(config, head_dim) if arch == "laguna" else {})
            | (_of_lfm2(config, arch) if arch.startswith("lfm2") else {})
            | (mamba_file_settings(config, arch) if arch in WITH_MAMBA else {})
        )

    def write(self, path: Path, **split: Any) -> Path:
        """split: of GGUFWriter, where it writes several files."""
        writer = gguf.GGUFWriter(path, self.arch, **split)
        if self.alignment is not None:
            writer.add_custom_alignment(self.alignment)
        for key, value in self.settings.items():
            self._add(writer, key, value)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.token_types)
        writer.add_token_merges(["a b"])
        for name, values in self.tensors.items():
            kind = self.types.get(name, QuantType.F32)
            writer.add_tensor(name, any_quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    @staticmethod
    def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_string(key, value)


def _of_gemma2(config: dict[str, Any]) -> dict[str, Any]:
    """What llama.cpp's converter writes of caps and windows (Gemma2Model in its gemma.py)."""
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return {
        **{f"gemma2.{key}": float(config[key]) for key in caps},
        "gemma2.attention.sliding_window": config["sliding_window"],
    }


def _of_gemma4(config: dict[str, Any]) -> dict[str, Any]:
    """What llama.cpp's converter writes of layers that differ (Gemma4Model in its gemma.py)."""
    kinds, layers = config["layer_types"], range(config["num_hidden_layers"])
    own = {int(layer): each for layer, each in config["per_layer_config"].items()}
    full = own[kinds.index("full_attention")]
    usual, num_shared = config["num_key_value_heads"], config["num_kv_shared_layers"]
    inner = config["intermediate_size"]
    wide = inner * (1 + config["use_double_wide_mlp"])
    settings = {
        "attention.head_count_kv": [
            own.get(layer, {}).get("num_key_value_heads", usual) for layer in layers
        ],
        "attention.key_length": full["head_dim"],
        "attention.value_length": full["head_dim"],
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "attention.shared_kv_layers": num_shared,
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds],
        "embedding_length_per_layer_input": config.get("hidden_size_per_layer_input", 0),
        "feed_forward_length": [
            inner if layer < len(layers) - num_shared else wide for layer in layers
        ],
        "final_logit_softcapping": config["final_logit_softcapping"] or 0.0,
        "rope.dimension_count": full["head_dim"],
        "rope.dimension_count_swa": config["head_dim"],
        "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
    }
    if config.get("enable_moe_block"):
        settings["expert_used_count"] = config["top_k_experts"]
    return {f"gemma4.{key}": value for key, value in settings.items()}


def _of_lfm2(config: dict[str, Any], arch: str) -> dict[str, Any]:
    """What llama.cpp's converter writes of convolutions and experts (conversion/lfm2.py)."""
    inner = config["intermediate_size"]
    if config.get("block_auto_adjust_ff_dim"):
        unit = config["block_multiple_of"]
        inner = int(config["block_ffn_dim_multiplier"] * int(2 * inner / 3))
        inner = unit * ((inner + unit - 1) // unit)
    heads = config["num_key_value_heads"]
    settings = {
        "attention.head_count_kv": [
            heads * (kind == "full_attention") for kind in config["layer_types"]
        ],
        "feed_forward_length": inner,
        "shortconv.l_cache": config["conv_L_cache"],
    }
    if "num_experts" in config:
        settings |= {
            "expert_gating_func": 2,
            "leading_dense_block_count": config["num_dense_layers"],
        }
    return {f"{arch}.{key}": value for key, value in settings.items()}


def _of_ernie(config: dict[str, Any]) -> dict[str, Any]:
    """What llama.cpp's converter writes of experts (Ernie4_5MoeModel in its ernie.py)."""
    settings = {
        "expert_count": config["moe_num_experts"],
        "expert_used_count": config["moe_k"],
        "interleave_moe_layer_step": config["moe_layer_interval"],
        "leading_dense_block_count": config["moe_layer_start_index"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["moe_num_shared_experts"],
        "expert_shared_feed_forward_length": config["intermediate_size"]
        // config["num_key_value_heads"],
    }
    return {f"ernie4_5-moe.{key}": value for key, value in settings.items()}


def _scale_theta(model: GGUFModel) -> None:
    """What llama.cpp's converters make of alpha and of experts (HunYuanModel and HunYuanMoEModel
    in its hunyuan.py).
    """
    rope, dim = model.config["rope_parameters"], model.config["head_dim"]
    theta = rope["rope_theta"] * rope["alpha"] ** (dim / (dim - 2))
    model.settings |= {
        f"{model.arch}.rope.freq_base": theta,
        f"{model.arch}.rope.scaling.type": "none",
        f"{model.arch}.rope.scaling.factor": 1.0,
        f"{model.arch}.rope.scaling.original_context_length": 256 * 1024,
        f"{model.arch}.context_length": 256 * 1024,
    }
    if model.arch == "hunyuan-moe":
        inner = model.config["intermediate_size"]
        sizes = {
            "expert_used_count": model.config["moe_topk"][0],
            "expert_feed_forward_length": inner,
            "expert_shared_feed_forward_length": inner,
            "expert_shared_count": 1,
        }
        model.settings |= {f"hunyuan-moe.{key}": value for key, value in sizes.items()}


def _of_cohere(config: dict[str, Any], arch: str) -> dict[str, Any]:
    """What llama.cpp's converters write (its conversion/command_r.py); newer ones also which layers
    have a window.
    """
    settings = {
        "logit_scale": config["logit_scale"],
        "rope.scaling.type": "none",
        "vocab_size": config["vocab_size"],
    }
    if arch != "cohere2moe":
        settings["attention.layer_norm_epsilon"] = config["layer_norm_eps"]
    if arch != "command-r":
        kinds = [kind == "sliding_attention" for kind in config["layer_types"]]
        settings |= {
            "attention.sliding_window": config["sliding_window"],
            "attention.sliding_window_pattern": kinds,
        }
    return {f"{arch}.{key}": value for key, value in settings.items()}


def _of_layer_norm(config: dict[str, Any], arch: str) -> dict[str, Any]:
    """In place of the eps of RMSNorm."""
    eps = next(config[key] for key in LAYER_NORMS[arch] if key in config)
    settings: dict[str, Any] = {f"{arch}.attention.layer_norm_epsilon": eps}
    if arch == "stablelm":
        settings["stablelm.use_parallel_residual"] = config["use_parallel_residual"]
    return settings


def _take_activations_out(model: GGUFModel) -> None:
    """What llama.cpp's converter does with them (ApertusModel in its apertus.py), and the RoPE of
    Llama 3 (LlamaModel.generate_extra_tensors in its llama.py).
    """
    layers = range(model.config["num_hidden_layers"])
    for part in ("alpha_n", "alpha_p", "beta", "eps"):
        values = [model.tensors.pop(f"model.layers.{i}.mlp.act_fn.{part}") for i in layers]
        model.settings[f"xielu.{part}"] = [value.item() for value in values]
    rope, dim = model.config["rope_parameters"], model.config["head_dim"]
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    turns = 8192 / waves
    share = np.clip((turns - 1) / 3, 0, 1)  # of low_freq_factor 1 and high_freq_factor 4
    divisors = 1 / ((1 - share) / rope["factor"] + share)
    model.tensors["rope_freqs.weight"] = divisors.astype(np.float32)


def _of_granite(config: dict[str, Any], arch: str) -> dict[str, Any]:
    """What llama.cpp's converter writes of factors (GraniteModel in its granite.py, MiniCPMModel in
    its minicpm.py).
    """
    scale = {} if arch == "minicpm" else {f"{arch}.attention.scale": config["attention_multiplier"]}
    return scale | {
        f"{arch}.embedding_scale": config["embedding_multiplier"],
        f"{arch}.residual_scale": config["residual_multiplier"],
        f"{arch}.logit_scale": config["logits_scaling"],
    }


def _of_deepseek(config: dict[str, Any]) -> dict[str, Any]:
    """What llama.cpp's converter writes of latents (DeepseekV2Model in its deepseek.py)."""
    rank, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
    rope = config["rope_parameters"]
    settings = {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + turned,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + turned,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": turned,
    }
    if "n_routed_experts" not in config:  # Youtu-LLM's
        settings |= {
            "expert_feed_forward_length": config["intermediate_size"],
            "expert_shared_count": 0,
            "leading_dense_block_count": config["num_hidden_layers"],
        }
    if rope["rope_type"] == "yarn":
        settings |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        }
    return {f"deepseek2.{key}": value for key, value in settings.items() if value is not None}


def _usual_keys_of_kimi(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "first_k_dense_replace": config["mlp_layer_types"].count("dense"),
        "max_position_embeddings": config["model_max_length"],
        "n_group": config["num_expert_group"],
        "n_shared_experts": config["num_shared_experts"],
        "num_experts_per_tok": config["num_experts_per_token"],
        "rope_parameters": config.get("rope_parameters") or {"rope_theta": 1e4},
    }


def _of_kimi(config: dict[str, Any]) -> dict[str, Any]:
    """What llama.cpp's converter writes of its two kinds of layers (conversion/kimi_linear.py)."""
    rank, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
    kinds = config["layer_types"]
    settings = {
        "attention.head_count_kv": [int(kind == "full_attention") for kind in kinds],
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + turned,
        "attention.key_length_mla": config["qk_nope_head_dim"] + turned,
        "attention.value_length_mla": config["v_head_dim"],
        "kda.head_dim": config["linear_head_dim"],
        "rope.dimension_count": turned,
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
    }
    return {f"kimi-linear.{key}": value for key, value in settings.items() if value is not None}


def _of_laguna(config: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """What llama.cpp's converter writes of heads, windows, rotations and experts
    (conversion/laguna.py, and of YaRN its base.py).
    """
    full, sliding = (config["rope_parameters"][f"{kind}_attention"] for kind in ("full", "sliding"))
    settings = {
        "attention.head_count": config["num_attention_heads_per_layer"],
        "attention.sliding_window": config["sliding_window"],
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": float(config["moe_routed_scaling_factor"]),
        "leading_dense_block_count": config["mlp_layer_types"].count("dense"),
        "rope.dimension_count_swa": int(head_dim * sliding.get("partial_rotary_factor", 1.0)),
        "rope.freq_base_swa": float(sliding["rope_theta"]),
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": full["factor"],
        "rope.scaling.original_context_length": full["original_max_position_embeddings"],
        "rope.scaling.yarn_attn_factor": full.get("attention_factor"),
        "rope.scaling.yarn_beta_fast": full["beta_fast"],
    }
    return {f"laguna.{key}": value for key, value in settings.items()}


def keys_and_values_apart(model: GGUFModel) -> None:
    """As newer files for the absorbed form have them: keys turned around."""
    heads, size = model.config["num_attention_heads"], model.config["qk_nope_head_dim"]
    for name in [name for name in model.tensors if name.endswith(".attn_kv_b.weight")]:
        both = model.tensors.pop(name)
        both = both.reshape(heads, -1, both.shape[1])
        model.tensors |= {
            name.replace("kv_b", "k_b"): both[:, :size].swapaxes(1, 2).copy(),
            name.replace("kv_b", "v_b"): both[:, size:].copy(),
        }


def with_scaling(model: GGUFModel, name: str) -> GGUFModel:
    """With what llama.cpp's converter writes of RoPE and windows."""
    rope = model.config["rope_parameters"]
    if model.config.get("sliding_window") and name in WITH_WINDOWS:
        model.settings[f"{model.arch}.attention.sliding_window"] = model.config["sliding_window"]
    if name in ("afmoe", "exaone-moe", "exaone4", "mellum", "olmo3"):
        kinds = [kind == "sliding_attention" for kind in model.config["layer_types"]]
        model.settings[f"{model.arch}.attention.sliding_window_pattern"] = kinds
    if "sliding_attention" in rope:
        local = rope["sliding_attention"]["rope_theta"]
        model.settings[f"{model.arch}.rope.freq_base_swa"] = float(local)
    if name == "gemma3":
        model.settings["gemma3.attention.sliding_window_pattern"] = 2
    if name == "ministral3":
        model.settings["mistral3.attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    for which in ("long", "short"):
        if f"{which}_factor" in rope:
            factors = np.array(rope[f"{which}_factor"], dtype=np.float32)
            model.tensors[f"rope_factors_{which}.weight"] = factors
    for key, value in SCALINGS[name].items():
        model.settings[f"{model.arch}.rope.scaling.{key}"] = value
    return model
