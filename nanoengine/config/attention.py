"""How scores are computed (AttentionConfig), and what each attention backend supports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Which keys a query sees and how its scores are computed, equal for every backend.

    scale: factor of the products q k; None: head_dim**-0.5. windows: for each layer with attention,
    how many keys a query sees, its own included; None: all; no entries: all in every layer.
    head_dims: of each layer if they differ; head_dim is then the largest. softcap: a scaled score s
    becomes softcap * tanh(s / softcap), before any is hidden; None: it stays.
    """

    head_dim: int
    scale: float | None = None
    windows: tuple[int | None, ...] = ()
    head_dims: tuple[int, ...] = ()
    softcap: float | None = None

    @property
    def score_scale(self) -> float:
        """The factor of the products q k."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def longest_window(self) -> int | None:
        """The longest window of all layers; None if a layer sees all keys."""
        found = [window for window in self.windows if window is not None]
        return max(found) if found and len(found) == len(self.windows) else None

    def window(self, layer: int) -> int | None:
        """The most keys that a query of this layer sees; None: all up to its own."""
        return self.windows[layer] if self.windows else None


@dataclass(frozen=True, slots=True)
class AttentionLimits:
    """Which models and settings an attention backend supports.

    dtypes: torch's names. head_dim_step, page: head_dim and kvcache_block_size must be multiples of
    these. max_head_dim: None: any. windows, softcap: whether it supports AttentionConfig's.
    """

    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    head_dim_step: int = 1
    max_head_dim: int | None = None
    page: int = 1
    windows: bool = True
    softcap: bool = True

    def unmet(self, dtype: str, block_size: int, config: AttentionConfig) -> str:
        """The first limit that is not met, with the value that breaks it; "" if all are met."""
        most, step = self.max_head_dim, self.head_dim_step
        if any(config.windows) and not self.windows:
            return "layers that see all keys, and this model has a sliding window"
        if config.softcap is not None and not self.softcap:
            return f"scores without a softcap, and this model has one of {config.softcap:g}"
        if dtype not in self.dtypes:
            return f"{' or '.join(self.dtypes)}, not {dtype}"
        for head_dim in (*config.head_dims, config.head_dim):
            if head_dim % step or (most is not None and head_dim > most):
                limit = "" if most is None else f" up to {most}"
                return f"a head_dim that is a multiple of {step}{limit}, not {head_dim}"
        if block_size % self.page:
            return f"kvcache_block_size to be a multiple of {self.page}, not {block_size}"
        return ""


_FLASH = AttentionLimits(
    ("bfloat16", "float16"),
    head_dim_step=8,
    max_head_dim=256,
    page=256,
    windows=False,
    softcap=False,
)
# Keys are values of attention_backend. Each backend returns its log-sum-exp, so that results of
# chunks can be merged, or carries its softmax state from chunk to chunk.
ATTENTION_LIMITS = {
    "flash-attn": _FLASH,
    "varlen": _FLASH,
    "triton": AttentionLimits(),
    "ascend": AttentionLimits(
        ("bfloat16", "float16"),
        head_dim_step=128,
        max_head_dim=128,
        page=128,
        windows=False,
        softcap=False,
    ),
    "sdpa": AttentionLimits(head_dim_step=8, windows=False, softcap=False),
    "c": AttentionLimits(("float32", "bfloat16")),
    "torch": AttentionLimits(),
}
