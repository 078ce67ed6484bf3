"""The quick interpreter of the tests brings operands together as Triton's own rules do."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from marks import needs_no_gpu

pytest.importorskip("triton", reason="Triton is not installed")

import triton.language as tl
from triton.language.semantic import IncompatibleTypeErrorImpl, TritonSemantic
from triton.runtime import interpreter

pytestmark = needs_no_gpu
QUICK: Any = interpreter.interpreter_semantic
TRITON: Any = TritonSemantic(interpreter.interpreter_builder)  # no method of it is replaced
TYPES = (tl.int1, tl.int8, tl.uint8, tl.int32, tl.int64, tl.float16, tl.bfloat16, tl.float32)


def operand(dtype: tl.dtype, shape: tuple[int, ...]) -> tl.tensor:
    """Small numbers, all different; a scalar without a shape."""
    found = np.arange(1, math.prod(shape) + 1).reshape(shape or (1,))
    data = found.astype(interpreter._get_np_dtype(dtype))
    of = tl.block_type(dtype, list(shape)) if shape else dtype
    return tl.tensor(interpreter.TensorHandle(data, dtype), of)


def outcome(semantic: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """Types and bits of both operands, or what is said about them."""
    try:
        found = semantic.binary_op_type_checking_impl(*args, **kwargs)
    except (TypeError, ValueError, IncompatibleTypeErrorImpl) as error:
        return [type(error), str(error)]
    return [
        (str(x.type), [int(n) for n in x.shape], x.handle.data.dtype, x.handle.data.tobytes())
        for x in found
    ]


@pytest.mark.parametrize(
    "shapes",
    [
        ((), ()),
        ((), (4,)),
        ((4, 2), ()),
        ((4, 2), (4, 2)),
        ((4, 1), (1, 2)),
        ((4, 1), (4, 2)),
        ((2,), (4, 2)),
        ((4,), (2,)),
    ],
    ids=str,
)
def test_two_tensors(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Of all types, whether they are divided or not."""
    for types in itertools.product(TYPES, TYPES):
        for divided in (False, True):
            each = [operand(*of) for of in zip(types, shapes, strict=True)]
            want = outcome(TRITON, *each, div_or_mod=divided)
            assert outcome(QUICK, *each, div_or_mod=divided) == want, types


def test_a_tensor_and_a_number() -> None:
    for dtype, number in itertools.product(TYPES, (0, 3, 3.0, 1000, -1, 0.5, 0.0, -0.0, math.nan)):
        for each in ((operand(dtype, (4,)), number), (number, operand(dtype, ()))):
            for divided in (False, True):
                want = outcome(TRITON, *each, div_or_mod=divided)
                assert outcome(QUICK, *each, div_or_mod=divided) == want, (dtype, number)


def test_places() -> None:
    """Sums of pointers and numbers, where they are allowed and where not."""
    place = operand(tl.int64, (4,))
    place = tl.tensor(place.handle, tl.block_type(tl.pointer_type(tl.float32), [4]))
    for other in (operand(tl.int32, (4,)), operand(tl.float32, (4,)), 3, place):
        for allowed in itertools.product((False, True), (False, True)):
            for each in ((place, other), (other, place)):
                assert outcome(QUICK, *each, *allowed) == outcome(TRITON, *each, *allowed)


def test_bfloat16_in_32_bits() -> None:
    """All numbers, of any size, and NaN."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    source = interpreter.TensorHandle(bits, tl.bfloat16)
    found = interpreter.interpreter_builder.cast_impl(source, tl.float32)
    want = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float()
    assert found.data.tobytes() == want.numpy().tobytes()
