"""Writes the answers of /v1/messages, whole or as named events, and its errors. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from nanoengine.outputs import CompletionOutput, RequestOutput, StreamDelta
from nanoengine.serving.openai_answers import SERVER, Event
from nanoengine.serving.openai_requests import ChatRequest

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

    def __init__(self, request: ChatRequest, answer_id: str, model: str) -> None:
        self._max_tokens = request.params.max_tokens
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
        content = [{"type": "text", "text": made.text}]
        return self._head | {"content": content, "usage": _usage(output)} | self._end_of(made)

    def begin(self, output: RequestOutput, prompt_index: int = 0) -> list[Event]:
        """The events before the first delta."""
        end = {"stop_reason": None, "stop_sequence": None}
        message = self._head | {"content": [], "usage": _usage(output)} | end
        return [
            _event("message_start", message=message),
            _event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
            _event("ping"),
        ]

    def of(self, deltas: Iterable[StreamDelta], prompt_index: int = 0) -> list[Event]:
        """The events of new deltas."""
        return [
            _event("content_block_delta", index=0, delta={"type": "text_delta", "text": delta.text})
            for delta in deltas
            if delta.text
        ]

    def end(self, outputs: Sequence[RequestOutput]) -> list[Event]:
        """The events after the last delta; outputs: the only one."""
        (output,) = outputs
        (made,) = output.outputs
        return [
            _event("content_block_stop", index=0),
            _event("message_delta", delta=self._end_of(made), usage=_usage(output)),
            _event("message_stop"),
        ]

    def failed(self, body: dict[str, Any]) -> list[Event]:
        """The event of an error in the middle of a stream; body: OpenAI's error object."""
        is_ours = body["error"]["type"] == SERVER
        return [("error", messages_error(500 if is_ours else 400, body))]

    def _end_of(self, made: CompletionOutput) -> dict[str, Any]:
        """Why the text ended."""
        if made.finish_reason == "length":
            # Below max_tokens, the context was full.
            is_own = self._max_tokens is not None and len(made.token_ids) >= self._max_tokens
            reason = "max_tokens" if is_own else "model_context_window_exceeded"
            return {"stop_reason": reason, "stop_sequence": None}
        if isinstance(made.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": made.stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}


def messages_error(status: int, body: dict[str, Any]) -> dict[str, Any]:
    """Anthropic's form of an error. status: HTTP's; body: OpenAI's error object."""
    kind = ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    told = {"type": kind, "message": body["error"]["message"]}
    return {"type": "error", "error": told, "request_id": None}


def count_body(num_tokens: int) -> dict[str, Any]:
    """The answer of /v1/messages/count_tokens."""
    return {"input_tokens": num_tokens}


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
