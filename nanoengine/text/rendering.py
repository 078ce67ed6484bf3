"""How a conversation becomes a prompt: what follows its last message, or goes on with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanoengine.errors import InvalidParamsError, InvalidPromptError, shown
from nanoengine.text.open_message import last_text
from nanoengine.text.reasoning import reasoning_in
from nanoengine.text.tokenizer import Tokenizer

TemplateKwargs = Mapping[str, Any] | None
Tools = Sequence[Mapping[str, Any]] | None

TAKEN = {"messages", "self", "tokenize", "continue_final_message"}


@dataclass(frozen=True, slots=True)
class Rendering:
    """How a chat template writes a conversation: transformers' and vLLM's arguments. kwargs: its
    variables. tools: that it shows. continue_final_message: the answer goes on with the last
    message, which is not ended.
    """

    add_generation_prompt: bool = True
    kwargs: TemplateKwargs = None
    tools: Tools = None
    continue_final_message: bool = False

    def text(self, tokenizer: Tokenizer, messages: Any) -> str:
        """The conversation as one text. Raises RequestErrors."""
        goes_on = self.continue_final_message
        variables = self._variables()
        text = tokenizer.apply_chat_template(
            messages, continue_final_message=goes_on, tokenize=False, **variables
        )
        if goes_on:
            _check_thoughts(last_text(messages), text, tokenizer)
        return text

    def _variables(self) -> dict[str, Any]:
        """Those in kwargs override arguments, as in vLLM. Raises InvalidParamsError."""
        given = {} if self.kwargs is None else self.kwargs
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise InvalidParamsError(
                f"chat_template_kwargs must be a dict of the template's variables, got {given!r}"
            )
        if taken := TAKEN & given.keys():
            raise InvalidParamsError(f"chat_template_kwargs may not hold {min(taken)!r}")
        made: dict[str, Any] = {"add_generation_prompt": self.add_generation_prompt}
        tools = self.tools
        if tools is None:
            return {**made, **given}
        if not isinstance(tools, list | tuple) or not all(isinstance(t, Mapping) for t in tools):
            raise InvalidParamsError(
                'tools must be a list of dicts such as {"type": "function", "function": {"name": '
                f'..., "parameters": ...}}}}, got {shown(tools)}'
            )
        return {**made, "tools": tools, **given}


def _check_thoughts(said: str, text: str, tokenizer: Tokenizer) -> None:
    """Raise InvalidPromptError if a message ends within thoughts: where those of an answer end, its
    readers could not say. said: by that message; text: the conversation.
    """
    row = reasoning_in(tokenizer)
    if row is None or row.is_open_after(text):
        return
    begin = row.begin.strip()
    if said.rfind(begin) > said.rfind(row.end.strip()):
        raise InvalidPromptError(
            "continue_final_message: the last message ends within its thoughts, which cannot go "
            f"on; end them with {row.end!r}, or leave out what stands behind {begin!r}"
        )
