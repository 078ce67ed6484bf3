"""Guesses by an assistant: they are what transformers' assistant says, and change the number of
steps and nothing else.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from assistants import said_by_transformers, watch_assistant, write_assistant
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
from mtp_models import half_right
from safetensors.torch import load_file, save_file

from nanoengine.config.engine import GIB, EngineConfig, make_config
from nanoengine.engine.assistant_drafter import AssistantDrafter
from nanoengine.engine.draft_length import PayingDrafts
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.errors import ConfigError, ModelLoadError
from nanoengine.loading.model_config import read_model_config
from nanoengine.models.assistant import CENTROIDS, ORDERING
from nanoengine.sequence import ScheduledBatch
from nanoengine.startup.forecast import Forecaster, Hardware, read_guesser

MOST = 3
FILE = "model.safetensors"
IN_TWO_TIERS, LAYOUTS = in_two_tiers(12), layouts(12)
MODELS = ("gemma4", "gemma4-shared", "gemma4-moe")
CHUNKS = {"max_num_batched_tokens": 12, "max_num_seqs": 3}


@pytest.fixture(scope="session")
def helpers(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from a name of TINY to the folders of that model and of an assistant of it."""
    folder = tmp_path_factory.mktemp("assistants")

    def made(name: str, has_centroids: bool = False) -> tuple[Path, Path]:
        target = folder / f"{name}{'-centroids' * has_centroids}"
        if not target.exists():
            write_assistant(tiny(name), target, has_centroids)
        return tiny(name), target

    return made


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every decode checks as many guesses as it may, whether they pay or not."""
    monkeypatch.setattr(PayingDrafts, "_number", lambda self: len(self._num_right))


def assisted(path: Path, assistant: Path, **settings: Any) -> LLMEngine:
    settings = {"speculative": f"mtp:{MOST}"} | settings
    return small_engine(path, draft_model=str(assistant), **settings)


@pytest.mark.some(3)
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("has_centroids", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_it_says_what_transformers_assistant_says(
    helpers: Any, name: str, has_centroids: bool
) -> None:
    """Of every guess, below and above the windows, with right and wrong ones before it."""
    path, assistant = helpers(name, has_centroids)
    engine = assisted(path, assistant, **CHUNKS)
    texts = [prompt + ids for prompt, (ids, _) in zip(PROMPTS, plain(path, **CHUNKS), strict=True)]
    said = watch_assistant(engine, half_right(texts))
    postprocess, checked = engine.scheduler.postprocess, []

    def watched(batch: ScheduledBatch, *rest: Any) -> Any:
        for item in batch.items:
            ids = item.seq.token_ids[: item.start + 1]
            guesses = item.guesses
            right = said_by_transformers(path, assistant, ids, guesses) if guesses else []
            for number, row in enumerate(right):
                ours = said[item.seq.seq_id, len(ids) + number]
                wanted = row.where(ours.isfinite(), -torch.inf)
                torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=0)
                assert int(ours.argmax()) == int(row.argmax())
                checked.append(len(ids))
        return postprocess(batch, *rest)

    engine.scheduler.postprocess = watched
    run(engine)
    assert len(checked) > 80 and min(checked) < 12 and max(checked) > 90
    engine.close()


@pytest.mark.some(2)
@needs_compiler
@pytest.mark.parametrize("chunks", [{}, CHUNKS], ids=["whole", "chunks"])
@pytest.mark.parametrize("layout", named(LAYOUTS, "resident", "in place", "ring of two"))
@pytest.mark.parametrize("has_centroids", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "gemma4-shared",
        pytest.param("gemma4", marks=pytest.mark.breadth),
        pytest.param("gemma4-moe", marks=pytest.mark.breadth),
    ],
)
def test_no_bit_depends_on_it(
    helpers: Any,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    has_centroids: bool,
    layout: dict[str, Any],
    chunks: dict[str, Any],
) -> None:
    """Ids and log probabilities, with right and wrong guesses, and a second time with prefix hits.
    What an assistant reads is there: numbers, of which its own are made.
    """
    (path, assistant), settings = helpers(name, has_centroids), layout | chunks | DEBUG
    expected = plain(path, **settings)
    texts = [prompt + ids for prompt, (ids, _) in zip(PROMPTS, expected, strict=True)]
    numbers = cycle([MOST, MOST, 1, 2, 0])
    monkeypatch.setattr(PayingDrafts, "_number", lambda self: next(numbers))
    engine = assisted(path, assistant, **settings)
    watch_assistant(engine, half_right(texts))
    for _ in range(2):
        outputs = run(engine)
        for (ids, logprobs), (right, as_before) in zip(scored(outputs), expected, strict=True):
            assert ids == right and torch.equal(logprobs, as_before), "it depends on the assistant"
        guessed = sum(output.metrics.num_guessed for output in outputs)
        accepted = sum(output.metrics.num_accepted for output in outputs)
        assert 10 < accepted < guessed
    engine.close()


@needs_compiler
@pytest.mark.usefixtures("always", "our_products")
@pytest.mark.parametrize(
    "settings", [{"dtype": "bfloat16"}, {"quantization": "int8"}], ids=["bfloat16", "int8"]
)
def test_nor_in_other_numbers(helpers: Any, settings: dict[str, Any]) -> None:
    """Its own weights stay numbers."""
    path, assistant = helpers("gemma4-shared", True)
    expected = plain(path, **settings)
    texts = [prompt + ids for prompt, (ids, _) in zip(PROMPTS, expected, strict=True)]
    engine = assisted(path, assistant, **settings)
    watch_assistant(engine, half_right(texts))
    outputs = run(engine)
    for (ids, logprobs), (right, as_before) in zip(scored(outputs), expected, strict=True):
        assert ids == right and torch.equal(logprobs, as_before)
    assert sum(output.metrics.num_accepted for output in outputs) > 10
    engine.close()


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("layout", [{}, IN_TWO_TIERS], ids=["resident", "streamed"])
def test_right_guesses_save_steps(helpers: Any, layout: dict[str, Any]) -> None:
    """All of several requests at once, and no byte crosses the link for a guess."""
    path, assistant = helpers("gemma4-shared")
    texts = [prompt + ids for prompt, (ids, _) in zip(PROMPTS, plain(path), strict=True)]
    found = []
    for speculative in ("off", f"mtp:{MOST}"):
        engine = assisted(path, assistant, speculative=speculative, **layout)
        if speculative != "off":
            watch_assistant(
                engine,
                lambda seq, at: (text := texts[seq.seq_id])[min(at, len(text) - 1)],
            )
        driver = Driver(engine)
        outputs = driver.run(PROMPTS, PARAMS)
        loaded = engine.kv.counters.fill_bytes if layout else 0
        found.append((driver.num_steps, loaded))
        if speculative != "off":
            counts = [(o.metrics.num_guessed, o.metrics.num_accepted) for o in outputs]
            assert all(guessed == accepted > 10 for guessed, accepted in counts)
        engine.close()
    (steps, loaded), (fewer, less) = found
    assert fewer <= 0.45 * steps
    assert less <= 0.6 * loaded


@needs_compiler
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("speculative", "settings"),
    [("mtp:3", {}), ("ngram:4+mtp:2", IN_TWO_TIERS | DEBUG)],
    ids=["resident", "lookup first, streamed"],
)
def test_whatever_a_request_asks_for(
    helpers: Any, speculative: str, settings: dict[str, Any]
) -> None:
    """Penalties, forms, completions, scores: all as without guesses, of which some are right."""
    path, assistant = helpers("gemma4-shared", True)
    prompts = [PROMPTS[i % 3][i:] for i in range(7)]
    found, texts = [], {}
    for asked in ("off", speculative):
        engine = assisted(path, assistant, speculative=asked, **settings)
        add, seqs = engine.scheduler.add, []
        engine.scheduler.add = lambda seq, add=add, seqs=seqs: (seqs.append(seq), add(seq))
        if texts:
            watch_assistant(engine, half_right(texts))
        outputs = Driver(engine).run(prompts, everything())
        found.append([(o.prompt_logprobs, o.outputs) for o in outputs])
        texts = {seq.seq_id: seq.token_ids for seq in seqs}
        accepted = sum(output.metrics.num_accepted for output in outputs)
        engine.close()
    assert found[0] == found[1] and accepted > 10


@needs_compiler
def test_steps_are_begun_ahead_where_none_are_checked(
    helpers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The assistant sees those steps as well: the guesses after them are as good."""
    path, assistant = helpers("gemma4")
    expected = plain(path)
    due = cycle([False] * 5 + [True] * 4)
    monkeypatch.setattr(PayingDrafts, "choose", lambda self: 2)
    monkeypatch.setattr(PayingDrafts, "is_due", property(lambda self: next(due)))
    engine = assisted(path, assistant, speculative="mtp:2", runs_ahead=True)
    before, missing = engine.runner.drafter._drafted, []

    def watched(batch: ScheduledBatch, steps: Any) -> Any:
        seen = engine.runner.drafter._seen
        for step, tokens in before(batch, steps):
            keys = {(batch.items[i].seq.seq_id, batch.items[i].start - 1) for i in step.items}
            missing.append(keys - seen.rows.keys())
            yield step, tokens

    engine.runner.drafter._drafted = watched
    for (ids, logprobs), (right, as_before) in zip(scored(run(engine)), expected, strict=True):
        assert ids == right and torch.equal(logprobs, as_before)
    assert missing and not any(missing)
    engine.close()


def test_guesses_are_made_where_they_pay(helpers: Any) -> None:
    """Nothing is decided for the engine here: it times its steps itself."""
    path, assistant = helpers("gemma4")
    text = PROMPTS[0] + plain(path)[0][0]
    engine = small_engine(path, draft_model=assistant, speculative=None)
    watch_assistant(engine, lambda seq, position: text[min(position, len(text) - 1)])
    (output,) = Driver(engine).run(PROMPTS[:1], PARAMS[0])
    assert engine.config.speculative == "draft:4"
    assert f"up to 4 by {assistant}, where they pay" in engine.plan.guesses
    assert 2 < output.metrics.num_accepted == output.metrics.num_guessed
    engine.close()


def test_memory_is_planned_for_it(helpers: Any) -> None:
    """Its weights; it has no KV. A plan without weights says the same."""
    path, assistant = helpers("gemma4-shared", True)
    plans = []
    for speculative in ("off", "mtp:1"):
        engine = assisted(path, assistant, speculative=speculative)
        plans.append(engine.plan)
        assert isinstance(engine.runner.drafter, AssistantDrafter) == (speculative != "off")
        engine.close()
    off, on = plans
    numbers = sum(t.numel() for n, t in load_file(assistant / FILE).items() if n != ORDERING)
    assert on.weight_bytes - off.weight_bytes == 4 * numbers
    assert on.kv.block_bytes == off.kv.block_bytes
    settings = {"dtype": "float32", "speculative": "mtp:1", "draft_model": assistant}
    config, model = make_config(path, settings), read_model_config(path)
    hardware = Hardware(0, 4 * GIB, 50.0, 10.0)
    for least, each in ((0, config), (4 * numbers, make_config(path, settings))):
        helper = read_guesser(each, model) if least else None
        made = Forecaster(each, model, hardware, guesser=helper).forecast(100)
        assert made.plan.weight_bytes == off.weight_bytes + least == made.weights[0]


# -- what is refused


def changed(assistant: Path, target: Path, **keys: Any) -> Path:
    """A copy with other keys in config.json; those of its layers by "text_config"."""
    shutil.copytree(assistant, target)
    content = json.loads((target / "config.json").read_text())
    content["text_config"] |= keys.pop("text_config", {})
    (target / "config.json").write_text(json.dumps(content | keys))
    return target


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "lacks the key 'num_attention_heads'"),
        ({"backbone_hidden_size": 40}, "hidden size 40 with 260 tokens, and this one has 48"),
        ({"text_config": {"vocab_size": 247}}, "with 247 tokens, and this one has 48 and 260"),
        ({"text_config": {"num_key_value_heads": 2}}, r"layer 0 reads KV heads of \(2, 16\)"),
        ({"num_centroids": 7}, "'num_centroids' is 7, which does not divide the 260 tokens"),
        ({"centroid_intermediate_top_k": 14}, "'centroid_intermediate_top_k' is 14"),
        ({"text_config": {"enable_moe_block": True}}, "'enable_moe_block' of an assistant is True"),
        ({"text_config": {"model_type": "llama"}}, "must be that of a gemma4_text"),
        ({"text_config": {"num_hidden_layers": 2}}, "'layer_types'"),
    ],
    ids=str,
)
def test_another_models_assistant_is_refused(
    helpers: Any, tmp_path: Path, keys: dict[str, Any], error: str
) -> None:
    path, assistant = helpers("gemma4-shared", True)
    folder = changed(assistant, tmp_path / "changed", **keys)
    with pytest.raises((ConfigError, ModelLoadError), match=error):
        assisted(path, folder)


def test_another_model_has_none(tiny: Callable[[str], Path], helpers: Any) -> None:
    _, assistant = helpers("gemma4-shared")
    with pytest.raises(ConfigError, match="for LlamaForCausalLM; leave it out"):
        assisted(tiny("llama"), assistant)
    with pytest.raises(ConfigError, match=r"Gemma4ForCausalLM has none.*assistant as draft_model"):
        small_engine(tiny("gemma4-shared"), speculative="mtp:2")
    with pytest.raises(ModelLoadError, match=r"an assistant.*draft_model"):
        small_engine(assistant)


@pytest.mark.parametrize("name", [ORDERING, CENTROIDS, "pre_projection.weight", "twice"])
def test_tensors_must_be_whole(helpers: Any, tmp_path: Path, name: str) -> None:
    path, assistant = helpers("gemma4-shared", True)
    folder = changed(assistant, tmp_path / "changed")
    tensors = load_file(folder / FILE)
    if name == "twice":
        tensors[ORDERING][0] = tensors[ORDERING][1]
    else:
        del tensors[name]
    save_file(tensors, folder / FILE, {"format": "pt"})
    wanted = ORDERING if name == "twice" else name
    with pytest.raises(ModelLoadError, match=wanted):
        assisted(path, folder)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"speculative": "resident:4"}, 'guesses with speculative="draft:K"'),
        ({"speculative": "ngram:4"}, "'ngram:4'; leave one of them out"),
        ({"tensor_parallel_size": 2}, "one process, and tensor_parallel_size is 2"),
        ({"draft_model": 7}, "draft_model must be"),
    ],
    ids=str,
)
def test_settings_must_agree(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        EngineConfig("m", **{"draft_model": "a"} | settings)
