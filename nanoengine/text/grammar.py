"""Grammars of structured outputs: which tokens may come next, by llguidance.

Knows forms and token ids; no requests, no logits. A form is compiled once and kept; each completion
has a state of its own.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nanoengine.errors import InvalidParamsError, RequestError
from nanoengine.sampling_params import StructuredOutputsParams
from nanoengine.text.tokenizer import Tokenizer
from nanoengine.text.tokenizer_files import _let_interrupts_through

MAX_CACHED = 1 << 20  # bytes of the forms whose grammars are kept
ENTRY = 1 << 10  # bytes that a small one counts for
MAX_REASON = 300  # characters of llguidance's errors
# Between the parts of JSON; without a limit, a model can write spaces without end.
WHITESPACE = r"[ \n\t]{0,16}"
# Of one step, so that no grammar keeps other requests waiting; llguidance's defaults are higher.
LIMITS = {"max_items_in_row": 1000, "step_lexer_fuel": 100_000, "max_lexer_states": 50_000}


class Grammars:
    """Compiles forms for one vocabulary. Any thread may call it."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        """vocab_size: of the logits; eos_token_ids: end a text where its grammar accepts that."""
        self._tokenizer = tokenizer
        self._num_tokens = max(vocab_size, tokenizer.vocab_size)
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()  # guards the next two
        self._compiled: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._num_bytes = 0

    def state_of(self, form: StructuredOutputsParams) -> GrammarState:
        """A state at the beginning of a text. Raises InvalidParamsError if there is no such
        grammar, or none that is simple enough.
        """
        source = form.source
        with self._lock:
            found = self._compiled.get(source)
            if found is not None:
                self._compiled.move_to_end(source)
        if found is None:
            found = self._compile(source)
            self._keep(source, found)
        return GrammarState(found.deep_copy())

    def _keep(self, source: tuple[str, str], compiled: Any) -> None:
        with self._lock:
            if source in self._compiled:  # by another thread meanwhile
                return
            self._compiled[source] = compiled
            self._num_bytes += _cost(source)
            while self._num_bytes > MAX_CACHED:
                oldest, _ = self._compiled.popitem(last=False)
                self._num_bytes -= _cost(oldest)

    def _compile(self, source: tuple[str, str]) -> Any:
        library = self._library
        kind, text = source
        try:
            grammar = _grammar_of(library.matcher, kind, text)
            limits = library.limits(verbose_errors=False, **LIMITS)
            compiled = library.matcher(library.tokenizer, grammar, log_level=0, limits=limits)
            first = compiled.deep_copy()
            first.compute_bitmask()  # a grammar without a text is found here
            error = first.get_error()
        except BaseException as refusal:
            _let_interrupts_through(refusal)
            error = str(refusal) or type(refusal).__name__
        if error:
            raise InvalidParamsError(f"structured_outputs: {kind}: {_reason(error)}")
        return compiled

    @cached_property
    def _library(self) -> _Library:
        """llguidance with this vocabulary, which takes it up to a second to read."""
        try:
            from llguidance import LLMatcher, LLParserLimits, LLTokenizer
        except ImportError as error:
            raise InvalidParamsError(
                "structured_outputs needs llguidance: pip install 'nanoengine[structured]'"
            ) from error
        try:
            tokenizer = LLTokenizer(
                self._tokenizer.backend.to_str(),
                n_vocab=self._num_tokens,
                eos_token=self._eos_token_ids,
            )
        except ValueError as error:
            raise InvalidParamsError(
                f"structured_outputs does not work with this model's tokenizer: "
                f"{_reason(str(error))}"
            ) from error
        return _Library(LLMatcher, LLParserLimits, tokenizer)


class GrammarState:
    """Where one text stands in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def accept(self, token_id: int) -> bool:
        """Go on by a token; True if the text is complete, so that nothing can follow. Raises
        RequestError if the token does not fit, or if the grammar has become too complex.
        """
        if self._matcher.is_error() or not self._matcher.consume_token(token_id):
            raise RequestError(
                f"the text cannot go on in the form of structured_outputs: "
                f"{_reason(self._matcher.get_error())}"
            )
        return bool(self._matcher.is_stopped())

    def masks(self, guesses: tuple[int, ...]) -> list[bytes]:
        """Which tokens may come next, and which after each guess, as far as guesses fit: bits of
        token ids, the lowest first. The state stays as it is.
        """
        matcher, made, taken = self._matcher, [self._matcher.compute_bitmask()], 0
        for token_id in guesses:
            if not made[-1][token_id >> 3] >> (token_id & 7) & 1 or matcher.is_error():
                break
            taken += matcher.consume_token(token_id)
            if matcher.is_stopped():
                break
            made.append(matcher.compute_bitmask())
        if taken and not matcher.is_error():
            matcher.rollback(taken)
        return made


@dataclass(frozen=True, slots=True)
class _Library:
    """Classes of llguidance, and its view of the vocabulary."""

    matcher: Any
    limits: Any
    tokenizer: Any


def _grammar_of(matcher: Any, kind: str, text: str) -> str:
    """The form as llguidance reads it; raises anything for one that it cannot read."""
    match kind:
        case "json" | "json_object":
            made: str = matcher.grammar_from_json_schema(
                text or '{"type":"object"}',
                overrides={"whitespace_pattern": WHITESPACE, "lenient": False},
            )
            return made
        case "regex":
            return str(matcher.grammar_from_regex(text))
        case "choice":
            text = "start: " + " | ".join(map(_literal, json.loads(text)))
        case "grammar" if "::=" in text:
            from llguidance.gbnf_to_lark import any_to_lark

            text = any_to_lark(text)
    return str(matcher.grammar_from_lark(text))


def _literal(text: str) -> str:
    """A text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


def _cost(source: tuple[str, str]) -> int:
    return ENTRY + len(source[1].encode())


def _reason(error: str) -> str:
    """llguidance's error on one line."""
    return " ".join(error.replace("<non-verbose/>", "").split())[:MAX_REASON]
