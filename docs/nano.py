"""The engine in 300 lines of plain PyTorch, fp32 and greedy: nanoengine without what makes it fast.

`python docs/nano.py FOLDER "The sea is" "def add(a, b):"` completes the texts. FOLDER is a Hugging
Face folder of a Llama; `resolve_model("smollm2-135m")` of nanoengine/loading/find_model.py has one.

The KV cache is cut into blocks: a few on the "device", many on the "host". A step writes into
device blocks only; when these run out, full ones are stored on the host. Attention reads the blocks
of a request in order, those on the host through a small ring, and carries its softmax from block to
block. So one device block is enough for any length, and where blocks lie changes no answer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

DEVICE, HOST = "device", "host"


@dataclass(eq=False)
class Request:
    """The first `num_computed` tokens have KV; a step computes those from there to `end`."""

    tokens: list[int]  # the prompt, then what is generated
    max_total_tokens: int
    block_table: list[Block] = field(default_factory=list)
    num_cached: int = 0  # tokens found in the prefix cache
    num_computed: int = 0
    end: int = 0
    rows: slice | None = None  # of these tokens in the step's batch


class Engine:
    """Runs all requests together, a step at a time; they join and leave between steps."""

    def __init__(self, model: Llama, kv: KVCache, max_num_batched_tokens: int = 256) -> None:
        self.model, self.kv, self.max_num_batched_tokens = model, kv, max_num_batched_tokens
        self.max_num_seqs = min(kv.num_device, max_num_batched_tokens)
        self.waiting, self.running = [], []  # Requests, the oldest first

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[Request]:
        """Runs all prompts (token ids), each to its end."""
        most = min(self.model.max_position, self.kv.capacity * self.kv.block_size) - max_tokens
        if not all(0 < len(prompt) <= most for prompt in prompts):
            raise ValueError(f"a prompt must have a token, and may have {most}")
        requests = [Request(list(prompt), len(prompt) + max_tokens) for prompt in prompts]
        self.waiting += requests
        while self.waiting or self.running:
            batch = self.schedule()  # 1. who computes which tokens: chunks of prompts, and decodes
            next_tokens = self.run(batch)  # 2. one pass of the model over all of these
            self.postprocess(batch, next_tokens)  # 3. count what has KV now, free what has ended
        return requests

    def schedule(self) -> list[Request]:
        """All compute a token, the oldest more: so a block being filled never leaves the device."""
        row, size = 0, self.kv.block_size
        while self.waiting and self.has_room_for(self.waiting[0]):
            self.running.append(request := self.waiting.pop(0))
            request.block_table = self.kv.find_prefix(request.tokens)
            request.num_cached = request.num_computed = len(request.block_table) * size
        tokens = self.max_num_batched_tokens - len(self.running)  # beyond one for each
        blocks = self.kv.num_device - len(self.running)  # beyond the one it is written to
        for request in self.running:
            start = request.num_computed
            writable = (start // size + 1 + blocks) * size
            request.end = min(start + 1 + tokens, writable, len(request.tokens))
            request.rows = slice(row, row := row + request.end - start)
            tokens -= request.end - start - 1
            blocks -= (request.end - 1) // size - start // size
            while len(request.block_table) * size < request.end:
                request.block_table.append(self.kv.allocate())
        return list(self.running)

    def has_room_for(self, request: Request) -> bool:
        """Whether all can run to their ends; nanoengine begins sooner, and preempts if need be."""
        needed = sum(-(-r.max_total_tokens // self.kv.block_size) for r in [*self.running, request])
        return needed <= self.kv.capacity and len(self.running) < self.max_num_seqs

    @torch.inference_mode()
    def run(self, batch: list[Request]) -> list[int]:
        """The likeliest token after the last one of each."""
        tokens = torch.tensor([t for r in batch for t in r.tokens[r.num_computed : r.end]])
        positions = torch.tensor([p for r in batch for p in range(r.num_computed, r.end)])
        x = self.model.forward(tokens, positions, StepKV(self.kv, batch, positions))
        logits = self.model.linear("lm_head", x[[r.rows.stop - 1 for r in batch]])
        assert logits.isfinite().all(), "a step read KV that nobody had written"
        return logits.argmax(-1).tolist()

    def postprocess(self, batch: list[Request], next_tokens: list[int]) -> None:
        for request, token in zip(batch, next_tokens, strict=True):
            self.kv.publish(request)
            request.num_computed = request.end
            if request.end == len(request.tokens):  # else there is more of its prompt to come
                request.tokens.append(token)
                if token in self.model.eos_ids or len(request.tokens) >= request.max_total_tokens:
                    self.running.remove(request)
                    self.kv.free(request.block_table)


class Llama:
    """The transformer: knows weights and positions, and nothing of blocks."""

    def __init__(self, folder: Path) -> None:
        files = (folder / "config.json", folder / "generation_config.json")
        config, generation = (json.loads(f.read_text()) if f.exists() else {} for f in files)
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if config["architectures"] != ["LlamaForCausalLM"] or kind != "default":
            raise ValueError(f"{folder} is no Llama with plain rotary embeddings")
        shards = [load_file(file) for file in folder.glob("*.safetensors")]
        self.weights = {name: w.float() for shard in shards for name, w in shard.items()}
        if config.get("tie_word_embeddings"):
            self.weights["lm_head.weight"] = self.weights["model.embed_tokens.weight"]
        self.num_layers, num_heads = config["num_hidden_layers"], config["num_attention_heads"]
        self.num_kv_heads = config.get("num_key_value_heads") or num_heads
        self.head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
        self.eps, self.max_position = config["rms_norm_eps"], config["max_position_embeddings"]
        theta = rope.get("rope_theta") or config.get("rope_theta", 10000.0)
        self.frequencies = theta ** -(torch.arange(0, self.head_dim, 2) / self.head_dim)
        eos = generation.get("eos_token_id", config.get("eos_token_id"))
        self.eos_ids = set(eos) if isinstance(eos, list) else {eos}

    def forward(self, tokens: Tensor, positions: Tensor, kv: StepKV) -> Tensor:
        """[tokens, hidden]; the tokens of all requests lie end to end."""
        angles = positions[:, None, None] * self.frequencies
        x = self.weights["model.embed_tokens.weight"][tokens]
        for layer in range(self.num_layers):
            name = f"model.layers.{layer}."
            x = x + self.attention(layer, self.norm(name + "input_layernorm", x), angles, kv)
            x = x + self.mlp(layer, self.norm(name + "post_attention_layernorm", x))
        return self.norm("model.norm", x)

    def attention(self, layer: int, x: Tensor, angles: Tensor, kv: StepKV) -> Tensor:
        name, dim = f"model.layers.{layer}.self_attn.", self.head_dim
        q, k, v = (self.linear(f"{name}{p}_proj", x).unflatten(1, (-1, dim)) for p in "qkv")
        heads = kv.attend(layer, self.rotate(q, angles), self.rotate(k, angles), v)
        return self.linear(name + "o_proj", heads.flatten(1))

    def rotate(self, x: Tensor, angles: Tensor) -> Tensor:
        a, b, cos, sin = *x.chunk(2, -1), angles.cos(), angles.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        gate, up, down = (f"model.layers.{layer}.mlp.{p}_proj" for p in ("gate", "up", "down"))
        return self.linear(down, F.silu(self.linear(gate, x)) * self.linear(up, x))

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[name + ".weight"], self.eps)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[name + ".weight"], self.weights.get(name + ".bias"))


class StepKV:
    """The KV cache as one step sees it: where its tokens are written, and what it reads."""

    def __init__(self, kv: KVCache, batch: list[Request], positions: Tensor) -> None:
        self.kv, self.positions = kv, positions
        places = [(r, p // kv.block_size) for r in batch for p in range(r.num_computed, r.end)]
        self.slots = torch.tensor([r.block_table[index].slot for r, index in places])
        # In logical order. A shared prefix has one place in all tables: it is read once for all.
        reads: dict[tuple[int, Block], list[Request]] = {}
        for request in batch:
            for place in enumerate(request.block_table):
                reads.setdefault(place, []).append(request)
        self.reads = sorted(reads.items(), key=lambda read: read[0][0])
        self.ring = kv.stream([block.slot for (_, block), _ in self.reads if block.tier == HOST])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Writes k and v, then computes attention for q: [tokens, heads, head_dim] each."""
        pool, size = self.kv.pools[DEVICE][layer], self.kv.block_size
        pool[self.slots, :, self.positions % size] = torch.stack((k, v), 1)
        q = q.unflatten(1, (k.shape[1], -1)) * q.shape[-1] ** -0.5  # [tokens, kv heads, group, dim]
        # The softmax so far: largest score, sum of exp(score - largest), values weighted by these.
        row_max = torch.full((*q.shape[:3], 1), -torch.inf)
        row_sum, acc = torch.zeros_like(row_max), torch.zeros_like(q)
        for (index, block), readers in self.reads:
            keys, values = next(self.ring) if block.tier == HOST else pool[block.slot]
            for r in readers:
                visible = self.positions[r.rows] + 1 - index * size
                state = row_max[r.rows], row_sum[r.rows], acc[r.rows]
                fold(*state, q[r.rows], keys[: visible[-1]], values[: visible[-1]], visible)
        return (acc / row_sum).flatten(1, 2)


def fold(row_max, row_sum, acc, q, keys, values, visible) -> None:
    """Folds keys, of which each row of q sees so many, into its softmax (arXiv 1805.02867)."""
    scores = torch.einsum("rhgd,khd->rhgk", q, keys)
    scores.masked_fill_(torch.arange(len(keys)) >= visible[:, None, None, None], -torch.inf)
    new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))  # finite after the first block
    weights, shrink = torch.exp(scores - new_max), torch.exp(row_max - new_max)
    row_max.copy_(new_max)
    row_sum.mul_(shrink).add_(weights.sum(-1, keepdim=True))
    acc.mul_(shrink).add_(torch.einsum("rhgk,khd->rhgd", weights, values))


@dataclass(eq=False)
class Block:
    """The KV of `block_size` tokens, all layers; published under its key once it is full."""

    slot: int
    tier: str = DEVICE
    ref_count: int = 1
    key: tuple[Block | None, tuple[int, ...]] | None = None  # the block before it, its tokens


class KVCache:
    """Owns the blocks of both tiers, and the ring through which host blocks are read."""

    def __init__(self, model: Llama, num_device: int, num_host: int, size: int, ring: int) -> None:
        self.block_size, self.num_device, self.capacity = size, num_device, num_device + num_host
        self.free_slots = {DEVICE: list(range(num_device)), HOST: list(range(num_host))}
        # What is free is poisoned: who reads it gets NaN, and Engine.run notices.
        block = (2, size, model.num_kv_heads, model.head_dim)  # 2: keys and values
        shapes = {t: (model.num_layers, len(s), *block) for t, s in self.free_slots.items()}
        self.pools = {tier: torch.full(shape, torch.nan) for tier, shape in shapes.items()}
        self.ring = torch.full((ring, *block), torch.nan)
        self.published: dict[tuple, Block] = {}  # the prefix cache; what was freed last at its end

    def allocate(self) -> Block:
        """A new block on the device, with one owner; others make room for it."""
        if not any(self.free_slots.values()):  # forget what nobody has used for the longest time
            oldest = next(block for block in self.published.values() if not block.ref_count)
            self.free_slot(self.published.pop(oldest.key))
        if not self.free_slots[DEVICE]:  # what nobody uses goes first, what many share last
            full = (block for block in self.published.values() if block.tier == DEVICE)
            self.store(min(full, key=lambda block: block.ref_count))
        return Block(self.free_slots[DEVICE].pop())

    def store(self, block: Block) -> None:
        """Moves a full block to the host, for good; nanoengine brings it back if there is room."""
        slot = self.free_slots[HOST].pop()
        self.pools[HOST][:, slot] = self.pools[DEVICE][:, block.slot]
        self.free_slot(block)
        block.tier, block.slot = HOST, slot

    def stream(self, slots: list[int]) -> Iterator[Tensor]:
        """Yields host blocks, for one layer after the other, in the ring, which is filled ahead."""
        fills = [(layer, slot) for layer in range(len(self.pools[HOST])) for slot in slots]
        for turn in range(-len(self.ring), len(fills)):
            ring_slot, ahead = self.ring[turn % len(self.ring)], turn + len(self.ring)
            if turn >= 0:
                yield ring_slot  # filled: in nanoengine, which copies while it computes, an event
                ring_slot.fill_(torch.nan)  # drained: another one, for which the next copy waits
            if ahead < len(fills):
                ring_slot.copy_(self.pools[HOST][fills[ahead]])

    def free(self, block_table: list[Block]) -> None:
        """One owner less. What is published stays until its slot is needed, a prefix longest."""
        for block in reversed(block_table):
            block.ref_count -= 1
            if block.key:
                self.published[block.key] = self.published.pop(block.key)
            elif not block.ref_count:
                self.free_slot(block)

    def free_slot(self, block: Block) -> None:
        self.pools[block.tier][:, block.slot] = torch.nan
        self.free_slots[block.tier].append(block.slot)

    def key(self, before: list[Block], tokens: list[int]) -> tuple:
        """A chain, as each names the block before; a dict hashes it, then compares the tokens."""
        start = len(before) * self.block_size
        return before[-1] if before else None, tuple(tokens[start : start + self.block_size])

    def find_prefix(self, tokens: list[int]) -> list[Block]:
        """Takes the published blocks that the tokens begin with, all but the last token."""
        block_table: list[Block] = []
        while block := self.published.get(self.key(block_table, tokens[:-1])):
            block.ref_count += 1
            block_table.append(block)
        return block_table

    def publish(self, request: Request) -> None:
        """The blocks that this step filled can be found from now on."""
        table, size = request.block_table, self.block_size
        for index in range(request.num_computed // size, request.end // size):
            block, key = table[index], self.key(table[:index], request.tokens)
            table[index] = kept = self.published.setdefault(key, block)
            kept.key = key
            if kept is not block:  # another request computed the same meanwhile
                kept.ref_count += 1
                self.free([block])


if __name__ == "__main__":
    folder, *texts = sys.argv[1:]
    model, tokenizer = Llama(Path(folder)), Tokenizer.from_file(f"{folder}/tokenizer.json")
    engine = Engine(model, KVCache(model, num_device=4, num_host=124, size=16, ring=2))
    for request in engine.generate([tokenizer.encode(text).ids for text in texts], max_tokens=64):
        print(tokenizer.decode(request.tokens), end="\n\n")
