"""Opens a GGUF and, if it was split, its other parts: metadata and tensors, of which none is read.

No file is trusted: its whole structure is checked against its size before the `gguf` package reads
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nanoengine.errors import CorruptModelError
from nanoengine.loading.gguf.fused import qkv_apart
from nanoengine.loading.gguf.metadata import Metadata
from nanoengine.loading.gguf.parts import check_complete, check_part, other_parts
from nanoengine.loading.gguf.structure import check_structure


def open_gguf(path: Path, reads_vocabulary: bool = True) -> tuple[Metadata, dict[str, Any]]:
    """The metadata, and the tensors of all parts by name, with queries, keys and values apart. A
    vocabulary takes seconds.

    Raises CorruptModelError, UnsupportedModelError, and ModelNotFoundError for a missing part.
    """
    first, stored = _open_file(path, reads_vocabulary)
    for number, other in other_parts(first):
        part, tensors = _open_file(other, reads_vocabulary)
        check_part(part, number, first)
        stored |= tensors
    check_complete(first, len(stored))
    return first, qkv_apart(first, stored)


def _open_file(path: Path, reads_vocabulary: bool) -> tuple[Metadata, dict[str, Any]]:
    vocabulary = check_structure(path)
    reader = _open_reader(path, {} if reads_vocabulary else vocabulary)
    return Metadata(path, reader.fields), {tensor.name: tensor for tensor in reader.tensors}


def _open_reader(path: Path, ends: Mapping[int, int]) -> Any:
    """A `gguf.GGUFReader` of a file whose structure was checked. ends: where values begin and end
    that it leaves out.
    """
    # 0.3 s to import, and needed only the first time a GGUF is used.
    import gguf

    class Reader(gguf.GGUFReader):
        """Slices a plain array, not a memmap: a third of the time for 100,000 strings."""

        @property
        def data(self) -> Any:
            return self._plain

        @data.setter
        def data(self, mapped: Any) -> None:
            self._plain = mapped.view(np.ndarray)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if orig_offs in ends:
                return ends[orig_offs] - orig_offs, [], [], []
            return super()._get_field_parts(orig_offs, raw_type)

    try:
        return Reader(path)
    except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
        raise CorruptModelError(f"{path} is damaged: {error}") from error
