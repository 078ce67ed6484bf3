"""Rotary position embedding (arXiv 2104.09864): what angle turns which pair at which position.

Knows RopeConfig; layer_ops.py turns the pairs. The scalings are transformers'
(modeling_rope_utils.py), except that what it chooses anew from the tokens of each call is here
chosen once, from the most tokens that a request may have: KV that is kept must not go stale, and
no answer may depend on how prompts are cut up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nanoengine.config import RopeConfig


class Rotary:
    """The angles of a step, for each kind of layer; a kind None leaves q and k as they are."""

    def __init__(
        self, kinds: Sequence[RopeConfig | None], head_dim: int, device: torch.device
    ) -> None:
        """kinds: as layers name them by their place."""
        # [kinds, 1, head_dim / 2] each
        self._inv_freq = torch.stack([_frequencies(k, head_dim) for k in kinds]).to(device)[:, None]
        self._scale: Tensor | None = None
        if any(kind is not None and kind.attention_factor != 1.0 for kind in kinds):
            self._scale = torch.stack([_scale(k, head_dim) for k in kinds]).to(device)[:, None]

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, fp32 [kinds, tokens, 1, head_dim / 2]; computed once a step."""
        angles = positions.float().unsqueeze(1) * self._inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self._scale is not None:
            cos, sin = cos * self._scale, sin * self._scale
        return cos.unsqueeze(2), sin.unsqueeze(2)


def turned_pairs(rope: RopeConfig, head_dim: int) -> int:
    """Pairs of a head that are turned; those after them are left as they are."""
    return int(head_dim * rope.turned) // 2


def head_order(rope: RopeConfig, head_dim: int) -> Tensor | None:
    """Dimensions of a stored q or k head in the order in which (i, i + head_dim / 2) are its pairs.

    A checkpoint whose heads are turned in part has its pairs side by side in the turned part,
    (i, i + turned / 2); the same order in q and in k changes no product of the two. None: as
    stored.
    """
    pairs = turned_pairs(rope, head_dim)
    if 2 * pairs == head_dim:
        return None
    first, second, rest = torch.arange(head_dim).tensor_split((pairs, 2 * pairs))
    rest_first, rest_second = rest.chunk(2)
    return torch.cat((first, rest_first, second, rest_second))


def inverse_frequencies(rope: RopeConfig, dim: int) -> Tensor:
    """Radians a position of each pair, fp32 [dim / 2]; dim is the turned part of a head."""
    return _KINDS[rope.kind](rope, dim)


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """What YaRN multiplies cos and sin with (arXiv 2309.00071, 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def longrope_attention_factor(factor: float, original_max_position: int) -> float:
    """What LongRoPE multiplies cos and sin with (arXiv 2402.13753, as Phi-3 has it)."""
    if factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original_max_position))


def _frequencies(rope: RopeConfig | None, head_dim: int) -> Tensor:
    """[head_dim / 2], 0 for pairs that are not turned: cos is 1 and sin 0, exactly."""
    padded = torch.zeros(head_dim // 2)
    if rope is not None:
        pairs = turned_pairs(rope, head_dim)
        padded[:pairs] = inverse_frequencies(rope, 2 * pairs)
    return padded


def _scale(rope: RopeConfig | None, head_dim: int) -> Tensor:
    scale = torch.ones(head_dim // 2)
    if rope is not None:
        scale[: turned_pairs(rope, head_dim)] = rope.attention_factor
    return scale


def _default(rope: RopeConfig, dim: int) -> Tensor:
    return 1.0 / _wavelengths(rope.theta, dim)


def _wavelengths(theta: float, dim: int) -> Tensor:
    """Over 2 pi: theta^(2i / dim)."""
    exponents: Tensor = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    return theta**exponents


def _linear(rope: RopeConfig, dim: int) -> Tensor:
    """Positions divided by `factor`."""
    return _default(rope, dim) / rope.factor


def _llama3(rope: RopeConfig, dim: int) -> Tensor:
    """Llama 3.1's scaling: long waves are stretched by `factor`, short ones kept, a ramp in
    between.
    """
    inv_freq = _default(rope, dim)
    wavelength = 2 * math.pi / inv_freq
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    ramp = rope.original_max_position / wavelength - rope.low_freq_factor
    smooth = ramp / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq
    stretched = torch.where(wavelength > longest, inv_freq / rope.factor, blended)
    return torch.where(wavelength < shortest, inv_freq, stretched)


def _dynamic(rope: RopeConfig, dim: int) -> Tensor:
    """NTK scaling: a base that grows with `length`, once that is past the original positions.

    transformers takes the longest of a call for it; here it is the same in the whole run.
    """
    original = rope.original_max_position
    length = max(rope.length, original)
    growth = (rope.factor * length / original) - (rope.factor - 1)
    return 1.0 / _wavelengths(rope.theta * growth ** (dim / (dim - 2)), dim)


def _yarn(rope: RopeConfig, dim: int) -> Tensor:
    """YaRN (arXiv 2309.00071): pairs that turn `beta_fast` times and more within the original
    positions are kept, those that turn `beta_slow` times and less are stretched by `factor`, a
    ramp over the pairs in between; its ends are whole pairs if `truncate`.
    """

    def pair(turns: float) -> float:
        size = math.log(rope.original_max_position / (turns * 2 * math.pi))
        return dim * size / (2 * math.log(rope.theta))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    wavelengths = _wavelengths(rope.theta, dim)
    kept = 1 - ramp
    return 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _longrope(rope: RopeConfig, dim: int) -> Tensor:
    """LongRoPE (arXiv 2402.13753): each pair stretched by a divisor that was searched for.

    Which of a checkpoint's two lists they are is chosen when it is read, see rope_json.py.
    """
    return 1.0 / (torch.tensor(rope.divisors, dtype=torch.float32) * _wavelengths(rope.theta, dim))


_KINDS: dict[str, Callable[[RopeConfig, int], Tensor]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
}
ROPE_KINDS = tuple(_KINDS)
