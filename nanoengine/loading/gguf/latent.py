"""Latent attention's metadata of a GGUF file as keys of config.json: llama.cpp's deepseek2,
kimi-linear and bailingmoe3.
"""

from __future__ import annotations

from typing import Any

from nanoengine.errors import CorruptModelError
from nanoengine.loading.gguf.metadata import Metadata

LATENTS = ("bailingmoe3", "deepseek2", "kimi-linear")


def latent_settings(metadata: Metadata, num_heads: int) -> dict[str, Any]:
    """Keys of config.json that override those of other architectures.

    Files for the absorbed form have sizes of heads under keys that end in "_mla", and those of the
    latent row where older files have those of heads. Raises CorruptModelError.
    """
    arch = metadata.architecture
    key_dim, value_dim = (
        metadata.number(f"{key}_mla" if metadata.has(f"{arch}.{key}_mla") else key)
        for key in ("attention.key_length", "attention.value_length")
    )
    turned = metadata.number("rope.dimension_count")
    if turned >= key_dim:
        raise CorruptModelError(
            f"{metadata.path}: '{arch}.rope.dimension_count' is {turned}, of {key_dim} numbers of "
            "a key"
        )
    has_rank = metadata.has(f"{arch}.attention.q_lora_rank")
    return {
        "kv_lora_rank": metadata.number("attention.kv_lora_rank"),
        "num_key_value_heads": num_heads,
        "q_lora_rank": metadata.number("attention.q_lora_rank") if has_rank else None,
        "qk_nope_head_dim": key_dim - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": value_dim,
        "head_dim": turned,
    }


def score_factors(metadata: Metadata) -> dict[str, float]:
    """Keys of a YaRN scaling: llama.cpp's converter multiplies DeepSeek's factor by 0.1, and the
    same factor is of the rotation and of the scores. Raises CorruptModelError.
    """
    mscale = round(10 * metadata.real("rope.scaling.yarn_log_multiplier"), 8)
    return {"mscale": mscale, "mscale_all_dim": mscale}
