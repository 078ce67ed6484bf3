"""What launches of Triton's kernels share."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# A product and a sum of it are rounded once, as in Triton until 3.9, which warns where nobody asks.
FUSED: Mapping[str, bool] = MappingProxyType({"enable_fp_fusion": True})


def power_of_two(least: int) -> int:
    """The smallest one that is `least` or more. Triton's own function takes 5 us, as kernels may
    call it, and a step launches hundreds of them.
    """
    return 1 << max(0, least - 1).bit_length()
