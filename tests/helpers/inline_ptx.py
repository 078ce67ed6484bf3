"""Evaluates PTX that stands in Triton kernels, which the interpreter refuses: 32-bit registers, the
few instructions that our kernels use, what NVIDIA's PTX ISA says of them. Results are bfloat16, two
in a register.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from triton import language as tl
from triton.runtime import interpreter

Words = npt.NDArray[np.uint32]


def create_inline_asm(
    _: Any, asm: str, constraints: str, values: list[Any], types: list[Any], *others: Any
) -> Any:
    """In place of InterpreterBuilder.create_inline_asm. Two elements at a time: of 16 bits in one
    register, of 32 in two.
    """
    shape = values[0].data.shape
    words: list[Words] = []
    for value in values:
        held = np.ascontiguousarray(value.data)
        pairs = held.view(np.uint32).reshape(shape[0], shape[1] // 2, -1)
        words += [np.ascontiguousarray(pairs[..., index]) for index in range(pairs.shape[2])]
    registers = {f"${len(types) + index}": each for index, each in enumerate(words)}
    evaluate(asm, registers)
    results = [registers[f"${index}"].view(np.uint16).reshape(shape) for index in range(len(types))]
    return Results([interpreter.TensorHandle(each, tl.bfloat16) for each in results])


class Results:
    """What a call of the builder gives."""

    def __init__(self, handles: list[Any]) -> None:
        self._handles = handles

    def get_result(self, index: int) -> Any:
        return self._handles[index]


def evaluate(asm: str, registers: dict[str, Words]) -> None:
    """Runs each instruction of a block on arrays of registers, by name."""
    some = next(iter(registers.values()))
    for name, text in re.findall(r"^\s*([\w.]+) ([^;]+);", asm, re.MULTILINE):
        if name == ".reg":
            continue
        target, *sources = text.split(", ")
        operands = [
            registers[each] if each in registers else np.full_like(some, int(each, 0) & 0xFFFFFFFF)
            for each in sources
        ]
        registers[target] = INSTRUCTIONS[name](*operands)


def selected(first: Words, second: Words, third: Words, table: Words) -> Words:
    """lop3: bit 4a + 2b + c of the table, for each of the bits a, b, c."""
    made = np.zeros_like(first)
    for index in range(8):
        a = first if index & 4 else ~first
        b = second if index & 2 else ~second
        c = third if index & 1 else ~third
        made |= a & b & c & -(table >> np.uint32(index) & np.uint32(1))
    return made


def permuted(low: Words, high: Words, selectors: Words) -> Words:
    """prmt: each byte one of eight, or its sign in all bits."""
    eight = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    made = np.zeros_like(low)
    for index in range(4):
        selector = selectors >> np.uint32(4 * index) & np.uint32(15)
        byte = (eight >> (selector.astype(np.uint64) & np.uint64(7)) * np.uint64(8)) & np.uint64(
            255
        )
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        byte = np.where(selector & np.uint32(8), sign, byte)
        made |= byte.astype(np.uint32) << np.uint32(8 * index)
    return made


def multiplied(first: Words, second: Words, third: Words) -> Words:
    """fma.rn.bf16x2: products of numbers of 8 bits, plus one, are exact in float64."""
    a, b, c = (
        torch.from_numpy(each.view(np.int16).copy()).view(torch.bfloat16).double()
        for each in (first, second, third)
    )
    bits = (a * b + c).bfloat16().view(torch.int16).numpy()
    return bits.view(np.uint32)


INSTRUCTIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b,
    "shr.b32": lambda a, b: a >> b,
    "shr.u32": lambda a, b: a >> b,
    "lop3.b32": selected,
    "prmt.b32": permuted,
    "fma.rn.bf16x2": multiplied,
}
