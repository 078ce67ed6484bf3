"""Samples tokens from logits. Knows sampling parameters and positions, no scheduler and no KV.

A token's random number is a hash of (seed, position, token): see models/draw.py. There is no
generator state, so neither the batch nor preemption can change a request's tokens.
"""

from __future__ import annotations

from collections import Counter, abc
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import xxhash
from torch import Tensor

from nanoengine.context import MakeTensor
from nanoengine.models.draw import Draws
from nanoengine.models.layer_ops import LayerOps
from nanoengine.sampling_params import SamplingParams
from nanoengine.sequence import NO_TOKEN, Sequence, TokenHistory

LARGEST_LOGIT = 1e36  # still finite after division by the lowest temperature


def draw_key(seed: int, position: int) -> int:
    """64 bits from (seed, position) only: xxh3-64."""
    both = (seed & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "little") + position.to_bytes(8, "little")
    return xxhash.xxh3_64_intdigest(both)


@dataclass(frozen=True, slots=True)
class FixedTokens:
    """The ids of a request's parameters as tensors, made once: thousands of ids would take
    milliseconds in every step. None: the request does not need them.

    forbidden: bool [vocab], all but the allowed tokens. stops: int64 [n], which min_tokens forbids.
    seen: int64 [n], the prompt's distinct tokens, for repetition_penalty.
    """

    forbidden: Tensor | None
    stops: Tensor | None
    seen: Tensor | None


class Sampler:
    """Chooses the next token of each sequence."""

    def __init__(self, ops: LayerOps, tensor: MakeTensor) -> None:
        """tensor: makes a tensor on the logits' device."""
        self._ops = ops
        self._tensor = tensor
        self._fixed: WeakKeyDictionary[Sequence, FixedTokens] = WeakKeyDictionary()

    def sample(
        self,
        logits: Tensor,
        seqs: abc.Sequence[Sequence],
        positions: abc.Sequence[int],
        guesses: abc.Sequence[tuple[int, ...]] = (),
    ) -> Tensor:
        """logits: [n, vocab] of any float dtype, a row for each sequence. Returns token ids, int64
        [n]; NO_TOKEN for a row with a NaN or without a finite largest logit. -inf is allowed.

        positions: of the tokens to choose. guesses: for each row, the guessed tokens before it,
        which penalties and bad words count as output; (): none.
        """
        changed = [
            (row, seq, position)
            for row, (seq, position) in enumerate(zip(seqs, positions, strict=True))
            if _is_adjusted(seq, position)
        ]
        if changed:
            logits = logits.to(torch.float32, copy=True)
            for row, seq, position in changed:
                self._adjust(logits[row], seq, position, guesses[row] if guesses else ())
        tokens = self._ops.argmax(logits)  # a NaN counts as the largest
        largest = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
        drawn = [i for i, s in enumerate(seqs) if not s.request.params.greedy]
        if drawn:
            keys = [draw_key(seqs[i].request.seed, positions[i]) for i in drawn]
            draws = Draws.of([seqs[i].request.params for i in drawn], keys, self._tensor)
            if len(drawn) == len(seqs):
                tokens = self._ops.draw(logits, draws)
            else:
                rows = self._tensor(drawn, torch.int64)
                tokens[rows] = self._ops.draw(logits[rows], draws)
        return torch.where(largest.abs() < LARGEST_LOGIT, tokens, NO_TOKEN)

    def _adjust(self, row: Tensor, seq: Sequence, position: int, guesses: tuple[int, ...]) -> None:
        """Apply the request's parameters to one token's logits, fp32 [vocab], in vLLM's order."""
        params = seq.request.params
        fixed = self._fixed.get(seq.prompt_owner or seq) or self._fix_tokens(seq, len(row))
        if fixed.forbidden is not None:
            row.masked_fill_(fixed.forbidden, -torch.inf)
        if banned := _ends_of_bad_words(seq, guesses):
            row[self._tensor(banned, torch.int64)] = -torch.inf
        if fixed.stops is not None and position - seq.num_prompt_tokens < params.min_tokens:
            row[fixed.stops] = -torch.inf
        if params.biases:
            ids, values = zip(*params.biases, strict=True)
            row[self._tensor(ids, torch.int64)] += self._tensor(values, torch.float32)
        if seq.history is not None:
            self._penalize(row, params, seq.history, fixed.seen, guesses)

    def _fix_tokens(self, seq: Sequence, vocab_size: int) -> FixedTokens:
        params, forbidden, stops, seen = seq.request.params, None, None, None
        if params.allowed_token_ids is not None:
            forbidden = self._tensor([True] * vocab_size, torch.bool)
            forbidden[self._tensor(params.allowed_token_ids, torch.int64)] = False
        if params.min_tokens:
            stops = self._tensor(sorted(seq.request.stop_token_ids), torch.int64)
        if seq.history is not None and params.repetition_penalty != 1:
            seen = self._tensor([*seq.history.prompt], torch.int64)
        self._fixed[seq.prompt_owner or seq] = fixed = FixedTokens(forbidden, stops, seen)
        return fixed

    def _penalize(
        self,
        row: Tensor,
        params: SamplingParams,
        history: TokenHistory,
        seen: Tensor | None,
        guesses: tuple[int, ...],
    ) -> None:
        output = Counter(history.output)
        output.update(guesses)
        if seen is not None:
            new = self._tensor([*output.keys() - history.prompt], torch.int64)
            for ids in (seen, new):
                logits, penalty = row[ids], params.repetition_penalty
                row[ids] = torch.where(logits > 0, logits / penalty, logits * penalty)
        if output and (params.frequency_penalty or params.presence_penalty):
            counts = self._tensor([*output.values()], torch.float32)
            ids = self._tensor([*output], torch.int64)
            row[ids] -= params.frequency_penalty * counts + params.presence_penalty


def _is_adjusted(seq: Sequence, position: int) -> bool:
    params = seq.request.params
    is_held = position - seq.num_prompt_tokens < params.min_tokens
    fixed = params.allowed_token_ids is not None or bool(params.biases)
    return is_held or fixed or params.follows_history


def _ends_of_bad_words(seq: Sequence, guesses: tuple[int, ...]) -> list[int]:
    """The last token of each bad word whose other tokens the output ends with."""
    output = [*seq.output_token_ids, *guesses] if seq.request.bad_words else []
    return [
        word[-1]
        for word in seq.request.bad_words
        if len(word) == 1 or output[1 - len(word) :] == [*word[:-1]]
    ]
