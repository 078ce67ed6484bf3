"""KV on the host in int8: the codec against numpy, and what streamed runs then lose and keep.

All engine runs have the checking device, NaN in all undelivered memory and random copy delays on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from checkpoints import reference, reference_logits
from driver import STREAMING, Driver, assert_all_free, fail_copies, host_gib, token_ids
from torch import Tensor

from nanoengine import LLM, SamplingParams
from nanoengine.devices.cpu import CpuDevice
from nanoengine.devices.stream_check import CheckedDevice
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.errors import ConfigError, TransferError
from nanoengine.kv.kv_codec import CPU_ELEMENTS, Int8Codec
from nanoengine.kv.kv_memory import KVMemory
from nanoengine.kv.kv_spec import KVSpec
from nanoengine.kv.offload import TransferRun
from nanoengine.kv.step_plan import Load, StepTransfers, Store
from nanoengine.outputs import RequestOutput

BLOCK = 8
# Largest difference of a logit to the exact one, in standard deviations of these. Measured:
# 0.21 was the worst of these runs.
LOGIT_BOUND = 0.4
Tiny = Callable[[str], Path]


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def some_ids(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def make_driver(path: Path, host: int = 100, codec: str | None = "int8", **more: Any) -> Driver:
    """An engine with so many host blocks of 8 tokens, 4 device blocks and a ring of two."""
    settings = STREAMING | {"dtype": "float32", "kv_offload_dtype": codec} | more
    head_dim = 32 if "qwen3" in path.name else 16
    row = head_dim + 4 if codec else head_dim * (2 if settings["dtype"] == "bfloat16" else 4)
    settings["kv_offload_gib"] = host_gib(path, host, BLOCK) * row / (4 * head_dim)
    driver = Driver(LLMEngine(path, **settings))
    assert host <= driver.engine.plan.kv.num_host_blocks <= host + 1
    return driver


def assert_close_to_exact(driver: Driver, path: Path, outputs: list[RequestOutput]) -> float:
    """Every row of logits is as far from transformers' as the bound allows, and most choices are
    those; how far, in standard deviations of the logits.
    """
    worst, same, num_tokens = 0.0, 0, 0
    for output in outputs:
        prompt = output.prompt_token_ids
        tokens = prompt + output.outputs[0].token_ids
        exact = reference_logits(reference(path), tokens)[len(prompt) - 1 : -1]
        ours = torch.stack(driver.logits[output.request_id])
        worst = max(worst, ((ours - exact).abs().max() / exact.std()).item())
        same += int((ours.argmax(-1) == exact.argmax(-1)).sum())
        num_tokens += len(ours)
    print(f"a logit is off by {worst:.4f} deviations, {same} of {num_tokens} choices are the same")
    assert worst < LOGIT_BOUND and same >= 0.9 * num_tokens
    return worst


# -- the codec


def by_numpy(x: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Codes and scales as the docstring of Int8Codec says."""
    most = np.abs(x).max(-1, keepdims=True)
    scale = np.maximum(most / np.float32(127), np.finfo(np.float32).tiny)
    return np.rint(x / scale).astype(np.int8), scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codec_is_numpys_and_off_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    head_dim = 12
    num_rows = 2 * (CPU_ELEMENTS // head_dim) + 5  # three parts
    generator = torch.Generator().manual_seed(1)
    spread = torch.logspace(-6, 4, num_rows)[:, None]
    values = (torch.randn(num_rows, head_dim, generator=generator) * spread).to(dtype)
    values[3] = 0
    values[4] = torch.finfo(dtype).max / 2
    values[5, 1:] = 0
    stored = torch.empty(num_rows, head_dim + 4, dtype=torch.int8)
    Int8Codec.encode(stored, values)
    x = values.float().numpy()
    codes, scale = by_numpy(x)
    assert np.array_equal(stored[:, :head_dim].numpy(), codes)
    assert np.array_equal(stored[:, head_dim:].contiguous().numpy().view(np.float32), scale)
    back = torch.full_like(values, torch.nan)
    Int8Codec.decode(back, stored)
    off = np.abs(back.double().numpy() - x.astype(np.float64))
    rounding = torch.finfo(dtype).eps * np.abs(x) + torch.finfo(dtype).tiny
    assert (off <= scale * (0.5 + 2**-16) + rounding).all()
    assert off.max() > 0 and not back[3].any() and back[5, 0] == values[5, 0]


def test_what_is_not_finite_comes_back_as_nan() -> None:
    values = torch.randn(4, 2, 8)
    values[0, 0, 3], values[1, 1, 0] = torch.inf, torch.nan
    stored = torch.empty(4, 2, 12, dtype=torch.int8)
    Int8Codec.encode(stored, values)
    stored[2].fill_(Int8Codec.poison)
    back = torch.zeros_like(values)
    Int8Codec.decode(back, stored)
    assert back[0, 0, 3].isnan() and back[1, 1].isnan().all() and back[2].isnan().all()
    assert not back[3].isnan().any() and not back[0, 1].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_round_trip_through_the_host(dtype: torch.dtype) -> None:
    """Whole and partial stores, a load and fills; what was not stored is NaN, bytes are int8's."""
    device = CheckedDevice(CpuDevice(1, copy_workers=True, max_delay_s=0.001))
    spec = KVSpec(((3, 8),) * 2, 4, 4, dtype, 6, 2, 2, host_codec=Int8Codec())
    memory = KVMemory(spec, device, debug=True)
    pool, engine = memory.pool, memory.offload
    assert engine is not None
    content = torch.randn(2, *pool[0].shape).to(dtype)
    for layer in range(2):
        pool[layer].copy_(content[layer])
    stores = (Store(0, 4, 0, 4), Store(1, 5, 0, 4), Store(2, 0, 1, 3))
    assert TransferRun(engine, StepTransfers(stores=stores)).finish()
    device.synchronize()
    assert torch.equal(torch.stack(pool), content)  # storing leaves what is on the device as it is
    for slot in range(4):
        memory.poison(slot, None)
    run = TransferRun(engine, StepTransfers(loads=(Load(0, 3, 3),), fills=((4, 5), (0,))))
    for layer in range(2):
        run.await_loads(layer)
        memory.before_read(layer, (3,))
        assert pool[layer][3, :, [0, 3]].isnan().all()
        assert_half_a_step(pool[layer][3, :, 1:3], content[layer, 2, :, 1:3])
        ring = run.fill(layer, 0)
        for at in range(2):
            assert_half_a_step(ring[at], content[layer, at])
        run.drained(layer, 0)
        ring = run.fill(layer, 1)
        assert ring[0, :, [0, 3]].isnan().all() and ring[1].isnan().all()
        assert_half_a_step(ring[0, :, 1:3], content[layer, 2, :, 1:3])
        run.drained(layer, 1)
    assert run.finish()
    memory.poison(None, 4)
    device.synchronize()
    back = torch.zeros_like(content[0, 0])
    Int8Codec.decode(back, engine.host.block(0, 4))
    assert back.isnan().all()
    token_bytes = 2 * 3 * (8 + 4)
    assert engine.counters.d2h_bytes == 2 * (4 + 4 + 2) * token_bytes
    assert engine.counters.h2d_bytes == 2 * (3 + 3 * 4) * token_bytes
    memory.close()


def assert_half_a_step(ours: Tensor, exact: Tensor) -> None:
    step = exact.float().abs().amax(-1, keepdim=True) / 127
    off = (ours.float() - exact.float()).abs()
    assert off.any() and (off <= step / 2 + 2**-8 * exact.float().abs() + 1e-6).all()


# -- engines


@pytest.mark.parametrize("chunk", [64, 16])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_streamed_logits_are_close(tiny: Tiny, name: str, chunk: int) -> None:
    """And not equal: most of the KV went through the host; greedy tokens are mostly the same."""
    path = tiny(name)
    prompts = [some_ids(seed, 50 + 7 * seed) for seed in range(3)]
    driver = make_driver(path, max_num_batched_tokens=chunk, max_num_seqs=8)
    outputs = driver.run(prompts, greedy(12))
    worst = assert_close_to_exact(driver, path, outputs)
    assert worst > 1e-4  # transformers' are within 1e-4 of an exact run's
    assert_all_free(driver.engine)
    driver.engine.close()


def test_bits_are_those_of_kv_that_numpy_rounded(tiny: Tiny) -> None:
    """An exact engine whose stores are followed by numpy's rounding of what they brought."""
    path, rows = tiny("llama"), []
    for codec in ("int8", None):
        driver = make_driver(path, codec=codec)
        if codec is None:
            round_stores(driver)
        outputs = driver.run([some_ids(seed, 40 + 7 * seed) for seed in range(2)], greedy(8))
        rows.append(torch.cat([torch.stack(driver.logits[o.request_id]) for o in outputs]))
        driver.engine.close()
    assert torch.equal(*rows)


def round_stores(driver: Driver) -> None:
    copies = driver.engine.device.d2h.inner.copies
    make = copies.make

    def rounding(dst: Tensor, *more: Any) -> None:
        make(dst, *more)
        codes, scale = by_numpy(dst.numpy())
        dst.copy_(torch.from_numpy(codes * scale))

    copies.make = rounding


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_link_carries_what_the_codec_makes(tiny: Tiny, dtype: str) -> None:
    """Same steps, same blocks: bytes are to the exact run's as a row is; metrics, too."""
    path, size = tiny("llama"), 2 if dtype == "bfloat16" else 4
    moved = []
    for codec in (None, "int8"):
        driver = make_driver(path, codec=codec, dtype=dtype)
        (output,) = driver.run([some_ids(3, 70)], greedy(8))
        counters, audit = driver.engine.kv.counters, driver.audit
        assert (counters.h2d_bytes, counters.d2h_bytes) == (audit.h2d_bytes, audit.d2h_bytes)
        assert output.metrics is not None
        assert output.metrics.h2d_bytes == counters.h2d_bytes
        assert output.metrics.d2h_bytes == counters.d2h_bytes
        moved.append((counters.h2d_bytes, counters.d2h_bytes))
        driver.engine.close()
    (h2d, d2h), (less_h2d, less_d2h) = moved
    assert less_h2d * 16 * size == h2d * (16 + 4) and less_d2h * 16 * size == d2h * (16 + 4)


def test_what_stays_on_the_device_is_exact(tiny: Tiny) -> None:
    """A short request beside a streamed one; and everything, where everything fits."""
    path = tiny("llama")
    prompts = [some_ids(5, 90), some_ids(6, 9)]
    rows: dict[tuple[str | None, int], list[Tensor]] = {}
    for device_blocks in (7, 40):
        for codec in (None, "int8"):
            driver = make_driver(
                path,
                codec=codec,
                num_gpu_blocks=device_blocks,
                max_num_seqs=2,
                max_num_batched_tokens=16,
            )
            outputs = driver.run(prompts, greedy(10))
            assert outputs[1].metrics is not None and outputs[1].metrics.h2d_bytes == 0
            assert (driver.engine.kv.counters.h2d_bytes > 0) == (device_blocks == 7)
            rows[codec, device_blocks] = [
                torch.stack(driver.logits[output.request_id]) for output in outputs
            ]
            driver.engine.close()
    (long, short), (lossy_long, lossy_short) = rows[None, 7], rows["int8", 7]
    assert torch.equal(short, lossy_short) and not torch.equal(long, lossy_long)
    assert all(map(torch.equal, rows[None, 40], rows["int8", 40]))


def test_the_fiftieth_request_is_a_fresh_engines(tiny: Tiny) -> None:
    path = tiny("llama")
    settings = {"enable_prefix_caching": False, "max_num_batched_tokens": 16, "max_num_seqs": 3}
    old, fresh = (make_driver(path, host=40, **settings) for _ in range(2))
    old.run([some_ids(seed, 5 + seed % 40) for seed in range(49)], greedy(4))
    prompt = some_ids(99, 60)
    outputs = [driver.run([prompt], greedy(10))[0] for driver in (old, fresh)]
    ours, theirs = (
        torch.stack(driver.logits[output.request_id])
        for driver, output in zip((old, fresh), outputs, strict=True)
    )
    assert outputs[0].request_id == 49 and torch.equal(ours, theirs)
    for driver in (old, fresh):
        assert_all_free(driver.engine)
        driver.engine.close()


def test_prefix_hits_on_the_host(tiny: Tiny) -> None:
    path = tiny("llama")
    shared = some_ids(7, 10 * BLOCK)
    driver = make_driver(path)
    driver.run([shared + some_ids(8, 3)], greedy(4))
    outputs = driver.run([shared + some_ids(9 + i, 3) for i in range(3)], greedy(6))
    assert all(output.num_host_cached_tokens for output in outputs)
    assert_close_to_exact(driver, path, outputs)
    assert_all_free(driver.engine)
    driver.engine.close()


def test_preempted_requests_go_on(tiny: Tiny) -> None:
    """Partial tails leave the device, come back and are written on; some KV is computed again."""
    path = tiny("llama")
    driver = make_driver(
        path,
        host=12,
        num_gpu_blocks=4,
        decode_reserve_blocks=0,
        max_num_seqs=3,
        max_num_batched_tokens=12,
        max_num_partial_prefills=3,
        max_long_partial_prefills=3,
        long_prefill_token_threshold=3,
    )
    outputs = driver.run([some_ids(20 + i, 32) for i in range(3)], greedy(24))
    assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0
    assert driver.engine.kv.counters.h2d_bytes % driver.engine.kv.spec.host_block_bytes
    assert [len(ids) for ids in token_ids(outputs)] == [24] * 3
    assert_close_to_exact(driver, path, outputs)
    assert_all_free(driver.engine)
    driver.engine.close()


@pytest.mark.parametrize("number", [0, 7])
@pytest.mark.parametrize("stream", ["h2d", "d2h"])
def test_a_failed_copy_fails_its_request_only(tiny: Tiny, stream: str, number: int) -> None:
    path = tiny("llama")
    driver = make_driver(path, num_gpu_blocks=6, max_num_batched_tokens=16, max_num_seqs=4)
    prompts = [some_ids(60 + i, 40 + i) for i in range(4)]
    fail_copies(getattr(driver.engine.device, stream), {number})
    outputs = driver.run(prompts, greedy(8))
    failed = [output for output in outputs if output.error]
    assert len(failed) == 1 and isinstance(failed[0].error, TransferError)
    assert_close_to_exact(driver, path, [output for output in outputs if not output.error])
    again = driver.run([prompts[outputs.index(failed[0])]], greedy(8))
    assert_close_to_exact(driver, path, again)
    assert_all_free(driver.engine)
    driver.engine.close()


def test_twice_the_tokens_fit_and_the_plan_says_lossy(tiny: Tiny) -> None:
    """bf16 rows of 16 elements take 32 bytes, int8 ones 20; "auto" streams."""
    settings = {
        "dtype": "bfloat16",
        "device": "cpu",
        "num_threads": 1,
        "num_gpu_blocks": 4,
        "kvcache_block_size": BLOCK,
        "enable_cpu_offload": True,
        "kv_offload_gib": 0.002,
    }
    engines = [LLMEngine(tiny("llama"), kv_offload_dtype=d, **settings) for d in (None, "int8")]
    exact, lossy = (engine.plan.kv for engine in engines)
    assert lossy.num_host_blocks == pytest.approx(1.6 * exact.num_host_blocks, abs=2)
    assert (lossy.num_blocks, lossy.block_bytes) == (exact.num_blocks, exact.block_bytes)
    pieces = engines[1].kv.memory.offload.host.segments
    assert sum(p.nbytes for p in pieces) == lossy.num_host_blocks * lossy.host_block_bytes
    ring = engines[1].kv.memory.offload.ring
    assert len(ring) * ring.whole(0).nbytes == lossy.ring_bytes > 0
    host_line = next(line for line in str(engines[1].plan).splitlines() if "KV offload" in line)
    assert "240 bytes" in host_line and "in int8 (lossy), in RAM; a step copies" in host_line
    assert "lossy" not in str(engines[0].plan)
    for engine in engines:
        engine.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_offload_dtype": "int4"}, "None or one of int8, bf12, got 'int4'"),
        ({"kv_offload_dtype": "int8", "enable_cpu_offload": False}, "needs enable_cpu_offload"),
        ({"kv_offload_dtype": "int8", "offload_mode": "in_place"}, 'offload_mode="stream"'),
    ],
)
def test_settings_that_cannot_be(tiny: Tiny, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLMEngine(tiny("llama"), **({"enable_cpu_offload": True} | settings))


def test_scales_must_be_aligned() -> None:
    with pytest.raises(ConfigError, match="multiple of 4, the model's is 30"):
        Int8Codec().host_block((2, 8, 3, 30))


@pytest.mark.slow
def test_what_int8_costs_smollm2() -> None:
    """Log probabilities of 2048 tokens of real text, all but 1024 tokens of KV on the host."""
    text = "\n".join(path.read_text() for path in sorted(Path(__file__).parent.glob("*.py")))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found: dict[tuple[str, str | None], Tensor] = {}
    for dtype in ("float32", "bfloat16"):
        for codec in (None, "int8"):
            with LLM(
                "smollm2-135m",
                dtype=dtype,
                num_threads=1,
                num_gpu_blocks=4,
                max_num_batched_tokens=256,
                max_num_seqs=1,
                enable_cpu_offload=True,
                offload_mode="stream",
                kv_offload_gib=0.2,
                kv_offload_dtype=codec,
            ) as llm:
                ids = llm.tokenizer.encode(text)[:2048]
                (output,) = llm.generate([ids], params, use_tqdm=False)
                assert output.prompt_logprobs is not None
                found[dtype, codec] = torch.tensor(
                    [
                        row[token].logprob
                        for token, row in zip(ids, output.prompt_logprobs, strict=True)
                        if row is not None
                    ]
                )
    exact = found["float32", None]
    print("\n| KV on the host | perplexity | mean, largest difference of a log probability |")
    for (dtype, codec), logprobs in found.items():
        off = (logprobs - exact).abs()
        print(
            f"| {dtype}, {codec or 'exact'} | {(-logprobs.mean()).exp():.4f} | "
            f"{off.mean():.4f}, {off.max():.3f} |"
        )
    off = (found["float32", "int8"] - exact).abs()
    assert 0 < off.mean() < 0.02
