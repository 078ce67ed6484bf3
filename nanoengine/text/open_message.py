"""A conversation that is not ended: a mark stands after its last text while the template writes it.

The text of the prompt ends where the mark is found, as transformers and vLLM do it.
"""

from __future__ import annotations

from typing import Any

from nanoengine.errors import InvalidParamsError, InvalidPromptError, shown

# A template that trims texts takes its space.
END = "(here the message goes on) "


def check_goes_on(add_generation_prompt: object) -> None:
    """Raise InvalidParamsError if the prompt is to begin a message after the one that goes on."""
    if add_generation_prompt:
        raise InvalidParamsError(
            "continue_final_message needs an add_generation_prompt that is false: an answer begins "
            "a message of its own, or goes on with the last one"
        )


def last_text(messages: Any) -> str:
    """The text that the last message ends with. Raises InvalidPromptError if it has none."""
    last: Any = messages[-1] if isinstance(messages, list | tuple) and messages else None
    match last:
        case {"content": str(text)} | {"content": [*_, {"text": str(text)}]}:
            return text
    raise InvalidPromptError(
        f"continue_final_message needs a text in the last message, got {shown(last)}"
    )


def with_end(messages: Any) -> list[Any]:
    """The messages with END after the last text. Raises InvalidPromptError."""
    text = last_text(messages) + END
    last = messages[-1]
    content = last["content"]
    marked = text if isinstance(content, str) else [*content[:-1], {**content[-1], "text": text}]
    return [*messages[:-1], {**last, "content": marked}]


def before_end(text: str) -> str:
    """A conversation up to END. Raises InvalidPromptError."""
    at = text.rfind(END.rstrip())
    if at < 0:
        raise InvalidPromptError(
            "continue_final_message does not work with this model: its chat template leaves out "
            "the end of the last message"
        )
    is_trimmed = not text.startswith(END, at)
    return text[:at].rstrip() if is_trimmed else text[:at]
