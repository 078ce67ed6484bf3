"""`nanoengine batch`: answers a file of OpenAI's batch lines, and goes on after a kill.

Answers are written as they come, not in the order of the input. A line that cannot be answered gets
an error, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from nanoengine.cli.answers import Model, open_model
from nanoengine.cli.batch_files import AnswerFile, Line, read_lines, survey
from nanoengine.cli.flags import engine_config
from nanoengine.cli.interrupts import noted_ctrl_c
from nanoengine.cli.usage import UsageError
from nanoengine.errors import RequestError, counted, shown
from nanoengine.sampling_params import SamplingParams, seeded
from nanoengine.serving.answer_forms import OWN_FORM
from nanoengine.serving.openai_answers import error_body
from nanoengine.serving.openai_chunks import ChatChunks, CompletionChunks
from nanoengine.serving.openai_keys import check_refused
from nanoengine.serving.openai_requests import (
    ChatRequest,
    CompletionRequest,
    named_as_given,
    read_request,
)
from nanoengine.text.answer_parser import ChatParsers
from nanoengine.text.detokenizer import token_bytes

OK = 200
NO_STREAM = ((False,), "each line of the output is a whole answer")


@dataclass(frozen=True, slots=True)
class _Open:
    """A line whose texts are being generated; streams: one for each prompt (DeltaStreams)."""

    line: Line
    request: ChatRequest | CompletionRequest
    streams: tuple[Any, ...]

    @property
    def has_ended(self) -> bool:
        """Whether all its texts have."""
        return all(each.request.has_ended for each in self.streams)


@dataclass(slots=True)
class Counts:
    """Tokens of the lines that were answered."""

    prompt_tokens: int = 0
    output_tokens: int = 0


def batch(args: argparse.Namespace) -> int:
    """Answer the lines that have no answer yet; status 1 if any line has an error."""
    config = engine_config(args)
    source, target = Path(args.input), Path(args.output)
    _check_paths(source, target)
    found = survey(source)
    start, counts = time.perf_counter(), Counts()
    with AnswerFile(target, found.ids) as answers:
        resumed = len(answers.done)
        if resumed < len(found.ids):
            with open_model(config, None, args.quiet) as model:
                _say_other_models(model, args.model, found.models)
                lines = (line for line in read_lines(source) if line.id not in answers.done)
                room = 2 * config.max_num_seqs  # as many wait as run
                runner = Runner(model, args.model, answers, counts, config.seed, room)
                try:
                    with (
                        _progress_bar(len(found.ids), resumed, args.quiet) as bar,
                        noted_ctrl_c() as check,
                    ):
                        runner.run(lines, bar, check)
                except KeyboardInterrupt:
                    model.say(
                        f"stopped with {len(answers.done)} of {len(found.ids)} answered; the same "
                        "command goes on"
                    )
                    raise
    row = {
        "model": args.model,
        "output": str(target),
        "requests": len(found.ids),
        "failed": answers.num_failed,
        "resumed": resumed,
        "prompt_tokens": counts.prompt_tokens,
        "output_tokens": counts.output_tokens,
        "elapsed_s": round(time.perf_counter() - start, 3),
    }
    if args.json:
        print(json.dumps(row))
    elif not args.quiet:
        print(_sentence(row), file=sys.stderr)
        if answers.first_error:
            print(f"the first error is of {answers.first_error}", file=sys.stderr)
    return 1 if answers.num_failed else 0


def _check_paths(source: Path, target: Path) -> None:
    """Raises UsageError for an input that cannot be read twice, and for an output that is no place
    of its own.
    """
    if str(source) == "-":
        raise UsageError("the input must be a file, as it is read twice; - is none: give its path")
    if str(target) == "-":
        raise UsageError(
            "the output must be a file, with which a batch goes on after a kill; - is none: give a "
            "path such as answers.jsonl"
        )
    if not source.is_file():
        what = "is no file" if source.exists() else "does not exist"
        raise UsageError(
            f"the input {source} {what}; check the path, and the current folder if it does not "
            "begin with /"
        )
    if target.is_dir() or not target.absolute().parent.is_dir():
        what = "is a folder" if target.is_dir() else "is in a folder that does not exist"
        raise UsageError(f"the output {target} {what}; give a file such as answers.jsonl")
    if target.exists() and not target.is_file():  # a device or a pipe, whose end never comes
        raise UsageError(
            f"the output {target} is no file, and a batch reads what is there first; give a path "
            "such as answers.jsonl"
        )
    if target.exists() and target.samefile(source):
        raise UsageError(
            f"the output {target} is the input itself; give a path of its own such as answers.jsonl"
        )


class Runner:
    """Keeps a model busy with lines: begins new ones as others end, at most `room` texts at once,
    and writes each answer when it is there.
    """

    def __init__(
        self, model: Model, name: str, answers: AnswerFile, counts: Counts, seed: int, room: int
    ) -> None:
        self._model = model
        self._name = name
        self._answers = answers
        self._counts = counts
        self._seed = seed
        self._room = room
        self._open: list[_Open] = []

        @cache
        def bytes_of(token_id: int) -> bytes:  # a model without a tokenizer need not be asked
            return token_bytes(model.llm.tokenizer, token_id)

        self._bytes_of = bytes_of

    @cached_property
    def _parsers(self) -> ChatParsers:
        return ChatParsers.of(self._model.llm.tokenizer)

    def run(self, lines: Iterator[Line], bar: Any, check: Callable[[], None]) -> None:
        """Answer all lines; bar: progress, a tqdm. check: called between steps and lines; what it
        raises ends the run.
        """
        before = len(self._answers.done)
        while True:
            while self._has_room() and (line := next(lines, None)) is not None:
                check()
                self._begin(line)
            check()
            if self._open:
                self._step()
            bar.update(len(self._answers.done) - before)
            before = len(self._answers.done)
            if not self._open:
                return

    def _has_room(self) -> bool:
        return sum(each.request.num_completions for each in self._open) < self._room

    def _begin(self, line: Line) -> None:
        """Queue a line, or answer it with an error."""
        if line.problem:
            self._answers.add(line, None, {"code": "invalid_line", "message": line.problem})
            return
        try:
            request = read_request(line.url, line.body, self._model.params)
            check_refused("stream", request.streaming is not None, NO_STREAM)
            with named_as_given({OWN_FORM: request.form_key}):
                streams = self._streams(line, request)
            self._open.append(_Open(line, request, streams))
        except RequestError as error:
            self._refuse(line, error)

    def _streams(self, line: Line, request: ChatRequest | CompletionRequest) -> tuple[Any, ...]:
        """A stream for each prompt; none stays open if one is refused.

        A cache_salt keeps users apart; all lines of a file are one user's.
        """
        llm, most = self._model.llm, request.params.max_tokens
        streams: tuple[Any, ...]
        if isinstance(request, ChatRequest):
            params = self._seeded(line, self._parsers.params(request.params, request.tools))
            rendering = request.rendering
            stream = llm.stream_chat(
                request.messages,
                params,
                rendering.add_generation_prompt,
                rendering.kwargs,
                rendering.tools,
                continue_final_message=rendering.continue_final_message,
            )
            streams = (stream,)
        else:
            # If one is refused, those before it are dropped, and that aborts them.
            streams = tuple(
                llm.stream(self._given(request, text), self._seeded(line, request.params, index))
                for index, text in enumerate(request.prompts)
            )
        if most is not None and not request.may_be_cut:
            for stream in streams:
                llm.llm_engine.inputs.check_room(len(stream.request.prompt_token_ids), most)
        return streams

    def _given(self, request: CompletionRequest, prompt: str | list[int]) -> Any:
        """A prompt as the engine takes it: ids where a text gets no special tokens."""
        if request.add_special_tokens or not isinstance(prompt, str):
            return prompt
        llm = self._model.llm
        ids = llm.tokenizer.encode_within(llm.plan.max_model_len, prompt, False)
        return {"prompt": prompt, "prompt_token_ids": ids}

    def _seeded(self, line: Line, params: SamplingParams, index: int = 0) -> SamplingParams:
        """A line without a seed gets one that it has in every run; index: of its prompt."""
        name = f"{line.custom_id}:{index}" if index else f"{line.custom_id}"
        return seeded(params, self._seed, name)

    def _step(self) -> None:
        """One step of the engine for all; write what has ended."""
        self._model.llm.step()
        for each in [each for each in self._open if each.has_ended]:
            self._open.remove(each)
            self._finish(each)

    def _finish(self, each: _Open) -> None:
        outputs = [stream.request.output() for stream in each.streams]
        for stream in each.streams:
            stream.close()
        try:
            body = self._body(each, outputs)
        except RequestError as error:
            self._refuse(each.line, error)
            return
        self._counts.prompt_tokens += body["usage"]["prompt_tokens"]
        self._counts.output_tokens += body["usage"]["completion_tokens"]
        self._answers.add(each.line, _response(each.line, OK, body), None)

    def _body(self, each: _Open, outputs: list[Any]) -> dict[str, Any]:
        """The answer to a line. Raises the error of an output that failed."""
        if failed := [output.error for output in outputs if output.error is not None]:
            raise failed[0]

        rest = each.line.id, self._name, self._bytes_of
        if isinstance(each.request, ChatRequest):
            return ChatChunks(each.request, *rest, self._parsers).whole(outputs)
        return CompletionChunks(each.request, *rest).whole(outputs)

    def _refuse(self, line: Line, error: RequestError) -> None:
        status, body = error_body(error, line.url)
        told = {"code": body["error"]["code"], "message": body["error"]["message"]}
        self._answers.add(line, _response(line, status, body), told)


def _response(line: Line, status: int, body: dict[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": line.id, "body": body}


def _say_other_models(model: Model, name: str, named: frozenset[str]) -> None:
    """Lines may name a model of another service."""
    others = sorted(named - {name})
    if others:
        shortened = ", ".join(map(shown, others[:3])) + (", ..." if others[3:] else "")
        model.say(f"lines that name another model ({shortened}) are answered by {name}")


def _progress_bar(total: int, done: int, is_quiet: bool) -> Any:
    from tqdm import tqdm

    # A file that collects stderr need not get a line every tenth of a second.
    seconds = 0.1 if sys.stderr is not None and sys.stderr.isatty() else 10.0
    return tqdm(
        total=total,
        initial=done,
        unit="request",
        mininterval=seconds,
        disable=is_quiet or sys.stderr is None,
    )


def _sentence(row: dict[str, Any]) -> str:
    text = f"{counted(row['requests'], 'request')}, {row['failed']} with an error"
    if row["resumed"] == row["requests"]:
        return f"{text}; all were answered before, in {row['output']}"
    if row["resumed"]:
        text += f"; {row['resumed']} were answered before"
    return (
        f"{text}; {counted(row['prompt_tokens'], 'token')} in, {row['output_tokens']} out, "
        f"{row['elapsed_s']:.1f} s; wrote {row['output']}"
    )
