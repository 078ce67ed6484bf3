"""Guesses by an MTP head: they are what the head says, and change the number of steps
and nothing else.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import count, cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import Driver, small_engine
from fixed_drafts import scored
from guess_cases import (
    DEBUG,
    PARAMS,
    PROMPTS,
    everything,
    in_two_tiers,
    layouts,
    plain,
    run,
)
from marks import named, needs_compiler
from mtp_models import (
    FILE,
    chained,
    half_right,
    head_logits,
    knowing_head,
    said_of,
    watch_head,
    with_head,
    wrap,
)
from safetensors.torch import load_file, save_file
from shadow import Boom
from torch import Tensor

from nanoengine import LLM, SamplingParams
from nanoengine.config.engine import GIB, make_config
from nanoengine.engine import draft_vocabulary
from nanoengine.engine.draft_length import PayingDrafts
from nanoengine.errors import ConfigError, WeightMismatchError
from nanoengine.loading.model_config import read_model_config
from nanoengine.loading.mtp_names import with_mtp
from nanoengine.outputs import RequestOutput
from nanoengine.sequence import ScheduledBatch
from nanoengine.startup.forecast import Forecaster, Hardware

MOST = 3
IN_TWO_TIERS, LAYOUTS = in_two_tiers(7), layouts(7)
MODELS = (
    *("qwen3.5", "qwen3.5-moe", "qwen3-next", "qwen3-next-moe"),
    *("deepseek-v3", "glm4-moe-lite", "glm4-moe", "ling", "ling-2"),
)
SPLIT = ("qwen3-next-moe", "glm4-moe")  # with a tensor for each expert
CHUNKS = {"max_num_batched_tokens": 9, "max_num_seqs": 3}


@pytest.fixture(scope="session")
def heads(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from a name of TINY to the folder of that model with a random head."""
    folder = tmp_path_factory.mktemp("heads")
    return lambda name: with_head(tiny(name), folder, splits_experts=name in SPLIT)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head guesses in every step, and no guess is checked."""
    monkeypatch.setattr(PayingDrafts, "choose", lambda self: 0)
    monkeypatch.setattr(PayingDrafts, "is_due", True)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every decode checks as many guesses as it may, whether they pay or not."""
    monkeypatch.setattr(PayingDrafts, "_number", lambda self: len(self._num_right))


@pytest.mark.some(3)
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", MODELS)
def test_it_says_what_transformers_layers_say(
    tiny: Callable[[str], Path], heads: Any, name: str
) -> None:
    """Of every token, in chunks too: transformers' decoder layer over the whole text."""
    engine = small_engine(heads(name), speculative="mtp:1", **CHUNKS)
    said = watch_head(engine)
    outputs = run(engine)
    texts = [
        prompt + out.outputs[0].token_ids for prompt, out in zip(PROMPTS, outputs, strict=True)
    ]
    right = [head_logits(tiny(name), text) for text in texts]
    checked = 0
    for seq_id, position, row in said:
        if position - 2 < len(right[seq_id]):
            # With AVX2 alone the sums of a delta rule end a little further off.
            torch.testing.assert_close(row, right[seq_id][position - 2], atol=2e-4, rtol=0)
            checked += 1
    assert checked == sum(len(out.outputs[0].token_ids) for out in outputs)
    engine.close()


@pytest.mark.some(2)
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-next-moe", "deepseek-v3", "glm4-moe"])
def test_each_guess_begins_with_the_one_before(
    tiny: Callable[[str], Path], heads: Any, name: str
) -> None:
    """Whether the guesses before were right or not."""
    engine = small_engine(heads(name), speculative=f"mtp:{MOST}")
    postprocess, checked = engine.scheduler.postprocess, []

    def watched(batch: ScheduledBatch, *rest: Any) -> Any:
        for item in batch.items:
            if len(item.guesses) == MOST:
                said = chained(tiny(name), item.seq.token_ids, MOST)
                guesses = zip(item.guesses, said, strict=True)
                checked.extend(int(row.argmax()) == guess for guess, row in guesses)
        return postprocess(batch, *rest)

    engine.scheduler.postprocess = watched
    Driver(engine).run(PROMPTS, SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    assert len(checked) > 50
    assert all(checked), "another guess than that of transformers' layers"
    engine.close()


@pytest.mark.some(2)
@needs_compiler
@pytest.mark.parametrize("chunks", [{}, CHUNKS], ids=["whole", "chunks"])
@pytest.mark.parametrize("layout", named(LAYOUTS, "resident", "in place", "ring of two"))
@pytest.mark.parametrize(
    "name",
    [
        "qwen3.5",
        "glm4-moe",
        *(
            pytest.param(name, marks=pytest.mark.breadth)
            for name in MODELS
            if name not in ("qwen3.5", "glm4-moe")
        ),
    ],
)
def test_no_bit_depends_on_the_head(
    heads: Any,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    layout: dict[str, Any],
    chunks: dict[str, Any],
) -> None:
    """Ids and log probabilities, with right and wrong guesses, and a second time with prefix hits:
    what was published holds nothing of what was guessed wrong.
    """
    path, settings = heads(name), layout | chunks | DEBUG
    expected = plain(path, **settings)
    texts = [prompt + ids for prompt, (ids, _) in zip(PROMPTS, expected, strict=True)]
    numbers = cycle([MOST, MOST, 1, 2, 0])
    monkeypatch.setattr(PayingDrafts, "_number", lambda self: next(numbers))
    engine = small_engine(path, speculative=f"mtp:{MOST}", **settings)
    watch_head(engine, half_right(texts))
    for _ in range(2):
        outputs = run(engine)
        for (ids, logprobs), (right, as_before) in zip(scored(outputs), expected, strict=True):
            assert ids == right and torch.equal(logprobs, as_before), "it depends on the head"
        guessed = sum(output.metrics.num_guessed for output in outputs)
        accepted = sum(output.metrics.num_accepted for output in outputs)
        assert 10 < accepted < guessed
    if layout.get("decode_reserve_blocks") == 0:
        assert sum(output.metrics.num_preemptions for output in outputs)
    engine.close()


@needs_compiler
@pytest.mark.usefixtures("always")
def test_nor_on_steps_that_fail(heads: Any) -> None:
    """A recurrent state is lost with the step: what came after its last snapshot is computed once
    more, and where that is little, the step had room for guesses after it.
    """
    expected = plain(heads("qwen3.5"))
    texts = [prompt + ids for prompt, (ids, _) in zip(PROMPTS, expected, strict=True)]
    engine = small_engine(heads("qwen3.5"), speculative="mtp:7")
    watch_head(engine, half_right(texts))
    sample, number = engine.runner.sampler.sample, count()

    def failing(*args: Any) -> Tensor:
        if next(number) % 3 == 2:
            raise Boom
        return sample(*args)

    engine.runner.sampler.sample = failing
    ids = [engine.add_request(*each) for each in zip(PROMPTS, PARAMS, strict=True)]
    found: dict[int | str, RequestOutput] = {}
    while engine.has_unfinished_requests:
        with suppress(Boom):
            found |= {output.request_id: output for output in engine.step()}
        engine.kv.check()
    outputs = scored([found[i] for i in ids])
    for (made, logprobs), (right, as_before) in zip(outputs, expected, strict=True):
        assert made == right and torch.equal(logprobs, as_before)
    assert sum(output.metrics.num_accepted for output in found.values()) > 10
    engine.close()


@needs_compiler
@pytest.mark.usefixtures("always", "our_products")
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen3.5-moe", {"dtype": "bfloat16"}),
        ("glm4-moe", {"dtype": "bfloat16"}),
        ("qwen3.5", {"quantization": "int8"}),
        pytest.param("deepseek-v3", {"dtype": "bfloat16"}, marks=pytest.mark.breadth),
        pytest.param("glm4-moe", {"quantization": "int8"}, marks=pytest.mark.breadth),
    ],
    ids=str,
)
def test_nor_in_other_numbers(heads: Any, name: str, settings: dict[str, Any]) -> None:
    """Where the head's norms are fused onto products and where they are not."""
    expected = plain(heads(name), **settings)
    texts = [prompt + ids for prompt, (ids, _) in zip(PROMPTS, expected, strict=True)]
    engine = small_engine(heads(name), speculative=f"mtp:{MOST}", **settings)
    watch_head(engine, half_right(texts))
    outputs = run(engine)
    for (ids, logprobs), (right, as_before) in zip(scored(outputs), expected, strict=True):
        assert ids == right and torch.equal(logprobs, as_before)
    assert sum(output.metrics.num_accepted for output in outputs) > 10
    engine.close()


@pytest.mark.some(3)
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("layout", [{}, IN_TWO_TIERS], ids=["resident", "streamed"])
@pytest.mark.parametrize("most", [1, MOST])
@pytest.mark.parametrize("is_right", [True, False])
def test_a_head_that_knows_is_always_right(
    tiny: Callable[[str], Path], tmp_path: Path, is_right: bool, most: int, layout: dict[str, Any]
) -> None:
    """One that does not is always wrong, but where it draws with the same random numbers from other
    probabilities, it is mostly wrong.
    """
    path = knowing_head(tiny("qwen3.5"), tmp_path / "model", is_right)
    engine = small_engine(path, speculative=f"mtp:{most}", **layout)
    driver, num_steps = Driver(engine), []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        before = driver.num_steps
        (output,) = driver.run([prompt], params)
        num_steps.append(driver.num_steps - before)
        guessed, accepted = output.metrics.num_guessed, output.metrics.num_accepted
        assert guessed > 10
        least = guessed if is_right else 0
        most_right = least if is_right or params.greedy else guessed // 4
        assert least <= accepted <= most_right, "not what this head knows"
    if is_right and not layout:
        # A step for the prompt, one more at the end of its blocks, and those of the answer.
        most_steps = [2 + -(-(params.max_tokens - 1) // (1 + most)) for params in PARAMS]
        assert all(num <= most for num, most in zip(num_steps, most_steps, strict=True))
    engine.close()


@needs_compiler
@pytest.mark.usefixtures("always", "our_products")
def test_guesses_among_likely_tokens(heads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a run that the text had lately, one run for each of the three texts."""
    expected = plain(heads("qwen3.5"), **DEBUG)
    for name, value in {"NUM_RUNS": 3, "FREQUENT_RUNS": 0, "LEAST_TIMES": 1}.items():
        monkeypatch.setattr(draft_vocabulary, name, value)
    engine = small_engine(heads("qwen3.5"), speculative=f"mtp:{MOST}", **DEBUG)
    sampler, counts = engine.runner.mtp.sampler, set()
    sample = sampler.sample

    def watched(logits: Tensor, *rest: Any) -> Tensor:
        counts.update(logits.isfinite().sum(dim=1).tolist())
        return sample(logits, *rest)

    sampler.sample = watched
    for (ids, scores), (right, as_before) in zip(scored(run(engine)), expected, strict=True):
        assert ids == right and torch.equal(scores, as_before)
    assert max(counts) <= 3 * 64 < len(engine.runner.model.logits(torch.zeros(1, 64))[0])
    engine.close()


@pytest.mark.some(1)
@needs_compiler
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("name", "speculative", "settings"),
    [
        ("qwen3.5", "mtp:3", {}),
        ("glm4-moe", "mtp:3", IN_TWO_TIERS | DEBUG),
        ("glm4-moe", "ngram:4+mtp:2", {}),
        pytest.param("qwen3.5", "mtp:3", IN_TWO_TIERS | DEBUG, marks=pytest.mark.breadth),
        pytest.param("qwen3-next-moe", "ngram:4+mtp:2", {}, marks=pytest.mark.breadth),
        pytest.param("deepseek-v3", "mtp:5", {}, marks=pytest.mark.breadth),
    ],
    ids=str,
)
def test_whatever_a_request_asks_for(
    heads: Any, name: str, speculative: str, settings: dict[str, Any]
) -> None:
    """Penalties, forms, completions, scores: all as without guesses, of which some are right."""
    found, texts = [], {}
    for asked in ("off", speculative):
        engine = small_engine(heads(name), speculative=asked, **settings)
        add, seqs = engine.scheduler.add, []
        engine.scheduler.add = lambda seq, add=add, seqs=seqs: (seqs.append(seq), add(seq))
        if texts:
            watch_head(engine, half_right(texts))
        prompts = [PROMPTS[i % 3][i:] for i in range(7)]
        outputs = Driver(engine).run(prompts, everything())
        found.append([(o.prompt_logprobs, o.outputs) for o in outputs])
        texts = {seq.seq_id: seq.token_ids for seq in seqs}
        accepted = sum(output.metrics.num_accepted for output in outputs)
        engine.close()
    assert found[0] == found[1] and accepted > 10


@needs_compiler
def test_steps_are_begun_ahead_where_none_are_checked(
    heads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tokens reach the head on the device. With guesses no step is begun ahead."""
    expected = plain(heads("qwen3.5"))
    due = cycle([False] * 5 + [True] * 4)
    monkeypatch.setattr(PayingDrafts, "choose", lambda self: 2)
    monkeypatch.setattr(PayingDrafts, "is_due", property(lambda self: next(due)))
    engine = small_engine(heads("qwen3.5"), speculative="mtp:2", runs_ahead=True)
    schedule_ahead, steps = engine.scheduler.schedule_ahead, []

    def watched(batch: ScheduledBatch) -> ScheduledBatch | None:
        ahead = schedule_ahead(batch)
        steps.append((batch.is_drafted, ahead is not None))
        assert steps[-1] != (True, True), "begun ahead of a step that checks guesses"
        return ahead

    engine.scheduler.schedule_ahead = watched
    texts = [prompt + ids for prompt, (ids, _) in zip(PROMPTS, expected, strict=True)]
    watch_head(engine, half_right(texts))
    for (ids, logprobs), (right, as_before) in zip(scored(run(engine)), expected, strict=True):
        assert ids == right and torch.equal(logprobs, as_before)
    assert {(False, True), (True, False)} <= set(steps)
    engine.close()


def test_beams_never_ask_it(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Nor do their forks, though it knows what comes: each takes one token a step."""
    path, found = knowing_head(tiny("qwen3.5"), tmp_path / "model", is_right=True), []
    for speculative in ("off", "mtp:2"):
        llm = LLM(
            path, device="cpu", dtype="float32", num_gpu_blocks=64, kvcache_block_size=8,
            speculative=speculative,
        )  # fmt: skip
        said = watch_head(llm.llm_engine) if speculative != "off" else []
        beams = llm.beam_search(PROMPTS[1:], beam_width=3, max_tokens=8, use_tqdm=False)
        found.append([beam.sequences for beam in beams])
        llm.close()
    assert found[0] == found[1]
    assert not said


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("speculative", ["off", "mtp:1"])
def test_further_heads_are_not_needed(
    tiny: Callable[[str], Path], heads: Any, tmp_path: Path, speculative: str
) -> None:
    """Of a model with num_nextn_predict_layers above 1 the first head guesses, if any does."""
    path = Path(shutil.copytree(heads("deepseek-v3"), tmp_path / "model"))
    tensors = load_file(path / FILE)
    first = f"model.layers.{read_model_config(path).num_layers}."
    more = {
        n.replace(first, "model.layers.9."): t.clone() for n, t in tensors.items() if first in n
    }
    save_file(tensors | more, path / FILE, {"format": "pt"})
    for (ids, _), (wanted, _) in zip(
        plain(path, speculative=speculative), plain(tiny("deepseek-v3")), strict=True
    ):
        assert ids == wanted


def test_guesses_are_made_where_they_pay(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Nothing is decided for the engine here: it times its steps itself."""
    path = knowing_head(tiny("qwen3.5"), tmp_path / "model", is_right=True)
    engine = small_engine(path, speculative="mtp:4")
    (output,) = Driver(engine).run(PROMPTS[:1], replace(PARAMS[0], max_tokens=120))
    assert 2 < output.metrics.num_accepted == output.metrics.num_guessed
    assert "up to 4 by the MTP head, where they pay" in engine.plan.guesses
    engine.close()


def test_nobody_guesses_where_it_does_not_pay(heads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output head is not asked either."""
    engine = small_engine(heads("qwen3.5"), speculative="mtp:2")
    said = watch_head(engine)
    monkeypatch.setattr(PayingDrafts, "_number", lambda self: 0)
    outputs = Driver(engine).run(PROMPTS, PARAMS)
    assert len(said) == len(PROMPTS)  # of the steps before anything is timed
    assert not any(output.metrics.num_guessed for output in outputs)
    engine.close()


def test_the_text_model_of_one_for_images_has_it_too(
    heads: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = wrap(heads("qwen3.5"), tmp_path / "wrapped")
    found = [said_of(folder, monkeypatch) for folder in (heads("qwen3.5"), path)]
    assert torch.equal(*found)


def test_memory_is_planned_for_it(heads: Any) -> None:
    """Weights, KV on both tiers, and the second state of recurrent layers."""
    plans = {}
    for speculative in ("off", "mtp:1"):
        engine = small_engine(heads("qwen3.5"), speculative=speculative, **IN_TWO_TIERS)
        plans[speculative] = engine.plan
        engine.close()
    off, on = plans["off"], plans["mtp:1"]
    assert on.kv.block_bytes == 2 * off.kv.block_bytes and on.kv.num_layers == 2
    assert on.kv.num_host_blocks == off.kv.num_host_blocks // 2
    assert on.weight_bytes > off.weight_bytes and on.activation_bytes > off.activation_bytes
    assert on.kv.keeps_states and not off.kv.keeps_states


@pytest.mark.parametrize("name", ["qwen3.5", "glm4-moe"])
def test_forecasts_count_it(heads: Any, name: str) -> None:
    model, hardware = read_model_config(heads(name)), Hardware(0, 4 * GIB, 50.0, 10.0)
    config = make_config("m", {"dtype": "float32", "speculative": "mtp:1"})
    off = Forecaster(replace(config, speculative="off"), model, hardware).forecast(100)
    on = Forecaster(config, with_mtp(model), hardware).forecast(100)
    engine = small_engine(heads(name), speculative="mtp:1")
    assert on.plan.weight_bytes == engine.plan.weight_bytes > off.plan.weight_bytes
    assert on.plan.kv.num_layers == off.plan.kv.num_layers + 1
    assert on.tokens_per_s < off.tokens_per_s
    engine.close()


def test_random_weights_have_one(heads: Any) -> None:
    engine = small_engine(heads("glm4-moe"), speculative="mtp:2", load_format="dummy")
    assert Driver(engine).run(PROMPTS[2:])
    engine.close()


def test_who_has_none_is_told_what_to_take(tiny: Callable[[str], Path]) -> None:
    instead = r'take speculative="ngram:4"'
    with pytest.raises(ConfigError, match=f"LlamaForCausalLM has none .*{instead}"):
        small_engine(tiny("llama"), speculative="mtp:1")
    with pytest.raises(WeightMismatchError, match=rf"no tensor mtp\.fc\.weight; {instead}"):
        small_engine(tiny("qwen3.5"), speculative="mtp:1")
    with pytest.raises(WeightMismatchError, match=rf"layers\.3\.eh_proj\.weight; {instead}"):
        small_engine(tiny("deepseek-v3"), speculative="mtp:1")
