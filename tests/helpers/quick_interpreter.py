"""Triton's interpreter with the same results in less time: it makes types and patches its language
anew in every operation, which takes many times as long as the arithmetic. And with bfloat16 as a
GPU has it: the interpreter cuts off what a GPU rounds, and multiplies the bits as if they were
integers.
"""

from __future__ import annotations

import math
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
    _call_quickly(interpreter)
    _compare_quickly(core)
    semantic: Any = interpreter.interpreter_semantic
    _remember_result_types(semantic)
    _broadcast_quickly(core, semantic)
    _take_operands_quickly(core, semantic)
    _check_sizes_quickly(interpreter)
    _check_no_overflow(semantic)
    _compute_in_bfloat16(interpreter)


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
    plain = {int, float, bool, str, type(None), core.tensor}
    plain |= {core.dtype, core.block_type, core.pointer_type}

    def unwrapped(value: Any) -> Any:
        if type(value) in plain:
            return value
        return value.value if type(value) is core.constexpr else unwrap(value)

    core._unwrap_if_constexpr = unwrapped


def _call_quickly(interpreter: Any) -> None:
    """What the language offers is called at once, not by two wrappers that look for `_semantic`."""
    patch, semantic = interpreter._patch_attr, interpreter.interpreter_semantic
    wrapper = interpreter.tl.core.builtin(lambda: None).__code__

    def patch_quickly(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        if getattr(member, "__code__", None) is not wrapper:
            patch(obj, name, member, builder, scope)
            return
        function = member.__wrapped__

        def called(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(obj, name, called)

    interpreter._patch_attr = patch_quickly


def _compare_quickly(core: Any) -> None:
    equal: Any = core.dtype.__eq__
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def _remember_result_types(semantic: Any) -> None:
    find, known = semantic.computation_type_impl, {}

    def result_type(a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = (a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod)
        if key not in known:
            known[key] = find(a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return known[key]

    semantic.computation_type_impl = result_type


def _broadcast_quickly(core: Any, semantic: Any) -> None:
    """Shapes are compared as lists of integers, and a type is made once."""
    slowly, builder = semantic.broadcast_impl_value, semantic.builder

    def splat(x: Any, shape: list[int]) -> Any:
        of = core.block_type(x.type.scalar, shape)
        return core.tensor(builder.create_splat(of, x.handle), of)

    def spread(x: Any, shape: list[int]) -> Any:
        if x.type.shape.values == shape:
            return x
        of = core.block_type(x.type.scalar, shape)
        return core.tensor(builder.create_broadcast(x.handle, shape), of)

    def broadcast(a: Any, b: Any) -> tuple[Any, Any]:
        a_is_block, b_is_block = a.type.is_block(), b.type.is_block()
        if not a_is_block:
            return (splat(a, b.type.shape.values), b) if b_is_block else (a, b)
        if not b_is_block:
            return a, splat(b, a.type.shape.values)
        sizes, others = a.type.shape.values, b.type.shape.values
        if sizes == others:
            return a, b
        if len(sizes) != len(others):
            return slowly(a, b)
        shape = [y if x == 1 else x for x, y in zip(sizes, others, strict=True)]
        if any(y not in (1, x) for x, y in zip(shape, others, strict=True)):
            return slowly(a, b)  # which says what is wrong
        return spread(a, shape), spread(b, shape)

    semantic.broadcast_impl_value = broadcast


def _take_operands_quickly(core: Any, semantic: Any) -> None:
    """Of tensors and plain numbers it is soon known what kinds of scalars there are."""
    slowly, known = semantic.binary_op_type_checking_impl, {}
    plain = {int, float}

    def constant(x: Any, number: float, is_first: bool, divided: bool) -> tuple[Any, Any]:
        """The type in which x and the number meet, and the number in it, in the shape of x."""
        shape = x.type.shape.values if x.type.is_block() else ()
        key = (x.dtype.name, repr(number), is_first, divided, *shape)  # 0.0 is not -0.0
        if key not in known:
            kinds = [(x.dtype, False), (semantic.to_tensor_type(number), True)]
            (a, a_is_scalar), (b, b_is_scalar) = reversed(kinds) if is_first else kinds
            of = semantic.computation_type_impl(a, a_is_scalar, b, b_is_scalar, divided)
            made = semantic._cast_to_computation_type(number, of)
            known[key] = of, semantic.broadcast_impl_value(x, made)[1]
        return known[key]

    def operands(
        a: Any,
        b: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[Any, Any]:
        a_is_tensor, b_is_tensor = type(a) is core.tensor, type(b) is core.tensor
        a_is_place = a_is_tensor and a.dtype.is_ptr()
        b_is_place = b_is_tensor and b.dtype.is_ptr()
        if a_is_place and allow_lhs_ptr and b_is_tensor and b.dtype.is_int():
            return semantic.broadcast_impl_value(a, b)
        if a_is_place or b_is_place or not arithmetic_check:
            return slowly(a, b, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        if a_is_tensor and b_is_tensor:
            of = semantic.computation_type_impl(a.dtype, False, b.dtype, False, div_or_mod)
            a, b = (x if x.dtype is of else semantic.cast(x, of) for x in (a, b))
            return semantic.broadcast_impl_value(a, b)
        if a_is_tensor and type(b) in plain:
            of, b = constant(a, b, False, div_or_mod)
            return (a if a.dtype is of else semantic.cast(a, of)), b
        if b_is_tensor and type(a) in plain:
            of, a = constant(b, a, True, div_or_mod)
            return a, (b if b.dtype is of else semantic.cast(b, of))
        return slowly(a, b, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    semantic.binary_op_type_checking_impl = operands


def _check_sizes_quickly(interpreter: Any) -> None:
    """Whether an array fits its type is asked of each result, twice."""
    known: dict[str, float] = {}

    def fits(array: Any, of: Any) -> bool:
        if of.name not in known:
            known[of.name] = math.inf if of.is_ptr() else max(1, of.primitive_bitwidth // 8)
        return array.itemsize <= known[of.name]

    interpreter._validate_np_data_size = fits


def _check_no_overflow(semantic: Any) -> None:
    """Ten more operations for each sum of integers, whose result Triton drops unless it debugs."""
    if not semantic.builder.options.debug:
        semantic.binary_op_sanitize_overflow_impl = lambda *_: None


def _compute_in_bfloat16(interpreter: Any) -> None:
    builder, tl = interpreter.InterpreterBuilder, interpreter.tl
    cast, dot, combine = builder.cast_impl, builder.create_dot, builder.binary_op

    def converted(self: Any, source: Any, target: Any) -> Any:
        types = source.dtype.scalar.name, target.scalar.name
        if types == ("bf16", "fp32"):
            wide = np.asarray(source.data.astype(np.uint32) << np.uint32(16))
            return interpreter.TensorHandle(wide.view(np.float32), tl.float32)
        if types != ("fp32", "bf16"):
            return cast(self, source, target)
        values = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
        bits = values.view(torch.int16).numpy().view(np.uint16)
        return interpreter.TensorHandle(bits, tl.bfloat16)

    def multiplied(self: Any, a: Any, b: Any, total: Any, *others: Any) -> Any:
        if a.dtype.scalar.name == "bf16":
            a, b = (converted(self, each, tl.float32) for each in (a, b))
        return dot(self, a, b, total, *others)

    def combined(self: Any, a: Any, b: Any, op: Any) -> Any:
        if a.dtype.scalar.name != "bf16":
            return combine(self, a, b, op)
        made = combine(self, *(converted(self, each, tl.float32) for each in (a, b)), op)
        return made if made.data.dtype == np.bool_ else converted(self, made, tl.bfloat16)

    builder.cast_impl, builder.create_dot, builder.binary_op = converted, multiplied, combined
