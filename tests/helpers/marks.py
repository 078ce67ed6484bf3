"""Which tests run where: by what the machine has, and by how long all of them may take."""

from __future__ import annotations

import platform
import random
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoengine.kernels import c_build, cpu_linear
from nanoengine.kernels.c_build import KernelBuildError, cpu_flags, find_compiler


def _has_compiler() -> bool:
    try:
        find_compiler()
    except KernelBuildError:
        return False
    return True


HAS_COMPILER = _has_compiler()
needs_compiler = pytest.mark.skipif(
    not HAS_COMPILER, reason="no C compiler: PyTorch takes the place of our kernels"
)

# Marks of tests that are not default ones.
_RARE = ("slow", "breadth", "gpu", "clients", "ray", "browser")

# Of tests that interpret Triton.
needs_no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a real GPU, where Triton is not interpreted"
)


def named(cases: Mapping[str, Any], *first: str) -> list[Any]:
    """Cases for `parametrize`, with their names as ids: only the first ones are default tests."""
    assert {*first} <= cases.keys()
    marks = {name: () if name in first else (pytest.mark.breadth,) for name in cases}
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), id=name, marks=marks[name])
        for name, case in cases.items()
    ]


def leave_to_breadth(items: list[pytest.Item]) -> None:
    """Of a test with `some(count)` mark all cases but so many, drawn by its name, as breadth."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("some") and not any(map(item.get_closest_marker, _RARE)):
            cases[item.nodeid.partition("[")[0]].append(item)
    for name, of_test in cases.items():
        (count,) = of_test[0].get_closest_marker("some").args
        random.Random(name).shuffle(of_test)
        for item in of_test[count:]:
            item.add_marker(pytest.mark.breadth)


HAS_TILES = b"amx_bf16" in cpu_flags().split()
# Compiler flags by what they build: where there are matrix tiles, also what others run.
BUILDS: dict[str, tuple[str, ...]] = {"native": ()}
if HAS_TILES:
    BUILDS["no_tiles"] = ("-U__AMX_TILE__",)
# The same of smaller machines than this one.
SMALLER: dict[str, tuple[str, ...]] = {}
if platform.machine() == "x86_64":
    if cpu_linear.is_supported():
        SMALLER["avx512"] = ("-mno-avx512bf16",)
    if b"avx512f" in cpu_flags().split():
        SMALLER["avx2"] = ("-mno-avx512f",)
    SMALLER["generic"] = ("-march=x86-64",)
elif platform.machine() == "aarch64":
    SMALLER["generic"] = ("-march=armv8-a",)


def smaller(*names: str) -> dict[str, tuple[str, ...]]:
    """Those of SMALLER that there are."""
    return {name: SMALLER[name] for name in names if name in SMALLER}


# The same of larger machines than this one, the instructions that it lacks done in C.
EMULATED: dict[str, tuple[str, ...]] = {}
if not HAS_TILES and b"avx512bw" in cpu_flags().split():
    _header = Path(__file__).parents[1] / "sanitize" / "emulate.h"
    _pairs = ("-include", str(_header), "-D__AVX512BF16__")
    if not cpu_linear.is_supported():
        EMULATED["pairs in C"] = _pairs
    EMULATED["tiles in C"] = (*_pairs, *(f"-D__AMX_{kind}__" for kind in ("TILE", "BF16", "INT8")))
# The arithmetics of 16 bits in which products are our own.
OURS = ["bfloat16", *EMULATED] if cpu_linear.is_supported() else [*EMULATED]


def emulate(patch: pytest.MonkeyPatch, name: str) -> None:
    """From here on C is compiled for a machine of EMULATED, and our products serve."""
    patch.setattr(c_build, "CFLAGS", (*c_build.CFLAGS, *EMULATED[name]))
    patch.setattr(cpu_linear, "is_supported", lambda: True)


def use_our_products(patch: pytest.MonkeyPatch) -> None:
    """This machine's, or emulated ones; skips the test where it can be neither."""
    if cpu_linear.is_supported():
        return
    if not EMULATED:
        pytest.skip("no AVX512-BF16 here, and no AVX-512 to do it with")
    emulate(patch, "tiles in C")


def use_tiles(patch: pytest.MonkeyPatch) -> None:
    """The same for products in matrix tiles (AMX)."""
    if HAS_TILES:
        return
    if not EMULATED:
        pytest.skip("no matrix tiles (AMX) here, and no AVX-512 to do them with")
    emulate(patch, "tiles in C")
