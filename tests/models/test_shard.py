"""Shard: the parts of all ranks, put together, are the model; and nothing is held twice."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import TINY

from nanoengine.errors import ConfigError
from nanoengine.loading.model_config import read_model_config
from nanoengine.models.shard import UNIT, Shard
from nanoengine.models.weight_shapes import weight_shapes

SPLIT = re.compile(r"(q|k|v|qkv|o|gate|up|gate_up|down)_proj\.|^lm_head\.|\.sinks$")


@pytest.mark.parametrize(
    ("name", "size"),
    [
        (name, size)
        for name, tiny in sorted(TINY.items())
        for size in (1, 2, 4)
        if tiny.settings.get("num_attention_heads", 4) % size == 0
        if size == 1 or tiny.settings.keys().isdisjoint(("linear_num_key_heads", "global_head_dim"))
    ],
)
def test_the_rows_of_all_ranks_are_the_tensor(
    tiny: Callable[[str], Path], name: str, size: int
) -> None:
    config = read_model_config(tiny(name))
    shards = [Shard(rank, size) for rank in range(size)]
    for tensor, shape in weight_shapes(config).items():
        whole = torch.arange(shape[0])
        parts = [shard.take(tensor, whole, config) for shard in shards]
        is_shared = config.num_kv_heads == 1 and re.search("[kv]_proj", tensor)
        is_split = size > 1 and SPLIT.search(tensor) is not None and not is_shared
        assert is_split == (len(parts[0]) < shape[0]), tensor
        if is_split:
            assert torch.equal(torch.cat(parts).unique(), whole), tensor
            shapes = [shard.shapes({tensor: shape}, config)[tensor] for shard in shards]
            assert [shape[0] for shape in shapes] == [*map(len, parts)]
        else:
            assert all(torch.equal(part, whole) for part in parts), tensor


@pytest.mark.parametrize(
    ("name", "what"), [("qwen3.5", "recurrent layers"), ("gemma4", "layers of different shapes")]
)
def test_some_layers_are_not_divided(tiny: Callable[[str], Path], name: str, what: str) -> None:
    config = read_model_config(tiny(name))
    Shard(0, 1).check(config)
    with pytest.raises(ConfigError, match=f"=2 cannot divide a model with {what} yet; leave it"):
        Shard(0, 2).check(config)


def test_ranks_share_a_kv_head_where_there_are_more_ranks(tiny: Callable[[str], Path]) -> None:
    config = read_model_config(tiny("llama"))
    assert (config.num_heads, config.num_kv_heads) == (4, 2)
    rows = torch.arange(config.num_kv_heads * config.head_dim)
    name = "model.layers.0.self_attn.k_proj.weight"
    held = [Shard(rank, 4).take(name, rows, config)[0].item() for rank in range(4)]
    assert held == [0, 0, config.head_dim, config.head_dim]
    assert Shard(3, 4).config(config).num_kv_heads == 1


def test_a_part_is_of_the_heads_that_its_kv_heads_serve(tiny: Callable[[str], Path]) -> None:
    """Query head h reads KV head h // 2: both lie on one rank."""
    config = read_model_config(tiny("llama"))
    layer = "model.layers.0.self_attn."
    for size in (2, 4):
        for rank in range(size):
            shard, head = Shard(rank, size), config.head_dim
            q = shard.take(layer + "q_proj.weight", torch.arange(4 * head) // head // 2, config)
            k = shard.take(layer + "k_proj.weight", torch.arange(2 * head) // head, config)
            assert q.unique().tolist() == k.unique().tolist()


def test_sizes_that_do_not_divide_are_split_into_whole_units() -> None:
    for num in (1, 15, 16, 17, 259, 1000, 49152):
        for size in (2, 3, 4, 5):
            widths = [Shard(rank, size).widths(num) for rank in range(size)]
            assert all(each == widths[0] for each in widths)
            assert sum(widths[0]) == num and min(widths[0]) >= 0
            if num % size:
                ends = [sum(widths[0][:rank]) for rank in range(size)]
                assert all(end % UNIT == 0 or end == num for end in ends)


def test_heads_that_cannot_be_divided_are_refused_with_what_can(
    tiny: Callable[[str], Path],
) -> None:
    config = read_model_config(tiny("llama"))
    with pytest.raises(ConfigError, match=r"4 heads and 2 KV heads; it can be 1, 2, 4$"):
        Shard(0, 3).check(config)
    Shard(0, 4).check(config)


def test_a_norm_over_all_heads_is_not_divided(tiny: Callable[[str], Path]) -> None:
    config = read_model_config(tiny("olmoe"))
    with pytest.raises(ConfigError, match=r"size=2: OlmoeForCausalLM norms.*leave it at 1$"):
        Shard(0, 2).check(config)
    Shard(0, 1).check(config)
