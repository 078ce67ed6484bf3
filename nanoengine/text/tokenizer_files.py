"""Reads and checks the files of a tokenizer."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import tokenizers
from tokenizers import AddedToken

from nanoengine.errors import (
    ConfigError,
    CorruptModelError,
    ModelLoadError,
    ModelNotFoundError,
    shown,
)
from nanoengine.text.checked_json import MAX_REASON, check_size, has_file, read_json_if_any
from nanoengine.text.tekken import NAME as TEKKEN
from nanoengine.text.tekken import Tekken
from nanoengine.text.tokenizer_growth import check_normalizers, check_steps

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
FLAGS = ("special", "lstrip", "normalized", "rstrip", "single_word")  # of added tokens
NAMED_TEMPLATES = "additional_chat_templates"
PROBE = "Ab 12\n\u00e9\u6f22\U0001f642"


def read_eos_id(folder: Path) -> int | None:
    """Id of the end-of-text token from the files in `folder`; None without one.

    Raises ModelLoadError for a damaged file.
    """
    if is_tekken(folder):
        tekken = Tekken(folder)
        named = read_special_tokens(folder, tekken.special_tokens())
        return tekken.special_ids().get(named.get("eos_token", ""))
    text = read_special_tokens(folder).get("eos_token")
    if text is None:
        return None
    path = folder / "tokenizer_config.json"
    added = read_json_if_any(path).get("added_tokens_decoder")
    if not added:
        path = folder / "tokenizer.json"
        added = read_json_if_any(path).get("added_tokens") or []
    return _ids_by_text(path, added).get(text)


def _ids_by_text(path: Path, added: Any) -> dict[str, int]:
    """Ids of added tokens from {"7": {"content": ...}} or [{"id": 7, "content": ...}]."""
    pairs: list[tuple[Any, Any]]
    if isinstance(added, dict):
        pairs = list(added.items())
    else:
        entries = added if isinstance(added, list) else [added]
        pairs = [(entry.get("id") if isinstance(entry, dict) else "", entry) for entry in entries]
    ids: dict[str, int] = {}
    for number, entry in pairs:
        text = entry.get("content") if isinstance(entry, dict) else None
        if not _is_text(text) or not re.fullmatch("[0-9]{1,10}", str(number)):
            raise CorruptModelError(f"{path}: {shown(entry)} is not an added token with an id")
        ids.setdefault(text, int(number))
    return ids


def _special_token(path: Path, config: Mapping[str, Any], name: str) -> str | None:
    """The text of the special token `name` in `config` from the file `path`; None without one.

    Raises CorruptModelError if it is not a string.
    """
    value = config.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    if value is None:
        return None
    if not _is_text(text):
        raise CorruptModelError(f"{path}: {name!r} is {shown(value)}, which is not a token's text")
    return text


def _is_text(value: object) -> TypeGuard[str]:
    """Whether it is a string without lone surrogates, which the library cannot take."""
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)


def let_interrupts_through(error: BaseException) -> None:
    """Raise `error` again if it is not an Exception, except for a panic of the Rust library."""
    is_panic = type(error).__module__ == "pyo3_runtime"
    if not is_panic and not isinstance(error, Exception):
        raise error


def reason_of(error: BaseException) -> str:
    """The error's text, shortened because it may quote a whole file."""
    return str(error)[:MAX_REASON]


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """What tokenizer.json holds. Raises CorruptModelError, ModelLoadError."""
    try:
        check_size(path)
        text = path.read_text(encoding="utf-8")
        check_normalizers(path, text)
        return tokenizers.Tokenizer.from_str(text)
    except ModelLoadError:
        raise
    except BaseException as error:  # the library raises plain Exception
        let_interrupts_through(error)
        raise CorruptModelError(f"{path} is no valid tokenizer: {reason_of(error)}") from error


def add_outside_tokens(backend: tokenizers.Tokenizer, folder: Path) -> None:
    """Give it the added tokens that only the files beside tokenizer.json have, and their flags, as
    transformers does. A new token is left out if it would get another id than the file says.
    """
    by_id = backend.get_added_tokens_decoder()
    known = {token.content: token for token in by_id.values()}
    named = {*read_special_tokens(folder).values()}
    next_id = max([backend.get_vocab_size(False) - 1, *by_id]) + 1
    wanted = {}
    for token_id, token in sorted(_outside_tokens(folder, named, known).items()):
        is_new = backend.token_to_id(token.content) is None
        if not is_new or token_id == next_id:
            wanted[token.content] = token
            next_id += is_new
    for text in named:
        if text not in wanted and backend.token_to_id(text) is not None:
            wanted[text] = known.get(text, AddedToken(text, special=True))
    made = [
        AddedToken(
            text,
            **{name: getattr(token, name) for name in FLAGS[1:]},
            special=any(each.special for each in (token, known.get(text, token))) or text in named,
        )
        for text, token in wanted.items()
    ]
    backend.add_tokens([token for token in made if repr(token) != repr(known.get(token.content))])


def _outside_tokens(
    folder: Path, named: Collection[str], known: Collection[str]
) -> dict[int, AddedToken]:
    """Added tokens by id: of tokenizer_config.json, or else of added_tokens.json, if they are not
    known. named: special tokens.
    """
    path = folder / "tokenizer_config.json"
    listed = read_json_if_any(path).get("added_tokens_decoder")
    if isinstance(listed, dict) and listed:
        ids = _ids_by_text(path, listed)
        flags = {
            each["content"]: {k: v for k, v in each.items() if k in FLAGS and isinstance(v, bool)}
            for each in listed.values()
        }
        return {ids[text]: AddedToken(text, **its) for text, its in flags.items()}
    path = folder / "added_tokens.json"
    others = read_json_if_any(path)
    if not all(_is_text(text) and type(token_id) is int for text, token_id in others.items()):
        raise CorruptModelError(f"{path} must give each token's text an integer, its id")
    return {
        token_id: AddedToken(text, normalized=text not in named, special=text in named)
        for text, token_id in others.items()
        if text not in known
    }


def try_out(backend: tokenizers.Tokenizer, source: Path) -> None:
    """Encode and decode a text to find a broken tokenizer now. Raises CorruptModelError for a panic
    of the library, or for steps that a text would grow by."""
    check_steps(source, backend)
    try:
        for skip_special_tokens in (True, False):
            backend.decode(backend.encode(PROBE).ids, skip_special_tokens)
    except Exception as error:  # some vocabularies cannot encode every text
        logger.info("%s does not encode %r: %s", source, PROBE, reason_of(error))
    except BaseException as error:
        let_interrupts_through(error)
        raise CorruptModelError(f"{source} breaks the tokenizer: {reason_of(error)}") from error


def path_of(given: str) -> Path:
    """A path as users write it: ~ is their home, and ~name stays where nobody has that name."""
    return Path(os.path.expanduser(given))  # pathlib raises then


def check_tokenizer_is_there(folder: Path) -> None:
    """Raises ModelNotFoundError for a folder without any of a tokenizer's files."""
    if not folder.is_dir():
        raise ModelNotFoundError(
            f"{shown(str(folder))} has no tokenizer.json, as it is no folder; to take the "
            'tokenizer of a model at the hub, run `hf download MODEL --include "tokenizer*"` and '
            "give the folder that it prints"
        )
    names = ("tokenizer.json", TEKKEN, "tokenizer.model", "vocab.json")
    if not any(has_file(folder / name) for name in names):
        raise ModelNotFoundError(
            f"{shown(str(folder))} has no {', '.join(names[:-1])} or {names[-1]}; set tokenizer to "
            "a folder that has one"
        )


def backend_from_transformers(folder: Path) -> tokenizers.Tokenizer:
    """What transformers makes of other files. Raises ModelNotFoundError, ModelLoadError."""
    check_tokenizer_is_there(folder)  # without any file transformers makes an empty tokenizer
    # Imported only for old formats: it takes over a second.
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(
            str(folder), use_fast=True, local_files_only=True, trust_remote_code=False
        )
    except BaseException as error:  # a converter may raise anything
        let_interrupts_through(error)
        raise ModelLoadError(
            f"{folder} has no tokenizer.json, and transformers cannot make one "
            f"from its other files: {reason_of(error)}"
        ) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelLoadError(f"{folder} has no tokenizer.json and no tokenizer to convert to one")
    return backend


def is_tekken(folder: Path) -> bool:
    """Whether its tokenizer is in Mistral's own form alone."""
    return has_file(folder / TEKKEN) and not has_file(folder / "tokenizer.json")


def read_special_tokens(folder: Path, known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Texts by name. A name in tokenizer_config.json overrides the other file, even with null, and
    both what is `known`.
    """
    found: dict[str, str | None] = dict(known or {})
    for file_name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / file_name
        config = read_json_if_any(path)
        found |= {n: _special_token(path, config, n) for n in SPECIAL_TOKEN_NAMES if n in config}
    return {name: text for name, text in found.items() if text is not None}


def read_chat_templates(folder: Path) -> dict[str, str]:
    """Templates by name. As in transformers, chat_template.jinja, with others in a folder beside
    it, overrides the other files; the processor of a model for images may have chat_template.json
    alone.
    """
    paths = {"default": folder / "chat_template.jinja"}
    paths |= {path.stem: path for path in sorted((folder / NAMED_TEMPLATES).glob("*.jinja"))}
    if files := {name: _template_in(path) for name, path in paths.items() if has_file(path)}:
        return files
    for name in ("tokenizer_config.json", "chat_template.json"):
        path = folder / name
        template = read_json_if_any(path).get("chat_template")
        if template is not None:
            break
    else:
        return {}
    if isinstance(template, str):
        return {"default": template}
    if isinstance(template, list):
        return _named_templates(path, template)
    raise CorruptModelError(
        f"{path}: 'chat_template' is {shown(template)}, neither a string nor a list"
    )


def chat_template_of(given: str) -> str:
    """The Jinja code that a setting gives, itself or as the path of a file.

    Raises ConfigError where there is no such file, ModelLoadError for one that cannot be read.
    """
    if "{{" in given or "{%" in given:
        return given
    path = path_of(given)
    if not has_file(path):
        raise ConfigError(
            f"chat_template: there is no file {shown(given)}; give the path of a file of Jinja "
            "code, or the code itself"
        )
    return _template_in(path)


def _template_in(path: Path) -> str:
    try:
        check_size(path)
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise CorruptModelError(f"{path} is no UTF-8 text: {error}") from error
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from error


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
