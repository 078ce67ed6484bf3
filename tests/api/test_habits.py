"""Habits that users bring from other engines, and that work here."""

from __future__ import annotations

import asyncio
import copy
import pickle
import shutil
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tqdm import tqdm

import nanoengine
from nanoengine import (
    LLM,
    AsyncLLM,
    ConfigError,
    EngineClosedError,
    EngineError,
    InvalidParamsError,
    InvalidPromptError,
    LogitsError,
    ModelNotFoundError,
    SamplingParams,
    StreamDelta,
)

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
FIELDS = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
SETTINGS: dict[str, Any] = {"dtype": "float32", "kvcache_block_size": 8, "num_gpu_blocks": 40}
TALK = [{"role": "user", "content": "hello"}]
TEXT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def llm(tiny: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(tiny("llama"), **SETTINGS) as engine:
        yield engine


def prompt_of(llm: LLM, messages: Any, **rest: Any) -> str | None:
    return llm.chat(messages, GREEDY, use_tqdm=False, **rest)[0].prompt


def test_parameters_may_be_a_dict(llm: LLM) -> None:
    wanted = llm.generate("a", GREEDY, use_tqdm=False)[0]["token_ids"]
    other = llm.generate("a", SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)[0]
    assert llm.generate("a", FIELDS, use_tqdm=False)[0]["token_ids"] == wanted
    shorter = {"temperature": 0, "max_tokens": 2}
    outputs = llm.generate(["a", "a", "a"], [FIELDS, GREEDY, shorter], use_tqdm=False)
    assert [o["token_ids"] for o in outputs] == [wanted, wanted, other["token_ids"]]
    assert llm.chat(TALK, FIELDS, use_tqdm=False) and "".join(llm.stream("a", FIELDS))
    for bad in ({"temperature": -1}, {5: 1}):
        with pytest.raises(InvalidParamsError):
            llm.generate("a", bad, use_tqdm=False)  # type: ignore[arg-type]


def test_a_content_may_have_text_parts(llm: LLM) -> None:
    parts = [{"type": "text", "text": "hello"}]
    assert prompt_of(llm, [{"role": "user", "content": parts}]) == TEXT
    two = [*parts, {"type": "text", "text": "there"}]
    assert prompt_of(llm, [{"role": "user", "content": two}]) == TEXT.replace(
        "hello", "hello\nthere"
    )
    for part in ({"type": "input_audio"}, {"type": "text"}, {"type": "text", "text": 5}, {}):
        with pytest.raises(InvalidPromptError, match=r"messages\[0\]\['content'\]\[1\] is .* text"):
            prompt_of(llm, [{"role": "user", "content": [*parts, part]}])


def test_a_chat_template_gives_text_or_ids(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(TALK, tokenize=True, add_generation_prompt=True)
    assert text == TEXT and ids == tokenizer.encode(TEXT, add_special_tokens=False)
    assert llm.generate(ids, GREEDY, use_tqdm=False)[0]["token_ids"]


def test_a_stream_takes_a_conversation(llm: LLM) -> None:
    wanted = llm.chat(TALK, GREEDY, use_tqdm=False)[0]["text"]
    assert "".join(llm.stream(TALK, GREEDY)) == wanted

    async def asked() -> str:
        async with AsyncLLM(str(llm.llm_engine.config.model), **SETTINGS) as asynchronous:
            return [output["text"] async for output in asynchronous.generate(TALK, FIELDS)][-1]

    assert asyncio.run(asked()) == wanted
    for prompts in ([*TALK, "a"], [{"prompt": "a"}]):
        with pytest.raises(InvalidPromptError, match="a stream takes one prompt"):
            llm.stream(prompts, GREEDY)  # type: ignore[arg-type]


def test_a_delta_is_its_text_and_more(llm: LLM) -> None:
    deltas = list(llm.stream("abc", GREEDY))
    whole = llm.generate("abc", GREEDY, use_tqdm=False)[0]
    assert "".join(deltas) == whole["text"] == "".join(delta.text for delta in deltas)
    assert [i for delta in deltas for i in delta.token_ids] == whole["token_ids"]
    assert deltas[-1].finish_reason == "length" and deltas[0].index == 0
    last = deltas[-1]
    for twin in (copy.copy(last), copy.deepcopy(last), pickle.loads(pickle.dumps(last))):
        assert twin == last and type(twin) is StreamDelta
        assert (twin.finish_reason, twin.token_ids) == ("length", last.token_ids)
    assert "finish_reason='length'" in repr(last) and type(str(last)) is str


def test_deltas_are_equal_if_all_fields_are() -> None:
    delta = StreamDelta(0, 0, "a", (5,))
    other = replace(delta, token_ids=(6,))
    assert delta != other and delta == replace(other, token_ids=(5,))
    assert (delta == other, delta != replace(delta)) == (False, False)
    assert delta == "a" and hash(delta) == hash("a") and f"{delta}!" == "a!"
    assert replace(other, text="b") == "b" and replace(other, text="")


def test_tools_reach_the_template(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("llama"), folder)
    template = "{% for t in tools %}{{ t.function.name }} {% endfor %}{{ messages[0].content }}"
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    tools = [{"type": "function", "function": {"name": "weather"}}]
    with LLM(folder, **SETTINGS) as llm:
        assert prompt_of(llm, TALK, tools=tools) == "weather hello"
        with llm.stream_chat(TALK, GREEDY, tools=tools) as stream:
            assert stream.request.prompt == "weather hello"
        with pytest.raises(InvalidParamsError, match="tools must be a list of dicts"):
            prompt_of(llm, TALK, tools=["weather"])


def test_a_role_that_the_template_names_is_no_surprise(
    tiny: Callable[[str], Path], llm: LLM
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prompt_of(llm, [{"role": role, "content": "a"} for role in ("system", "user", "tool")])
    with pytest.warns(UserWarning, match="'developer'") as warned:
        prompt_of(llm, [{"role": "developer", "content": "a"}] * 3)
    assert len(warned) == 1


def test_an_output_at_the_end_of_a_cell_is_short(llm: LLM) -> None:
    (output,) = llm.generate("a", GREEDY, use_tqdm=False)
    assert output.metrics is not None and "first_token_time" not in repr(output)
    assert "finish_reason='length'" in repr(output)


def test_failures_in_a_list_warn_once(llm: LLM) -> None:
    prompts: list[Any] = ["a", [999], ()]
    with pytest.warns(
        UserWarning, match=r"^2 of 3 .*outputs\[1\].error: .*999 is outside"
    ) as warned:
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert len(warned) == 1 and warned[0].filename == __file__
    with pytest.warns(UserWarning, match=r"outputs\[1\]"):
        llm.beam_search(prompts, beam_width=1, max_tokens=1, use_tqdm=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.generate(["a", "b"], GREEDY, use_tqdm=False)


def files_in(error: BaseException) -> list[str]:
    """The files of the traceback that Python prints, from the outermost on."""
    shown = "".join(traceback.format_exception(error))
    return [line.split('"')[1] for line in shown.splitlines() if line.startswith("  File ")]


MISTAKES: dict[str, tuple[Callable[[LLM], object], type[EngineError]]] = {
    "setting": (lambda llm: LLM("x", sed=1), ConfigError),
    "model": (lambda llm: LLM("./none"), ModelNotFoundError),
    "async": (lambda llm: AsyncLLM("./none"), ModelNotFoundError),
    "prompt": (lambda llm: llm.generate([999]), InvalidPromptError),
    "chat": (lambda llm: llm.chat([{"role": "user"}]), InvalidPromptError),
    "stream": (lambda llm: llm.stream([999]), InvalidPromptError),
    "encode": (lambda llm: llm.tokenizer.encode("\ud800"), InvalidPromptError),
    "decode": (lambda llm: llm.tokenizer.decode([-1]), InvalidPromptError),
    "template": (
        lambda llm: llm.tokenizer.apply_chat_template(TALK, return_dict=True),
        InvalidParamsError,
    ),
    "other engines": (lambda llm: LLM.from_engine_args({"modle": "x"}), ConfigError),
    "async, other engines": (lambda llm: AsyncLLM.from_engine_args({"modle": "x"}), ConfigError),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_traceback_ends_at_the_user_s_line(
    llm: LLM, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake, kind = MISTAKES[name]
    for is_whole in (False, True):
        if is_whole:
            monkeypatch.setenv("NANOENGINE_TRACEBACK", "1")
        with pytest.raises(kind) as caught:
            mistake(llm)
        ours = [file for file in files_in(caught.value) if file != __file__]
        assert len(ours) >= 2 if is_whole else len(ours) == 1


@pytest.fixture(scope="module")
def damaged(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose logits after token 77 are no numbers."""
    folder = tmp_path_factory.mktemp("damaged") / "model"
    shutil.copytree(tiny("llama"), folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][77] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_traceback_of_a_delta_ends_at_the_user_s_line(damaged: Path) -> None:
    with LLM(damaged, **SETTINGS) as broken:
        stream = broken.stream([77], GREEDY)
        with pytest.raises(LogitsError) as caught:
            next(stream)
        assert len([file for file in files_in(caught.value) if file != __file__]) == 1
        left = broken.stream([5], GREEDY)
    for mistake in (lambda: next(left), lambda: broken.generate("a")):
        with pytest.raises(EngineClosedError) as closed:
            mistake()
        assert len([file for file in files_in(closed.value) if file != __file__]) == 1


@pytest.mark.parametrize(("prompt", "kind"), [(999, InvalidPromptError), (77, LogitsError)])
def test_a_traceback_ends_at_the_line_that_awaits(
    damaged: Path, prompt: int, kind: type[EngineError]
) -> None:
    async def asked() -> None:
        async with AsyncLLM(damaged, **SETTINGS) as asynchronous:
            async for _ in asynchronous.generate([prompt]):
                pass

    with pytest.raises(kind) as caught:
        asyncio.run(asked())
    package = str(Path(nanoengine.__file__).parent)
    assert len([file for file in files_in(caught.value) if file.startswith(package)]) == 1


@pytest.mark.parametrize("make", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_engine_is_not_pickled(llm: LLM, make: Callable[[Any], Any]) -> None:
    """Its pools of KV have the size of free memory: a pickle of them ended the process."""
    with pytest.raises(TypeError, match="make it in the process that uses it"):
        make(llm)


def test_none_for_an_argument_of_vllm_asks_for_nothing(llm: LLM) -> None:
    wanted = llm.generate("a", GREEDY, use_tqdm=False)[0]["token_ids"]
    nothing: dict[str, Any] = {"lora_request": None, "priority": None}
    params = SamplingParams(**FIELDS, guided_decoding=None)  # type: ignore[call-arg]
    assert llm.generate("a", params, use_tqdm=False, **nothing)[0]["token_ids"] == wanted
    for other in ({"lora_request": 1}, {"lora_reqest": None}):
        with pytest.raises(InvalidParamsError, match="unknown argument"):
            llm.generate("a", GREEDY, **other)


def test_the_bar_may_be_ones_own(llm: LLM) -> None:
    """As for vLLM, use_tqdm may be what makes the bar."""
    made = []

    def bar(**given: Any) -> Any:
        made.append(tqdm(**given, disable=True))
        return made[-1]

    outputs = llm.generate(["a", "b"], GREEDY, use_tqdm=bar)
    outputs += llm.chat(TALK, GREEDY, use_tqdm=bar)
    llm.beam_search("a", beam_width=2, max_tokens=2, use_tqdm=bar)
    assert len(made) == 3 and all(completion.finished() for completion in outputs[0].outputs)


def test_parameters_are_changed_in_a_copy(llm: LLM) -> None:
    """Examples of vLLM change those that they were given."""
    params = llm.get_default_sampling_params()
    with pytest.raises(FrozenInstanceError, match=r"dataclasses\.replace\(params, max_tokens=5\)"):
        params.max_tokens = 5  # type: ignore[misc]
    assert replace(params, max_tokens=5).max_tokens == 5
