"""Text to token ids and back: encoding, incremental detokenising; and a model's chat templates.

Owns everything that is a property of the vocabulary; knows nothing about weights, requests or
engines. `transformers` is imported only for a folder without tokenizer.json: it costs over a
second, where the `tokenizers` library alone costs hundredths.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from nanoengine.errors import (
    CorruptModelError,
    InvalidPromptError,
    ModelLoadError,
    ModelNotFoundError,
    RequestError,
    shown,
)
from nanoengine.text.chat_template import ChatTemplate
from nanoengine.text.checked_json import MAX_REASON, check_size, has_file, read_json_if_any
from nanoengine.text.template_process import RENDER_SECONDS, TemplateProcess

logger = logging.getLogger(__name__)

SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
REPLACEMENT = "\ufffd"
PROBE = "Ab 12\n\u00e9\u6f22\U0001f642"
# After so many tokens without a clean end some text is given out anyway. A code point is at most 4
# bytes, so half of them hold the last one and what is before it.
MAX_PENDING_TOKENS = 8


class Tokenizer:
    """A vocabulary with its special tokens and its chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        template_seconds: float = RENDER_SECONDS,
    ) -> None:
        """`special_tokens` maps names such as "eos_token" to texts, `chat_templates` names to
        Jinja. template_seconds: a template may take so long for one text."""
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        process = TemplateProcess(template_seconds)
        self._templates = {
            name: ChatTemplate(source, process) for name, source in (chat_templates or {}).items()
        }
        # A file may ask for padding and truncation; ids must be those of the whole text.
        backend.no_padding()
        backend.no_truncation()

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json, special_tokens_map.json, chat_template.jinja.

        Raises ModelNotFoundError when there is no tokenizer at all, CorruptModelError for a damaged
        file, ModelLoadError for one that cannot be read or converted.
        """
        path = folder / "tokenizer.json"
        is_there = has_file(path)
        backend = _read_backend(path) if is_there else _backend_from_transformers(folder)
        made = cls(backend, _special_tokens(folder), _chat_templates(folder))
        _try_out(backend, path if is_there else folder)  # without a file's padding
        return made

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The wrapped `tokenizers` object, for libraries that need the vocabulary itself."""
        return self._backend

    @cached_property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included. A model's embedding may have more rows
        (padding)."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out by default."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

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

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. Special tokens written in the text become their ids.

        `add_special_tokens` adds what the model wants around a plain prompt (a BOS, say). Pass
        False for the result of `apply_chat_template`: the template has written those tokens itself.
        Raises InvalidPromptError if `text` is no string, holds a lone surrogate or cannot be
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
            _let_interrupts_through(error)
            raise InvalidPromptError(f"the prompt cannot be encoded: {_text_of(error)}") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Bytes that are no UTF-8 become U+FFFD; ids past the vocabulary,
        nothing."""
        try:
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise InvalidPromptError("token ids must be integers from 0 to 2**32 - 1") from error
        except BaseException as error:
            _let_interrupts_through(error)
            raise InvalidPromptError(f"the ids cannot be decoded: {_text_of(error)}") from error

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can work."""
        return bool(self._templates)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The conversation as one text, equal to transformers'
        `apply_chat_template(tokenize=False)`.

        Each message has a `role` and a `content` string; `content` may be missing beside
        `tool_calls`. `kwargs` are variables of the template (`tools`, `documents`,
        `enable_thinking`, ...), JSON values only. Encode the result with
        `add_special_tokens=False`.
        Raises RequestError without a template, InvalidPromptError for bad messages or a failing
        template, InvalidParamsError for an argument that is no template variable.
        """
        template = self._template(has_tools=kwargs.get("tools") is not None)
        return template.render(messages, add_generation_prompt, self._special_tokens, kwargs)

    def _template(self, has_tools: bool) -> ChatTemplate:
        if not self._templates:
            raise RequestError(
                "this model has no chat template (neither chat_template.jinja nor one in "
                "tokenizer_config.json); send a plain prompt instead"
            )
        name = "tool_use" if has_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise RequestError(
                f"this model's chat templates have no default, only {sorted(self._templates)}"
            )
        return self._templates[name]


class IncrementalDetokenizer:
    """Turns the tokens of one sequence into text as they come, never showing half a code point.

    A window of recent ids is decoded again for every token. It is cut where the text so far is
    complete, so the work per token does not grow. What was given out never changes; over byte-level
    vocabularies the whole equals `tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []  # ids[:_settled] are complete text and serve as context
        self._settled = 0
        self._given = 0  # characters of the window's text that were given out
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """Everything given out so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def add(self, token_id: int) -> str:
        """Append a token; returns the text that became final, often "" inside a code point."""
        if self._skip and token_id in self._tokenizer.special_ids:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            return self._give(text)
        if len(self._window) - self._settled >= MAX_PENDING_TOKENS:
            return self._give_part(text)
        return ""

    def flush(self) -> str:
        """No more tokens follow: returns what was held back."""
        return self._give(self._decode(self._window))

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, self._skip)

    def _give(self, text: str) -> str:
        """Give out the rest of the window's text; its newest ids stay as context for the next."""
        new = text[self._given :]
        if new:
            self._pieces.append(new)
        self._window = self._window[self._settled :]
        self._settled = len(self._window)
        self._given = len(self._decode(self._window))
        return new

    def _give_part(self, text: str) -> str:
        """Give out all but the last character of a window that has long had no clean end.

        Only that one can still change, and its bytes are in the last three tokens. A cut inside an
        earlier code point spoils only text that was given out, so positions count from the end.
        """
        new = text[self._given : -1]
        self._pieces.append(new)
        self._window = self._window[-MAX_PENDING_TOKENS // 2 :]
        self._settled = 0
        self._given = len(self._decode(self._window)) - 1
        return new


def read_eos_id(folder: Path) -> int | None:
    """Id of the end-of-text token as the files in `folder` say, None without one.

    Raises ModelLoadError for a damaged file.
    """
    path = folder / "tokenizer_config.json"
    config = read_json_if_any(path)
    text = _special_token(path, config, "eos_token")
    if text is None:
        return None
    added = config.get("added_tokens_decoder")
    if not added:
        path = folder / "tokenizer.json"
        added = read_json_if_any(path).get("added_tokens") or []
    return _ids_by_text(path, added).get(text)


def _ids_by_text(path: Path, added: Any) -> dict[str, int]:
    """Added tokens in either spelling: {"7": {"content": ...}} or [{"id": 7, "content": ...}]."""
    pairs: list[tuple[Any, Any]]
    if isinstance(added, dict):
        pairs = list(added.items())
    else:
        entries = added if isinstance(added, list) else [added]
        pairs = [(entry.get("id") if isinstance(entry, dict) else "", entry) for entry in entries]
    ids: dict[str, int] = {}
    for number, entry in pairs:
        text = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(text, str) or not re.fullmatch("[0-9]{1,10}", str(number)):
            raise CorruptModelError(f"{path}: {shown(entry)} is no added token with an id")
        ids.setdefault(text, int(number))
    return ids


def _special_token(path: Path, config: Mapping[str, Any], name: str) -> str | None:
    """The text of the special token `name` in the object of file `path`, None without one.

    Raises CorruptModelError if it is no text.
    """
    value = config.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    if value is None:
        return None
    if not isinstance(text, str) or any("\ud800" <= char <= "\udfff" for char in text):
        raise CorruptModelError(f"{path}: {name!r} is {shown(value)}, which is no token's text")
    return text


def _let_interrupts_through(error: BaseException) -> None:
    """Raise `error` again if it is no Exception, except for a panic of the library's Rust."""
    is_panic = type(error).__module__ == "pyo3_runtime"
    if not is_panic and not isinstance(error, Exception):
        raise error


def _text_of(error: BaseException) -> str:
    """Errors of the library may quote a whole file."""
    return str(error)[:MAX_REASON]


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        check_size(path)
        return tokenizers.Tokenizer.from_file(str(path))
    except ModelLoadError:
        raise
    except BaseException as error:  # the library raises plain Exception
        _let_interrupts_through(error)
        raise CorruptModelError(f"{path} is no valid tokenizer: {_text_of(error)}") from error


def _try_out(backend: tokenizers.Tokenizer, source: Path) -> None:
    """What would break at the first prompt breaks now. CorruptModelError if the library panics."""
    try:
        for skip_special_tokens in (True, False):
            backend.decode(backend.encode(PROBE).ids, skip_special_tokens)
    except Exception as error:  # some vocabularies are closed: they say so of a text
        logger.info("%s does not encode %r: %s", source, PROBE, _text_of(error))
    except BaseException as error:
        _let_interrupts_through(error)
        raise CorruptModelError(f"{source} breaks the tokenizer: {_text_of(error)}") from error


def _backend_from_transformers(folder: Path) -> tokenizers.Tokenizer:
    # transformers makes an empty tokenizer out of no file at all.
    if not any(has_file(folder / name) for name in ("vocab.json", "tokenizer.model")):
        raise ModelNotFoundError(
            f"{shown(str(folder))} has no tokenizer.json, tokenizer.model or vocab.json"
        )
    # Only for old formats: the import costs over a second.
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(
            str(folder), use_fast=True, local_files_only=True, trust_remote_code=False
        )
    except BaseException as error:  # a converter may raise anything
        _let_interrupts_through(error)
        raise ModelLoadError(
            f"{folder} has no tokenizer.json, and transformers cannot make one "
            f"from its other files: {_text_of(error)}"
        ) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelLoadError(f"{folder} has no tokenizer.json and no tokenizer to convert to one")
    return backend


def _special_tokens(folder: Path) -> dict[str, str]:
    """Texts by name. What tokenizer_config.json says of a name counts, null included."""
    found: dict[str, str | None] = {}
    for file_name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / file_name
        config = read_json_if_any(path)
        found |= {n: _special_token(path, config, n) for n in SPECIAL_TOKEN_NAMES if n in config}
    return {name: text for name, text in found.items() if text is not None}


def _chat_templates(folder: Path) -> dict[str, str]:
    """Templates by name. A chat_template.jinja wins over tokenizer_config.json, as in
    transformers."""
    path = folder / "chat_template.jinja"
    if has_file(path):
        try:
            return {"default": path.read_text(encoding="utf-8")}
        except UnicodeDecodeError as error:
            raise CorruptModelError(f"{path} is no UTF-8 text: {error}") from error
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from error
    path = folder / "tokenizer_config.json"
    template = read_json_if_any(path).get("chat_template")
    if template is None:
        return {}
    if isinstance(template, str):
        return {"default": template}
    if isinstance(template, list):
        return _named_templates(path, template)
    raise CorruptModelError(
        f"{path}: 'chat_template' is {shown(template)}, neither a string nor a list"
    )


def _named_templates(path: Path, entries: Iterable[Any]) -> dict[str, str]:
    named: dict[str, str] = {}
    for entry in entries:
        pair = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else ()
        if len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise CorruptModelError(
                f"{path}: each entry of a chat_template list needs a name and a template string"
            )
        named[str(pair[0])] = str(pair[1])
    return named
