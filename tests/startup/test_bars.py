"""A bar has its width, whatever the parts are, and shows each of them."""

from __future__ import annotations

import re

import pytest

from nanoengine.config.engine import GIB
from nanoengine.startup.bars import Bar, Part, bars_html


def bar(*sizes: int, total: int = 100) -> Bar:
    parts = (
        Part(letter, letter, f"<{letter}>", n) for letter, n in zip("ABC", sizes, strict=False)
    )
    return Bar("GPU", total, tuple(parts))


@pytest.mark.parametrize(
    ("sizes", "drawn"),
    [
        ((50, 25, 0), "A{30}B{15}[.]{15}"),
        ((1, 1, 1), "ABC?[.]{57,58}"),
        ((100, 1, 1), "A{60}"),
        ((0, 0, 0), "[.]{60}"),
        ((70, 70, 0), "A{42}B{18}"),
    ],
)
def test_letters(sizes: tuple[int, ...], drawn: str) -> None:
    first, second = bar(*sizes).lines()
    assert re.fullmatch(rf"GPU +0.0 GiB \[{drawn}\]", first) and len(first) == 78
    assert [f"{letter} <{letter}>" in second for letter in "ABC"] == [n > 0 for n in sizes]


def test_free_is_what_no_part_takes() -> None:
    assert bar(50, 25).free == 25 and bar(90, 90).free == 0
    assert ". free 3.00 GiB" in bar(GIB, total=4 * GIB).lines()[1]


def test_html_is_escaped_and_leaves_out_what_is_not_there() -> None:
    drawn = bars_html([bar(50, 0, 25), Bar("none", 0, ())], "a < b")
    assert "&lt;A&gt; 0.00 GiB" in drawn and "<A>" not in drawn and "&lt;B&gt;" not in drawn
    assert re.findall(r"width:([\d.]+)%", drawn) == ["50.00", "25.00"]
    assert "<pre>a &lt; b</pre>" in drawn and "none" not in drawn
