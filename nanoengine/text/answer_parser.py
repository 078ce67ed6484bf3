"""From the text that a model writes in a chat to a message: thoughts, content and calls of tools.

ChatParsers holds what is known of a model; an AnswerParser reads one answer, as it comes.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from nanoengine.errors import InvalidParamsError, shown
from nanoengine.outputs import (
    ChatMessage,
    CompletionOutput,
    MessageDelta,
    RequestOutput,
    ToolCall,
    ToolCallDelta,
)
from nanoengine.sampling_params import SamplingParams, StructuredOutputsParams
from nanoengine.text.answer_pieces import Kind, Piece, PieceReader, merged
from nanoengine.text.reasoning import BY_NAME as REASONING_PARSERS
from nanoengine.text.reasoning import ReasoningParser, ReasoningSyntax, ThoughtTokens, reasoning_in
from nanoengine.text.recipients import RecipientParser
from nanoengine.text.tokenizer import Tokenizer
from nanoengine.text.tool_parser import ChannelParser, ToolParser
from nanoengine.text.tool_syntax import BY_NAME as TOOL_PARSERS
from nanoengine.text.tool_syntax import PLAIN, Objects, ToolSyntax, syntax_of
from nanoengine.text.tools import ToolUse, form_of_calls, form_of_text

ID_LENGTH = 9  # Mistral's templates take no other ids of calls


class AnswerParser:
    """Reads one answer. Pieces of one kind that follow each other are one."""

    def __init__(self, readers: Sequence[PieceReader], most_calls: int | None) -> None:
        """readers: each reads the content that the one before it leaves. most_calls: later ones are
        dropped.
        """
        self._readers = readers
        self._most_calls = most_calls
        self._end = 0  # of the text so far

    def read(self, text: str, is_last: bool) -> list[Piece]:
        """The pieces that more text makes certain; all that is left if it is the last."""
        self._end += len(text)
        pieces = [Piece(Kind.CONTENT, text, end=self._end)] if text else []
        for reader in self._readers:
            made: list[Piece] = []
            for piece in pieces:
                is_read = piece.kind is Kind.CONTENT
                made += reader.feed(piece.text, piece.end) if is_read else [piece]
            pieces = made + reader.end() if is_last else made
        if self._most_calls is not None:
            pieces = [piece for piece in pieces if piece.call < self._most_calls]
        return merged(pieces)


@dataclass(frozen=True, slots=True)
class ChatParsers:
    """How a model writes calls and thoughts; None where it is not known: with neither, all text is
    content. shows_tools: whether its chat template does. special_tokens: their ids by their texts.
    thoughts: counts tokens.
    """

    tools: ToolSyntax | None = None
    reasoning: ReasoningSyntax | None = None
    shows_tools: bool = False
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    thoughts: ThoughtTokens | None = None

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, tool_parser: str | None = None, reasoner: str | None = None
    ) -> ChatParsers:
        """Those of a model's chat template. tool_parser, reasoner: names of other ones."""
        source = tokenizer.template_source(has_tools=True)
        backend = tokenizer.backend
        special = {
            backend.id_to_token(token_id) or "": token_id for token_id in tokenizer.special_ids
        }
        reasoning = REASONING_PARSERS[reasoner] if reasoner else reasoning_in(tokenizer)
        return cls(
            TOOL_PARSERS[tool_parser] if tool_parser else syntax_of(source),
            reasoning,
            "tools" in source,
            special,
            None if reasoning is None else ThoughtTokens.of(reasoning, tokenizer),
        )

    def check(self, use: ToolUse | None) -> None:
        """Raise InvalidParamsError if the model cannot call these tools."""
        if use is not None:
            self._syntax(use)

    def params(self, params: SamplingParams, use: ToolUse | None) -> SamplingParams:
        """The parameters of a chat with these tools. Raises InvalidParamsError if the model cannot
        call them.
        """
        form = params.form if use is None else self._form(params.form, use)
        if form is not None:
            form = replace(form, after_thinking=self.reasoning is not None)
            params = replace(params, structured_outputs=form)
        return (
            replace(params, skip_special_tokens=False) if self._has_special_marks(use) else params
        )

    def hidden(self, params: SamplingParams, use: ToolUse | None) -> frozenset[int]:
        """Special tokens that the answers of a chat do not show."""
        is_hidden = params.skip_special_tokens and not self._has_special_marks(use)
        return frozenset(self.special_tokens.values()) if is_hidden else frozenset()

    def _has_special_marks(self, use: ToolUse | None) -> bool:
        """Whether marks of thoughts or of calls are special tokens, which texts must show then."""
        marks = self.reasoning.marks if self.reasoning else set()
        if use is not None:
            marks |= {*self._syntax(use).marks}
        return not marks.isdisjoint(self.special_tokens)

    def _form(
        self, form: StructuredOutputsParams | None, use: ToolUse
    ) -> StructuredOutputsParams | None:
        """The form of an answer that may call tools, or must. form: of its content."""
        frame = self._syntax(use).frame
        kind, schema = ("", "") if form is None else form.source
        if use.must_call and frame is not None:
            if kind in ("", "json", "json_object"):  # of a content, which there is not
                return form_of_calls(use, frame, self.special_tokens)
            raise InvalidParamsError(
                f"tool_choice={shown(use.choice)} and structured outputs exclude each other; give "
                'tool_choice="auto", or leave structured_outputs (response_format) out'
            )
        if form is None and use.strict_schemas and self._shows_heads(use):
            return form_of_text(use)
        if kind not in ("json", "json_object"):
            return form
        if frame is None:
            raise InvalidParamsError(
                "tools and structured outputs exclude each other for this model: its calls are not "
                'JSON; give tool_choice="none", or leave structured_outputs (response_format) out'
            )
        return form_of_calls(use, frame, self.special_tokens, schema or '{"type": "object"}')

    def _shows_heads(self, use: ToolUse) -> bool:
        """Whether calls are objects in plain text; a form's text has no special tokens."""
        syntax = self._syntax(use)
        is_plain = syntax.is_bare or not any(mark in self.special_tokens for mark in syntax.marks)
        return is_plain and any(isinstance(body, Objects) for body in syntax.bodies)

    def parser(self, prompt: str, use: ToolUse | None, goes_on: bool = False) -> AnswerParser:
        """Of one answer to a prompt. goes_on: with the content that the prompt ends in."""
        schemas = {} if use is None else use.schemas
        most = None if use is None or use.is_parallel else 1
        syntax = None if use is None else self._syntax(use)
        row = self.reasoning
        layout = "block" if row is None else row.layout
        if layout == "channels" or (syntax is not None and syntax.in_channels):
            return AnswerParser([ChannelParser(schemas, goes_on)], most)
        make_calls = None if syntax is None else partial(ToolParser, syntax, schemas)
        marks = () if syntax is None else syntax.marks
        readers: list[PieceReader] = []
        if row is not None and layout == "recipients":
            readers.append(RecipientParser(row.is_open_after(prompt)))
        elif row is not None:
            has_content = goes_on or row.has_content_after(prompt)
            begun = row.is_open_after(prompt), has_content
            readers.append(ReasoningParser(row, *begun, marks, make_calls))
        if make_calls is not None:
            readers.append(make_calls())
        return AnswerParser(readers, most)

    def message(
        self, text: str, prompt: str, use: ToolUse | None, goes_on: bool = False
    ) -> ChatMessage:
        """The message that a whole answer is. goes_on: as for parser()."""
        parser = self.parser(prompt, use, goes_on)
        return message_of(parser.read(text, is_last=True))

    def num_thoughts(self, output: RequestOutput, use: ToolUse | None) -> int:
        """Tokens of the thoughts in the answers to a prompt."""
        if (counter := self.thoughts) is None:
            return 0
        prompt = output.prompt or ""
        return sum(
            counter.count(prompt, made.text, made.token_ids, self._before_call(made, prompt, use))
            for made in output.outputs
        )

    def _before_call(self, made: CompletionOutput, prompt: str, use: ToolUse | None) -> int | None:
        """Where the thoughts of an answer end, in characters, if a call follows them."""
        if use is None:
            return None
        pieces = self.parser(prompt, use).read(made.text, is_last=True)
        is_called = any(piece.kind is Kind.NAME for piece in pieces)
        ends = [piece.end for piece in pieces if piece.kind is Kind.REASONING]
        return max(ends, default=0) if is_called else None

    def _syntax(self, use: ToolUse) -> ToolSyntax:
        """How the calls of an answer are written. Raises InvalidParamsError if there are none."""
        if not self.shows_tools:
            raise InvalidParamsError(
                "tools are not shown to this model: its chat template has none; give the engine a "
                "chat_template that shows them, or describe them in a message, and ask for "
                "structured outputs (structured_outputs, or a server's response_format)"
            )
        if self.tools is not None and (self.tools.frame or not use.must_call):
            return self.tools
        if not use.must_call:
            raise InvalidParamsError(
                "tools: it is not known how this model writes calls; name its parser with the "
                f"server's --tool-call-parser ({', '.join(TOOL_PARSERS)}), or give "
                'tool_choice="required"'
            )
        return PLAIN


def message_of(pieces: Iterable[Piece]) -> ChatMessage:
    """The message that the pieces of a whole answer make."""
    whole = delta_of(pieces)
    calls = tuple(ToolCall(str(c.id), str(c.name), c.arguments) for c in whole.tool_calls)
    content = whole.content if whole.content or not calls else None
    return ChatMessage(content, whole.reasoning, calls)


def delta_of(pieces: Iterable[Piece]) -> MessageDelta:
    """What these pieces add to a message."""
    texts = {Kind.CONTENT: "", Kind.REASONING: ""}
    calls: dict[int, ToolCallDelta] = {}
    for piece in pieces:
        if piece.kind in texts:
            texts[piece.kind] += piece.text
        elif piece.kind is Kind.NAME:
            calls[piece.call] = ToolCallDelta(piece.call, new_id(), piece.text, "")
        else:
            call = calls.get(piece.call, ToolCallDelta(piece.call, None, None, ""))
            calls[piece.call] = replace(call, arguments=call.arguments + piece.text)
    return MessageDelta(texts[Kind.CONTENT], texts[Kind.REASONING], tuple(calls.values()))


def new_id() -> str:
    """The id of a call."""
    return uuid.uuid4().hex[:ID_LENGTH]
