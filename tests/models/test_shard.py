"""Shard: the parts of all ranks, put together, are the model; and nothing is held twice."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import TINY

from nanoengine.config.model import RecurrentConfig, ShortConvConfig
from nanoengine.errors import ConfigError
from nanoengine.loading import loader
from nanoengine.loading.loader import DummyWeights
from nanoengine.loading.model_config import read_model_config
from nanoengine.models.architectures import ARCHITECTURES
from nanoengine.models.delta_net import flat_projections
from nanoengine.models.shard import UNIT, WHOLE, Shard
from nanoengine.models.weight_shapes import weight_shapes

SPLIT = re.compile(
    r"(q|k|v|g|qkv|q_b|kv_b|f_b|g_b|o|gate|up|gate_up|down|out|fc2_latent)_proj\."
    r"|^lm_head\.|\.sinks$"
    r"|in_proj(?!_f_a|_g_a)|conv1d|A_log|dt_bias"
    r"|linear_attn\.D$|per_layer_(model_projection|input_gate|projection)\.|embed_tokens_per_layer"
)


@pytest.mark.some(40)
@pytest.mark.parametrize(
    ("name", "size"),
    [
        (name, size)
        for name, tiny in sorted(TINY.items())
        for size in (1, 2, 4)
        if tiny.settings.get("num_attention_heads", 4) % size == 0
    ],
)
def test_the_parts_of_all_ranks_are_the_tensor(
    tiny: Callable[[str], Path], name: str, size: int
) -> None:
    config = read_model_config(tiny(name))
    shards = [Shard(rank, size) for rank in range(size)]
    for tensor, stored in weight_shapes(config).items():
        shape = stored or (1,)
        by_columns = "embed_tokens_per_layer" in tensor
        axis = int(by_columns)
        whole = torch.arange(shape[axis]).view((1, -1) if by_columns else (-1,))
        parts = [shard.take(tensor, whole, config).flatten() for shard in shards]
        layer = re.search(r"layers\.(\d+)", tensor)
        kv_heads = config.shape(int(layer[1])).num_kv_heads if layer else 0
        is_shared = kv_heads == 1 and re.search(r"\.[kv]_proj", tensor)
        rule = config.recurrent
        is_mamba = isinstance(rule, RecurrentConfig) and rule.rule == "mamba"
        of_mamba = is_mamba and tensor.endswith("linear_attn.norm.weight")
        is_split = size > 1 and not is_shared and (bool(SPLIT.search(tensor)) or of_mamba)
        assert is_split == (len(parts[0]) < shape[axis]), tensor
        if is_split:
            assert torch.equal(torch.cat(parts).unique(), whole.flatten()), tensor
            shapes = [shard.shapes({tensor: shape}, config)[tensor] for shard in shards]
            assert [shape[axis] for shape in shapes] == [*map(len, parts)]
        else:
            assert all(torch.equal(part, whole.flatten()) for part in parts), tensor


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-next"])
def test_value_heads_are_where_their_key_heads_are(
    tiny: Callable[[str], Path], name: str, size: int
) -> None:
    """However a checkpoint lays them out, a rank's rows are q and k of the key heads that serve its
    value heads, then v, z, b and a of these.
    """
    config = read_model_config(tiny(name))
    whole = config.recurrent
    assert isinstance(whole, RecurrentConfig)
    prefix, names = "model.layers.1.linear_attn.", ARCHITECTURES[config.architecture].projections
    # Each row is told by its place among all of them, in the order of DeltaNet.sizes.
    key_dim, value_dim, keys = whole.key_dim, whole.value_dim, whole.num_key_heads
    values, size_v = whole.num_value_heads, whole.value_size
    rows = torch.arange(2 * keys * key_dim + 2 * size_v + 2 * values)[:, None]
    q, k, v, z, b, a = rows.split([keys * key_dim] * 2 + [size_v] * 2 + [values] * 2)
    if "qkvz" in names:

        def by_key_head(*parts: torch.Tensor) -> torch.Tensor:
            return torch.cat([part.view(keys, -1, 1) for part in parts], 1).view(-1, 1)

        stored = {"qkvz": by_key_head(q, k, v, z), "ba": by_key_head(b, a)}
    else:
        stored = {"qkv": torch.cat((q, k, v)), "z": z, "b": b, "a": a}
    for rank in range(size):
        shard = Shard(rank, size)
        part = shard.config(config).recurrent
        assert isinstance(part, RecurrentConfig) and part.num_value_heads == values // size
        mine = {
            name: shard.take(f"{prefix}in_proj_{name}.weight", tensor, config)
            for name, tensor in stored.items()
        }
        heads = range(rank * values // size, (rank + 1) * values // size)
        of = sorted({head * keys // values for head in heads})
        want = [
            *(part.view(keys, key_dim)[of].flatten() for part in (q, k)),
            *(part.view(values, value_dim)[heads].flatten() for part in (v, z)),
            *(part[heads].flatten() for part in (b, a)),
        ]
        found = torch.cat(flat_projections(mine, part)).flatten()
        assert torch.equal(found, torch.cat(want))
        conv = shard.take(f"{prefix}conv1d.weight", torch.cat((q, k, v)), config).flatten()
        assert torch.equal(conv, torch.cat(want[:3]))
        for name in ("A_log", "dt_bias"):
            assert shard.take(prefix + name, torch.arange(values), config).tolist() == [*heads]


@pytest.mark.parametrize("name", ["phi3", "qwen3-next", "gemma4-shared"])
def test_random_weights_of_ranks_are_parts_of_the_whole(
    tiny: Callable[[str], Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank draws its rows alone, also where they begin and end within a block of rows."""
    monkeypatch.setattr(loader, "DUMMY_ROWS", 7)
    config = read_model_config(tiny(name))
    shards = [WHOLE, Shard(0, 2), Shard(1, 2)]
    drawn = [
        DummyWeights(config, shard, torch.device("cpu"), torch.float32, seed=3) for shard in shards
    ]
    wholes = {tensor: drawn[0].part(tensor) for tensor in weight_shapes(config)}
    for tensor, whole in wholes.items():
        for shard, weights in zip(shards[1:], drawn[1:], strict=True):
            assert torch.equal(weights.part(tensor), shard.take(tensor, whole, config)), tensor
    matrices = torch.cat([whole.flatten() for whole in wholes.values() if whole.dim() == 2])
    assert matrices.std().item() == pytest.approx(0.02, rel=0.02)
    assert len(matrices.unique()) > 0.99 * len(matrices)


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
    """Where there is one for each rank: no weight of a rank may be empty."""
    for num in (1, 15, 16, 17, 22, 32, 33, 49, 259, 1000, 49152):
        for size in (2, 3, 4, 5):
            widths = [Shard(rank, size).widths(num) for rank in range(size)]
            assert all(each == widths[0] for each in widths)
            assert sum(widths[0]) == num and min(widths[0]) >= int(num >= size)
            if num % size and num > UNIT * (size - 1):
                ends = [sum(widths[0][:rank]) for rank in range(size)]
                assert all(end % UNIT == 0 or end == num for end in ends)


def test_heads_that_cannot_be_divided_are_refused_with_what_can(
    tiny: Callable[[str], Path],
) -> None:
    config = read_model_config(tiny("llama"))
    with pytest.raises(ConfigError, match=r"4 heads and 2 KV heads; it can be 1, 2, 4$"):
        Shard(0, 3).check(config)
    Shard(0, 4).check(config)


def test_key_heads_of_recurrent_layers_are_divided_too(tiny: Callable[[str], Path]) -> None:
    config = read_model_config(tiny("qwen3.5"))
    assert isinstance(config.recurrent, RecurrentConfig)
    recurrent = replace(config.recurrent, num_key_heads=3, num_value_heads=6)
    of_three = replace(config, num_heads=6, num_kv_heads=3, recurrent=recurrent)
    Shard(0, 6).check(of_three)
    with pytest.raises(ConfigError, match=r"or the 6 heads and 3 key heads of its rec.* be 1$"):
        Shard(0, 2).check(replace(config, recurrent=recurrent))


def test_a_rank_has_b_c_and_x_of_its_channels(tiny: Callable[[str], Path]) -> None:
    config = read_model_config(tiny("lfm2"))
    assert isinstance(config.recurrent, ShortConvConfig)
    num, prefix = config.recurrent.channels, "model.layers.0.linear_attn."
    parts = [Shard(rank, 2).config(config).recurrent for rank in range(2)]
    assert parts == [replace(config.recurrent, channels=num // 2)] * 2
    found = [Shard(1, 2).rows(f"{prefix}in_proj.{kind}", config) for kind in ("weight", "bias")]
    assert found == [tuple(range(at + num // 2, at + num) for at in (0, num, 2 * num))] * 2
    assert Shard(1, 2).rows(f"{prefix}conv1d.bias", config) == (range(num // 2, num),)
    odd = replace(config, recurrent=replace(config.recurrent, channels=71))
    with pytest.raises(ConfigError, match=r"or the 71 channels of its convolutions; it can be 1$"):
        Shard(0, 2).check(odd)


def test_kv_heads_of_every_layer_are_divided(tiny: Callable[[str], Path]) -> None:
    config = read_model_config(tiny("gemma4"))
    Shard(0, 4).check(config)
    parts = [Shard(rank, 4).config(config) for rank in range(4)]
    assert {shape.num_kv_heads for part in parts for shape in part.shapes} == {1}
    shapes = tuple(replace(shape, num_kv_heads=shape.num_kv_heads + 1) for shape in config.shapes)
    with pytest.raises(ConfigError, match=r"=4 .* 4 heads and 2 or 3 KV heads; it can be 1$"):
        Shard(0, 4).check(replace(config, shapes=shapes))


@pytest.mark.parametrize(
    ("name", "shared"), [("hunyuan-moe", "shared_mlp"), ("glm4-moe", "shared_experts")]
)
def test_a_shared_expert_is_divided_by_its_own_size(
    tiny: Callable[[str], Path], name: str, shared: str
) -> None:
    config = read_model_config(tiny(name))
    assert config.experts is not None
    config = replace(config, experts=replace(config.experts, shared_size=96))
    tensor = f"model.layers.1.mlp.{shared}.gate_proj.weight"
    assert Shard(1, 2).rows(tensor, config) == (range(48, 96),)
