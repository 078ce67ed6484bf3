"""Beam search against transformers' own: the same ids, order and scores, wherever the KV is."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_reference, reference, reference_greedy
from driver import assert_all_free, fail_copies
from tiny_model import EOS_IDS
from tiny_models import TINY

from nanoengine import (
    LLM,
    BeamSearchOutput,
    BeamSearchParams,
    InvalidParamsError,
    InvalidPromptError,
    SamplingParams,
)
from nanoengine.engine.speculative import PromptLookup
from nanoengine.errors import EngineError, TransferError

BLOCK = 8
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "kvcache_block_size": BLOCK,
    "num_gpu_blocks": 80,
    "num_threads": 1,
}
OFFLOAD: dict[str, Any] = {
    "num_gpu_blocks": 6,
    "enable_cpu_offload": True,
    "kv_offload_gib": 0.01,
    "slot_tokens": BLOCK,
    "stream_mib_per_step": 1000.0,
    "debug_kv": True,
}
PLACES: dict[str, dict[str, Any]] = {
    "resident": {"debug_kv": True},
    "no prefix cache": {"enable_prefix_caching": False, "debug_kv": True},
    "chunked": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    "three at a time": {"max_num_seqs": 3},
    "one at a time": {"max_num_seqs": 1},
    "short of blocks": {"num_gpu_blocks": 8, "max_model_len": 64, "decode_reserve_blocks": 0},
    "short of blocks, no cache": {
        "num_gpu_blocks": 8,
        "max_model_len": 64,
        "enable_prefix_caching": False,
    },
    "guessing": {"speculative": "ngram:3"},
    "run ahead": {},
    "streamed": OFFLOAD | {"offload_mode": "stream"},
    "streamed, late": OFFLOAD | {"offload_mode": "stream", "debug_copy_delay_ms": 0.3},
    "in place": OFFLOAD | {"offload_mode": "in_place"},
}
PROMPTS = [[(i * 37 + length) % 256 for i in range(length)] for length in (5, 16, 43)]
# Without a push the tiny models hardly ever write an end; with more, no text gets long.
EOS_BIAS = 1.5


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that likes to end a text, by either of its end tokens."""
    folder = tmp_path_factory.mktemp("ending")
    TINY["llama"](folder)
    model = load_reference(folder)
    with torch.no_grad():
        head = model.lm_head.weight
        mean = head.mean(dim=0)
        for token_id in EOS_IDS:
            head[token_id] = head[token_id] * EOS_BIAS + mean
    model.save_pretrained(folder)
    return folder


def references(
    path: Path, prompt: Sequence[int], width: int, num_tokens: int, **settings: Any
) -> list[tuple[list[int], float]]:
    """transformers' sequences, less padding after their end, and their scores."""
    model = reference(path)
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=num_tokens,
            return_dict_in_generate=True,
            output_scores=True,
            pad_token_id=99_999,
            **settings,
        )
    rows = made.sequences[:, len(prompt) :].tolist()
    scores = made.sequences_scores.tolist()
    return [
        ([i for i in row if i != 99_999], score) for row, score in zip(rows, scores, strict=True)
    ]


def check(output: BeamSearchOutput, expected: list[tuple[list[int], float]]) -> None:
    assert output.error is None
    assert [found.token_ids for found in output.sequences] == [ids for ids, _ in expected]
    scores = [found.score for found in output.sequences]
    assert scores == pytest.approx([score for _, score in expected], abs=1e-4)


@pytest.fixture(scope="module")
def llm(ending: Path) -> Iterator[LLM]:
    with LLM(ending, **SETTINGS) as made:
        yield made


@pytest.mark.some(4)
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -0.5, 2.0])
def test_it_finds_what_transformers_finds(
    llm: LLM, ending: Path, length_penalty: float, early_stopping: bool | str
) -> None:
    settings = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    params = BeamSearchParams(4, 12, length_penalty, early_stopping)
    found = llm.beam_search(PROMPTS, params, use_tqdm=False)
    for prompt, output in zip(PROMPTS, found, strict=True):
        check(output, references(ending, prompt, 4, 12, **settings))
    assert_all_free(llm.llm_engine)


def test_never_goes_on_for_long_texts(llm: LLM, ending: Path) -> None:
    """With "never", a beam may yet win by its length; without, it is judged by its present one."""
    prompts = [[(i * 37 + length) % 256 for i in range(length)] for length in (3, 7, 10)]
    settings = {"beam_width": 2, "max_tokens": 20, "length_penalty": 2.0, "use_tqdm": False}
    found = llm.beam_search(prompts, early_stopping="never", **settings)
    for prompt, output in zip(prompts, found, strict=True):
        expected = references(ending, prompt, 2, 20, length_penalty=2.0, early_stopping="never")
        check(output, expected)
    assert found != llm.beam_search(prompts, **settings)


def test_texts_end_in_both_ways(llm: LLM) -> None:
    """What the comparisons above rest on; and what a sequence says of itself."""
    found = [
        sequence
        for output in llm.beam_search(PROMPTS, beam_width=4, max_tokens=12, use_tqdm=False)
        for sequence in output.sequences
    ]
    assert {sequence.token_ids[-1] for sequence in found} >= set(EOS_IDS)
    assert {sequence.finish_reason for sequence in found} == {"stop", "length"}
    for sequence in found:
        is_stopped = sequence.finish_reason == "stop"
        assert is_stopped == (sequence.token_ids[-1] in EOS_IDS)
        shown = sequence.token_ids[:-1] if is_stopped else sequence.token_ids
        assert sequence.text == llm.tokenizer.decode(shown)
        assert sequence.score == pytest.approx(
            sequence.cumulative_logprob / len(sequence.token_ids)
        )


@pytest.mark.some(3)
@pytest.mark.parametrize("settings", PLACES.values(), ids=PLACES)
def test_wherever_the_kv_is(
    ending: Path,
    settings: dict[str, Any],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def guess_right(_: object, ids: list[int], most: int) -> tuple[int, ...]:
        return tuple(reference_greedy(reference(ending), ids, most))

    monkeypatch.setattr(PromptLookup, "guess", guess_right)
    with LLM(ending, **(SETTINGS | settings)) as llm:
        engine = llm.llm_engine
        engine.runs_ahead = "run ahead" in request.node.name
        found = llm.beam_search(PROMPTS, beam_width=5, max_tokens=20, use_tqdm=False)
        for prompt, output in zip(PROMPTS, found, strict=True):
            check(output, references(ending, prompt, 5, 20))
        assert_all_free(engine)
        assert not engine.outputs.unfinished(range(100)) and not engine.has_unfinished_requests


def test_past_the_ends_of_sequence(llm: LLM, ending: Path) -> None:
    prompt = PROMPTS[0]
    (found,) = llm.beam_search(prompt, beam_width=3, max_tokens=10, ignore_eos=True, use_tqdm=False)
    check(found, references(ending, prompt, 3, 10, eos_token_id=99_998))
    assert {sequence.finish_reason for sequence in found.sequences} == {"length"}


def test_the_widest_and_the_narrowest(llm: LLM, ending: Path) -> None:
    """One beam is greedy decoding; 260 tokens with two ends are enough for 86 beams."""
    for width in (1, 86):
        (found,) = llm.beam_search(PROMPTS[1], beam_width=width, max_tokens=4, use_tqdm=False)
        if width > 1:
            check(found, references(ending, PROMPTS[1], width, 4))
        else:
            params = SamplingParams(temperature=0, max_tokens=4)
            greedy = llm.generate(PROMPTS[1], params, use_tqdm=False)[0]["token_ids"]
            assert [s.token_ids for s in found.sequences] == [greedy]
    with pytest.raises(InvalidParamsError, match=r"beam_width 87 ranks 261 .* lower it to 86"):
        llm.beam_search(PROMPTS[1], beam_width=87, max_tokens=4)


def test_beams_share_the_prompt_and_compute_a_token_each(
    ending: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without a prefix cache, after the first step every live beam is one token of work."""
    with LLM(ending, **(SETTINGS | {"enable_prefix_caching": False})) as llm:
        schedule, sizes = llm.llm_engine.scheduler.schedule, []

        def counted() -> Any:
            batch = schedule()
            sizes.append([item.num_tokens for item in batch.items])
            return batch

        monkeypatch.setattr(llm.llm_engine.scheduler, "schedule", counted)
        llm.beam_search(PROMPTS[2], beam_width=4, max_tokens=6, ignore_eos=True, use_tqdm=False)
    assert sizes == [[len(PROMPTS[2])]] + [[1] * 4] * 5


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_beside_an_open_stream(
    llm: LLM, ending: Path, runs_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.llm_engine, "runs_ahead", runs_ahead)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    alone = llm.generate(PROMPTS[0], params, use_tqdm=False)[0]["token_ids"]
    stream = llm.stream(PROMPTS[0], params)
    ids = [*next(stream).token_ids]
    (found,) = llm.beam_search(PROMPTS[1], beam_width=4, max_tokens=8, use_tqdm=False)
    check(found, references(ending, PROMPTS[1], 4, 8))
    ids += [token_id for delta in stream for token_id in delta.token_ids]
    assert ids == alone
    assert_all_free(llm.llm_engine)


def test_a_bad_prompt_spoils_only_its_own_output(llm: LLM, ending: Path) -> None:
    good, bad, text = llm.beam_search(
        [PROMPTS[0], [999], "Hi"], beam_width=2, max_tokens=4, use_tqdm=False
    )
    check(good, references(ending, PROMPTS[0], 2, 4))
    assert isinstance(bad.error, InvalidPromptError)
    assert not bad.sequences and bad.prompt_token_ids == [999]
    assert text.prompt == "Hi"
    check(text, references(ending, llm.tokenizer.encode("Hi"), 2, 4))
    with pytest.raises(InvalidPromptError, match="999"):
        llm.beam_search([999], beam_width=2, max_tokens=4)
    assert llm.beam_search([], beam_width=2, max_tokens=4, use_tqdm=False) == []
    assert_all_free(llm.llm_engine)


def test_lost_kv_ends_one_search(ending: Path) -> None:
    """A copy that fails: the search over that prompt has an error, the others are answered."""
    settings = OFFLOAD | {"offload_mode": "stream", "num_gpu_blocks": 3}
    with LLM(ending, **(SETTINGS | settings)) as llm:
        fail_copies(llm.llm_engine.device.h2d, {3})
        found = llm.beam_search(PROMPTS, beam_width=3, max_tokens=12, use_tqdm=False)
        failed = [isinstance(output.error, TransferError) for output in found]
        assert 1 <= sum(failed) < len(found)
        for prompt, output in zip(PROMPTS, found, strict=True):
            if output.error is None:
                check(output, references(ending, prompt, 3, 12))
            else:
                assert output.sequences == []
        assert not llm.llm_engine.kv.tables and not llm.llm_engine.has_unfinished_requests


def test_ctrl_c_frees_all_beams(llm: LLM) -> None:
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    step, calls = llm.llm_engine.step, []

    def interrupting() -> Any:
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    llm.llm_engine.step = interrupting  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.beam_search(PROMPTS, beam_width=4, max_tokens=30, use_tqdm=False)
    finally:
        llm.llm_engine.step = step  # type: ignore[method-assign]
        signal.signal(signal.SIGINT, previous)
    assert len(calls) == 3 and not llm.llm_engine.has_unfinished_requests
    assert_all_free(llm.llm_engine)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"beam_width": 0, "max_tokens": 4}, "beam_width must be between 1 and 128"),
        ({"beam_width": 129, "max_tokens": 4}, "beam_width must be between 1 and 128"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens must be between"),
        ({"beam_width": 2}, "max_tokens"),
        ({"beam_width": 2, "max_tokens": 4, "length_penalty": float("nan")}, "length_penalty"),
        ({"beam_width": 2, "max_tokens": 4, "early_stopping": "always"}, "\"never\", got 'always'"),
        ({"beam_width": 2, "max_tokens": 4, "ignore_eos": 1}, "ignore_eos must be True or False"),
        ({"beam_width": 2, "max_tokens": 4, "num_beams": 2}, "num_beams"),
        ({"beam_width": 2, "max_tokens": 4, "temperature": 0.5}, "draws no tokens"),
        (
            {"beam_width": 2, "max_tokens": 4, "structured_outputs": {"regex": "a"}},
            "takes no constraints",
        ),
        ({"params": BeamSearchParams(2, 4), "beam_width": 2}, "not both"),
        ({"params": SamplingParams()}, "expected BeamSearchParams, got SamplingParams"),
    ],
)
def test_bad_parameters_are_refused(llm: LLM, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidParamsError, match=words):
        llm.beam_search("Hi", **settings)


def test_parameters_of_vllm_that_change_nothing_may_be_there() -> None:
    plain = BeamSearchParams(beam_width=2, max_tokens=4)
    names = {"temperature": 0.0, "include_stop_str_in_output": False, "structured_outputs": None}
    assert BeamSearchParams(beam_width=2, max_tokens=4, **names) == plain  # type: ignore[arg-type]


def test_a_closed_engine_refuses(ending: Path) -> None:
    llm = LLM(ending, **SETTINGS)
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        llm.beam_search("Hi", beam_width=2, max_tokens=4)
