"""Splits the thoughts of a model from its answer: a row for each family, with vLLM's names.

Sources: the chat templates of Qwen 3, DeepSeek-R1, GLM 4.5 and Magistral. gpt-oss has channels,
which tool_parser.py reads.
"""

from __future__ import annotations

from dataclasses import dataclass

from nanoengine.text.answer_pieces import Kind, Piece, PieceReader, Steps, num_held_back


@dataclass(frozen=True, slots=True)
class ReasoningSyntax:
    """What thoughts begin and end with. The first row whose `begin` is in the chat template is its
    model's. in_channels: all of the answer is in gpt-oss's channels.
    """

    name: str
    begin: str
    end: str
    in_channels: bool = False

    def is_open_after(self, prompt: str) -> bool:
        """Whether a prompt ends with what thoughts begin with: the answer goes on with them."""
        return prompt[-64:].rstrip().endswith(self.begin)


REASONING_SYNTAXES = (
    ReasoningSyntax("openai_gptoss", "<|channel|>analysis<|message|>", "<|end|>", in_channels=True),
    ReasoningSyntax("mistral", "[THINK]", "[/THINK]"),
    ReasoningSyntax("seed_oss", "<seed:think>", "</seed:think>"),
    ReasoningSyntax("deepseek_r1", "<think>", "</think>"),
)
ALIASES = dict.fromkeys(("qwen3", "glm45"), "deepseek_r1")  # the same tags
BY_NAME = {row.name: row for row in REASONING_SYNTAXES}
BY_NAME |= {alias: BY_NAME[name] for alias, name in ALIASES.items()}


def reasoning_of(template: str) -> ReasoningSyntax | None:
    """How the model of a chat template thinks; None if it does not."""
    return next((row for row in REASONING_SYNTAXES if row.begin in template), None)


class ReasoningParser(PieceReader):
    """Splits an answer into one block of thoughts, which comes first if there is one, and its
    content. Line breaks around both belong to neither.
    """

    def __init__(self, syntax: ReasoningSyntax, is_open: bool) -> None:
        """is_open: whether the prompt has begun the thoughts."""
        self._syntax = syntax
        self._is_open = is_open
        super().__init__()

    def _read(self) -> Steps[None]:
        begins = yield from self.skip(self._syntax.begin)
        if begins or self._is_open:
            yield from self._lines_skipped()
            yield from self._thoughts()
            yield from self._lines_skipped()
        while not self.has_ended:
            yield Piece(Kind.CONTENT, self.take(len(self.left)))
            yield None
        yield Piece(Kind.CONTENT, self.take(len(self.left)))

    def _thoughts(self) -> Steps[None]:
        """Give out all before the end, but for the line breaks before it."""
        end = self._syntax.end
        while (at := self.left.find(end)) < 0 and not self.has_ended:
            certain = len(self.left) - num_held_back(self.left, (end,))
            yield Piece(Kind.REASONING, self.take(len(self.left[:certain].rstrip("\n"))))
            yield None
        text = self.left[:at] if at >= 0 else self.left
        self.take(len(text) + len(end))
        yield Piece(Kind.REASONING, text.rstrip("\n"))

    def _lines_skipped(self) -> Steps[None]:
        while True:
            self.left = self.left.lstrip("\n")
            if self.left or self.has_ended:
                return
            yield None
