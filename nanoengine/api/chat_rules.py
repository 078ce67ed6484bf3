"""ChatRules: how the answers of a chat are held, and how they are read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from nanoengine.api.request_forms import Tools
from nanoengine.errors import InvalidParamsError
from nanoengine.outputs import CompletionOutput, RequestOutput
from nanoengine.sampling_params import SamplingParams
from nanoengine.text.answer_parser import ChatParsers
from nanoengine.text.tools import ToolUse, read_tools


@dataclass(frozen=True, slots=True)
class ChatRules:
    """Of a chat with these tools. shown: the tools that the chat template shows to the model; use:
    those that an answer may call.
    """

    parsers: ChatParsers
    shown: Tools
    use: ToolUse | None

    @classmethod
    def of(cls, parsers: ChatParsers, tools: Tools, choice: Any) -> Self:
        """choice: OpenAI's tool_choice. Raises InvalidParamsError if the tools cannot be called and
        a choice says that they must be.
        """
        try:
            use = read_tools(tools, choice)
            parsers.check(use)
        except InvalidParamsError:
            if choice is not None:
                raise
            use = None
        return cls(parsers, None if choice == "none" else tools, use)

    def params(self, params: SamplingParams) -> SamplingParams:
        """Parameters that hold the answer. Raises InvalidParamsError if they cannot."""
        return self.parsers.params(params, self.use)

    def with_messages(self, output: RequestOutput) -> RequestOutput:
        """The output with the message that each of its texts is."""

        def with_message(made: CompletionOutput) -> CompletionOutput:
            message = self.parsers.message(made.text, output.prompt or "", self.use)
            return replace(made, message=message)

        return replace(output, outputs=[with_message(made) for made in output.outputs])
