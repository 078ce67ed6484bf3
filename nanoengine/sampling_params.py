"""What one request asks for: SamplingParams, validated when it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nanoengine.errors import InvalidParamsError

MAX_STOPS = 64
GREEDY_BELOW = 1e-5
MIN_TEMPERATURE = 0.01


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next tokens of one request, with vLLM's names and defaults.

    temperature: 0 is greedy, 1 the model's own distribution; between 0 and 0.01 counts as 0.01.
    top_k: keep the k most likely tokens (0 or -1: all).
    top_p: keep the smallest set of tokens whose probability reaches top_p, in (0, 1].
    min_p: drop tokens less likely than min_p times the likeliest, in [0, 1].
    seed: makes sampling depend on (seed, position) only; None draws one from the engine's seed.
    stop: a string or strings that end the text (not part of it); stop_token_ids: ids that end it.
    ignore_eos: go on past the model's end-of-sequence tokens.
    max_tokens: most tokens to generate (None: as many as the context holds).
    min_tokens: before so many, neither end-of-sequence nor stops end the text.
    skip_special_tokens: leave special tokens out of the text.

    Raises InvalidParamsError for a value out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | tuple[str, ...] | list[str] | None = None
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidParamsError("top_p must be in (0, 1], got 0; use temperature=0 for greedy")
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("top_k", self.top_k, -1, 1 << 31)
        _integer("min_tokens", self.min_tokens, 0, 1 << 31)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 1 << 31)
            if self.min_tokens > self.max_tokens:
                raise InvalidParamsError(
                    f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})"
                )
        if self.seed is not None:
            _integer("seed", self.seed, -(1 << 63), (1 << 64) - 1)
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParamsError(
                    f"{name} must be True or False, got {getattr(self, name)!r}"
                )
        object.__setattr__(self, "stop", _stops(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_ids(self.stop_token_ids))
        if 0 < self.temperature < MIN_TEMPERATURE:
            object.__setattr__(
                self, "temperature", 0.0 if self.temperature < GREEDY_BELOW else MIN_TEMPERATURE
            )

    @property
    def greedy(self) -> bool:
        """True when the likeliest token is always taken."""
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, empty when there is none."""
        return self.stop  # type: ignore[return-value]  # normalised in __post_init__

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids` as a tuple, empty when there is none."""
        return self.stop_token_ids  # type: ignore[return-value]  # normalised in __post_init__


def _number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidParamsError(f"{name} must be a finite number, got {value!r}")
    if not low <= value <= high:
        raise InvalidParamsError(f"{name} must be between {low:g} and {high:g}, got {value}")


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidParamsError(f"{name} must be an integer, got {value!r}")
    if not low <= value <= high:
        raise InvalidParamsError(f"{name} must be between {low} and {high}, got {value}")


def _stops(stop: object) -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, tuple | list) or not all(isinstance(s, str) and s for s in stops):
        raise InvalidParamsError(f"stop must be a non-empty string or a list of them, got {stop!r}")
    if len(stops) > MAX_STOPS:
        raise InvalidParamsError(f"at most {MAX_STOPS} stop strings, got {len(stops)}")
    return tuple(stops)


def _stop_ids(ids: object) -> tuple[int, ...]:
    if ids is None:
        return ()
    if not isinstance(ids, tuple | list):
        raise InvalidParamsError(f"stop_token_ids must be a list of token ids, got {ids!r}")
    for token_id in ids:
        _integer("stop_token_ids", token_id, 0, 1 << 31)
    return tuple(ids)
