"""Recurrent layers: the kernel in C beside PyTorch's form, bits that do not depend on how a text is
cut, and states that come and go with their requests.

Logits and ids beside transformers' are tested with the other architectures' (TINY).
"""

from __future__ import annotations

import errno
import mmap
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import reference, reference_greedy
from driver import Driver, assert_greedy, assert_logits_are_transformers, small_engine
from marks import named, needs_compiler
from recurrent_layers import SHAPES, Rule, make_net, make_state, run_step, some_rows
from tiny_models import TINY
from torch import Tensor

from nanoengine import SamplingParams
from nanoengine.config.model import AnyRecurrent, RecurrentConfig
from nanoengine.errors import OutOfMemoryError
from nanoengine.kernels.call_tape import CallTape
from nanoengine.kernels.cpu_kernels import CpuKernels
from nanoengine.kernels.cpu_recurrence import CpuRecurrence
from nanoengine.kv.block_manager import Block
from nanoengine.kv.state_slots import StateSnapshots
from nanoengine.models.mamba import MambaNet
from nanoengine.models.rules import recurrence
from nanoengine.models.short_conv import ShortConvNet
from nanoengine.startup import memory_plan


def rules(folder: Path, kernels: CpuKernels) -> dict[str, Rule]:
    in_c = CpuRecurrence.load(kernels.tape, folder)
    return {"C": in_c.run, "PyTorch": recurrence}


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernel_computes_what_pytorch_does(
    build_folder: Path, kernels: CpuKernels, shape: AnyRecurrent, dtype: torch.dtype
) -> None:
    """New sequences and others, decodes and a prompt of several windows, in one step."""
    net = make_net(shape)
    x, done, slots = some_rows(net, dtype, 1, 69, 2, 1), (0, 0, 7, 9), (4, 1, 0, 3)
    found: dict[str, list[Tensor]] = {}
    for name, rule in rules(build_folder, kernels).items():
        state = make_state(shape, dtype)
        found[name] = [*run_step(rule, net, state, x, done, slots), state.inputs, state.memory]
    tolerance = 1e-5 if dtype is torch.float32 else 0.03
    for ours, theirs in zip(*found.values(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_bits_do_not_depend_on_cuts_batch_or_threads(
    build_folder: Path, kernels: CpuKernels, shape: AnyRecurrent, dtype: torch.dtype
) -> None:
    rule, net = rules(build_folder, kernels)["C"], make_net(shape)
    rows, mate = some_rows(net, dtype, 61, 40)
    whole = make_state(shape, dtype)
    (want,) = run_step(rule, net, whole, [rows], [0], [2])
    for cuts in ((1,) * 61, (16, 1, 3, 41), (2, 59)):
        state, got, done = make_state(shape, dtype), [], 0
        torch.set_num_threads(1 + len(cuts) % 2)
        for count in cuts:
            parts = [mate[: 1 + done % 7], rows[done : done + count]]
            got.append(run_step(rule, net, state, parts, [done % 2, done], [4, 0])[1])
            done += count
        assert torch.equal(torch.cat(got), want)
        assert torch.equal(state.memory[0], whole.memory[2])
        assert torch.equal(state.inputs[0], whole.inputs[2])


@pytest.mark.parametrize(
    "name", ["Mamba-2", "Mamba-2 of odd sizes", "Falcon-H1", "a norm before the gate"]
)
def test_mamba_is_its_formula(name: str) -> None:
    """One sequence of one token after another, by a loop over heads."""
    shape = SHAPES[name]
    assert isinstance(shape, RecurrentConfig)
    net, (rows,) = make_net(shape), some_rows(make_net(shape), torch.float32, 5)
    assert isinstance(net, MambaNet)
    state = make_state(shape, torch.float32)
    (got,) = run_step(recurrence, net, state, [rows], [0], [1])
    keys = shape.num_key_heads * shape.key_dim
    mixed, z, dt = rows.split_with_sizes(shape.sizes, dim=1)
    padded = torch.cat([torch.zeros(shape.conv_size - 1, shape.channels), mixed])
    windows = padded.unfold(0, shape.conv_size, 1)  # [tokens, channels, conv_size]
    mixed = torch.nn.functional.silu((windows * net.conv.T).sum(-1) + net.conv_bias)
    c, b, x = mixed.split_with_sizes([keys, keys, shape.value_size], dim=1)
    dt = torch.nn.functional.softplus(dt * net.step_by + net.dt_bias)
    y = torch.empty(5, shape.value_size)
    for head in range(shape.num_value_heads):
        key = head * shape.num_key_heads // shape.num_value_heads * shape.key_dim
        its = slice(head * shape.value_dim, (head + 1) * shape.value_dim)
        s = torch.zeros(shape.value_dim, shape.key_dim)
        for t in range(5):
            of_b, of_c = (each[t, key : key + shape.key_dim] for each in (b, c))
            s = s * (dt[t, head] * net.decay[head]).exp() + torch.outer(
                dt[t, head] * x[t, its], of_b
            )
            y[t, its] = s @ of_c + net.skip[head] * x[t, its]
    gate = torch.nn.functional.silu(z * net.gate_by)
    made = (y if shape.norm == "before gate" else y * gate).view(5, shape.num_key_heads, -1)
    if shape.norm != "none":
        made = made * torch.rsqrt(made.square().mean(-1, keepdim=True) + net.eps)
    want = made.flatten(1) * net.norm * (gate if shape.norm == "before gate" else 1)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_a_short_convolution_is_its_formula() -> None:
    """C times the convolution of B x, by PyTorch's; the state is the last B x."""
    net, lengths = make_net(SHAPES["short convolution of odd sizes"]), (5, 2)
    assert isinstance(net, ShortConvNet)
    state, taps = make_state(net.shape, torch.float32), net.shape.conv_size
    rows = some_rows(net, torch.float32, *lengths)
    found = run_step(recurrence, net, state, rows, (0, 0), (1, 3))
    for x, got, slot in zip(rows, found, (1, 3), strict=True):
        b, c, x = x.chunk(3, dim=1)
        padded = torch.cat([torch.zeros(taps - 1, net.shape.channels), b * x])
        convolved = torch.nn.functional.conv1d(
            padded.T[None], net.conv.T[:, None], net.conv_bias, groups=net.shape.channels
        )
        torch.testing.assert_close(got, c * convolved[0].T)
        assert torch.equal(state.inputs[slot], padded[-(taps - 1) :])


def some_prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(256) for _ in range(length)] for length in (40, 3, 17, 64, 9)]


STATES = {  # how many layers have one, and KV
    "qwen3.5": (2, 1),
    "nemotron-h": (3, 2),
    "granite-hybrid": (2, 1),
    "lfm2": (2, 1),
    "falcon-h1": (3, 3),
    "kimi-linear": (2, 1),
    "bamba": (2, 1),
    "ling": (2, 1),
    "lfm3": (2, 2),
    "olmo-hybrid": (2, 1),
    "nemotron-h-latent": (2, 1),
}
FIRST = ("qwen3.5", "nemotron-h", "granite-hybrid", "lfm2", "falcon-h1", "kimi-linear")
NAMES = named({name: name for name in STATES}, *FIRST)
LATER = ("bamba", "lfm3", "ling-unbounded", "olmo-hybrid", "nemotron-h-latent")


@pytest.mark.some(6)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 2, "max_num_batched_tokens": 13},
        {"num_gpu_blocks": 12, "decode_reserve_blocks": 0},
        {"runs_ahead": True, "max_num_batched_tokens": 30, "max_num_seqs": 4},
    ],
    ids=["chunks", "preempted", "run ahead"],
)
def test_states_follow_their_requests(
    tiny: Callable[[str], Path], settings: dict[str, int], name: str
) -> None:
    """Requests that come and go, are aborted and preempted: ids are transformers'."""
    path = tiny(name)
    engine = small_engine(path, **settings)
    driver, prompts = Driver(engine), some_prompts()
    doomed = engine.add_request(prompts[3], SamplingParams(max_tokens=20))
    for _ in range(3):
        driver.step()
    engine.abort(doomed)
    outputs = driver.run(prompts)
    assert_greedy(path, prompts, outputs, len(outputs[0].outputs[0].token_ids))
    assert ("num_gpu_blocks" in settings) == any(o.metrics.num_preemptions for o in outputs)
    num, with_kv = STATES[name]
    assert f"{num} layers have a state, {with_kv} KV; states take" in str(engine.plan)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "mode", [pytest.param("resident", marks=pytest.mark.breadth), "in_place", "stream"]
)
@pytest.mark.parametrize(
    "name",
    [
        "qwen3.5-moe",
        "nemotron-h",
        "nemotron-h-moe",
        "granite-hybrid",
        "lfm2-moe",
        "falcon-h1-norm",
        "kimi-linear",
        *(pytest.param(name, marks=pytest.mark.breadth) for name in LATER),
    ],
)
def test_experts_or_nothing_behind_recurrent_layers(
    tiny: Callable[[str], Path], name: str, mode: str
) -> None:
    """In chunks, on every tier, the second time from the cache."""
    path, prompts = tiny(name), some_prompts()
    settings: dict[str, Any] = {"max_num_batched_tokens": 13, "max_num_seqs": 3}
    if mode != "resident":
        settings |= {"num_gpu_blocks": 6, "kv_offload_gib": 0.01, "offload_mode": mode}
        settings |= {"slot_tokens": 16, "measure_speed": False}
    driver = Driver(small_engine(path, **settings))
    for is_again in (False, True):
        outputs = driver.run(prompts)
        assert_greedy(path, prompts, outputs, len(outputs[0].outputs[0].token_ids))
        assert_logits_are_transformers(driver, path, outputs)
        assert any(output.num_cached_tokens for output in outputs) == is_again
    assert (driver.engine.kv.counters.h2d_bytes > 0) == (mode == "stream")
    assert (driver.engine.kv.peak_streamed > 0) == (mode != "resident")


def test_texts_that_part_leave_a_snapshot_there(tiny: Callable[[str], Path]) -> None:
    """The second one finds KV without a state, and stops where it ends; the third goes on there."""
    path, shared = tiny("qwen3.5"), some_prompts()[0]
    driver = Driver(small_engine(path))
    prompts = [[*shared, *[number] * 20] for number in range(3)]
    found = [driver.run([prompt])[0] for prompt in prompts]
    assert [output.num_cached_tokens for output in found] == [0, 0, len(shared)]
    assert_greedy(path, prompts, found, 16)
    turn = [*prompts[0], *found[0].outputs[0].token_ids, 5, 6]
    (last,) = driver.run([turn])  # the next turn of the first one
    assert last.num_cached_tokens == (len(turn) - 3) // 8 * 8
    assert_greedy(path, [turn], [last], 16)


@pytest.mark.some(3)
@pytest.mark.parametrize("name", NAMES)
def test_a_turn_goes_on_where_guesses_ended(tiny: Callable[[str], Path], name: str) -> None:
    """Right and wrong guesses are made, and still the state at the end of each block is kept."""
    path, prompts = tiny(name), [([5, 16, 27] * 8)[:length] for length in range(14, 22)]
    params = SamplingParams(
        temperature=0, max_tokens=30, ignore_eos=True, allowed_token_ids=[5, 16, 27]
    )
    found = {}
    for speculative in (None, "ngram:5"):
        driver = Driver(small_engine(path, speculative=speculative))
        outputs = driver.run(prompts, params)
        turns = [[*o.prompt_token_ids, *o.outputs[0].token_ids, 5, 6] for o in outputs]
        last = driver.run(turns, params)
        for turn, output in zip(turns, last, strict=True):
            assert output.num_cached_tokens == (len(turn) - 3) // 8 * 8
        found[speculative] = [output.outputs[0].token_ids for output in [*outputs, *last]]
    accepted = sum(output.metrics.num_accepted for output in outputs)
    assert 0 < accepted < sum(output.metrics.num_guessed for output in outputs)
    assert found[None] == found["ngram:5"]
    assert "more beside guesses" in str(driver.engine.plan)


def test_the_snapshot_used_longest_ago_makes_room() -> None:
    first, second, third, gone = blocks = [Block(n) for n in range(4)]
    gone.ref_count = 0
    snapshots = StateSnapshots(2)
    places = {snapshots.add(first), snapshots.add(gone)}
    assert places == {0, 1} and snapshots.num_before(blocks) == 4
    assert snapshots.add(second) in places  # in place of the one whose block is gone
    assert snapshots.num_before(blocks) == 2 and snapshots.num_before([first, third]) == 1
    snapshots.use(first)
    snapshots.add(third)
    assert [snapshots.num_before([block]) for block in blocks] == [1, 0, 1, 0]


def test_snapshots_that_find_no_memory_are_named(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `ulimit -v`, where mmap raises an error of the system."""
    path, taken = tiny("qwen3.5"), mmap.mmap

    def limited(fileno: int, length: int, **options: int) -> mmap.mmap:
        if fileno == -1:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return taken(fileno, length, **options)

    monkeypatch.setattr(mmap, "mmap", limited)
    said = r"and snapshots of recurrent states need .*, or set enable_prefix_caching=False"
    with pytest.raises(OutOfMemoryError, match=said):
        small_engine(path)
    small_engine(path, enable_prefix_caching=False).close()


def test_a_step_that_failed_is_computed_from_the_beginning(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has changed some states, and may run again."""
    path, prompt = tiny("qwen3.5"), some_prompts()[0]
    engine = small_engine(path, max_num_batched_tokens=16, max_num_seqs=2)
    expected = reference_greedy(reference(path), prompt, 8)
    engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    monkeypatch.setattr(CallTape, "replay", lambda self, key, forward: forward())
    run, calls = engine.runner.attention.run, iter([None] * 4 + [RuntimeError("lost")])

    def breaks_once(*args: object) -> Tensor:
        error = next(calls, None)
        if error is not None:
            raise error
        return run(*args)

    engine.runner.attention.run = breaks_once
    outputs = []
    while engine.has_unfinished_requests:
        try:
            outputs += engine.step()
        except RuntimeError as error:
            assert str(error) == "lost"
    assert next(calls, "all were made") == "all were made"
    assert outputs[0].outputs[0].token_ids == expected


def test_several_completions_each_have_a_state(tiny: Callable[[str], Path]) -> None:
    path, prompt = tiny("qwen3.5"), some_prompts()[2]
    params = [
        SamplingParams(temperature=1.0, seed=4, n=n, max_tokens=9, ignore_eos=True) for n in (3, 1)
    ]
    driver = Driver(small_engine(path))
    several, single = driver.run([prompt, prompt], params)
    assert several.outputs[0].token_ids == single.outputs[0].token_ids
    assert len({tuple(each.token_ids) for each in several.outputs}) > 1


def test_no_more_requests_run_than_states_fit(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, prompts = tiny("qwen3.5"), some_prompts()
    assert small_engine(path).plan.max_num_seqs == 64
    monkeypatch.setattr(memory_plan, "STATE_SHARE", 1e-9)  # one is always allocated
    few = small_engine(path)
    driver = Driver(few)
    assert_greedy(path, prompts, driver.run(prompts), 16)
    assert (driver.max_batch, few.plan.max_num_seqs) == (1, 1)


def test_a_hybrid_of_attention_alone_has_no_states(tmp_path: Path) -> None:
    """And may draft, as other models do."""
    whole = {"layer_types": ["full_attention"] * 3}
    replace(TINY["qwen3.5"], settings=TINY["qwen3.5"].settings | whole)(tmp_path)
    engine = small_engine(tmp_path, speculative="resident:2")
    prompts = some_prompts()
    assert_greedy(tmp_path, prompts, Driver(engine).run(prompts), 16)
    assert engine.plan.kv.recurrent is None and engine.scheduler.turns.can_draft([])
    engine.close()
