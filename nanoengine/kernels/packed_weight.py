"""A weight packed for the products of `cpu_linear.c`: numbers, or codes as a file holds them.

Owns the memory of packed weights and the records that C reads. The layout is in `cpu_linear.c`.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from nanoengine.errors import EngineError
from nanoengine.kernels.call_tape import CallTape
from nanoengine.kernels.cpu_kernels import ACTIVATIONS, Workspace
from nanoengine.models.stored_codes import FORMATS, HELD_BYTES, CodedRows, format_of

# As in cpu_panels.h: outputs of a panel, outputs of gate and up that take turns, k of a matrix
# tile, bytes of normed rows that fit a thread, and the epilogues.
_PANEL = 64
_TURN = 16
_TILE_K = 32
_PRIVATE_BYTES = 64 << 10
STORE, ADD, FLOAT = 0, 1, 2
# The dtypes of numbers that are held in 16 bits and multiplied in float32.
_NARROW = {torch.bfloat16: "BF16", torch.float16: "F16"}
_BF12 = "BF12"  # of cpu_bf12.h: bfloat16 in 12 bits
# The formats of cpu_codes.h, in its order.
_FORMATS = {name: number for number, name in enumerate(("", *FORMATS, *_NARROW.values(), _BF12))}
# As layout_of in cpu_formats.h: whose functions serve formats that have none of their own.
_LAYOUTS = {"IQ3_XXS": "IQ4_XS", "IQ3_S": "IQ4_XS", "IQ1": "IQ2"}
GROUP = 32
# Weights of a block of 12 bits each, and the most that these take of what the numbers take.
_BLOCK_WEIGHTS = 1024
MOST_OF_16_BITS = 15 / 16
# Bytes of a rounded group of a row, and the formats that are multiplied with these, in cpu_int8.h.
ROUNDED_GROUP_BYTES = 48
# Rows of a block for matrix tiles: of numbers, and of what stands left.
_TILED_ROWS, PAIR_ROWS = 32, 16
INTEGER_FORMATS = frozenset(FORMATS) - {"MXFP4", "FP8", "NVFP4", "NF4"}
# One field per member of weight_t and call_t in cpu_panels.h, in that order.
_WEIGHT = struct.Struct("=3Q8qd")
CALL = struct.Struct("=4Q5q")
# One field per member of source_t in cpu_bf12_packing.h, in that order.
_SOURCE = struct.Struct("=2Q7q")
_ARENA_BYTES = 64 << 20
_PAGE_BYTES = 2 << 20


def held_bits(formats: Iterable[str], dtype: torch.dtype) -> int:
    """HELD of cpu_formats.h: a bit for each layout of these formats, and of the numbers that are
    held in 16 bits beside activations of this dtype.
    """
    narrow = _NARROW.values() if dtype is torch.float32 else ()
    return sum(1 << _FORMATS[name] for name in {_LAYOUTS.get(n, n) for n in (*formats, *narrow)})


class WeightArena:
    """Allocates memory for packed weights, side by side in large pieces backed by huge pages.

    A product at batch 1 reads every weight once; pages of 2 MiB make that a tenth faster than pages
    of 4 KiB.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._advise = library.advise_huge_pages
        self._advise.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def allocate(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] of undefined content, at a multiple of 64 bytes."""
        if self._used + num_bytes > len(self._piece):
            self._new_piece(max(num_bytes, _ARENA_BYTES))
        begin = self._used
        self._used += -(-num_bytes // 64) * 64
        return self._piece[begin : begin + num_bytes]

    def _new_piece(self, num_bytes: int) -> None:
        """Allocate whole pages: a page that is never touched costs nothing."""
        memory = torch.empty(num_bytes + 2 * _PAGE_BYTES, dtype=torch.uint8)
        skip = -memory.data_ptr() % _PAGE_BYTES
        self._piece = memory[skip : skip + -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES]
        self._used = 0
        self._advise(self._piece.data_ptr(), len(self._piece))


@dataclass(frozen=True, slots=True)
class WeightForm:
    """How a weight is held and multiplied. dtype: of activations; code_format: a key of _FORMATS;
    activation: of gates, a key of ACTIVATIONS; is_tiled: in matrix tiles, where numbers of 16 bits
    are multiplied; is_rounded: rows are rounded to 8 bits, see cpu_int8.h; has_byte_tiles: many
    such rows are multiplied in tiles.
    """

    dtype: torch.dtype
    code_format: str = ""
    activation: str = ""
    is_tiled: bool = False
    is_rounded: bool = False
    has_byte_tiles: bool = False


@dataclass(frozen=True, slots=True)
class WeightTensors:
    """What C reads of a weight. bias: float32, in the order of the panels; norm: (weight [inputs],
    eps) of an RMSNorm of the rows.
    """

    panels: Tensor
    bias: Tensor | None
    norm: tuple[Tensor, float] | None


class PackedWeight:
    """A packed weight as C sees it. It keeps the tensors alive that it points to."""

    def __init__(
        self,
        library: ctypes.CDLL,
        tape: CallTape,
        workspace: Workspace,
        tensors: WeightTensors,
        shape: tuple[int, int],
        form: WeightForm,
    ) -> None:
        """shape: outputs and inputs."""
        norm_weight, eps = tensors.norm or (None, 0.0)
        self.library, self.tape, self._workspace = library, tape, workspace
        self.dtype, self._tensors, self.form = form.dtype, tensors, form
        self.outputs, self.inputs = shape
        pointers = (
            0 if t is None else t.data_ptr() for t in (tensors.panels, tensors.bias, norm_weight)
        )
        number = _FORMATS[form.code_format]
        self.is_left = form.is_tiled and bool(library.is_left_format(number))
        self._has_norm, self._most_as_they_are = norm_weight is not None, 0
        if form.is_tiled:
            self._most_as_they_are = 1 if self.is_left else _TILED_ROWS
        record = _WEIGHT.pack(
            *pointers,
            *shape,
            *(ACTIVATIONS.get(form.activation, 0), form.is_tiled, number),
            *(form.is_rounded, form.has_byte_tiles),
            norm_weight is not None and norm_weight.dtype is torch.bfloat16,
            eps,
        )
        self._record = ctypes.create_string_buffer(record)
        self.address = ctypes.addressof(self._record)
        self._made_stride = library.stride_of_made(self.address)

    @property
    def nbytes(self) -> int:
        """Of its numbers or codes, and what fills the last panel."""
        return self._tensors.panels.nbytes

    def call(self, x: Tensor, out: Tensor, epilogue: int) -> tuple[bytes, Tensor | None]:
        """out (epilogue) norm(x) W^T as C takes it, and the scratch memory that points to.

        x [tokens, inputs] and out [tokens, outputs] may have strides between rows.
        """
        tokens, width = x.shape
        x_stride, step = x.stride()
        name = str(self.dtype).removeprefix("torch.")
        if width != self.inputs or x.dtype is not self.dtype or step != 1:
            raise EngineError(
                f"a packed product takes {name} rows of {self.inputs} values side by side: got "
                f"{x.dtype}, shape {tuple(x.shape)}, strides {x.stride()}"
            )
        if epilogue == ADD and (
            out.shape != (tokens, self.outputs) or out.dtype is not self.dtype or out.stride(1) != 1
        ):
            raise EngineError(
                f"a product of {tokens} rows is added to {name} rows of {self.outputs} values "
                f"side by side: got {out.dtype}, shape {tuple(out.shape)}, strides {out.stride()}"
            )
        num_made, made = self._num_made(tokens), None
        if num_made:
            shape = num_made, self._made_stride // self.dtype.itemsize
            made = self._workspace.buffer("rows", shape, self.dtype)
        packed = CALL.pack(
            self.address,
            x.data_ptr(),
            out.data_ptr(),
            0 if made is None else made.data_ptr(),
            x_stride * x.itemsize,
            out.stride(0) * out.itemsize,
            tokens,
            epilogue,
            torch.get_num_threads(),
        )
        return packed, made

    def _num_made(self, tokens: int) -> int:
        """Most rows that C makes of so many: normed, rounded, copied or arranged; 0 if threads have
        room for them.
        """
        if 0 < self._most_as_they_are < tokens:
            return -(-tokens // _TILED_ROWS) * _TILED_ROWS + tokens * self._has_norm
        width = self.inputs * self.dtype.itemsize
        is_made = self._has_norm or self.form.is_rounded or self._made_stride > width
        return tokens if is_made and tokens * width > _PRIVATE_BYTES else 0


class WeightPacker:
    """Packs weights for activations of one dtype."""

    def __init__(
        self,
        library: ctypes.CDLL,
        tape: CallTape,
        workspace: Workspace,
        dtype: torch.dtype,
        formats: frozenset[str],
        has_tiles: bool,
        rounds_rows: bool,
    ) -> None:
        """dtype: of activations. formats: of codes that the library multiplies with, keys of
        FORMATS. has_tiles: there are matrix tiles, and they may be used.
        rounds_rows: products with codes are of rows rounded to 8 bits.
        """
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        library.pack.argtypes = [pointer, pointer, integer, integer, integer]
        library.pack.restype = None
        library.is_left_format.argtypes = [integer]
        library.stride_of_made.argtypes, library.stride_of_made.restype = [pointer], integer
        library.narrow_numbers.argtypes = [pointer, pointer, integer, integer]
        self.holds_12_bits = bool(library.has_bf12())
        if self.holds_12_bits:
            library.measure_bf12.argtypes = [ctypes.c_char_p, pointer]
            library.measure_bf12.restype = integer
            library.pack_bf12.argtypes = [ctypes.c_char_p, pointer, pointer]
            library.pack_bf12.restype = None
        self._library, self._tape = library, tape
        self._dtype, self._formats, self._has_tiles = dtype, formats, has_tiles
        self._rounds_rows = rounds_rows
        self._has_byte_tiles = library.allow_byte_tiles() == 0
        self._arena, self._workspace = WeightArena(library), workspace
        self.saved_bytes = 0  # by holding numbers in fewer bits

    def pack(
        self,
        weights: tuple[CodedRows | Tensor, ...],
        biases: tuple[Tensor, ...],
        norm: tuple[Tensor, float] | None,
        activation: str = "",
    ) -> PackedWeight:
        """One weight, or gate and up, whose outputs take turns; all of one shape and format.

        biases: () or one for each. norm, activation: see `CpuLinear.pack` and `pack_gate_up`.
        Raises EngineError for other dtypes and shapes.
        """
        outputs, inputs = shape = weights[0].shape
        for weight in weights:
            self.check(weight, shape)
        for bias in biases:
            self.check(bias, shape[:1])
        if norm is not None:
            is_wide = norm[0].dtype is torch.float32
            self.check(norm[0], shape[1:], torch.float32 if is_wide else self._dtype)
        held, code_format = self._held(weights)
        columns = -(-outputs // _TURN) * _TURN * len(weights)
        padded = -(-columns // _PANEL) * _PANEL
        in_12_bits = self._in_12_bits(held, padded)
        if in_12_bits is None:
            panels = self._arena.allocate(padded * self._row_bytes(inputs, code_format))
            if inputs * self._dtype.itemsize % 4 or padded != outputs * len(weights):
                panels.zero_()  # products read the padding, too
        else:
            panels, code_format = in_12_bits, _BF12
        is_rounded = self._rounds_rows and code_format in INTEGER_FORMATS
        form = WeightForm(
            self._dtype,
            code_format,
            activation,
            is_tiled=self._has_tiles and inputs % _TILE_K == 0 and not is_rounded,
            is_rounded=is_rounded,
            has_byte_tiles=is_rounded and self._has_byte_tiles,
        )
        tensors = WeightTensors(
            panels,
            _pack_biases(biases, padded) if biases else None,
            norm and (norm[0].contiguous(), norm[1]),
        )
        own = self._library, self._tape, self._workspace
        packed = PackedWeight(*own, tensors, (outputs, inputs), form)
        if in_12_bits is None:
            self._fill(packed, held)
        return packed

    def _fill(self, packed: PackedWeight, held: list[Tensor]) -> None:
        """Put the rows of each weight where C wants them."""
        threads = torch.get_num_threads()
        for which, rows in enumerate(held):
            stride = rows.stride(0) * rows.itemsize
            self._library.pack(packed.address, rows.data_ptr(), stride, which, threads)

    def _in_12_bits(self, held: list[Tensor], columns: int) -> Tensor | None:
        """The panels of weights in bfloat16, in 12 bits each; None where that has no kernel, or
        saves little. columns: of all panels.
        """
        outputs, inputs = held[0].shape
        are_numbers = self.holds_12_bits and held[0].dtype is torch.bfloat16
        if not are_numbers or inputs % GROUP:
            return None
        first, last = held[0], held[-1]
        source = _SOURCE.pack(
            *(first.data_ptr(), last.data_ptr()),
            *(first.stride(0) * first.itemsize, last.stride(0) * last.itemsize),
            *(len(held), outputs, inputs, self._has_tiles, torch.get_num_threads()),
        )
        starts = torch.empty(columns * inputs // _BLOCK_WEIGHTS + 1, dtype=torch.int32)
        num_bytes = self._library.measure_bf12(source, starts.data_ptr())
        bytes_of_16_bits = 2 * columns * inputs
        if num_bytes > bytes_of_16_bits * MOST_OF_16_BITS:
            return None
        self.saved_bytes += bytes_of_16_bits - num_bytes
        panels = self._arena.allocate(num_bytes)
        self._library.pack_bf12(source, starts.data_ptr(), panels.data_ptr())
        return panels

    def _held(self, weights: tuple[CodedRows | Tensor, ...]) -> tuple[list[Tensor], str]:
        """The rows of each as they are held, contiguous, and their format; "" is that of
        activations.
        """
        code_format = format_of(weights[0])
        if code_format and code_format not in self._formats:
            held = ", ".join(sorted(self._formats)) or "numbers alone"
            raise EngineError(
                f"a weight is codes of {code_format}, and these products were loaded for {held}: "
                "name it among the formats of CpuLinear.load"
            )
        rows = [each.rows if isinstance(each, CodedRows) else each for each in weights]
        if not code_format:
            rows = self.narrowed(rows)
            code_format = _NARROW.get(rows[0].dtype, "") if self._dtype is torch.float32 else ""
        return [each.contiguous() for each in rows], code_format

    def narrowed(self, numbers: list[Tensor]) -> list[Tensor]:
        """The same numbers, of a weight or of gate and up: in 16 bits where activations have 32,
        they all fit, and rows are whole groups.
        """
        if self._dtype is not torch.float32 or numbers[0].shape[1] % GROUP:
            return numbers
        for dtype in _NARROW:
            if not torch.equal(numbers[0][0].to(dtype).float(), numbers[0][0]):
                continue  # the first row tells most weights
            to_dtype = self._to_bfloat16 if dtype is torch.bfloat16 else _to_float16
            narrow = [each for weight in numbers if (each := to_dtype(weight)) is not None]
            if len(narrow) == len(numbers):
                self.saved_bytes += sum(each.nbytes for each in narrow)
                return narrow
        return numbers

    def _to_bfloat16(self, weight: Tensor) -> Tensor | None:
        """The same bits without the lower half; None if these are not all zero."""
        weight, narrow = weight.contiguous(), torch.empty(weight.shape, dtype=torch.bfloat16)
        pointers, threads = (weight.data_ptr(), narrow.data_ptr()), torch.get_num_threads()
        fits = self._library.narrow_numbers(*pointers, weight.numel(), threads)
        return narrow if fits else None

    def _row_bytes(self, inputs: int, code_format: str) -> int:
        if code_format in _NARROW.values():
            return 2 * inputs
        if code_format:
            return inputs // FORMATS[code_format][0] * HELD_BYTES[code_format]
        return -(-inputs * self._dtype.itemsize // 4) * 4

    def check(
        self, weight: CodedRows | Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> None:
        """Raise EngineError for a weight, or a vector, that is not to be packed as this shape.

        dtype: of numbers; None: that of activations.
        """
        rows = weight.rows if isinstance(weight, CodedRows) else weight
        dtype = torch.uint8 if isinstance(weight, CodedRows) else dtype or self._dtype
        if (
            rows.dtype is not dtype
            or rows.device.type != "cpu"
            or weight.shape != shape
            or 0 in shape
        ):
            name = str(dtype).removeprefix("torch.")
            raise EngineError(
                f"weights to pack are {name} on the CPU, here of shape {tuple(shape)}: got "
                f"{rows.dtype} on {rows.device}, shape {tuple(weight.shape)}"
            )


def _to_float16(weight: Tensor) -> Tensor | None:
    """The same numbers; None if they do not fit."""
    narrow = weight.to(torch.float16)
    return narrow if torch.equal(narrow.float(), weight) else None


def _pack_biases(biases: tuple[Tensor, ...], columns: int) -> Tensor:
    """float32 [columns], in the order of the panels: those of gate and up take turns."""
    pad = -len(biases[0]) % _TURN
    parts = [functional.pad(bias.float(), (0, pad)).view(-1, _TURN) for bias in biases]
    packed = torch.stack(parts, dim=1).flatten()
    return functional.pad(packed, (0, columns - len(packed)))
