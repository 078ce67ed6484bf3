"""Beam search: finds the most probable texts, a token at a time.

Owns the finished texts and the live beams; the engine runs each live beam as a sequence that pauses
after each token. A beam with several continuations is forked, and the forks share its KV.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import nlargest
from typing import Any, Self

from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.errors import InvalidParamsError, RequestError
from nanoengine.outputs import BeamSearchOutput, BeamSearchSequence
from nanoengine.sampling_params import BeamSearchParams, SamplingParams
from nanoengine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class _Beam:
    """A live beam: its sequence, and the sum of its tokens' log-probabilities."""

    seq: Sequence
    logprob: float


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A beam, its next token, and the sum of log-probabilities with that token."""

    logprob: float
    parent: _Beam
    token_id: int

    @property
    def token_ids(self) -> list[int]:
        """Its tokens: the parent's last token, which greedy decoding chose, is replaced."""
        return [*self.parent.seq.token_ids[:-1], self.token_id]


class BeamSearch:
    """The search over one prompt, as transformers' `generate(num_beams=W)` does it (5.x,
    `GenerationMixin._beam_search`): the same ids, order and scores.

    Each step ranks the candidates of all live beams. Of the best W, those that end the text are
    kept if they score better than kept ones; the best W that do not end it go on. After the last
    token all of the best W count as ended.
    """

    def __init__(
        self,
        engine: LLMEngine,
        first: Sequence,
        params: BeamSearchParams,
        eos_token_ids: frozenset[int],
    ) -> None:
        """first: the sequence of the prompt, which BeamSearches has queued."""
        self._engine = engine
        self._params = params
        self._eos_token_ids = eos_token_ids
        self._num_prompt = first.num_prompt_tokens
        self._max_tokens = first.request.max_total_tokens - first.num_prompt_tokens
        self._prompt = first.request.prompt
        self._prompt_token_ids = list(first.token_ids)
        self._live = [_Beam(first, 0.0)]
        self._ended: list[BeamSearchSequence] = []
        self._error: RequestError | None = None

    @property
    def is_finished(self) -> bool:
        """True when no beam is live."""
        return not self._live

    @property
    def output(self) -> BeamSearchOutput:
        """The texts found, or the error of the search."""
        found = [] if self._error else self._ended
        return BeamSearchOutput(self._prompt, self._prompt_token_ids, found, self._error)

    def advance(self) -> None:
        """Call after each engine step: when every live beam has its token, choose the next ones."""
        errors = (beam.seq.output.error for beam in self._live)
        self._error = next(filter(None, errors), None)
        if self._error is not None:
            self.close()
        elif all(beam.seq.output.scores for beam in self._live):
            self._choose()
        else:
            self._forget_owners(self._live)

    def close(self) -> None:
        """Free what the live beams hold; closing twice is fine."""
        self._end(self._live)
        self._live = []

    def _choose(self) -> None:
        width, parents = self._params.beam_width, self._live
        self._engine.outputs.count(len(parents))
        ranked = nlargest(
            parents[0].seq.request.num_candidates,
            (
                _Candidate(beam.logprob + logprob, beam, token_id)
                for beam in parents
                for token_id, logprob in beam.seq.output.scores.pop().likeliest
            ),
            key=lambda candidate: candidate.logprob,
        )
        num_tokens = parents[0].seq.num_tokens - self._num_prompt
        is_last = num_tokens == self._max_tokens
        for candidate in ranked[:width]:
            if is_last or candidate.token_id in self._eos_token_ids:
                self._ended.append(self._hypothesis(candidate, num_tokens))
        self._ended = nlargest(width, self._ended, key=lambda sequence: sequence.score)
        best = [c for c in ranked if c.token_id not in self._eos_token_ids][:width]
        if is_last or self._is_settled(best[0].logprob, num_tokens):
            self.close()
        else:
            self._go_on(best)

    def _hypothesis(self, candidate: _Candidate, num_tokens: int) -> BeamSearchSequence:
        ids, start = candidate.token_ids, self._num_prompt
        token_ids = ids[start:]
        is_stopped = candidate.token_id in self._eos_token_ids
        return BeamSearchSequence(
            self._engine.outputs.text_after(
                ids[:start], ids[start:-1] if is_stopped else token_ids
            ),
            token_ids,
            self._score(candidate.logprob, num_tokens),
            candidate.logprob,
            "stop" if is_stopped else "length",
        )

    def _score(self, logprob: float, num_tokens: int) -> float:
        return float(logprob / num_tokens**self._params.length_penalty)

    def _is_settled(self, best: float, num_tokens: int) -> bool:
        """True when enough texts have ended and, by transformers' estimate, no live beam can score
        better. best: the largest sum of log-probabilities of a live beam.
        """
        if len(self._ended) < self._params.beam_width:
            return False
        early = self._params.early_stopping
        if early == "never" and self._params.length_penalty > 0:
            num_tokens = self._max_tokens  # the best score that a negative sum can still get
        return early is True or self._score(best, num_tokens) <= self._ended[-1].score

    def _go_on(self, candidates: list[_Candidate]) -> None:
        """A beam's first candidate keeps its sequence, others fork it; beams without one end."""
        chosen: dict[int, _Beam] = {}
        live: list[_Beam] = []
        for candidate in candidates:
            seq, token_id = candidate.parent.seq, candidate.token_id
            if seq.seq_id in chosen:
                fork = seq.fork(self._engine.inputs.next_id(), token_id)
                live.append(_Beam(fork, candidate.logprob))
            else:
                seq.token_ids[-1] = token_id
                live.append(_Beam(seq, candidate.logprob))
                chosen[seq.seq_id] = live[-1]
        self._end([beam for beam in self._live if beam.seq.seq_id not in chosen])
        self._live = live
        forks = [beam for beam in live if beam.seq.seq_id not in chosen]
        self._forget_owners([*chosen.values()])
        self._engine.scheduler.resume(beam.seq for beam in [*chosen.values(), *forks])

    def _forget_owners(self, beams: list[_Beam]) -> None:
        """A fork shares the KV of its source if both run in the same step. Later the source's KV
        may be evicted during the fork's admission, so the fork must use the prefix cache.
        """
        for beam in beams:
            beam.seq.prompt_owner = None

    def _end(self, beams: list[_Beam]) -> None:
        self._engine.scheduler.abort(beam.seq for beam in beams)


class BeamSearches:
    """Searches over several prompts in the same engine steps."""

    def __init__(self, engine: LLMEngine, params: BeamSearchParams) -> None:
        """Raises InvalidParamsError if the vocabulary is too small for beam_width."""
        self._engine = engine
        self._params = params
        eos = () if params.ignore_eos else engine.model_config.eos_token_ids
        self._eos_token_ids = frozenset(eos)
        # Enough candidates that beam_width of them do not end the text.
        per_beam = 1 + max(1, len(self._eos_token_ids))
        self._num_candidates = per_beam * params.beam_width
        vocab = engine.model_config.vocab_size
        if self._num_candidates > vocab:
            raise InvalidParamsError(
                f"beam_width {params.beam_width} ranks {self._num_candidates} tokens of a "
                f"vocabulary of {vocab}; lower it to {vocab // per_beam}"
            )
        self._open: list[BeamSearch] = []

    def add(
        self, prompt: str | list[int], text: str | None = None, cache_salt: str | None = None
    ) -> BeamSearch:
        """Queue a prompt. Raises as LLMEngine.add_request."""
        self._engine.check_open()
        max_tokens, width = self._params.max_tokens, self._num_candidates
        params = SamplingParams(0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        (first,) = self._engine.inputs.sequences(
            prompt, params, text, cache_salt, num_candidates=width
        )
        self._engine.scheduler.add(first)
        self._open.append(BeamSearch(self._engine, first, self._params, self._eos_token_ids))
        return self._open[-1]

    @property
    def is_finished(self) -> bool:
        """True when every search has ended."""
        return not self._open

    def step(self) -> int:
        """Run one engine step; returns how many searches it ended."""
        self._engine.step()
        with self._engine.kv.blocks.at_once():
            for search in reversed(self._open):  # resumed last is scheduled first: the oldest
                search.advance()
        num_open = len(self._open)
        self._open = [search for search in self._open if not search.is_finished]
        return num_open - len(self._open)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for search in self._open if self._engine.kv.blocks.is_whole else ():
            search.close()


def beam_params(params: BeamSearchParams | None, settings: dict[str, Any]) -> BeamSearchParams:
    """Beam search parameters given as an object or as keywords. Raises InvalidParamsError for both
    at once and for invalid ones.
    """
    if params is None:
        try:
            return BeamSearchParams(**settings)
        except TypeError as error:
            raise InvalidParamsError(f"beam_search: {error}") from error
    if settings:
        raise InvalidParamsError(f"give BeamSearchParams or {sorted(settings)}, not both")
    if not isinstance(params, BeamSearchParams):
        raise InvalidParamsError(f"expected BeamSearchParams, got {type(params).__name__}")
    return params
