"""The key-value part of a GGUF file, read with suspicion."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nanoengine.errors import CorruptModelError, UnsupportedModelError
from nanoengine.loading.gguf.structure import MAX_COUNT


class Metadata:
    """Typed access to the key-value part, with the architecture's prefix filled in."""

    def __init__(self, path: Path, fields: Mapping[str, Any]) -> None:
        """part: its number, from 1, and how many there are. num_tensors: of all parts."""
        self.path = path
        self._fields = fields
        count = self.get("split.count", int, 0)
        self.part = (self.get("split.no", int, 0) + 1, count) if count > 1 else (1, 1)
        self.num_tensors = self.get("split.tensors.count", int, 0)
        # Parts behind the first have nothing but these keys.
        unknown = None if self.part[0] == 1 else ""
        self.architecture = str(self.get("general.architecture", str, unknown))

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of `key`; CorruptModelError if it is missing without a default, or of another
        type."""
        field = self._fields.get(key)
        if field is None:
            if default is None:
                raise CorruptModelError(f"{self.path} lacks the metadata key {key!r}")
            return default
        try:
            value = field.contents()
        except (ValueError, IndexError) as error:
            raise CorruptModelError(f"{self.path}: {key!r} cannot be read: {error}") from error
        if type(value) is not kind:
            raise CorruptModelError(
                f"{self.path}: {key!r} must be {kind.__name__}, not {type(value).__name__}"
            )
        return value

    def has(self, key: str) -> bool:
        """Whether the file has the key."""
        return key in self._fields

    def strings(self, key: str) -> list[str]:
        """A list of strings. CorruptModelError if it holds anything else."""
        values = self.get(key, list)
        if not all(isinstance(value, str) for value in values):
            raise CorruptModelError(f"{self.path}: {key!r} must be a list of strings")
        return list(values)

    def number(self, key: str, default: int | None = None) -> int:
        """A positive size of the architecture. A list (one per layer) counts if all are equal."""
        full_key = f"{self.architecture}.{key}"
        is_list = self.has(full_key) and len(self._fields[full_key].types) > 1
        value = self.get(full_key, list if is_list else int, default)
        if is_list:
            if len(set(value)) != 1:
                raise UnsupportedModelError(
                    f"{self.path}: {full_key!r} differs between layers, which is not supported"
                )
            value = value[0]
        if not isinstance(value, int) or not 0 < value <= MAX_COUNT:
            raise CorruptModelError(
                f"{self.path}: {full_key!r} is {value}, not within 1 to {MAX_COUNT}"
            )
        return value

    def of_layers(self, key: str, num_layers: int, at_least: int = 1) -> list[int]:
        """A size of each layer, of which the file has one or a list."""
        full_key = f"{self.architecture}.{key}"
        if not self.has(full_key) or len(self._fields[full_key].types) == 1:
            return [self.number(key)] * num_layers
        values = self._each(full_key, int, num_layers)
        if not all(at_least <= value <= MAX_COUNT for value in values):
            raise CorruptModelError(
                f"{self.path}: {full_key!r} has a size that is not within {at_least} to {MAX_COUNT}"
            )
        return values

    def have_windows(self, num_layers: int, interval: int | None = None) -> list[bool]:
        """Of each layer, whether it has a sliding window. interval: if the file does not say it,
        each but every so many-th has one, and the file may say how many instead of a list.
        """
        name = "attention.sliding_window_pattern"
        key = f"{self.architecture}.{name}"
        if interval is None or (self.has(key) and len(self._fields[key].types) > 1):
            return self._each(key, bool, num_layers)
        interval = self.number(name, interval)
        return [bool((i + 1) % interval) for i in range(num_layers)]

    def window(self) -> int | None:
        """The sliding window. One that no text is longer than is none, and so is 0."""
        window = self.count("attention.sliding_window")
        return window if 0 < window < self.number("context_length") else None

    def count(self, key: str) -> int:
        """A number of the architecture that may be missing: then it is 0."""
        return int(self.get(f"{self.architecture}.{key}", int, 0))

    def flag(self, key: str, default: bool = False) -> bool:
        """One of the architecture."""
        return bool(self.get(f"{self.architecture}.{key}", bool, default))

    def real(self, key: str, default: float | None = None) -> float:
        """A float32 of the architecture."""
        return self.float32(f"{self.architecture}.{key}", default)

    def float32(self, key: str, default: float | None = None) -> float:
        """A float32, as the shortest decimal that names it."""
        return float(str(np.float32(self.get(key, float, default))))

    def reals(self, key: str, num_layers: int) -> list[float]:
        """A float32 for each layer."""
        return self._each(key, float, num_layers)

    def _each(self, key: str, kind: type, num_layers: int) -> list[Any]:
        values = self.get(key, list)
        if len(values) != num_layers or not all(type(value) is kind for value in values):
            raise CorruptModelError(
                f"{self.path}: {key!r} must be a list of {kind.__name__} with one for each of "
                f"{num_layers} layers"
            )
        return list(values)

    def token_id(self, key: str, vocab_size: int) -> int | None:
        """The id of a special token, None without one."""
        full_key = f"tokenizer.ggml.{key}"
        if not self.has(full_key):
            return None
        value = int(self.get(full_key, int))
        if not 0 <= value < vocab_size:
            raise CorruptModelError(
                f"{self.path}: {full_key!r} is {value}, but the vocabulary has {vocab_size} tokens"
            )
        return value
