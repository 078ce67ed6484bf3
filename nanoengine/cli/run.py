"""`nanoengine run`: answers one prompt. The text goes to stdout as it comes, the rest to stderr."""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
from pathlib import Path

from nanoengine.cli.answers import Statistics, open_model
from nanoengine.cli.flags import engine_config, sampling_settings
from nanoengine.cli.usage import UsageError
from nanoengine.errors import counted


def run(args: argparse.Namespace) -> int:
    """Answer the prompt of the command line; returns the exit status."""
    config, sampling = engine_config(args), sampling_settings(args)
    prompt = read_prompt("-" if args.prompt is None else args.prompt)
    with open_model(config, sampling, args.quiet) as model:
        has_template = model.llm.tokenizer.has_chat_template
        is_chat = has_template if args.is_chat is None else args.is_chat
        model.say(f"{'chat' if is_chat else 'raw'}: {counted(len(prompt), 'character')}")
        statistics = Statistics()
        messages = [{"role": "user", "content": prompt}]
        pieces: list[str] = []
        with model.llm.stream(messages if is_chat else prompt, model.params) as stream:
            statistics.begin(len(stream.request.prompt_token_ids))
            for delta in model.deltas(stream):
                statistics.add(delta)
                pieces.append(delta.text)
                if not args.json:
                    print(delta.text, end="", flush=True)
        statistics.cut = model.what_cut(statistics)
        if args.json:
            print(json.dumps({"model": args.model, "text": "".join(pieces), **statistics.row()}))
        else:
            print(flush=True)
        model.say(str(statistics))
    return 0


def read_prompt(given: str) -> str:
    """The prompt itself, the content of the file or pipe of that name, or standard input for "-". A
    mark of byte order at the beginning of a file is no part of it.

    Raises UsageError if it is empty or no text in UTF-8.
    """
    where = "the prompt"
    try:
        if given == "-":
            where = "standard input"
            if sys.stdin is None or sys.stdin.isatty():
                raise UsageError(
                    "there is no prompt: give a text, a file, or - and standard input; a "
                    "conversation is nanoengine chat MODEL"
                )
            text = sys.stdin.buffer.read().decode("utf-8-sig")
        elif _is_file_or_pipe(given):
            where = given
            text = Path(given).read_text(encoding="utf-8-sig")
        else:
            given.encode()  # bytes of a command line that are no text are surrogates
            text = given
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise UsageError(f"{where} is no text in UTF-8: {error.reason}") from error
    if not text:
        raise UsageError(f"{where} is empty")
    return text


def _is_file_or_pipe(given: str) -> bool:
    """Whether it names something to read. A shell's <(...) is a pipe."""
    try:
        mode = os.stat(given).st_mode
    except (OSError, ValueError):  # most prompts, also those that are too long for a name
        return False
    return stat.S_ISREG(mode) or stat.S_ISFIFO(mode)
