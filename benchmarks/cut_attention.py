"""Decodes one sequence with all of its KV, or with a part: what drafts from resident KV would be.

The engine's decoder in fp32, over a plain pool of KV rows instead of blocks: row p holds position
p, the rows behind the sequence hold drafts, and the last row no key. For each layer and sequence a
view lists the rows that its queries may read; causality and windows hide the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from nanoengine.config.attention import AttentionConfig
from nanoengine.config.model import ModelConfig
from nanoengine.context import ForwardContext, KVChunk, KVTarget, RecurrentState, ReplayKey
from nanoengine.engine.sampler import draw_key
from nanoengine.models.decoder import Decoder
from nanoengine.models.draw import Draws, draw
from nanoengine.sampling_params import SamplingParams

BLOCK = 32  # tokens of which a draft reads all or none
DEPTH = 12  # drafts of a round
STAGES = ((0, 4), (4, DEPTH))  # drafts of a forward pass; the second only if the first are right
VERIFIED = 8  # the last verified rows, whose attention chooses blocks
CHUNK = 1024  # prompt tokens of a forward pass
SEED = 0
NOWHERE = 1 << 40  # the position of the row without a key

Views = Sequence[Tensor]  # for each layer, int64 [sequences, rows of the pool]


@dataclass(frozen=True, slots=True)
class Selector:
    """Which full blocks a draft reads: the first `sinks`, a share of the budget that is the most
    recent ones, and for the rest those with the most attention mass, in each layer or in all.
    """

    name: str
    sinks: int = 1
    recent: float = 0.25
    per_layer: bool = False

    def blocks(self, mass: Tensor, num_kept: int) -> Tensor:
        """mass [full layers, blocks] -> int64 [full layers or 1, num_kept], for a round."""
        scores = (mass if self.per_layer else mass.sum(0, keepdim=True)).clone()
        sinks = min(self.sinks, num_kept)
        recent = min(math.ceil(self.recent * num_kept), num_kept - sinks)
        scores[:, scores.shape[1] - recent :] = math.inf
        scores[:, :sinks] = math.inf
        return scores.topk(num_kept).indices


SELECTORS = (
    Selector("recent", recent=1.0),
    Selector("mass", sinks=0, recent=0.0),
    Selector("both"),
)
PER_LAYER = Selector("both, per layer", per_layer=True)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How each token is chosen; by (SEED, position) unless temperature is 0. banned: token ids."""

    temperature: float = 0.0
    banned: tuple[int, ...] = ()

    def choose(self, logits: Tensor, positions: Tensor) -> Tensor:
        """[rows, vocab] and the positions [rows] of the chosen tokens -> token ids [rows]."""
        logits[:, list(self.banned)] = -math.inf
        if not self.temperature:
            return logits.argmax(1)
        params = [SamplingParams(temperature=self.temperature)] * len(logits)
        keys = [draw_key(SEED, position) for position in positions.tolist()]
        return draw(logits, Draws.of(params, keys, lambda x, dtype: torch.tensor(x, dtype=dtype)))


@dataclass(frozen=True, slots=True)
class Reference:
    """What full attention generates. mass [positions, full layers, blocks]: the attention of each
    position from `first_mass` on, summed over the heads of a layer.
    """

    tokens: Tensor
    num_prompt: int
    first_mass: int
    mass: Tensor


@dataclass(slots=True)
class Pool:
    """KV of one sequence and of drafts: keys, then values, in one tensor for each layer."""

    rows: int
    layers: list[Tensor]
    positions: Tensor  # of the key in each row

    def read(self, layer: int, view: Tensor) -> Iterator[Tensor]:
        """Keys and values, each [sequences, kv heads, rows of the view, head_dim]."""
        pool = self.layers[layer]
        for first in (0, self.rows):
            rows = pool.index_select(0, view.flatten() + first)
            yield rows.view(*view.shape, *rows.shape[1:]).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class StepRows:
    """The pool as the KV cache of one step, which stores its tokens' KV at `slots`."""

    pool: Pool
    slots: Tensor

    def target(self, layer: int) -> KVTarget:
        return KVTarget(self.pool.layers[layer], self.slots, self.slots + self.pool.rows)

    def replay_key(self) -> ReplayKey | None:
        return None

    def state(self, layer: int) -> RecurrentState:
        """No model that is drafted for here has one."""
        raise NotImplementedError

    def read(self, layer: int) -> tuple[KVChunk, ...]:
        """Nothing in chunks: CutAttention reads the pool by its views."""
        return ()


@dataclass(slots=True)
class CutAttention:
    """Attention of a step over what its views list. mass: whether to keep each query's by block."""

    config: AttentionConfig
    pool: Pool
    views: Views
    positions: Tensor  # [sequences, queries]
    keeps_mass: bool = False
    mass: list[Tensor] = field(default_factory=list)  # a [queries, blocks] for each full layer
    name: str = "cut"
    can_replay: bool = False
    is_batch_invariant: bool = False

    def reserve(self, lengths: tuple[tuple[int, int], ...]) -> bool:
        """False: it needs none."""
        return False

    def run(
        self, layer: int, q: Tensor, ctx: ForwardContext, sinks: Tensor | None = None
    ) -> Tensor:
        assert sinks is None, "CutDecoder takes no model with sinks"
        seqs, queries = self.positions.shape
        k, v = self.pool.read(layer, self.views[layer])
        # The heads of a group as more queries of their kv head.
        grouped = q.view(seqs, queries, k.shape[1], -1, q.shape[2]).permute(0, 2, 3, 1, 4)
        seen = self._seen(layer).repeat(1, 1, grouped.shape[2], 1)
        scale = self.config.score_scale
        if self.keeps_mass and self.config.window(layer) is None:
            scores = grouped.flatten(2, 3) @ k.mT * scale
            weights = scores.masked_fill_(~seen, -math.inf).softmax(-1)
            by_query = weights.view(-1, queries, weights.shape[-1]).sum(0)
            padded = functional.pad(by_query, (0, -by_query.shape[1] % BLOCK))
            self.mass.append(padded.view(queries, -1, BLOCK).sum(2))
        out = functional.scaled_dot_product_attention(
            grouped.flatten(2, 3), k, v, attn_mask=seen, scale=scale
        )
        return out.view(grouped.shape).permute(0, 3, 1, 2, 4).reshape(q.shape).contiguous()

    def _seen(self, layer: int) -> Tensor:
        """bool [sequences, 1, queries, rows of the view]."""
        keys = self.pool.positions[self.views[layer]].unsqueeze(1)
        queries, window = self.positions.unsqueeze(2), self.config.window(layer)
        seen = keys <= queries
        if window is not None:
            seen &= keys > queries - window
        return seen.unsqueeze(1)


class CutDecoder:
    """Runs one sequence of up to `capacity` tokens, and drafts from `batch` of its positions."""

    def __init__(self, config: ModelConfig, decoder: Decoder, capacity: int, batch: int) -> None:
        self._config, self._decoder, self._batch = config.attention, decoder, batch
        self._num_layers, self._capacity = config.num_layers, capacity
        rows = capacity + batch * DEPTH + 1
        shape = (2 * rows, config.num_kv_heads, config.head_dim)
        layers = [torch.zeros(shape) for _ in range(config.num_layers)]
        self._pool = Pool(rows, layers, torch.full((rows,), NOWHERE))
        self._pool.positions[:capacity] = torch.arange(capacity)
        self._written: list[int] = []  # the tokens whose KV the pool holds

    @torch.inference_mode()
    def reference(
        self, prompt: list[int], num_tokens: int, sampling: Sampling, stops: Sequence[int] = ()
    ) -> Reference:
        """Generate up to `num_tokens` tokens with all KV; ends with one of `stops`."""
        first_mass = len(prompt) - VERIFIED
        self._prefill(prompt[:first_mass])
        tokens, mass = list(prompt), []
        start, end = first_mass, len(prompt) + num_tokens
        while len(tokens) < end and not (start >= len(prompt) and tokens[-1] in stops):
            x, found = self._extend(tokens[start:], start, keeps_mass=True)
            mass.append(found)
            start = len(tokens)
            logits = self._decoder.logits(x[-1:])
            tokens.append(int(sampling.choose(logits, torch.tensor([start]))))
        self._written = tokens[:start]
        widest = mass[-1].shape[2]
        rows = torch.cat([functional.pad(m, (0, widest - m.shape[2])) for m in mass])
        return Reference(torch.tensor(tokens), len(prompt), first_mass, rows)

    def _prefill(self, tokens: list[int]) -> None:
        """Writes the KV of `tokens`, but for those that the pool holds already."""
        same = zip(tokens, self._written, strict=False)
        start = next((i for i, (new, old) in enumerate(same) if new != old), None)
        if start is None:
            start = min(len(tokens), len(self._written))
        for begin in range(start, len(tokens), CHUNK):
            self._extend(tokens[begin : begin + CHUNK], begin)

    def _extend(
        self, tokens: list[int], start: int, keeps_mass: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Residual stream of tokens at `start` that see all before them, and their mass."""
        end = start + len(tokens)
        windows = [self._config.window(layer) for layer in range(self._num_layers)]
        firsts = {w: 0 if w is None else max(0, start - w + 1) for w in windows}
        whole = {w: torch.arange(first, end)[None] for w, first in firsts.items()}
        positions = torch.arange(start, end)[None]
        views = [whole[window] for window in windows]
        attention = CutAttention(self._config, self._pool, views, positions, keeps_mass)
        x = self._forward(torch.tensor([tokens]), attention, positions)
        return x, torch.stack(attention.mass, 1) if attention.mass else torch.empty(0)

    @torch.inference_mode()
    def accepted(
        self,
        reference: Reference,
        starts: Sequence[int],
        selector: Selector,
        share: float,
        sampling: Sampling,
    ) -> list[int]:
        """How many drafts equal the reference, for a round that begins with token `start`.

        The KV of all tokens before `start` has been verified. The drafts' full layers see `share`
        of the full blocks, the tail behind these, and the drafts before them. Only drafts after
        right ones matter, so a pass may run several: their tokens are the reference's.
        """
        found: list[int] = []
        for at in range(0, len(starts), self._batch):
            batch = torch.tensor(starts[at : at + self._batch])
            found += self._accepted(reference, batch, selector, share, sampling)
        return found

    def _accepted(
        self,
        reference: Reference,
        starts: Tensor,
        selector: Selector,
        share: float,
        sampling: Sampling,
    ) -> list[int]:
        room = torch.arange(len(starts) * DEPTH).view(-1, DEPTH) + self._capacity
        positions = starts[:, None] + torch.arange(DEPTH)
        self._pool.positions[room] = positions
        views = self._draft_views(reference, starts, room, selector, share)
        last = len(reference.tokens) - 1
        tokens = reference.tokens[positions.clamp(max=last)]
        accepted = torch.zeros(len(starts), dtype=torch.int64)
        alive = torch.arange(len(starts))
        for begin, end in STAGES:
            if not len(alive):
                break
            part = slice(begin, end)
            cut = {id(view): view[alive] for view in views}
            attention = CutAttention(
                self._config, self._pool, [cut[id(v)] for v in views], positions[alive, part]
            )
            x = self._forward(tokens[alive, part], attention, room[alive, part])
            x = x.view(len(alive), -1, x.shape[1])
            rows = torch.arange(len(alive))
            for depth in range(begin, end):
                at = positions[alive[rows], depth] + 1
                rows, at = rows[at <= last], at[at <= last]
                if not len(rows):
                    break
                chosen = sampling.choose(self._decoder.logits(x[rows, depth - begin]), at)
                rows = rows[chosen == reference.tokens[at]]
                accepted[alive[rows]] += 1
            alive = alive[rows]
        return accepted.tolist()

    def _draft_views(
        self, reference: Reference, starts: Tensor, room: Tensor, selector: Selector, share: float
    ) -> Views:
        """The rows that each round's drafts may read, in each layer."""
        nowhere = self._pool.rows - 1
        full: dict[int, list[Tensor]] = {}
        num_kept = max(1, round(share * (reference.num_prompt // BLOCK)))
        for start in starts.tolist():
            num_full = start // BLOCK
            now = start - reference.first_mass
            mass = reference.mass[now - VERIFIED : now, :, :num_full].sum(0)
            tail = torch.full((BLOCK - 1,), nowhere)
            tail[: start % BLOCK] = torch.arange(num_full * BLOCK, start)
            kept = selector.blocks(mass, num_kept if share < 1 else num_full)
            for index, blocks in enumerate(kept):
                rows = (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
                full.setdefault(index, []).append(torch.cat((rows, tail)))
        width = max(len(rows) for rows in full[0])
        cut = [
            torch.cat(
                (
                    torch.stack([functional.pad(r, (0, width - len(r)), value=nowhere) for r in v]),
                    room,
                ),
                1,
            )
            for v in full.values()
        ]
        return self._by_layer(cut, starts, room)

    def _by_layer(self, cut: list[Tensor], starts: Tensor, room: Tensor) -> Views:
        """`cut` for the full layers, one for all or one for each; the others see their window."""
        views, windowed = [], dict[int, Tensor]()
        for layer in range(self._num_layers):
            window = self._config.window(layer)
            if window is None:
                views.append(cut[0] if len(cut) == 1 else cut.pop(0))
                continue
            if window not in windowed:
                rows = starts[:, None] - torch.arange(1, window)
                rows = torch.where(rows < 0, self._pool.rows - 1, rows)
                windowed[window] = torch.cat((rows, room), 1)
            views.append(windowed[window])
        return views

    def _forward(self, tokens: Tensor, attention: CutAttention, slots: Tensor) -> Tensor:
        """tokens and their rows of the pool, [sequences, queries] each -> residual stream
        [sequences x queries, hidden].
        """
        (seqs, queries), positions = tokens.shape, attention.positions
        ends = positions[:, -1] + 1
        ctx = ForwardContext(
            token_ids=tokens.flatten(),
            positions=positions.flatten(),
            query_start=torch.arange(0, seqs * queries + 1, queries, dtype=torch.int32),
            kv_lens=ends.int(),
            lengths=tuple((queries, end) for end in ends.tolist()),
            logit_rows=torch.arange(seqs * queries),
            kv=StepRows(self._pool, slots.flatten()),
            attention=attention,
        )
        return self._decoder.forward(ctx)
