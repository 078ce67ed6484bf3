"""KV on the host of which 12 bits a number come back: the codec against NumPy, and streamed runs
whose bits are those of a run without it.

All engine runs have the checking device, NaN in all undelivered memory and random copy delays on.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from compiled import compiled_by
from driver import STREAMING, Driver, assert_all_free, fail_copies, host_gib
from marks import needs_no_gpu
from torch import Tensor

from nanoengine import LLM, SamplingParams
from nanoengine.devices.cpu import CpuDevice
from nanoengine.devices.stream_check import CheckedDevice
from nanoengine.engine.draft_length import PayingDrafts
from nanoengine.engine.draft_turns import FasterWay
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.errors import ConfigError, TransferError
from nanoengine.kv.kv_codec import (
    CPU_ELEMENTS,
    HEADER,
    OTHER,
    OTHERS,
    WHOLE,
    ZERO,
    Bf12Codec,
    encoded,
)
from nanoengine.kv.kv_memory import KVMemory
from nanoengine.kv.kv_spec import KVSpec
from nanoengine.kv.offload import TransferRun
from nanoengine.kv.step_plan import StepTransfers, Store
from nanoengine.workers.orders import spec_from_json, spec_to_json

BLOCK = 8
HELPER = Path(__file__).parents[1] / "helpers" / "compile_bf12.py"
Tiny = Callable[[str], Path]
Bytes = npt.NDArray[np.uint8]


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def some_ids(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


# -- the codec


def with_far_exponents(kv_heads: int, head_dim: int) -> Tensor:
    """Blocks [2, 24, kv_heads, head_dim] of a normal distribution, and tokens of other kinds: of
    any bits, of zeros, with as many small numbers as there is room for and with one more, of NaN.
    """
    generator = torch.Generator().manual_seed(kv_heads)
    block = torch.randn(2, 24, kv_heads, head_dim, generator=generator).bfloat16()
    rows = block.view(2, 24, -1)
    size = rows.shape[-1]
    bits = torch.randint(-(1 << 15), 1 << 15, (size,), generator=generator, dtype=torch.int16)
    rows[0, 0] = bits.view(rows.dtype)
    rows[0, 1] = 0
    rows[0, 2, ::3] = -0.0
    rows[0, 3, 1 : OTHERS + 1] = 1e-9
    rows[0, 4, : OTHERS + 1] = 1e-9
    rows[0, 5] = torch.nan
    rows[0, 6, 3] = -torch.inf
    rows[1, 23, : OTHERS + 1] = 1e-39  # with an exponent of 0, which has a code of its own
    return block


def by_numpy(block: Tensor) -> tuple[Bytes, Bytes]:
    """The bytes of each token as the docstring of Bf12Codec says; which of them are read."""
    rows = block.view(torch.int16).numpy().view(np.uint16)
    rows = rows.reshape(-1, rows.shape[-2] * rows.shape[-1])
    made, read = [], []
    for numbers in rows.tolist():
        exponents = [number >> 7 & 255 for number in numbers]
        others = [e for e in exponents if e and max(exponents) - e >= 14]
        codes = [
            14 if not e else min(max(exponents) - e, 15) if max(exponents) - e < 14 else 15
            for e in exponents
        ]
        is_whole = len(others) > OTHERS
        packed = [low + 16 * high for low, high in zip(codes[::2], codes[1::2], strict=True)]
        padded = ([*others, *[0] * OTHERS])[:OTHERS]
        parts = [
            [(number >> 15) * 128 + number % 128 for number in numbers],
            exponents[::2] if is_whole else packed,
            [max(exponents), 255 if is_whole else len(others), *padded],
            exponents[1::2],
        ]
        made.append([*itertools.chain(*parts)])
        needed = [True] * len(made[-1])
        if not is_whole:
            needed[-len(numbers) // 2 :] = [False] * (len(numbers) // 2)
        read.append(needed)
    return np.array(made, np.uint8), np.array(read)


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(3, 64), (1, 46), (8, 16)])
def test_codec_is_numpys_and_reads_only_what_it_says(kv_heads: int, head_dim: int) -> None:
    block, codec = with_far_exponents(kv_heads, head_dim), Bf12Codec()
    stored = encoded(codec, block)
    bytes_, needed = by_numpy(block)
    stored_rows = stored.view(-1, stored.shape[-1])
    assert np.array_equal(stored_rows.numpy(), bytes_)
    read = codec.read_bytes(kv_heads, head_dim)
    assert set(needed.sum(1)) == {read, stored.shape[-1]}
    assert needed[:, :read].all()
    stored_rows[torch.from_numpy(~needed)] = 77
    back = torch.zeros_like(block)
    codec.decode(back, stored)
    assert torch.equal(back.view(torch.int16), block.view(torch.int16))


def test_all_bits_come_back() -> None:
    """Each of 65,536 numbers in a token of other numbers, in several parts."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    block = torch.randn(1, 1 << 16, 1, 4).bfloat16()
    block[0, :, 0, 2] = every
    assert block.numel() > 3 * CPU_ELEMENTS
    back = torch.zeros_like(block)
    Bf12Codec().decode(back, encoded(Bf12Codec(), block))
    assert torch.equal(back.view(torch.int16), block.view(torch.int16))


def test_poison_reads_as_nan() -> None:
    stored = torch.full((2, 3, 2 * 12 + HEADER), Bf12Codec.poison, dtype=torch.uint8)
    back = torch.zeros(2, 3, 3, 4, dtype=torch.bfloat16)
    Bf12Codec().decode(back, stored)
    assert back.isnan().all()


@needs_no_gpu
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(3, 64), (1, 46)])
def test_the_kernel_is_the_codecs_inverse(kv_heads: int, head_dim: int) -> None:
    """Interpreted; it reads nothing else, either."""
    kernel = pytest.importorskip("nanoengine.devices.triton_bf12")
    block = with_far_exponents(kv_heads, head_dim)
    stored = encoded(Bf12Codec(), block)
    _, needed = by_numpy(block)
    stored.view(-1, stored.shape[-1])[torch.from_numpy(~needed)] = 77
    back = torch.zeros_like(block)
    kernel.unpack_bf12(back, stored, HEADER=HEADER, ZERO=ZERO, OTHER=OTHER, WHOLE=WHOLE)
    assert torch.equal(back.view(torch.int16), block.view(torch.int16))


@pytest.mark.breadth
@needs_no_gpu
def test_the_kernel_compiles_for_a_gpu() -> None:
    """Its loads are of several bytes each, and nothing is spilled."""
    pytest.importorskip("triton")
    found = compiled_by(str(HELPER), "8,128", "80,90,120")
    assert [each["capability"] for each in found] == [80, 90, 120]
    for each in found:
        assert not each["spilled"] and each["wide_loads"] >= 2, each


def test_a_token_of_an_8b_model_takes_an_eighth_more_than_12_bits_at_most() -> None:
    assert Bf12Codec().read_bytes(8, 128) * 8 <= 12.125 * 8 * 128
    assert Bf12Codec().host_block((2, 256, 8, 128)) == (2, 256, 2 * 8 * 128 + 16)


def test_ranks_are_told_which_codec() -> None:
    spec = KVSpec(((3, 8),) * 2, 4, 4, torch.bfloat16, 6, 2, 2, host_codec=Bf12Codec())
    assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec
    exact = replace(spec, host_codec=None)
    assert spec_from_json(json.loads(json.dumps(spec_to_json(exact)))) == exact


def test_a_round_trip_through_the_host() -> None:
    """Whole blocks and a part of one; what was not stored is NaN."""
    device = CheckedDevice(CpuDevice(1, copy_workers=True, max_delay_s=0.001))
    spec = KVSpec(((3, 8),) * 2, 4, 4, torch.bfloat16, 6, 2, 2, host_codec=Bf12Codec())
    memory = KVMemory(spec, device, debug=True)
    pool, engine = memory.pool, memory.offload
    assert engine is not None
    content = torch.randn(2, *pool[0].shape).bfloat16()
    for layer in range(2):
        pool[layer].copy_(content[layer])
    stores = (Store(0, 4, 0, 4), Store(1, 5, 0, 4), Store(2, 0, 1, 3))
    assert TransferRun(engine, StepTransfers(stores=stores)).finish()
    run = TransferRun(engine, StepTransfers(fills=((4, 5), (0,))))
    for layer in range(2):
        assert torch.equal(run.fill(layer, 0), content[layer, :2])
        run.drained(layer, 0)
        ring = run.fill(layer, 1)
        assert torch.equal(ring[0, :, 1:3], content[layer, 2, :, 1:3])
        assert ring[0, :, [0, 3]].isnan().all() and ring[1].isnan().all()
        run.drained(layer, 1)
    assert run.finish()
    device.synchronize()
    assert engine.counters.d2h_bytes == 2 * 2 * (4 + 4 + 2) * (2 * 24 + 16)
    assert engine.counters.h2d_bytes == 2 * 2 * (3 * 4) * (24 * 3 // 2 + 16)
    memory.close()


# -- engines


def make_driver(path: Path, codec: str | None = "bf12", host: int = 100, **more: Any) -> Driver:
    """An engine with so many host blocks (of llama) of 8 tokens, and 4 on the device."""
    settings = (
        STREAMING | {"dtype": "bfloat16", "kv_offload_dtype": codec, "max_num_seqs": 8} | more
    )
    row = 2 * 32 + HEADER if codec else 2 * 32  # of llama: two heads of 16
    settings["kv_offload_gib"] = host_gib(path, host, BLOCK) / 2 * row / (2 * 32)
    return Driver(LLMEngine(path, **settings))


def rows_of(driver: Driver, prompts: list[list[int]], num_tokens: int) -> list[Tensor]:
    outputs = driver.run(prompts, greedy(num_tokens))
    return [torch.stack(driver.logits[output.request_id]) for output in outputs]


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama", {"max_num_batched_tokens": 16}),
        pytest.param("llama", {"max_num_batched_tokens": 64}, marks=pytest.mark.breadth),
        pytest.param("qwen3-window", {}, marks=pytest.mark.breadth),
        ("gemma4", {"max_num_batched_tokens": 16}),
        pytest.param("deepseek-v3-dense", {}, marks=pytest.mark.breadth),
        ("llama", {"speculative": "resident:3"}),
        pytest.param("llama", {"attention_backend": "sdpa"}, marks=pytest.mark.breadth),
    ],
    ids=str,
)
def test_bits_are_those_without_it(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, name: str, more: dict[str, Any]
) -> None:
    """Most of the KV went through the host: copies, and blocks filled, loaded and stored. How many
    tokens a step drafts is fixed: what steps take would choose other steps for each engine.
    """
    monkeypatch.setattr(PayingDrafts, "_number", lambda self: len(self._num_right))
    monkeypatch.setattr(FasterWay, "next", lambda self, num_checked: False)
    path, found, moved = tiny(name), [], []
    prompts = [some_ids(seed, 50 + 7 * seed) for seed in range(3)]
    for codec in (None, "bf12"):
        driver = make_driver(path, codec, **more)
        found.append(rows_of(driver, prompts, 10))
        spec, counters = driver.engine.plan.kv, driver.engine.kv.counters
        loaded = counters.h2d_bytes - counters.fill_bytes
        moved.append(
            (
                counters.num_fill_copies,
                counters.fill_bytes / spec.streamed_bytes,
                loaded / spec.load_bytes,
                counters.d2h_bytes / spec.host_block_bytes,
            )
        )
        assert_all_free(driver.engine)
        driver.engine.close()
    assert all(map(torch.equal, *found))
    assert moved[0] == moved[1] and moved[0][0] > 20


def test_preempted_requests_and_prefix_hits(tiny: Tiny) -> None:
    """Partial tails leave the device, come back and are written on; hits come from the host."""
    found = []
    for codec in (None, "bf12"):
        driver = make_driver(
            tiny("llama"),
            codec,
            host=12,
            decode_reserve_blocks=0,
            max_num_seqs=3,
            max_num_batched_tokens=12,
            max_num_partial_prefills=3,
            max_long_partial_prefills=3,
            long_prefill_token_threshold=3,
        )
        assert driver.engine.plan.kv.num_host_blocks == 12
        rows = rows_of(driver, [some_ids(20 + i, 32) for i in range(3)], 24)
        outputs = driver.run([[*some_ids(20, 32), 7]], greedy(4))
        assert outputs[0].num_host_cached_tokens
        found.append([*rows, torch.stack(driver.logits[outputs[0].request_id])])
        assert driver.engine.kv.counters.h2d_bytes % driver.engine.kv.spec.load_bytes
        assert_all_free(driver.engine)
        driver.engine.close()
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("stream", ["h2d", "d2h"])
def test_a_failed_copy_fails_its_request_only(tiny: Tiny, stream: str) -> None:
    more = {"num_gpu_blocks": 6, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    driver = make_driver(tiny("llama"), **more)
    prompts = [some_ids(60 + i, 40 + i) for i in range(4)]
    exact = rows_of(make_driver(tiny("llama"), None, **more), prompts, 8)
    fail_copies(getattr(driver.engine.device, stream), {3})
    outputs = driver.run(prompts, greedy(8))
    failed = [output for output in outputs if output.error]
    assert len(failed) == 1 and isinstance(failed[0].error, TransferError)
    for output, rows in zip(outputs, exact, strict=True):
        assert output.error or torch.equal(torch.stack(driver.logits[output.request_id]), rows)
    assert_all_free(driver.engine)
    driver.engine.close()


@pytest.mark.usefixtures("our_products")
def test_the_plan_says_that_it_is_exact(tiny: Tiny) -> None:
    driver = make_driver(tiny("llama"), speculative=None)
    plan = driver.engine.plan
    assert "(12 bits a number come back, exactly), in RAM; a step copies" in str(plan)
    assert "bitwise" in plan.invariance or "same bits" in plan.invariance, plan.invariance
    assert "up to 8 drafts" in plan.guesses  # as with exact KV on the host
    driver.engine.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float32"}, 'store bfloat16, but KV is in float32; take dtype="bfloat16"'),
        ({"offload_mode": "in_place"}, 'offload_mode="stream"'),
    ],
)
def test_settings_that_cannot_be(tiny: Tiny, settings: dict[str, Any], message: str) -> None:
    asked = {"dtype": "bfloat16", "device": "cpu", "kv_offload_dtype": "bf12"} | settings
    with pytest.raises(ConfigError, match=message):
        LLMEngine(tiny("llama"), **asked)


def test_an_odd_number_of_numbers_is_refused() -> None:
    with pytest.raises(ConfigError, match="the model has 3 x 5"):
        Bf12Codec().host_block((2, 8, 3, 5))


@pytest.mark.slow
def test_how_many_bits_smollm2s_kv_takes() -> None:
    """No token of 2,048 of real text is stored whole."""
    text = "\n".join(path.read_text() for path in sorted(Path(__file__).parent.glob("*.py")))
    whole, others = [], []
    with LLM("smollm2-135m", dtype="bfloat16", kv_cache_gib=0.2) as llm:
        ids = llm.tokenizer.encode(text)[:2048]
        llm.generate([ids], greedy(1), use_tqdm=False)
        for pool in llm.llm_engine.kv.memory.pool:
            stored = torch.stack([encoded(Bf12Codec(), block) for block in pool[:8]])
            count = stored[..., 3 * 96 + 1]
            whole.append((count == WHOLE).sum())
            others.append(count.float().mean())
    print(f"others of a token: {torch.stack(others).mean():.4f} of {OTHERS}")
    assert not torch.stack(whole).any()
