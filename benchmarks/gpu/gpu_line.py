"""Decode speed over the length of the context, with the device memory of a card of 24 GB: a part of
gpu_check.py, and what `make figure` draws.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu.gpu_drafts import MOST, best_number, right_share, running_rounds
from benchmarks.gpu.gpu_measure import (
    BUDGET_GB,
    Row,
    Scale,
    capped,
    card,
    decoding,
    offloaded,
    running,
)
from nanoengine import PromptTooLongError
from nanoengine.engine.drafter import Drafter, Drafts
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.kv.kv_cache import HybridKVCacheManager
from nanoengine.kv.kv_codec import encoded
from nanoengine.kv.open_step import DraftStep
from nanoengine.loading.model_config import read_model_config
from nanoengine.sequence import ScheduledBatch, Sequence

RIGHT = 0.8  # the share of drafts that is counted as right where speed is measured
NUM_HASHED = 12  # tokens
ROOM = 512  # tokens that a request may generate here
PACKED = 0.77  # of the bytes that numbers of 16 bits take
NUM_VARIANTS = 7  # different blocks of KV
Plain = dict[int, tuple[list[int], float]]  # by context: the tokens that follow, ms of a step


def line(folder: Path, scale: Scale) -> Iterator[Row]:
    """First what fits without offload, and what the engine says of more. Then rows of one request,
    for each context: `how` it decodes (resident, streamed, drafts), its speed, and a hash of its
    first tokens, which shall be the same however it decodes.

    With drafts, speed is that of rounds of which a share is counted as right; the hash is that of
    rounds whose drafts are right, and oracle_right says how many of them were found to be;
    as_without says whether the tokens are those of the same steps without drafts, which have as
    many rows. Rows that are not padded so go through other products of the vendor's: where its two
    most likely tokens are nearly alike, another one may follow.

    The longest contexts are kept in 12 bits a number on the host, which changes none; their rows
    without drafts are of steps that have as many rows.
    """
    plain: Plain = {}
    most = max(scale.line_contexts) + ROOM
    size = read_model_config(folder).kv_bytes_per_token(2)
    settings = offloaded(scale, most, size) | {"max_model_len": most} | card(scale)
    with capped(scale):
        with running(folder, scale, **card(scale)) as made:
            fits = made.plan.max_model_len
            about = {"budget_gb": BUDGET_GB, "longest": fits, "token_bytes": size}
            yield about | {"refusal": _refusal(made)}
            contexts = [n for n in scale.line_contexts if n + NUM_HASHED < fits]
            yield from _plain(made, "resident", contexts, {})
        with running(folder, scale, **settings) as made:
            yield from _plain(made, "streamed", scale.line_contexts, plain)
        with running(folder, scale, speculative=f"resident:{MOST}", **settings) as made:
            yield from _drafts(made, plain)
        for context in scale.packed_contexts:
            settings = _packed(scale, context, size) | card(scale)
            with running(folder, scale, speculative=f"resident:{MOST}", **settings) as made:
                of_this: Plain = {}
                yield from _plain(made, "streamed", [context], of_this)
                yield from _drafts(made, of_this)


def _packed(scale: Scale, context: int, size: int) -> dict[str, Any]:
    """Settings of an engine whose host keeps one context in 12 bits a number."""
    held = offloaded(scale, context, math.ceil(PACKED * size))
    return held | {"kv_offload_dtype": "bf12", "max_model_len": context + ROOM}


def _refusal(made: LLMEngine) -> str:
    try:
        made.add_request([0] * (made.plan.max_model_len + 1))
    except PromptTooLongError as error:
        return str(error)
    return ""


def _plain(made: LLMEngine, how: str, contexts: Iterable[int], plain: Plain) -> Iterator[Row]:
    """Rows without drafts; `plain` gets the tokens and the time of each."""
    for context in contexts:
        with decoding(made, [context], fill_apart):
            row = running_rounds(made, 0, 4, NUM_HASHED)
            tokens = _tokens_after(made, context)
        plain[context] = tokens, row["round_ms"]
        yield _about(made, how, context) | row | {"hash": _hash(tokens)}


def _drafts(made: LLMEngine, plain: Plain) -> Iterator[Row]:
    """Rows with drafts, of those contexts that are streamed."""
    for context, (_, plain_ms) in plain.items():
        with decoding(made, [context], fill_apart):
            running_rounds(made, 0, 0, NUM_HASHED)
            truth = _tokens_after(made, context)
        with decoding(made, [context], fill_apart):
            (seq,) = made.scheduler.running
            made.step()
            if not made.kv.is_streamed(seq):
                continue
            with oracle(truth, context):
                while seq.num_tokens < context + NUM_HASHED:
                    running_rounds(made, 3, 0, 1)
            tokens, metrics = _tokens_after(made, context), seq.metrics
            oracle_right = metrics.num_accepted / max(1, metrics.num_guessed)
            with right_share(RIGHT):
                many_ms = running_rounds(made, MOST, 1, 2)["round_ms"]
                draft_ms = max(0.0, many_ms - plain_ms) / MOST
                row = running_rounds(made, best_number(RIGHT, plain_ms, draft_ms), 1, 8)
        about = _about(made, "drafts", context) | {"right": RIGHT, "oracle_right": oracle_right}
        about["as_without"] = tokens[:NUM_HASHED] == truth[:NUM_HASHED]
        yield {**about, **row, "hash": _hash(tokens)}


def _about(made: LLMEngine, how: str, context: int) -> Row:
    """What a row says of itself; kv_offload_dtype only where numbers are packed."""
    row: Row = {"how": how, "context": context}
    offload = made.kv.memory.offload
    if offload is not None and offload.codec is not None:
        row["kv_offload_dtype"] = offload.codec.name
    return row


def _tokens_after(made: LLMEngine, context: int) -> list[int]:
    (seq,) = made.scheduler.running
    return seq.token_ids[context:]


def _hash(tokens: list[int]) -> str:
    return hashlib.sha256(str(tokens[:NUM_HASHED]).encode()).hexdigest()[:8]


def fill_apart(kv: HybridKVCacheManager, seq: Sequence, on_host: bool) -> None:
    """Random KV for all tokens but the last, the same on either tier. Neighbours differ, blocks and
    layers, so that tokens change where a block is read twice or not at all.
    """
    pool, offload, size = kv.memory.pool, kv.memory.offload, kv.spec.block_size
    generator = torch.Generator().manual_seed(0)
    shape, dtype = (NUM_VARIANTS, *pool[0].shape[1:]), pool[0].dtype
    values = torch.randn(shape, generator=generator).to(dtype)
    values = values if on_host else values.to(pool[0].device)
    if on_host and offload is not None and offload.codec is not None:
        values = torch.stack([encoded(offload.codec, each) for each in values])
    table = kv.tables[seq.seq_id]
    table.commit(seq.num_tokens - 1)
    for index, block in enumerate(table.held):
        block.num_tokens = max(0, min(size, seq.num_computed - index * size))
        if not block.num_tokens:
            break
        slot = (kv.blocks.host if on_host else kv.blocks.device).allocate()
        assert slot is not None, "no free slot for random KV"
        for layer in range(kv.spec.num_layers):
            there = offload.host.block(layer, slot) if on_host and offload else pool[layer][slot]
            there.copy_(values[(index + 3 * layer) % NUM_VARIANTS])
        if on_host:
            block.host_slot, block.host_len = slot, block.num_tokens
        else:
            block.device_slot = slot


@contextmanager
def oracle(truth: list[int], first: int) -> Iterator[None]:
    """Drafts are made as always, and then the tokens that follow take their place. truth: those
    from position `first` on.
    """
    draft = Drafter.draft

    def right(self: Drafter, batch: ScheduledBatch, steps: Iterable[DraftStep]) -> Drafts:
        made = draft(self, batch, steps)
        tokens = made.tokens.clone()
        for item, places in made.places.items():
            follow = truth[batch.items[item].seq.num_tokens - first :]
            for place, token in zip(places, follow, strict=False):
                tokens[place] = token
        return Drafts(tokens, made.places)

    with mock.patch.object(Drafter, "draft", right):
        yield
