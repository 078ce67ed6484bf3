"""Makes codes of weights that are numbers, as they are loaded: "int8" and "int4" on a CPU. Lossy.

Which weights become codes of which format is said in models/make_codes.py; how a block is made, in
make_codes.c. A block comes from itself alone, so no cut between rows moves a bit.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from nanoengine.kernels.c_build import load_library
from nanoengine.models.make_codes import BLOCK, made_format
from nanoengine.models.stored_codes import FORMATS, CodedRows

SOURCE = Path(__file__).with_name("make_codes.c")
LARGEST = 32768.0  # a minimum beside it is still a float16
_PIECE = 1 << 22  # weights at a time, in float32
_BITS = {"Q8_0": 8, "Q4_1": 4}


class CodeMaker:
    """Codes of a model's weights by their names (make_codes.Coder)."""

    def __init__(self, library: ctypes.CDLL, method: str) -> None:
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        library.make_codes.argtypes = [pointer, integer, integer, pointer, integer]
        library.make_codes.restype = None
        self._library, self._method = library, method

    @classmethod
    def load(
        cls, method: str, folder: Path | None = None, extra_cflags: tuple[str, ...] = ()
    ) -> CodeMaker:
        """Compile (or take from the cache) and bind. method: one of make_codes.METHODS.

        Raises KernelBuildError.
        """
        return cls(load_library(SOURCE, folder, extra_cflags), method)

    def __call__(self, name: str, weight: Tensor) -> CodedRows | None:
        """As make_codes.Coder. None, too, where scales would not be finite."""
        code_format = made_format(self._method, name, tuple(weight.shape))
        if not code_format:
            return None
        least, most = torch.aminmax(weight)
        if not (least >= -LARGEST and most <= LARGEST):  # nor NaN
            return None
        return self.rows(code_format, weight)

    def rows(self, code_format: str, weight: Tensor) -> CodedRows:
        """weight, [outputs, inputs] of any floats up to LARGEST, as Q8_0 or Q4_1."""
        outputs, inputs = weight.shape
        rows = torch.empty(outputs, inputs // BLOCK * FORMATS[code_format][1], dtype=torch.uint8)
        num_rows = max(1, _PIECE // inputs)
        for source, target in zip(
            torch.split(weight, num_rows), torch.split(rows, num_rows), strict=True
        ):
            wide = source.float().contiguous()
            self._library.make_codes(
                wide.data_ptr(),
                wide.numel() // BLOCK,
                _BITS[code_format],
                target.data_ptr(),
                torch.get_num_threads(),
            )
        return CodedRows(code_format, rows)
