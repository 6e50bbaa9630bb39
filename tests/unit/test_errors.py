"""Values in messages."""

from __future__ import annotations

import numpy
import pytest

from mpidist.errors import quoted
from mpidist.options import ReduceOp


def test_short_values_are_quoted_whole():
    assert [quoted(value) for value in ("mean", 3, None, [1, 2.5])] == ["'mean'", "3", "None", "[1, 2.5]"]


def test_an_array_in_place_of_an_operation_is_quoted_in_one_short_line():
    gradients = [numpy.ones((64, 3, 7, 7)) for _ in range(161)]
    with pytest.raises(TypeError, match="Expected `reduce_op`") as caught:
        ReduceOp.parse(gradients)
    assert len(str(caught.value)) < 1000
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="is not a valid") as named:
        ReduceOp.parse("x" * 100_000)
    assert len(str(named.value)) < 300


@pytest.mark.parametrize("name", ["array", "dict"])
def test_a_value_whose_class_has_the_name_of_another_is_quoted(name):
    assert name in quoted(type(name, (), {})())  # newer versions of Python look at its module
