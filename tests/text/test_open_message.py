"""Prompts that end within a message, against transformers, and how their answers are read."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from nanoengine import InvalidPromptError
from nanoengine.text.answer_parser import ChatParsers
from nanoengine.text.open_message import before_end, with_end
from nanoengine.text.reasoning import BY_NAME
from nanoengine.text.tokenizer import Tokenizer

OPEN: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
TEMPLATES = {
    "as it is": "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}",
    "trimmed": "{% for m in messages %}<{{ m.role }}> {{ m.content | trim }} </s>{% endfor %}",
}
TALK = [{"role": "user", "content": "(here the message goes on) a"}]
TEXTS = ("", "So", " So ", "So\n")


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=list(TEMPLATES))
def test_open_prompts_equal_transformers(tmp_path: Any, template: str) -> None:
    backend = Backend(WordLevel({"<unk>": 0}, unk_token="<unk>"))
    made = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template)
    made.save_pretrained(tmp_path)
    ours = Tokenizer.from_folder(tmp_path)
    for text in TEXTS:
        messages = [*TALK, {"role": "assistant", "content": text}]
        expected = made.apply_chat_template(messages, tokenize=False, **OPEN)
        assert ours.apply_chat_template(messages, **OPEN) == expected
        assert messages[-1]["content"] == text
    with pytest.raises(InvalidPromptError, match="needs a text in the last message, got 5"):
        ours.apply_chat_template([5], **OPEN)  # type: ignore[list-item]


def test_a_template_may_leave_the_end_out() -> None:
    marked = with_end([{"role": "assistant", "content": " So "}])[-1]["content"]
    assert before_end(f"<{marked}>") == "< So " and before_end(f"<{marked.strip()}>") == "<So"
    with pytest.raises(InvalidPromptError, match="leaves out the end of the last message"):
        before_end("<So>")


@pytest.mark.parametrize(
    ("name", "prompt", "answer", "closed"),
    [
        ("openai_gptoss", "<|channel|>final<|message|>So", " it is.<|return|>", " it is."),
        ("openai_gptoss", "<|channel|>final<|message|>So", " it is.<|end|><|start|>", " it is."),
        ("cohere_command3", "<|START_RESPONSE|>So", " it is.<|END_RESPONSE|>", " it is."),
        ("cohere_command4", "<|START_TEXT|>So", " it is.<|END_TEXT|>", " it is."),
        ("hunyuan_a13b", "<answer>\nSo", " it is.\n</answer>", " it is."),
        ("muse_glimmer", " to=user<|message|>So", " it is.<|eot|>", " it is."),
        ("deepseek_r1", "</think>\n\nSo", " it is.", " it is."),
        ("deepseek_r1", "<think>\n", "a\n</think>\n\nit is.", "it is."),
    ],
)
def test_answers_go_on_with_content(name: str, prompt: str, answer: str, closed: str) -> None:
    parsers = ChatParsers(reasoning=BY_NAME[name])
    assert parsers.message(answer, prompt, None, goes_on=True).content == closed
    parser = parsers.parser(prompt, None, goes_on=True)
    parts = [parser.read(each, False) for each in answer] + [parser.read("", True)]
    assert "".join(p.text for each in parts for p in each if p.kind.name == "CONTENT") == closed
