"""nanoengine run: the prompt's three sources, what is printed where, and a reader that leaves."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from live_server import until

from nanoengine import LLM, SamplingParams
from nanoengine.cli import answers as answering
from nanoengine.cli.main import FAILED, MISUSED, main
from nanoengine.cli.run import read_prompt
from nanoengine.config.engine import EngineConfig
from nanoengine.engine.llm_engine import LLMEngine

ROOT = Path(__file__).parents[2]
FLAGS = ["--temperature", "0", "--max-tokens", "6", "--num-threads", "1", "--dtype", "float32"]
SETTINGS = {"num_threads": 1, "dtype": "float32"}
GREEDY = SamplingParams(temperature=0, max_tokens=6)
PROMPT = "Häuser am Meer"
LONG = [*FLAGS, "--max-tokens", "450", "--ignore-eos", "--raw"]


@pytest.fixture(scope="module")
def folder(tiny: Callable[[str], Path]) -> Path:
    return tiny("qwen3")


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, str]:
    """What the library answers to PROMPT."""
    with LLM(folder, **SETTINGS) as llm:
        chat = llm.chat([{"role": "user", "content": PROMPT}], GREEDY, use_tqdm=False)
        raw = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    made = {"chat": chat[0]["text"], "raw": raw[0]["text"]}
    assert made["chat"] != made["raw"]
    return made


def give_input(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_a_prompt_is_a_chat_or_a_beginning(
    folder: Path, answers: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    for flag, kind in (("--chat", "chat"), ("--raw", "raw")):
        assert main(["run", str(folder), PROMPT, flag, *FLAGS]) == 0
        out, err = capsys.readouterr()
        assert out == answers[kind] + "\n"
        assert f"loading {folder}" in err and f"{kind}: {len(PROMPT)} characters" in err
        assert " 6 out; first token after " in err


@pytest.mark.parametrize("is_given", [False, True])
def test_a_missing_tokenizer_is_told_before_the_weights_are_read(
    is_given: bool, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of these weights nothing could be read."""
    shutil.copy(folder / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    flags = ["--tokenizer", str(tmp_path / "none")] if is_given else []
    if is_given:
        shutil.copy(folder / "tokenizer.json", tmp_path)
    for command in (["run", str(tmp_path), PROMPT], ["chat", str(tmp_path)]):
        assert main([*command, "--quiet", *FLAGS, *flags]) == FAILED
        assert "has no tokenizer.json" in capsys.readouterr().err


def test_a_folder_without_a_model_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(tmp_path), PROMPT, "--quiet"]) == FAILED
    said = f"{tmp_path} has no config.json; a model's folder has config.json, its weights"
    assert said in capsys.readouterr().err
    below = tmp_path / "snapshots" / "0123"
    below.mkdir(parents=True)
    (below / "config.json").write_text("{}")
    assert main(["run", str(tmp_path), PROMPT, "--quiet"]) == FAILED
    assert f"has no config.json; give the folder below it: {below}\n" in capsys.readouterr().err


def test_a_cut_answer_says_what_cut_it(
    folder: Path, answers: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", str(folder), PROMPT, "--raw", *FLAGS]
    for more, said in (
        ([], "tok/s; the answer was cut at 6 tokens; --max-tokens allows more"),
        (["--max-model-len", "20"], "prompt and answer have 20 tokens, the limit (max_model_len)"),
        (["--stop", answers["raw"][:2]], ""),
    ):
        assert main([*command, *more]) == 0
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.endswith(said) and ("cut" in last) == bool(said)


def test_one_of_a_thing_has_no_plural(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(folder), "a", "--raw", *FLAGS, "--max-tokens", "1"]) == 0
    said = capsys.readouterr().err
    for thing in ("1 thread,", "raw: 1 character\n", "1 token in, 1 out", "cut at 1 token;"):
        assert thing in said
    assert not re.findall(r"(?<![\d.,-])1 [a-z]+s\b", said)


def test_a_model_with_a_chat_template_chats(
    folder: Path, answers: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(folder), PROMPT, *FLAGS, "--quiet"]) == 0
    assert capsys.readouterr() == (answers["chat"] + "\n", "")


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_narrow_terminal_shows_what_fits_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "READING_S", 0.0)
    monkeypatch.setattr(sys, "stderr", FakeTerminal())
    monkeypatch.setattr(sys.stderr, "fileno", lambda: 2)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((20, 24)))
    with answering.ReadingLine(SimpleNamespace(num_prompt_tokens=8000, num_computed=10)):
        until(lambda: "prompt" in sys.stderr.getvalue())
    shown = re.findall(r"\r\x1b\[K(reading[^\r]*)", sys.stderr.getvalue())
    assert {*shown} == {"reading the prompt:"}


@pytest.mark.parametrize("flags", [[], ["--quiet"]])
def test_a_terminal_shows_how_much_of_a_long_prompt_is_read(
    flags: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = LLMEngine.step

    def shown_first(self: LLMEngine) -> object:
        """A step of a prompt waits for the line of what was read before."""
        seqs = (*self.scheduler.waiting, *self.scheduler.running)
        lines = [f"prompt: {seq.num_computed} of" for seq in seqs if seq.is_prefill and not flags]
        until(lambda: all(line in sys.stderr.getvalue() for line in lines))
        return step(self)

    monkeypatch.setattr(LLMEngine, "step", shown_first)
    monkeypatch.setattr(answering, "READING_S", 0.01)
    monkeypatch.setattr(answering, "READING_EVERY_S", 0.01)
    monkeypatch.setattr(sys, "stderr", FakeTerminal())
    few = ["--max-num-batched-tokens", "50", "--max-num-seqs", "4", "--kvcache-block-size", "8"]
    assert main(["run", str(folder), "the sea " * 20, "--raw", *FLAGS, *few, *flags]) == 0
    shown = re.findall(r"\r\x1b\[Kreading the prompt: (\d+) of (\d+) tokens", sys.stderr.getvalue())
    assert bool(shown) == (not flags)
    if shown:
        counts = [int(done) for done, _ in shown]
        assert counts[0] == 0 and counts == sorted(counts) and {50, 100} < {*counts}
        assert "tokens\r\x1b[K" + shown[0][1] + " tokens in, 6 out" in sys.stderr.getvalue()


def test_flags_may_come_before_the_prompt(
    folder: Path, answers: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    for given in (["--raw", *FLAGS, PROMPT], ["--raw", PROMPT, *FLAGS], [PROMPT, "--raw", *FLAGS]):
        assert main(["run", str(folder), "--quiet", *given]) == 0
        assert capsys.readouterr() == (answers["raw"] + "\n", "")
    for given, said in (
        (["--raw", "one", "two"], "unexpected argument 'two'; put a prompt of several words in"),
        (["one", "--raw", "two"], "unexpected argument 'two'"),
        (["--raw", "-", "two"], "unexpected argument 'two'"),
        (["--raw", "one", "--temprature", "0"], "did you mean --temperature?"),
    ):
        assert main(["run", str(folder), *given]) == MISUSED
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("source", ["file", "marked", "pipe", "-", "nothing"])
def test_the_prompt_may_come_from_a_file_or_from_standard_input(
    source: str,
    folder: Path,
    answers: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, marked = tmp_path / "prompt.txt", tmp_path / "marked.txt"
    path.write_text(PROMPT, encoding="utf-8")
    marked.write_text(PROMPT, encoding="utf-8-sig")
    reader, writer = os.pipe()
    os.write(writer, PROMPT.encode())
    os.close(writer)
    give_input(monkeypatch, PROMPT.encode() if source in ("-", "nothing") else b"")
    files = {"file": [str(path)], "marked": [str(marked)], "pipe": [f"/dev/fd/{reader}"]}
    prompt = (files | {"-": ["-"], "nothing": []})[source]
    assert main(["run", str(folder), *prompt, "--raw", "--quiet", *FLAGS]) == 0
    os.close(reader)
    assert capsys.readouterr() == (answers["raw"] + "\n", "")


def test_a_prompt_may_be_longer_than_a_name(tmp_path: Path) -> None:
    for given in ("a" * 300, "a/" * 5000, str(tmp_path)):
        assert read_prompt(given) == given


def test_json_is_one_object_on_stdout(
    folder: Path, answers: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(folder), PROMPT, "--raw", "--json", *FLAGS]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["text"] == answers["raw"] and row["model"] == str(folder)
    assert (row["prompt_tokens"], row["output_tokens"]) == (len(PROMPT.encode()), 6)
    assert row["finish_reason"] == "length" and row["tokens_per_s"] > 0


def test_a_prompt_that_is_no_text_is_an_error_of_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompt"
    for content, text in ((b"", "is empty"), (b"\xff\xfe", "is no text in UTF-8")):
        path.write_bytes(content)
        give_input(monkeypatch, content)
        for source in (str(path), "-"):
            assert main(["run", "m", source]) == MISUSED
            assert text in capsys.readouterr().err
    for given, text in (("", "is empty"), ("caf\udce9", "is no text in UTF-8")):
        assert main(["run", "m", given]) == MISUSED
        assert text in capsys.readouterr().err


def test_a_terminal_is_no_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keyboard = io.StringIO()
    monkeypatch.setattr(keyboard, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", keyboard)
    assert main(["run", "m"]) == MISUSED
    assert "there is no prompt" in capsys.readouterr().err


def test_a_prompt_that_is_too_long_fails_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(folder), "x" * 2000, "--raw", "--quiet", *FLAGS]) == FAILED
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and "2000" in err


def copied(folder: Path, tmp_path: Path) -> Path:
    """The model in another folder, without its generation_config.json."""
    copy = tmp_path / "model"
    copy.mkdir()
    for path in folder.iterdir():
        if path.name != "generation_config.json":
            (copy / path.name).symlink_to(path)
    return copy


def test_the_models_own_parameters_are_a_base(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = copied(folder, tmp_path)
    (copy / "generation_config.json").write_text('{"top_k": 1}')  # greedy by another name
    argv = ["run", str(copy), PROMPT, "--raw", "--quiet", "--ignore-eos", *FLAGS[2:]]
    texts = []
    for seed in "12":
        assert main([*argv, "--generation-config", "auto", "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("said", "setting", "expected"),
    [
        ({}, None, {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}),
        ({"top_p": 0.9}, None, {"top_p": 0.9}),
        ({"top_p": 0.9}, "auto", {"top_p": 0.9}),
        ({"top_p": 0.9}, "vllm", {}),
        ({}, "vllm", {}),
    ],
)
def test_the_model_chooses_how_a_terminal_samples(
    said: dict[str, float],
    setting: str | None,
    expected: dict[str, float],
    folder: Path,
    tmp_path: Path,
) -> None:
    """Here the Python API and the server have SamplingParams' own."""
    copy = copied(folder, tmp_path)
    (copy / "generation_config.json").write_text(json.dumps(said))
    config = EngineConfig(model=str(copy), generation_config=setting, **SETTINGS)
    with answering.open_model(config, {"seed": 3}, is_quiet=True) as model:
        assert model.params == SamplingParams(seed=3, **expected)
        assert model.llm.llm_engine.inputs.default_params == (
            SamplingParams(**said) if setting == "auto" else SamplingParams()
        )
    with answering.open_model(config, {"temperature": 0.1}, is_quiet=True) as model:
        assert model.params == SamplingParams(**(expected | {"temperature": 0.1}))


# Python's own handler of Ctrl-C, which a job in the background ignores; 20 s for an answer.
SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from nanoengine.cli.main import main
from nanoengine.engine.llm_engine import LLMEngine
step = LLMEngine.step
LLMEngine.step = lambda self: (time.sleep(0.05), step(self))[1]
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.breadth
def test_a_reader_that_leaves_ends_the_answer_quietly(folder: Path) -> None:
    command = [sys.executable, "-c", SLOW, "run", str(folder), PROMPT, *LONG]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, cwd=ROOT, bufsize=0) as child:
        assert child.stdout is not None and child.stderr is not None
        assert child.stdout.read(1)
        child.stdout.close()
        errors = child.stderr.read().decode()
        assert child.wait(timeout=120) == 128 + signal.SIGPIPE
    assert "Traceback" not in errors and "Exception ignored" not in errors
    assert "first token" not in errors


def test_ctrl_c_ends_an_answer_with_its_status(folder: Path) -> None:
    command = [sys.executable, "-c", SLOW, "run", str(folder), PROMPT, *LONG]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, cwd=ROOT, bufsize=0) as child:
        assert child.stdout is not None and child.stderr is not None
        assert child.stdout.read(1)
        os.kill(child.pid, signal.SIGINT)
        assert child.wait(timeout=120) == 130
        assert "Traceback" not in child.stderr.read().decode()
