"""Chats against transformers' own rendering: variables of the template, and special tokens that are
there once.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_model import BOS_ID
from transformers import AutoTokenizer

from nanoengine import LLM, AsyncLLM, InvalidParamsError, SamplingParams
from nanoengine.errors import ConfigError, InvalidPromptError, ModelLoadError
from nanoengine.text.tokenizer_files import chat_template_of

GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "kvcache_block_size": 8,
    "num_gpu_blocks": 40,
    "num_threads": 1,
}
# As Qwen3's: thinking is on unless the variable is there and false.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
TALK = [{"role": "user", "content": "hello"}]
OTHER = [*TALK, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "x"}]
OPEN: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
VARIABLES: list[dict[str, Any] | None] = [
    None,
    {},
    {"enable_thinking": False},
    {"enable_thinking": True},
    {"enable_thinking": False, "tools": [{"name": "f"}]},
    {"add_generation_prompt": False},
]


@pytest.fixture(scope="module")
def folder(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer adds a beginning-of-sequence token, and whose template writes one."""
    made = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(tiny("llama"), made)
    (made / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **SETTINGS) as made:
        yield made


def expected_ids(folder: Path, talk: list[dict[str, str]], kwargs: dict[str, Any]) -> list[int]:
    """transformers' ids of a conversation."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    made = tokenizer.apply_chat_template(talk, **{"add_generation_prompt": True, **kwargs})
    return list(made["input_ids"])


@pytest.mark.parametrize("kwargs", VARIABLES)
def test_template_variables(llm: LLM, folder: Path, kwargs: dict[str, Any] | None) -> None:
    expected = [expected_ids(folder, talk, kwargs or {}) for talk in (TALK, OTHER)]
    found = llm.chat([TALK, OTHER], GREEDY, use_tqdm=False, chat_template_kwargs=kwargs)
    assert [output.prompt_token_ids for output in found] == expected
    with llm.stream_chat(TALK, GREEDY, chat_template_kwargs=kwargs) as stream:
        assert stream.request.prompt_token_ids == expected[0]


@pytest.mark.parametrize("said", ["", "ho", "ho <think>\n", " ho "])
def test_an_answer_goes_on_with_the_last_message(llm: LLM, folder: Path, said: Any) -> None:
    talk = [*TALK, {"role": "assistant", "content": said}]
    expected = expected_ids(folder, talk, OPEN)
    (found,) = llm.chat(talk, GREEDY, use_tqdm=False, **OPEN)
    (plain,) = llm.generate(expected, GREEDY, use_tqdm=False)
    assert found.prompt_token_ids == expected and found.outputs[0].text == plain.outputs[0].text
    with llm.stream_chat(talk, GREEDY, **OPEN) as stream:
        assert stream.request.prompt_token_ids == expected


def test_the_last_message_goes_on_in_the_engine_thread(folder: Path) -> None:
    talk = [*TALK, {"role": "assistant", "content": "ho"}]

    async def asked() -> list[list[int]]:
        async with AsyncLLM(folder, **SETTINGS) as llm:
            outputs = [output async for output in llm.chat(talk, GREEDY, **OPEN)]
            stream = await llm.stream_chat(talk, GREEDY, **OPEN)
            async for _ in stream:
                pass
            assert stream.output is not None
            return [outputs[-1].prompt_token_ids, stream.output.prompt_token_ids]

    assert asyncio.run(asked()) == [expected_ids(folder, talk, OPEN)] * 2


def test_an_answer_begins_or_goes_on(llm: LLM) -> None:
    for talk in (TALK, OTHER):
        with pytest.raises(InvalidParamsError, match="add_generation_prompt that is false"):
            llm.chat(talk, GREEDY, use_tqdm=False, continue_final_message=True)
    call = {"role": "assistant", "tool_calls": [{"id": "a"}]}
    with pytest.raises(InvalidPromptError, match="needs a text in the last message, got"):
        llm.chat([*TALK, call], GREEDY, use_tqdm=False, **OPEN)
    thinks = {"role": "assistant", "content": "<think>ho"}
    with pytest.raises(InvalidPromptError, match="ends within its thoughts, which"):
        llm.chat([*TALK, thinks], GREEDY, use_tqdm=False, **OPEN)
    thought = {"role": "assistant", "content": "<think>ho</think>"}
    assert llm.chat([*TALK, thought], GREEDY, use_tqdm=False, **OPEN)
    kwargs = {"continue_final_message": True}
    with pytest.raises(InvalidParamsError, match="may not hold 'continue_final_message'"):
        llm.chat(OTHER, GREEDY, use_tqdm=False, chat_template_kwargs=kwargs)


def test_template_variables_reach_the_engine_thread(folder: Path) -> None:
    kwargs = {"enable_thinking": False}

    async def asked() -> list[int]:
        async with AsyncLLM(folder, **SETTINGS) as llm:
            outputs = llm.chat(TALK, GREEDY, chat_template_kwargs=kwargs)
            return [output.prompt_token_ids async for output in outputs][-1]

    assert asyncio.run(asked()) == expected_ids(folder, TALK, kwargs)


def test_a_chat_has_one_beginning(llm: LLM, folder: Path) -> None:
    (chat,) = llm.chat(TALK, GREEDY, use_tqdm=False)
    assert chat.prompt_token_ids.count(BOS_ID) == 1 and chat.prompt_token_ids[0] == BOS_ID
    assert chat.prompt is not None and chat.prompt.startswith("<s><|im_start|>")


@pytest.mark.parametrize("text", ["hello", "<s>hello"])
def test_a_text_begins_as_transformers_lets_it(llm: LLM, folder: Path, text: str) -> None:
    """The tokenizer adds its token also before one that is written out."""
    (output,) = llm.generate(text, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    assert output.prompt_token_ids.count(BOS_ID) == 1 + text.startswith("<s>")


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"tokenize": True}, "may not hold 'tokenize'"),
        ({"chat_template": "x"}, "'chat_template' is not a variable"),
        ({"messages": []}, "may not hold 'messages'"),
        ({"self": 1}, "may not hold 'self'"),
        ({1: 2}, "must be a dict"),
        ("enable_thinking", "must be a dict"),
    ],
)
def test_what_is_no_variable_is_refused(llm: LLM, kwargs: Any, words: str) -> None:
    with pytest.raises(InvalidParamsError, match=words):
        llm.chat(TALK, GREEDY, use_tqdm=False, chat_template_kwargs=kwargs)
    several = llm.chat([TALK, OTHER], GREEDY, use_tqdm=False, chat_template_kwargs=kwargs)
    assert all(isinstance(output.error, InvalidParamsError) for output in several)


def test_roles_that_nobody_knows_are_one_short_warning(llm: LLM) -> None:
    """A client chooses them: 16 MiB hold a name of as many characters, or half a million names."""
    for roles in (["x" * 5_000_000], [f"role {number}" for number in range(3000)], [""]):
        messages = [{"role": role, "content": ""} for role in roles]
        begun = time.process_time()
        with pytest.warns(UserWarning, match="is not one of system, user") as warned:
            llm.tokenizer.apply_chat_template(messages)
        assert len(warned) == 1 and len(str(warned[0].message)) < 400
        assert time.process_time() - begun < 2


@pytest.mark.parametrize("is_file", [True, False])
def test_a_template_in_place_of_the_models(folder: Path, tmp_path: Path, is_file: bool) -> None:
    """As transformers renders it, with tools that the model's own may not show."""
    own = TEMPLATE.replace("im_start", "turn")
    file = tmp_path / "own.jinja"
    file.write_text(own, encoding="utf-8")
    with LLM(folder, chat_template=file if is_file else own, **SETTINGS) as llm:
        (found,) = llm.chat(TALK, GREEDY, use_tqdm=False)
        assert llm.tokenizer.chat_template == own
    theirs = AutoTokenizer.from_pretrained(folder)
    assert found.prompt_token_ids == list(
        theirs.apply_chat_template(TALK, chat_template=own, add_generation_prompt=True)["input_ids"]
    )


def test_a_templates_file_may_begin_with_a_mark(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(TEMPLATE, encoding="utf-8-sig")
    assert chat_template_of(str(file)) == TEMPLATE


def test_a_template_whose_name_no_system_takes() -> None:
    with pytest.raises(ModelLoadError, match="cannot be read: File name too long"):
        chat_template_of("x" * 300)


def test_a_template_that_is_not_there(folder: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file '~nobody_of_this_name/x'"):
        chat_template_of("~nobody_of_this_name/x")
    with pytest.raises(ConfigError, match=r"there is no file 'none\.jinja'; give the path"):
        LLM(folder, chat_template="none.jinja", **SETTINGS)
