"""Rotary position embedding (arXiv 2104.09864): the angle of each pair at each position.

Knows RopeConfig; layer_ops.py rotates the pairs. The scalings are those of transformers
(modeling_rope_utils.py), with one difference: transformers chooses some numbers anew from the
tokens of each call. Here they are chosen once, from the most tokens that a request may have: stored
KV stays valid, and no result depends on how prompts are split into chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nanoengine.config.model import RopeConfig

Angles = tuple[Tensor, ...]  # cos and sin of q and k, and perhaps of a second rotation of q


class Rotary:
    """The angles of a step, for each kind of layer. Kind None does not rotate q and k."""

    def __init__(
        self,
        kinds: Sequence[RopeConfig | None],
        head_dim: int,
        device: torch.device,
        has_none: bool = False,
    ) -> None:
        """kinds: a layer names its kind by the index. has_none: angles have those of no rotation
        beside each kind's.
        """
        self._has_none = has_none
        # [kinds, 1, head_dim / 2] each
        self._inv_freq = torch.stack([_frequencies(k, head_dim) for k in kinds]).to(device)[:, None]
        self._scale: Tensor | None = None
        if any(kind is not None and kind.attention_factor != 1.0 for kind in kinds):
            self._scale = torch.stack([_scale(k, head_dim) for k in kinds]).to(device)[:, None]
        self._of_queries = next((kind for kind in kinds if kind and kind.query_beta), None)

    def angles(self, positions: Tensor) -> Angles:
        """cos and sin, fp32 [kinds, tokens, 1, head_dim / 2]; computed once a step.

        If queries have factors, cos and sin of a second rotation of q follow: by nothing, times its
        factor.
        """
        angles = positions.float().unsqueeze(1) * self._inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self._scale is not None:
            cos, sin = cos * self._scale, sin * self._scale
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
        if self._has_none:
            return cos, sin, torch.ones_like(cos), torch.zeros_like(sin)
        if self._of_queries is None:
            return cos, sin
        factors = query_factors(self._of_queries, positions).view(-1, 1, 1)
        return cos, sin, factors.expand_as(cos).contiguous(), torch.zeros_like(sin)


def query_factors(rope: RopeConfig, positions: Tensor) -> Tensor:
    """What queries are multiplied by, fp32 [tokens]: 1 within the positions of the training, then
    more, so that attention over longer texts stays as sharp (Llama 4's temperature).
    """
    return 1 + rope.query_beta * (1 + positions // rope.original_max_position).float().log()


def rotary_pairs(rope: RopeConfig, head_dim: int) -> int:
    """How many pairs of a head are rotated: the first ones. The others stay as they are."""
    if rope.kind == "proportional":
        return head_dim // 2  # the others turn by nothing
    if rope.num_dims:
        return rope.num_dims // 2
    return int(head_dim * rope.partial_rotary_factor) // 2


def head_order(
    rope: RopeConfig, head_dim: int, take_turns: bool = False, turns_back: bool = False
) -> Tensor | None:
    """The order of a stored q or k head's dimensions that makes (i, i + head_dim / 2) its pairs.

    None: they are its pairs as stored. With a partial rotary factor, a checkpoint has the pairs
    (i, i + rotated / 2) in the first `rotated` dimensions; or (2i, 2i + 1), where they take turns.
    One that turns back, by the same angles, has them the other way round.
    One order for q and k changes no q k.
    """
    pairs = rotary_pairs(rope, head_dim)
    if 2 * pairs == head_dim and not (take_turns or turns_back):
        return None
    first, second, rest = torch.arange(head_dim).tensor_split((pairs, 2 * pairs))
    if take_turns:
        first, second = torch.arange(2 * pairs).view(-1, 2).T
    if turns_back:
        first, second = second, first
    rest_first, rest_second = rest.chunk(2)
    return torch.cat((first, rest_first, second, rest_second))


def inverse_frequencies(rope: RopeConfig, dim: int) -> Tensor:
    """Radians a position of each pair, fp32 [dim / 2]; dim is the rotated part of a head."""
    return _KINDS[rope.kind](rope, dim)


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """The factor of cos and sin in YaRN (arXiv 2309.00071, 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def longrope_attention_factor(factor: float, original_max_position: int) -> float:
    """The factor of cos and sin in LongRoPE (arXiv 2402.13753), as in Phi-3."""
    if factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original_max_position))


def _frequencies(rope: RopeConfig | None, head_dim: int) -> Tensor:
    """[head_dim / 2], 0 for pairs that are not rotated: their cos is 1 and sin 0, exactly."""
    padded = torch.zeros(head_dim // 2)
    if rope is not None:
        pairs = rotary_pairs(rope, head_dim)
        padded[:pairs] = inverse_frequencies(rope, 2 * pairs)
    return padded


def _scale(rope: RopeConfig | None, head_dim: int) -> Tensor:
    scale = torch.ones(head_dim // 2)
    if rope is not None:
        scale[: rotary_pairs(rope, head_dim)] = rope.attention_factor
    return scale


def _default(rope: RopeConfig, dim: int) -> Tensor:
    return 1.0 / _wavelengths(rope.theta, dim)


def _wavelengths(theta: float, dim: int) -> Tensor:
    """Wavelengths over 2 pi: theta^(2i / dim)."""
    exponents: Tensor = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    return theta**exponents


def _proportional(rope: RopeConfig, dim: int) -> Tensor:
    """The frequencies of a whole head, 0 past its first part; as in Gemma 4."""
    inv_freq = _default(rope, dim)
    inv_freq[int(rope.partial_rotary_factor * dim // 2) :] = 0
    return inv_freq / rope.factor


def _linear(rope: RopeConfig, dim: int) -> Tensor:
    """Positions divided by `factor`."""
    return _default(rope, dim) / rope.factor


def _llama3(rope: RopeConfig, dim: int) -> Tensor:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, with a ramp in between."""
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
    """NTK scaling: the base grows with `length` where that is past the original positions.

    transformers uses the longest sequence of a call; here it is the same in the whole run.
    """
    original = rope.original_max_position
    length = max(rope.length, original)
    growth = (rope.factor * length / original) - (rope.factor - 1)
    return 1.0 / _wavelengths(rope.theta * growth ** (dim / (dim - 2)), dim)


def _yarn(rope: RopeConfig, dim: int) -> Tensor:
    """YaRN (arXiv 2309.00071).

    Pairs that rotate at least `beta_fast` times within the original positions are kept. Those that
    rotate at most `beta_slow` times are stretched by `factor`. Between them is a ramp, whose ends
    are whole pairs if `truncate`.
    """

    def pair(rotations: float) -> float:
        size = math.log(rope.original_max_position / (rotations * 2 * math.pi))
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
    """LongRoPE (arXiv 2402.13753): a divisor of its own stretches each pair.

    A checkpoint has two lists of divisors; rope_json.py chooses one.
    """
    return 1.0 / (torch.tensor(rope.divisors, dtype=torch.float32) * _wavelengths(rope.theta, dim))


_KINDS: dict[str, Callable[[RopeConfig, int], Tensor]] = {
    "default": _default,
    "linear": _linear,
    "proportional": _proportional,
    "llama3": _llama3,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
}
ROPE_KINDS = tuple(_KINDS)
