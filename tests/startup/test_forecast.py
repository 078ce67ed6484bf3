"""The forecast's arithmetic: against what was measured on a GPU, and that its settings work."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import small_gpu
from nanoengine.config.engine import GIB, EngineConfig, make_config
from nanoengine.config.model import ExpertsConfig, ModelConfig, RecurrentConfig
from nanoengine.errors import ConfigError, OutOfMemoryError
from nanoengine.loading.stored_weights import StoredWeights
from nanoengine.models.make_codes import ENDS
from nanoengine.startup.forecast import READ_EFFICIENCY, Forecast, Forecaster, Hardware
from nanoengine.startup.weight_bytes import layer_matrices

ROOT = Path(__file__).parents[2]
LLAMA_8B = replace(small_gpu.LLAMA_8B, max_position=1 << 20)
GEMMA_LIKE = replace(
    LLAMA_8B,
    architecture="Gemma3ForCausalLM",
    windows=tuple(None if i % 6 == 5 else 1024 for i in range(32)),
)


def in_codes(
    model: ModelConfig, layers: str = "", embeddings: str = "", head: str = ""
) -> StoredWeights:
    """A GGUF whose matrices are in these formats."""
    ends = zip(ENDS, (embeddings, head), strict=True)
    return StoredWeights(dict.fromkeys(layer_matrices(model), layers) | dict(ends), is_gguf=True)


def forecaster(hardware: Hardware, model: ModelConfig = LLAMA_8B, **settings: Any) -> Forecaster:
    return Forecaster(make_config("m", settings), model, hardware)


def test_speeds_are_those_measured_on_an_h200() -> None:
    measured = json.loads((ROOT / "benchmarks/results/gpu/h200.json").read_text())
    link = measured["link"]
    hardware = Hardware(
        int(measured["hardware"]["memory_gib"] * GIB),
        80 * GIB,
        link["device_read_gb_per_s"],
        link["h2d_gb_per_s"],
    )
    resident = forecaster(hardware)
    offloaded = forecaster(hardware, enable_cpu_offload=True, kv_offload_gib=65, num_gpu_blocks=32)
    for row in measured["long_context"]["decode"]:
        made = resident.forecast(row["context"])
        assert not made.plan.kv.num_host_blocks and not made.is_link_bound
        assert made.tokens_per_s == pytest.approx(1000 / row["resident_step_ms"], rel=0.06)
        made = offloaded.forecast(row["context"])
        assert made.plan.kv.num_host_blocks and made.is_link_bound
        assert made.tokens_per_s == pytest.approx(row["tokens_per_s"], rel=0.03)


@pytest.mark.some(25)
@pytest.mark.parametrize("model", [LLAMA_8B, GEMMA_LIKE], ids=["full", "windows"])
@pytest.mark.parametrize(
    ("gpu_gib", "ranks"),
    [*((gib, 1) for gib in (0, 17.7, 18, 24, 80)), (0, 2), (0, 8), (11, 2), (7, 16), (11, 16)],
)
@pytest.mark.parametrize("context", [None, 2000, 60000, 300000])
def test_the_settings_make_the_plan(
    gpu_gib: float, ranks: int, context: int | None, model: ModelConfig
) -> None:
    hardware = Hardware(int(gpu_gib * GIB), 64 * GIB, 300.0, 25.0)
    made = forecaster(hardware, model, tensor_parallel_size=ranks).forecast(context)
    assert not made.refusal and made.context == (context or made.longest)
    assert made.longest_tokens_per_s <= made.tokens_per_s
    again = forecaster(hardware, model, **made.settings).forecast(context)
    # What it reaches at most is less: its settings stay.
    assert made == replace(
        again, longest=made.longest, longest_tokens_per_s=made.longest_tokens_per_s
    )
    kv = made.plan.kv
    on_device = made.plan.weight_bytes + made.plan.activation_bytes + kv.ring_bytes
    on_device += kv.num_blocks * kv.block_bytes + made.reserved_bytes
    on_host = kv.num_host_blocks * kv.host_block_bytes * ranks
    room = hardware.gpu_bytes or hardware.ram_bytes / ranks
    assert on_device <= room and on_host <= 64 * GIB
    assert bool(kv.num_host_blocks) == ("kv_offload_gib" in made.settings)


def test_what_fits_the_gpu_needs_no_settings() -> None:
    roomy = forecaster(Hardware(141 * GIB, 16 * GIB, 300.0, 25.0)).forecast(5000)
    assert roomy.settings == {"max_model_len": 5000} and not roomy.plan.kv.num_host_blocks


@pytest.mark.parametrize(
    ("gpu_gib", "given"),
    [
        (0, {"num_gpu_blocks": 4}),
        (0, {"kv_cache_gib": 0.5}),
        (24, {"kv_offload_gib": 2.0}),
        (24, {"num_gpu_blocks": 32, "kv_offload_gib": 2.0}),
        (17.8, {"max_num_batched_tokens": 1024}),
    ],
)
@pytest.mark.parametrize("context", [None, 1000])
def test_what_the_user_gave_of_memory_stays(
    gpu_gib: float, given: dict[str, Any], context: int | None
) -> None:
    """And the plan says what it reaches."""
    made = forecaster(Hardware(int(gpu_gib * GIB), 64 * GIB, 300.0, 25.0), **given)
    found = made.forecast(context)
    assert found.settings.items() >= given.items() and not found.refusal
    kv = found.plan.kv
    if "num_gpu_blocks" in given:
        assert kv.num_blocks == given["num_gpu_blocks"]
    if "kv_offload_gib" in given:
        assert kv.num_host_blocks == int(2 * GIB) // kv.host_block_bytes
    assert found.longest == made.forecast(None).longest
    if gpu_gib == 0:
        assert found.longest < 1024 * 16 and kv.num_blocks * kv.block_bytes <= GIB // 2
        flag = "--" + next(iter(given)).replace("_", "-")
        assert f"raise {flag}, or leave it out" in made.forecast(found.longest + 1).refusal


def test_more_memory_than_there_is_names_the_setting_alone() -> None:
    with pytest.raises(
        OutOfMemoryError, match=r"^kv_cache_gib=90\.0 asks for .*; lower kv_cache_gib"
    ):
        forecaster(Hardware(0, 64 * GIB, 20.0, 25.0), kv_cache_gib=90).forecast(None)


@pytest.mark.parametrize("gpu_gib", [0, 24])
def test_max_model_len_stands_in_for_the_context(gpu_gib: int) -> None:
    hardware = Hardware(gpu_gib * GIB, 64 * GIB, 300.0, 25.0)
    asked = forecaster(hardware).forecast(50000)
    assert forecaster(hardware, max_model_len=50000).forecast(None) == asked
    short = forecaster(hardware, max_model_len=50000).forecast(2000)
    assert short.plan == asked.plan and short.context == 2000
    assert short.tokens_per_s > asked.tokens_per_s and short.longest == asked.longest
    far = forecaster(hardware, max_model_len=LLAMA_8B.max_position + 1).forecast(None)
    assert f"{LLAMA_8B.max_position + 1:,} were asked for" in far.refusal


def test_a_little_more_is_needed_than_is_there() -> None:
    """The longest context is reached, and a block more is refused."""
    made = forecaster(Hardware(18 * GIB, 2 * GIB, 300.0, 25.0))
    longest = made.forecast(None).longest
    assert not made.forecast(longest).refusal
    assert made.forecast(longest + 1).refusal


def test_where_the_ram_is_full_kv_stays_on_the_gpu() -> None:
    """Not even a block of KV fits there, and 16K tokens fit the GPU."""
    full = Hardware(20 * GIB, 20 << 20, 300.0, 25.0)
    found = forecaster(full).forecast(None)
    assert 10_000 < found.longest < 20_000 and "enable_cpu_offload" not in found.settings
    assert "it fits with --ram-gib" in forecaster(full).forecast(100_000).refusal
    with pytest.raises(OutOfMemoryError, match="the weights take "):
        forecaster(replace(full, gpu_bytes=17 * GIB)).forecast(None)


def test_states_of_recurrent_layers_leave_less_for_kv() -> None:
    recurrent = RecurrentConfig(tuple(i for i in range(32) if i % 4 != 3), 16, 32, 128, 128, 4)
    model = replace(LLAMA_8B, architecture="Qwen3_5ForCausalLM", recurrent=recurrent)
    made = forecaster(Hardware(0, 64 * GIB, 20.0, 25.0), model).forecast(None).plan
    used = made.weight_bytes + made.activation_bytes + made.kv.num_blocks * made.kv.block_bytes
    assert made.kv.state_bytes and used + made.kv.state_bytes <= 64 * GIB


def test_of_embeddings_a_step_reads_a_row() -> None:
    hardware = Hardware(80 * GIB, 64 * GIB, 300.0, 25.0)
    plain, more = (
        forecaster(hardware, replace(LLAMA_8B, layer_input_size=size)).forecast(1000)
        for size in (0, 64)
    )
    assert more.plan.weight_bytes - plain.plan.weight_bytes > 128256 * 32 * 64 * 2
    assert 0.99 < more.tokens_per_s / plain.tokens_per_s < 1


def test_fewer_bits_are_less_weight() -> None:
    hardware, stored = Hardware(80 * GIB, GIB, 300.0, 25.0), in_codes(LLAMA_8B, "Q4_0")
    sizes = [
        Forecaster(EngineConfig("m", quantization=method), LLAMA_8B, hardware, stored)
        .forecast(1000)
        .plan.weight_bytes
        for method in ("none", "int8", "gguf", None)
    ]
    assert sizes[0] > 1.8 * sizes[1] > 2.5 * sizes[2] and sizes[2] == sizes[3]


@pytest.mark.parametrize(("codes", "num_bytes"), [("INT4", 20 / 32), ("FP8", 36 / 32)])
def test_what_a_checkpoint_has_packed_stays_so(codes: str, num_bytes: float) -> None:
    """All matrices of layers, 5 or 9 bits a weight."""
    packed = replace(LLAMA_8B, codes=codes)
    matrices = 32 * (2 * 4096 + 2 * 1024 + 3 * 14336) * 4096
    for gpu_bytes in (0, 80 * GIB):
        sizes = [
            forecaster(Hardware(gpu_bytes, 64 * GIB, 300.0, 25.0), model).forecast(1000)
            for model in (LLAMA_8B, packed)
        ]
        assert sizes[0].plan.weight_bytes - sizes[1].plan.weight_bytes == matrices * (2 - num_bytes)


def test_recurrent_layers_in_codes_fit_a_small_gpu() -> None:
    """Qwen3.6-27B as Q4_K_M has it."""
    stored = small_gpu.q4_k_m(small_gpu.QWEN3_6_27B)
    settings, hardware = (
        EngineConfig("m", quantization="gguf"),
        Hardware(24 * GIB, 32 * GIB, 600.0, 25.0),
    )
    made = Forecaster(settings, small_gpu.QWEN3_6_27B, hardware, stored).forecast(4096)
    assert 15 < made.plan.weight_bytes / GIB < 16.5


def test_few_requests_at_once_where_weights_leave_little() -> None:
    """The same as Q3_K_M has it, on a card of 16 GB. What was given stays as it is."""
    stored = small_gpu.q3_k_m(small_gpu.QWEN3_6_27B)
    hardware = Hardware(16 * GIB, 32 * GIB, 600.0, 25.0)

    def planned(**given: Any) -> Forecast:
        config = EngineConfig("m", quantization="gguf", **given)
        return Forecaster(config, small_gpu.QWEN3_6_27B, hardware, stored).forecast(64000)

    made = planned()
    assert 12 < made.plan.weight_bytes / GIB < 12.5 and not made.refusal
    assert made.settings["max_num_seqs"] == 4 and made.settings["max_num_batched_tokens"] == 512
    assert planned(gpu_memory_utilization=0.95).settings.get("max_num_seqs") is None
    with pytest.raises(OutOfMemoryError, match=r"the weights take 12\.36 GiB"):
        planned(max_num_seqs=48)


def test_an_embedding_in_codes_is_no_longer_than_it_is() -> None:
    """A step reads the head and all layers, and a row of the embedding."""
    hardware = Hardware(80 * GIB, GIB, 300.0, 25.0)
    stored = in_codes(LLAMA_8B, embeddings="Q8_0", head="Q8_0")
    settings = EngineConfig("m", quantization="gguf")
    plain = forecaster(hardware).forecast(1000)
    coded = Forecaster(settings, LLAMA_8B, hardware, stored).forecast(1000)
    less = (1 / plain.tokens_per_s - 1 / coded.tokens_per_s) * 300e9 * READ_EFFICIENCY
    assert less == pytest.approx(128256 * 4096 * (2 - 34 / 32), rel=0.01)


def test_experts_in_codes_have_any_dtype_on_a_gpu() -> None:
    hardware = Hardware(80 * GIB, GIB, 300.0, 25.0)
    experts = ExpertsConfig(8, 2, 512, renormalises=True)
    model = replace(LLAMA_8B, architecture="MixtralForCausalLM", experts=experts)
    with pytest.raises(ConfigError, match="in bfloat16 only"):
        forecaster(hardware, model, dtype="float16")
    forecaster(hardware, replace(model, codes="MXFP4"), dtype="float16")
    config = EngineConfig("m", dtype="float16", quantization="gguf")
    Forecaster(config, model, hardware, in_codes(model, "Q4_0"))
    Forecaster(replace(config, quantization="int8"), model, hardware)


def test_a_cpu_takes_its_own_dtype() -> None:
    hardware = Hardware(0, 64 * GIB, 20.0, 25.0, torch.float32)
    made = forecaster(hardware).forecast(1000)
    assert made.plan.kv.dtype is torch.float32
    assert forecaster(hardware, dtype="bfloat16").forecast(1000).plan.kv.dtype is torch.bfloat16


def test_a_cpu_holds_weights_of_16_bits_in_these() -> None:
    """Also where it computes in float32; a GPU in float32 does not."""
    stored = replace(LLAMA_8B, stored_dtype="bfloat16")
    for gpu_bytes, ratio in ((0, 0.5), (80 * GIB, 1)):
        hardware = Hardware(gpu_bytes, 64 * GIB, 300.0, 25.0)
        wide, narrow = (
            forecaster(hardware, model, dtype="float32").forecast(1000).plan.weight_bytes
            for model in (LLAMA_8B, stored)
        )
        assert narrow == pytest.approx(ratio * wide, rel=1e-4)  # norms stay


STREAMED = {"enable_cpu_offload": True, "kv_offload_gib": 65, "num_gpu_blocks": 32}


def test_n_links_copy_n_times_as_fast() -> None:
    """If the slowest is as fast as a single one; all ranks wait for it."""
    alone, both, slow = (
        forecaster(
            Hardware(80 * GIB, 80 * GIB, 3000.0, link), **STREAMED, tensor_parallel_size=size
        ).forecast(200000)
        for size, link in ((1, 25.0), (2, 25.0), (2, 12.5))
    )
    assert alone.is_link_bound and both.is_link_bound
    assert both.tokens_per_s == pytest.approx(2 * alone.tokens_per_s)
    assert slow.tokens_per_s == pytest.approx(alone.tokens_per_s)


def test_each_gpu_reads_its_part() -> None:
    """A rank holds all embeddings and norms, and reads its rows of the head."""
    hardware = Hardware(80 * GIB, 80 * GIB, 300.0, 25.0)
    held = 128256 * 4096 * 2 + 65 * 4096 * 2
    for size in (2, 8):
        alone = forecaster(hardware).forecast(60000)
        ranks = forecaster(hardware, tensor_parallel_size=size).forecast(60000)
        assert ranks.tokens_per_s == pytest.approx(size * alone.tokens_per_s, rel=0.001)
        assert ranks.weights == (held + (alone.whole_bytes - held) // size,) * size


def test_ranks_on_a_cpu_read_the_same_ram() -> None:
    """They are no faster; and 16 of them hold and read each of 8 KV heads twice."""
    hardware = Hardware(0, 128 * GIB, 20.0, 25.0)
    steps = [
        1 / forecaster(hardware, tensor_parallel_size=size).forecast(60000).tokens_per_s
        for size in (1, 8, 16)
    ]
    assert steps[1] == pytest.approx(steps[0], rel=0.001)
    twice = 60000 * LLAMA_8B.kv_bytes_per_token(2) + 32 * 2 * 1024 * 4096 * 2
    assert steps[2] - steps[1] == pytest.approx(twice / (20e9 * READ_EFFICIENCY), rel=0.001)


def test_no_memory_is_an_error() -> None:
    with pytest.raises(OutOfMemoryError, match=r"take the model in 4 bits .*, or a larger RAM"):
        forecaster(Hardware(0, GIB, 20.0, 25.0)).forecast(None)


Q4_K_M = small_gpu.q4_k_m(LLAMA_8B)


@pytest.mark.parametrize(
    ("gpu_gib", "stored", "said"),
    [
        (
            5,
            Q4_K_M,
            r"take 4.57 GiB in codes of a GGUF, the GPU has 5.00 GiB, of which 4.00 GiB are",
        ),
        (5, Q4_K_M, r"; take a smaller model, or a larger GPU"),
        (0, Q4_K_M, r"take 4.57 GiB in codes of a GGUF, the RAM has 4.00 GiB, and weights"),
        (0, Q4_K_M, r"; take a smaller model, or a larger RAM"),
        (5, in_codes(LLAMA_8B, "Q6_K"), r"; take the model in 4 bits"),
    ],
)
def test_too_large_says_what_is_usable_and_how_weights_are_held(
    gpu_gib: int, stored: StoredWeights, said: str
) -> None:
    hardware = Hardware(gpu_gib * GIB, 4 * GIB, 300.0, 25.0)
    config = EngineConfig("m", quantization="gguf" if gpu_gib else None)
    with pytest.raises(OutOfMemoryError, match=said):
        Forecaster(config, LLAMA_8B, hardware, stored).forecast(None)


def test_a_forecast_never_changes_the_settings_it_was_given() -> None:
    config = EngineConfig("m", max_num_seqs=4)
    made = Forecaster(config, LLAMA_8B, Hardware(24 * GIB, 32 * GIB, 300.0, 25.0)).forecast(90000)
    assert made.settings["max_num_seqs"] == 4 and config == EngineConfig("m", max_num_seqs=4)


@pytest.mark.parametrize(
    ("settings", "layers", "share"),
    [({}, "", 0.75), ({"quantization": "int8"}, "", 1), ({}, "Q4_0", 1)],
)
def test_numbers_that_take_fewer_bits_are_read_faster(
    settings: dict[str, Any], layers: str, share: float
) -> None:
    """A plan leaves room for all of them; codes take the bits they take."""
    hardware = Hardware(0, 64 * GIB, 20.0, 25.0, read_efficiency=1.0)
    config, stored = make_config("m", settings), in_codes(LLAMA_8B, layers)
    full, held = (
        Forecaster(config, LLAMA_8B, each, stored).forecast(2000)
        for each in (hardware, replace(hardware, held_share=0.75))
    )
    assert full.plan == held.plan
    kv_s = 2000 * LLAMA_8B.kv_bytes_per_token(2) / 20e9
    weights_s = 1 / full.tokens_per_s - kv_s
    assert 1 / held.tokens_per_s == pytest.approx(share * weights_s + kv_s, rel=1e-3)
