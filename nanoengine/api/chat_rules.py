"""ChatRules: how the answers of a chat are held, and how they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

from nanoengine.errors import InvalidParamsError
from nanoengine.outputs import CompletionOutput, RequestOutput, StreamDelta
from nanoengine.sampling_params import SamplingParams
from nanoengine.text.answer_parser import AnswerParser, ChatParsers, delta_of
from nanoengine.text.rendering import Rendering
from nanoengine.text.tools import ToolUse, read_tools


@dataclass(frozen=True, slots=True)
class ChatRules:
    """Of chats that are rendered so. use: the tools that an answer may call."""

    parsers: ChatParsers
    rendering: Rendering
    use: ToolUse | None

    @classmethod
    def of(cls, parsers: ChatParsers, rendering: Rendering, choice: Any = None) -> Self:
        """choice: OpenAI's tool_choice. Raises InvalidParamsError if the tools cannot be called and
        a choice says that they must be.
        """
        try:
            use = read_tools(rendering.tools, choice)
            parsers.check(use)
        except InvalidParamsError:
            if choice is not None:
                raise
            use = None
        if choice == "none":
            rendering = replace(rendering, tools=None)
        return cls(parsers, rendering, use)

    def params(self, params: SamplingParams) -> SamplingParams:
        """Parameters that hold the answer. Raises InvalidParamsError if they cannot."""
        return self.parsers.params(params, self.use)

    def with_messages(self, output: RequestOutput) -> RequestOutput:
        """The output with the message that each of its texts is."""

        def with_message(made: CompletionOutput) -> CompletionOutput:
            read = self.parsers.message(made.text, output.prompt or "", self.use, self._goes_on)
            return replace(made, message=read)

        return replace(output, outputs=[with_message(made) for made in output.outputs])

    def reader(self, prompt: str) -> MessageReader:
        """Of the deltas of the answers to a prompt."""
        return MessageReader(lambda: self.parsers.parser(prompt, self.use, self._goes_on))

    @property
    def _goes_on(self) -> bool:
        return self.rendering.continue_final_message


class MessageReader:
    """Reads the messages of a prompt's answers from their deltas, as they come."""

    def __init__(self, make_parser: Callable[[], AnswerParser]) -> None:
        self._make_parser = make_parser
        self._begun: dict[int, AnswerParser] = {}  # by the number of the completion

    def read(self, delta: StreamDelta) -> StreamDelta:
        """The delta with what it says."""
        if delta.index not in self._begun:
            self._begun[delta.index] = self._make_parser()
        pieces = self._begun[delta.index].read(delta.text, delta.finish_reason is not None)
        return replace(delta, message=delta_of(pieces))
