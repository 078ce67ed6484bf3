"""The parts of a GGUF that llama.cpp split, by the name of the first: NAME-00001-of-00003.gguf."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from nanoengine.errors import CorruptModelError, ModelNotFoundError, UnsupportedModelError
from nanoengine.loading.gguf.metadata import Metadata

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)


def names_beside(path: Path) -> list[Path]:
    """The other parts of the file `path`, in order, which need not exist; [] for another name."""
    named = _PART.fullmatch(path.name)
    if named is None or int(named[2]) != 1:
        return []
    return [
        path.with_name(f"{named[1]}-{number:05}-of-{named[3]}{path.suffix}")
        for number in range(2, int(named[3]) + 1)
    ]


def other_parts(first: Metadata) -> Iterator[tuple[int, Path]]:
    """The number of each part behind the first, and its file. Raises UnsupportedModelError for
    another part than the first and for names that lead to none, ModelNotFoundError for a part that
    is not there.
    """
    number, count = first.part
    named = _PART.fullmatch(first.path.name)
    name = f"{named[1] if named else 'NAME'}-00001-of-{count:05}.gguf"
    if number != 1:
        raise UnsupportedModelError(
            f"{first.path} is part {number} of {count} of a GGUF that was split; give the first "
            f"part, {name}, and leave the others beside it"
        )
    others = names_beside(first.path) if count > 1 else []
    if len(others) + 1 != count:
        raise UnsupportedModelError(
            f"{first.path} is part 1 of {count} of a GGUF that was split; the others are found by "
            f"its name, which must end as in {name}"
        )
    for number, path in enumerate(others, 2):
        if not path.is_file():
            raise ModelNotFoundError(
                f"{first.path} is part 1 of {count} of a GGUF that was split, and part {number} is "
                f"not beside it: get {path.name}"
            )
        yield number, path


def check_part(part: Metadata, number: int, first: Metadata) -> None:
    """Raises CorruptModelError for a part of another model, as far as it can be known."""
    if part.part != (number, first.part[1]) or part.num_tensors != first.num_tensors:
        raise CorruptModelError(
            f"{part.path} is part {part.part[0]} of {part.part[1]} of a GGUF with "
            f"{part.num_tensors} tensors, and not part {number} of {first.part[1]} of "
            f"{first.path.name}, which has {first.num_tensors}; get all parts of one model"
        )


def check_complete(first: Metadata, num_found: int) -> None:
    """Raises CorruptModelError if all parts together have another number of tensors."""
    if first.part[1] > 1 and num_found != first.num_tensors:
        raise CorruptModelError(
            f"{first.path} says that its {first.part[1]} parts have {first.num_tensors} different "
            f"tensors, but they have {num_found}; get all parts of one model"
        )
