"""Arrays that are the same in values, shape and dtype: ``strict=True`` of NumPy, which has it from 1.24 on."""

from __future__ import annotations

from typing import Any

import numpy


def assert_identical(found: Any, expected: Any) -> None:
    """Fail unless both are arrays of one shape and dtype, with the same values; nothing is spread over other shapes."""
    found, expected = numpy.asanyarray(found), numpy.asanyarray(expected)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    numpy.testing.assert_array_equal(found, expected)
