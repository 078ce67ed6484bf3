"""Recurrent layers in Triton beside PyTorch's path: a part of gpu_check.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from recurrent_layers import Rule, context_of, in_slots, make_net, make_state, run_step, some_rows
from torch import Tensor

from benchmarks.gpu.gpu_kernels import kernel_s, wall_s
from benchmarks.gpu.gpu_measure import Row, Scale
from nanoengine.config.model import RecurrentConfig
from nanoengine.context import ForwardContext, RecurrentState
from nanoengine.models.rules import RecurrentNet, recurrence

SHAPES = {
    "Qwen3.6-27B": RecurrentConfig((0,), 16, 48, 128, 128, 4),
    "Nemotron-H-8B": RecurrentConfig((0,), 8, 128, 128, 64, 4, rule="mamba"),
    "Granite-4-H-Small": RecurrentConfig((0,), 1, 128, 128, 64, 4, rule="mamba"),
    "Kimi-Linear-48B": RecurrentConfig((0,), 32, 32, 128, 128, 4, rule="kimi"),
    "Ling-3.0": RecurrentConfig((0,), 32, 32, 128, 128, 4, rule="kimi", least_rate=-5.0),
}
SMALL = {
    "delta": RecurrentConfig((0,), 1, 2, 16, 24, 4),
    "Mamba-2": RecurrentConfig((0,), 1, 2, 16, 24, 4, rule="mamba"),
    "Kimi": RecurrentConfig((0,), 2, 2, 16, 24, 4, rule="kimi"),
    "Kimi, bounded": RecurrentConfig((0,), 2, 2, 16, 24, 4, rule="kimi", least_rate=-5.0),
}
PROMPT, BESIDE_PYTORCH = 8192, 512  # tokens; PyTorch launches a dozen kernels for each
DECODES = (1, 64)
TOLERANCE = 0.03  # of bfloat16


def recurrent_layers(scale: Scale) -> Iterator[Row]:
    """One layer in bfloat16: tokens of a prompt in a second, microseconds that kernels of a decode
    run. A row says whether the numbers are PyTorch's, and whether a prompt has the same bits in
    pieces, the last ones of one token, beside another sequence.
    """
    if scale.is_rehearsal:
        from quick_interpreter import speed_up

        speed_up()  # and bfloat16 is rounded
    for name, shape in (SMALL if scale.is_rehearsal else SHAPES).items():
        yield {"model": name} | layer_row(shape, scale)


def layer_row(shape: RecurrentConfig, scale: Scale) -> Row:
    """Of one layer."""
    device, length = torch.device(scale.device), 8 if scale.is_rehearsal else PROMPT
    net = make_net(shape, device)
    states = partial(make_state, shape, torch.bfloat16, max(DECODES), device)
    rows, part, mate = some_rows(net, torch.bfloat16, length, min(length, BESIDE_PYTORCH), 1)
    found = [
        [*run_step(rule, net, state, [part], [0], [0]), state.memory[0]]
        for rule, state in ((in_triton, states()), (recurrence, states()))
    ]
    pairs = [(ours.float(), theirs.float()) for ours, theirs in zip(*found, strict=True)]
    are_near = all(torch.allclose(*pair, atol=TOLERANCE, rtol=TOLERANCE) for pair in pairs)
    is_same = in_pieces_is_whole(net, states, rows, mate)
    row: Row = {
        "prompt": length,
        "largest_errors": [round(float((a - b).abs().max()), 5) for a, b in pairs],
        "bits_in_pieces": is_same,
        "ok": are_near and is_same,
    }

    def step(rule: Rule, x: Tensor, lengths: list[int], done: int) -> Callable[[], Tensor]:
        num = len(lengths)
        ctx = context_of(lengths, [done] * num, device)
        return partial(rule, x, net, in_slots(states(), range(num)), ctx)

    for rule, of in ((in_triton, ""), (recurrence, "pytorch_")):
        prompt = rows if rule is in_triton else part
        seconds = wall_s(step(rule, prompt, [len(prompt)], 0), scale)
        row[f"{of}tokens_per_s"] = round(len(prompt) / seconds, 1)
        for num in DECODES[:1] if scale.is_rehearsal else DECODES:
            decode = step(rule, mate.expand(num, -1).contiguous(), [1] * num, 9)
            row[f"{of}decode_us_{num}"] = round(1e6 * kernel_s(decode, device), 1)
    return row


def in_pieces_is_whole(
    net: RecurrentNet, states: Callable[[], RecurrentState], rows: Tensor, mate: Tensor
) -> bool:
    """Whether a prompt, cut up and beside another sequence, has the bits of it in one step."""
    whole, state, got, done = states(), states(), [], 0
    (want,) = run_step(in_triton, net, whole, [rows], [0], [0])
    half = len(rows) // 2
    for piece in torch.split(rows, [half, len(rows) - half - 2, 1, 1]):
        got.append(run_step(in_triton, net, state, [mate, piece], [5, done], [1, 0])[1])
        done += len(piece)
    pairs = ((torch.cat(got), want), (state.memory[0], whole.memory[0]))
    return all(torch.equal(a, b) for a, b in pairs)


def in_triton(x: Tensor, net: RecurrentNet, state: RecurrentState, ctx: ForwardContext) -> Tensor:
    """As engines call it on a GPU."""
    from nanoengine.kernels.triton_recurrence import recurrence  # after --device is known

    return recurrence(x, net, state, ctx)
