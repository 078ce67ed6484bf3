"""KVSpec: the shape of the KV cache, and how much of it one sequence may hold. Arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanoengine.config.model import AnyRecurrent
from nanoengine.errors import PromptTooLongError, counted
from nanoengine.kv.kv_codec import KVCodec


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The shape of the KV cache: blocks of [parts, block_size, kv_heads, head_dim] a layer.

    parts: 2, K and V; 1: K alone, which is V, too. heads: (kv_heads, head_dim) of each layer with
    KV. sources: for each layer with attention, which of these it reads: it may be one that an
    earlier layer has written; () if each has its own.

    num_blocks on the device; num_host_blocks on the host (0: no offload). Host blocks stream
    through ring_slots buffers of slot_blocks blocks each; slot_blocks 0 reads them in host memory.
    window: keys that a query sees in the layer that sees most (0: all). step_tokens: most tokens of
    a sequence in a step. With a window, a sequence holds the blocks of both. windows: of each layer
    with attention (None: all keys); () without any. host_codec: of host blocks (None: as on the
    device). least_run_bytes: of one layer; a shorter run of device blocks between streamed ones is
    streamed too if the host has it, as two more fills and attention calls would take longer.
    recurrent: of such layers; num_states: sequences that can have their state at once, which are
    those that run; keeps_states: each has a second one, of before the guesses of a step;
    num_snapshots: of states that the host holds for prefix hits and preempted sequences.
    drafts_from: blocks of a sequence that drafts although all its KV is on the device
    (draft_plan.drafts_from); 0: none does. drafts_apart: another model drafts, for all sequences,
    and reads all that is on the device; drafts_stand: as DraftReads.stands, of all.
    """

    heads: tuple[tuple[int, int], ...]
    num_blocks: int
    block_size: int
    dtype: torch.dtype
    num_host_blocks: int = 0
    ring_slots: int = 0
    slot_blocks: int = 0
    spare_blocks: int = 0
    parts: int = 2
    window: int = 0
    step_tokens: int = 1
    windows: tuple[int | None, ...] = ()
    host_codec: KVCodec | None = None
    least_run_bytes: int = 0
    recurrent: AnyRecurrent | None = None
    num_states: int = 0
    keeps_states: bool = False
    num_snapshots: int = 0
    sources: tuple[int, ...] = ()
    drafts_from: int = 0
    drafts_apart: bool = False
    drafts_stand: bool = False

    @property
    def num_layers(self) -> int:
        """Layers with KV."""
        return len(self.heads)

    @property
    def layer_blocks(self) -> list[tuple[int, int, int, int]]:
        """The shape of a block in each layer with KV."""
        return [(self.parts, self.block_size, *heads) for heads in self.heads]

    @property
    def layer_sources(self) -> tuple[int, ...]:
        """For each layer with attention, the one with KV that it reads."""
        return self.sources or tuple(range(self.num_layers))

    @property
    def num_state_slots(self) -> int:
        """Slots of recurrent states that sequences may have. One more slot is for padding rows."""
        return self.num_states * (2 if self.keeps_states else 1)

    @property
    def state_bytes(self) -> int:
        """Bytes of all recurrent states on the device."""
        return (self.num_state_slots + 1) * self.bytes_of_a_state if self.recurrent else 0

    @property
    def bytes_of_a_state(self) -> int:
        """Bytes of the recurrent state of a sequence, or of a snapshot; 0: it has none."""
        if self.recurrent is None:
            return 0
        inputs, memory = map(math.prod, self.recurrent.state_shapes)
        return len(self.recurrent.layers) * (inputs * self.dtype.itemsize + memory * 4)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: all parts of all layers."""
        return sum(self._layer_bytes)

    @property
    def host_block_bytes(self) -> int:
        """Bytes of one block on the host."""
        codec = self.host_codec
        if codec is None:
            return self.block_bytes
        return sum(math.prod(codec.host_block(block)) for block in self.layer_blocks)

    @property
    def load_bytes(self) -> int:
        """Bytes of one block that come over the link when it is loaded."""
        return sum(self._loaded_bytes)

    @property
    def read_bytes(self) -> list[int]:
        """Bytes of one block that come over the link for each layer with attention."""
        return [self._loaded_bytes[source] for source in self.layer_sources]

    @property
    def _loaded_bytes(self) -> list[int]:
        """Bytes of a block that come over the link, in each layer with KV."""
        codec = self.host_codec
        if codec is None:
            return self._layer_bytes
        of_token = [codec.read_bytes(*heads) for heads in self.heads]
        return [self.parts * self.block_size * num for num in of_token]

    @property
    def _layer_bytes(self) -> list[int]:
        """Bytes of a block on the device, in each layer with KV."""
        return [math.prod(block) * self.dtype.itemsize for block in self.layer_blocks]

    @property
    def least_run(self) -> int:
        """The fewest device blocks between streamed ones that are read in place; see
        least_run_bytes. 0 with a lossy host: device blocks are then never streamed.
        """
        is_lossy = self.host_codec is not None and self.host_codec.is_lossy
        if is_lossy or not self.slot_blocks:
            return 0
        return -(-self.least_run_bytes * self.num_layers // self.block_bytes)

    @property
    def ring_bytes(self) -> int:
        """Bytes of the ring; each slot holds blocks of one layer, whichever it is."""
        return self.ring_slots * self.slot_blocks * max(self._layer_bytes)

    @property
    def fixed_bytes(self) -> int:
        """Bytes on the device beside blocks of KV."""
        return self.ring_bytes + self.state_bytes

    @property
    def capacity_blocks(self) -> int:
        """Blocks that unfinished requests can hold, on both tiers."""
        spare = self.spare_blocks if self.num_host_blocks else 0
        return self.num_blocks + self.num_host_blocks - spare

    @property
    def num_tokens(self) -> int:
        """Tokens that unfinished requests can hold, on both tiers."""
        return self.capacity_blocks * self.block_size

    @property
    def max_held_blocks(self) -> int:
        """Most blocks that a sequence holds; blocks that its window has passed are released."""
        if not self.window:
            return self.capacity_blocks
        return min(self.capacity_blocks, self._blocks_of(self.window - 1 + self.step_tokens))

    @property
    def kept_blocks(self) -> int:
        """Device blocks that a running sequence keeps: the block that it writes and, while KV
        streams, all blocks of the widest window, so that layers with a window never stream. If the
        device cannot hold that window, it streams like the rest.
        """
        blocks = self.widest_blocks if self.slot_blocks else 0
        return blocks if 0 < blocks < self.num_blocks else 1

    @property
    def streamed_bytes(self) -> int:
        """Bytes that a step copies of a host block: of the layers that read blocks before the kept
        ones, also where several read the same KV.
        """
        return sum(self.read_bytes) if self.kept_blocks == 1 else self._far_bytes(self.read_bytes)

    @property
    def draft_bytes(self) -> int:
        """Bytes that a step reads of a block on the device which no window reaches."""
        each = self._layer_bytes
        return self._far_bytes([each[source] for source in self.layer_sources])

    def _far_bytes(self, of_layers: list[int]) -> int:
        """The sum over layers without a window."""
        windows = self.windows or (None,) * len(of_layers)
        return sum(n for window, n in zip(windows, of_layers, strict=True) if window is None)

    def first_kept(self, num_computed: int) -> int:
        """The first kept block of a sequence with `num_computed` computed tokens."""
        reach = self._widest if self.kept_blocks > 1 else 1
        return max(0, num_computed + 1 - reach) // self.block_size

    @property
    def widest_blocks(self) -> int:
        """The most blocks that the widest window of a layer spans; 0 if no layer has one."""
        return self._blocks_of(self._widest) if self._widest else 0

    @property
    def _widest(self) -> int:
        """The widest window of a layer; 0 if no layer has one."""
        return max((window for window in self.windows if window), default=0)

    def first_needed(self, num_computed: int) -> int:
        """The first block that a sequence with `num_computed` computed tokens needs."""
        return max(0, num_computed + 1 - self.window) // self.block_size if self.window else 0

    def holds(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` tokens could finish alone."""
        goes_on = self.window and self._blocks_of(self.window) <= self.capacity_blocks
        return num_tokens <= self.num_tokens or bool(goes_on)

    def host_bytes_for(self, num_tokens: int) -> int:
        """Host memory with which a sequence of `num_tokens` tokens could finish alone."""
        num_blocks = -(-num_tokens // self.block_size) + self.spare_blocks - self.num_blocks
        return max(1, num_blocks) * self.host_block_bytes

    def check_fits(self, num_prompt: int, max_tokens: int, advice: Callable[[int], str]) -> None:
        """Raise PromptTooLongError if the request could not finish alone in an empty engine.

        advice: how to make room for so many tokens, as text.
        """
        asked = num_prompt + max_tokens
        if self.holds(asked):
            return
        held = counted(self.num_blocks, "block")
        if self.num_host_blocks:
            held = (
                f"({self.num_blocks} device + {self.num_host_blocks} host - {self.spare_blocks} "
                "reserve) blocks"
            )
        raise PromptTooLongError(
            f"the prompt has {counted(num_prompt, 'token')} and may generate {max_tokens}: {asked} "
            f"in all, but the KV cache holds {self.num_tokens} ({held} x {self.block_size} tokens)"
            f"; {advice(asked)}, or ask for less"
        )

    def _blocks_of(self, num_tokens: int) -> int:
        """The most blocks that `num_tokens` consecutive tokens can span, wherever they begin."""
        return (num_tokens - 2) // self.block_size + 2
