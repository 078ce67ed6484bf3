"""Writes the answer of /v1/responses, whole or as its named events. Knows no HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from nanoengine.outputs import CompletionOutput, RequestOutput, StreamDelta
from nanoengine.serving.openai_answers import Event
from nanoengine.serving.openai_logprobs import TokenBytes, chat_logprobs
from nanoengine.serving.responses_requests import ResponsesRequest

# Where the text is: an answer has one message of one part.
PLACE = {"output_index": 0, "content_index": 0}


class ResponsesWriter:
    """The answer to one request."""

    def __init__(
        self, request: ResponsesRequest, answer_id: str, model: str, token_bytes: TokenBytes
    ) -> None:
        self._params = request.chat.params
        self._token_bytes = token_bytes
        self._item_id = f"msg_{answer_id}"
        self._number = 0  # of the next event
        self._head = {
            "id": f"resp_{answer_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            **request.repeated,
            "temperature": self._params.temperature,
            "top_p": self._params.top_p,
            "top_logprobs": self._params.logprobs or 0,
            "text": {"format": request.format},
            "truncation": "disabled",
            "background": False,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "previous_response_id": None,
            "error": None,
        }

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The body of the answer; outputs: the only one."""
        (output,) = outputs
        (made,) = output.outputs
        status = _status(made.finish_reason)
        reason = None if status == "completed" else {"reason": "max_output_tokens"}
        message = self._message(status, [self._part(made.text, self._entries(made))])
        return self._response(status, [message], reason) | {
            "completed_at": int(time.time()),
            "usage": _usage(output, made),
        }

    def begin(self, output: RequestOutput, prompt_index: int = 0) -> list[Event]:
        """The events before the first delta."""
        return [
            self._event("response.created", response=self._response("in_progress", [], None)),
            self._event("response.in_progress", response=self._response("in_progress", [], None)),
            self._event(
                "response.output_item.added",
                output_index=0,
                item=self._message("in_progress", []),
            ),
            self._event(
                "response.content_part.added",
                **PLACE,
                item_id=self._item_id,
                part=self._part("", []),
            ),
        ]

    def of(self, deltas: Iterable[StreamDelta], prompt_index: int = 0) -> list[Event]:
        """The events of new deltas."""
        events = []
        for delta in deltas:
            entries = self._entries(delta)
            if delta.text or entries:
                events.append(
                    self._event(
                        "response.output_text.delta",
                        **PLACE,
                        item_id=self._item_id,
                        delta=delta.text,
                        logprobs=_without_bytes(entries),
                    )
                )
        return events

    def end(self, outputs: Sequence[RequestOutput]) -> list[Event]:
        """The events after the last delta; outputs: the only one."""
        whole = self.whole(outputs)
        (message,) = whole["output"]
        (part,) = message["content"]
        return [
            self._event(
                "response.output_text.done",
                **PLACE,
                item_id=self._item_id,
                text=part["text"],
                logprobs=_without_bytes(part["logprobs"]),
            ),
            self._event(
                "response.content_part.done",
                **PLACE,
                item_id=self._item_id,
                part=part,
            ),
            self._event("response.output_item.done", output_index=0, item=message),
            self._event(f"response.{whole['status']}", response=whole),
        ]

    def failed(self, body: dict[str, Any]) -> list[Event]:
        """The event of an error in the middle of a stream; body: OpenAI's error object."""
        error = body["error"]
        told = {name: error[name] for name in ("code", "message", "param")}
        return [self._event("error", **told)]

    def _event(self, name: str, **data: Any) -> Event:
        number, self._number = self._number, self._number + 1
        return name, {"type": name, "sequence_number": number} | data

    def _response(
        self, status: str, output: list[dict[str, Any]], reason: dict[str, str] | None
    ) -> dict[str, Any]:
        rest = {"status": status, "incomplete_details": reason, "output": output, "usage": None}
        return self._head | rest

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self._item_id, "type": "message", "role": "assistant"}
        return head | {"status": status, "content": content}

    def _part(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _entries(self, made: CompletionOutput | StreamDelta) -> list[dict[str, Any]]:
        found = chat_logprobs(made, self._token_bytes, self._params.logprobs or 0)
        return [] if found is None else list(found["content"])


def _status(finish_reason: str | None) -> str:
    return "completed" if finish_reason == "stop" else "incomplete"


def _usage(output: RequestOutput, made: CompletionOutput) -> dict[str, Any]:
    num_in, num_out = len(output.prompt_token_ids), len(made.token_ids)
    cached = {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0}
    return {
        "input_tokens": num_in,
        "input_tokens_details": cached,
        "output_tokens": num_out,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_in + num_out,
    }


def _without_bytes(entries: Any) -> list[dict[str, Any]]:
    """Entries as events have them."""
    plain = []
    for entry in entries:
        made = {"token": entry["token"], "logprob": entry["logprob"]}
        if "top_logprobs" in entry:
            made["top_logprobs"] = _without_bytes(entry["top_logprobs"])
        plain.append(made)
    return plain
