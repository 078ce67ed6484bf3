"""The parser of the command `nanoengine`, its subcommands and its exit statuses.

Status 0: done; 1: a failure, such as a model that cannot be loaded; 2: a wrong flag or setting;
130: Ctrl-C; 141: the reader of the output left. An error is one line on stderr, never a traceback.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from typing import Any, NoReturn

import nanoengine
from nanoengine.bench.workload import count
from nanoengine.cli.flags import add_engine_flags, add_sampling_flags
from nanoengine.cli.interrupts import ended_by_ctrl_c
from nanoengine.cli.standard_streams import let_stderr_fail, open_missing_streams
from nanoengine.cli.usage import UsageError, unknown_command, unknown_flag, without_idle_flags
from nanoengine.config.engine import MAX_GIB
from nanoengine.devices.logs import LEVELS, LOG_LEVEL, long_work_shown, show_logs
from nanoengine.errors import TRACEBACK, EngineError, shown

FAILED, MISUSED = 1, 2
INTERRUPTED, NO_READER = 128 + signal.SIGINT, 128 + signal.SIGPIPE
# Commands whose arguments are those of a program in nanoengine.bench.
DOORS = {
    "bench": "benchmarks: nanoengine bench offline --help",
    "ruler": "the RULER needle test: nanoengine ruler --help",
}
MODEL_HELP = "folder, .gguf file, hub id (organisation/model) or smollm2-135m"


class Parser(argparse.ArgumentParser):
    """Raises UsageError where argparse prints its usage and exits, and for an unknown flag."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError with the command that explains more."""
        raise UsageError(f"{message} (see {self.prog} --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Raise UsageError for a flag that this parser does not know and that asks for anything."""
        if self._subparsers is None:  # the arguments are its own
            args = without_idle_flags(args or (), self)
        found, extra = super().parse_known_args(args, namespace)
        # argparse before Python 3.13 gives an argument that may be left out up at the first flag.
        for action in self._get_positional_actions():
            is_left = action.nargs == "?" and getattr(found, action.dest) is None
            if is_left and extra and (extra[0] == "-" or not extra[0].startswith("-")):
                text = extra.pop(0)
                self._check_value(action, text)
                setattr(found, action.dest, text)
        if extra:
            raise UsageError(unknown_flag(extra[0], self))
        return found, extra


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    open_missing_streams()
    if argv is None:
        let_stderr_fail()
    if isinstance(sys.stdout, io.TextIOWrapper):  # of a terminal that lacks a letter: show a ?
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            given = sys.argv[1:] if argv is None else argv
            with nullcontext() if "--quiet" in given else long_work_shown():
                status = _run(given)
        except SystemExit as end:  # argparse's --help and --version
            status = end.code if isinstance(end.code, int) else 0
        print(end="", flush=True)  # here a missing reader is noticed, and not when Python ends
        return status
    except UsageError as error:
        return _fail(error, MISUSED)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # What is left in the buffer has no reader: Python would complain when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    except EngineError as error:
        return _fail(error, FAILED)
    except OSError as error:
        return _fail(_unwritten(error), FAILED)
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        reason = f"unexpected {type(error).__name__}: {error}"
        return _fail(RuntimeError(f"{reason} ({TRACEBACK}=1 shows where)"), FAILED)
    finally:
        if argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # while Python ends it is no error either


def _run(argv: list[str]) -> int:
    if argv and argv[0] in DOORS:
        return _run_door(argv[0], argv[1:])
    parser, commands = make_parser()
    if argv and argv[0][:1] != "-" and argv[0] not in commands:
        raise UsageError(unknown_command(argv[0], (*commands, *DOORS)))
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return MISUSED
    if args.log_level:
        show_logs(args.log_level)
    name = args.command.replace("-", "_")
    with ended_by_ctrl_c():
        module = import_module(f"nanoengine.cli.{name}")
    run: Callable[[argparse.Namespace], int] = getattr(module, name)
    return run(args)


def _run_door(name: str, argv: list[str]) -> int:
    """Run a program of nanoengine.bench."""
    if name == "bench":
        from nanoengine.bench.main import main as bench

        bench(argv, "nanoengine bench", Parser)
        return 0
    from nanoengine.bench.ruler import main as ruler

    return ruler(argv, "nanoengine ruler", Parser)


def _unwritten(error: OSError) -> OSError:
    """The error, or a better one if it is stdout's, which names no file."""
    try:
        print(end="", flush=True)  # what could not be written is still there
    except OSError as again:
        where = "make room where stdout goes, or direct it elsewhere"
        return OSError(f"the output cannot be written: {again.strerror}; {where}")
    return error


def _fail(error: Exception, status: int) -> int:
    lines = str(error).splitlines() or [type(error).__name__]
    print(f"error: {' '.join(line.strip() for line in lines)}", file=sys.stderr)
    return status


def make_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser, and those of its commands by their names."""
    parser = Parser(
        prog="nanoengine",
        description="LLM inference with contexts larger than GPU memory.",
        epilog="example: nanoengine chat smollm2-135m",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action="version", version=f"nanoengine {nanoengine.__version__}"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    made: dict[str, Parser] = {}
    for name, usage, text, fill in (
        ("run", "MODEL [PROMPT|FILE|-]", "answer one prompt", _fill_run),
        ("chat", "MODEL", "talk to a model in the terminal", _fill_chat),
        ("serve", "MODEL", "a server with OpenAI's and Anthropic's APIs", _fill_serve),
        (
            "plan",
            "MODEL",
            "what fits into which memory, and how fast; loads no weights",
            _fill_plan,
        ),
        (
            "batch",
            "IN.jsonl OUT.jsonl --model MODEL",
            "answer a file of requests in OpenAI's batch format; goes on after a kill",
            _fill_batch,
        ),
        (
            "models",
            "[rm NAME]",
            "the models on this machine, their sizes, and which run; rm removes one",
            _fill_models,
        ),
        ("collect-env", "", "versions and hardware, for a bug report", _fill_collect_env),
    ):
        made[name] = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        made[name].usage = f"nanoengine {name} [flags] {usage}".rstrip()
        fill(made[name])
        made[name].add_argument(
            "--log-level",
            choices=LEVELS,
            help="show what the engine logs, on stderr "
            f"[{'info' if name == 'serve' else 'warning'}; ${LOG_LEVEL}]",
        )
    for name, text in DOORS.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser, made


def _fill_run(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "prompt",
        metavar="PROMPT|FILE|-",
        nargs="?",
        help="the prompt, a file that holds it, or - for standard input (the default)",
    )
    kind = parser.add_mutually_exclusive_group()
    for flag, is_chat, text in (
        ("--chat", True, "put the prompt into the model's chat template"),
        ("--raw", False, "complete the prompt as it is"),
    ):
        kind.add_argument(flag, dest="is_chat", action="store_const", const=is_chat, help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    _add_common(parser)


def _fill_chat(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    _add_common(parser)


def _fill_serve(parser: Parser) -> None:
    from nanoengine.cli.serve import add_server_flags

    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--quiet", action="store_true", help="nothing but errors on stderr")
    add_server_flags(parser)
    add_engine_flags(parser)


def _fill_plan(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    wanted = parser.add_argument_group("what is asked, and the machine")
    for flag, kind, metavar, text in (
        ("--context", count, "TOKENS", "tokens of a request (default: the longest that fits)"),
        ("--gpu-gib", _amount, "GIB", "memory of each GPU; 0: no GPU (default: what is here)"),
        ("--ram-gib", _positive, "GIB", "RAM that may be taken (default: what is free here)"),
        (
            "--link-gbps",
            _positives,
            "GB/S",
            "copies from RAM to the GPU, in GB/s; of several, while all copy, as in 25,12",
        ),
        ("--read-gbps", _positive, "GB/S", "reads of the memory that weights lie in, in GB/s"),
    ):
        wanted.add_argument(flag, type=kind, metavar=metavar, help=text)
    wanted.add_argument(
        "--measure", action="store_true", help="measure decode steps here first, some seconds"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_flags(parser)


def _fill_batch(parser: Parser) -> None:
    parser.add_argument("input", metavar="IN.jsonl", help="lines of custom_id, method, url, body")
    parser.add_argument(
        "output", metavar="OUT.jsonl", help="a line for each; may hold some already"
    )
    parser.add_argument("--model", required=True, metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--json", action="store_true", help="print a summary as one JSON object")
    parser.add_argument("--quiet", action="store_true", help="nothing but errors on stderr")
    add_engine_flags(parser)


def _fill_models(parser: Parser) -> None:
    parser.add_argument("action", nargs="?", choices=["rm"], help="rm: remove the model NAME")
    parser.add_argument("name", nargs="?", metavar="NAME", help="as the list shows it")
    parser.add_argument("--yes", action="store_true", help="remove without a question")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _fill_collect_env(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_common(parser: Parser) -> None:
    parser.add_argument("--quiet", action="store_true", help="nothing but errors on stderr")
    add_sampling_flags(parser)
    add_engine_flags(parser)


def _amount(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < MAX_GIB:
        raise argparse.ArgumentTypeError(f"must be from 0 to {MAX_GIB}, got {shown(text)}")
    return number


def _positives(text: str) -> tuple[float, ...]:
    return tuple(map(_positive, text.split(",")))


def _positive(text: str) -> float:
    number = _amount(text)
    if not number:
        raise argparse.ArgumentTypeError("must be above 0")
    return number
