"""Renders messages to one text with a model's chat template, as transformers does.

Checks the template's variables; template_process.py runs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from nanoengine.errors import InvalidParamsError, InvalidPromptError, shown, warn_user
from nanoengine.text.call_ids import SIGN, with_names_in_ids, with_names_of_tools
from nanoengine.text.checked_json import object_in
from nanoengine.text.template_process import TemplateProcess

# Arguments of transformers' apply_chat_template that are not template variables.
NOT_TEMPLATE_VARIABLES = frozenset(
    {
        "chat_template",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenizer_kwargs",
        "truncation",
    }
)
MAX_WARNED = 8
MARK = "nanoengine asks"  # no template has it of its own
TEXT_PARTS = ("text", "input_text", "output_text")
ROLES = ("system", "user", "assistant", "tool")
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """One template of a model, rendered in another process because its code is not trusted."""

    def __init__(self, source: str, process: TemplateProcess) -> None:
        """source: Jinja code; `render` raises if it is broken."""
        self.source = source
        self._process = process
        self._warned: set[str] = set()  # roles; Python keeps each warning that it gave
        self._wants_parts: bool | None = None  # not known yet

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        special_tokens: Mapping[str, str],
        variables: Mapping[str, Any],
    ) -> str:
        """The conversation as text; see Tokenizer.apply_chat_template."""
        refused = sorted(NOT_TEMPLATE_VARIABLES & variables.keys())
        if refused:
            raise InvalidParamsError(
                f"{refused[0]!r} is not a variable of a chat template; "
                "apply_chat_template renders the model's own template to text, and with "
                "tokenize=True to a list of token ids"
            )
        given = {"tools": None, "documents": None, **special_tokens, **variables}
        given["add_generation_prompt"] = add_generation_prompt
        plain = {name: _plain(value, name) for name, value in given.items()}
        checked = _checked(messages)
        if self._wants_parts is None:
            self._wants_parts = self._writes_parts_alone(plain)
        forms = _message_forms(checked if self._wants_parts else [*map(_with_text, checked)])
        if SIGN in self.source:
            forms = [*map(with_names_in_ids, forms)]
        plain["messages"], *others = forms
        self._warn_of_unknown_names(plain)
        try:
            return self._process.render(self.source, plain)
        except InvalidPromptError as refusal:
            is_over = refusal.__cause__ is not None  # its process ended, or its time
            for form in [] if is_over else others:
                with suppress(InvalidPromptError):
                    return self._process.render(self.source, plain | {"messages": form})
            raise

    def _writes_parts_alone(self, variables: Mapping[str, Any]) -> bool:
        """Whether it leaves out a content that is a text, and writes the same in a list of parts:
        templates of models for images, as SmolVLM's.
        """
        message = {"role": "user", "content": _as_parts([MARK])}
        return not self._writes(_with_text(message), variables) and self._writes(message, variables)

    def _writes(self, message: dict[str, Any], variables: Mapping[str, Any]) -> bool:
        with suppress(InvalidPromptError):
            asked = {**variables, "messages": [message], "tools": None, "documents": None}
            return MARK in self._process.render(self.source, asked)
        return False

    def _warn_of_unknown_names(self, variables: Mapping[str, Any]) -> None:
        """Warn of what most templates write or leave out without a word."""
        given = dict.fromkeys(message["role"] for message in variables["messages"])
        others = (role for role in given if role not in ROLES and not self._names(role))
        role = next(others, None)
        # The first one alone, and a few in all: there may be a million.
        if role is not None and len(self._warned) < MAX_WARNED:
            self._warned.add(role)
            warn_user(
                f"the role {shown(role)} is not one of {', '.join(ROLES)}, and the model's "
                "chat template does not name it: the model may not know it"
            )
        if variables["tools"] and "tools" not in self.source:
            warn_user("the model's chat template does not use tools: the model will not see them")

    def _names(self, role: str) -> bool:
        """Whether the template has this role as a text."""
        return any(f"{quote}{role}{quote}" in self.source for quote in "'\"")


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies without keys that are None, with contents as parts. Raises InvalidPromptError."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidPromptError(
            "messages must be a list of at least one {'role': ..., 'content': ...}, "
            f"got {shown(messages)}"
        )
    return [_plain_message(message, index) for index, message in enumerate(messages)]


def _message_forms(checked: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The messages with the arguments of calls as objects, as most templates expect; then those
    that differ from it, for templates that refuse it: with the content None that calls may have
    (DeepSeek-V3.1 asks for it), and also with arguments as they were given (DeepSeek writes their
    text); with no text as the content (SmolLM2 adds to it); and with names of tools beside their
    answers (Hermes 2 Pro wants them).
    """
    whole, empty = (
        [({"content": content} if "tool_calls" in m else {}) | m for m in checked]
        for content in (None, "")
    )
    forms = [_with_objects(checked)]
    texts = _with_objects(empty)
    for form in (_with_objects(whole), whole, texts, with_names_of_tools(texts)):
        if form not in forms:
            forms.append(form)
    return forms


def _plain_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidPromptError(f"{where} must be a dict, not {type(message).__name__}")
    plain = {k: v for k, v in _plain(message, where).items() if v is not None}
    if plain.get("tool_calls") == []:  # a template may take it for calls
        del plain["tool_calls"]
    if not isinstance(plain.get("role"), str):
        raise _wrong_kind(where, "role", "a string", message)
    content = plain.get("content")
    if content is None and plain["role"] == "assistant" and "tool_calls" not in plain:
        content = ""
    if isinstance(content, list) and content:
        plain["content"] = _as_parts(_texts_of_parts(content, f"{where}['content']"))
    elif isinstance(content, str):
        plain["content"] = _as_parts([content])
    elif content is not None or "tool_calls" not in plain:
        raise _wrong_kind(where, "content", "a string or a list of text parts", message)
    return _with_reasoning_names(plain)


def _wrong_kind(where: str, key: str, kinds: str, message: Mapping[str, Any]) -> InvalidPromptError:
    kind = type(message.get(key)).__name__
    return InvalidPromptError(f"{where}[{key!r}] must be {kinds}, not {kind}")


def _with_objects(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        message | {"tool_calls": [_with_object(call, f"messages[{index}]") for call in calls]}
        if isinstance(calls := message.get("tool_calls"), list)
        else message
        for index, message in enumerate(messages)
    ]


def _with_object(call: Any, where: str) -> Any:
    """A call of OpenAI's, whose arguments are an object's text, with that object: as vLLM, since
    most templates write it as JSON themselves.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    arguments = object_in(function["arguments"] or "{}")
    if arguments is None:
        return call
    return call | {"function": function | {"arguments": _plain(arguments, where)}}


def _texts_of_parts(parts: list[Any], where: str) -> list[str]:
    """Of OpenAI's content parts. Raises InvalidPromptError for others than texts."""
    texts = []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else part
        text = part.get("text") if isinstance(part, dict) and kind in TEXT_PARTS else None
        if not isinstance(text, str):
            raise InvalidPromptError(
                f"{where}[{index}] is {shown(kind)}, but only text is read, as in "
                '{"type": "text", "text": "..."}: no images, audio or files'
            )
        texts.append(text)
    return texts


def _as_parts(texts: Iterable[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is one text, with parts joined as vLLM joins them."""
    if "content" not in message:
        return message
    return message | {"content": "\n".join(part["text"] for part in message["content"])}


def _with_reasoning_names(message: dict[str, Any]) -> dict[str, Any]:
    """Copy earlier reasoning, which has three names, to those that templates read:
    `reasoning_content` or `thinking`."""
    reasoning = next((message[name] for name in REASONING_FIELDS if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy in plain JSON types: other types have methods unknown to the sandbox."""
    if depth > 64:
        raise InvalidPromptError(f"{where} is nested deeper than 64 levels")
    if value is None or type(value) in (bool, str, int, float):
        return value
    if isinstance(value, (str, int, float)):
        return _base(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v, where, depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where, depth + 1) for item in value]
    raise InvalidPromptError(
        f"{where} holds a {type(value).__name__}; only JSON values are accepted"
    )


def _base(value: str | float) -> str | float:
    """The plain value of an enum or another subclass."""
    if isinstance(value, str):
        return str.__str__(value)
    return int.__int__(value) if isinstance(value, int) else float.__float__(value)
