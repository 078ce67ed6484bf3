"""Bars that show what takes a GPU's memory or RAM: as lines of text, and as HTML for notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass

from nanoengine.config.engine import GIB, in_gib

WIDTH = 60  # characters of a bar
# Of the parts, by key: middling, so that they show on dark and on light pages.
COLOURS = {"weights": "#4e79a7", "step": "#f28e2b", "kv": "#59a14f", "ring": "#b07aa1"}
OTHER_COLOUR = "#8c8c8c"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a bar: its letter, its key in JSON, what it is, and how many bytes."""

    letter: str
    key: str
    label: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Bar:
    """A memory of `total` bytes and its parts; the rest is free."""

    name: str
    total: int
    parts: tuple[Part, ...]

    @property
    def free(self) -> int:
        """Bytes that no part takes."""
        return max(0, self.total - sum(part.num_bytes for part in self.parts))

    def lines(self) -> list[str]:
        """A line of letters, one for each part of the memory, and a line that names them."""
        there = [part for part in self.parts if part.num_bytes]
        drawn = ""
        filled = 0
        for part in there:
            filled += part.num_bytes
            end = min(WIDTH, max(len(drawn) + 1, round(WIDTH * filled / self.total)))
            drawn += part.letter * (end - len(drawn))
        named = [f"{part.letter} {part.label} {in_gib(part.num_bytes)}" for part in there]
        return [
            f"{self.name}  {self.total / GIB:6.1f} GiB [{drawn:.<{WIDTH}}]",
            f"{'':10}{', '.join([*named, f'. free {in_gib(self.free)}'])}",
        ]

    def html(self) -> str:
        """The bar as HTML; all text is escaped."""
        there = [part for part in self.parts if part.num_bytes]
        boxes = "".join(
            f'<div title="{html.escape(_named(part))}" style="background:{_colour(part)};'
            f'width:{100 * part.num_bytes / self.total:.2f}%"></div>'
            for part in there
        )
        names = "".join(
            f'<span style="margin-right:1em"><span style="color:{_colour(part)}">&#9632;</span> '
            f"{html.escape(_named(part))}</span>"
            for part in there
        )
        title = html.escape(f"{self.name}, {in_gib(self.total)}")
        return (
            f"<div>{title}</div>"
            '<div style="display:flex;height:1.2em;border:1px solid #8c8c8c">'
            f"{boxes}</div><div>{names}free {in_gib(self.free)}</div>"
        )


def bars_html(bars: Iterable[Bar], text: str) -> str:
    """The bars above a text, which is escaped."""
    drawn = "".join(bar.html() for bar in bars if bar.total)
    return f"<div>{drawn}<pre>{html.escape(text)}</pre></div>"


def _named(part: Part) -> str:
    return f"{part.label} {in_gib(part.num_bytes)}"


def _colour(part: Part) -> str:
    return COLOURS.get(part.key, OTHER_COLOUR)
