"""`nanoengine chat`: a conversation in the terminal.

Ctrl-C ends the answer and keeps what came; at the prompt it clears the line. The end of input
(Ctrl-D) ends the chat. Without a terminal it reads the same lines from a file.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from io import TextIOWrapper

from nanoengine.cli.answers import Model, Statistics, open_model
from nanoengine.cli.flags import engine_config, sampling_settings
from nanoengine.errors import InvalidPromptError, RequestError, near_name, shown

QUOTES = '"""'
HELP = f"""\
/system TEXT  set the system message; /system alone removes it
/reset        forget the conversation, and keep the system message
/stats        tokens and speed, of the last answer and of all; where the KV lies
/help         this list
/exit         end the chat, as Ctrl-D does
{QUOTES}           begins and ends a message of several lines
Ctrl-C ends an answer. A space before a / sends it as text."""
COMMANDS = ("system", "reset", "stats", "help", "exit")
ENDS = ("/exit", "/quit", "/bye")  # of llama.cpp and Ollama


def chat(args: argparse.Namespace) -> int:
    """Talk until the input ends; returns the exit status."""
    config, sampling = engine_config(args), sampling_settings(args)
    with open_model(config, sampling, args.quiet) as model:
        if not model.llm.tokenizer.has_chat_template:
            raise InvalidPromptError(
                f"{args.model} has no chat template; complete a text with: nanoengine run "
                f"{shlex.quote(args.model)} --raw"
            )
        model.say("/help lists the commands; Ctrl-D ends the chat")
        talk = Conversation(model, args.system)
        if sys.stdin.isatty():
            _use_line_editing()
        _read_any_bytes()
        while _take_message(talk):
            pass
    return 0


def _take_message(talk: Conversation) -> bool:
    """Read and answer one message; False at the end of the input, and at /exit. On a terminal,
    Ctrl-C drops what was typed.
    """
    try:
        text = read_message()
        if text is None or text.strip() in ENDS:
            return False
        talk.take(text)
        return True
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        print("\n(Ctrl-D ends the chat)", flush=True)
        return True


class Conversation:
    """The messages so far. Takes lines: commands, or messages that the model answers."""

    def __init__(self, model: Model, system: str | None) -> None:
        self._model = model
        self._system = system
        self._messages: list[dict[str, str]] = []
        self._last = Statistics()
        self._total = Statistics()

    def take(self, text: str) -> None:
        """Obey a command or answer a message."""
        if not text.strip():
            return
        if text.startswith("/"):
            self._obey(*text[1:].partition(" ")[::2])
            return
        self._messages.append({"role": "user", "content": text})
        try:
            self._answer()
        except RequestError as error:
            self._messages.pop()
            print(f"error: {error} (/reset begins anew)", file=sys.stderr, flush=True)

    def _obey(self, command: str, rest: str) -> None:
        if command == "system":
            self._system = rest.strip() or None
        elif command == "reset":
            self._messages.clear()
        elif command == "stats":
            print(f"last: {self._last}\nall:  {self._total}\n{self._model.llm.stats()}", flush=True)
        elif command == "help":
            print(HELP, flush=True)
        else:
            near = near_name(command, COMMANDS)
            hint = f"; did you mean /{near}?" if near else "; /help lists the commands"
            print(f"error: unknown command {shown('/' + command)}{hint}", file=sys.stderr)

    def _answer(self) -> None:
        """Stream the answer; Ctrl-C ends it, and what came of it stays in the conversation."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        pieces: list[str] = []
        end = ""
        self._last = Statistics()
        try:
            messages = [*system, *self._messages]
            with self._model.llm.stream(messages, self._model.params) as stream:
                for counts in (self._last, self._total):
                    counts.begin(len(stream.request.prompt_token_ids))
                for delta in self._model.deltas(stream):
                    for counts in (self._last, self._total):
                        counts.add(delta)
                    pieces.append(delta.text)
                    print(delta.text, end="", flush=True)
        except KeyboardInterrupt:
            end = " [ended]"
        # Before anything is printed: another Ctrl-C must not leave a question without its answer.
        self._messages.append({"role": "assistant", "content": "".join(pieces)})
        print(end, flush=True)
        self._last.cut = self._model.what_cut(self._last)
        if self._last.cut:
            self._model.say(self._last.cut)


def read_message() -> str | None:
    """The next message; None at the end of the input."""
    text = _read_line("> ")
    if text is None or not text.startswith(QUOTES):
        return text
    lines = [text.removeprefix(QUOTES)]
    while not lines[-1].endswith(QUOTES):
        more = _read_line(". ")
        if more is None:
            return None
        lines.append(more)
    return "\n".join(lines).removesuffix(QUOTES).strip("\n")


def _read_any_bytes() -> None:
    """Text that is not UTF-8 is refused as a message, and does not end the chat."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")


def _read_line(prompt: str) -> str | None:
    """A line without its end; None at the end of the input. Prompts only on a terminal."""
    try:
        return input(prompt if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _use_line_editing() -> None:
    """Arrow keys and history at the prompt, where Python has them: input() uses it. A paste of
    several lines is one message, which Python turns off.
    """
    try:
        import readline
    except ImportError:
        return
    if os.environ.get("TERM", "dumb") != "dumb":  # which would show the codes around a paste
        readline.parse_and_bind("set enable-bracketed-paste on")
