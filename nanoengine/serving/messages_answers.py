"""Writes the answers of /v1/messages, whole or as named events, and its errors. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from json import dumps
from typing import Any

from nanoengine.outputs import CompletionOutput, RequestOutput, StreamDelta
from nanoengine.serving.answer_items import AnswerItems, Item, Step
from nanoengine.serving.openai_answers import Event
from nanoengine.serving.openai_requests import ChatRequest
from nanoengine.text.answer_parser import ChatParsers
from nanoengine.text.answer_pieces import Kind
from nanoengine.text.checked_json import object_in

# The delta of an item: its type, and the key of the new text.
DELTAS = {
    Kind.CONTENT: ("text_delta", "text"),
    Kind.REASONING: ("thinking_delta", "thinking"),
    Kind.NAME: ("input_json_delta", "partial_json"),
}

SIGNED = ("signature_delta", "signature")
# What comes with deltas alone.
BEGINS: dict[Kind, dict[str, Any]] = {
    Kind.NAME: {"input": {}},
    Kind.REASONING: {"signature": ""},
}

THREAD = "thread"  # the key that asks the server to keep the conversation
# By this Anthropic's client knows that it must send the whole conversation each time.
NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": [THREAD]}

# Anthropic's name of an error, by HTTP's status; others below 500 are invalid requests.
ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class MessagesWriter:
    """The answer to one request."""

    def __init__(
        self, request: ChatRequest, answer_id: str, model: str, parsers: ChatParsers
    ) -> None:
        """parsers: of the model's answers."""
        self._max_tokens = request.params.max_tokens
        self._tools = request.tools
        self._goes_on = request.rendering.continue_final_message
        self._parsers = parsers
        self._items = AnswerItems(parsers.parser("", request.tools))
        self._head = {
            "id": f"msg_{answer_id}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The body of the answer; outputs: the only one."""
        (output,) = outputs
        (made,) = output.outputs
        self._read(output)
        for _ in self._items.feed(made.text, is_last=True):
            pass
        content = [_block(item) for item in self._items.items]
        return self._head | {"content": content, "usage": _usage(output)} | self._end_of(made)

    def begin(self, output: RequestOutput, prompt_index: int) -> list[Event]:
        """The events before the first delta."""
        self._read(output)
        end = {"stop_reason": None, "stop_sequence": None}
        message = self._head | {"content": [], "usage": _usage(output)} | end
        return [_event("message_start", message=message), _event("ping")]

    def of(self, deltas: Iterable[StreamDelta], prompt_index: int) -> list[Event]:
        """The events of new deltas."""
        events = []
        for delta in deltas:
            for step, item, new in self._items.feed(delta.text, delta.finish_reason is not None):
                events += _step_events(step, item, new)
        return events

    def end(self, outputs: Sequence[RequestOutput]) -> list[Event]:
        """The events after the last delta; outputs: the only one."""
        (output,) = outputs
        (made,) = output.outputs
        return [
            _event("message_delta", delta=self._end_of(made), usage=_usage(output)),
            _event("message_stop"),
        ]

    def failed(self, status: int, body: dict[str, Any]) -> list[Event]:
        """The event of an error in the middle of a stream; body: OpenAI's error object."""
        return [("error", messages_error(status, body))]

    def _read(self, output: RequestOutput) -> None:
        """Begin with the answer to a prompt."""
        parser = self._parsers.parser(output.prompt or "", self._tools, self._goes_on)
        self._items = AnswerItems(parser)

    def _end_of(self, made: CompletionOutput) -> dict[str, Any]:
        """Why the text ended."""
        if made.finish_reason == "length":
            # Below max_tokens, the context was full.
            is_own = self._max_tokens is not None and len(made.token_ids) >= self._max_tokens
            reason = "max_tokens" if is_own else "model_context_window_exceeded"
            return {"stop_reason": reason, "stop_sequence": None}
        if isinstance(made.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": made.stop_reason}
        reason = "tool_use" if self._items.has_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": None}


def messages_error(status: int, body: dict[str, Any]) -> dict[str, Any]:
    """Anthropic's form of an error. status: HTTP's; body: OpenAI's error object."""
    kind = ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    told: dict[str, Any] = {"type": kind, "message": body["error"]["message"]}
    if body["error"]["param"] == THREAD:
        told["details"] = NO_THREADS
    return {"type": "error", "error": told, "request_id": None}


def count_body(num_tokens: int) -> dict[str, Any]:
    """The answer of /v1/messages/count_tokens."""
    return {"input_tokens": num_tokens}


def _block(item: Item) -> dict[str, Any]:
    """An item as a block of content."""
    if item.kind is Kind.CONTENT:
        return {"type": "text", "text": item.text}
    if item.kind is Kind.REASONING:
        # Clients send back what is signed alone; nobody reads this here.
        return {"type": "thinking", "thinking": item.text, "signature": item.id}
    return {"type": "tool_use", "id": item.id, "name": item.name, "input": _input(item.text)}


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call; what is no object, as it was written."""
    found = object_in(arguments)
    return {"arguments": arguments} if found is None else found


def _step_events(step: Step, item: Item, new: str) -> list[Event]:
    """The events of what happens to an item."""
    if step is Step.BEGINS:
        block = _block(item) | BEGINS.get(item.kind, {})
        return [_event("content_block_start", index=item.index, content_block=block)]
    if step is Step.GROWS:
        return [] if item.kind is Kind.NAME else [_delta(item, *DELTAS[item.kind], new)]
    last = []
    if item.kind is Kind.REASONING:
        last = [_delta(item, *SIGNED, item.id)]
    if item.kind is Kind.NAME:  # whole: Anthropic's client raises for what is no object of JSON
        arguments = dumps(_input(item.text), ensure_ascii=False)
        last = [_delta(item, *DELTAS[item.kind], arguments)]
    return [*last, _event("content_block_stop", index=item.index)]


def _delta(item: Item, kind: str, name: str, new: str) -> Event:
    return _event("content_block_delta", index=item.index, delta={"type": kind, name: new})


def _event(name: str, **data: Any) -> Event:
    return name, {"type": name} | data


def _usage(output: RequestOutput) -> dict[str, Any]:
    """Tokens so far; as in Anthropic's API, those found in the cache are no input tokens."""
    cached = output.num_cached_tokens
    return {
        "input_tokens": len(output.prompt_token_ids) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": sum(len(made.token_ids) for made in output.outputs),
    }
