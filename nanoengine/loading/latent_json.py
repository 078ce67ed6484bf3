"""Reads the multi-head latent attention of a config.json."""

from __future__ import annotations

import math

from nanoengine.config.model import LatentConfig
from nanoengine.errors import UnsupportedModelError
from nanoengine.models.rope import yarn_attention_factor
from nanoengine.text.checked_json import CheckedJson, positive

SHARE = "partial_rotary_factor"


def read_latent(content: CheckedJson, num_heads: int) -> LatentConfig:
    """Raises UnsupportedModelError for sizes that cannot be halved, or fewer KV heads than heads,
    which mean nothing here.
    """
    latent = LatentConfig(
        q_rank=0 if content.get("q_lora_rank") is None else content.size("q_lora_rank"),
        kv_rank=content.size("kv_lora_rank"),
        rope_dim=content.size("qk_rope_head_dim"),
        nope_dim=content.size("qk_nope_head_dim"),
        value_dim=content.size("v_head_dim", content.size("hidden_size") // num_heads),
        takes_turns=content.get("rope_interleave") is not False,
    )
    kv_heads = content.size("num_key_value_heads", num_heads)
    if latent.kv_rank % 2 or latent.rope_dim % 2 or kv_heads != num_heads:
        raise UnsupportedModelError(
            f"{content.path}: 'kv_lora_rank' is {latent.kv_rank}, 'qk_rope_head_dim' "
            f"{latent.rope_dim}, and {num_heads} heads have {kv_heads} KV heads; the first two "
            "must be even, and the others equal"
        )
    return latent


def leave_out_share(content: CheckedJson, latent: LatentConfig) -> None:
    """Remove RoPE's share of a head that turns, where it says what `qk_rope_head_dim` says."""
    rope = content.get("rope_parameters")
    if not isinstance(rope, dict) or not isinstance(share := rope.get(SHARE), int | float):
        return
    if math.isfinite(share) and int(latent.query_dim * share) == latent.rope_dim:
        content.values["rope_parameters"] = {key: rope[key] for key in rope if key != SHARE}


def latent_scalar(content: CheckedJson, latent: LatentConfig, is_plain: bool) -> float:
    """ModelConfig's query_pre_attn_scalar: the size of a head's query; YaRN with `mscale_all_dim`
    multiplies the scores by the square of its factor, too, unless is_plain.
    """
    if is_plain:
        return float(latent.query_dim)
    scaling = content.get("rope_scaling") or content.get("rope_parameters") or {}
    scale = 1.0
    if scaling.get("mscale_all_dim"):
        numbers = [
            positive(content.path, f"RoPE {key}", scaling.get(key))
            for key in ("factor", "mscale_all_dim")
        ]
        scale = yarn_attention_factor(*numbers)
    return latent.query_dim / scale**4
