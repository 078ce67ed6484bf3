"""Tensor parallelism has the bits of one process: every log probability of prompts and outputs is
equal, whatever happens to the KV of the ranks.

Ranks are threads here, over the channels and the memory of processes; test_rank_processes.py has
processes.
"""

from __future__ import annotations

import functools
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from coded import coded_checkpoint
from driver import fail_copies
from gguf import GGMLQuantizationType as QuantType
from gguf_model import SCALINGS, GGUFModel, with_scaling
from marks import needs_compiler
from plain_products import use_plain_products
from rank_threads import RankThreads
from tiny_models import TINY
from torch import Tensor

from nanoengine import LLM, ConfigError, EngineError, SamplingParams, TransferError
from nanoengine.config.engine import EngineConfig
from nanoengine.devices.device import Device
from nanoengine.engine.draft_length import PayingDrafts
from nanoengine.kernels import cpu_linear
from nanoengine.kernels.c_build import KernelBuildError
from nanoengine.kernels.call_tape import CallTape, _Pass
from nanoengine.models.decoder import Decoder
from nanoengine.outputs import RequestOutput, TokenLogprobs
from nanoengine.startup import memory_plan
from nanoengine.startup.parts import make_engine_device
from nanoengine.workers import following_rank, leading_parts, leading_rank, rank_setup
from nanoengine.workers.shared_memory_group import SharedMemoryGroup
from nanoengine.workers.step_record import StepRecord

pytestmark = [needs_compiler, pytest.mark.usefixtures("threads_as_before", "plain_ranks")]

Tiny = Callable[[str], Path]
Scores = list[list[tuple[int, float]]]
BLOCK = 8
SMALL = {"num_gpu_blocks": 8, "kv_offload_gib": 0.01, "measure_speed": False}
STREAM = SMALL | {"offload_mode": "stream", "ring_slots": 2, "slot_tokens": 16}
# What the KV of the ranks goes through, by name: the settings.
SLOW = ("mixtral", "qwen2-moe")
OF_ONE_GROUP = ("granite-hybrid", "granite-hybrid-dense")  # refused: test_granite.py
FIRST = ("qwen3", "gemma3", "glm4-moe")  # norms of heads, windows and experts
# Recurrent layers; heads of two sizes, shared KV and inputs of each layer; norms over all heads.
# Shared experts with a gate and without, biases and clamped gates, a norm of the router's own.
MIXTURES = ("qwen3.5-moe", "deepseek-v3", "gpt-oss", "gemma4-moe", "olmoe", "nemotron-h-moe")
MIXTURES += ("nemotron-h-latent", "ling")
MIXTURES += ("dots1", "granite-moe-shared", "kimi-linear", "minimax-m2")
OTHERS = ("qwen3.5", "qwen3-next-moe", "gemma4", "gemma4-shared", "olmo3", "nemotron-h")
OTHERS += ("apertus", "arcee", "cohere", "cohere2", "gemma2", "lfm2-moe")
HEADS_OF_THREE = {"num_attention_heads": 6, "num_key_value_heads": 3}
WAYS: dict[str, dict[str, Any]] = {
    "resident": {"num_gpu_blocks": 64},
    "streamed": STREAM,
    "streamed, ring of 3": STREAM | {"ring_slots": 3, "slot_tokens": 8},
    "in place": SMALL | {"offload_mode": "in_place"},
    "checked": STREAM | {"debug_kv": True, "debug_copy_delay_ms": 0.2},
    "chunks and preemption": {
        "num_gpu_blocks": 18,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 8,
        "decode_reserve_blocks": 0,
    },
    "guesses": {"num_gpu_blocks": 64, "speculative": "ngram:3"},
    "drafts": STREAM | {"speculative": "ngram:2+resident:3"},
    "int8 weights": {"num_gpu_blocks": 64, "quantization": "int8"},
    "int8 activations": {"num_gpu_blocks": 64, "quantization": "int8", "activation_dtype": "int8"},
    "int8 KV": STREAM | {"kv_offload_dtype": "int8", "kvcache_block_size": 16},
}
KNOWN: dict[str, Any] = {"kvcache_block_size": BLOCK, "max_model_len": 96, "seed": 7}
NUM_OUT = 10


@pytest.fixture
def plain_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are threads, who can draft does so, and products give every output by itself: our own
    in float32, plain ones in bfloat16.
    """
    monkeypatch.setattr(leading_rank, "WorkerProcesses", RankThreads)
    monkeypatch.setattr(PayingDrafts, "choose", lambda self: 3)  # whatever the times of steps
    use_plain_products(monkeypatch)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How many steps each rank replays from here on, by its thread."""
    seen: Counter[int] = Counter()
    replay = _Pass.replay

    def counted(this: _Pass, tensors: list[Tensor]) -> Tensor:
        seen[threading.get_ident()] += this.is_whole
        return replay(this, tensors)

    monkeypatch.setattr(_Pass, "replay", counted)
    return seen


def assert_all_replay(replays: Counter[int], size: int) -> None:
    """Each rank as often as the others, some steps of a run."""
    assert len(replays) == size and len({*replays.values()}) == 1
    assert min(replays.values()) > 2


def prompts() -> list[list[int]]:
    """Of several lengths; the last begins as another one does."""
    source = random.Random(0)
    made = [[source.randrange(5, 60) for _ in range(length)] for length in (3, 17, 40, 70, 33)]
    return [*made, [*made[3][:48], 9, 8, 7]]


def read(scores: list[TokenLogprobs] | list[TokenLogprobs | None] | None) -> Scores:
    """Ids and log probabilities, as they are."""
    assert scores is not None
    return [[(i, found.logprob) for i, found in (each or {}).items()] for each in scores]


# By the number of the prompt; the second one forces tokens.
FORMS = {2: {"regex": "([a-c]{3}-)+"}, 3: {"regex": "([a-c]{2}---)+"}}


def run(folder: Path, size: int, dtype: str = "float32", **settings: Any) -> list[list[Scores]]:
    """Log probabilities of prompts and outputs, greedy and sampled, alone and two at a time; some
    have a form.
    """
    params = [
        SamplingParams(
            temperature=0.9 * (at % 2),
            n=1 + at % 2,
            seed=at,
            max_tokens=NUM_OUT,
            logprobs=5,
            prompt_logprobs=3,
            structured_outputs=FORMS.get(at),
        )
        for at in range(6)
    ]
    settings = KNOWN | {"dtype": dtype} | settings
    with LLM(folder, tensor_parallel_size=size, num_threads=size, **settings) as llm:
        assert llm.plan.ranks == size
        outputs: list[RequestOutput] = []
        for _ in range(2):  # the second time the prefix cache serves
            outputs += llm.generate(prompts(), params, use_tqdm=False)
        assert not any(output.error for output in outputs)
    return [
        [read(output.prompt_logprobs), *(read(each.logprobs) for each in output.outputs)]
        for output in outputs
    ]


@functools.cache
def alone(folder: Path, dtype: str, way: str) -> list[list[Scores]]:
    """What one process finds."""
    return run(folder, 1, dtype, **WAYS[way])


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=[pytest.mark.breadth] * (way in ("drafts", "checked", "in place")))
        for way in WAYS
    ],
)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.breadth)])
def test_ranks_have_the_bits_of_one_process(tiny: Tiny, way: str, size: int) -> None:
    """4 heads and 2 KV heads: with 4 ranks, two share each KV head."""
    folder = tiny("llama")
    assert run(folder, size, **WAYS[way]) == alone(folder, "float32", way)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "name",
    [
        *FIRST,
        *(
            pytest.param(name, marks=pytest.mark.breadth)
            for name in sorted({*TINY} - {"llama", "llama-sharded", *FIRST, *SLOW, *OF_ONE_GROUP})
        ),
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
    ],
)
def test_every_architecture(tiny: Tiny, name: str) -> None:
    assert run(tiny(name), 2, **WAYS["streamed"]) == alone(tiny(name), "float32", "streamed")


@pytest.mark.slow
@pytest.mark.parametrize(
    "way, dtype",
    [(way, "float32") for way in WAYS]
    + [(way, "bfloat16") for way in WAYS if cpu_linear.is_supported() or "weights" not in way],
)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_go_through_the_same(
    tiny: Tiny, name: str, size: int, way: str, dtype: str
) -> None:
    """With 4 ranks, two share a key head of the recurrent layers and a KV head of the others."""
    assert run(tiny(name), size, dtype, **WAYS[way]) == alone(tiny(name), dtype, way)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["resident", "streamed", "guesses", "chunks and preemption"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen3.5", HEADS_OF_THREE | {"linear_num_key_heads": 3, "linear_num_value_heads": 6}),
        ("gemma4", HEADS_OF_THREE),
        ("gemma4-shared", {"num_attention_heads": 3}),
        ("olmo2", HEADS_OF_THREE),
        ("qwen3-moe", HEADS_OF_THREE | {"moe_intermediate_size": 22}),
    ],
)
def test_three_ranks(tmp_path: Path, name: str, settings: dict[str, Any], way: str) -> None:
    """Sizes other than those of heads are no multiples of three."""
    replace(TINY[name], settings=TINY[name].settings | settings)(tmp_path)
    assert run(tmp_path, 3, **WAYS[way]) == run(tmp_path, 1, **WAYS[way])


@pytest.mark.breadth
@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, "resident") for name in ("llama-tied", "qwen3-moe", "olmo3", "gemma4-shared")),
        ("qwen3.5", "guesses"),
        ("gemma3", "resident"),
        ("phi3", "resident"),
        ("qwen3.5", "chunks and preemption"),
        ("gemma4", "streamed"),
    ],
)
def test_in_bfloat16(tiny: Tiny, name: str, way: str) -> None:
    assert run(tiny(name), 2, "bfloat16", **WAYS[way]) == alone(tiny(name), "bfloat16", way)


@pytest.mark.usefixtures("our_products", "fresh_cache")
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("qwen3.5-moe", {}, marks=pytest.mark.breadth),
        pytest.param("gpt-oss", {}, marks=pytest.mark.breadth),
        ("qwen3-moe", {"moe_intermediate_size": 64}),
        pytest.param("gemma4-shared", {"hidden_size": 64}, marks=pytest.mark.breadth),
        ("gemma4-shared", {"hidden_size": 64, "hidden_size_per_layer_input": 32}),
        ("qwen3.5", {}),
    ],
)
def test_codes_of_a_gguf(
    tmp_path: Path, replays: Counter[int], name: str, settings: dict[str, Any]
) -> None:
    """Rows of codes, and columns where ranks make inputs of layers: whole blocks, or numbers. Value
    heads whose order in the file goes through the heads of all ranks; four share two key heads.
    Gates and ups of experts in two formats.
    """
    made = replace(TINY[name], settings=TINY[name].settings | settings)
    (tmp_path / "hf").mkdir()
    made(tmp_path / "hf")
    model = GGUFModel(tmp_path / "hf")
    if name in SCALINGS:
        with_scaling(model, name)
    for each, values in model.tensors.items():
        if values.ndim > 1 and values.shape[-1] % 32 == 0:
            is_mxfp4 = model.arch == "gpt-oss" and "_exps" in each
            model.types[each] = QuantType.MXFP4 if is_mxfp4 else QuantType.Q8_0
            if name == "qwen3-moe" and "_up_exps" in each:
                model.types[each] = QuantType.Q4_0
    path = model.write(tmp_path / "m.gguf")
    settings = {"dtype": "bfloat16", "quantization": "gguf", **WAYS["resident"]}
    expected = run(path, 1, **settings)
    for size in (2, 4) if name == "qwen3.5" else (2,):
        replays.clear()
        assert run(path, size, **settings) == expected
        assert_all_replay(replays, size)


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["qwen3", "qwen3-next"])
def test_codes_of_fp8(tiny: Tiny, tmp_path: Path, name: str) -> None:
    """Float32 on any CPU: norms of heads, an odd number of whole blocks; rows that lie head by
    head.
    """
    folder, _ = coded_checkpoint(tiny(name), tmp_path, {"_proj": "FP8", "embed": "FP8"})
    expected, found = (run(folder, size, **WAYS["resident"]) for size in (1, 2))
    assert found == expected


@pytest.mark.usefixtures("our_products")
@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("qwen3", "resident"),
        ("qwen3", "in place"),
        ("qwen3-moe", "resident"),
        *(pytest.param(name, "resident", marks=pytest.mark.breadth) for name in MIXTURES),
        pytest.param("qwen3-moe", "int8 weights", marks=pytest.mark.breadth),
        pytest.param("qwen3-moe", "int8 activations", marks=pytest.mark.breadth),
        pytest.param("qwen3-moe", "in place", marks=pytest.mark.breadth),
    ],
)
def test_every_rank_replays_its_decode_steps(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, replays: Counter[int], name: str, way: str
) -> None:
    """All of those that rank 0 replays, and no other; and no bit moves."""
    records: list[bool] = []
    write = leading_parts.encode

    def kept(record: StepRecord) -> bytes:
        records.append(record.may_replay)
        return write(record)

    monkeypatch.setattr(leading_parts, "encode", kept)
    found = run(tiny(name), 2, "bfloat16", **WAYS[way])
    assert_all_replay(replays, 2)
    assert sum(records) >= min(replays.values())
    monkeypatch.setattr(CallTape, "replay", lambda self, key, forward: forward())
    assert found == run(tiny(name), 1, "bfloat16", **WAYS[way])


def test_gathers_of_experts_are_few_and_of_one_size(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of what the gates give, with a row for each choice, whichever experts were chosen. Of the
    last layer one token's choices are wanted.
    """
    seen: Counter[tuple[tuple[int, ...], int]] = Counter()
    gather = SharedMemoryGroup.gather

    def watched(self: SharedMemoryGroup, part: Tensor, widths: Sequence[int]) -> Tensor:
        if self.rank == 0:
            seen[tuple(part.shape), sum(widths)] += 1
        return gather(self, part, widths)

    monkeypatch.setattr(SharedMemoryGroup, "gather", watched)
    made = {"num_gpu_blocks": 64, "dtype": "bfloat16", "num_threads": 2, **KNOWN}
    with LLM(tiny("qwen3-moe"), tensor_parallel_size=2, **made) as llm:
        seen.clear()
        llm.generate([prompts()[1]], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    tokens = len(prompts()[1])
    of_experts = {key: num for key, num in seen.items() if key[1] == 40}
    # Two layers of three have experts.
    assert of_experts == {((3 * tokens, 20), 40): 1, ((3, 20), 40): 1}


def test_beams_are_those_of_one_process(tiny: Tiny) -> None:
    found = []
    for size in (1, 2):
        with LLM(tiny("llama"), tensor_parallel_size=size, num_gpu_blocks=64) as llm:
            [output] = llm.beam_search([prompts()[1]], beam_width=3, max_tokens=8)
            found.append([(beam.token_ids, beam.cumulative_logprob) for beam in output.sequences])
    assert found[0] == found[1]


def test_ranks_meet_by_gloo_without_a_compiler(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> int:
        raise KernelBuildError("no compiler")

    expected = alone(tiny("llama"), "float32", "streamed")
    monkeypatch.setattr(rank_setup, "make_region", refuse)
    assert run(tiny("llama"), 2, **WAYS["streamed"]) == expected


def test_a_rank_moves_its_part_of_the_bytes(tiny: Tiny) -> None:
    moved: list[int] = []
    settings = WAYS["streamed"] | KNOWN | {"speculative": "off"}  # which follows measured times
    for size in (1, 2):
        with LLM(tiny("llama"), tensor_parallel_size=size, **settings) as llm:
            llm.generate(prompts(), SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
            moved.append(llm.llm_engine.kv.counters.h2d_bytes)
    assert moved[1] * 2 == moved[0] > 0


def test_a_copy_that_fails_on_another_rank_fails_its_request(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only rank 1 loses copies; requests whose KV stays on the device do not notice."""
    streams: list[Any] = []

    def kept(config: EngineConfig) -> Device:
        device = make_engine_device(config)
        streams.append(device.h2d)
        return device

    monkeypatch.setattr(following_rank, "make_engine_device", kept)
    params = SamplingParams(temperature=0, max_tokens=4)
    with LLM(tiny("llama"), tensor_parallel_size=2, **WAYS["streamed"], **KNOWN) as llm:
        expected = llm.generate([prompts()[0]], params, use_tqdm=False)[0].outputs[0].token_ids
        fail_copies(streams[0], set(range(1000)))
        [lost] = llm.generate([prompts()[3]], params, use_tqdm=False)
        assert isinstance(lost.error, TransferError)
        [found] = llm.generate([prompts()[0]], params, use_tqdm=False)
        assert found.outputs[0].token_ids == expected


def test_advice_is_for_all_ranks_together(tiny: Tiny) -> None:
    """kv_offload_gib is a total: the same number of tokens takes as much of it."""
    advised = []
    for size in (1, 2):
        with LLM(tiny("llama"), tensor_parallel_size=size, num_gpu_blocks=4) as llm:
            assert llm.plan.room is not None
            advised.append(llm.plan.room.gib_for(10_000_000))
    assert advised[0] > 1 and advised[1] == pytest.approx(advised[0], rel=0.01)


def test_ranks_have_as_many_snapshots_together(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds its part of each."""
    monkeypatch.setattr(memory_plan, "SNAPSHOT_BYTES", 1 << 20)
    specs = []
    for size in (1, 2):
        with LLM(tiny("qwen3.5"), tensor_parallel_size=size, num_gpu_blocks=4) as llm:
            specs.append(llm.plan.kv)
    one, of_two = specs
    assert of_two.num_snapshots == one.num_snapshots > 10
    assert 2 * of_two.bytes_of_a_state == one.bytes_of_a_state


def test_who_cannot_be_divided_is_told_so(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=3 does not divide.*1, 2, 4"):
        LLM(tiny("llama"), tensor_parallel_size=3, num_threads=1)


def test_a_failure_in_a_step_is_for_good(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait in the step that this one left: no later one can be right."""
    forward = Decoder.forward
    fails_now: list[bool] = []

    def fail(self: Decoder, ctx: Any) -> Any:
        if fails_now and ctx.attention is rank_0:
            raise MemoryError("no memory")
        return forward(self, ctx)

    monkeypatch.setattr(Decoder, "forward", fail)
    with LLM(tiny("llama"), tensor_parallel_size=2, num_gpu_blocks=64) as llm:
        rank_0 = llm.llm_engine.runner.attention
        fails_now.append(True)
        params = SamplingParams(temperature=0, max_tokens=2)
        with pytest.raises((EngineError, MemoryError)):
            llm.generate([[5, 6]], params, use_tqdm=False)
        fails_now.clear()
        with pytest.raises(EngineError, match="rank has failed"):
            llm.generate([[5, 6]], params, use_tqdm=False)
