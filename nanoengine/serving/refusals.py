"""Errors as HTTP answers: which status, code and text each becomes. Knows no HTTP library."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nanoengine.errors import EngineClosedError, RequestError
from nanoengine.serving.messages_answers import messages_error
from nanoengine.serving.openai_answers import INVALID, SERVER, error_body, error_object
from nanoengine.serving.openai_keys import MESSAGES

logger = logging.getLogger(__name__)


class Refusal(Exception):
    """A request that the server itself refuses or ends; `code` in OpenAI's words."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        kind = SERVER if status >= 500 else INVALID
        self.body = error_object(message, kind, code, param)


@dataclass(frozen=True, slots=True)
class Told:
    """What a client is told of an error."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)


def told_of(error: BaseException, path: str = "") -> Told:
    """What a client is told, in the form of a path's endpoint; without a path in OpenAI's. An
    unexpected error is logged with an id, and only the id is told.
    """
    if path.startswith(MESSAGES):
        told = told_of(error)
        return replace(told, body=messages_error(told.status, told.body))
    if isinstance(error, RequestError):
        return Told(*error_body(error, path))
    if isinstance(error, EngineClosedError):
        error = Refusal(503, "engine_closed", str(error))
    if not isinstance(error, Refusal):
        error_id = uuid.uuid4().hex[:12]
        logger.error("error %s of a request", error_id, exc_info=error)
        error = Refusal(500, SERVER, f"internal error {error_id}; the server's log has more")
    return Told(error.status, error.body, error.headers)
