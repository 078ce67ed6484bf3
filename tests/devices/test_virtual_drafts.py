"""Drafts on a GPU made of the CPU (virtual_gpu.py): where the host waits, what is replayed, and how
long a round takes in the proportions of an 8B model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from driver import Driver, host_gib, small_engine
from marks import needs_no_gpu

pytest.importorskip("triton", reason="Triton is not installed")

from assistants import write_assistant
from mtp_models import with_head
from tiny_model import TinyModel
from virtual_gpu import Costs, VirtualGpu, VirtualStream

from nanoengine import SamplingParams
from nanoengine.engine.draft_length import PayingDrafts
from nanoengine.engine.draft_turns import FasterWay
from nanoengine.engine.drafter import Drafts
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.kv.open_step import DraftStep, OpenStep
from nanoengine.sequence import ScheduledBatch

pytestmark = needs_no_gpu
BLOCK, MOST = 8, 3
PARAMS = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
PROMPTS = [[(n * 31 + i) % 256 for i in range(n)] for n in (52, 41)]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualGpu]:
    monkeypatch.setattr(FasterWay, "next", lambda self, num_checked: True)
    monkeypatch.setattr(PayingDrafts, "choose", lambda self: MOST)
    with VirtualGpu() as made:
        yield made


def engine(folder: Path, **settings: Any) -> LLMEngine:
    defaults = {
        "num_gpu_blocks": 7,
        "enable_cpu_offload": True,
        "offload_mode": "stream",
        "kv_offload_gib": host_gib(folder, 24, BLOCK),
        "slot_tokens": 2 * BLOCK,
        "ring_slots": 2,
        "stream_mib_per_step": 1000.0,
        "measure_speed": False,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 4,
        "max_model_len": 192,
        "device": "cuda",
    }
    return small_engine(folder, True, **defaults | settings)


def times_of_drafts(made: LLMEngine, compute: VirtualStream) -> list[float]:
    """The virtual time that the drafts of each further step take."""
    spent: list[float] = []
    draft = made.runner.drafter.draft

    def watched(batch: ScheduledBatch, steps: Iterable[DraftStep]) -> Drafts:
        before = compute.busy
        drafts = draft(batch, steps)
        spent.append(compute.busy - before)
        return drafts

    made.runner.drafter.draft = watched
    return spent


def drafted_batches(made: LLMEngine) -> list[ScheduledBatch]:
    """The batches of further steps, once their drafts are under way."""
    drafted: list[ScheduledBatch] = []
    draft = made.runner.drafter.draft

    def watched(batch: ScheduledBatch, steps: Iterable[DraftStep]) -> Drafts:
        drafted.append(batch)
        return draft(batch, steps)

    made.runner.drafter.draft = watched
    return drafted


@pytest.mark.breadth
@pytest.mark.parametrize("takes_turns", [False, True], ids=["together", "turns"])
def test_no_draft_is_waited_for(
    gpu: VirtualGpu, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, takes_turns: bool
) -> None:
    """A step waits for its tokens, and the next one reads what attention looked at, which has long
    been there. The tokens are those of a CPU without drafts.
    """
    monkeypatch.setattr(PayingDrafts, "is_short", takes_turns)
    plain = engine(tiny("llama"), device="cpu")
    with gpu.left():
        wanted = [o.outputs[0].token_ids for o in Driver(plain).run(PROMPTS, PARAMS)]
    plain.close()
    made = engine(tiny("llama"), speculative=f"resident:{MOST}")
    drafted = drafted_batches(made)
    gpu.strict, before = True, gpu.num_waits
    driver = Driver(made)
    outputs = driver.run(PROMPTS, PARAMS)
    waits = gpu.num_waits - before
    gpu.strict = False
    assert [output.outputs[0].token_ids for output in outputs] == wanted
    num_rounds = sum(batch.num_drafts > 0 for batch in drafted)
    assert waits <= driver.num_steps + num_rounds and made.scheduler.turns.are_taken
    assert all(output.metrics.num_guessed > MOST for output in outputs)
    made.close()


@pytest.mark.breadth
def test_what_is_not_replayed_takes_turns_too(
    gpu: VirtualGpu, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every access is checked and freed memory is NaN, so drafts are no graphs. One request is
    checked with as many rows as the drafts of two others have, which run after its first layer.
    """
    monkeypatch.setattr(PayingDrafts, "is_short", True)
    monkeypatch.setattr(PayingDrafts, "choose", lambda self: 1)
    prompts = [[(n * stride) % 256 for n in range(70)] for stride in (3, 7, 11)]
    settings: dict[str, Any] = {
        "num_gpu_blocks": 10,
        "kv_offload_gib": host_gib(tiny("llama"), 40, BLOCK),
    }
    params = replace(PARAMS, max_tokens=20)
    plain = engine(tiny("llama"), device="cpu", **settings)
    with gpu.left():
        wanted = [o.outputs[0].token_ids for o in Driver(plain).run(prompts, params)]
    plain.close()
    made = engine(tiny("llama"), speculative="resident:1", debug_kv=True, **settings)
    seen: set[tuple[int, int]] = set()
    launch, between = made.runner.launch, OpenStep.draft_steps_between

    def after_a_layer(step: OpenStep, layers: Iterator[object]) -> Iterator[DraftStep]:
        next(layers)
        yield from between(step, layers)

    monkeypatch.setattr(OpenStep, "draft_steps_between", after_a_layer)

    def watched(batch: ScheduledBatch, *rest: Any) -> Any:
        seen.add((batch.num_tokens, len(batch.resting)))
        return launch(batch, *rest)

    made.runner.launch = watched
    outputs = Driver(made).run(prompts, params)
    assert [output.outputs[0].token_ids for output in outputs] == wanted
    assert (2, 2) in seen
    made.close()


@pytest.mark.breadth
def test_no_guess_of_its_own_head_is_waited_for(
    gpu: VirtualGpu, tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its guesses come to the host with the tokens of the step, and its drafts stay on the device.
    The tokens are those of a CPU without guesses.
    """
    with gpu.left():
        path = with_head(tiny("qwen3.5"), tmp_path)
        plain = engine(path, device="cpu")
        wanted = [o.outputs[0].token_ids for o in Driver(plain).run(PROMPTS, PARAMS)]
        plain.close()
    monkeypatch.setattr(PayingDrafts, "_number", lambda self: MOST)
    made = engine(path, speculative=f"mtp:{MOST}", max_model_len=96)
    gpu.strict, before = True, gpu.num_waits
    driver = Driver(made)
    outputs = driver.run(PROMPTS, PARAMS)
    waits = gpu.num_waits - before
    gpu.strict = False
    assert [output.outputs[0].token_ids for output in outputs] == wanted
    assert waits <= driver.num_steps
    assert all(output.metrics.num_guessed > MOST for output in outputs)
    made.close()


@pytest.mark.breadth
@pytest.mark.parametrize("has_centroids", [False, True])
def test_no_guess_of_an_assistant_is_waited_for(
    gpu: VirtualGpu,
    tiny: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_centroids: bool,
) -> None:
    """They stay on the device, and the step after reads what attention looked at, as with drafts.
    The tokens are those of a CPU without guesses.
    """
    path = tiny("gemma4-shared")
    with gpu.left():
        assistant = write_assistant(path, tmp_path / "assistant", has_centroids)
        plain = engine(path, device="cpu", num_gpu_blocks=12)
        wanted = [o.outputs[0].token_ids for o in Driver(plain).run(PROMPTS, PARAMS)]
        plain.close()
    monkeypatch.setattr(PayingDrafts, "_number", lambda self: MOST)
    made = engine(
        path,
        speculative=f"mtp:{MOST}",
        draft_model=str(assistant),
        max_model_len=96,
        num_gpu_blocks=12,
    )
    drafted = drafted_batches(made)
    gpu.strict, before = True, gpu.num_waits
    driver = Driver(made)
    outputs = driver.run(PROMPTS, PARAMS)
    waits = gpu.num_waits - before
    gpu.strict = False
    assert [output.outputs[0].token_ids for output in outputs] == wanted
    num_rounds = sum(batch.num_drafts > 0 for batch in drafted)
    assert waits <= driver.num_steps + num_rounds
    assert all(output.metrics.num_guessed > MOST for output in outputs)
    made.close()


@pytest.mark.breadth
def test_drafts_are_replayed_and_a_round_is_the_link_and_the_drafts(
    gpu: VirtualGpu, tiny: Callable[[str], Path]
) -> None:
    """Virtual time in the proportions of an 8B model at 128K on an H200: a draft takes 1/55 of the
    copies; the ring takes copies while the step drafts.
    """
    made = engine(tiny("llama"), speculative=f"resident:{MOST}")
    layers = made.plan.kv.num_layers
    slot_bytes = 2 * made.plan.kv.block_bytes / layers
    compute, h2d = gpu.streams[:2]
    spent = times_of_drafts(made, compute)
    made.add_request([i % 256 for i in range(14 * BLOCK)], replace(PARAMS, max_tokens=60))
    while len(spent) < 6:
        made.step()
    replays = sum(graph.num_replays for graph in gpu.graphs)
    made.step()
    # Each draft is one graph; the checking step has one more between two attentions.
    assert sum(graph.num_replays for graph in gpu.graphs) - replays == MOST + layers
    gpu.costs = Costs(operation_s=0.004, block_s=0.004, link_bytes_per_s=slot_bytes)
    rounds: list[tuple[float, float, float]] = []
    for _ in range(3):
        before = gpu.host_time, h2d.busy
        made.step()
        rounds.append((gpu.host_time - before[0], h2d.busy - before[1], spent[-1]))
    for seconds, copies_s, drafts_s in rounds[1:]:
        ahead_s = min(drafts_s, made.plan.kv.ring_slots)
        wanted = copies_s + drafts_s - ahead_s
        assert copies_s > 4 * layers / 2 and drafts_s > 0.1
        assert abs(seconds / wanted - 1) < 0.05
    made.close()


@pytest.mark.breadth
@pytest.mark.parametrize(
    ("layers", "num_blocks", "slot_blocks", "draft_share"),
    [pytest.param(6, 12, 3, 5.3 / 60, id="32K"), pytest.param(3, 24, 1, 5.3 / 294, id="128K")],
)
def test_two_take_turns_and_a_round_is_the_link(
    gpu: VirtualGpu,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layers: int,
    num_blocks: int,
    slot_blocks: int,
    draft_share: float,
) -> None:
    """Virtual time in the proportions of an 8B model on an H200: what a draft takes of the copies
    of one request, and a ring for the copies of about one draft. A round checks both requests, in
    two steps, or, where they take no turns, in one.
    """
    monkeypatch.setattr(PayingDrafts, "is_short", True)
    with gpu.left():
        TinyModel(settings={"num_hidden_layers": layers})(tmp_path)
    made = two_long_requests(tmp_path, num_blocks, slot_blocks)
    compute, h2d = gpu.streams[:2]
    spent = times_of_drafts(made, compute)
    turns = made.scheduler.turns
    assert turns.are_taken

    def rounds(takes_turns: bool) -> tuple[float, float, float]:
        """Seconds of two rounds, those of their copies, those of drafts before a step's layers."""
        turns.are_taken, gpu.costs = takes_turns, Costs()
        for _ in range(6):  # what is captured, and who is checked first
            made.step()
        gpu.costs, num_steps = costs, len(spent)
        before = gpu.host_time, h2d.busy
        for _ in range(4 if takes_turns else 2):
            made.step()
        return gpu.host_time - before[0], h2d.busy - before[1], sum(spent[num_steps:])

    costs = Costs(1.0, link_bytes_per_s=made.plan.kv.block_bytes / layers)
    _, copies_s, drafts_s = rounds(False)
    of_one_s, draft_s = copies_s / 4, drafts_s / (2 * MOST)
    costs = replace(costs, operation_s=draft_share * of_one_s / draft_s)
    as_before_s, copies_before_s, drafts_s = rounds(False)
    seconds, copies_s, _ = rounds(True)
    assert drafts_s < copies_s / 2, "the link takes longer"
    monkeypatch.setattr(PayingDrafts, "choose", lambda self: 0)
    plain_s, plain_copies_s, _ = rounds(True)
    rest_s = plain_s - plain_copies_s
    assert 0 <= rest_s < 0.1 * copies_s and seconds < 1.1 * (copies_s + rest_s)
    assert as_before_s - copies_before_s > 0.6 * drafts_s
    assert seconds - copies_s - rest_s < 0.4 * drafts_s
    made.close()


def two_long_requests(folder: Path, num_blocks: int, slot_blocks: int) -> LLMEngine:
    """That begin to decode."""
    made = engine(
        folder,
        speculative=f"resident:{MOST}",
        num_gpu_blocks=10,
        kv_offload_gib=host_gib(folder, 2 * num_blocks + 20, BLOCK),
        slot_tokens=slot_blocks * BLOCK,
        max_num_batched_tokens=128,
        max_model_len=8 * num_blocks + 120,
    )
    for stride in (3, 5):
        tokens = [i * stride % 256 for i in range(num_blocks * BLOCK)]
        made.add_request(tokens, replace(PARAMS, max_tokens=100))
    while any(seq.is_prefill for seq in [*made.scheduler.waiting, *made.scheduler.running]):
        made.step()
    return made


@pytest.mark.breadth
def test_a_request_on_the_device_drafts_by_replayed_steps_over_an_eighth_of_it(
    gpu: VirtualGpu, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing crosses the link, no draft is waited for, and steps without drafts are replayed as
    without the setting. Virtual time where KV is all that a step reads.
    """
    prompt = [i * i % 256 for i in range(42 * BLOCK)]
    settings: dict[str, Any] = {"num_gpu_blocks": 60, "enable_cpu_offload": None}
    settings |= {"offload_mode": "auto", "kv_offload_gib": None, "stream_mib_per_step": None}
    settings |= {"max_model_len": 400, "max_num_batched_tokens": 128}
    numbers = cycle([0, MOST])
    monkeypatch.setattr(PayingDrafts, "choose", lambda self: next(numbers))
    plain = engine(tiny("llama"), **settings | {"device": "cpu"})
    with gpu.left():
        (wanted,) = Driver(plain).run([prompt], replace(PARAMS, max_tokens=12))
    plain.close()
    made = engine(tiny("llama"), speculative=f"resident:{MOST}", **settings)
    layers = made.plan.kv.num_layers
    compute = gpu.streams[0]
    spent = times_of_drafts(made, compute)
    made.add_request(prompt, replace(PARAMS, max_tokens=12))
    outputs, rounds, others = [], [], []
    gpu.costs = Costs(block_s=1.0)
    while made.has_unfinished_requests:
        num_rounds, busy = len(spent), compute.busy
        replays = sum(graph.num_replays for graph in gpu.graphs)
        outputs += made.step()
        replays = sum(graph.num_replays for graph in gpu.graphs) - replays
        drafts_s = sum(spent[num_rounds:])
        (rounds if drafts_s else others).append((drafts_s, compute.busy - busy - drafts_s, replays))
    assert outputs[0].outputs[0].token_ids == wanted.outputs[0].token_ids
    # Each draft is one graph; the checking step has one more between two attentions.
    assert [replays for _, _, replays in rounds[1:-1]] == [MOST + layers] * (len(rounds) - 2)
    assert {replays for _, _, replays in others[-2:]} == {1}
    for drafts_s, check_s, _ in rounds[:-1]:
        # 5 of 42 blocks before the tail, which has one or two.
        assert 6 / 44 <= drafts_s / MOST / check_s <= 7 / 43
        assert abs(check_s / others[-1][1] - 1) < 0.03
    made.close()
