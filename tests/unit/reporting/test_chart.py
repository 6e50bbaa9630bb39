"""A chart has every finite number on its axis, however large or small."""

from __future__ import annotations

import re

import pytest

from mpidist.reporting.chart import chart


@pytest.mark.parametrize(
    "values",
    [
        [0.5, 1e306],
        [1.0, 1.7e308],
        [5e-324, 1.0],
        [0.0, 5e-324],
        [-1.7e308, 1.7e308],
        [1.7e308, 1.7e308],
        [1e-310, 2e-310],
        [1.0, 1.0000000000000002],
        [1e16, 1e16 + 2],
    ],
)
def test_losses_at_the_ends_of_the_range_of_floats(values):
    drawn = chart({"loss": list(enumerate(values))}, 100)
    heights = [float(y) for y in re.findall(r'cy="([-.\d]+)"', drawn)]
    lines = [float(y) for y in re.findall(r'class="grid" d="M\d+ ([-.\d]+)H', drawn)]
    assert len(heights) == 2 and min(lines) <= min(heights) <= max(heights) <= max(lines)
    assert [float(text) for text in re.findall(r"step \d: loss ([^<]+)<", drawn)] == [float(f"{y:.5g}") for y in values]
