"""What a test needs of the machine."""

from __future__ import annotations

import pytest

from nanoengine import cpu_linear
from nanoengine.cpu_kernels import KernelBuildError, find_compiler


def _has_compiler() -> bool:
    try:
        find_compiler()
    except KernelBuildError:
        return False
    return True


needs_compiler = pytest.mark.skipif(
    not _has_compiler(), reason="no C compiler: PyTorch takes the place of our kernels"
)
needs_bf16_cpu = pytest.mark.skipif(
    not cpu_linear.is_supported(), reason="no AVX512-BF16 here: oneDNN multiplies instead"
)
