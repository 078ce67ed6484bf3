"""Grammars of structured outputs: which tokens may come next, by llguidance.

Knows forms and token ids; no requests, no logits. A form is compiled once and kept; each completion
has a state of its own.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection
from functools import cached_property
from typing import Any

from nanoengine.errors import InvalidParamsError, RequestError
from nanoengine.sampling_params import SamplingParams, StructuredOutputsParams
from nanoengine.text import template_worker
from nanoengine.text.closed_schemas import closed
from nanoengine.text.reasoning import ReasoningSyntax, reasoning_in
from nanoengine.text.schema_formats import readable
from nanoengine.text.template_process import WorkerProcess
from nanoengine.text.thinking import ThinkingMarks, ThinkingState, begins_open, tokens_within
from nanoengine.text.tokenizer import Tokenizer
from nanoengine.text.tokenizer_files import let_interrupts_through
from nanoengine.text.tools import WHITESPACE

MAX_CACHED = 1 << 20  # bytes of the forms whose grammars are kept
ENTRY = 16 << 10  # bytes that a small one counts for: its grammar takes more than its text
COMPILE_SECONDS = 3.0
CHANGED = ('"format"', '"pattern', '"properties"')  # what is not left as a schema has it
MAX_REASON = 300  # characters of llguidance's errors
NO_TEXT = "NoExtensionBias"  # llguidance's whole error about a form that no text fits
# Of one step, so that no grammar keeps other requests waiting; llguidance's defaults are higher.
LIMITS: dict[str, Any] = {
    "max_items_in_row": 1000,
    "step_lexer_fuel": 100_000,
    "max_lexer_states": 20_000,
}


class Grammars:
    """Compiles forms for one vocabulary. Any thread may call it."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        """vocab_size: of the logits; eos_token_ids: end a text where its grammar accepts that."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._num_tokens = max(vocab_size, tokenizer.vocab_size)
        self._eos_token_ids = sorted(eos_token_ids)
        self._process = WorkerProcess(COMPILE_SECONDS)
        self._lock = threading.Lock()  # guards the next two
        self._compiled: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._num_bytes = 0

    def has(self, form: StructuredOutputsParams) -> bool:
        """Whether a form is compiled, so that nobody waits for it."""
        with self._lock:
            return form.source in self._compiled

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
        return GrammarState(found.deep_copy(), self._vocab_size, frozenset(self._eos_token_ids))

    def state_for(self, params: SamplingParams, prompt: list[int]) -> GrammarState | ThinkingState:
        """A state for the text of a request that `is_held`. Raises InvalidParamsError."""
        form, budget, syntax = params.form, params.thinking_token_budget, self._reasoning
        held = None if form is None else self.state_of(form)
        if syntax is None and budget is not None:
            raise InvalidParamsError(
                "thinking_token_budget needs a model that thinks: this one's chat template shows "
                "no thoughts; max_tokens limits all of the text"
            )
        thinks_first = budget is not None or (form is not None and form.after_thinking)
        if syntax is None or not thinks_first:
            assert held is not None
            return held
        is_open = begins_open(syntax, self._tokenizer, prompt)
        return ThinkingState(self._marks, is_open, budget, held)

    @cached_property
    def _reasoning(self) -> ReasoningSyntax | None:
        return reasoning_in(self._tokenizer)

    @cached_property
    def _marks(self) -> ThinkingMarks:
        assert self._reasoning is not None
        vocabulary = self._vocab_size, self._num_tokens, self._eos_token_ids
        return ThinkingMarks.of(self._reasoning, self._tokenizer, *vocabulary)

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
        vocabulary = self._vocabulary
        from llguidance import LLMatcher, LLParserLimits

        kind, text = source
        try:
            if kind == "json" and any(key in text for key in CHANGED):
                text = json.dumps(closed(readable(json.loads(text))), ensure_ascii=False)
            grammar = self._tried(kind, text)
            limits = LLParserLimits(verbose_errors=False, **LIMITS)
            compiled = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
            compiled.deep_copy().compute_bitmask()  # the first one takes the longest
            error = compiled.get_error()
        except BaseException as refusal:
            let_interrupts_through(refusal)
            error = str(refusal)
        if error:
            raise InvalidParamsError(f"structured_outputs: {kind}: {_reason(error)}")
        return compiled

    def _tried(self, kind: str, text: str) -> str:
        """The form as llguidance reads it. Another process has compiled it once: there are small
        grammars that take minutes and gigabytes. Raises ValueError for a form that it refuses.
        """
        plain = text.replace("\\", "")  # a regular expression may escape what it is about
        is_forced = not any(special in plain for special in self._special_texts)
        content = [kind, text, WHITESPACE, is_forced, LIMITS, COMPILE_SECONDS]
        request = template_worker.encoded(json.dumps(content, ensure_ascii=False))
        try:
            found, answer = self._process.ask(template_worker.COMPILE, request)
        except TimeoutError as error:
            limit = f"{COMPILE_SECONDS:g} s"
            raise ValueError(f"not compiled within {limit}; make it simpler") from error
        except EOFError as error:
            raise ValueError(f"its compiler ended ({error}); make it simpler") from error
        if found == template_worker.NO_MEMORY:
            raise ValueError("it needs too much memory; make it simpler")
        if found != template_worker.TEXT:
            raise ValueError(answer)
        return answer

    @cached_property
    def _special_texts(self) -> list[str]:
        """Texts of special tokens, which a form may hold as any other."""
        backend = self._tokenizer.backend
        return [t for i in self._tokenizer.special_ids if (t := backend.id_to_token(i))]

    @cached_property
    def _vocabulary(self) -> Any:
        """llguidance's LLTokenizer, which takes up to a second to make."""
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise InvalidParamsError(
                "structured_outputs needs llguidance: pip install 'nanoengine[structured]'"
            ) from error
        try:
            return LLTokenizer(
                self._tokenizer.backend.to_str(),
                n_vocab=self._num_tokens,
                eos_token=self._eos_token_ids,
            )
        except ValueError as error:
            raise InvalidParamsError(
                f"structured_outputs does not work with this model's tokenizer: "
                f"{_reason(str(error))}"
            ) from error


class GrammarState:
    """Where one text stands in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """vocab_size, eos_token_ids: as of Grammars."""
        self._matcher, self._vocab_size = matcher, vocab_size
        self._eos_token_ids = eos_token_ids

    def accept(self, token_id: int) -> bool:
        """Go on by a token; True if the text is complete, so that nothing can follow. Raises
        RequestError if the token does not fit, or if the grammar has become too complex.
        """
        if self._matcher.is_error() or not self._matcher.consume_token(token_id):
            raise RequestError(
                f"the text cannot go on as structured_outputs asks: "
                f"{_reason(self._matcher.get_error())}"
            )
        return bool(self._matcher.is_stopped())

    def is_end(self, token_id: int) -> bool:
        """Whether a token that completes the text only ends it."""
        return token_id in self._eos_token_ids

    def masks(self, guesses: tuple[int, ...]) -> list[bytes]:
        """Which tokens may come next, and which after each guess, as far as guesses fit: bits of
        token ids, the lowest first. The state stays as it is.
        """
        matcher, made = self._matcher, [self._matcher.compute_bitmask()]
        if guesses:  # on a copy: `rollback` fails for special tokens (llguidance #364)
            matcher = matcher.deep_copy()
        for token_id in guesses:
            if not made[-1][token_id >> 3] >> (token_id & 7) & 1 or matcher.is_error():
                break
            matcher.consume_token(token_id)
            if matcher.is_stopped():
                break
            made.append(matcher.compute_bitmask())
        return made

    def forced(self) -> tuple[int, ...]:
        """Tokens of the bytes that alone may come next, cut as the tokenizer cuts them. The masks
        may allow other cuts, so these are guesses. The state stays as it is.
        """
        return tokens_within(self._vocab_size, self._matcher.compute_ff_tokens())


def _cost(source: tuple[str, str]) -> int:
    return ENTRY + len(source[1].encode())


def _reason(error: str) -> str:
    """llguidance's error on one line; in words where it is only the name of a state."""
    said = " ".join(error.replace("<non-verbose/>", "").split())[:MAX_REASON]
    return "no text fits it; what refers to itself needs another end" if said == NO_TEXT else said
