"""Checks a prompt and its parameters and makes their Sequences, or raises an error with the limit,
the value and the next step. Knows no steps, and of KV only its shape.
"""

from __future__ import annotations

import operator
import time
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import count

import xxhash

from nanoengine.config.engine import EngineConfig
from nanoengine.engine.draft_length import EngineDrafts, PayingDrafts
from nanoengine.engine.speculative import PromptLookup
from nanoengine.errors import InvalidParamsError, InvalidPromptError, PromptTooLongError, shown
from nanoengine.loading.generation_config import read_sampling_params
from nanoengine.outputs import RequestMetrics
from nanoengine.sampling_params import SamplingParams
from nanoengine.sequence import Grammars, Request, Sequence, SequenceOutput, TokenHistory
from nanoengine.startup.parts import Parts
from nanoengine.startup.plan import MemoryPlan
from nanoengine.text.detokenizer import IncrementalDetokenizer
from nanoengine.text.tokenizer import Tokenizer


class InputProcessor:
    """Makes the sequences of requests. Ids count up and are never reused."""

    def __init__(self, config: EngineConfig, plan: MemoryPlan, parts: Parts) -> None:
        self._config = config
        self._drafts = EngineDrafts()
        self._plan = plan
        self._model_config = parts.model.config
        self._tokenizer = parts.tokenizer
        self._folder = parts.folder
        self.default_params = parts.default_params  # of requests without parameters
        self.next_id = count().__next__  # of a new sequence

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises InvalidPromptError if it has none."""
        if self._tokenizer is None:
            raise InvalidPromptError(
                "the model came without a tokenizer; give token ids, or set tokenizer to a folder "
                "that has one"
            )
        return self._tokenizer

    def model_sampling_params(self, unsaid: SamplingParams | None = None) -> SamplingParams:
        """Those of the model, see read_sampling_params. Raises CorruptModelError."""
        return read_sampling_params(self._folder, unsaid)

    @cached_property
    def grammars(self) -> Grammars:
        """Of structured outputs. Raises InvalidParamsError without a tokenizer."""
        from nanoengine.text import grammar  # structured output is no part of the core

        config, tokenizer = self._model_config, self._tokenizer_for("structured_outputs")
        return grammar.Grammars(tokenizer, config.vocab_size, config.eos_token_ids)

    def _tokenizer_for(self, parameter: str) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidParamsError(
                f"{parameter} needs a tokenizer, and the model came without one; set tokenizer to "
                "a folder that has one, or leave it out"
            )
        return self._tokenizer

    def sequences(
        self,
        prompt: str | list[int],
        params: SamplingParams | None,
        prompt_text: str | None,
        cache_salt: str | None,
        is_streamed: bool = False,
        num_candidates: int = 0,
    ) -> list[Sequence]:
        """The sequences of a request's completions; the first one owns the prompt.

        is_streamed: text is needed while it is generated. num_candidates: of a beam, see
        sequence.Request. Raises InvalidPromptError, InvalidParamsError or PromptTooLongError.
        """
        if params is None:
            params = self.default_params
        if not isinstance(params, SamplingParams):
            raise InvalidParamsError(f"expected SamplingParams, got {type(params).__name__}")
        token_ids = self.encode(prompt) if isinstance(prompt, str) else self._checked_ids(prompt)
        eos = () if params.ignore_eos else self._model_config.eos_token_ids
        request = Request(
            params=params,
            seed=0,  # each sequence gets one of its own
            stop_token_ids=frozenset(params.stop_ids) | frozenset(eos),
            max_total_tokens=self._check_length(len(token_ids), params),
            prompt=prompt if isinstance(prompt, str) else prompt_text,
            cache_salt=_checked_salt(cache_salt),
            bad_words=self._bad_words(params),
            num_candidates=num_candidates,
        )
        self._check_choice(request)
        seqs: list[Sequence] = []
        for index in range(params.n):
            own = replace(request, params=params.for_completion(index), index=index)
            seqs.append(self._sequence(own, token_ids, is_streamed, seqs[0] if seqs else None))
        return seqs

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt; any thread may call it. Raises InvalidPromptError when there are
        none, PromptTooLongError when they are surely too many.
        """
        return self._checked_ids(self.tokenizer.encode_within(self._plan.max_model_len, text))

    def _sequence(
        self, request: Request, token_ids: list[int], is_streamed: bool, owner: Sequence | None
    ) -> Sequence:
        """The sequence of one completion. owner: that of the first one, which owns the prompt."""
        seq_id, params, config = self.next_id(), request.params, self._config
        counts = config.num_guesses, config.most_drafts, config.num_mtp
        can_go_back = counts != (0, 0, 0) or not self._model_config.recurrent_layers
        may_guess = can_go_back and not request.num_candidates
        guesses, drafts, mtp = counts if may_guess else (0, 0, 0)
        seed = self._request_seed(seq_id) if params.seed is None else params.seed
        return Sequence(
            seq_id=seq_id,
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            request=replace(request, seed=seed),
            metrics=RequestMetrics(time.perf_counter()),
            prompt_owner=owner,
            may_guess=may_guess,
            guesser=PromptLookup() if guesses else None,
            draft_length=PayingDrafts(drafts, self._drafts) if drafts else None,
            mtp_length=PayingDrafts(mtp, self._drafts) if mtp else None,
            history=_history(token_ids, owner) if params.penalizes else None,
            grammar=self.grammars.state_for(params, token_ids) if params.is_held else None,
            output=SequenceOutput(text_stream=self._text_stream(params, is_streamed, token_ids)),
        )

    def _text_stream(
        self, params: SamplingParams, is_streamed: bool, prompt: list[int]
    ) -> IncrementalDetokenizer | None:
        """For a completion whose text is needed while it is generated."""
        wants_text = params.stop_strings or (is_streamed and self._tokenizer is not None)
        if not (wants_text and params.detokenize):
            return None
        tokenizer = self._tokenizer_for("stop")
        return IncrementalDetokenizer(tokenizer, params.skip_special_tokens, prompt)

    def _checked_ids(self, prompt: object) -> list[int]:
        vocab = self._model_config.vocab_size
        if not isinstance(prompt, list | tuple):
            raise InvalidPromptError(
                f"a prompt is text or a list of token ids, got {type(prompt).__name__}"
            )
        if not prompt:
            raise InvalidPromptError("the prompt is empty: at least one token is needed")
        for token_id in (ids := [_token_id(each) for each in prompt]):
            if not 0 <= token_id < vocab:
                raise InvalidPromptError(
                    f"token id {shown(token_id)} is outside the vocabulary of {vocab} tokens"
                )
        return ids

    def _check_length(self, num_prompt: int, params: SamplingParams) -> int:
        """Most tokens of prompt and output; at max_model_len generation ends with "length"."""
        limit = self._plan.max_model_len
        if num_prompt >= limit:
            raise PromptTooLongError(
                f"the prompt has {num_prompt} tokens and needs room for at least one more, but the "
                f"limit is {limit} ({self._plan.max_model_len_bound}); "
                f"{self._how_to_raise(num_prompt, params.max_tokens or 1)}"
            )
        most = (self._config.max_model_len or self._model_config.max_position) - num_prompt
        if params.max_tokens is None:
            return limit
        advice = self._plan.how_to_hold
        self._plan.kv.check_fits(num_prompt, min(params.max_tokens, most), advice)
        return min(limit, num_prompt + params.max_tokens)

    def check_room(self, num_prompt: int, max_tokens: int) -> None:
        """Raise PromptTooLongError if prompt and answer are longer than max_model_len."""
        plan, asked = self._plan, num_prompt + max_tokens
        if asked > plan.max_model_len:
            raise PromptTooLongError(
                f"prompt and answer may have {num_prompt} + {max_tokens} = {asked} tokens, but the "
                f"limit is {plan.max_model_len} ({plan.max_model_len_bound}); "
                f"{self._how_to_raise(num_prompt, max_tokens)}, or ask for less"
            )

    def _check_choice(self, request: Request) -> None:
        """Raise InvalidParamsError for ids outside the vocabulary, or if no token may be chosen."""
        params, vocab = request.params, self._model_config.vocab_size
        for name, ids in params.named_ids.items():
            for token_id in ids:
                if token_id >= vocab:
                    raise InvalidParamsError(
                        f"{name}: token id {token_id} is outside the vocabulary of {vocab} tokens"
                    )
        given = params.allowed_token_ids
        words = (word for word in request.bad_words if not given or {*given}.issuperset(word))
        banned = {word[-1] for word in words}
        banned |= request.stop_token_ids if params.min_tokens else set()
        if banned.issuperset(given or range(vocab)):
            what = f"allowed_token_ids {shown([*given])}" if given else f"the {vocab} tokens"
            raise InvalidParamsError(
                f"bad_words and, up to min_tokens={params.min_tokens}, stop tokens may forbid all "
                f"of {what}: no token could be chosen; forbid fewer"
            )

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """The tokens of each word, both at the beginning of a text and after a space; not of one
        with a token that only the tokenizer has.
        """
        given = [word.lstrip(" ") or word for word in params.forbidden_words]
        if not given:
            return ()
        tokenizer = self._tokenizer_for("bad_words")
        texts = [space + word for word in given for space in ("", " ")]
        words = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        vocab = self._model_config.vocab_size
        return tuple(dict.fromkeys(word for word in words if word and max(word) < vocab))

    def _how_to_raise(self, num_prompt: int, max_tokens: int) -> str:
        """How such a request fits, as text."""
        positions = self._model_config.max_position
        if self._plan.max_model_len >= positions:
            return "the model cannot read more; shorten the prompt"
        if self._config.max_model_len is not None:
            return f"raise max_model_len (the model has {positions} positions)"
        if num_prompt < positions:
            return self._plan.how_to_hold(min(num_prompt + max_tokens, positions))
        return f"the model itself has {positions} positions; shorten the prompt"

    def _request_seed(self, seq_id: int) -> int:
        return xxhash.xxh3_64_intdigest(f"{self._config.seed}:{seq_id}".encode())


def _history(prompt: list[int], owner: Sequence | None) -> TokenHistory:
    """A new one; completions of one prompt share its tokens."""
    shared = None if owner is None else owner.history
    return TokenHistory(frozenset(prompt) if shared is None else shared.prompt)


def _checked_salt(salt: object) -> str:
    if salt is None:
        return ""
    with suppress(UnicodeEncodeError):  # half of a surrogate pair
        if isinstance(salt, str) and salt.encode():
            return salt
    raise InvalidPromptError(f"cache_salt must be a non-empty string of Unicode, got {shown(salt)}")


def _token_id(value: object) -> int:
    """The int of an integer of any type, numpy's and PyTorch's too. Raises InvalidPromptError."""
    if type(value) is int:
        return value
    if not isinstance(value, bool):
        with suppress(TypeError):
            return operator.index(value)  # type: ignore[arg-type]
    raise InvalidPromptError(f"a prompt holds {shown(value)}, which is no token id")
