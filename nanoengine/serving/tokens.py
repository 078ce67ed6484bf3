"""/tokenize, /detokenize and /tokenizer_info, with vLLM's bodies."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from nanoengine.errors import InvalidPromptError, integer, shown
from nanoengine.serving.openai_keys import check_object
from nanoengine.serving.openai_requests import plain_messages, read_flag, template_kwargs
from nanoengine.serving.openapi import DETOKENIZE, TOKENIZE, body_of
from nanoengine.serving.service import Service, json_response

MAX_ID = (1 << 32) - 1


class TokenEndpoints:
    """Turns text into tokens and back, as the model does."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def add_to(self, app: FastAPI) -> None:
        """Add the paths."""
        app.post("/tokenize", openapi_extra=body_of(TOKENIZE))(self.tokenize)
        app.post("/detokenize", openapi_extra=body_of(DETOKENIZE))(self.detokenize)
        if self._service.options.tokenizer_info:
            app.get("/tokenizer_info")(self.tokenizer_info)

    async def tokenize(self, request: Request) -> Response:
        """{"prompt": text} or {"messages": [...]} -> {"tokens": [...], "count": ...}."""
        return json_response(await self._service.read(request, self._tokens))

    async def detokenize(self, request: Request) -> Response:
        """{"tokens": [...]} -> {"prompt": text}."""
        return json_response(await self._service.read(request, self._text))

    async def tokenizer_info(self) -> dict[str, Any]:
        """The special tokens and the chat template."""
        tokenizer = self._service.facts.tokenizer
        return {"chat_template": tokenizer.chat_template, **tokenizer.special_tokens}

    def _tokens(self, body: Any) -> dict[str, Any]:
        given = self._checked(body)
        prompts = self._service.prompts
        is_chat = "messages" in given
        special = read_flag(given, "add_special_tokens", not is_chat)
        text = given.get("prompt")
        if is_chat:
            wants_answer = read_flag(given, "add_generation_prompt", True)
            kwargs = template_kwargs(given)
            text = prompts.rendered(plain_messages(given["messages"]), kwargs, wants_answer)
        if not isinstance(text, str):
            raise InvalidPromptError(f"prompt must be a text, got {shown(text)}")
        ids = prompts.encode(text, special)
        made = {
            "tokens": ids,
            "count": len(ids),
            "max_model_len": self._service.facts.max_model_len,
        }
        if read_flag(given, "return_token_strs"):
            backend = self._service.facts.tokenizer.backend
            made["token_strs"] = [backend.id_to_token(token_id) for token_id in ids]
        return made

    def _text(self, body: Any) -> dict[str, Any]:
        given = self._checked(body)
        ids = given.get("tokens")
        if not isinstance(ids, list) or not all(_is_id(token_id) for token_id in ids):
            raise InvalidPromptError(f"tokens must be a list of token ids, got {shown(ids)}")
        tokenizer = self._service.facts.tokenizer
        return {"prompt": tokenizer.decode(ids, skip_special_tokens=False)}

    def _checked(self, body: Any) -> dict[str, Any]:
        given = check_object(body)
        self._service.check_model(given.get("model"))
        return given


def _is_id(value: Any) -> bool:
    whole = integer(value)
    return whole is not None and 0 <= whole <= MAX_ID
