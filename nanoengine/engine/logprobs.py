"""Log probabilities of sampled tokens and of prompts, from logits to who asked for them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoengine.devices.device import Readable
from nanoengine.outputs import Logprob, TokenLogprobs
from nanoengine.sequence import Sequence, TokenScore
from nanoengine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of a sequence's prompt, from the token at `position` on, on their way to the host."""

    seq: Sequence
    position: int
    rows: Readable

    def append_to_sequence(self) -> None:
        """Append to the sequence what it does not have: a preempted one computes again."""
        width = self.seq.request.params.prompt_logprobs or 0
        for position, row in enumerate(self.rows.tolist(), self.position):
            if position == len(self.seq.output.prompt_scores) + 1:
                token_id = self.seq.token_ids[position]
                self.seq.output.prompt_scores.append(read_scores(row, token_id, width))


def score_tokens(logits: Tensor, tokens: Tensor, num_likeliest: int) -> Tensor:
    """How likely tokens are by these logits, and which are likeliest: what `read_scores` reads.

    logits [n, vocab], tokens int64 [n], whose NO_TOKENs get any score. Returns float64
    [n, 2 + 2 k]: log-probability and rank of the token, the k largest log-probabilities, and the
    ids that have them.
    """
    logprobs = torch.log_softmax(logits.float(), dim=1)
    chosen = logprobs.gather(1, tokens.clamp(min=0).unsqueeze(1))
    ranks = (logprobs > chosen).sum(dim=1, keepdim=True) + 1
    values, ids = logprobs.topk(min(num_likeliest, logits.shape[1]), dim=1)
    return torch.cat([part.double() for part in (chosen, ranks, values, ids)], dim=1)


def read_scores(row: Seq[float], token_id: int, num_likeliest: int) -> TokenScore:
    """One row of `score_tokens`, and no more of its likeliest tokens than wanted."""
    values, ids = row[2 : 2 + (len(row) - 2) // 2], row[2 + (len(row) - 2) // 2 :]
    likeliest = tuple((int(i), value) for i, value in zip(ids, values, strict=True))
    return TokenScore(token_id, row[0], int(row[1]), likeliest[:num_likeliest])


def token_logprobs(score: TokenScore, tokenizer: Tokenizer | None) -> TokenLogprobs:
    """A score as users see it: the likeliest tokens of a position and the one that is there."""
    ranked = [(i, value, rank) for rank, (i, value) in enumerate(score.likeliest, 1)]
    if all(i != score.token_id for i, _, _ in ranked):
        ranked.append((score.token_id, score.logprob, score.rank))
    return {i: Logprob(value, rank, _decoded(i, tokenizer)) for i, value, rank in ranked}


def _decoded(token_id: int, tokenizer: Tokenizer | None) -> str | None:
    return None if tokenizer is None else tokenizer.decode([token_id], skip_special_tokens=False)
