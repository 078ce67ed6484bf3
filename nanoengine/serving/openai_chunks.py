"""Writers of OpenAI's two first endpoints, which stream chunks: events without names. Know no HTTP.

The chunks of a choice, joined, are that choice of the whole answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from nanoengine.outputs import CompletionOutput, RequestOutput, StreamDelta
from nanoengine.serving.openai_answers import Event, answer_head, token_counts, usage
from nanoengine.serving.openai_logprobs import (
    CompletionLogprobs,
    ContentLogprobs,
    TokenBytes,
    chat_logprobs,
    prompt_lists,
    prompt_text,
)
from nanoengine.serving.openai_requests import ChatRequest, CompletionRequest, Streaming
from nanoengine.text.answer_parser import AnswerParser, ChatParsers, message_of, new_id
from nanoengine.text.answer_pieces import Kind, Piece


class _Chunks:
    """What chunks of both endpoints share: how they begin and end, and the tokens so far."""

    def __init__(
        self, request: ChatRequest | CompletionRequest, head: dict[str, Any], echo_only: bool
    ) -> None:
        self._head = head
        self._streaming = request.streaming or Streaming()
        self._has_ids = request.has_token_ids
        self._echo_only = echo_only
        self._num_in = 0
        self._num_out = 0

    def begin(self, output: RequestOutput, prompt_index: int) -> list[Event]:
        """The chunks before the first delta of a prompt; there may be none, but continuous usage
        counts the prompt from here on.

        output: its ids, its text and its prompt_logprobs, if the request asks for them.
        """
        self._num_in += len(output.prompt_token_ids)
        return []

    def end(self, outputs: Iterable[RequestOutput]) -> list[Event]:
        """The chunks after the last delta: the usage, if it is wanted. outputs: of each prompt."""
        if not self._streaming.include_usage:
            return []
        return [(None, self._head | {"choices": [], "usage": self._usage(outputs)})]

    def failed(self, status: int, body: dict[str, Any]) -> list[Event]:
        return [(None, body)]

    def _usage(self, outputs: Iterable[RequestOutput]) -> dict[str, Any]:
        return usage(outputs, self._echo_only)

    def _ids(self, token_ids: Iterable[int], name: str = "token_ids") -> dict[str, list[int]]:
        """Of a text or of a prompt, if they are wanted."""
        return {name: [*token_ids]} if self._has_ids else {}

    def _chunk(self, choice: dict[str, Any]) -> Event:
        made = self._head | {"choices": [choice]}
        if self._streaming.continuous_usage:
            made["usage"] = token_counts(self._num_in, self._num_out)
        elif self._streaming.include_usage:
            made["usage"] = None
        return None, made


class ChatChunks(_Chunks):
    """The answer to one chat, of /v1/chat/completions."""

    def __init__(
        self,
        request: ChatRequest,
        answer_id: str,
        model: str,
        token_bytes: TokenBytes,
        parsers: ChatParsers,
    ) -> None:
        """parsers: of the model's answers."""
        head = answer_head("chatcmpl", answer_id, "chat.completion.chunk", model)
        super().__init__(request, head, echo_only=False)
        self._request = request
        # Log-probabilities are those of the content alone where thoughts are not wanted.
        self._hides_thoughts = parsers.reasoning is not None and not request.shows_reasoning
        self._token_bytes = token_bytes
        self._parsers = parsers
        self._asked = RequestOutput(-1, "", [], [])
        # By the number of the choice.
        self._begun: dict[int, tuple[AnswerParser, ContentLogprobs]] = {}
        self._calling: set[int] = set()  # choices that have called a tool

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The body of the answer; outputs: the only one."""
        (output,) = outputs
        choices = [self._whole_choice(output.prompt or "", made) for made in output.outputs]
        whole = {"object": "chat.completion", "choices": choices, "usage": self._usage(outputs)}
        return self._head | whole | self._ids(output.prompt_token_ids, PROMPT_IDS)

    def _whole_choice(self, prompt: str, made: CompletionOutput) -> dict[str, Any]:
        parser, scores = self._readers(prompt)
        pieces = parser.read(made.text, is_last=True)
        message = message_of(pieces)
        thoughts = message.reasoning if self._request.shows_reasoning else ""
        body = message.as_dict() | {"refusal": None}
        return {
            "index": made.index,
            "message": body | NO_REASONING | _reasoning_body(thoughts),
            "logprobs": self._logprobs(made, pieces, scores),
            "finish_reason": _finish_reason(made.finish_reason, bool(message.tool_calls)),
            "stop_reason": made.stop_reason,
        } | self._ids(made.token_ids)

    def begin(self, output: RequestOutput, prompt_index: int) -> list[Event]:
        """No chunks: a choice begins with its first delta."""
        self._asked = output
        return super().begin(output, prompt_index)

    def _usage(self, outputs: Iterable[RequestOutput]) -> dict[str, Any]:
        """With the tokens of the thoughts."""
        (output,) = outputs
        details = {"reasoning_tokens": self._parsers.num_thoughts(output, self._request.tools)}
        return super()._usage([output]) | {"completion_tokens_details": details}

    def _readers(self, prompt: str) -> tuple[AnswerParser, ContentLogprobs]:
        """Of one answer."""
        use = self._request.tools
        hidden = self._parsers.hidden(self._request.params, use)
        goes_on = self._request.rendering.continue_final_message
        parser = self._parsers.parser(prompt, use, goes_on)
        return parser, ContentLogprobs(self._token_bytes, hidden)

    def of(self, deltas: Iterable[StreamDelta], prompt_index: int) -> list[Event]:
        """The chunks of new deltas. A choice begins with a chunk that has the role and no text, as
        OpenAI's do.
        """
        chunks = []
        for delta in deltas:
            self._num_out += len(delta.token_ids)
            if delta.index not in self._begun:
                chunks.append(self._first(delta.index))
            parser, scores = self._begun[delta.index]
            pieces = parser.read(delta.text, delta.finish_reason is not None)
            said = self._said(delta.index, pieces)
            reason = _finish_reason(delta.finish_reason, delta.index in self._calling)
            logprobs = self._logprobs(delta, pieces, scores)
            if logprobs is not None and self._hides_thoughts and not logprobs["content"]:
                logprobs = None
            if not said and (logprobs is not None or reason is not None or self._has_ids):
                said = [{}]
            for number, each in enumerate(said):
                own = None if number else logprobs
                new = {"delta": each} | self._ids(() if number else delta.token_ids)
                ended = (reason, delta.stop_reason) if each is said[-1] else (None, None)
                chunks.append(self._chunk(_choice(delta.index, new, own, *ended)))
        return chunks

    def _first(self, index: int) -> Event:
        """The chunk that a choice begins with; that of the answer has the prompt's ids."""
        is_first = not self._begun
        self._begun[index] = self._readers(self._asked.prompt or "")
        new = {"delta": {"role": "assistant", "content": ""}} | self._ids(())
        name, chunk = self._chunk(_choice(index, new, None))
        ids = self._ids(self._asked.prompt_token_ids, PROMPT_IDS) if is_first else {}
        return name, chunk | ids

    def _logprobs(
        self, made: CompletionOutput | StreamDelta, pieces: list[Piece], scores: ContentLogprobs
    ) -> dict[str, Any] | None:
        """Those of new tokens, and of their pieces if there may be thoughts that are not wanted."""
        found = chat_logprobs(made, self._token_bytes, self._request.params.logprobs or 0)
        if found is None or not self._hides_thoughts:
            return found
        scores.add(made, found["content"])
        return found | {"content": scores.of(pieces)}

    def _said(self, index: int, pieces: list[Piece]) -> list[dict[str, Any]]:
        """What the pieces of a delta say, a part for each chunk: its text may be held back."""
        self._calling |= {index for piece in pieces if piece.kind is Kind.NAME}
        made = (_piece_body(piece) for piece in pieces)
        return [body for body in made if self._request.shows_reasoning or "reasoning" not in body]


class CompletionChunks(_Chunks):
    """The answer to one completion, of one prompt or several: of /v1/completions."""

    def __init__(
        self, request: CompletionRequest, answer_id: str, model: str, token_bytes: TokenBytes
    ) -> None:
        head = answer_head("cmpl", answer_id, "text_completion", model)
        super().__init__(request, head, request.echo_only)
        self._request = request
        self._token_bytes = token_bytes
        # By the number of the choice; with echo, a choice begins with the prompt.
        self._logprobs = [CompletionLogprobs(token_bytes) for _ in range(request.num_completions)]

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The body of the answer; outputs: of each prompt, in order."""
        choices: list[dict[str, Any]] = []
        for output in outputs:
            for made in output.outputs:
                choices.append({"index": len(choices)} | self._whole_choice(output, made))
        return self._head | {"choices": choices, "usage": self._usage(outputs)}

    def _whole_choice(self, output: RequestOutput, made: CompletionOutput) -> dict[str, Any]:
        text, parts = "", []
        if self._request.echo:
            text = prompt_text(output, self._token_bytes)
            parts.append(prompt_lists(output, text, self._token_bytes))
        if not self._echo_only:
            if made.logprobs is not None:
                writer = CompletionLogprobs(self._token_bytes, len(text))
                parts.append(writer.lists(made.token_ids, made.logprobs))
            text += made.text
        lists = _joined([part for part in parts if part is not None])
        ended = {"finish_reason": made.finish_reason, "stop_reason": made.stop_reason}
        ids = self._ids(output.prompt_token_ids, PROMPT_IDS)
        ids |= self._ids(() if self._echo_only else made.token_ids)
        return {"text": text, "logprobs": lists} | ids | ended

    def begin(self, output: RequestOutput, prompt_index: int) -> list[Event]:
        """With echo, the prompt's text in each choice, and its ids if they are wanted."""
        chunks = super().begin(output, prompt_index)
        ids = self._ids(output.prompt_token_ids, PROMPT_IDS)
        if not self._request.echo and not ids:
            return chunks
        text = prompt_text(output, self._token_bytes) if self._request.echo else ""
        lists = prompt_lists(output, text, self._token_bytes) if self._request.echo else None
        for index in self._choices(prompt_index):
            self._logprobs[index] = CompletionLogprobs(self._token_bytes, len(text))
            new = {"text": text} | ids | self._ids(())
            chunks.append(self._chunk(_choice(index, new, lists)))
        return chunks

    def of(self, deltas: Iterable[StreamDelta], prompt_index: int) -> list[Event]:
        """The chunks of new deltas of a prompt, after its begin()."""
        chunks = []
        for delta in deltas:
            index = self._choices(prompt_index)[delta.index]
            if self._echo_only:
                if delta.finish_reason is not None:
                    ended = delta.finish_reason, delta.stop_reason
                    choice = _choice(index, {"text": ""} | self._ids(()), None, *ended)
                    chunks.append(self._chunk(choice))
                continue
            self._num_out += len(delta.token_ids)
            reason, lists = delta.finish_reason, None
            if delta.logprobs is not None:
                lists = self._logprobs[index].lists(delta.token_ids, delta.logprobs)
            ids = self._ids(delta.token_ids)
            if delta.text or delta.logprobs or reason is not None or ids:  # text may be held back
                new = {"text": delta.text} | ids
                chunks.append(self._chunk(_choice(index, new, lists, reason, delta.stop_reason)))
        return chunks

    def _choices(self, prompt_index: int) -> range:
        n = self._request.params.n
        return range(prompt_index * n, prompt_index * n + n)


PROMPT_IDS = "prompt_token_ids"
# In whole answers, as in vLLM's: clients ask for it unguarded.
NO_REASONING = {"reasoning_content": None, "reasoning": None}


def _reasoning_body(text: str) -> dict[str, str]:
    """Thoughts under the name that most clients read, and under vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _finish_reason(reason: str | None, has_calls: bool) -> str | None:
    """Why a text ended, as OpenAI's chats say it."""
    return "tool_calls" if reason == "stop" and has_calls else reason


def _piece_body(piece: Piece) -> dict[str, Any]:
    """The delta of a piece; the name of a call comes once, with its id."""
    if piece.kind is Kind.CONTENT:
        return {"content": piece.text}
    if piece.kind is Kind.REASONING:
        return _reasoning_body(piece.text)
    if piece.kind is Kind.ARGUMENTS:
        return {"tool_calls": [{"index": piece.call, "function": {"arguments": piece.text}}]}
    function = {"name": piece.text, "arguments": ""}
    call = {"index": piece.call, "id": new_id(), "type": "function", "function": function}
    return {"tool_calls": [call]}


def _joined(parts: list[dict[str, list[Any]]]) -> dict[str, list[Any]] | None:
    """Lists of log-probabilities, one after the other; None if there are none."""
    if not parts:
        return None
    return {name: [each for part in parts for each in part[name]] for name in parts[0]}


def _choice(
    index: int,
    new: dict[str, Any],
    logprobs: dict[str, Any] | None,
    reason: str | None = None,
    stop_reason: int | str | None = None,
) -> dict[str, Any]:
    """Of a chunk. new: its delta or text, by that name."""
    ended = {"finish_reason": reason, "stop_reason": stop_reason}
    return {"index": index, **new, "logprobs": logprobs} | ended
