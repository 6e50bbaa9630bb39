"""TensorFlow's observed cases as tables: how an observation of ours compares with one."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from mpidist.errors import CollectiveMismatchError
from mpidist.testing import run_ranks
from tests.oracle.cases import exception

#: A check of one case: how many ranks, and what each of them observes, given the case's input.
Check = tuple[int, Callable[[dict[str, Any]], Any]]


def observe_on_ranks(case: dict[str, Any], check: Check) -> list[Any]:
    """Return what every rank observes, or fail unless the exception that the case expects is raised."""
    size, observe = check
    expected = case["expected"]
    error = exception(expected)
    if error is None:
        return run_ranks(size, observe, case["input"])
    with pytest.raises(error) as raised:
        run_ranks(size, observe, case["input"])
    if "InvalidArgumentError" != expected["raises"] and "in user code" not in expected["message"]:
        # up to where TensorFlow shows one of its own objects or classes
        assert re.split("<|_Default|VariableAggregationV2", expected["message"])[0] in str(raised.value)
    if "must have the same size" in expected["message"]:
        assert isinstance(raised.value, CollectiveMismatchError)
    return []


def assert_value(observed: Any, expected: Any) -> None:
    """Assert that values are equal to rounding; structures and their types too."""
    if isinstance(expected, dict) and set(expected) == {"value", "dtype", "shape"}:
        assert (str(observed.dtype), list(observed.shape)) == (expected["dtype"], expected["shape"])
        assert_value(observed, expected["value"])
    elif expected == "NaN":
        assert math.isnan(observed)
    elif isinstance(expected, dict):
        assert observed.keys() == expected.keys()
        for key in expected:
            assert_value(observed[key], expected[key])
    elif isinstance(observed, (numpy.ndarray, numpy.generic)):
        numpy.testing.assert_allclose(observed, expected, rtol=1e-6)
        assert numpy.shape(observed) == numpy.shape(expected)
    else:
        assert observed == expected
