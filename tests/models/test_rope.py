"""Rotary embeddings: frequencies and factors are transformers', and the two kinds that depend on
the length keep to one choice in a whole run.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import reference, reference_logits
from driver import GREEDY, Driver
from tiny_models import TINY
from transformers import LlamaConfig, Phi3Config, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanoengine.config.model import RopeConfig
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.errors import ConfigError, CorruptModelError, UnsupportedModelError
from nanoengine.loading.model_config import read_model_config
from nanoengine.models.rope import Rotary, head_order, inverse_frequencies, rotary_pairs

PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
PHI3 = {"architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": 1024}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 16 for i in range(16)],
    "long_factor": [1.0 + i for i in range(16)],
}
PART = {
    "rope_type": "longrope",
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + i / 12 for i in range(12)],
    "long_factor": [1.0 + i for i in range(12)],
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


def config_path(folder: Path, changes: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(PLAIN | changes))
    return folder


def wanted(changes: dict[str, Any], length: int | None) -> tuple[torch.Tensor, float]:
    """inv_freq and attention factor by transformers' own rule."""
    kinds = {"LlamaForCausalLM": LlamaConfig, "Phi3ForCausalLM": Phi3Config}
    settings = {"pad_token_id": None} | PLAIN | changes
    config: PreTrainedConfig = kinds[settings["architectures"][0]](**settings)
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        dim = int(32 * config.rope_parameters.get("partial_rotary_factor", 1.0))
        return 1 / config.rope_parameters["rope_theta"] ** (torch.arange(0, dim, 2) / dim), 1.0
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int | None]] = {
    "default": ({}, {"rope_type": "default"}, None),
    "default, in part": (PHI3, {"rope_type": "default", "partial_rotary_factor": 0.5}, None),
    "linear": ({}, {"rope_type": "linear", "factor": 3.0}, None),
    "llama3": ({}, LLAMA3, None),
    "dynamic, within": ({}, {"rope_type": "dynamic", "factor": 4.0}, 1000),
    "dynamic, unasked": ({}, {"rope_type": "dynamic", "factor": 1.1}, None),
    "dynamic, beyond": ({}, {"rope_type": "dynamic", "factor": 4.0}, 9000),
    "yarn": ({}, YARN, None),
    "yarn, base": ({"rope_theta": 5e5}, YARN | {"factor": 2.0}, None),
    "yarn, not truncated": ({}, YARN | {"truncate": False}, None),
    "yarn, betas": ({}, YARN | {"beta_fast": 16, "beta_slow": 2}, None),
    "yarn, betas null": ({}, YARN | {"beta_fast": None, "attention_factor": None}, None),
    "yarn, factor given": ({}, YARN | {"attention_factor": 0.7}, None),
    "yarn, mscale": ({}, YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}, None),
    "yarn, one mscale": ({}, YARN | {"mscale": 0.5}, None),
    "yarn, shrinking": ({}, YARN | {"factor": 0.5}, None),
    "yarn, no original": ({}, {"rope_type": "yarn", "factor": 2.0}, None),
    "longrope, long": (PHI3, LONG, 4096),
    "longrope, short": (PHI3, LONG, 1024),
    "longrope, Llama": ({}, LONG | {"original_max_position_embeddings": 2048}, 3000),
    "longrope, factor": ({}, LONG | {"original_max_position_embeddings": 64, "factor": 2.0}, 65),
    "longrope, given": (PHI3, LONG | {"attention_factor": 1.5}, 1025),
    "longrope, in part": (PHI3, PART, 2000),
    "longrope, Phi-3's default": (PHI3 | {"original_max_position_embeddings": None}, LONG, 4000),
}


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(("model", "values", "length"), CASES.values(), ids=CASES)
def test_frequencies_and_factors_are_those_of_transformers(
    tmp_path: Path, model: dict[str, Any], values: dict[str, Any], length: int | None, spelling: str
) -> None:
    model = {k: v for k, v in model.items() if v is not None}
    if spelling == "rope_parameters":
        changes = model | {spelling: {"rope_theta": model.get("rope_theta", 1e4)} | values}
    else:
        old = {k: v for k, v in values.items() if k != "rope_type"} | {"type": values["rope_type"]}
        changes = {"rope_theta": 1e4} | model | {spelling: old}
    config = read_model_config(config_path(tmp_path, changes), max_model_len=length)
    rope, (inv_freq, factor) = config.rope, wanted(changes, length)
    pairs = rotary_pairs(rope, config.head_dim)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-12)
    torch.testing.assert_close(inverse_frequencies(rope, 2 * pairs), inv_freq, rtol=1e-6, atol=0)

    positions = torch.tensor([0, 1, 5000])
    cos, sin = Rotary([rope, None], config.head_dim, torch.device("cpu")).angles(positions)
    angles = positions[:, None].float() * inv_freq
    torch.testing.assert_close(cos[0, :, 0, :pairs], angles.cos() * factor, rtol=0, atol=1e-3)
    torch.testing.assert_close(sin[0, :, 0, :pairs], angles.sin() * factor, rtol=0, atol=1e-3)
    for rest in (cos[0, :, 0, pairs:], cos[1]):
        assert torch.equal(rest, torch.ones_like(rest))
    for rest in (sin[0, :, 0, pairs:], sin[1]):
        assert torch.equal(rest, torch.zeros_like(rest))


def test_pairs_of_a_part_come_half_a_head_apart() -> None:
    rope = RopeConfig(1e4, partial_rotary_factor=0.5)
    order = head_order(rope, 8)
    assert order is not None and order.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert head_order(replace(rope, partial_rotary_factor=1.0), 8) is None
    turns = [head_order(replace(rope, partial_rotary_factor=part), 8, True) for part in (0.5, 1.0)]
    assert [each.tolist() for each in turns if each is not None] == [
        [0, 2, 4, 5, 1, 3, 6, 7],
        [0, 2, 4, 6, 1, 3, 5, 7],
    ]


@pytest.mark.parametrize(
    "values",
    [
        YARN | {"factor": 0},
        YARN | {"factor": "4"},
        {"rope_type": "yarn"},
        YARN | {"beta_fast": 1, "beta_slow": 32},
        YARN | {"beta_slow": -1},
        YARN | {"truncate": 1},
        YARN | {"mscale": "x", "mscale_all_dim": 1},
        YARN | {"rope_theta": 1},
        YARN | {"original_max_position_embeddings": 1},
        YARN | {"original_max_position_embeddings": 1e300},
        YARN | {"attention_factor": float("nan")},
        {"rope_type": "dynamic"},
        {"rope_type": "dynamic", "factor": 0.5},
        {"rope_type": "dynamic", "factor": 2, "partial_rotary_factor": 0.0625},
        LONG | {"long_factor": [1.0] * 15},
        LONG | {"short_factor": None},
        LONG | {"short_factor": [1.0] * 15 + [0]},
        LONG | {"original_max_position_embeddings": -4},
        {"partial_rotary_factor": 1.5},
        {"partial_rotary_factor": "half"},
    ],
)
def test_impossible_numbers_are_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    changes = {"architectures": ["Phi3ForCausalLM"], "rope_parameters": values}
    if "partial_rotary_factor" not in values:
        changes["architectures"] = ["LlamaForCausalLM"]
    with pytest.raises(CorruptModelError, match=r"config\.json"):
        read_model_config(config_path(tmp_path, changes))


def test_an_odd_part_and_unknown_kinds_are_unsupported(tmp_path: Path) -> None:
    for values in ({"partial_rotary_factor": 0.1}, {"rope_type": "spiral"}):
        changes = PHI3 | {"rope_parameters": values}
        with pytest.raises(UnsupportedModelError, match=r"odd number|'spiral'"):
            read_model_config(config_path(tmp_path, changes))


@pytest.mark.parametrize(
    ("values", "asked", "positions"),
    [
        ({"rope_type": "default"}, 9000, 4096),
        ({"rope_type": "dynamic", "factor": 2.0}, None, 4096),
        ({"rope_type": "dynamic", "factor": 2.0}, 9000, 9000),
        (YARN, None, 4096),
        (YARN | {"factor": 16.0}, None, 8192),
        (LONG | {"original_max_position_embeddings": 512}, 100, 4096),
    ],
)
def test_positions_of_a_scaled_model(
    tmp_path: Path, values: dict[str, Any], asked: int | None, positions: int
) -> None:
    folder = config_path(tmp_path, {"rope_parameters": values})
    assert read_model_config(folder, max_model_len=asked).max_position == positions


@pytest.mark.parametrize("kind", ["su", "yarn"])
def test_old_names_of_longrope(tmp_path: Path, kind: str) -> None:
    old = {k: v for k, v in LONG.items() if k != "rope_type"} | {"type": kind}
    config = read_model_config(config_path(tmp_path, PHI3 | {"rope_scaling": old}))
    assert (config.rope.kind, config.rope.divisors) == ("longrope", tuple(LONG["long_factor"]))


# -- the two kinds that depend on the length, end to end

ORIGINAL, LENGTH = 64, 160


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def folder_of(name: str) -> Path:
        return made[name]

    made = {name: tmp_path_factory.mktemp(name) for name in ("dynamic", "longrope")}
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}
    replace(TINY["llama"], settings={"max_position_embeddings": ORIGINAL, "rope_parameters": rope})(
        made["dynamic"]
    )
    phi3 = TINY["phi3"].settings
    rope = {k: v for k, v in phi3["rope_parameters"].items() if k != "attention_factor"}
    settings = {"original_max_position_embeddings": ORIGINAL, "rope_parameters": rope}
    replace(TINY["phi3"], settings=phi3 | settings)(made["longrope"])
    return folder_of


Answer = tuple[list[int], list[torch.Tensor]]  # tokens and the logits that each came from


def answers(path: Path, length: int, prompts: list[list[int]], **settings: Any) -> list[Answer]:
    defaults = {"num_gpu_blocks": 96, "kvcache_block_size": 8, "dtype": "float32", "device": "cpu"}
    defaults |= {"speculative": "off"}
    driver = Driver(LLMEngine(path, max_model_len=length, **(defaults | settings)))
    found = [(o.outputs[0].token_ids, driver.logits[o.request_id]) for o in driver.run(prompts)]
    driver.engine.close()
    return found


STREAM = {
    "num_gpu_blocks": 6,
    "enable_cpu_offload": True,
    "offload_mode": "stream",
    "kv_offload_gib": 0.01,
    "slot_tokens": 16,
    "max_num_batched_tokens": 40,
    "max_num_seqs": 8,
}


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 13, "max_num_seqs": 8}, STREAM],
    ids=("whole", "chunked", "streamed"),
)
@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_a_long_request_is_what_transformers_gives_at_that_length(
    checkpoints: Callable[[str], Path], name: str, settings: dict[str, Any]
) -> None:
    """The last token of a request that fills max_model_len, and a short one beside it."""
    path, rng = checkpoints(name), random.Random(1)
    prompts = [[rng.randrange(256) for _ in range(n)] for n in (LENGTH - GREEDY.max_tokens, 30)]
    model = reference(path)
    for prompt, (ids, ours) in zip(
        prompts, answers(path, LENGTH, prompts, **settings), strict=True
    ):
        # Padded behind, which changes nothing before it: transformers chooses for LENGTH as well.
        padded = [*prompt, *ids] + [0] * (LENGTH - len(prompt) - len(ids))
        logits = reference_logits(model, padded)[len(prompt) - 1 :][: len(ids)]
        torch.testing.assert_close(torch.stack(ours), logits, atol=1e-4, rtol=0)
        assert logits.argmax(-1).tolist() == ids


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_within_the_original_positions_nothing_is_stretched(
    checkpoints: Callable[[str], Path], name: str
) -> None:
    """max_model_len = the original positions: transformers' answer for a short text."""
    path = checkpoints(name)
    prompt = [i * 7 % 256 for i in range(40)]
    ((ids, ours),) = answers(path, ORIGINAL, [prompt])
    logits = reference_logits(reference(path), prompt + ids)[len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.stack(ours), logits, atol=1e-4, rtol=0)
    ((_, stretched),) = answers(path, LENGTH, [prompt])
    assert not torch.allclose(stretched[0], logits[0], atol=1e-2)


def test_other_kinds_do_not_reach_past_the_models_positions(tiny: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="max_model_len=513 is above the model's 512"):
        LLMEngine(tiny("llama"), max_model_len=513, num_gpu_blocks=80, device="cpu")
