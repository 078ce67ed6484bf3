"""The random requests that `offline` and `serve` share: equal for an equal seed and equal sizes."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator


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
