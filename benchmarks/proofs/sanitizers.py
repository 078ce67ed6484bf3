"""Runs the C kernels under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer.

    python benchmarks/proofs/sanitizers.py [--jobs N]

The first two: kernel tests and small engines, in a Python that has the sanitizers' library loaded.
The third: C programs of tests/sanitize/, with threads that it understands. AMX, AVX512-BF16 and
masked instructions are done in C (tests/sanitize/emulate.h), for a sanitizer sees nothing of what
they touch; they are left out where there is no AVX-512. Faults planted in copies must be seen.

Not seen: what PyTorch does, and steps from one part of an allocation into another (packed weights
are parts of one, and so is what an attention call works with).

Prints a table; exit code 1 if a sanitizer reports anything, a test fails or a planted fault is not
seen.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tests/sanitize"
COPIED = ("nanoengine", "benchmarks", "tests", "pyproject.toml")
TIMEOUT_S = 900  # of one check
# -O1: with -O3 GCC takes longer than nanoengine waits for it.
COMMON = "-O1 -g1 -fno-var-tracking -fno-omit-frame-pointer"
MEMORY = f"{COMMON} -fsanitize=address,undefined,float-cast-overflow -fsanitize-recover=all"
THREADS = f"{COMMON} -fsanitize=thread"
PROGRAM = ("-std=gnu11", "-march=native", "-fopenmp", "-fno-math-errno", "-ffp-contract=fast")
NO_AMX = "-U__AMX_TILE__"
FLOAT32 = "-DMODE=F32"


@dataclass(frozen=True)
class Fault:
    """Text of a file of the kernels, what takes its place, and the report that must come."""

    file: str
    old: str
    new: str
    report: str


@dataclass(frozen=True)
class Check:
    """What is run: pytest with these arguments, or a program; on a copy if faults are planted."""

    name: str
    tests: str = ""
    program: str = ""
    cflags: str = ""
    faults: tuple[Fault, ...] = ()
    needs_avx512: bool = False


@dataclass(frozen=True)
class Verdict:
    """How it went; `problem` is empty when all is well."""

    check: Check
    problem: str
    seconds: float
    output: str


OVERRUN = Fault(
    "cpu_vectors.h",
    "memcpy(&x, p, 4 * (size_t)n);",
    "memcpy(&x, p, sizeof x);",
    r"AddressSanitizer: (?:.*\n){1,9}.* in load_f32 ",
)
OVERFLOW = Fault(
    "cpu_operators.h",
    "const int team = (elements) < 1 << 16 ?",
    "const int team = (int)(elements) * (int)((threads) + 99999) < 0 ?",
    r"cpu_operators.h:\d+.*signed integer overflow",
)
TILE_OVERRUN = Fault(
    "cpu_tiled_products.h",
    "shape_tiles(min64(n, TILE_ROWS), n > TILE_ROWS ? n - TILE_ROWS : n);",
    "shape_tiles(TILE_ROWS, TILE_ROWS);",
    r"AddressSanitizer: (?:.*\n){1,9}.* in tile_load ",
)
NO_BARRIER = Fault(
    "cpu_attend.h",
    "#pragma omp for schedule(dynamic, chunk)\n",
    "#pragma omp for schedule(dynamic, chunk) nowait\n",
    r"data race(?:.*\n)+.* merge_rows ",
)
NONE_BETWEEN = Fault(
    "cpu_linear.c", "#pragma omp barrier\n", "\n", r"data race(?:.*\n)+.* linear_in_team "
)
ONE_SET = Fault(
    "cpu_linear.c",
    "shares[(i + 1) % 2 * threads",
    "shares[i % 2 * threads",
    r"data race(?:.*\n)+.* take_part ",
)
ALL_ROUND = Fault(
    "cpu_linear.c",
    "EACH_ROW(is_private, c->rows, ROUND)",
    "EACH_ROW(1, c->rows, ROUND)",
    r"data race(?:.*\n)+.* round_rows ",
)
DYNAMIC = """#pragma omp for schedule(dynamic, 1)%s
    for (int64_t i = 0; i < count; i++) {
        call_t *c = &calls[i];"""
NO_WAIT = Fault(
    "cpu_experts.h", DYNAMIC % "", DYNAMIC % " nowait", r"data race(?:.*\n)+.* make_rows "
)
ONE_SCRATCH = Fault(
    "cpu_router.h",
    "r->scratch + row * (2 * r->count + r->groups)",
    "r->scratch",
    r"data race(?:.*\n)+.* route_row ",
)
ONE_CANDIDATES = Fault(
    "cpu_draw.h",
    "a->scratch + thread * 2 * a->vocab",
    "a->scratch",
    r"data race(?:.*\n)+.* (?:last_of|cut_after|draw_row|draw) ",
)
MIXED = """#pragma omp for schedule(static)%s
    for (int64_t i = 0; i < a->sequences * blocks; i++) {"""
NOT_MIXED = Fault(
    "cpu_recurrence.c", MIXED % "", MIXED % " nowait", r"data race(?:.*\n)+.* delta_head "
)
NO_ORDER = Fault(
    "shared_gather.c",
    "atomic_store(&mine->published, piece + 1);",
    "atomic_store_explicit(&mine->published, piece + 1, memory_order_relaxed);",
    r"data race(?:.*\n)+.* pass_piece ",
)
KERNELS = (
    "tests/kernels/test_cpu_kernels.py tests/attention/test_windows.py::test_the_c_kernel "
    "tests/models/test_recurrent.py::test_the_kernel_computes_what_pytorch_does"
)
PRODUCTS = (
    "tests/kernels/test_cpu_linear.py tests/kernels/test_cpu_codes.py "
    "tests/kernels/test_cpu_bounds.py "
    "tests/kernels/test_call_tape.py"
)
ROUNDED = "tests/kernels/test_cpu_int8.py"
ENGINES = "tests/sanitize/engine_smoke.py"
GATHERS = "tests/workers/test_group.py"
SILU = "tests/kernels/test_cpu_kernels.py::test_silu_mul -k native"
FLOAT64 = "tests/kernels/test_cpu_linear.py::test_against_float64 -k native"
CHECKS = (  # the longest first
    Check("memory: kernels", KERNELS),
    Check("memory: products, bounds, call tape", PRODUCTS),
    Check("memory: products of rounded rows", ROUNDED),
    Check("memory: engines", ENGINES),
    Check("memory: engines without AMX", ENGINES, cflags=NO_AMX),
    Check("memory: gathers", GATHERS),
    Check("planted: overrun and overflow", SILU, faults=(OVERRUN, OVERFLOW)),
    Check("planted: overrun of a tile", FLOAT64, faults=(TILE_OVERRUN,), needs_avx512=True),
    Check("threads: kernels", program="races_kernels"),
    Check("threads: kernels without AMX", program="races_kernels", cflags=NO_AMX),
    Check("threads: products", program="races_linear", needs_avx512=True),
    Check("threads: products without AMX", "", "races_linear", NO_AMX, needs_avx512=True),
    Check("threads: products of float32", "", "races_linear", FLOAT32),
    Check("threads: gathers", program="races_gather"),
    Check("planted: no order of gathers", program="races_gather", faults=(NO_ORDER,)),
    Check("planted: no barrier in attention", program="races_kernels", faults=(NO_BARRIER,)),
    Check("planted: one scratch of draws", program="races_kernels", faults=(ONE_CANDIDATES,)),
    Check("planted: no wait of convolutions", program="races_kernels", faults=(NOT_MIXED,)),
    Check("planted: none of products", "", "races_linear", FLOAT32, (NONE_BETWEEN,)),
    Check("planted: shares begun too late", "", "races_linear", FLOAT32, (ONE_SET,)),
    Check("planted: rows rounded by all", "", "races_linear", FLOAT32, (ALL_ROUND,)),
    Check("planted: no wait of experts", "", "races_linear", FLOAT32, (NO_WAIT,)),
    Check("planted: one scratch of routes", "", "races_linear", FLOAT32, (ONE_SCRATCH,)),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1))
    arguments = parser.parse_args()
    needed = "libasan.so", "libtsan.so"
    if not shutil.which("gcc") or not all(library(name).is_absolute() for name in needed):
        parser.error(f"this takes gcc with {' and '.join(needed)}: install what brings them")
    has_avx512 = " avx512bw " in Path("/proc/cpuinfo").read_text()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        checks = [check for check in CHECKS if has_avx512 or not check.needs_avx512]
        verdicts = list(pool.map(run_check, checks))
    print_table(verdicts)
    return int(any(verdict.problem for verdict in verdicts))


def library(name: str) -> Path:
    """Where gcc finds it; the name alone where it does not."""
    return Path(run(["gcc", f"-print-file-name={name}"], {}, ROOT)[1].strip())


def run_check(check: Check) -> Verdict:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder, tree = Path(name), ROOT
        (folder / "reports").mkdir()
        if check.faults:
            tree = folder / "tree"
            plant(tree, check.faults)
        code, output = (run_program if check.program else run_tests)(check, tree, folder)
        for report in sorted((folder / "reports").iterdir()):
            output = f"{report.read_text()}\n{output}"
    return Verdict(check, judge(check, code, output), time.perf_counter() - started, output)


def judge(check: Check, code: int, output: str) -> str:
    if missed := [fault.report for fault in check.faults if not re.search(fault.report, output)]:
        return f"NOT SEEN: {' and '.join(missed)}"
    if check.faults:
        return ""
    reports = re.findall(r"runtime error: |ERROR: AddressS|WARNING: ThreadS|FATAL: ", output)
    return f"{len(reports)} REPORTS" if reports else f"ended with {code}" if code else ""


def plant(tree: Path, faults: tuple[Fault, ...]) -> None:
    """Copies the engine and its tests, and breaks the copy."""
    tree.mkdir()
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tree / name)
    for fault in faults:
        path = tree / "nanoengine" / "kernels" / fault.file
        text = path.read_text()
        if text.count(fault.old) != 1:
            raise SystemExit(f"{fault.file} does not hold what a fault replaces: {fault.old!r}")
        path.write_text(text.replace(fault.old, fault.new))


def run_tests(check: Check, tree: Path, folder: Path) -> tuple[int, str]:
    """pytest's exit code and output, which alone holds what the second sanitizer reports."""
    preloaded = library("libasan.so"), library("libstdc++.so.6")  # for PyTorch's exceptions
    environment = {
        "CC": str(TOOLS / "cc"),
        "SANITIZER_CFLAGS": f"{MEMORY} {check.cflags}",
        "LD_PRELOAD": " ".join(map(str, preloaded)),
        "ASAN_OPTIONS": f"halt_on_error=0:detect_leaks=0:log_path={folder / 'reports/memory'}",
        "UBSAN_OPTIONS": f"halt_on_error={int(not check.faults)}:print_stacktrace=1",
        "XDG_CACHE_HOME": str(folder),
        "PYTHONPATH": f"{TOOLS}:{tree}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "passive",
    }
    options = ["-q", "-s", "-rs", "-p", "no:cacheprovider", f"--basetemp={folder / 'tests'}"]
    options += ["-m", "not slow"]  # those of breadth, too
    return run([sys.executable, "-m", "pytest", *options, *check.tests.split()], environment, tree)


def run_program(check: Check, tree: Path, folder: Path) -> tuple[int, str]:
    """Exit code and output of the program, or of the compiler where that fails."""
    source, made = tree / f"tests/sanitize/{check.program}.c", folder / check.program
    environment = {
        "SANITIZER_CFLAGS": f"{THREADS} {check.cflags}",
        "TSAN_OPTIONS": f"halt_on_error=1:atexit_sleep_ms=0:log_path={folder / 'reports/threads'}",
    }
    include = f"-I{tree / 'nanoengine' / 'kernels'}"
    compiled = [*PROGRAM, include, "-c", str(source), "-o", f"{made}.o"]
    linked = ["-fsanitize=thread", f"{made}.o", "-o", str(made), "-lm", "-lpthread"]
    for step in ([str(TOOLS / "cc"), *compiled], ["gcc", *linked], [str(made)]):
        code, output = run(step, environment, tree)
        if code:
            break
    return code, output


def run(command: list[str], environment: dict[str, str], folder: Path) -> tuple[int, str]:
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, f"no end after {TIMEOUT_S} s"
    return done.returncode, done.stderr + done.stdout


def print_table(verdicts: list[Verdict]) -> None:
    for verdict in verdicts:
        if verdict.problem:
            print(f"\n--- {verdict.check.name}\n{verdict.output[:3000]}\n{verdict.output[-3000:]}")
    print()
    for verdict in verdicts:
        what = "seen" if verdict.check.faults else verdict.output.strip().rpartition("\n")[2]
        print(f"{verdict.check.name:36}  {verdict.seconds:4.0f} s  {verdict.problem or what}")
    for verdict in verdicts:
        for line in re.findall("^SKIPPED.*$", verdict.output, re.M):
            print(f"left out of {verdict.check.name}: {line}")
    for check in CHECKS:
        if all(verdict.check is not check for verdict in verdicts):
            print(f"left out: {check.name}: there is no AVX-512 here")
    problems = sum(bool(verdict.problem) for verdict in verdicts)
    print(f"\n{len(verdicts) - problems} of {len(verdicts)} checks without a problem")


if __name__ == "__main__":
    sys.exit(main())
