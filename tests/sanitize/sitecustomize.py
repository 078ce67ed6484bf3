"""Python reads this at its start where benchmarks/proofs/sanitizers.py puts it on PYTHONPATH:
nanoengine is told that the CPU has what emulate.h does in C.
"""

import pathlib

_read = pathlib.Path.read_bytes


def _with_emulated(path: pathlib.Path) -> bytes:
    content = _read(path)
    if str(path) == "/proc/cpuinfo" and b" avx512bw" in content:
        return content.replace(b" avx512f ", b" avx512f avx512_bf16 amx_bf16 ")
    return content


pathlib.Path.read_bytes = _with_emulated
