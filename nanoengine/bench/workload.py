"""The random requests that `offline` and `serve` share, and flags that count.

Requests are equal for an equal seed and equal sizes.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator
from contextlib import suppress

from nanoengine.errors import MAX_COUNT, ConfigError, shown
from nanoengine.text.numbers import whole_number


def count(text: str) -> int:
    """The type of a flag that is a count, from 1."""
    number = 0
    if text.isascii() and not set(text) & set("_+- "):
        with suppress(ValueError):
            number = whole_number(text)
    if not 1 <= number <= MAX_COUNT:
        limit = f"from 1 to {MAX_COUNT}"
        raise argparse.ArgumentTypeError(f"must be an integer {limit}, got {shown(text)}")
    return number


def positive(text: str) -> float:
    """The type of a flag that is a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {shown(text)}")
    return number


def check_lengths(args: argparse.Namespace) -> None:
    """Raise ConfigError if the least length of prompts or answers is above the longest."""
    for kind in ("input", "output"):
        least, most = (getattr(args, f"{end}_{kind}") for end in ("min", "max"))
        if least > most:
            raise ConfigError(
                f"--min-{kind} {least} is above --max-{kind} {most}; lower --min-{kind}, or raise "
                f"--max-{kind}"
            )


def random_requests(
    args: argparse.Namespace, number: int, vocab_size: int
) -> Iterator[tuple[list[int], int]]:
    """So many prompts of random token ids below vocab_size, each with the length of its answer in
    tokens. args: seed, min_input, max_input, min_output and max_output.
    """
    rng = random.Random(args.seed)
    for _ in range(number):
        length = rng.randint(args.min_input, args.max_input)
        prompt = [rng.randrange(vocab_size) for _ in range(length)]
        yield prompt, rng.randint(args.min_output, args.max_output)
