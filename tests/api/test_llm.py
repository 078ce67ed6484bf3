"""What users call: prompt forms, errors, stops, Ctrl-C, closing. On a tiny checkpoint."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import reference, reference_greedy, reference_logits
from driver import device_lost
from tiny_model import EOS_IDS

from nanoengine import (
    LLM,
    ConfigError,
    InvalidParamsError,
    InvalidPromptError,
    PromptTooLongError,
    SamplingParams,
)
from nanoengine.devices.select import make_device
from nanoengine.errors import EngineClosedError, EngineError, OutOfMemoryError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SETTINGS: dict[str, Any] = {"dtype": "float32", "kvcache_block_size": 8, "num_gpu_blocks": 40}


@pytest.fixture(scope="module")
def llm(tiny: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(tiny("llama"), **SETTINGS) as engine:
        yield engine
        engine.llm_engine.kv.check()


def test_every_form_of_a_prompt_is_the_same_prompt(llm: LLM) -> None:
    text = "Hi there"
    ids = llm.tokenizer.encode(text)
    forms = [text, ids, {"prompt": text}, {"prompt_token_ids": ids}]
    one_by_one = [llm.generate(form, GREEDY, use_tqdm=False) for form in forms]
    assert all(len(outputs) == 1 for outputs in one_by_one)
    together = llm.generate(forms, GREEDY, use_tqdm=False)
    texts = {output.outputs[0].text for output in [*together, *(o[0] for o in one_by_one)]}
    assert len(texts) == 1
    assert together[0].prompt == text and together[1].prompt_token_ids == ids


def test_results_answer_as_vllm_and_as_nano_vllm(llm: LLM) -> None:
    output = llm.generate("abc", GREEDY, use_tqdm=False)[0]
    completion = output.outputs[0]
    assert output["text"] == completion.text and output["token_ids"] == completion.token_ids
    assert (completion.finish_reason, completion.stop_reason, output.finished) == (
        "length",
        None,
        True,
    )
    assert len(completion.token_ids) == 12 and output.metrics.ttft_s > 0
    with pytest.raises(KeyError, match="token_ids"):
        output["logprobs"]


def test_one_parameter_set_each(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5, 3)]
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 5, 3]
    with pytest.raises(InvalidParamsError, match="2 prompts, but 3"):
        llm.generate(["a", "b"], params, use_tqdm=False)


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        ([], None, ""),
        ([1, 999], InvalidPromptError, "999 is outside the vocabulary of 260"),
        ([-1], InvalidPromptError, "outside the vocabulary"),
        ({"text": "a"}, InvalidPromptError, "prompt_token_ids"),
        ({"prompt_token_ids": []}, InvalidPromptError, "empty"),
        ({"prompt_token_ids": "ab"}, InvalidPromptError, "must be a list of token ids"),
        ({"prompt_token_ids": [5], "prompt": 5}, InvalidPromptError, "and prompt their text"),
        ({"prompt_token_ids": [1.5]}, InvalidPromptError, "no token id"),
        (3, InvalidPromptError, "prompts must be"),
        ([5] * 400, PromptTooLongError, "400 tokens .* 320 .*enable_cpu_offload=True"),
    ],
)
def test_a_bad_prompt_raises_its_own_error(
    llm: LLM, prompt: Any, error: type[EngineError] | None, words: str
) -> None:
    if error is None:
        llm.generate(prompt, GREEDY, use_tqdm=False)
        return
    with pytest.raises(error, match=words):
        llm.generate(prompt, GREEDY, use_tqdm=False)


def test_an_empty_text_is_what_the_tokenizer_makes_of_it(
    llm: LLM, tiny: Callable[[str], Path]
) -> None:
    """The token before a text, as in transformers; without one there is nothing to go on from."""
    (output,) = llm.generate("", GREEDY, use_tqdm=False)
    bos = llm.get_tokenizer().bos_token_id
    assert output.prompt_token_ids == [bos]
    is_empty = pytest.raises(InvalidPromptError, match="the prompt is empty")
    with LLM(tiny("qwen2"), **SETTINGS) as adds_none, is_empty:
        adds_none.generate("", GREEDY, use_tqdm=False)


def test_in_a_list_a_bad_prompt_spoils_only_its_own_output(llm: LLM) -> None:
    prompts: list[Any] = ["good", (), [5] * 400, {"x": 1}, [999], "fine"]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    reasons = [o.outputs[0].finish_reason for o in outputs]
    assert reasons == ["length", "error", "error", "error", "error", "length"]
    assert isinstance(outputs[2].error, PromptTooLongError) and outputs[0].error is None
    assert outputs[5]["token_ids"] == llm.generate("fine", GREEDY, use_tqdm=False)[0]["token_ids"]


def test_too_long_says_which_limit_and_which_setting(tiny: Callable[[str], Path]) -> None:
    path = tiny("llama")
    cases = [
        ({"max_model_len": 20}, r"limit is 20 \(max_model_len\); raise max_model_len"),
        ({"num_gpu_blocks": 2}, r"16 \(what the KV cache holds\); the model itself has 512"),
        ({"num_gpu_blocks": 200}, r"512 \(the model's positions\)"),
    ]
    for settings, words in cases:
        with (
            LLM(path, **(SETTINGS | settings)) as llm,
            pytest.raises(PromptTooLongError, match=words),
        ):
            llm.generate([[5] * 600, "ok"], GREEDY, use_tqdm=False)[1]
            llm.generate([5] * 600, GREEDY, use_tqdm=False)


def test_what_does_not_fit_names_offload_and_its_gib(tiny: Callable[[str], Path]) -> None:
    """And with these settings it fits."""
    named = r"set enable_cpu_offload=True and kv_offload_gib=0.01: .* takes 0.01 GiB of RAM; or rai"
    for prompt, params in (([5] * 300, GREEDY), ([5] * 4, replace(GREEDY, max_tokens=300))):
        with LLM(tiny("llama"), **(SETTINGS | {"num_gpu_blocks": 2})) as llm:
            assert re.search(f"longer +for all 512 positions of the model: {named}", str(llm.plan))
            with pytest.raises(PromptTooLongError, match=named):
                llm.generate(prompt, params, use_tqdm=False)
    offload = SETTINGS | {"num_gpu_blocks": 2, "kv_offload_gib": 0.01}
    with LLM(tiny("llama"), **offload) as llm:
        assert "longer" not in str(llm.plan)
        llm.generate([5] * 300, GREEDY, use_tqdm=False)


def test_the_kv_cache_shows_its_arithmetic(tiny: Callable[[str], Path]) -> None:
    with (
        LLM(tiny("llama"), **(SETTINGS | {"num_gpu_blocks": 2})) as llm,
        pytest.raises(
            PromptTooLongError, match=r"4 tokens and may generate 13: 17 in all.* holds 16"
        ),
    ):
        llm.generate([5] * 4, SamplingParams(max_tokens=13), use_tqdm=False)


def test_one_of_a_thing_has_no_plural(tiny: Callable[[str], Path]) -> None:
    params = SamplingParams(max_tokens=13)
    with LLM(tiny("llama"), **(SETTINGS | {"num_gpu_blocks": 1})) as llm:
        assert "= 1 block x 8 tokens = 8 tokens at" in str(llm.plan)
        with pytest.warns(UserWarning, match="^1 of 1 request failed;"):
            (failed,) = llm.generate([[5]], params, use_tqdm=False)
    assert "has 1 token and may generate 13: 14 in all" in str(failed.error)
    assert "holds 8 (1 block x 8 tokens);" in str(failed.error)


def test_without_max_tokens_a_request_ends_at_the_limit(tiny: Callable[[str], Path]) -> None:
    with LLM(tiny("llama"), **(SETTINGS | {"num_gpu_blocks": 3})) as llm:
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        outputs = llm.generate([[3] * 5, [4] * 7], params, use_tqdm=False)
        assert [len(o["token_ids"]) for o in outputs] == [19, 17]
        assert {o.outputs[0].finish_reason for o in outputs} == {"length"}


def test_every_eos_of_the_generation_config_ends_the_text(
    llm: LLM, tiny: Callable[[str], Path]
) -> None:
    """Bans nothing: searches prompts whose greedy answer reaches each end token."""
    model = reference(tiny("llama"))
    seen = set()
    for first in range(4, 250):
        prompt = [first]
        chosen = int(reference_logits(model, prompt)[-1].argmax())
        if chosen in EOS_IDS and chosen not in seen:
            seen.add(chosen)
            output = llm.generate(
                prompt, SamplingParams(temperature=0, max_tokens=9), use_tqdm=False
            )
            completion = output[0].outputs[0]
            assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
            assert completion.token_ids == [chosen] and completion.text == ""
    sampled = SamplingParams(temperature=3.0, seed=5, max_tokens=None)
    outputs = llm.generate([[i] for i in range(4, 44)], sampled, use_tqdm=False)
    ended = {o["token_ids"][-1] for o in outputs if o.outputs[0].finish_reason == "stop"}
    assert ended | seen == set(EOS_IDS)


def test_stop_token_ids_and_stop_strings(llm: LLM, tiny: Callable[[str], Path]) -> None:
    prompt = llm.tokenizer.encode("What")
    expected = reference_greedy(reference(tiny("llama")), prompt, 12)
    stop_id = expected[6]
    first = expected.index(stop_id)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop_id])
    by_id = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    assert by_id.token_ids == expected[: first + 1]
    assert (by_id.finish_reason, by_id.stop_reason) == ("stop", stop_id)
    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop_id], min_tokens=9
    )
    assert len(llm.generate(prompt, params, use_tqdm=False)[0]["token_ids"]) > 9


def test_the_token_that_ends_a_text_has_no_stop_string(llm: LLM) -> None:
    """It is not part of the text, so that nothing of it shows; if it is to stay, it is searched."""
    free = SamplingParams(temperature=2.0, seed=3, max_tokens=200, ignore_eos=True)
    made = llm.generate("x", free, use_tqdm=False)[0].outputs[0]
    texts = [llm.tokenizer.decode([token_id]) for token_id in made.token_ids]
    at = next(
        i
        for i in range(5, 200)
        if "".join(texts[i - 1 : i + 1]).isascii()
        and all(texts[i - 1 : i + 1])
        and made.token_ids[i] not in made.token_ids[:i]
    )
    token_id, last = made.token_ids[at], texts[at]
    before = llm.tokenizer.decode(made.token_ids[:at])
    for stop in (last, before[-1] + last):
        asked = replace(free, stop_token_ids=[token_id], stop=[stop])
        found = llm.generate("x", asked, use_tqdm=False)[0].outputs[0]
        assert (found.text, found.stop_reason) == (before, token_id)
        asked = replace(asked, include_stop_str_in_output=True)
        found = llm.generate("x", asked, use_tqdm=False)[0].outputs[0]
        assert (found.text, found.stop_reason) == (before + last, stop)


def test_a_stop_string_across_tokens_cuts_the_text(llm: LLM) -> None:
    """Bytes are tokens here, so a two-letter stop always spans two of them."""
    free = SamplingParams(temperature=2.0, seed=3, max_tokens=200, ignore_eos=True)
    text = llm.generate("x", free, use_tqdm=False)[0]["text"]
    at = next(
        i
        for i in range(40, len(text))
        if text[i : i + 2].isascii() and text.find(text[i : i + 2]) == i
    )
    stop = text[at : at + 2]
    params = SamplingParams(
        temperature=2.0, seed=3, max_tokens=200, ignore_eos=True, stop=["never-there", stop]
    )
    output = llm.generate("x", params, use_tqdm=False)[0].outputs[0]
    assert output.text == text[:at]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_chat_equals_the_rendered_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    chat = llm.chat(messages, GREEDY, use_tqdm=False)[0]
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert chat.prompt == text
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    assert chat.prompt_token_ids == ids
    assert chat["token_ids"] == llm.generate(ids, GREEDY, use_tqdm=False)[0]["token_ids"]
    several = llm.chat([messages, [{"role": "user"}], messages], GREEDY, use_tqdm=False)
    assert [o.outputs[0].finish_reason for o in several] == ["length", "error", "length"]
    with pytest.raises(InvalidPromptError):
        llm.chat([{"role": "user"}], GREEDY, use_tqdm=False)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own SIGINT handler, also where the test run was started with SIGINT ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_frees_the_requests_and_leaves_the_engine_usable(llm: LLM) -> None:
    engine = llm.llm_engine
    before = llm.generate("again", GREEDY, use_tqdm=False)[0]["token_ids"]
    step, calls = engine.step, []

    def interrupting() -> Any:
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    engine.step = interrupting  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a" * 50, "b" * 60], GREEDY, use_tqdm=False)
    finally:
        engine.step = step  # type: ignore[method-assign]
    assert len(calls) == 3 and not engine.has_unfinished_requests
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    engine.kv.check()
    assert llm.generate("again", GREEDY, use_tqdm=False)[0]["token_ids"] == before


def test_a_failing_step_leaves_the_engine_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = llm.generate("still", GREEDY, use_tqdm=False)[0]["token_ids"]
    with monkeypatch.context() as patch:
        patch.setattr(llm.llm_engine.runner, "launch", device_lost)
        with pytest.raises(RuntimeError, match="device lost"):
            llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    llm.llm_engine.kv.check()
    assert not llm.llm_engine.has_unfinished_requests
    assert llm.generate("still", GREEDY, use_tqdm=False)[0]["token_ids"] == before


def test_generate_works_outside_the_main_thread(llm: LLM) -> None:
    results: list[Any] = []
    thread = threading.Thread(
        target=lambda: results.extend(llm.generate("thread", GREEDY, use_tqdm=False))
    )
    thread.start()
    thread.join(timeout=60)
    assert results[0]["token_ids"] == llm.generate("thread", GREEDY, use_tqdm=False)[0]["token_ids"]


def test_two_engines_and_closing(tiny: Callable[[str], Path]) -> None:
    with LLM(tiny("llama"), **SETTINGS) as a, LLM(tiny("qwen3"), **SETTINGS) as b:
        alone = b.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0]["token_ids"]
        a.generate("x", GREEDY, use_tqdm=False)
        a.close()
        assert b.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0]["token_ids"] == alone
        with pytest.raises(EngineClosedError, match="closed"):
            a.generate("x", GREEDY, use_tqdm=False)
        a.close()


def test_what_cannot_be_honoured_is_refused(tiny: Callable[[str], Path]) -> None:
    path = tiny("llama")
    with pytest.raises(ConfigError, match="512 positions"):
        LLM(path, max_model_len=1000)
    with pytest.raises(OutOfMemoryError, match=r"needs 38 KV blocks of 8 .* there are 4"):
        LLM(path, **(SETTINGS | {"max_model_len": 300, "num_gpu_blocks": 4}))
    with pytest.raises(OutOfMemoryError, match="kv_cache_gib"):
        LLM(path, kv_cache_gib=1e-6)
    with pytest.raises(ConfigError, match=r"no CUDA|device"):
        LLM(path, device="tpu")
    with pytest.raises(ConfigError, match="float16"):
        LLM(path, dtype="float16", device="cpu")


def test_the_plan_says_what_was_allocated(llm: LLM) -> None:
    plan = llm.plan
    kv = llm.llm_engine.kv
    assert plan.kv.block_bytes * plan.kv.num_blocks == sum(pool.nbytes for pool in kv.memory.pool)
    text = str(plan)
    for part in (
        "40 blocks x 8 tokens = 320 tokens",
        "float32 (as asked)",
        "one may have 320 tokens (what the KV cache holds)",
        "attention",
        "the same bits in any batch, in any chunks, on either tier",
    ):
        assert part in text


def test_dummy_weights_need_only_a_config(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny("qwen3") / "config.json").read_bytes())
    outputs = []
    for _ in range(2):
        with LLM(tmp_path, load_format="dummy", seed=3, **SETTINGS) as llm:
            outputs.append(llm.generate([1, 2, 3], GREEDY, use_tqdm=False)[0]["token_ids"])
            with pytest.raises(InvalidPromptError, match="tokenizer"):
                llm.generate("text", GREEDY, use_tqdm=False)
    assert outputs[0] == outputs[1] and len(outputs[0]) == 12


def test_a_load_format_that_is_not_the_model_s(tiny: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"'gguf', but .*llama.* is a folder; give the \.gguf"):
        LLM(tiny("llama"), load_format="gguf", **SETTINGS)
    with pytest.raises(ConfigError, match="'safetensors', but smollm2-135m is GGUF; give a folder"):
        LLM("smollm2-135m", load_format="safetensors", **SETTINGS)
    LLM(tiny("llama"), load_format="safetensors", **SETTINGS).close()


def test_the_number_of_threads(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As asked, else OMP_NUM_THREADS, as for every OpenMP program, else all cores."""
    as_set = (("1", 1), ("3", 3), (" 1 ", 1), ("1,2", 1), ("3 , 1", 3))
    for value, threads in (*as_set, ("0", 2), ("two", 2), ("", 2), (",1", 2)):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1}, raising=False)
        assert make_device("cpu", None).num_threads == threads == torch.get_num_threads()
        assert make_device("cpu", 2).num_threads == 2 == torch.get_num_threads()
