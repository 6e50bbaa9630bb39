"""An axis: which place belongs to a value."""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import NamedTuple

from docs.pictures.svg import SMALL, Drawing


class Axis(NamedTuple):
    """From a first value at a place to a last one at another: evenly, or on a logarithmic axis by decades."""

    first: float
    last: float
    begin: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        share = (value - self.first) / (self.last - self.first)
        if self.is_log:
            share = log(value / self.first) / log(self.last / self.first)
        return self.begin + share * (self.end - self.begin)


def columns(drawing: Drawing, axis: Axis, names: Mapping[float, str], top: float, bottom: float) -> None:
    """Draw a line from top to bottom for each value of a horizontal axis, with its name below."""
    for value, name in names.items():
        drawing.line((axis.at(value), top), (axis.at(value), bottom), colour="edge", width=1)
        drawing.words(axis.at(value), bottom + 19, name, SMALL, "muted")


def rows(drawing: Drawing, axis: Axis, names: Mapping[float, str], left: float, right: float) -> None:
    """Draw a line from left to right for each value of a vertical axis, with its name before it."""
    for value, name in names.items():
        drawing.line((left, axis.at(value)), (right, axis.at(value)), colour="edge", width=1)
        drawing.words(left - 8, axis.at(value) + 5, name, SMALL, "muted", at="end")
