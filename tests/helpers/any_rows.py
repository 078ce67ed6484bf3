"""Products of interpreted Triton whose rows do not depend on each other, as on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from triton.runtime import interpreter


def use_dots_of_any_rows(patch: pytest.MonkeyPatch) -> None:
    """NumPy's own product depends on how many rows there are, and where: each row is one call."""

    def dot(_: Any, a: Any, b: Any, total: Any, *others: Any) -> Any:
        rows = [np.matmul(row, b.data, dtype=total.data.dtype) for row in a.data[:, None]]
        return interpreter.TensorHandle(np.concatenate(rows) + total.data, total.dtype.scalar)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
