"""What requests may ask of sampling, on whole engines: penalties, bans, biases and
log-probabilities, against transformers' logits and processors.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import reference, reference_logits
from driver import STREAMED, answer, small_engine
from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor

from nanoengine import LLM, SamplingParams
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.errors import InvalidParamsError
from nanoengine.outputs import TokenLogprobs

VOCAB = 256
SETTINGS: dict[str, dict[str, Any]] = {
    "resident": {},
    "chunked": {"max_num_batched_tokens": 13, "max_num_seqs": 8},
    "preempted": {"num_gpu_blocks": 13, "decode_reserve_blocks": 0},
    "run_ahead": {"runs_ahead": True},
    "streamed": STREAMED,
}
ASKED = {
    "repetition": {"repetition_penalty": 1.4},
    "repetition below one": {"repetition_penalty": 0.7},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8, "presence_penalty": -0.3},
    "bias": {"logit_bias": {7: 6.0, 9: -4.0, 30: 5.5}, "repetition_penalty": 1.2},
    "allowed": {"allowed_token_ids": [3, 50, 51, 52, 99, 200], "frequency_penalty": 2.0},
    "both, and a bad word": {"bad_words": ["a"], "presence_penalty": 0.5},
}


def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


def expected_ids(
    engine: LLMEngine, path: Path, prompt: list[int], params: SamplingParams
) -> list[int]:
    """Greedy decoding by transformers' logits; its processors where it has them, plain arithmetic
    where it has none.
    """
    model, tokens = reference(path), list(prompt)
    words = [engine.inputs.tokenizer.encode(word)[1:] for word in params.forbidden_words]
    words += [engine.inputs.tokenizer.encode(" " + word)[1:] for word in params.forbidden_words]
    for _ in range(params.max_tokens or 0):
        row = reference_logits(model, tokens)[-1:].clone()
        output = torch.tensor([tokens[len(prompt) :]], dtype=torch.int64)
        if params.allowed_token_ids is not None:
            outside = set(range(row.shape[1])) - set(params.allowed_token_ids)
            row[0, sorted(outside)] = -torch.inf
        if words:
            row = NoBadWordsLogitsProcessor(words)(output, row)
        for token_id, bias in params.biases:
            row[0, token_id] += bias
        if params.repetition_penalty != 1:
            penalize = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
            row = penalize(torch.tensor([tokens]), row)
        for token_id in set(output[0].tolist()):
            count = output[0].tolist().count(token_id)
            row[0, token_id] -= params.frequency_penalty * count + params.presence_penalty
        tokens.append(int(row.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.some(2)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_adjusted_logits_choose_what_transformers_would(
    tiny: Callable[[str], Path], settings: dict[str, Any]
) -> None:
    """All kinds in one batch with a plain request, so that rows cannot leak into one another."""
    path = tiny("llama")
    each = [
        SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, **asked)
        for asked in [*ASKED.values(), {}]
    ]
    prompts = prompts_of((5, 9, 1, 12, 8, 17, 3, 10))
    engine = small_engine(path, **settings)
    outputs = answer(engine, prompts, each)
    for prompt, params, output in zip(prompts, each, outputs, strict=True):
        assert output.outputs[0].token_ids == expected_ids(engine, path, prompt, params)
    plain = expected_ids(engine, path, prompts[0], SamplingParams(temperature=0, max_tokens=14))
    assert outputs[0].outputs[0].token_ids != plain  # the penalty did something
    engine.close()


def test_bad_words_do_not_come(tiny: Callable[[str], Path]) -> None:
    """Words that would have come: one token, two, and the same after a space."""
    path = tiny("llama")
    engine = small_engine(path)
    plain = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    prompts = prompts_of((4,) * 12)
    outputs = answer(engine, prompts, [SamplingParams(**plain)] * len(prompts))
    num_banned = [0, 0]
    for prompt, output in zip(prompts, outputs, strict=True):
        texts = [engine.inputs.tokenizer.decode([i]) for i in output.outputs[0].token_ids]
        for length in (1, 2):
            starts = range(len(texts) - length + 1)
            words = ["".join(texts[at : at + length]) for at in starts]
            words = [word for word in words if word.isascii() and word.isalnum()][:1]
            params = SamplingParams(**plain, bad_words=words)
            found = answer(engine, [prompt], [params])[0].outputs[0]
            assert found.token_ids == expected_ids(engine, path, prompt, params)
            assert not any(word in found.text for word in words)
            num_banned[length - 1] += len(words)
    assert min(num_banned) > 0
    engine.close()


@pytest.mark.parametrize(
    ("words", "wished", "expected"),
    [
        (["\n"], "\n ", "    "),
        ([" \n"], "\n ", "    "),
        ([" "], " \n", "\n\n\n\n"),
        (["a\n"], "\na", "\n\n\n\n"),
        (["a\n"], "a\n", "aaaa"),
        ([" a"], "a\n", "\n\n\n\n"),
    ],
)
def test_whitespace_is_banned_as_it_is_written(
    tiny: Callable[[str], Path], words: list[str], wished: str, expected: str
) -> None:
    """The first character that is wished for is the likeliest, unless it is banned."""
    engine = small_engine(tiny("llama"))
    encode = engine.inputs.tokenizer.encode
    (first,), (second,) = (encode(char, add_special_tokens=False) for char in wished)
    asked = {"temperature": 0, "max_tokens": 4, "logit_bias": {first: 100, second: 70}}
    (output,) = answer(engine, [[5, 6]], [SamplingParams(**asked, bad_words=words)])
    assert output.outputs[0].text == expected
    engine.close()


def test_a_penalized_request_follows_its_distribution(tiny: Callable[[str], Path]) -> None:
    """The first sampled token of many seeds, against the softmax of independently biased logits."""
    path, num = tiny("llama"), 1500
    prompt = prompts_of((6,))[0]
    asked = {"repetition_penalty": 1.5, "logit_bias": {40: 4.0}, "allowed_token_ids": [*prompt, 40]}
    each = [SamplingParams(max_tokens=1, seed=seed, **asked) for seed in range(num)]
    engine = small_engine(path)
    tokens = [o.outputs[0].token_ids[0] for o in answer(engine, [prompt] * num, each)]
    row = reference_logits(reference(path), prompt)[-1:].clone()
    row[0, 40] += 4.0
    row = RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([prompt]), row)[0]
    kept = sorted({*prompt, 40})
    for token_id, wanted in zip(kept, row[kept].softmax(0).tolist(), strict=True):
        seen = tokens.count(token_id) / num
        assert abs(seen - wanted) < 5 * (wanted * (1 - wanted) / num) ** 0.5 + 1e-6
    assert set(tokens) <= set(kept)
    engine.close()


def check_logprobs(
    found: list[TokenLogprobs], logits: torch.Tensor, ids: list[int], num_likeliest: int
) -> None:
    """logits [n, vocab]: each of the rows that `ids` were chosen from."""
    assert len(found) == len(ids)
    for entry, row, token_id in zip(found, logits.log_softmax(-1), ids, strict=True):
        best = row.topk(num_likeliest).indices.tolist()
        assert set(entry) == {*best, token_id}
        assert next(iter(entry)) == token_id  # as in vLLM
        for i, each in entry.items():
            assert abs(each.logprob - float(row[i])) < 1e-3
            assert each.rank == 1 + int((row > row[i]).sum())
            assert each.decoded_token is not None


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_logprobs_are_those_of_transformers(
    tiny: Callable[[str], Path], settings: dict[str, Any]
) -> None:
    """Of output and prompt, raw although the choice was penalised, twice over a warm cache."""
    path = tiny("llama")
    model = reference(path)
    prompts = prompts_of((2, 9, 30, 17, 1, 24))
    each = [
        SamplingParams(
            max_tokens=9,
            ignore_eos=True,
            logprobs=(3, 0, None, 5, 1, 2)[i],
            prompt_logprobs=(4, None, 2, 0, 1, 3)[i],
            seed=i,
            repetition_penalty=1.3 if i == 0 else 1.0,
        )
        for i in range(len(prompts))
    ]
    engine = small_engine(path, **settings)
    for _ in range(2):
        for prompt, params, output in zip(
            prompts, each, answer(engine, prompts, each), strict=True
        ):
            ids, made = output.outputs[0].token_ids, output.outputs[0]
            logits = reference_logits(model, prompt + ids)
            if params.logprobs is None:
                assert made.logprobs is None and made.cumulative_logprob is None
            else:
                check_logprobs(made.logprobs, logits[len(prompt) - 1 : -1], ids, params.logprobs)
                chosen = [entry[i].logprob for entry, i in zip(made.logprobs, ids, strict=True)]
                assert made.cumulative_logprob == pytest.approx(sum(chosen))
            if params.prompt_logprobs is None:
                assert output.prompt_logprobs is None
            else:
                first, *others = output.prompt_logprobs
                assert first is None
                check_logprobs(
                    others, logits[: len(prompt) - 1], prompt[1:], params.prompt_logprobs
                )
    engine.close()


@pytest.fixture(scope="module")
def llm(tiny: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(tiny("llama"), dtype="float32", device="cpu", num_gpu_blocks=8) as made:
        yield made


def test_without_detokenizing_there_is_no_text(llm: LLM) -> None:
    params = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
    with_text = llm.generate("some", SamplingParams(**params), use_tqdm=False)[0]
    without = llm.generate("some", SamplingParams(**params, detokenize=False), use_tqdm=False)[0]
    assert with_text["text"] and without["text"] == ""
    assert with_text["token_ids"] == without["token_ids"]


def test_a_stop_stays_in_the_text_if_asked(llm: LLM) -> None:
    params = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    whole = llm.generate("some", SamplingParams(**params), use_tqdm=False)[0]
    text, ids = whole["text"], whole["token_ids"]
    stop = text[3:5]
    kept = SamplingParams(**params, stop=stop, include_stop_str_in_output=True)
    cut = text[: text.index(stop)]
    assert llm.generate("some", kept, use_tqdm=False)[0]["text"] == cut + stop
    gone = SamplingParams(**params, stop=stop)
    assert llm.generate("some", gone, use_tqdm=False)[0]["text"] == cut
    by_id = SamplingParams(**params, stop_token_ids=[ids[2]], include_stop_str_in_output=True)
    output = llm.generate("some", by_id, use_tqdm=False)[0]
    assert output["text"] == llm.tokenizer.decode(ids[: ids.index(ids[2]) + 1])


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"repetition_penalty": 0}, "between 0.01 and 100; 1 is off, got 0"),
        ({"repetition_penalty": float("nan")}, "finite"),
        ({"presence_penalty": 2.5}, "between -2 and 2, got 2.5"),
        ({"frequency_penalty": "1"}, "finite number"),
        ({"logit_bias": {5: 101}}, "logit_bias of token 5 must be between -100 and 100"),
        ({"logit_bias": {"a": 1}}, "dict from token ids"),
        ({"logit_bias": 3}, "dict from token ids"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": []}, "no token could be chosen"),
        ({"bad_words": [""]}, "bad_words must be a non-empty string"),
        ({"logprobs": 21}, "logprobs must be between 0 and 20, got 21"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be between"),
        ({"detokenize": 1}, "detokenize must be True or False"),
        ({"detokenize": False, "stop": "x"}, "set detokenize=True"),
    ],
)
def test_a_value_out_of_range_is_named(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidParamsError, match=words):
        SamplingParams(**asked)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"logit_bias": {900: 1.0}}, "logit_bias: token id 900 is outside the vocabulary of 260"),
        ({"allowed_token_ids": [1, 900]}, "allowed_token_ids: token id 900"),
        ({"stop_token_ids": [260]}, "stop_token_ids: token id 260"),
        (
            {"allowed_token_ids": [1], "min_tokens": 2},
            r"up to min_tokens=2, stop tokens may forbid all of allowed_token_ids \[1\]: no token",
        ),
        (
            {"stop_token_ids": [*range(260)], "min_tokens": 3},
            r"up to min_tokens=3, stop tokens may forbid all of the 260 tokens: no token",
        ),
    ],
)
def test_a_choice_of_nothing_or_of_no_token_is_refused(
    llm: LLM, asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidParamsError, match=words):
        llm.generate("a", SamplingParams(**asked), use_tqdm=False)


def test_bad_words_forbid_no_token_where_others_cannot_come(llm: LLM) -> None:
    """Of "ab", with "b" alone allowed, the first letter never comes."""
    b = llm.tokenizer.encode("b", add_special_tokens=False)
    params = SamplingParams(max_tokens=2, allowed_token_ids=b, bad_words=["ab"], ignore_eos=True)
    assert llm.generate("a", params, use_tqdm=False)[0]["text"] == "bb"


def test_others_go_on_beside_one_whose_stop_tokens_are_the_vocabulary(llm: LLM) -> None:
    """The last token may be chosen, or without min_tokens any."""
    few: dict[str, Any] = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}
    all_but_one = SamplingParams(**few, stop_token_ids=[*range(259)], min_tokens=2)
    all_of_them = SamplingParams(**few, stop_token_ids=[*range(260)])
    params = [replace(all_of_them, min_tokens=2), all_but_one, all_of_them]
    with pytest.warns(UserWarning, match="1 of 3 requests failed"):
        failed, one, none = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert isinstance(failed.error, InvalidParamsError)
    assert one.outputs[0].token_ids[:2] == [259, 259]
    assert len(none.outputs[0].token_ids) == 1 and none.outputs[0].finish_reason == "stop"


def test_a_preempted_prompt_is_scored_once(tiny: Callable[[str], Path]) -> None:
    """Its KV is taken after its prompt was scored in part, and computed again."""
    path = tiny("llama")
    engine = small_engine(path, max_num_batched_tokens=16, max_num_seqs=2)
    prompt = prompts_of((40,))[0]
    engine.add_request(prompt, SamplingParams(max_tokens=2, prompt_logprobs=1, temperature=0))
    for _ in range(2):
        engine.step()
    seq = engine.scheduler.running[0]
    assert len(seq.output.prompt_scores) == 32
    engine.scheduler.preempt(seq)
    while engine.kv._reclaim(besides=-1):
        pass
    (output,) = [o for _ in range(4) for o in engine.step()]
    logits = reference_logits(reference(path), prompt)[:-1]
    check_logprobs(output.prompt_logprobs[1:], logits, prompt[1:], 1)
    engine.close()


def test_scored_prompts_do_not_wait_for_one_another(tiny: Callable[[str], Path]) -> None:
    """They take nothing from the prefix cache, so there is nothing to wait for."""
    engine = small_engine(tiny("llama"))
    prompt = prompts_of((24,))[0]
    for _ in range(3):
        params = SamplingParams(max_tokens=4, prompt_logprobs=0, ignore_eos=True)
        engine.add_request(prompt, params)
    engine.step()
    assert len(engine.scheduler.running) == 3
    engine.close()
