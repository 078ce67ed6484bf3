"""Parameters of one request: SamplingParams and BeamSearchParams, validated when made, and the form
that a text must have: StructuredOutputsParams.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import FrozenInstanceError, dataclass, replace
from json import dumps, loads
from typing import Any, TypeVar

import xxhash

from nanoengine.errors import (
    MAX_COUNT,
    SEEDS,
    InvalidParamsError,
    ends_at_the_user,
    integer,
    number,
    shown,
)
from nanoengine.text.known_names import PARAMETER, explains_unknown

Params = TypeVar("Params")

MAX_STOPS = 64
MAX_LOGPROBS = 20
MAX_BIAS = 100.0
MAX_COMPLETIONS = 1024
MAX_BEAM_WIDTH = 128
MAX_FORM = 64 << 10  # bytes of a schema, a grammar, ...
MAX_CHOICES = 4096
FORMS = ("json", "regex", "choice", "grammar", "json_object")
# In this range, logits divided or multiplied by a penalty stay finite in fp32.
PENALTIES = (0.01, 100.0)
FLAGS = ("ignore_eos", "skip_special_tokens", "detokenize", "include_stop_str_in_output")
GREEDY_BELOW = 1e-5
MIN_TEMPERATURE = 0.01


# vLLM's names, the values that they may have in a beam search, and why no others.
OF_BEAMS: dict[str, tuple[object, str]] = {
    "temperature": (0, "beam search draws no tokens; leave it out, or use generate()"),
    "include_stop_str_in_output": (False, "token_ids hold the token that ended a text"),
    "structured_outputs": (None, "beam search takes no constraints; use generate()"),
}


def _explained(
    own: Mapping[str, tuple[object, str]] | None = None,
) -> Callable[[type[Params]], type[Params]]:
    """Decorate a class: a field that it does not have is an error in words, and so is a change.
    own: as in explains_unknown.
    """

    def decorate(kind: type[Params]) -> type[Params]:
        init = explains_unknown(PARAMETER, f" of {kind.__name__}", own)(kind.__init__)
        # The same, with words for an error.
        kind.__init__ = ends_at_the_user(init)  # type: ignore[method-assign]
        kind.__setattr__ = _stays  # type: ignore[method-assign]
        return kind

    return decorate


def _stays(self: object, name: str, value: object) -> None:
    raise FrozenInstanceError(
        f"a {type(self).__name__} stays as it is made; a changed one is "
        f"dataclasses.replace(params, {name}={shown(value)})"
    )


@_explained()
@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """The form that a text must have, with vLLM's names; exactly one of these. Up to 64 KiB.

    json: a JSON schema, as a dict or as its text; the text is one line of JSON after that.
    regex: a regular expression for the whole text. choice: texts, one of which it must be.
    grammar: a context-free grammar, in llguidance's Lark or in llama.cpp's GBNF.
    json_object: True for any JSON object.
    after_thinking: a model that thinks may do so first; then the form is that of what follows.

    Raises InvalidParamsError for another value. What the grammar of a form means, llguidance says
    when a request is queued.
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    after_thinking: bool = False

    def __post_init__(self) -> None:
        for name in ("json_object", "after_thinking"):
            _flag(name, getattr(self, name))
        given = [name for name in FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise InvalidParamsError(
                f"structured_outputs takes exactly one of {', '.join(FORMS)}, got "
                + (" and ".join(given) or "none")
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            if text is not None and not (isinstance(text, str) and text):
                raise InvalidParamsError(
                    f"structured_outputs: {name} must be a text that is not empty, got "
                    f"{shown(text)}"
                )
        self._check_size()

    def _check_size(self) -> None:
        try:
            size = len(self.source[1].encode())
        except UnicodeEncodeError as error:
            raise InvalidParamsError(
                "structured_outputs holds a lone surrogate, which no text of a model can hold"
            ) from error
        if size > MAX_FORM:
            raise InvalidParamsError(
                f"structured_outputs has {size} bytes, and may have {MAX_FORM}; make it smaller, "
                "or check the text afterwards"
            )

    @property
    def source(self) -> tuple[str, str]:
        """Which form it is, and its text: of choices, a list in JSON; "" of json_object."""
        name = next(name for name in FORMS if getattr(self, name) not in (None, False))
        value = getattr(self, name)
        if name == "choice":
            return name, dumps(value, ensure_ascii=False)
        return name, value if isinstance(value, str) else ""


@_explained()
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next tokens of one request, with vLLM's names and defaults.

    temperature: 0 is greedy, 1 the model's own distribution, at most 100. Values below 0.00001
    count as 0, other values below 0.01 as 0.01.
    top_k: keep the k most likely tokens (0 or -1: all).
    top_p: keep the smallest set of tokens whose probability reaches top_p, in (0, 1].
    min_p: drop tokens less likely than min_p times the likeliest, in [0, 1].
    seed: makes sampling depend on (seed, position) only; None or -1: derived from the engine's
    seed. It must fit 64 bits, signed or unsigned.
    stop: a string or up to 64 that end the text (not part of it); stop_token_ids: ids that end it.
    ignore_eos: go on past the model's end-of-sequence tokens.
    max_tokens: most tokens to generate (None: as many as the context holds).
    min_tokens: before this many tokens, neither end-of-sequence nor stops end the text.
    skip_special_tokens: leave special tokens out of the text.
    repetition_penalty: divide positive logits of tokens in prompt or output by it, multiply
    negative ones (arXiv 1909.05858); in [0.01, 100], 1 is off.
    presence_penalty, frequency_penalty: subtracted from the logits of tokens in the output, once,
    or for each occurrence; in [-2, 2].
    logit_bias: {token id: number added to its logit, from -100 to 100}; an id may be a string of
    digits, as in JSON.
    allowed_token_ids: only these may be chosen. bad_words: up to 64 strings that are not output in
    the tokens that write them alone or after a space; other tokens may spell the same.
    logprobs, prompt_logprobs: return the log-probability and rank, in the model's own distribution,
    of each token of the output, or of the prompt after its first, and of this many of the likeliest
    tokens (0 to 20; None: nothing).
    n: independent completions of the prompt, up to 1024, which share its KV; with a seed,
    completion i uses seed + i.
    detokenize: False leaves the text empty. include_stop_str_in_output: keep the stop in the text.
    structured_outputs: the form that the text must have, a StructuredOutputsParams or a dict of its
    fields. A text that can go on no further ends with "stop".
    thinking_token_budget: most tokens of a thinking model's thoughts; then they are ended by what
    it ends them with. None or -1: no limit.

    Raises InvalidParamsError for a value out of range, and for an unknown name: it says what names
    of other engines are here.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | tuple[str, ...] | list[str] | None = None
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    skip_special_tokens: bool = True
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = None
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    bad_words: tuple[str, ...] | list[str] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    detokenize: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    thinking_token_budget: int | None = None

    def __post_init__(self) -> None:
        self._set("temperature", _number("temperature", self.temperature, 0.0, 100.0))
        self._set("top_p", _number("top_p", self.top_p, 0.0, 1.0))
        if self.top_p == 0.0:
            raise InvalidParamsError("top_p must be in (0, 1], got 0; use temperature=0 for greedy")
        self._set("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        self._set("top_k", _integer("top_k", self.top_k, -1, MAX_COUNT))
        self._set("min_tokens", _integer("min_tokens", self.min_tokens, 0, MAX_COUNT))
        self._set("n", _integer("n", self.n, 1, MAX_COMPLETIONS))
        if self.max_tokens is not None:
            self._set("max_tokens", _integer("max_tokens", self.max_tokens, 1, MAX_COUNT))
            if self.min_tokens > self.max_tokens:
                raise InvalidParamsError(
                    f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})"
                )
        name = "thinking_token_budget"
        if self.thinking_token_budget is not None:
            budget = _integer(name, self.thinking_token_budget, -1, MAX_COUNT)
            self._set(name, None if budget == -1 else budget)  # as for vLLM
        if self.seed is not None:
            seed = _integer("seed", self.seed, *SEEDS)
            self._set("seed", None if seed == -1 else seed)  # as for vLLM, llama.cpp and Ollama
        self._check_adjustments()
        for name in FLAGS:
            _flag(name, getattr(self, name))
        self._set("structured_outputs", _form(self.structured_outputs))
        self._set("stop", _texts("stop", self.stop))
        self._set("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        if self.stop and not self.detokenize:
            raise InvalidParamsError("stop strings are searched in the text: set detokenize=True")
        if 0 < self.temperature < MIN_TEMPERATURE:
            self._set("temperature", 0.0 if self.temperature < GREEDY_BELOW else MIN_TEMPERATURE)
        if self.greedy and self.n > 1:
            raise InvalidParamsError(
                f"n={self.n} greedy completions would all be the same; raise temperature above 0"
            )

    def _check_adjustments(self) -> None:
        name, hint = "repetition_penalty", "; 1 is off"
        self._set(name, _number(name, self.repetition_penalty, *PENALTIES, hint))
        for name in ("presence_penalty", "frequency_penalty"):
            self._set(name, _number(name, getattr(self, name), -2.0, 2.0))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._set(name, _integer(name, getattr(self, name), 0, MAX_LOGPROBS))
        self._set("logit_bias", _biases(self.logit_bias))
        self._set("bad_words", _texts("bad_words", self.bad_words))
        if self.allowed_token_ids is not None:
            allowed = _ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise InvalidParamsError(
                    "allowed_token_ids is empty: no token could be chosen; leave it out or name one"
                )
            self._set("allowed_token_ids", allowed)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def for_completion(self, index: int) -> SamplingParams:
        """The parameters of completion `index` of n: the first one scores the prompt for all, and
        each has a seed of its own.
        """
        if not index:
            return self
        made = copy(self)  # all of it was checked, and may be long
        if self.seed is not None:
            made._set("seed", (self.seed + index) % (1 << 64))
        made._set("prompt_logprobs", None)
        return made

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is always chosen."""
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, empty when there is none."""
        return self.stop  # type: ignore[return-value]  # normalised in __post_init__

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids` as a tuple, empty when there is none."""
        return self.stop_token_ids  # type: ignore[return-value]  # normalised in __post_init__

    @property
    def forbidden_words(self) -> tuple[str, ...]:
        """`bad_words` as a tuple, empty when there are none."""
        return self.bad_words  # type: ignore[return-value]  # normalised in __post_init__

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs, empty when there are none."""
        return self.logit_bias  # type: ignore[return-value]  # normalised in __post_init__

    @property
    def form(self) -> StructuredOutputsParams | None:
        """`structured_outputs` as a record."""
        return self.structured_outputs  # type: ignore[return-value]  # normalised in __post_init__

    @property
    def is_held(self) -> bool:
        """True if a grammar says which tokens may come."""
        return self.form is not None or self.thinking_token_budget is not None

    @property
    def named_ids(self) -> dict[str, tuple[int, ...]]:
        """Token ids in these parameters, by the name of the parameter."""
        return {
            "stop_token_ids": self.stop_ids,
            "logit_bias": tuple(token_id for token_id, _ in self.biases),
            "allowed_token_ids": tuple(self.allowed_token_ids or ()),
        }

    @property
    def penalizes(self) -> bool:
        """True if a token's logit depends on whether it occurred before."""
        penalties = self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty
        return any(penalties)

    @property
    def follows_history(self) -> bool:
        """True if the choice of a token depends on earlier tokens other than through the model."""
        return self.penalizes or bool(self.bad_words)


@_explained(OF_BEAMS)
@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """How LLM.beam_search searches, with vLLM's names.

    beam_width: beams kept in each step, and texts returned. max_tokens: most tokens of a text.
    length_penalty: a text's score is the sum of its log-probabilities divided by its length to this
    power: above 0 favours long texts, below 0 short ones, 0 compares the sums.
    early_stopping: True ends the search when beam_width texts have ended; False goes on while the
    best beam, at its present length, would beat the worst of them; "never" ends it only when no
    beam can score better at any length.
    ignore_eos: go on past the model's end-of-sequence tokens.
    vLLM's temperature=0 and include_stop_str_in_output=False change nothing, and may be there.

    Raises InvalidParamsError for a value out of range.
    """

    beam_width: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        made = {
            "beam_width": _integer("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH),
            "max_tokens": _integer("max_tokens", self.max_tokens, 1, MAX_COUNT),
            "length_penalty": _number("length_penalty", self.length_penalty, -10.0, 10.0),
        }
        for name, value in made.items():
            object.__setattr__(self, name, value)
        ends = self.early_stopping
        if not isinstance(ends, bool) and not (isinstance(ends, str) and ends == "never"):
            raise InvalidParamsError(
                f'early_stopping must be True, False or "never", got {shown(ends)}'
            )
        _flag("ignore_eos", self.ignore_eos)


def _form(form: object) -> StructuredOutputsParams | None:
    if form is None or isinstance(form, StructuredOutputsParams):
        return form
    if not isinstance(form, Mapping) or not all(isinstance(name, str) for name in form):
        raise InvalidParamsError(
            "structured_outputs must be a StructuredOutputsParams, or a dict of its fields, got "
            + shown(form)
        )
    return StructuredOutputsParams(**form)


def _schema(schema: object) -> str:
    """A JSON schema as one line of JSON."""
    if not isinstance(schema, Mapping | str):
        raise InvalidParamsError(
            "structured_outputs: json must be a JSON schema, as a dict or as text (of a pydantic "
            f"model: Model.model_json_schema()), got {shown(schema)}"
        )
    try:
        read = loads(schema) if isinstance(schema, str) else dict(schema)
        if not isinstance(read, dict):
            raise ValueError(f"{shown(read)} is no object")
        return dumps(read, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise InvalidParamsError(f"structured_outputs: json is no JSON schema: {reason}") from error


def _choices(choices: object) -> tuple[str, ...]:
    texts = tuple(choices) if isinstance(choices, tuple | list) else ()
    if not 0 < len(texts) <= MAX_CHOICES or not all(isinstance(t, str) and t for t in texts):
        raise InvalidParamsError(
            f"structured_outputs: choice must be a list of 1 to {MAX_CHOICES} texts that are not "
            f"empty, got {shown(choices)}"
        )
    return texts


def seeded(params: SamplingParams, engine_seed: int, name: str) -> SamplingParams:
    """The parameters as they are, or, without a seed, with one made of the engine's and of a name,
    so that the request of this name has the same seed in every run, order and process.
    """
    if params.seed is not None:
        return params
    told = f"{engine_seed}:{name}".encode("utf-8", "replace")
    return replace(params, seed=xxhash.xxh3_64_intdigest(told))


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidParamsError(f"{name} must be True or False, got {shown(value)}")


def _number(name: str, value: object, low: float, high: float, hint: str = "") -> float:
    found = number(value)
    if found is None:
        raise InvalidParamsError(f"{name} must be a finite number, got {shown(value)}")
    if not low <= found <= high:
        raise InvalidParamsError(
            f"{name} must be between {low:g} and {high:g}{hint}, got {shown(found)}"
        )
    return found


def _integer(name: str, value: object, low: int, high: int) -> int:
    found = integer(value)
    if found is None:
        raise InvalidParamsError(f"{name} must be an integer, got {shown(value)}")
    if not low <= found <= high:
        raise InvalidParamsError(f"{name} must be between {low} and {high}, got {shown(found)}")
    return found


def _texts(name: str, value: object) -> tuple[str, ...]:
    texts = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(texts, tuple | list) or not all(isinstance(s, str) and s for s in texts):
        raise InvalidParamsError(
            f"{name} must be a non-empty string or a list of them, got {shown(value)}"
        )
    if any(not _is_unicode(text) for text in texts):
        raise InvalidParamsError(
            f"{name} holds a lone surrogate, which no text of a model can hold; leave it out"
        )
    if len(texts) > MAX_STOPS:
        raise InvalidParamsError(f"{name}: at most {MAX_STOPS} strings, got {len(texts)}")
    return tuple(texts)


def _is_unicode(text: str) -> bool:
    """Whether it has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _ids(name: str, ids: object) -> tuple[int, ...]:
    if ids is None:
        return ()
    if not isinstance(ids, tuple | list):
        raise InvalidParamsError(f"{name} must be a list of token ids, got {shown(ids)}")
    checked = (_integer(f"{name}[{i}]", each, 0, MAX_COUNT) for i, each in enumerate(ids))
    return tuple(dict.fromkeys(checked))


def _biases(biases: object) -> tuple[tuple[int, float], ...]:
    if biases is None:
        return ()
    if not isinstance(biases, Mapping | tuple | list):
        raise _no_biases(biases)
    made: dict[int, float] = {}
    for pair in biases.items() if isinstance(biases, Mapping) else biases:
        try:
            key, value = pair
        except (TypeError, ValueError) as error:
            raise _no_biases(biases) from error
        if isinstance(key, str) and re.fullmatch("[0-9]{1,10}", key):
            key = int(key)  # keys of JSON objects are always strings
        if integer(key) is None:
            raise _no_biases(biases)
        token_id = _integer("logit_bias", key, 0, MAX_COUNT)
        if token_id in made:
            raise InvalidParamsError(f"logit_bias names token {token_id} twice")
        made[token_id] = _number(f"logit_bias of token {token_id}", value, -MAX_BIAS, MAX_BIAS)
    return tuple(made.items())


def _no_biases(value: object) -> InvalidParamsError:
    return InvalidParamsError(
        f"logit_bias must be a dict from token ids to numbers, got {shown(value)}"
    )
