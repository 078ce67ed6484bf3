"""Splits the thoughts of a model from its answer: a row for each family, with vLLM's names.

Sources: the chat templates of Qwen 3, DeepSeek-R1, GLM 4.5, Gemma 4, Magistral, Command R7B,
Apertus and Hunyuan, and vLLM's and SGLang's parsers for ERNIE 4.5, Command A+ and Muse Glimmer.
gpt-oss has channels, which tool_parser.py reads, Muse Glimmer messages to recipients, which
recipients.py reads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from nanoengine.text.answer_pieces import (
    MAX_HELD_SPACES,
    Kind,
    Piece,
    PieceReader,
    Steps,
    first_of,
    num_held_back,
)
from nanoengine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ReasoningSyntax:
    """What thoughts begin and end with. The first row whose `begin` and `sign` are in the chat
    template is its model's. layout: "block": thoughts come first; "channels": all of the
    answer is in gpt-oss's channels; "recipients": in Muse Glimmer's messages. around: what stands
    before and after the content, if it is no call. header: what stands between thoughts and a text
    in a form.
    """

    name: str
    begin: str
    end: str
    layout: Literal["block", "channels", "recipients"] = "block"
    around: tuple[str, str] | None = None
    header: str = ""
    sign: str = ""

    @property
    def marks(self) -> set[str]:
        """All that is part of neither thoughts nor content."""
        return {self.begin, self.end, *(mark.strip() for mark in self.around or ())}

    def is_open_after(self, prompt: str) -> bool:
        """Whether a prompt ends with what thoughts begin with: the answer goes on with them."""
        return prompt[-64:].rstrip().endswith(self.begin)

    def has_content_after(self, prompt: str) -> bool:
        """Whether a prompt ends with what content begins with."""
        return self.around is not None and prompt[-64:].rstrip().endswith(self.around[0].rstrip())

    def is_of(self, template: str) -> bool:
        """Whether the model of a chat template thinks so."""
        return self.begin in template and self.sign in template


REASONING_SYNTAXES = (
    ReasoningSyntax("openai_gptoss", "<|channel|>analysis<|message|>", "<|end|>", "channels"),
    ReasoningSyntax(
        "muse_glimmer",
        " to=self<|message|>",
        "<|eom|>",
        "recipients",
        header="<|start|>assistant to=user<|message|>",
    ),
    ReasoningSyntax("gemma4", "<|channel>thought", "<channel|>"),
    ReasoningSyntax("mistral", "[THINK]", "[/THINK]"),
    ReasoningSyntax("seed_oss", "<seed:think>", "</seed:think>"),
    ReasoningSyntax("apertus", "<|inner_prefix|>", "<|inner_suffix|>"),
    ReasoningSyntax(
        "cohere_command4",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        around=("<|START_TEXT|>", "<|END_TEXT|>"),
        sign="<|START_TEXT|>",
    ),
    ReasoningSyntax(
        "cohere_command3",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        around=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    ReasoningSyntax(
        "hunyuan_a13b",
        "<think>",
        "</think>",
        around=("<answer>\n", "\n</answer>"),
        sign="<answer>",
    ),
    ReasoningSyntax(
        "ernie45",
        "<think>",
        "</think>",
        around=("<response>\n", "\n</response>"),
        sign="<response>",
    ),
    ReasoningSyntax("deepseek_r1", "<think>", "</think>"),
)
BY_NAME = {row.name: row for row in REASONING_SYNTAXES}
# The same tags.
_THINK = ("deepseek_v3", "glm45", "glm47", "kimi_k2", "minimax_m2", "nemotron_v3", "olmo3")
BY_NAME |= dict.fromkeys((*_THINK, "poolside_v1", "qwen3"), BY_NAME["deepseek_r1"])
MAX_MARKS = 16  # of calls, in thoughts that never end; the rest is thoughts


def mark_ids(
    syntax: ReasoningSyntax, tokenizer: Tokenizer
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens that thoughts begin and end with."""
    begin, end = (
        tuple(tokenizer.encode(mark, add_special_tokens=False))
        for mark in (syntax.begin, syntax.end)
    )
    return begin, end


def reasoning_of(template: str) -> ReasoningSyntax | None:
    """How the model of a chat template thinks; None if it does not."""
    return next((row for row in REASONING_SYNTAXES if row.is_of(template)), None)


def reasoning_in(tokenizer: Tokenizer) -> ReasoningSyntax | None:
    """How a model thinks by its chat templates, of which the one with tools alone may show it."""
    sources = (tokenizer.template_source(has_tools) for has_tools in (False, True))
    return next(filter(None, map(reasoning_of, sources)), None)


@dataclass(frozen=True, slots=True)
class ThoughtTokens:
    """Counts the tokens of thoughts by the tokens that begin and end them. decode: the text of
    tokens, special ones too.
    """

    syntax: ReasoningSyntax
    begin: tuple[int, ...]
    end: tuple[int, ...]
    decode: Callable[[Sequence[int]], str]

    @classmethod
    def of(cls, syntax: ReasoningSyntax, tokenizer: Tokenizer) -> ThoughtTokens:
        """Those of a model."""
        decode = partial(tokenizer.decode, skip_special_tokens=False)
        return cls(syntax, *mark_ids(syntax, tokenizer), decode)

    def count(
        self, prompt: str, text: str, token_ids: Sequence[int], length: int | None = None
    ) -> int:
        """How many of an answer's tokens stand between them. prompt, text: before the answer, and
        of it. length: characters before the call that thoughts end with which never end otherwise.
        """
        is_open = self.syntax.is_open_after(prompt)
        if not is_open and not text.lstrip().startswith(self.syntax.begin.lstrip()):
            return 0
        at, num = 0 if is_open else _past(self.begin, token_ids, 0), 0
        while at is not None:
            stop = _past(self.end, token_ids, at)
            last = self._num_within(token_ids, length) if stop is None else stop - len(self.end)
            num += max(last - at, 0)
            is_more = stop is not None and self.syntax.layout != "block"
            at = _past(self.begin, token_ids, stop or 0) if is_more else None
        return num

    def _num_within(self, token_ids: Sequence[int], length: int | None) -> int:
        """How many tokens write the first `length` characters; None: all."""
        if length is None:
            return len(token_ids)
        return bisect_left(
            range(len(token_ids)), length, key=lambda num: len(self.decode(token_ids[:num]))
        )


def _past(mark: tuple[int, ...], token_ids: Sequence[int], start: int) -> int | None:
    """The place behind the next mark; None if there is none."""
    places = range(start + len(mark), len(token_ids) + 1)
    return next((at for at in places if (*token_ids[at - len(mark) : at],) == mark), None)


class ReasoningParser(PieceReader):
    """Splits an answer into one block of thoughts, which comes first if there is one, and its
    content. Line breaks around both belong to neither. Thoughts that never end do so before a call.
    """

    def __init__(
        self,
        syntax: ReasoningSyntax,
        is_open: bool,
        has_content: bool = False,
        marks: tuple[str, ...] = (),
        calls: Callable[[], PieceReader] | None = None,
    ) -> None:
        """is_open: whether the prompt has begun the thoughts; has_content: the content. marks: what
        calls of tools begin with. calls: makes a reader of them.
        """
        self._syntax = syntax
        self._is_open, self._has_content = is_open, has_content
        self._marks = marks
        self._calls = calls
        super().__init__()

    def _read(self) -> Steps[None]:
        begins = yield from self.skip(self._syntax.begin)
        if begins or self._is_open:
            yield from self.skip_spaces("\n")
            yield from self._thoughts()
            yield from self.skip_spaces("\n")
        around = self._syntax.around
        if around and (self._has_content or (yield from self.skip(around[0]))):
            yield from self.until(around[1:], Kind.CONTENT)
            yield from self.skip_spaces("\n")
        yield from self.until((), Kind.CONTENT)

    def _thoughts(self) -> Steps[None]:
        """Give out all before the end, but for the line breaks before it. From the mark of a call
        on, it waits for the end: what is closed is thoughts.
        """
        end, marks = self._syntax.end, self._marks
        while (at := self.left.find(end)) < 0 and not self.has_ended:
            certain, mark = first_of(self.left, marks)
            if not mark:
                certain = len(self.left) - num_held_back(self.left, (end, *marks))
            yield Piece(Kind.REASONING, self.take(_num_before_breaks(self.left[:certain])))
            yield None
        text = self.left[: at if at >= 0 else self._before_call()]
        self.take(len(text) + (len(end) if at >= 0 else 0))
        yield Piece(Kind.REASONING, text[: _num_before_breaks(text)])

    def _before_call(self) -> int:
        """Where the first call begins; the end of the text if there is none."""
        start = 0
        for _ in range(MAX_MARKS):
            at, mark = first_of(self.left[start:], self._marks)
            if not mark or self._calls is None:
                break
            start += at
            reader = self._calls()
            pieces = reader.feed(self.left[start:], len(self.left)) + reader.end()
            if pieces and pieces[0].kind is Kind.NAME:
                return start
            start += len(mark)
        return len(self.left)


def _num_before_breaks(text: str) -> int:
    """Characters before the line breaks at the end of thoughts. Only so many are held back: a model
    may write nothing else.
    """
    return max(len(text.rstrip("\n")), len(text) - MAX_HELD_SPACES)
