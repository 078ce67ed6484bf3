"""Runs the largest step that settings allow, when an engine starts on a GPU: what it takes beside
weights and KV is what the memory plan leaves for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate

import torch

from nanoengine.config.engine import EngineConfig
from nanoengine.config.model import ModelConfig
from nanoengine.context import KVChunk, KVTarget, RecurrentState
from nanoengine.devices.device import Device
from nanoengine.devices.gpu import find_graphs
from nanoengine.sampling_params import SamplingParams
from nanoengine.sequence import ScheduledBatch, ScheduledSequence
from nanoengine.startup.activations import activation_bytes
from nanoengine.startup.memory_plan import check_step_fits
from nanoengine.startup.probe import PROBE_ID, Runner, probe_sequence


def _scratch_state(
    model: ModelConfig, num_seqs: int, dtype: torch.dtype, device: Device
) -> RecurrentState | None:
    """The state of one recurrent layer, which all of a step replace; None if there are none."""
    recurrent, place = model.recurrent, device.torch_device
    if recurrent is None:
        return None
    inputs, memory = recurrent.state_shapes
    return RecurrentState(
        torch.zeros((num_seqs, *inputs), dtype=dtype, device=place),
        torch.zeros((num_seqs, *memory), device=place),
        torch.arange(num_seqs, device=place),
    )


class ScratchKV:
    """One layer of KV, which all of its shape write and read (model_runner.OpenStep)."""

    def __init__(
        self, model: ModelConfig, size: int, dtype: torch.dtype, device: Device, lengths: list[int]
    ) -> None:
        """size: tokens of a block. lengths: tokens of the sequences, none of which has KV yet."""
        self.num_rows, self.num_padding = len(lengths), 0
        self.block_mass = None
        parts, counts = model.kv_parts, [-(-length // size) for length in lengths]
        firsts = [*accumulate(counts, initial=0)]
        begun = [*zip(firsts, lengths, strict=False)]
        rows = [
            (first + place // size) * parts * size + place % size
            for first, length in begun
            for place in range(length)
        ]
        keys = device.tensor(rows, torch.int64)
        values = keys + size if parts == 2 else None
        tables = [[*range(first, first - (-length // size))] for first, length in begun]
        spans = tuple((index, 0, tuple(table)) for index, table in enumerate(tables))
        padded = [[*table, *[0] * (max(counts) - len(table))] for table in tables]
        numbers = ([*range(len(lengths))], [0] * len(lengths), counts, padded)
        index, first_block, num_blocks, table = (device.tensor(x, torch.int32) for x in numbers)
        rest = index, first_block, num_blocks, table, spans
        each = [model.shape(layer).kv_heads for layer in model.attention_layers]
        made: dict[tuple[int, int], tuple[KVTarget, KVChunk]] = {}
        for heads in set(each):
            shape = (firsts[-1], parts, size, *heads)
            blocks = torch.zeros(shape, dtype=dtype, device=device.torch_device)
            target = KVTarget(blocks.flatten(0, 2), keys, values)
            made[heads] = target, KVChunk(blocks[:, 0], blocks[:, -1], *rest, is_last=True)
        self._layers = [made[heads] for heads in each]
        self._state = _scratch_state(model, len(lengths), dtype, device)

    def target(self, layer: int) -> KVTarget:
        return self._layers[layer][0]

    def state(self, layer: int) -> RecurrentState:
        assert self._state is not None
        return self._state

    def replay_key(self) -> None:
        """None: such a step is never replayed."""

    def read(self, layer: int) -> Iterator[KVChunk]:
        yield self._layers[layer][1]

    def draft_steps(self) -> tuple[()]:
        """None."""
        return ()

    def draft_steps_between(self, layers: object) -> tuple[()]:
        """None."""
        return ()

    @property
    def kv(self) -> ScratchKV:
        """The forward pass writes and reads it directly."""
        return self

    def mark_written(self) -> None:
        """What it holds is never read again."""

    def close(self) -> None:
        """It moves nothing."""

    def open_step(self, batch: ScheduledBatch) -> ScratchKV:
        """It serves the one batch that it was laid out for."""
        return self


def profiled_bytes(
    make_runner: Callable[[ScratchKV], Runner],
    model: ModelConfig,
    config: EngineConfig,
    dtype: torch.dtype,
    device: Device,
) -> int | None:
    """Peak bytes of the largest step beside weights and KV, and what graphs of decode steps keep;
    None if the settings or the device make the measurement unnecessary. Raises OutOfMemoryError
    before it runs a step that cannot fit.
    """
    if config.num_gpu_blocks or config.kv_cache_gib or not device.computes_later:
        return None
    estimated = activation_bytes(model, config, dtype.itemsize, in_c=False)
    check_step_fits(config, estimated, device.memory()[0])
    batch = _largest_step(config)
    lengths = [item.num_tokens for item in batch.items]
    scratch = ScratchKV(model, config.kvcache_block_size, dtype, device, lengths)
    peak = device.peak_bytes_of(lambda: make_runner(scratch).run(batch))
    if peak is None or config.enforce_eager or find_graphs(device.torch_device) is None:
        return peak
    # Graphs of decode steps keep what such a step holds, a part of this one.
    return peak + peak * len(batch.items) // sum(lengths)


def _largest_step(config: EngineConfig) -> ScheduledBatch:
    """The most tokens, requests and guesses, and the costliest sampling. One prompt is scored, so
    that the last layer has all rows.
    """
    num_seqs = config.max_num_seqs
    lengths = [config.max_num_batched_tokens // num_seqs] * num_seqs
    lengths[0] += config.max_num_batched_tokens % num_seqs
    params = SamplingParams(temperature=1.0, top_p=0.9, min_p=0.01)
    of_each = [*[params] * (num_seqs - 1), replace(params, prompt_logprobs=0)]
    num_guesses = max(0, config.sampled_rows // num_seqs - 1)
    items = []
    for length, wanted in zip(lengths, of_each, strict=True):
        guesses = (0,) * min(num_guesses, length - 1)
        seq = probe_sequence(PROBE_ID, length - len(guesses), wanted)
        items.append(ScheduledSequence(seq, length, guesses=guesses))
    return ScheduledBatch(tuple(items))
