"""Tables for terminals: columns are those that a terminal shows, where Chinese takes two."""

from __future__ import annotations

import pytest

from ftk.terminal import display_width, in_columns, pad


@pytest.mark.parametrize(("text", "columns"), [("abc", 3), ("中文", 4), ("e\u0301", 1), ("，", 2), ("ｱ", 1), ("", 0)])
def test_display_width(text, columns):
    assert display_width(text) == columns
    assert display_width(pad(text, 6)) == 6


def test_cells_stand_under_each_other():
    assert in_columns([("中文", "1", "b"), ("abc", "200", "一")], left=(0, 2)) == ["中文    1  b", "abc   200  一"]
    assert in_columns([("a", "一"), ("b", "200")]) == ["a   一", "b  200"]
