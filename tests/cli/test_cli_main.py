"""The command nanoengine: help, versions, wrong command lines, exit statuses, doors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import nanoengine
from nanoengine.bench import main as bench_main
from nanoengine.bench import ruler
from nanoengine.cli import run as run_module
from nanoengine.cli.main import FAILED, INTERRUPTED, MISUSED, main

ROOT = Path(__file__).parents[2]
COMMANDS = ("run", "chat", "plan", "collect-env")
COMMAND = [sys.executable, "-m", "nanoengine"]


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr, without its end; stdout must be empty."""
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1, (out, err)
    return err.rstrip("\n")


def cpu_seconds(command: list[str]) -> float:
    """The least CPU time of some runs: about what it takes on a machine that is not busy."""
    return min(cpu_seconds_once(command) for _ in range(5))


def cpu_seconds_once(command: list[str]) -> float:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT) as child:
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    return usage.ru_utime + usage.ru_stime


@pytest.mark.some(1)
@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"]])
def test_help_takes_a_few_times_what_python_takes(arguments: list[str]) -> None:
    """0.2 s beside 0.03; PyTorch alone would be 2 s, FastAPI 0.5."""
    assert cpu_seconds([*COMMAND, *arguments]) < 12 * cpu_seconds([sys.executable, "-c", "pass"])


def test_help_and_errors_of_use_import_no_torch() -> None:
    program = (
        "import sys\n"
        "from nanoengine.cli.main import main\n"
        "for argv in (['--help'], ['run', '--help'], ['plan', 'm', '--nothing'], ['--version'],\n"
        "             ['run', 'm', 'p', '--ring-slots', '0'], ['serve', 'm', '--port', '-1']):\n"
        "    main(argv)\n"
        "assert not {'torch', 'numpy', 'transformers', 'fastapi'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=120)


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"nanoengine {nanoengine.__version__}\n"


def test_a_process_without_stdout_does_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `nanoengine plan MODEL >&-` has none."""
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["collect-env"]) == 0


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == MISUSED
    assert "COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["plam", "x"], "unknown command 'plam'; did you mean plan? (see nanoengine --help)"),
        (["qqqq"], "unknown command 'qqqq' (see nanoengine --help)"),
        (["run", "m", "p", "--max-tokns", "5"], "'--max-tokns'; did you mean --max-tokens?"),
        (["run", "m", "p", "--temperatur=0"], "'--temperatur'; did you mean --temperature?"),
        (["chat", "m", "--kv-offload-gb", "5"], "did you mean --kv-offload-gib?"),
        (["plan", "m", "--contxt", "5"], "'--contxt'; did you mean --context?"),
        (
            ["plan", "m", "--block-size", "5"],
            "here it is --kvcache-block-size (see",
        ),
        (["run", "m", "p", "--max-new-tokens", "5"], "here it is --max-tokens (see"),
        (["run-batch", "-i", "a"], "here it is nanoengine batch IN.jsonl OUT.jsonl --model MODEL"),
        (["help", "run"], "'help'; here it is nanoengine --help, or nanoengine COMMAND --help"),
        (["serve", "m", "--no-enable-log-requests"], "here it is nothing: requests are not logged"),
        (["serve", "m", "--disable-log-requests"], "those of --log-level; leave it out (see"),
        (["serve", "m", "--uvicorn-log-level", "info"], "here it is --log-level (see"),
        (["serve", "m", "--enable-reasoning"], "--reasoning-parser names another way (see"),
        (["serve", "m", "--root-path=/a"], "let the proxy in front take its prefix away"),
        (["serve", "m", "--ssl-keyfile", "k"], "the server speaks no TLS; put a proxy"),
        (["serve", "m", "--allowed-origins", "*"], "here it is --allow-origins https://HOST"),
        (["serve", "m", "--enable-tokenizer-info-endpoint"], "here it is --tokenizer-info (see"),
        (["serve", "m", "-tp", "2"], "'-tp'; here it is --tensor-parallel-size (see"),
        (["serve", "m", "--speculative-config.method", "x"], 'as in speculative="ngram:4" (see'),
        (["serve", "m", "--no-kv-offload"], "here it is kv_offload_gib, in GiB (see"),
        (["serve", "--model", "m"], "unknown flag '--model'; the model needs no flag (see"),
        (["serve", "m", "--kv-cache-dtype", "fp8"], "unknown flag '--kv-cache-dtype'; "),
        (["serve", "m", "--no-enable-chunked-prefill"], "unknown flag '--no-enable-chunked-"),
        (["chat", "m", "--qqqq"], "unknown flag '--qqqq' (see nanoengine chat --help)"),
        (["run", "m", "two", "words"], "unexpected argument 'words'; put a prompt of several"),
        (["--versio"], "unknown flag '--versio'; did you mean --version? (see nanoengine --help)"),
        (["run"], "the following arguments are required: MODEL"),
        (
            ["run", "m", "p", "--ring-slots", "x"],
            "argument --ring-slots: must be an integer, or one as in 32K, got 'x'",
        ),
        (["run", "m", "p", "--ring-slots", "1"], "ring_slots must be an integer of at least 2"),
        (["run", "m", "p", "--top-p", "7"], "top_p must be between 0 and 1, got 7"),
        (["run", "m", "p", "--chat", "--raw"], "not allowed with argument --chat"),
        (["plan", "m", "--context", "0"], "--context: must be an integer from 1 to"),
        (["plan", "m", "--gpu-gib", ""], "--gpu-gib: must be from 0 to 1048576, got ''"),
        (["plan", "m", "--link-gbps", "0"], "--link-gbps: must be above 0"),
        (["ruler", "--num-sampels", "2"], "did you mean --num-samples? (see nanoengine ruler --h"),
        (["ruler", "--n-ctx", "2"], "unknown flag '--n-ctx'; here it is --max-model-len (see"),
        (["ruler", "smollm2-135m"], "argument 'smollm2-135m'; a model is named by --model (see"),
        (["ruler", "--length", "0"], "--length: must be like 4096 or 1024,2048, got '0'"),
        (
            ["bench", "offline", "--num-seq", "x"],
            "--num-seqs: must be an integer from 1 to 2147483647, got 'x'",
        ),
        (["bench", "offline", "--modle", "x"], "did you mean --model? (see nanoengine bench off"),
        (["bench", "ofline"], "invalid choice: 'ofline'"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(
    argv: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == MISUSED
    assert text in error_of(capsys)


@pytest.mark.parametrize("command", ["run", "chat", "plan"])
def test_a_model_that_is_not_there_is_one_line_and_status_1(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [command, "smollm2-135M", *(["p"] if command == "run" else [])]
    assert main([*argv, *([] if command == "plan" else ["--quiet"])]) == FAILED
    assert "did you mean 'smollm2-135m'?" in error_of(capsys)


def test_an_error_of_several_lines_becomes_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> str:
        raise nanoengine.ConfigError("one\n  two")

    monkeypatch.setattr(run_module, "read_prompt", fail)
    assert main(["run", "m", "p"]) == FAILED
    assert error_of(capsys) == "error: one two"


def test_an_error_that_nobody_expected_shows_where_only_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> str:
        raise RuntimeError("a bug")

    monkeypatch.setattr(run_module, "read_prompt", fail)
    assert main(["run", "m", "p"]) == FAILED
    shown = "error: unexpected RuntimeError: a bug (NANOENGINE_TRACEBACK=1 shows where)"
    assert error_of(capsys) == shown
    monkeypatch.setenv("NANOENGINE_TRACEBACK", "1")
    with pytest.raises(RuntimeError, match="a bug"):
        main(["run", "m", "p"])


def test_ctrl_c_ends_a_command_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "read_prompt", interrupt)
    assert main(["run", "m", "p"]) == INTERRUPTED == 130
    assert capsys.readouterr() == ("", "")


def test_collect_env_shows_versions_and_settings_but_no_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NANOENGINE_RING_SLOTS", "3")
    for name in ("HF_TOKEN", "NANOENGINE_API_KEY", "NANOENGINE_OF_ANOTHER_PROGRAM"):
        monkeypatch.setenv(name, "a_secret")
    assert main(["collect-env"]) == 0
    shown = capsys.readouterr().out
    assert nanoengine.__version__ in shown and "a_secret" not in shown
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in shown.splitlines()}
    assert lines["$NANOENGINE_RING_SLOTS"] == "3"
    assert lines["$NANOENGINE_API_KEY"] == lines["$NANOENGINE_OF_ANOTHER_PROGRAM"]
    assert main(["collect-env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nanoengine"] == nanoengine.__version__


def test_bench_and_ruler_are_doors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("bench", "ruler"):
        assert main([name, "--help"]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"usage: nanoengine {name} ")
        assert f"example: nanoengine {name} " in text
    given: list[list[str]] = []
    monkeypatch.setattr(bench_main, "main", lambda argv, *_: given.append(argv))
    monkeypatch.setattr(ruler, "main", lambda argv, *_: given.append(argv) or 1)
    assert main(["bench", "offline", "--num-seqs", "1"]) == 0
    assert main(["ruler", "--length", "100"]) == 1
    assert given == [["offline", "--num-seqs", "1"], ["--length", "100"]]


@pytest.mark.parametrize("work", ["offline", "offload", "serve"])
def test_help_of_a_benchmark_names_a_default_once(
    work: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", work, "--help"]) == 0
    text = capsys.readouterr().out
    assert "(default: None)" not in text and "default: " in text


def test_a_reader_that_leaves_ends_the_help_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as output:
        done = subprocess.run(
            [*COMMAND, "run", "--help"], stdout=output, stderr=subprocess.PIPE, cwd=ROOT
        )
    assert done.stderr == b""  # argparse itself takes no notice of a missing reader
