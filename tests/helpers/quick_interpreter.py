"""Triton's interpreter with the same results in less time: it makes types and patches its language
anew in every operation, which takes many times as long as the arithmetic. And with bfloat16 as a
GPU has it: the interpreter cuts off what a GPU rounds, and multiplies the bits as if they were
integers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def speed_up() -> None:
    """Does nothing where Triton is missing, or is one that works in another way."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    _patch_language_once(interpreter)
    _remember_numpy_types(interpreter)
    core: Any = interpreter.tl.core
    _remember_block_types(core)
    _remember_shapes(core)
    _unwrap_quickly(core)
    _check_no_overflow(interpreter.interpreter_semantic)
    _round_bfloat16(interpreter)


def _patch_language_once(interpreter: Any) -> None:
    patch, patched = interpreter._patch_lang, set()

    def patch_once(function: Callable[..., object]) -> object:
        language = {id(interpreter.tl), id(interpreter.tl.core)}
        found = language.intersection(map(id, function.__globals__.values()))
        if not found <= patched:
            patch(function)
            patched.update(found)
        return interpreter._LangPatchScope()  # with nothing to restore

    interpreter._patch_lang = patch_once


def _remember_numpy_types(interpreter: Any) -> None:
    find, known = interpreter._get_np_dtype, {}

    def numpy_type(of: Any) -> Any:
        scalar = of.scalar
        if scalar.is_ptr():
            return find(scalar)
        if scalar.name not in known:
            known[scalar.name] = find(scalar)
        return known[scalar.name]

    interpreter._get_np_dtype = numpy_type


def _remember_block_types(core: Any) -> None:
    make: Any = core.block_type.__init__
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        if element_ty.is_ptr():  # whose name does not say all
            make(self, element_ty, shape)
            return
        sizes = shape.values if isinstance(shape, core.tuple) else shape
        key = (element_ty.name, *[getattr(size, "value", size) for size in sizes])
        if key not in known:
            make(self, element_ty, shape)
            known[key] = vars(self).copy()
        vars(self).update(known[key])

    core.block_type.__init__ = init


def _remember_shapes(core: Any) -> None:
    make: Any = core.tensor.__init__
    known: dict[tuple[int, ...], dict[str, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in known:
            make(self, handle, type)
            known[key] = {"shape": self.shape, "numel": self.numel}
        vars(self).update(known[key], handle=handle, type=type, dtype=type.scalar)

    core.tensor.__init__ = init


def _unwrap_quickly(core: Any) -> None:
    unwrap = core._unwrap_if_constexpr
    plain = {int, float, bool, str, core.dtype, core.block_type, core.tensor}

    def unwrapped(value: Any) -> Any:
        if type(value) in plain:
            return value
        return value.value if type(value) is core.constexpr else unwrap(value)

    core._unwrap_if_constexpr = unwrapped


def _check_no_overflow(semantic: Any) -> None:
    """Ten more operations for each sum of integers, whose result Triton drops unless it debugs."""
    if not semantic.builder.options.debug:
        semantic.binary_op_sanitize_overflow_impl = lambda *_: None


def _round_bfloat16(interpreter: Any) -> None:
    builder, tl = interpreter.InterpreterBuilder, interpreter.tl
    cast, dot, combine = builder.cast_impl, builder.create_dot, builder.binary_op

    def rounded(self: Any, source: Any, target: Any) -> Any:
        if (source.dtype.scalar, target.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, target)
        values = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
        bits = values.view(torch.int16).numpy().view(np.uint16)
        return interpreter.TensorHandle(bits, tl.bfloat16)

    def multiplied(self: Any, a: Any, b: Any, total: Any, *others: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (cast(self, each, tl.float32) for each in (a, b))
        return dot(self, a, b, total, *others)

    def combined(self: Any, a: Any, b: Any, op: Any) -> Any:
        if a.dtype.scalar != tl.bfloat16:
            return combine(self, a, b, op)
        made = combine(self, *(cast(self, each, tl.float32) for each in (a, b)), op)
        return made if made.data.dtype == np.bool_ else rounded(self, made, tl.bfloat16)

    builder.cast_impl, builder.create_dot, builder.binary_op = rounded, multiplied, combined
