"""Buffers are free again when nobody refers to what was handed out of them, and not before."""

import numpy
import pytest

from mpidist.fusion.plan import build
from mpidist.fusion.results import ResultSet

SHAPES = [(3,), (2, 2), (), (5,)]


def _set(shapes=SHAPES, op="sum", dtype="f4"):
    plan = build([("", numpy.dtype(dtype), shape) for shape in shapes], op, 1 << 20)
    results = ResultSet(plan, numpy.empty(0), {})
    results.settle()
    return results


@pytest.mark.parametrize(
    "hold",
    [
        lambda views: views[0],
        lambda views: views[-1],
        lambda views: views[1][0],
        lambda views: views[1].T,
        lambda views: views[-1].reshape(1, 5),
        lambda views: memoryview(views[3]),
        lambda views: list(views),
        lambda views: (views[1], views[1]),
        lambda views: views[3].base,
    ],
)
@pytest.mark.parametrize(("op", "dtype"), [("sum", "f4"), ("mean", "i4"), ("sum", "f2")])
def test_whoever_holds_part_of_the_results_has_them_for_himself(hold, op, dtype):
    results = _set(op=op, dtype=dtype)
    assert results.is_free()
    held = hold(list(results.views))
    assert not results.is_free()
    del held
    assert results.is_free()


@pytest.mark.parametrize("shapes", [[], [()], [(0,)]])
def test_few_or_empty_results(shapes):
    results = _set(shapes)
    assert results.is_free()
    held = list(results.views)
    assert results.is_free() == (not shapes)
    del held
    assert results.is_free()


def test_one_reference_more_does_not_make_up_for_one_fewer():
    results = _set()
    held = results.views[1]
    results.views[2] = None
    assert not results.is_free()
    del held
