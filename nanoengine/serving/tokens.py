"""/tokenize, /detokenize and /tokenizer_info, with vLLM's bodies."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from nanoengine.errors import InvalidPromptError, integer, shown
from nanoengine.serving.openai_keys import EMPTY, check_object, given_keys
from nanoengine.serving.openai_keys import REFUSED as REFUSED_IN_CHATS
from nanoengine.serving.openai_requests import plain_messages, read_flag, read_rendering
from nanoengine.serving.openapi import DETOKENIZE, TOKENIZE, body_of
from nanoengine.serving.service import Service, json_response
from nanoengine.text.tools import REQUIRED, read_tools

MAX_ID = (1 << 32) - 1
SHARED = ("model", "add_special_tokens", "return_token_strs")
OF_PROMPT = (*SHARED, "prompt")
OF_CHAT = (
    *(*SHARED, "messages", "tools", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message"),
)
OF_TOKENS = ("model", "tokens")
REFUSED = {name: REFUSED_IN_CHATS[name] for name in ("chat_template",)}


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
        is_chat = check_object(body).get("messages") is not None
        given = self._checked(body, OF_CHAT if is_chat else OF_PROMPT)
        prompts = self._service.prompts
        special = read_flag(given, "add_special_tokens", not is_chat)
        text = self._chat_text(given) if is_chat else given.get("prompt")
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

    def _chat_text(self, given: dict[str, Any]) -> str:
        """A conversation as its template writes it."""
        prompts, messages = self._service.prompts, plain_messages(given["messages"])
        # A choice that any model can follow whose template shows tools.
        given_tools = given.get("tools", [])
        use = None if given_tools in EMPTY else read_tools(given_tools, REQUIRED)
        prompts.parsers.check(use)
        return prompts.rendered(messages, read_rendering(given, use))

    def _text(self, body: Any) -> dict[str, Any]:
        given = self._checked(body, OF_TOKENS)
        ids = given.get("tokens")
        if not isinstance(ids, list) or not all(_is_id(token_id) for token_id in ids):
            raise InvalidPromptError(f"tokens must be a list of token ids, got {shown(ids)}")
        tokenizer = self._service.facts.tokenizer
        return {"prompt": tokenizer.decode(ids, skip_special_tokens=False)}

    def _checked(self, body: Any, known: tuple[str, ...]) -> dict[str, Any]:
        given = given_keys(body, known, REFUSED)
        self._service.check_model(given.get("model"))
        return given


def _is_id(value: Any) -> bool:
    whole = integer(value)
    return whole is not None and 0 <= whole <= MAX_ID
