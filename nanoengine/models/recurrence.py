"""What recurrent layers share in PyTorch: the convolution before a rule, and the rule's steps.

Every token is a step of its own, also in a prompt: so the bits of a row depend on its history
alone, however that was cut into steps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nanoengine.context import ForwardContext, RecurrentState


def new_sequences(ctx: ForwardContext) -> Tensor:
    """Of each sequence, whether its first token is in the step."""
    return ctx.kv_lens == ctx.query_start.diff()


def each_step(
    state: RecurrentState,
    ctx: ForwardContext,
    is_new: Tensor,
    step: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Replace the memory of each sequence, token by token: step(rows, memory) of one token of some
    sequences is their next memory.
    """
    starts = ctx.query_start[:-1].long()
    memory = state.memory[state.slots].masked_fill(is_new.view(-1, 1, 1, 1), 0.0)
    counts = [count for count, _ in ctx.lengths]
    longest_first = _longest_first(counts, memory.device)
    for done in range(max(counts)):
        num = sum(count > done for count in counts)
        at = None if num == len(counts) else longest_first[:num]
        rows = (starts if at is None else starts[at]) + done
        now = step(rows, memory if at is None else memory[at])
        memory = now if at is None else memory.index_copy(0, at, now)
    state.memory.index_copy_(0, state.slots, memory)


def _longest_first(counts: list[int], device: torch.device) -> Tensor:
    """The sequences, those with most tokens first, int64 [n]; the host does not wait. Of a decode
    nothing goes to the device, so that it can be a CUDA graph.
    """
    if min(counts) == max(counts):
        return torch.empty(0, dtype=torch.int64)
    order = torch.tensor(sorted(range(len(counts)), key=counts.__getitem__, reverse=True))
    if device.type != "cpu":
        order = order.pin_memory()
    return order.to(device, non_blocking=True)


def convolve(
    x: Tensor,
    weights: Tensor,
    state: RecurrentState,
    ctx: ForwardContext,
    is_new: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """The causal convolution of x, [tokens, channels]; keeps the last inputs.

    weights: fp32 [conv_size, channels], the oldest token first. bias: fp32 [channels].
    """
    starts, stops = ctx.query_start[:-1].long(), ctx.query_start[1:].long()
    before = state.inputs[state.slots].masked_fill(is_new.view(-1, 1, 1), 0.0)
    num_seqs, kept, _ = before.shape
    rows = torch.arange(len(x), device=x.device)
    seqs = torch.searchsorted(stops, rows, right=True)
    both = torch.cat((before.flatten(0, 1), x))
    summed = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    if bias is not None:
        summed += bias
    for place, weight in enumerate(weights):
        ago = kept - place
        is_earlier = rows - ago < starts[seqs]
        earlier = seqs * kept + rows - starts[seqs] + place
        summed += both[torch.where(is_earlier, earlier, num_seqs * kept + rows - ago)] * weight
    places = torch.arange(kept, device=x.device)
    last = stops[:, None] - kept + places
    earlier = torch.arange(num_seqs, device=x.device)[:, None] * kept + places
    earlier = earlier + (stops - starts)[:, None]
    last = torch.where(last < starts[:, None], earlier, num_seqs * kept + last)
    state.inputs.index_copy_(0, state.slots, both[last])
    return summed.to(x.dtype)
