"""Assistant: a small model that guesses tokens for another one, as those of Gemma 4 do.

Its layers have queries alone and read keys and values that the other model has stored, of the last
layer that stores any with a window, or of the last without. Of the newest token it takes the
embedding, and what the output head saw when it was sampled, both of the other model. For the guess
after that it takes its own guess and what it gave, a product of its last states, from the same
position. After transformers' Gemma4AssistantForCausalLM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoengine.config.model import AssistantConfig
from nanoengine.context import ForwardContext
from nanoengine.models.decoder import Decoder
from nanoengine.models.layer_ops import LayerOps
from nanoengine.models.products import Ends, Product
from nanoengine.models.recurrent_builder import TensorSource
from nanoengine.models.stored_codes import numbers_of
from nanoengine.models.weight_shapes import weight_shapes

JOIN, BACK = "pre_projection.weight", "post_projection.weight"
CENTROIDS, ORDERING = "masked_embedding.centroids.weight", "masked_embedding.token_ordering"


def assistant_shapes(config: AssistantConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of its weights, by transformers' names. ORDERING is beside them: int64 [vocab]."""
    inner, outer = config.layers.hidden_size, config.hidden_size
    shapes = weight_shapes(config.layers) | {JOIN: (inner, 2 * outer), BACK: (outer, inner)}
    return shapes | ({CENTROIDS: (config.num_centroids, inner)} if config.num_centroids else {})


def num_weights(config: AssistantConfig) -> int:
    """Numbers in all of them."""
    return sum(map(math.prod, assistant_shapes(config).values()))


@dataclass(frozen=True, slots=True)
class Clusters:
    """Groups of equally many tokens. score: states -> a number for each group. tokens: int64
    [groups, tokens of one]. num_open: of the groups with the highest scores tokens have logits.
    """

    score: Product
    tokens: Tensor
    num_open: int

    def likely(self, x: Tensor) -> Tensor:
        """[rows, hidden] -> the tokens that have logits, int64 [rows, tokens]."""
        best = self.score(x).topk(self.num_open, dim=1).indices
        return self.tokens[best].flatten(1)


class Assistant:
    """Runs its layers over draft steps of the model that it guesses for."""

    def __init__(
        self,
        config: AssistantConfig,
        source: TensorSource,
        device: torch.device,
        ops: LayerOps,
        ends: Ends,
        ordering: Tensor | None = None,
    ) -> None:
        """source: as of Decoder, of assistant_shapes. ends: of the other model. ordering: the
        tokens, group by group, if there are groups.
        """
        self._ends = ends
        self._join, self._back = (ops.linear(numbers_of(source(name))) for name in (JOIN, BACK))
        self._decoder = Decoder(config.layers, source, device, ops)
        self._vocab_size = config.layers.vocab_size
        self._clusters: Clusters | None = None
        if ordering is not None:
            tokens = ordering.to(device).view(config.num_centroids, -1)
            score = ops.linear(numbers_of(source(CENTROIDS)))
            self._clusters = Clusters(score, tokens, config.num_open)

    def seen(self, x: Tensor) -> Tensor:
        """[rows, hidden] after the other model's last layer -> `given` of their next tokens."""
        return self._ends.normed(x)

    def __call__(self, ctx: ForwardContext, tokens: Tensor, given: Tensor) -> Tensor:
        """Last states of one row for each sequence, [rows, its hidden]. tokens: int64 [rows].
        given: [rows, hidden], what the other model saw where it sampled them, or what `after` gave.
        """
        joined = self._join(torch.cat((self._ends.embed(tokens), given), dim=1))
        return self._decoder.ends.normed(self._decoder.run(joined, ctx))

    def after(self, made: Tensor) -> Tensor:
        """What is `given` for the token guessed from the states `made`: [rows, hidden]."""
        return self._back(made)

    @property
    def num_runs(self) -> int:
        """As products.num_runs."""
        return 0 if self._clusters else self._decoder.num_runs

    def logits(self, made: Tensor, runs: Tensor | None = None) -> Tensor:
        """[rows, its hidden] -> [rows, vocab], -inf of tokens in other groups. runs: as in
        decoder.Model.logits.
        """
        if self._clusters is None:
            return self._decoder.logits(made, runs)
        likely = self._clusters.likely(made)
        weights = self._decoder.ends.embed(likely.flatten()).view(*likely.shape, -1)
        scores = (weights @ made.unsqueeze(2)).squeeze(2)
        logits = made.new_full((len(made), self._vocab_size), -torch.inf)
        return logits.scatter_(1, likely, scores)
