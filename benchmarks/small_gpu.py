"""`python -m benchmarks.small_gpu`: the table of docs/small_gpu.md, from the plan's arithmetic.

Measures nothing: speeds follow from the bandwidths in CARDS, and the page says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from nanoengine.config.engine import GIB, make_config
from nanoengine.config.model import ExpertsConfig, ModelConfig, RecurrentConfig, RopeConfig
from nanoengine.loading.stored_weights import StoredWeights
from nanoengine.models.make_codes import EMBEDDINGS
from nanoengine.startup.forecast import Forecast, Forecaster, Hardware
from nanoengine.startup.plan import gib_up
from nanoengine.startup.weight_bytes import layer_matrices

# Name -> GiB of memory, GB/s at which it is read.
CARDS = {"16 GB": (16, 500.0), "24 GB": (24, 900.0)}
LINK_GB_PER_S = 25.0  # PCIe 4 x16
RAM_GIB = 64
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_layers"),
    *("num_heads", "num_kv_heads", "head_dim", "max_position"),
)
CONTEXTS = (32_000, 64_000, 100_000, 131_072)


def shape(architecture: str, sizes: tuple[int, ...], theta: float, **more: Any) -> ModelConfig:
    """sizes: of SIZES."""
    fields: dict[str, Any] = dict(zip(SIZES, sizes, strict=True)) | {"rope": RopeConfig(theta)}
    usual = {"rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    return ModelConfig(architecture, **(fields | usual | more))


LLAMA_8B = shape("LlamaForCausalLM", (128256, 4096, 14336, 32, 32, 8, 128, 131072), theta=500000.0)
LLAMA_3B = shape(
    "LlamaForCausalLM",
    (128256, 3072, 8192, 28, 24, 8, 128, 131072),
    theta=500000.0,
    tie_word_embeddings=True,
)
QWEN3_30B_A3B = shape(
    "Qwen3MoeForCausalLM",
    (151936, 2048, 6144, 48, 32, 4, 128, 262144),
    theta=10000000.0,
    rms_norm_eps=1e-6,
    experts=ExpertsConfig(128, 8, 768, renormalises=True),
)
GPT_OSS_20B = shape(
    "GptOssForCausalLM",
    (201088, 2880, 2880, 24, 64, 8, 64, 131072),
    theta=150000.0,
    windows=tuple(128 if layer % 2 == 0 else None for layer in range(24)),
    experts=ExpertsConfig(32, 4, 2880, renormalises=True, has_bias=True),
    codes="MXFP4",
)
QWEN3_6_27B = shape(
    "Qwen3_5ForCausalLM",
    (248320, 5120, 17408, 64, 24, 4, 256, 262144),
    theta=10000000.0,
    rms_norm_eps=1e-6,
    recurrent=RecurrentConfig(tuple(i for i in range(64) if i % 4 != 3), 16, 48, 128, 128, 4),
)


def q4_k_m(model: ModelConfig) -> StoredWeights:
    """As llama.cpp's Q4_K_M has a model: v and down of about half of the layers are Q6_K, and so is
    the head; what is qkv in one is Q5_K.
    """
    num, forms = model.num_layers, {EMBEDDINGS: "Q4_K", "lm_head.weight": "Q6_K"}
    for name in layer_matrices(model):
        layer = int(name.split(".")[2])
        is_at_an_end = layer < num // 8 or layer >= 7 * num // 8
        has_more_bits = is_at_an_end or (layer - num // 8) % 3 == 2
        is_one = name.endswith(("v_proj.weight", "down_proj.weight"))
        usual = "Q5_K" if name.endswith("_qkv.weight") else "Q4_K"
        forms[name] = "Q6_K" if is_one and has_more_bits else usual
    return StoredWeights(forms, is_gguf=True)


def q3_k_m(model: ModelConfig) -> StoredWeights:
    """As llama.cpp's Q3_K_M has a model: what attention gives, down and qkv in one are Q4_K, in the
    first layers Q5_K, and the head is Q6_K.
    """
    forms = {EMBEDDINGS: "Q3_K", "lm_head.weight": "Q6_K"}
    ends = ("v_proj.weight", "o_proj.weight", "down_proj.weight", "_qkv.weight")
    for name in layer_matrices(model):
        layer = int(name.split(".")[2])
        is_first = layer < 2 if name.endswith("v_proj.weight") else layer < model.num_layers // 16
        has_more_bits = is_first and name.endswith(("v_proj.weight", "down_proj.weight"))
        forms[name] = "Q5_K" if has_more_bits else "Q4_K" if name.endswith(ends) else "Q3_K"
    return StoredWeights(forms, is_gguf=True)


@dataclass(frozen=True)
class Model:
    """A model as its weights are held, and the cards that it is shown for."""

    name: str
    shape: ModelConfig
    cards: tuple[str, ...]
    stored: Callable[[ModelConfig], StoredWeights] | None = None
    contexts: tuple[int, ...] = CONTEXTS


ROWS = (
    Model("Llama 3.2 3B, bfloat16", LLAMA_3B, ("16 GB",)),
    Model("Llama 3.1 8B, Q4_K_M", LLAMA_8B, ("16 GB", "24 GB"), q4_k_m),
    Model("gpt-oss 20B, MXFP4", GPT_OSS_20B, ("16 GB", "24 GB")),
    Model("Llama 3.1 8B, bfloat16", LLAMA_8B, ("24 GB",)),
    Model("Qwen3 30B-A3B 2507, Q4_K_M", QWEN3_30B_A3B, ("24 GB",), q4_k_m),
    Model("Qwen3.6 27B, Q3_K_M", QWEN3_6_27B, ("16 GB",), q3_k_m),
    Model("Qwen3.6 27B, Q4_K_M", QWEN3_6_27B, ("24 GB",), q4_k_m, (*CONTEXTS, 262_144)),
)


def table() -> Iterator[str]:
    """The lines of the table in Markdown."""
    yield "| GPU | model | tokens | on the GPU | RAM | int8 RAM | tok/s | tok/s with int8 RAM |"
    yield "|---|---|---|---|---|---|---|---|"
    for model in ROWS:
        for card in model.cards:
            for context in model.contexts:
                yield _row(card, model, context)


def _row(card: str, model: Model, context: int) -> str:
    plain = forecast(card, model, context)
    kv = plain.plan.kv
    start = f"| {card} | {model.name} | {context:,} | {kv.num_blocks * kv.block_size:,} |"
    if not kv.num_host_blocks:
        return f"{start} 0 | | {plain.tokens_per_s:.1f} | |"
    small = forecast(card, model, context, "int8")
    gib, small_gib = (gib_up(made.plan.kv.host_bytes_for(context)) for made in (plain, small))
    speeds = f"{plain.tokens_per_s:.1f} | {small.tokens_per_s:.1f}"
    return f"{start} {gib:.1f} GiB | {small_gib:.1f} GiB | {speeds} |"


def forecast(card: str, model: Model, context: int, kv_dtype: str | None = None) -> Forecast:
    """What the plan says of a model on a card."""
    gib, read_gb_per_s = CARDS[card]
    hardware = Hardware(gib * GIB, RAM_GIB * GIB, read_gb_per_s, LINK_GB_PER_S)
    stored = model.stored(model.shape) if model.stored else None
    settings = {"quantization": "gguf" if stored else None, "kv_offload_dtype": kv_dtype}
    config = make_config("shapes", settings)
    made = Forecaster(config, model.shape, hardware, stored).forecast(context)
    assert not made.refusal, made.refusal
    return made


if __name__ == "__main__":
    print("\n".join(table()))
