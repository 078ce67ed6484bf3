"""Guesses by a draft model with KV of its own: they are what that model would say, and change the
number of steps and nothing else.
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
from driver import Driver, small_engine
from fixed_drafts import scored
from guess_cases import DEBUG, PARAMS, PROMPTS, everything, in_two_tiers, layouts, plain, run
from marks import named, needs_compiler

from nanoengine import SamplingParams
from nanoengine.config.engine import GIB, EngineConfig, make_config
from nanoengine.engine.draft_length import PayingDrafts
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.errors import ConfigError
from nanoengine.loading.model_config import read_model_config
from nanoengine.sequence import ScheduledBatch
from nanoengine.startup.forecast import Forecaster, Hardware, read_guesser

MOST = 3
CHUNKS = {"max_num_batched_tokens": 12, "max_num_seqs": 3}
LAYOUTS = layouts(12)
# The model, and the one that guesses: other heads, a larger and a smaller vocabulary, windows.
PAIRS = [("llama", "qwen3"), ("qwen3", "llama"), ("gemma3", "llama"), ("llama", "gemma3")]
Tiny = Callable[[str], Path]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every decode checks as many guesses as it may, whether they pay or not."""
    monkeypatch.setattr(PayingDrafts, "_number", lambda self: len(self._num_right))


def helped(path: Path, draft: Path, **settings: Any) -> LLMEngine:
    settings = {"speculative": f"draft:{MOST}"} | settings
    return small_engine(path, draft_model=str(draft), **settings)


def copy_of(path: Path, target: Path) -> Path:
    """The same model in another folder."""
    return Path(shutil.copytree(path, target))


@pytest.mark.some(2)
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("name", "draft"), PAIRS)
@pytest.mark.parametrize("chunks", [{}, CHUNKS], ids=["whole", "chunks"])
def test_it_guesses_what_it_would_say(
    tiny: Tiny, name: str, draft: str, chunks: dict[str, Any]
) -> None:
    """Of every guess, with right and wrong ones before it."""
    engine, alone = helped(tiny(name), tiny(draft), **chunks), small_engine(tiny(draft))
    num_tokens, vocab_size = (read_model_config(tiny(n)).vocab_size for n in (name, draft))
    known: dict[str, Any] = {
        "ignore_eos": True,
        "allowed_token_ids": [*range(min(num_tokens, vocab_size))],
    }
    postprocess, checked = engine.scheduler.postprocess, []

    def watched(batch: ScheduledBatch, *rest: Any) -> Any:
        for item in batch.items:
            ids = [min(token, vocab_size - 1) for token in item.seq.token_ids[: item.start + 1]]
            if item.seq.request.params.temperature or not item.guesses:
                continue
            params = SamplingParams(max_tokens=len(item.guesses), temperature=0, **known)
            (said,) = Driver(alone).run([ids], params)
            assert tuple(said.outputs[0].token_ids) == item.guesses
            checked.append(len(ids))
        return postprocess(batch, *rest)

    engine.scheduler.postprocess = watched
    run(engine)
    assert len(checked) > 10 and min(checked) < 12 and max(checked) > 70
    engine.close(), alone.close()


@pytest.mark.some(2)
@needs_compiler
@pytest.mark.parametrize("chunks", [{}, CHUNKS], ids=["whole", "chunks"])
@pytest.mark.parametrize("layout", named(LAYOUTS, *LAYOUTS))
@pytest.mark.parametrize(
    ("name", "draft"), [PAIRS[0], *(pytest.param(*p, marks=pytest.mark.breadth) for p in PAIRS[1:])]
)
def test_no_bit_depends_on_it(
    tiny: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    draft: str,
    layout: dict[str, Any],
    chunks: dict[str, Any],
) -> None:
    """Ids and log probabilities, and a second time with prefix hits. What it reads is there."""
    settings = layout | chunks | DEBUG
    expected = plain(tiny(name), **settings)
    numbers = cycle([MOST, MOST, 1, 2, 0])
    monkeypatch.setattr(PayingDrafts, "_number", lambda self: next(numbers))
    engine = helped(tiny(name), tiny(draft), **settings)
    for _ in range(2):
        outputs = run(engine)
        for (ids, logprobs), (right, as_before) in zip(scored(outputs), expected, strict=True):
            assert ids == right and torch.equal(logprobs, as_before), "it depends on the guesses"
        assert sum(output.metrics.num_guessed for output in outputs) > 10
    engine.close()


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("layout", named(LAYOUTS, *LAYOUTS))
def test_a_twin_is_always_right(tiny: Tiny, tmp_path: Path, layout: dict[str, Any]) -> None:
    """Of greedy and of sampled texts, and after prefix hits: its KV is there, as computed. Where
    some of it is on the host it reads the rest, and is right less often.
    """
    twin, is_whole = copy_of(tiny("llama"), tmp_path / "twin"), "enable_cpu_offload" not in layout
    steps = Driver(small_engine(tiny("llama"), **layout))
    steps.run(PROMPTS, PARAMS)
    engine = helped(tiny("llama"), twin, **layout)
    driver = Driver(engine)
    for _ in range(2):
        before = driver.num_steps
        counts = [each.metrics for each in driver.run(PROMPTS, PARAMS)]
        accepted, guessed = sum(m.num_accepted for m in counts), sum(m.num_guessed for m in counts)
        assert accepted > 20 and (not is_whole or accepted == guessed)
        assert driver.num_steps - before < (0.6 if is_whole else 0.9) * steps.num_steps
    engine.close(), steps.engine.close()


@needs_compiler
@pytest.mark.usefixtures("always", "our_products")
@pytest.mark.parametrize(
    "settings", [{"dtype": "bfloat16"}, {"quantization": "int8"}], ids=["bfloat16", "int8"]
)
def test_nor_in_other_numbers(tiny: Tiny, settings: dict[str, Any]) -> None:
    """The weights of the draft model stay numbers."""
    expected = plain(tiny("llama"), **settings)
    engine = helped(tiny("llama"), tiny("qwen3"), **settings)
    for (ids, logprobs), (right, as_before) in zip(scored(run(engine)), expected, strict=True):
        assert ids == right and torch.equal(logprobs, as_before)
    engine.close()


@needs_compiler
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("speculative", "settings"),
    [("draft:3", {}), ("ngram:4+draft:2", in_two_tiers(12) | DEBUG)],
    ids=["resident", "lookup first, streamed"],
)
def test_whatever_a_request_asks_for(
    tiny: Tiny, tmp_path: Path, speculative: str, settings: dict[str, Any]
) -> None:
    """Penalties, forms, completions, scores: all as without guesses, of which many are right."""
    twin = copy_of(tiny("llama"), tmp_path / "twin")
    prompts = [PROMPTS[i % 3][i:] for i in range(7)]
    found = []
    for asked in ("off", speculative):
        engine = helped(tiny("llama"), twin, speculative=asked, **settings)
        outputs = Driver(engine).run(prompts, everything())
        found.append([(o.prompt_logprobs, o.outputs) for o in outputs])
        accepted = sum(output.metrics.num_accepted for output in outputs)
        engine.close()
    assert found[0] == found[1] and accepted > 10


@needs_compiler
def test_it_follows_steps_that_are_begun_ahead(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guesses after these are as good."""
    expected = plain(tiny("llama"))
    due = cycle([False] * 5 + [True] * 4)
    monkeypatch.setattr(PayingDrafts, "choose", lambda self: 2)
    monkeypatch.setattr(PayingDrafts, "is_due", property(lambda self: next(due)))
    twin = copy_of(tiny("llama"), tmp_path / "twin")
    engine = helped(tiny("llama"), twin, speculative="draft:2", runs_ahead=True)
    outputs = run(engine)
    for (ids, logprobs), (right, as_before) in zip(scored(outputs), expected, strict=True):
        assert ids == right and torch.equal(logprobs, as_before)
    counts = [(each.metrics.num_accepted, each.metrics.num_guessed) for each in outputs]
    assert all(accepted == guessed > 0 for accepted, guessed in counts)
    engine.close()


def test_guesses_are_made_where_they_pay(tiny: Tiny, tmp_path: Path) -> None:
    """Nothing is decided for the engine here: it times its steps itself."""
    twin = copy_of(tiny("llama"), tmp_path / "twin")
    engine = small_engine(tiny("llama"), draft_model=twin, speculative=None)
    (output,) = Driver(engine).run(PROMPTS[:1], PARAMS[0])
    assert engine.config.speculative == "draft:4"
    assert f"up to 4 by {twin}, where they pay" in engine.plan.guesses
    assert 2 < output.metrics.num_accepted == output.metrics.num_guessed
    engine.close()


def test_memory_is_planned_for_it(tiny: Tiny) -> None:
    """Its weights, and its KV in the blocks of the model. A plan without weights says the same."""
    path, draft = tiny("llama"), tiny("gemma3")
    plans = []
    for settings in ({"speculative": "off"}, {"draft_model": str(draft), "speculative": "draft:1"}):
        engine = small_engine(path, **settings)
        plans.append(engine.plan)
        engine.close()
    alone = small_engine(draft)
    off, on = plans
    assert on.weight_bytes - off.weight_bytes == alone.plan.weight_bytes
    assert on.kv.block_bytes - off.kv.block_bytes == alone.plan.kv.block_bytes
    assert on.kv.windows[-alone.plan.kv.num_layers :] == alone.plan.kv.windows
    assert not on.kv.window and not any(on.kv.windows[: off.kv.num_layers])
    alone.close()
    config = make_config(path, {"dtype": "float32", "draft_model": draft, "speculative": "draft:1"})
    model, hardware = read_model_config(path), Hardware(0, 4 * GIB, 50.0, 10.0)
    made = Forecaster(config, model, hardware, guesser=read_guesser(config, model)).forecast(100)
    assert made.plan.weight_bytes == on.weight_bytes == made.weights[0]
    assert made.plan.kv.heads == on.kv.heads


# -- what is refused


def test_another_vocabulary_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    folder = copy_of(tiny("qwen3"), tmp_path / "changed")
    content = json.loads((folder / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.__getitem__)[40:42]
    vocab["another token"] = len(vocab)  # padding of the other model
    (folder / "tokenizer.json").write_text(json.dumps(content))
    helped(tiny("llama"), folder).close()
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(
        ConfigError, match=r"token \d+ is '.*' there and '.*' here.*of the same family"
    ):
        helped(tiny("llama"), folder)


@pytest.mark.parametrize(
    ("name", "draft", "error"),
    [
        ("llama", "qwen3.5", r"draft_model .*\(Qwen3_5ForCausalLM\) has recurrent layers"),
        ("qwen3.5", "llama", r"the model \(Qwen3_5ForCausalLM\) has recurrent layers.*ngram:4"),
        ("llama", "deepseek-v2", "has latent attention"),
        ("llama", "gemma4-shared", "has inputs of each layer"),
    ],
)
def test_pairs_that_share_no_blocks_are_refused(
    tiny: Tiny, name: str, draft: str, error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        helped(tiny(name), tiny(draft))


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"speculative": "draft:4"}, "name it as draft_model, a smaller one of the same family"),
        ({"draft_model": "a", "speculative": "resident:4"}, 'with speculative="draft:K"'),
        ({"draft_model": "a", "tensor_parallel_size": 2}, "one process"),
        ({"speculative": "draft:65", "draft_model": "a"}, '"draft:K"'),
    ],
    ids=str,
)
def test_settings_must_agree(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        EngineConfig("m", **settings)
