"""Variables stand where arrays are read: operators, functions, indexing; and are changed by `assign*` alone."""

from __future__ import annotations

import operator

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.strategies.mirrored import MirroredStrategy
from mpidist.testing import run_ranks
from mpidist.variables import Variable
from tests.helpers.identical import assert_identical

BINARY = [
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow),
    *(operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne, divmod),
]
IN_PLACE = [
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.ipow),
    *(operator.imod, operator.imatmul),
]
NUMBERS = st.lists(st.integers(1, 9).map(float), min_size=1, max_size=5)


def same(found, expected):
    """Whether both have the same values and dtype, and neither is a variable."""
    assert_identical(found, expected)
    return not isinstance(found, Variable(0.0).__class__)


@given(NUMBERS, st.integers(1, 9), st.sampled_from(BINARY), st.sampled_from(["f4", "f8"]))
def test_operators_give_what_they_give_for_arrays(numbers, other, op, dtype):
    array = numpy.array(numbers, dtype)
    variable, twin = Variable(array), Variable(array[::-1])
    for operand, plain in [(float(other), float(other)), (array[::-1], array[::-1]), (twin, array[::-1])]:
        assert same(op(variable, operand), op(array, plain))
        assert same(op(operand, variable), op(plain, array))
    assert variable.value.tolist() == numbers


def test_products_of_matrices():
    x, w = numpy.arange(6.0).reshape(2, 3), numpy.arange(12.0).reshape(3, 4)
    variable = Variable(w)
    assert same(x @ variable, x @ w) and same(variable @ w.T, w @ w.T)
    assert same(numpy.dot(x, variable), x @ w)


def test_signs_and_functions():
    array = numpy.array([1.0, -4.0], "f4")
    variable = Variable(array)
    assert same(-variable, -array) and same(abs(variable), abs(array)) and same(+variable, array)
    assert same(numpy.exp(variable), numpy.exp(array))
    assert numpy.sum(variable) == -3 and numpy.add.reduce(variable) == -3 and numpy.mean(variable) == -1.5
    assert same(~Variable([True, False]), numpy.array([False, True]))


def test_parts_are_snapshots():
    variable = Variable([[1.0, 2.0], [3.0, 4.0]])
    row, element, all_rows, mask = variable[0], variable[1, 1], list(variable), variable[variable > 2]
    whole = variable.numpy()
    variable.assign(numpy.zeros((2, 2), "f4"))
    assert (row.tolist(), element, mask.tolist()) == ([1, 2], 4, [3, 4])
    assert [each.tolist() for each in all_rows] == whole.tolist() == [[1, 2], [3, 4]]
    assert type(whole) is numpy.ndarray and len(variable) == 2
    with pytest.raises(TypeError, match="'Variable\\w*' is a scalar"):
        len(Variable(1.0))
    with pytest.raises(TypeError, match="item assignment"):
        variable[0] = 1


def test_scalars_are_numbers():
    assert (float(Variable(2.5)), int(Variable(7)), complex(Variable(1.0))) == (2.5, 7, 1)
    assert Variable(1) and not Variable(0) and [10, 20, 30][Variable(2)] == 30
    with pytest.raises(ValueError, match="ambiguous"):
        bool(Variable([1, 2]))


@pytest.mark.parametrize("op", IN_PLACE)
def test_operators_do_not_change_variables(op):
    variable = Variable(numpy.eye(2), name="kernel")
    with pytest.raises(TypeError, match=r"variable 'kernel\w*' cannot be changed .* use `assign_add`"):
        op(variable, numpy.eye(2))
    with pytest.raises(TypeError, match="assign_add"):
        numpy.add(numpy.eye(2), 1, out=variable)
    assert variable.value.tolist() == [[1, 0], [0, 1]]
    array = numpy.eye(2)
    array += variable
    assert array.tolist() == [[2, 0], [0, 2]]


def test_variables_are_keys_by_themselves():
    first, second = Variable([1.0]), Variable([1.0])
    assert {first: 1, second: 2}[second] == 2
    assert (first == None, first != None) == (False, True)  # noqa: E711 - what is tested
    assert (first == second).tolist() == [True]


def test_variables_synchronized_on_read_are_aggregated_when_read():
    def fn():
        strategy = MirroredStrategy()
        with strategy.scope():
            variable = Variable(0.0, synchronization="ON_READ", aggregation="SUM")
        strategy.run(lambda: variable.assign(strategy.extended.replica_id + 1.0))
        return float(variable * 2), float(strategy.run(lambda: variable * 2))

    assert run_ranks(3, fn) == [(12.0, 2.0), (12.0, 4.0), (12.0, 6.0)]


@pytest.mark.parametrize(
    ("value", "dtype", "kept"),
    [(300, "uint8", 255), (-1, "uint8", 0), (2.7, "int32", 2), (3_000_000_000, None, 7), (float("nan"), "int64", 0)],
)
def test_integers_that_a_variable_does_not_hold_are_refused(value, dtype, kept):
    """Casts would wrap them, or cut them off."""
    with pytest.raises(ValueError, match="'v' is u?int.*does not hold all of its values"):
        Variable(value, dtype=dtype, name="v")
    held = Variable(kept, dtype=dtype, name="v")
    assert held.value == kept


@pytest.mark.parametrize("write", ["assign", "assign_add", "assign_sub"])
def test_integers_that_do_not_fit_are_not_written(write):
    variable = Variable(7, name="v")
    with pytest.raises(ValueError, match="is int32, which does not hold all of its values"):
        getattr(variable, write)(numpy.int64(2**31))
    assert variable.value == 7
    getattr(variable, write)(numpy.int64(3))
