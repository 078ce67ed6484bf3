"""`python -m benchmarks.small_gpu`: the table of docs/small_gpu.md, from the plan's arithmetic.

Measures nothing: speeds follow from the bandwidths in CARDS, and the page says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nanoengine.config.engine import GIB, make_config
from nanoengine.config.model import ModelConfig, RopeConfig
from nanoengine.startup.forecast import Forecast, Forecaster, Hardware
from nanoengine.startup.plan import gib_up

# Name -> GiB of memory, GB/s at which it is read.
CARDS = {"16 GB": (16, 500.0), "24 GB": (24, 900.0)}
LINK_GB_PER_S = 25.0  # PCIe 4 x16
RAM_GIB = 64
CONTEXTS = (32_000, 64_000, 100_000, 131_072)
LLAMA_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    max_position=131072,
    tie_word_embeddings=False,
    rope=RopeConfig(500000.0),
)
LLAMA_3B = replace(
    LLAMA_8B,
    hidden_size=3072,
    intermediate_size=8192,
    num_layers=28,
    num_heads=24,
    tie_word_embeddings=True,
)
# Name, shape, quantization of the weights, cards.
ROWS = (
    ("Llama 3.2 3B, bfloat16", LLAMA_3B, None, ("16 GB",)),
    ("Llama 3.1 8B, int8", LLAMA_8B, "int8", ("16 GB", "24 GB")),
    ("Llama 3.1 8B, bfloat16", LLAMA_8B, None, ("24 GB",)),
)


def table() -> Iterator[str]:
    """The lines of the table in Markdown."""
    yield "| GPU | model | tokens | on the GPU | RAM | int8 RAM | tok/s | tok/s with int8 RAM |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, model, quantization, cards in ROWS:
        for card in cards:
            for context in CONTEXTS:
                yield _row(card, name, model, quantization, context)


def _row(card: str, name: str, model: ModelConfig, quantization: str | None, context: int) -> str:
    plain = forecast(card, model, quantization, context)
    kv = plain.plan.kv
    start = f"| {card} | {name} | {context:,} | {kv.num_blocks * kv.block_size:,} |"
    if not kv.num_host_blocks:
        return f"{start} 0 | | {plain.tokens_per_s:.1f} | |"
    small = forecast(card, model, quantization, context, "int8")
    gib, small_gib = (gib_up(made.plan.kv.host_bytes_for(context)) for made in (plain, small))
    speeds = f"{plain.tokens_per_s:.1f} | {small.tokens_per_s:.1f}"
    return f"{start} {gib:.1f} GiB | {small_gib:.1f} GiB | {speeds} |"


def forecast(
    card: str,
    model: ModelConfig,
    quantization: str | None,
    context: int,
    kv_offload_dtype: str | None = None,
) -> Forecast:
    """What the plan says of a model on a card."""
    gib, read_gb_per_s = CARDS[card]
    hardware = Hardware(gib * GIB, RAM_GIB * GIB, read_gb_per_s, LINK_GB_PER_S)
    settings = {"quantization": quantization, "kv_offload_dtype": kv_offload_dtype}
    made = Forecaster(make_config("shapes", settings), model, hardware).forecast(context)
    assert not made.refusal, made.refusal
    return made


if __name__ == "__main__":
    print("\n".join(table()))
