"""nanoengine chat through a pseudo-terminal, and with its lines from a file."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from nanoengine import LLM, SamplingParams
from nanoengine.cli.main import FAILED, main

ROOT = Path(__file__).parents[2]
FLAGS = ["--temperature", "0", "--num-threads", "1", "--dtype", "float32"]
GREEDY = SamplingParams(temperature=0, max_tokens=6)
# A chat whose terminal is the pseudo-terminal, and whose steps take long enough to be interrupted.
PROGRAM = """
import fcntl, signal, sys, termios, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from nanoengine.cli.main import main
from nanoengine.engine.llm_engine import LLMEngine
step = LLMEngine.step
LLMEngine.step = lambda self: (time.sleep(0.05), step(self))[1]
sys.exit(main(sys.argv[1:]))
"""
CTRL_C, CTRL_D = b"\x03", b"\x04"


class Terminal:
    """A person at a terminal."""

    def __init__(self, arguments: list[str], term: str = "dumb") -> None:
        self._master, slave = pty.openpty()
        self.child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            cwd=ROOT,
            env=os.environ | {"TERM": term},
        )
        os.close(slave)
        self._unread = ""

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def read_until(self, pattern: str, seconds: float = 120) -> str:
        """What is on the screen up to the end of the first match."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self._unread, re.DOTALL)):
            ready, _, _ = select.select([self._master], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no {pattern!r} in {self._unread!r}"
            self._unread += os.read(self._master, 4096).decode(errors="replace")
        shown, self._unread = self._unread[: found.end()], self._unread[found.end() :]
        return shown

    def interrupt_until(self, pattern: str, tries: int = 10) -> None:
        """Type Ctrl-C until the pattern is shown: one that comes just before Python waits for a key
        is noticed with the next key only.
        """
        for _ in range(tries):
            self.type(CTRL_C)
            with suppress(AssertionError):
                self.read_until(pattern, 3)
                return
        raise AssertionError(f"no {pattern!r} after {tries} times Ctrl-C")

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        os.close(self._master)


@pytest.fixture(scope="module")
def folder(tiny: Callable[[str], Path]) -> Path:
    return tiny("qwen3")


@pytest.fixture
def terminal(folder: Path) -> Iterator[Terminal]:
    made = Terminal(["chat", str(folder), *FLAGS, "--max-tokens", "400", "--ignore-eos"])
    yield made
    made.close()


def test_ctrl_c_ends_the_answer_and_ctrl_d_the_chat(terminal: Terminal) -> None:
    assert "Ctrl-D ends the chat" in terminal.read_until("> ")
    terminal.type(b"Hello\n")
    terminal.read_until("Hello\r\n.")  # the answer has begun
    terminal.type(CTRL_C)
    terminal.read_until(r" \[ended\]\r\n> ")
    terminal.type(b"/stats\n")
    stats = terminal.read_until(r"all: .*> ")
    assert "KV in RAM" in stats and "prompt tokens were found" in stats
    found = re.search(r"last: \d+ tokens in, (\d+) out", stats)
    assert found and 0 < int(found[1]) < 400
    terminal.type(b"half a line")
    terminal.read_until("half a line")
    terminal.interrupt_until(r"\(Ctrl-D ends the chat\)\r\n> ")
    terminal.type(b'"""a\n')
    terminal.read_until(r"\. ")
    terminal.type(b'b"""\n')
    terminal.read_until('b"""\r\n.')
    terminal.type(CTRL_C)
    terminal.read_until(r" \[ended\]\r\n> ")
    terminal.type(CTRL_D)
    assert terminal.child.wait(timeout=60) == 0


@pytest.mark.breadth
def test_lines_that_are_pasted_at_once_are_one_message(folder: Path) -> None:
    terminal = Terminal(["chat", str(folder), *FLAGS, "--max-tokens", "6"], term="xterm")
    try:
        terminal.read_until("> ")
        terminal.type(b"\x1b[200~def f(x):\n    return x\n\nExplain this.\x1b[201~")
        terminal.read_until(r"Explain this\.")
        terminal.type(b"\r")
        terminal.read_until("was cut at 6 tokens")
        terminal.type(b"/stats\r")
        last, all_answers = re.findall(
            r"(\d+) tokens in, (\d+) out", terminal.read_until("requests ")
        )
        assert last == all_answers and int(last[1]) == 6  # one answer
        terminal.type(b"/bye\r")
        assert terminal.child.wait(timeout=60) == 0
    finally:
        terminal.close()


@pytest.mark.parametrize("word", ["/exit", "/quit", "/bye"])
def test_these_words_end_the_chat(
    word: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat(f"{word}\nHello\n", folder, monkeypatch)
    assert capsys.readouterr() == ("", "")


def chat(
    lines: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: str, status: int = 0
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert main(["chat", str(folder), *FLAGS, "--max-tokens", "6", "--quiet", *flags]) == status


def expected(folder: Path, *conversation: str, system: str | None = None) -> list[str]:
    """The library's answers to messages of one conversation."""
    messages = [{"role": "system", "content": system}] if system else []
    texts = []
    with LLM(folder, num_threads=1, dtype="float32") as llm:
        for text in conversation:
            messages.append({"role": "user", "content": text})
            answer = llm.chat(messages, GREEDY, use_tqdm=False)[0]["text"]
            texts.append(answer)
            messages.append({"role": "assistant", "content": answer})
    return texts


def test_an_answer_follows_from_the_conversation_so_far(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat("Hello\n\nAnd you?\n", folder, monkeypatch)
    first, second = expected(folder, "Hello", "And you?")
    assert capsys.readouterr() == (f"{first}\n{second}\n", "")
    assert second != expected(folder, "And you?")[0]


def test_a_cut_answer_is_told_at_once_and_by_stats(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n/stats\n"))
    assert main(["chat", str(folder), *FLAGS, "--max-tokens", "6"]) == 0
    out, err = capsys.readouterr()
    said = "the answer was cut at 6 tokens; --max-tokens allows more\n"
    assert err.endswith(f"\n{said}") and f" tok/s; {said}all: " in out


def test_reset_forgets_and_keeps_the_system_message(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "Hello\n/system Be kind.\n/reset\nAnd you?\n/reset\n/system\nAnd you?\n"
    chat(lines, folder, monkeypatch, "--system", "Be brief.")
    made = [
        *expected(folder, "Hello", system="Be brief."),
        *expected(folder, "And you?", system="Be kind."),
        *expected(folder, "And you?"),
    ]
    assert len(set(made)) == 3
    assert capsys.readouterr() == ("\n".join(made) + "\n", "")


def test_a_message_may_have_several_lines(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat('"""\none\ntwo\n"""\n/reset\n"""one"""\n"""never ends\n', folder, monkeypatch)
    made = [*expected(folder, "one\ntwo"), *expected(folder, "one")]
    assert capsys.readouterr() == ("\n".join(made) + "\n", "")


def test_commands_are_listed_and_near_ones_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat("/help\n/stats\n/rest\n/qqqq\n", folder, monkeypatch)
    out, err = capsys.readouterr()
    assert all(f"/{name}" in out for name in ("system", "reset", "stats", "help"))
    assert "last: 0 tokens in, 0 out" in out
    assert "'/rest'; did you mean /reset?" in err and "'/qqqq'; /help lists" in err


def test_a_message_that_does_not_fit_is_dropped_and_the_chat_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat(f"{'x' * 2000}\nHello\n", folder, monkeypatch)
    out, err = capsys.readouterr()
    assert out == expected(folder, "Hello")[0] + "\n"
    assert err.startswith("error: ") and "(/reset begins anew)" in err and err.count("\n") == 1


def test_bytes_that_are_no_text_are_one_message(folder: Path) -> None:
    """Where Python itself would end at them, as in most locales."""
    done = subprocess.run(
        [sys.executable, "-m", "nanoengine", "chat", str(folder), *FLAGS],
        input=b"Hello\ncaf\xe9\nHello\n",
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "utf-8:strict"},
        check=False,
    )
    assert done.returncode == 0 and done.stdout.count(b"\n") >= 2
    assert done.stderr.count(b"error: ") == 1 and b"surrogate" in done.stderr


def test_a_model_without_a_template_names_the_other_command(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for path in folder.iterdir():
        if path.name != "chat_template.jinja":
            (tmp_path / path.name).symlink_to(path)
    chat("Hello\n", tmp_path, monkeypatch, status=FAILED)
    assert f"nanoengine run {tmp_path} --raw" in capsys.readouterr().err
