"""docs/nano.py, the engine in 300 lines: its tokens are the engine's, and it stays what it says."""

from __future__ import annotations

import ast
import importlib.util
import json
import random
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from driver import GREEDY, STREAMED, Driver, expected, host_gib, small_engine, token_ids
from tiny_model import EOS_IDS
from tokenizers import Tokenizer

from nanoengine import SamplingParams
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.loading.find_model import resolve_model

NANO = Path(__file__).parents[2] / "docs" / "nano.py"
TEXTS = (NANO.parents[1] / "tests" / "data" / "alice.txt", NANO.parents[1] / "LICENSE")
BLOCK = 8
IMPORTS = {"__future__", "collections", "dataclasses", "json", "pathlib", "sys"}
IMPORTS |= {"safetensors", "tokenizers", "torch"}
Tiny = Callable[[str], Path]

pytestmark = pytest.mark.usefixtures("threads_as_before")


def load_nano() -> ModuleType:
    spec = importlib.util.spec_from_file_location("nano", NANO)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["nano"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


nano = load_nano()


class CountingKV(nano.KVCache):
    """Knows what moved: blocks stored, and for each step the host slots that it streamed."""

    def __init__(self, *sizes: Any) -> None:
        super().__init__(*sizes)
        self.num_stores = self.num_fills = 0
        self.streamed: list[list[int]] = []

    def store(self, block: Any) -> None:
        self.num_stores += 1
        super().store(block)

    def stream(self, slots: list[int]) -> Iterator[Any]:
        self.streamed.append(slots)
        for fill in super().stream(slots):
            self.num_fills += 1
            yield fill


def make_nano(folder: Path, device: int, host: int = 120, size: int = BLOCK, **more: Any) -> Any:
    model = nano.Llama(folder)
    made = nano.Engine(model, CountingKV(model, device, host, size, 2), **more)
    model.eos_ids = set()
    return made


def generated(requests: list[Any], prompts: list[list[int]]) -> list[list[int]]:
    assert [r.tokens[: len(p)] for r, p in zip(requests, prompts, strict=True)] == prompts
    return [r.tokens[len(p) :] for r, p in zip(requests, prompts, strict=True)]


def assert_all_free(kv: Any) -> None:
    """Cached blocks are nobody's; once they are forgotten, all slots are free once, and NaN."""
    for key, block in list(kv.published.items()):
        assert block.ref_count == 0 and block.key == key
        kv.free_slot(kv.published.pop(key))
    for tier, pool in kv.pools.items():
        assert sorted(kv.free_slots[tier]) == list(range(pool.shape[1]))
        assert pool.isnan().all()


def some_ids(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


# The last one is there twice: both compute the same blocks at once.
PROMPTS = [some_ids(seed, length) for seed, length in enumerate((3, 130, 41, 200, 41))]
PROMPTS[4] = PROMPTS[2]


@pytest.fixture(scope="module")
def engines_tokens(tiny: Tiny) -> list[list[int]]:
    """The engine's answers to PROMPTS, streamed through its own ring of 2."""
    engine = small_engine(tiny("llama"), **STREAMED, ring_slots=2)
    tokens = token_ids(Driver(engine).run(PROMPTS, GREEDY))
    assert engine.kv.counters.h2d_bytes and engine.kv.peak_streamed > 1
    engine.close()
    return tokens


@pytest.mark.some(1)
@pytest.mark.parametrize("device", [1, 2, 5, 64])
def test_five_prompts_at_once_give_the_engines_tokens(
    tiny: Tiny, engines_tokens: list[list[int]], device: int
) -> None:
    """Of 64 device blocks all that is needed stays there; 5 make room for a block of each."""
    made = make_nano(tiny("llama"), device, max_num_batched_tokens=32)
    batches = []
    run = made.run
    made.run = lambda batch: batches.append([r.end - r.num_computed for r in batch]) or run(batch)
    tokens = generated(made.generate(PROMPTS, GREEDY.max_tokens), PROMPTS)
    assert tokens == engines_tokens
    is_streamed = device < 64
    assert (made.kv.num_stores > 0) == (made.kv.num_fills > 0) == is_streamed
    assert max(map(len, batches)) == min(device, 5)
    assert max(map(sum, batches)) <= 32
    if device > 1:
        assert any(1 in batch and max(batch) > 1 for batch in batches), "no chunk beside a decode"
    assert sum(not ring_slot.isnan().all() for ring_slot in made.kv.ring) <= 1  # the last one
    assert not made.running and not made.waiting
    assert_all_free(made.kv)


def test_streamed_and_resident_logits_are_bitwise_equal(tiny: Tiny) -> None:
    """With the same chunks: both schedule as for 3 device blocks, one of them has 64."""
    rows: list[list[torch.Tensor]] = []
    for device in (3, 64):
        made = make_nano(tiny("llama"), device)
        made.kv.num_device = made.max_num_seqs = 3
        rows.append([])

        def linear(name: str, x: torch.Tensor, made: Any = made) -> torch.Tensor:
            out = nano.Llama.linear(made.model, name, x)
            if name == "lm_head":
                rows[-1].append(out)
            return out

        made.model.linear = linear
        made.generate(PROMPTS, 16)
        assert (made.kv.num_fills > 0) == (device == 3)
    assert len(rows[0]) == len(rows[1])
    assert all(map(torch.equal, *rows))


@pytest.mark.parametrize("name", ["llama-tied", "llama-bias", "llama-sharded"])
def test_other_llamas(tiny: Tiny, name: str) -> None:
    made = make_nano(tiny(name), device=2)
    (tokens,) = generated(made.generate([PROMPTS[2]], 12), [PROMPTS[2]])
    assert tokens == expected(tiny(name), PROMPTS[2], 12)


@pytest.mark.parametrize("is_old", [False, True])
def test_theta_in_both_spellings(tiny: Tiny, tmp_path: Path, is_old: bool) -> None:
    spelled = {"rope_theta": 500.0, "rope_scaling": None}
    if not is_old:
        spelled = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    folder = with_rope(tiny("llama"), tmp_path / "theta", spelled)
    (tokens,) = generated(make_nano(folder, device=2).generate([PROMPTS[2]], 12), [PROMPTS[2]])
    assert tokens == expected(folder, PROMPTS[2], 12)
    assert tokens != expected(tiny("llama"), PROMPTS[2], 12)


def with_rope(source: Path, folder: Path, spelled: dict[str, Any]) -> Path:
    """A copy of a checkpoint with these keys in config.json."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config | spelled))
    return folder


def test_prefix_hits(tiny: Tiny) -> None:
    """Two requests find on the host what one before them computed, and stream it once for both."""
    shared = some_ids(10, 9 * BLOCK)
    prompts = [shared + some_ids(11, 5), shared + some_ids(12, 20), [*shared[: 3 * BLOCK], 7]]
    prompts.append(some_ids(13, BLOCK) + shared[:20])  # known blocks, after another one: no hit
    made, engine = make_nano(tiny("llama"), device=3), small_engine(tiny("llama"), **STREAMED)
    driver = Driver(engine)
    first = generated(made.generate([shared], 4), [shared])
    assert first == token_ids(
        driver.run([shared], SamplingParams(0, max_tokens=4, ignore_eos=True))
    )
    steps_before = len(made.kv.streamed)
    requests, outputs = made.generate(prompts, 16), driver.run(prompts, GREEDY)
    assert generated(requests, prompts) == token_ids(outputs)
    assert [r.num_cached for r in requests] == [9 * BLOCK, 9 * BLOCK, 3 * BLOCK, 0]
    assert [r.num_cached for r in requests] == [o.num_cached_tokens for o in outputs]
    both = made.kv.streamed[steps_before]
    assert len(both) >= 7 and len(set(both)) == len(both)
    # Of a whole prompt that is cached the last token is computed again, with its block.
    (again,) = made.generate([shared], 4)
    assert again.num_cached == 8 * BLOCK and again.tokens[len(shared) :] == first[0]
    assert_all_free(made.kv)
    engine.close()


def test_a_prefix_is_forgotten_last(tiny: Tiny) -> None:
    """Ten blocks are cached of twelve; the next request needs four, so two of them go."""
    made, prompt = make_nano(tiny("llama"), device=3, host=9), some_ids(30, 10 * BLOCK)
    made.generate([prompt], 1)
    made.generate([some_ids(31, 4 * BLOCK - 1)], 1)
    assert made.generate([prompt], 1)[0].num_cached == 8 * BLOCK
    assert_all_free(made.kv)


@pytest.mark.breadth
@pytest.mark.parametrize("seed", range(4))
def test_what_is_cached_makes_room(tiny: Tiny, seed: int) -> None:
    """Both tiers are as small as the longest request allows, round after round; hits go on."""
    rng = random.Random(seed)
    made = make_nano(tiny("llama"), device=rng.choice((1, 3, 4)), host=8, max_num_batched_tokens=16)
    stems, hits, evicted = [some_ids(i, 3 * BLOCK) for i in range(3)], 0, 0
    for _ in range(4):
        prompts = [rng.choice(stems) + some_ids(rng.random(), rng.randrange(1, 24)) for _ in "abc"]
        known = set(made.kv.published)
        requests = made.generate(prompts, 8)
        hits += sum(r.num_cached for r in requests)
        evicted += len(known - set(made.kv.published))
        for request, prompt in zip(requests, prompts, strict=True):
            assert request.tokens[len(prompt) :] == expected(tiny("llama"), prompt, 8)
    assert hits and evicted
    assert_all_free(made.kv)


def test_a_read_of_a_block_that_nobody_owns_shows(tiny: Tiny) -> None:
    made = make_nano(tiny("llama"), device=4)
    run, steps = made.run, []

    def free_too_early(batch: list[Any]) -> list[int]:
        steps.append(batch)
        if len(steps) == 4:
            made.kv.free_slot(batch[0].block_table[1])
        return run(batch)

    made.run = free_too_early
    with pytest.raises(AssertionError, match="nobody had written"):
        made.generate([PROMPTS[2]], 8)
    assert len(steps) == 4


def test_the_end_of_sequence_ends_a_request(tiny: Tiny, engines_tokens: list[list[int]]) -> None:
    """The others of its batch go on."""
    assert nano.Llama(tiny("llama")).eos_ids == set(EOS_IDS)
    made = make_nano(tiny("llama"), device=5)
    eos = engines_tokens[1][7]
    made.model.eos_ids = {eos}
    tokens = generated(made.generate(PROMPTS, GREEDY.max_tokens), PROMPTS)
    ends = [ids.index(eos) + 1 if eos in ids else len(ids) for ids in engines_tokens]
    assert tokens == [ids[:end] for ids, end in zip(engines_tokens, ends, strict=True)]
    assert len(set(ends)) > 1
    assert_all_free(made.kv)


def test_what_does_not_fit_is_refused(tiny: Tiny) -> None:
    made = make_nano(tiny("llama"), device=2, host=4)
    most = 6 * BLOCK - 5
    assert len(made.generate([some_ids(1, most)], 5)[0].tokens) == 6 * BLOCK
    for prompts in ([[]], [some_ids(1, 3), some_ids(1, most + 1)]):
        with pytest.raises(ValueError, match=f"may have {most}"):
            made.generate(prompts, 5)
    assert not made.waiting
    with pytest.raises(ValueError, match="may have 508"):
        make_nano(tiny("llama"), device=2).generate([some_ids(1, 509)], 4)


@pytest.mark.parametrize("name", ["llama-rope-llama3", "llama-rope-linear", "mistral-window"])
def test_other_models_are_refused(tiny: Tiny, name: str) -> None:
    with pytest.raises(ValueError, match="no Llama with plain rotary"):
        nano.Llama(tiny(name))


def test_a_rope_that_an_old_folder_spells_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    spelled = {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    with pytest.raises(ValueError, match="no Llama with plain rotary"):
        nano.Llama(with_rope(tiny("llama"), tmp_path / "old", spelled))


def test_the_command_line(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, texts = tiny("llama"), ["The sea is", "def add(a, b):" * 12]
    engine = small_engine(folder)
    outputs = Driver(engine).run(texts, SamplingParams(temperature=0, max_tokens=64))
    engine.close()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    whole = [tokenizer.decode(o.prompt_token_ids + o.outputs[0].token_ids) for o in outputs]
    monkeypatch.setattr(sys, "argv", [str(NANO), str(folder), *texts])
    runpy.run_path(str(NANO), run_name="__main__")
    assert capsys.readouterr().out == "".join(f"{text}\n\n" for text in whole)


def test_the_file_is_what_it_says() -> None:
    """300 lines of 100 characters, functions of 50, and nothing of nanoengine in it."""
    source = NANO.read_text(encoding="utf-8")
    lines = source.splitlines()
    assert len(lines) <= 300 and max(map(len, lines)) <= 100
    modules: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add((node.module or ".").split(".")[0] if not node.level else ".")
        elif isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 50, node.name
    assert modules <= IMPORTS
    assert "__import__" not in source and "importlib" not in source


@pytest.mark.slow
def test_smollm2_streams_and_gives_the_engines_tokens() -> None:
    """fp32, five prompts at once, one of 4096 tokens; 6 device blocks of 256 and rings of 2."""
    folder = resolve_model("smollm2-135m")
    encode = Tokenizer.from_file(str(folder / "tokenizer.json")).encode
    story, law = (encode(path.read_text(encoding="utf-8")).ids for path in TEXTS)
    texts = ("The capital of France is", "def fibonacci(n):\n    ", "1, 2, 3, 5, 8, 13,")
    # The long one goes on as it began: what comes next is in blocks that lie on the host.
    prompts = [*(encode(text).ids for text in texts), (story + law + story)[:4096], law[:700]]
    assert [len(prompt) for prompt in prompts[3:]] == [4096, 700]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    engine = LLMEngine(
        folder,
        dtype="float32",
        device="cpu",
        num_gpu_blocks=6,
        kvcache_block_size=256,
        enable_cpu_offload=True,
        offload_mode="stream",
        kv_offload_gib=host_gib(folder, 30, 256),
        ring_slots=2,
        slot_tokens=256,
        stream_mib_per_step=1e6,
    )
    theirs = token_ids(Driver(engine).run(prompts, params))
    assert engine.kv.counters.h2d_bytes
    engine.close()
    made = make_nano(folder, device=6, host=30, size=256, max_num_batched_tokens=512)
    ours = generated(made.generate(prompts, 32), prompts)
    assert ours == theirs
    assert max(map(len, made.kv.streamed)) >= 12
    assert_all_free(made.kv)
