"""Writes the answer of /v1/responses, whole or as its named events. Knows no HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from nanoengine.outputs import CompletionOutput, RequestOutput, StreamDelta
from nanoengine.serving.answer_items import AnswerItems, Item, Step
from nanoengine.serving.openai_answers import SERVER, Event
from nanoengine.serving.openai_logprobs import ContentLogprobs, TokenBytes, chat_logprobs
from nanoengine.serving.responses_requests import ResponsesRequest
from nanoengine.text.answer_parser import ChatParsers
from nanoengine.text.answer_pieces import Kind

# What the id of an item begins with, and the names of the events of its text.
IDS = {Kind.CONTENT: "msg", Kind.REASONING: "rs", Kind.NAME: "fc"}
TEXTS = {
    Kind.CONTENT: "response.output_text",
    Kind.REASONING: "response.reasoning_text",
    Kind.NAME: "response.function_call_arguments",
}


# The codes of OpenAI's failed responses that fit errors here; the others are its server's.
ERROR_CODES = ("invalid_prompt", "rate_limit_exceeded")


class ResponsesWriter:
    """The answer to one request."""

    def __init__(
        self,
        request: ResponsesRequest,
        answer_id: str,
        model: str,
        token_bytes: TokenBytes,
        parsers: ChatParsers,
    ) -> None:
        """parsers: of the model's answers."""
        self._chat, self._spaces = request.chat, request.spaces
        self._params = request.chat.params
        self._token_bytes = token_bytes
        self._parsers = parsers
        self._answer_id = answer_id
        self._number = 0  # of the next event
        self._items = AnswerItems(parsers.parser("", request.chat.tools))
        self._scores = ContentLogprobs(token_bytes)
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
            "previous_response_id": None,
            "error": None,
        }

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The body of the answer; outputs: the only one."""
        (output,) = outputs
        (made,) = output.outputs
        self._read(output)
        self._events(made)
        return self._ended(output, made)

    def begin(self, output: RequestOutput, prompt_index: int) -> list[Event]:
        """The events before the first delta."""
        self._read(output)
        return self._beginning()

    def of(self, deltas: Iterable[StreamDelta], prompt_index: int) -> list[Event]:
        """The events of new deltas."""
        events = []
        for delta in deltas:
            events += self._events(delta)
        return events

    def end(self, outputs: Sequence[RequestOutput]) -> list[Event]:
        """The events after the last delta; outputs: the only one."""
        (output,) = outputs
        whole = self._ended(output, output.outputs[0])
        return [self._event(f"response.{whole['status']}", response=whole)]

    def failed(self, status: int, body: dict[str, Any]) -> list[Event]:
        """The events of an error in the middle of a stream; body: OpenAI's error object."""
        code, message = body["error"]["code"], body["error"]["message"]
        error = {"code": code if code in ERROR_CODES else SERVER, "message": message}
        begun = [] if self._number else self._beginning()
        whole = self._response("failed", self._bodies("incomplete"), None) | {"error": error}
        return [*begun, self._event("response.failed", response=whole)]

    def _beginning(self) -> list[Event]:
        return [
            self._event(name, response=self._response("in_progress", [], None))
            for name in ("response.created", "response.in_progress")
        ]

    def _read(self, output: RequestOutput) -> None:
        """Begin with the answer to a prompt."""
        use = self._chat.tools
        self._items = AnswerItems(self._parsers.parser(output.prompt or "", use))
        self._scores = ContentLogprobs(self._token_bytes, self._parsers.hidden(self._params, use))

    def _ended(self, output: RequestOutput, made: CompletionOutput) -> dict[str, Any]:
        """The body of an answer that has ended."""
        status = _status(made.finish_reason)
        reason = None if status == "completed" else {"reason": "max_output_tokens"}
        num_thoughts = self._parsers.num_thoughts(output, self._chat.tools)
        return self._response(status, self._bodies(status), reason) | {
            "completed_at": int(time.time()),
            "usage": _usage(output, made, num_thoughts),
        }

    def _bodies(self, status: str) -> list[dict[str, Any]]:
        """All items so far; status: of the last one."""
        last = len(self._items.items) - 1
        return [
            self._item(each, status if each.index == last else "completed")
            for each in self._items.items
        ]

    def _events(self, made: CompletionOutput | StreamDelta) -> list[Event]:
        """What new text says, with the log-probabilities of texts."""
        reason = made.finish_reason
        scores = chat_logprobs(made, self._token_bytes, self._params.logprobs or 0)
        if scores is not None:
            self._scores.add(made, scores["content"])
        events: list[Event] = []
        for step, item, new in self._items.feed(made.text, reason is not None):
            match step:
                case Step.BEGINS:
                    events += self._begun(item)
                case Step.GROWS:
                    events.append(self._grown(item, new))
                case Step.ENDS:
                    status = _status(reason) if self._items.has_ended else "completed"
                    events += self._done(item, status)
        return events

    def _begun(self, item: Item) -> list[Event]:
        body = self._item(item, "in_progress")
        if item.kind is Kind.CONTENT:
            body["content"] = []
        added = self._event("response.output_item.added", output_index=item.index, item=body)
        if item.kind is Kind.NAME:
            return [added]
        return [added, self._part_event("added", item, _part(item))]

    def _grown(self, item: Item, new: str) -> Event:
        """More text of an item."""
        rest: dict[str, Any] = {"delta": new}
        if item.kind is Kind.CONTENT:
            entries = self._scores.between(item.end - len(new), item.end)
            item.entries += entries
            rest["logprobs"] = _without_bytes(entries)
        return self._event(f"{TEXTS[item.kind]}.delta", **self._place(item), **rest)

    def _done(self, item: Item, status: str) -> list[Event]:
        """An item has ended, and its text before it."""
        rest: dict[str, Any] = {"text": item.text}
        if item.kind is Kind.CONTENT:
            rest["logprobs"] = _without_bytes(item.entries)
        if item.kind is Kind.NAME:
            rest = self._named(item) | {"arguments": item.text}
        events = [self._event(f"{TEXTS[item.kind]}.done", **self._place(item), **rest)]
        if item.kind is not Kind.NAME:
            events.append(self._part_event("done", item, _part(item)))
        index, body = item.index, self._item(item, status)
        done = self._event("response.output_item.done", output_index=index, item=body)
        return [*events, done]

    def _part_event(self, what: str, item: Item, part: dict[str, Any]) -> Event:
        return self._event(f"response.content_part.{what}", **self._place(item), part=part)

    def _place(self, item: Item) -> dict[str, Any]:
        """Where the text of an item is."""
        place = {"output_index": item.index, "item_id": self._id(item)}
        return place if item.kind is Kind.NAME else place | {"content_index": 0}

    def _id(self, item: Item) -> str:
        number = f"_{item.index}" if item.index else ""
        return f"{IDS[item.kind]}_{self._answer_id}{number}"

    def _item(self, item: Item, status: str) -> dict[str, Any]:
        head = {"id": self._id(item), "status": status}
        if item.kind is Kind.NAME:
            call = {"call_id": item.id, **self._named(item), "arguments": item.text}
            return head | {"type": "function_call"} | call
        content = {"content": [_part(item)]}
        if item.kind is Kind.REASONING:
            return head | {"type": "reasoning", "summary": []} | content
        return head | {"type": "message", "role": "assistant"} | content

    def _named(self, item: Item) -> dict[str, Any]:
        """The tool of a call, as the client knows it."""
        space, name = self._spaces.get(item.name, (None, item.name))
        return {"name": name} if space is None else {"name": name, "namespace": space}

    def _event(self, name: str, /, **data: Any) -> Event:
        number, self._number = self._number, self._number + 1
        return name, {"type": name, "sequence_number": number} | data

    def _response(
        self, status: str, output: list[dict[str, Any]], reason: dict[str, str] | None
    ) -> dict[str, Any]:
        rest = {"status": status, "incomplete_details": reason, "output": output, "usage": None}
        return self._head | rest


def _part(item: Item) -> dict[str, Any]:
    """The text of an item as its only part."""
    if item.kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": item.text}
    return {
        "type": "output_text",
        "text": item.text,
        "annotations": [],
        "logprobs": list(item.entries),
    }


def _status(finish_reason: str | None) -> str:
    return "completed" if finish_reason == "stop" else "incomplete"


def _usage(output: RequestOutput, made: CompletionOutput, num_thoughts: int) -> dict[str, Any]:
    num_in, num_out = len(output.prompt_token_ids), len(made.token_ids)
    cached = {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0}
    return {
        "input_tokens": num_in,
        "input_tokens_details": cached,
        "output_tokens": num_out,
        "output_tokens_details": {"reasoning_tokens": num_thoughts},
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
