"""A model's chat template, compiled: messages to one text, as transformers renders them.

jinja2 is imported with the first template: a start that needs none does without.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from nanoengine.errors import InvalidParamsError, InvalidPromptError

# Arguments of transformers' method of the same name that are no template variables.
NOT_TEMPLATE_VARIABLES = frozenset(
    {
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """One template. It comes with the model, so it runs in a sandbox; the settings are
    transformers'.
    """

    def __init__(self, source: str) -> None:
        """Raises InvalidPromptError when it does not compile."""
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class GenerationTag(Extension):
            """Accepts `{% generation %}` blocks, with which training marks an assistant's part."""

            tags = {"generation"}  # noqa: RUF012 (the name and the type are jinja2's)

            def parse(self, parser: Parser) -> nodes.Node:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return nodes.Scope(body, lineno=line)

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except (TemplateError, RecursionError) as error:
            raise InvalidPromptError(f"the model's chat template is broken: {error}") from error

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
                f"{refused[0]!r} is no variable of a chat template; "
                "apply_chat_template renders the model's own template to text"
            )
        given = {"tools": None, "documents": None, **special_tokens, **variables}
        plain = {name: _plain(value, name) for name, value in given.items()}
        checked = _plain_messages(messages)
        try:
            return self._template.render(
                messages=checked, add_generation_prompt=add_generation_prompt, **plain
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise InvalidPromptError(
                f"the chat template refuses these messages: {error}"
            ) from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which a prompt does not want."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A checked copy, without the keys whose value is None, as templates expect."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidPromptError(
            "messages must be a list of at least one {'role': ..., 'content': ...}"
        )
    return [_plain_message(message, index) for index, message in enumerate(messages)]


def _plain_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidPromptError(f"{where} must be a dict, not {type(message).__name__}")
    plain = {k: v for k, v in _plain(message, where).items() if v is not None}
    for key in ("role", "content"):
        is_optional = key == "content" and "tool_calls" in plain
        if not isinstance(plain.get(key), str) and not (is_optional and key not in plain):
            raise InvalidPromptError(
                f"{where}[{key!r}] must be a string, not {type(message.get(key)).__name__}"
            )
    return _with_reasoning_names(plain)


def _with_reasoning_names(message: dict[str, Any]) -> dict[str, Any]:
    """Earlier reasoning goes by three names; templates read `reasoning_content` or `thinking`."""
    reasoning = next((message[name] for name in REASONING_FIELDS if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy in plain JSON types: the sandbox cannot know the methods of anything else."""
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
    """An enum or another subclass, as its plain value."""
    if isinstance(value, str):
        return str.__str__(value)
    return int.__int__(value) if isinstance(value, int) else float.__float__(value)
