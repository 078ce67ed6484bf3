"""Log probabilities of sampled tokens and of prompts, from logits to the sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoengine.config.engine import LEAST_SAMPLED
from nanoengine.devices.device import Device, Readable
from nanoengine.sequence import ScheduledBatch, Sequence, TokenScore

Likeliest = Callable[[Tensor, int], Tensor]  # models.draw.likeliest


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of a sequence's prompt, from the token at `position` on, on their way to the host."""

    seq: Sequence
    position: int
    rows: Readable

    def append_to_sequence(self) -> None:
        """Append the scores that the sequence does not have yet: a preempted one computes again."""
        width = self.seq.request.params.prompt_logprobs or 0
        for position, row in enumerate(self.rows.tolist(), self.position):
            if position == len(self.seq.output.prompt_scores) + 1:
                token_id = self.seq.token_ids[position]
                self.seq.output.prompt_scores.append(read_scores(row, token_id, width))


@dataclass(frozen=True, slots=True)
class StepScores:
    """The scores that the requests of a step ask for, on their way to the host.

    prompts: of tokens of prompts. sampled: [n, ...], of what the step samples; None where no
    request wants them.
    """

    prompts: tuple[PromptScores, ...]
    sampled: Readable | None

    def append_to_sequences(self, batch: ScheduledBatch, token_ids: list[int]) -> None:
        """Append scores to the sequences, before their tokens. token_ids: sampled by the batch."""
        for part in self.prompts:
            part.append_to_sequence()
        if self.sampled is None:
            return
        tokens, scores = batch.split(token_ids), batch.split(self.sampled.tolist())
        for item, sampled, rows in zip(batch.items, tokens, scores, strict=True):
            seq, width = item.seq, item.seq.request.num_likeliest
            scored = zip(item.accepted(sampled), rows, strict=False)
            if width is not None and not seq.is_finished:
                seq.output.scores += [read_scores(row, token_id, width) for token_id, row in scored]


@dataclass(frozen=True, slots=True)
class TokenScorer:
    """Scores the tokens of a step, where requests ask for it.

    logits: from hidden states [n, hidden] to [n, vocab].
    """

    logits: Callable[[Tensor], Tensor]
    likeliest: Likeliest
    device: Device

    def score_sampled(self, seqs: Seq[Sequence], logits: Tensor, tokens: Tensor) -> Readable | None:
        """Scores of sampled tokens. logits: [n, vocab]; tokens: int64 [n], of `seqs`."""
        widths = [seq.request.num_likeliest for seq in seqs]
        asked = [width for width in widths if width is not None]
        if not asked:
            return None
        return self.device.read_back(score_tokens(logits, tokens, max(asked), self.likeliest))

    def score_prompts(self, batch: ScheduledBatch, hidden: Tensor) -> Iterator[PromptScores]:
        """Scores of the prompts' next tokens: every token of a chunk but the prompt's last has one
        after it. hidden: the states of the batch's tokens, [tokens, hidden].
        """
        row = 0
        for item in batch.items:
            seq = item.seq
            stop = min(item.start + item.num_tokens, seq.num_prompt_tokens - 1)
            if (width := seq.request.params.prompt_logprobs) is not None:
                for start in range(item.start, stop, LEAST_SAMPLED):
                    end = min(stop, start + LEAST_SAMPLED)
                    rows = hidden[row + start - item.start : row + end - item.start]
                    following = self.device.tensor(seq.token_ids[start + 1 : end + 1], torch.int64)
                    scores = score_tokens(self.logits(rows), following, width, self.likeliest)
                    yield PromptScores(seq, start + 1, self.device.read_back(scores))
            row += item.num_tokens


def score_tokens(
    logits: Tensor, tokens: Tensor, num_likeliest: int, likeliest: Likeliest
) -> Tensor:
    """The scores of tokens by these logits, as `read_scores` reads them.

    logits [n, vocab], tokens int64 [n]; the score of NO_TOKEN means nothing. Returns float64
    [n, 2 + 2 k]: log-probability and rank of the token, the k largest log-probabilities, and their
    ids. The first of equal ones wins for any k, so that k may come from other requests.
    """
    logprobs = torch.log_softmax(logits.float(), dim=1)
    chosen = logprobs.gather(1, tokens.clamp(min=0).unsqueeze(1))
    ranks = (logprobs > chosen).sum(dim=1, keepdim=True) + 1
    ids = likeliest(logprobs, min(num_likeliest, logits.shape[1]))
    return torch.cat([p.double() for p in (chosen, ranks, logprobs.gather(1, ids), ids)], dim=1)


def read_scores(row: Seq[float], token_id: int, num_likeliest: int) -> TokenScore:
    """Read one row of `score_tokens`, with `num_likeliest` of its likeliest tokens at most."""
    values, ids = row[2 : 2 + (len(row) - 2) // 2], row[2 + (len(row) - 2) // 2 :]
    likeliest = tuple((int(i), value) for i, value in zip(ids, values, strict=True))
    return TokenScore(token_id, row[0], int(row[1]), likeliest[:num_likeliest])
