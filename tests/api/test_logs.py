"""What the package logs: loggers of its own names, shown on request, and the root left alone."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nanoengine.cli.main import main, make_parser

PACKAGE = Path(__file__).parents[2] / "nanoengine"
PROGRAM = """
import logging
import nanoengine
from nanoengine.devices.logs import show_logs
assert not logging.root.handlers
log = logging.getLogger("nanoengine.loading.find_model")
log.info("one")
show_logs("info")
log.info("two")
show_logs("error")
show_logs("info")
log.info("three")
logging.basicConfig(format="ROOT %(message)s", level="INFO")
log.info("four")
"""


def stderr_of(**environ: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "NANOENGINE_LOG_LEVEL"}
    command = [sys.executable, "-c", PROGRAM]
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=clean | environ,
        cwd=PACKAGE.parent,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stderr


def test_records_are_shown_once_and_on_request() -> None:
    lines = [f"INFO nanoengine.loading.find_model: {text}" for text in ("one", "two", "three")]
    assert stderr_of().splitlines() == [*lines[1:], "ROOT four"]
    assert stderr_of(NANOENGINE_LOG_LEVEL="Info").splitlines() == [*lines, "ROOT four"]


def test_a_level_that_does_not_exist_is_a_warning() -> None:
    first = stderr_of(NANOENGINE_LOG_LEVEL="loud").splitlines()[0]
    levels = "debug, info, warning, error"
    assert first == f"NANOENGINE_LOG_LEVEL must be one of {levels}, got 'loud'"


COMPILES = """
import logging, sys
from pathlib import Path
from nanoengine.cli import run
from nanoengine.cli.main import main
from nanoengine.kernels import c_build
source = Path(sys.argv[1], "answer.c")
def work(args):
    for number in 1, 2, 2:
        source.write_text(f"int answer(void) {{ return {number}; }}")
        c_build.build_library(source.parent, source=source)
    logging.getLogger("nanoengine.loading.find_model").info("of no interest")
    logging.getLogger("nanoengine.loading.find_model").warning("of interest")
    return 0
run.run = work
main(["run", "m", "p", *sys.argv[2:]])
assert logging.getLogger("nanoengine").handlers == [] or "--log-level" in sys.argv
"""


@pytest.mark.parametrize(
    ("flags", "lines"),
    [
        ([], ["compiling kernels, once: 5 to 20 seconds ...", "of interest"]),
        (["--quiet"], ["of interest"]),
        (["--log-level", "warning"], ["WARNING nanoengine.loading.find_model: of interest"]),
    ],
)
def test_the_command_line_says_what_takes_long(
    flags: list[str], lines: list[str], tmp_path: Path
) -> None:
    """A line for two libraries that are compiled; the third is there."""
    command = [sys.executable, "-c", COMPILES, str(tmp_path), *flags]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.splitlines() == lines


def test_every_file_logs_under_its_own_name() -> None:
    named = []
    for path in PACKAGE.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        named += re.findall(r"getLogger\((.*?)\)", source)
        assert "basicConfig" not in source, path
    assert set(named) == {"__name__", "PACKAGE"}


def test_the_command_line_has_a_flag_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert all("--log-level" in parser.format_help() for parser in make_parser()[1].values())
    logger = logging.getLogger("nanoengine")
    before, handlers = logger.level, [*logger.handlers]
    try:
        assert main(["plan", "/no/such/folder", "--log-level", "info"]) == 1
        assert logger.level == logging.INFO
    finally:
        logger.setLevel(before)
        logger.handlers[:] = handlers
    assert main(["plan", "m", "--log-level", "loud"]) == 2
    assert "choose from" in capsys.readouterr().err
