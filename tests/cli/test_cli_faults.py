"""The command line where streams are missing, disks are full, and Ctrl-C comes at a bad time."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanoengine.cli import answers, serve
from nanoengine.cli.batch_files import AnswerFile, BatchFileError, read_lines, survey
from nanoengine.cli.chat import Conversation
from nanoengine.cli.main import FAILED, MISUSED, main
from nanoengine.errors import EngineError

ROOT = Path(__file__).parents[2]
FLAGS = ["--num-threads", "1", "--dtype", "float32", "--max-tokens", "4"]


def test_a_full_disk_behind_stdout_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["--version"]) == FAILED
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space left"):
            full.close()
    told = capsys.readouterr().err
    assert told.startswith("error: the output cannot be written: No space left on device; make")


def run_with_stderr(stderr: Any, *argv: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "nanoengine", *argv]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, timeout=60)


def test_an_answer_is_given_where_stderr_is_full(tiny: Callable[[str], Path]) -> None:
    with open("/dev/full", "w") as full:
        flags = [*FLAGS, "--max-model-len", "64", "--temperature", "0", "--ignore-eos"]
        ran = run_with_stderr(full, "run", str(tiny("qwen3")), "hello", "--raw", *flags)
    assert ran.returncode == 0 and len(ran.stdout.strip()) > 1


def test_an_error_that_nobody_reads_has_its_status() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as gone:
        assert run_with_stderr(gone, "rum").returncode == MISUSED


def test_files_do_not_take_the_numbers_of_missing_streams(tmp_path: Path) -> None:
    """What a library prints would go into the answers of a batch."""
    told = tmp_path / "told"
    program = (
        "import sys; from nanoengine.cli.main import main; main(['--version'])\n"
        f"file = open({str(told)!r}, 'w'); print(file.fileno(), sys.stdin.read(), file=file)"
    )
    command = f'exec {sys.executable} -c "$1" <&- >&- 2>&-'
    subprocess.run(["sh", "-c", command, "sh", program], cwd=ROOT, check=True, timeout=60)
    assert int(told.read_text()) > 2


def test_a_chat_without_stdin_ends(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["chat", str(tiny("qwen3")), *FLAGS]) == 0


class Interrupted:
    """A model, and its LLM, whose answers are interrupted after a word."""

    params = None

    @property
    def llm(self) -> Any:
        return self

    def stream(self, messages: list[dict[str, str]], _: object) -> Any:
        roles = [message["role"] for message in messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
        return nullcontext(SimpleNamespace(request=SimpleNamespace(prompt_token_ids=[1])))

    def deltas(self, _: object) -> Iterator[Any]:
        yield SimpleNamespace(text="word", token_ids=[1], finish_reason=None)
        raise KeyboardInterrupt

    def what_cut(self, _: object) -> str:
        return ""


def test_a_second_ctrl_c_leaves_no_question_without_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many templates refuse two questions in a row: the chat could not go on."""
    talk = Conversation(Interrupted(), None)  # type: ignore[arg-type]
    is_impatient = True

    def write(text: str) -> int:
        if is_impatient and "ended" in text:
            raise KeyboardInterrupt
        return len(text)

    monkeypatch.setattr(sys.stdout, "write", write)
    with pytest.raises(KeyboardInterrupt):
        talk.take("Hello")
    is_impatient = False
    talk.take("Hello again")


@contextmanager
def files_of(num_bytes: int) -> Iterator[None]:
    """Files of this process may have so many bytes, as if the disk were full then."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_batch_goes_on_after_its_disk_was_full(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    row = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    source.write_text("".join(json.dumps({"custom_id": f"{n}", **row}) + "\n" for n in range(9)))
    ids = survey(source).ids
    with AnswerFile(target, ids) as file, files_of(1000):
        match = r"out.jsonl after \d answers: File too large; make room there, and the same command"
        with pytest.raises(BatchFileError, match=match):
            for line in read_lines(source):
                file.add(line, {"body": "x" * 100}, None)
    assert target.stat().st_size == 1000  # the last line is torn
    with AnswerFile(target, ids) as file:
        assert 0 < len(file.done) < 9
        for line in read_lines(source):
            if line.id not in file.done:
                file.add(line, {"body": "x" * 100}, None)
    found = [json.loads(line)["custom_id"] for line in target.read_text().splitlines()]
    assert found == [f"{n}" for n in range(9)]


@pytest.mark.parametrize("command", ["run", "serve"])
def test_ctrl_c_within_imports_raises_nothing(
    command: str, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a callback of an import it would be lost, and imports of other threads would never end."""
    handlers: list[Any] = []

    class Imported:
        def __getattr__(self, name: str) -> Any:
            handlers.append(signal.getsignal(signal.SIGINT))
            raise EngineError("that is enough")

    def loaded(*_: object) -> Any:
        return Imported().LLM

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if command == "run":
            monkeypatch.setitem(sys.modules, "nanoengine", Imported())
            monkeypatch.setattr(answers, "check_tokenizer_is_there", lambda _: None)
        monkeypatch.setattr(serve, "_loaded", loaded)
        argv = [command, str(tiny("qwen3")), *(["x"] if command == "run" else ["--port", "0"])]
        assert main(argv) == FAILED
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, previous)
    assert handlers and all(handler is signal.SIG_DFL for handler in handlers)


# Ctrl-C when a module is looked for.
AT_AN_IMPORT = """
import signal, sys
class AtImport:
    def find_spec(self, name, *_):
        if name == sys.argv[1]:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, AtImport())
signal.signal(signal.SIGINT, signal.default_int_handler)
from nanoengine.__main__ import main
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
sys.exit(main(["--version"]))
"""


@pytest.mark.parametrize("module", ["errors", "sampling_params", "cli.main", "cli.flags", "none"])
def test_ctrl_c_while_the_command_starts_raises_nothing(module: str) -> None:
    command = [sys.executable, "-c", AT_AN_IMPORT, f"nanoengine.{module}"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60)
    assert ran.stderr == b""
    assert ran.returncode == (0 if module == "none" else -signal.SIGINT)  # 130 in a shell


def test_ctrl_c_while_python_ends_raises_nothing() -> None:
    program = (
        "import signal, sys; from nanoengine.cli.main import main; sys.argv[1:] = ['--version']\n"
        "main(); signal.raise_signal(signal.SIGINT)"
    )
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (-signal.SIGINT, b"")
