"""Buffers are free again when nobody refers to what was handed out of them; what a caller changed is his alone."""

import numpy
import pytest

from mpidist.collectives.reductions.plan import build
from mpidist.collectives.reductions.results import ResultSet

SHAPES = [(3,), (2, 2), (), (5,)]


def _set(shapes=SHAPES, op="sum", dtype="f4"):
    plan = build([("", numpy.dtype(dtype), shape) for shape in shapes], op, 1 << 20)
    results = ResultSet(plan, numpy.empty(0), {})
    results.settle()
    return results


class Kind(numpy.ndarray):
    pass


@pytest.mark.parametrize(
    "hold",
    [
        lambda views: views[0],
        lambda views: views[-1],
        lambda views: views[1][0],
        lambda views: views[1].T,
        lambda views: views[-1].reshape(1, 5),
        lambda views: views[3].view(Kind),
        lambda views: views[3].view(Kind)[1:].view(numpy.ndarray),
        lambda views: memoryview(views[3]),
        lambda views: numpy.frombuffer(memoryview(views[3]), "u1"),
        lambda views: numpy.from_dlpack(views[3])[:2],
        lambda views: numpy.asarray(_Exported(views[3])),
        lambda views: list(views),
        lambda views: (views[1], views[1]),
        lambda views: views[3].base,
    ],
)
@pytest.mark.parametrize(("op", "dtype"), [("sum", "f4"), ("mean", "i4"), ("sum", "f2")])
def test_whoever_holds_part_of_the_results_has_them_for_himself(hold, op, dtype):
    results = _set(op=op, dtype=dtype)
    assert results.is_free()
    held = hold(results.hand_out())
    assert not results.is_free()
    del held
    assert results.is_free()


class _Exported:
    """Memory by the array interface, as other libraries take it."""

    def __init__(self, array):
        self.array = array
        self.__array_interface__ = array.__array_interface__


@pytest.mark.parametrize("shapes", [[], [()], [(0,)]])
def test_few_or_empty_results(shapes):
    results = _set(shapes)
    assert results.is_free()
    held = results.hand_out()
    assert results.is_free() == (not shapes)
    del held
    assert results.is_free()


def _lock_all(array):
    while isinstance(array, numpy.ndarray):
        array.flags.writeable = False
        array = array.base


def _reshape_base(array):
    array.base.shape = (1, -1)


@pytest.mark.filterwarnings("ignore:Setting the:DeprecationWarning")
@pytest.mark.parametrize(
    "change",
    [
        lambda array: setattr(array, "shape", (-1,)),
        lambda array: setattr(array, "shape", (4, 1, 1)),
        lambda array: setattr(array, "dtype", numpy.int16),
        lambda array: setattr(array, "strides", (0, array.itemsize)),
        lambda array: setattr(array.flags, "writeable", False),
        lambda array: array.setflags(write=False),
        lambda array: array.sort(axis=0),
        _lock_all,
        _reshape_base,
    ],
)
@pytest.mark.parametrize(("op", "dtype"), [("sum", "f4"), ("mean", "i4"), ("sum", "f2")])
def test_what_a_caller_changes_on_a_result_does_not_come_back(change, op, dtype):
    results = _set(op=op, dtype=dtype)
    expected = numpy.float64 if op == "mean" else numpy.dtype(dtype)
    for value in range(3):
        change(results.hand_out()[1])
        assert results.is_free()
        results.results[0][...] = 2.0 * value
        again = results.hand_out()
        assert [(each.shape, each.dtype, each.flags.writeable) for each in again] == [
            (shape, expected, True) for shape in SHAPES
        ]
        assert [each.tolist() for each in again] == [numpy.full(shape, 2.0 * value).tolist() for shape in SHAPES]
        del again
