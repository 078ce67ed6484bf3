"""Turns text into token ids and back, and renders a model's chat templates.

Owns everything about the vocabulary; knows no weights, requests or engines. Imports `transformers`
only for a folder without tokenizer.json: that takes over a second, `tokenizers` a few hundredths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NoReturn, overload

import tokenizers

from nanoengine.errors import InvalidPromptError, PromptTooLongError, RequestError, ends_at_the_user
from nanoengine.text.byte_tokens import REPLACEMENT, with_replacements
from nanoengine.text.chat_template import ChatTemplate
from nanoengine.text.checked_json import has_file
from nanoengine.text.known_methods import OF_TOKENIZERS, explains_methods
from nanoengine.text.open_message import before_end, check_goes_on, with_end
from nanoengine.text.tekken import Tekken
from nanoengine.text.template_process import RENDER_SECONDS, TemplateProcess
from nanoengine.text.tokenizer_files import (
    add_outside_tokens,
    backend_from_transformers,
    is_tekken,
    let_interrupts_through,
    read_backend,
    read_chat_templates,
    read_special_tokens,
    reason_of,
    try_out,
)


@explains_methods(OF_TOKENIZERS)
class Tokenizer:
    """A vocabulary with its special tokens and its chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        template_seconds: float = RENDER_SECONDS,
    ) -> None:
        """special_tokens: names such as "eos_token" to texts. chat_templates: names to Jinja code.
        template_seconds: time limit of a template for one text."""
        self.folder: Path | None = None  # that it was read from
        self.given_template: str | None = None  # in place of the folder's
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        process = TemplateProcess(template_seconds)
        self._templates = {
            name: ChatTemplate(source, process) for name, source in (chat_templates or {}).items()
        }
        # A tokenizer file may set padding and truncation; prompts need the ids of the whole text.
        backend.no_padding()
        backend.no_truncation()

    @classmethod
    def from_folder(cls, folder: Path, chat_template: str | None = None) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json, added_tokens.json, special_tokens_map.json,
        chat_template.jinja; or Mistral's tekken.json. chat_template: Jinja code in place of what
        the folder has.

        Raises ModelNotFoundError if there is no tokenizer, CorruptModelError for a damaged file,
        ModelLoadError for one that cannot be read or converted.
        """
        path = folder / "tokenizer.json"
        is_there = has_file(path)
        known: dict[str, str] = {}
        if is_there:
            backend = read_backend(path)
            add_outside_tokens(backend, folder)
        elif is_tekken(folder):
            tekken = Tekken(folder)
            backend, known = tekken.backend(), tekken.special_tokens()
        else:
            backend = backend_from_transformers(folder)
        given = {} if chat_template is None else {"default": chat_template}
        templates = given or read_chat_templates(folder)
        made = cls(backend, read_special_tokens(folder, known), templates)
        try_out(backend, path if is_there else folder)  # without a file's padding
        made.folder, made.given_template = folder, chat_template
        return made

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The wrapped `tokenizers` object, for libraries that need the vocabulary itself."""
        return self._backend

    @cached_property
    def vocab_size(self) -> int:
        """Number of ids with added tokens. A model's embedding may have more rows (padding)."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out by default."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def _has_byte_tokens(self) -> bool:
        decoder = self._backend.decoder
        return decoder is not None and b"ByteFallback" in decoder.__getstate__()

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    @property
    def bos_token_id(self) -> int | None:
        """Id of the beginning-of-text token, None without one."""
        return self._id_of("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the tokenizer's own end-of-text token; ModelConfig.eos_token_ids may hold more."""
        return self._id_of("eos_token")

    def _id_of(self, name: str) -> int | None:
        text = self._special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Raises InvalidPromptError: unlike transformers' tokenizers, it is not called."""
        raise InvalidPromptError(
            "a tokenizer is not called itself; encode(text) gives the list that transformers has "
            "in tokenizer(text).input_ids"
        )

    @ends_at_the_user
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. Special tokens written in the text become their ids.

        `add_special_tokens` adds the model's tokens around a plain prompt (such as BOS). Pass False
        for the result of `apply_chat_template`, which already contains them.
        Raises InvalidPromptError if `text` is not a string, has a lone surrogate or cannot be
        encoded with this vocabulary.
        """
        if not isinstance(text, str):
            raise InvalidPromptError(f"a prompt must be a string, not {type(text).__name__}")
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidPromptError(
                "the prompt holds a lone surrogate, which no encoding can write; "
                "decode the bytes with errors='replace'"
            ) from error
        except BaseException as error:
            let_interrupts_through(error)
            raise InvalidPromptError(f"the prompt cannot be encoded: {reason_of(error)}") from error

    def encode_within(self, limit: int, text: str, add_special_tokens: bool = True) -> list[int]:
        """As encode(). Raises PromptTooLongError at once for a text of surely more than `limit`
        tokens (max_model_len).
        """
        if len(text) > (most := limit * self.longest_token):
            raise PromptTooLongError(
                f"the prompt has {len(text)} characters, and {limit} tokens (max_model_len), "
                f"the limit, have at most {most}"
            )
        return self.encode(text, add_special_tokens)

    @ends_at_the_user
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Invalid UTF-8 becomes U+FFFD; ids past the vocabulary are skipped."""
        try:
            text = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
            if REPLACEMENT in text and self._has_byte_tokens:
                left_out = self.special_ids if skip_special_tokens else ()
                tokens = (self._backend.id_to_token(i) for i in ids if i not in left_out)
                present = (token for token in tokens if token is not None)
                return str(self._backend.decoder.decode([*with_replacements(present)]))
            return text
        except (OverflowError, TypeError) as error:
            raise InvalidPromptError("token ids must be integers from 0 to 2**32 - 1") from error
        except BaseException as error:
            let_interrupts_through(error)
            raise InvalidPromptError(f"the ids cannot be decoded: {reason_of(error)}") from error

    @property
    def special_tokens(self) -> dict[str, str]:
        """Texts of special tokens by names such as "eos_token"."""
        return dict(self._special_tokens)

    @property
    def chat_template(self) -> str | None:
        """The default chat template's Jinja code; None without one."""
        found = self._templates.get("default")
        return None if found is None else found.source

    def template_source(self, has_tools: bool) -> str:
        """Jinja code of the chat template that renders with tools or without; "" without one."""
        found = self._templates.get(self._template_name(has_tools))
        return "" if found is None else found.source

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._templates)

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tokenize: Literal[False] = False,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str: ...

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tokenize: Literal[True],
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> list[int]: ...

    @ends_at_the_user
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tokenize: bool = False,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str | list[int]:
        """Render a conversation as one text, or as token ids with `tokenize=True`.

        Each message has a `role` and a `content`: a string, or a list of parts {"type": "text",
        "text": ...}, joined by newlines. `content` may be missing beside `tool_calls`. `kwargs` are
        variables of the template (`tools`, `documents`, `enable_thinking`, ...), JSON values only.
        continue_final_message: with add_generation_prompt=False, the text ends with that of the
        last message. Encode a text with `add_special_tokens=False`.
        Raises RequestError without a template, InvalidPromptError for bad messages or a failing
        template, InvalidParamsError for an argument that is no template variable.
        """
        template = self._template(has_tools=kwargs.get("tools") is not None)
        if continue_final_message:
            check_goes_on(add_generation_prompt)
            messages = with_end(messages)
        text = template.render(messages, add_generation_prompt, self._special_tokens, kwargs)
        if continue_final_message:
            text = before_end(text)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def _template(self, has_tools: bool) -> ChatTemplate:
        if not self._templates:
            raise RequestError(
                "this model has no chat template (neither chat_template.jinja nor one in "
                "tokenizer_config.json); send a plain prompt, or give the engine a chat_template"
            )
        name = self._template_name(has_tools)
        if name not in self._templates:
            raise RequestError(
                f"this model's chat templates have no default, only {sorted(self._templates)}"
            )
        return self._templates[name]

    def _template_name(self, has_tools: bool) -> str:
        return "tool_use" if has_tools and "tool_use" in self._templates else "default"
