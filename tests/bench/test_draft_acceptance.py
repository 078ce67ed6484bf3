"""The acceptance of drafts, against drafts made one by one by transformers with a mask."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import reference, reference_greedy

from benchmarks import draft_acceptance
from benchmarks.cut_attention import (
    BLOCK,
    DEPTH,
    PER_LAYER,
    SELECTORS,
    CutDecoder,
    Sampling,
    Selector,
)
from benchmarks.draft_acceptance import (
    NGRAM,
    NGRAM_OR,
    Counts,
    acceptance,
    tokens_a_round,
)
from benchmarks.induction import write_checkpoint
from nanoengine.bench.niah import induction_samples
from nanoengine.config.engine import EngineConfig
from nanoengine.loading.loader import load_model
from nanoengine.models.layer_ops import TorchOps
from nanoengine.text.tokenizer import Tokenizer

Tiny = Callable[[str], Path]
RECENT, MASS, BOTH = SELECTORS
GREEDY = Sampling()
NUM_PROMPT = 6 * BLOCK + 5
NUM_TOKENS = 30


def cut_decoder(folder: Path, capacity: int = NUM_PROMPT + NUM_TOKENS) -> CutDecoder:
    loaded = load_model(
        folder, EngineConfig(str(folder)), torch.device("cpu"), torch.float32, TorchOps()
    )
    return CutDecoder(loaded.config, loaded.decoder, capacity, batch=8)


def prompt_of(seed: int) -> list[int]:
    return random.Random(seed).choices(range(10, 250), k=NUM_PROMPT)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_drafts_that_see_all_are_all_right(tiny: Tiny, name: str) -> None:
    model, prompt = cut_decoder(tiny(name)), prompt_of(0)
    starts = range(NUM_PROMPT, NUM_PROMPT + NUM_TOKENS - 5, 6)
    for sampling in (GREEDY, Sampling(temperature=2.0, banned=(7,))):
        found = model.reference(prompt, NUM_TOKENS, sampling)
        tokens = found.tokens.tolist()
        if sampling is GREEDY:
            assert tokens[NUM_PROMPT:] == reference_greedy(
                reference(tiny(name)), prompt, NUM_TOKENS, tokens[NUM_PROMPT:]
            )
        for selector in (RECENT, PER_LAYER):
            right = model.accepted(found, starts, selector, 1.0, sampling)
            # Behind the last start the reference has fewer than DEPTH tokens.
            assert right == [min(DEPTH, len(tokens) - 1 - start) for start in starts]


@torch.inference_mode()
def test_drafts_are_those_of_a_model_that_is_masked(tiny: Tiny) -> None:
    """Drafted one by one; the verified rows of the same pass see everything. Windows are whole."""
    folder, window = tiny("gemma3"), 13
    model, masked = cut_decoder(folder), reference(folder)
    found = model.reference(prompt_of(1), NUM_TOKENS, GREEDY)
    starts = range(NUM_PROMPT, NUM_PROMPT + NUM_TOKENS - DEPTH)
    expected = []
    for start in starts:
        right = 0
        while right < DEPTH:
            tokens = found.tokens[None, : start + right + 1]
            causal = torch.ones(tokens.shape[1], tokens.shape[1]).tril().bool()
            seen = {"full_attention": causal.clone(), "sliding_attention": causal.triu(1 - window)}
            # The first block and one more of six are kept.
            seen["full_attention"][start:, BLOCK : (start // BLOCK - 1) * BLOCK] = False
            masks = {
                kind: torch.where(rows, 0.0, -torch.inf)[None, None] for kind, rows in seen.items()
            }
            logits = masked(tokens, attention_mask=masks, use_cache=False).logits
            if logits[0, -1].argmax() != found.tokens[start + right + 1]:
                break
            right += 1
        expected.append(right)
    assert model.accepted(found, starts, RECENT, 2 / 6, GREEDY) == expected
    assert len({*expected}) > 2  # else nothing was tested


def test_a_needle_in_a_dropped_block_gives_other_tokens(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "induction")
    (sample,) = induction_samples(Tokenizer.from_folder(folder), 20 * BLOCK, 1, seed=0)
    model, start = cut_decoder(folder, 21 * BLOCK), len(sample.prompt_ids)
    found = model.reference(sample.prompt_ids, 9, GREEDY)
    assert found.tokens[start:].tolist() == [int(word[1:]) for word in sample.outputs[0].split()]
    needle = int(len(sample.prompt_ids) * 0.5) // BLOCK
    assert needle == 9  # the most recent are those from 10 on
    assert model.accepted(found, [start], RECENT, 0.5, GREEDY) == [0]
    for selector in (MASS, BOTH, PER_LAYER):
        assert model.accepted(found, [start], selector, 0.5, GREEDY) == [8]


def test_a_selector_keeps_sinks_recent_blocks_and_those_with_mass() -> None:
    mass = torch.tensor([[9.0, 0, 5, 0, 1, 0, 0, 0], [9.0, 0, 0, 7, 1, 0, 0, 0]])

    def kept(selector: Selector, num_kept: int) -> list[list[int]]:
        return selector.blocks(mass, num_kept).sort().values.tolist()

    assert kept(RECENT, 3) == [[0, 6, 7]]
    assert kept(MASS, 4) == [[0, 2, 3, 4]]
    assert kept(BOTH, 4) == [[0, 2, 3, 7]]
    assert kept(PER_LAYER, 3) == [[0, 2, 7], [0, 3, 7]]
    assert kept(BOTH, 1) == [[0]]
    assert mass[0, 0] == 9


def test_a_round_advances_by_the_right_drafts_and_one() -> None:
    whole = Counts(6, {NGRAM: [2, 0, 0, 0, 0, 0], "x": [3, 9, 9, 9, 1, 0]}, [True] + 5 * [False])
    assert tokens_a_round([whole], "x", 12) == 3  # 4 tokens, then 2
    assert tokens_a_round([whole], "x", 1) == 2
    assert tokens_a_round([whole], NGRAM, 12) == 6 / 4
    assert tokens_a_round([whole], NGRAM_OR + "x", 12) == 3  # 3 tokens, then all that are left
    longer = Counts(12, {"x": [12, 12, 12, 12]}, [])
    assert tokens_a_round([longer], "x", 12) == 12
    assert tokens_a_round([whole, longer], "x", 12) == 18 / 3


def test_acceptance_is_of_drafts_after_right_ones() -> None:
    counts = Counts(3, {"x": [1, 2, 1]}, [])
    # The last two starts end with the text: no further draft of theirs could be right.
    assert acceptance([counts], "x") == [1.0, 0.5, *10 * [None]]


@pytest.mark.breadth
def test_it_writes_a_file_and_prints_its_table(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "made" / "tiny.json"

    def run(*args: object) -> str:
        monkeypatch.setattr("sys.argv", ["draft_acceptance.py", *map(str, args)])
        draft_acceptance.main()
        return capsys.readouterr().out

    options = ("--context", 300, "--starts", 3, "--needles", 0, "--works", "chat")
    printed = run(tiny("llama"), *options, "--output", output)
    assert "drafts are right" not in printed  # said when a whole context gives other drafts
    work = json.loads(output.read_text())["works"]["chat"]
    assert work["starts"] == 3 and len(work["right"]["both 12%"][0]) == 3
    assert len(work["tokens_a_round"]) == 21
    rows = run("--table", output).splitlines()[2:]
    assert len(rows) == 1 and rows[0].count("|") == 12
