"""Variables in the memory of a GPU."""

from __future__ import annotations

import numpy
import pytest

import mpidist
from tests.gpu.library import check_on_all_ranks, host, is_own, place, problem_of, problems_of, strategy

pytestmark = [pytest.mark.mpi, pytest.mark.gpu]


def made(*args, **options):
    with strategy().scope():
        return mpidist.Variable(*args, **options)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "bool"])
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (500, 300)])
def test_all_begin_with_the_value_of_the_chief(xp, shape, dtype):
    rank, size = place()
    variable = made(xp.asarray(numpy.full(shape, rank == 0, dtype)))
    assert variable.dtype == dtype and variable.shape == shape
    check_on_all_ranks(problem_of(xp, variable.value, numpy.ones(shape, dtype)))
    assert type(variable.numpy()) is numpy.ndarray or isinstance(variable.numpy(), numpy.generic)
    assert (variable.numpy() == 1).all()


def test_the_initial_value_may_be_a_function(xp):
    variable = made(lambda: xp.asarray(numpy.full((2, 3), mpidist.rank() + 4.0, "f4")))
    check_on_all_ranks(problem_of(xp, variable.value, numpy.full((2, 3), 4.0, "f4")))


def test_what_was_given_is_copied(xp):
    given = xp.asarray(numpy.ones(5, "f4"))
    variable = made(given)
    given.fill(3)
    held = variable.value
    variable.assign(xp.asarray(numpy.full(5, 2, "f4")))
    check_on_all_ranks(problems_of(xp, [variable.value, given], [numpy.full(5, 2, "f4"), numpy.full(5, 3, "f4")]))
    assert is_own(xp, held)


@pytest.mark.parametrize("is_on_host", [False, True])
def test_assign(xp, is_on_host):
    variable = made(xp.asarray(numpy.ones((2, 3), "f4")))
    given = numpy.full((2, 3), 2.0, "f4")
    given = given if is_on_host else xp.asarray(given)
    found = []
    for assign in (variable.assign, variable.assign_add, variable.assign_sub):
        assign(given)
        found.append(variable.value + 0)
    check_on_all_ranks(problems_of(xp, found, [numpy.full((2, 3), each, "f4") for each in (2, 4, 2)]))


@pytest.mark.parametrize("aggregation", ["SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def test_values_that_replicas_assign_are_aggregated(xp, aggregation):
    rank, size = place()
    variable = made(xp.asarray(numpy.zeros(700, "f8")), aggregation=aggregation)
    strategy().run(lambda: variable.assign(xp.asarray(numpy.full(700, rank + 1.0))))
    wanted = {"SUM": size * (size + 1) / 2, "MEAN": (size + 1) / 2, "ONLY_FIRST_REPLICA": 1.0}[aggregation]
    check_on_all_ranks(problem_of(xp, variable.value, numpy.full(700, wanted), rtol=1e-15))
    strategy().run(lambda: variable.assign_add(xp.asarray(numpy.full(700, rank + 1.0))))
    check_on_all_ranks(problem_of(xp, variable.value, numpy.full(700, 2 * wanted), rtol=1e-15))


@pytest.mark.parametrize("aggregation", ["SUM", "MEAN"])
def test_copies_that_differ_are_aggregated_when_read(xp, aggregation):
    rank, size = place()
    variable = made(xp.asarray(numpy.zeros(30, "f8")), synchronization="ON_READ", aggregation=aggregation)
    strategy().run(lambda: variable.assign_add(xp.asarray(numpy.full(30, rank + 1.0))))
    wanted = size * (size + 1) / 2 / (1 if aggregation == "SUM" else size)
    found = host(variable.value)
    check_on_all_ranks(bool(numpy.allclose(found, wanted, rtol=1e-15)) or f"{found[0]} in place of {wanted}")


def test_arithmetic(xp):
    variable = made(xp.asarray(numpy.full((3, 2), 3.0, "f4")))
    other = xp.asarray(numpy.full((2, 2), 2.0, "f4"))
    found = [variable * 2, variable @ other, variable[0], -variable, variable.value.sum(axis=0)]
    expected = [6.0, 12.0, 3.0, -3.0, 9.0]
    shapes = [(3, 2), (3, 2), (2,), (3, 2), (2,)]
    wanted = [numpy.full(shape, value, "f4") for shape, value in zip(shapes, expected, strict=True)]
    check_on_all_ranks(problems_of(xp, found, wanted))


def test_many_variables(xp):
    rank, size = place()
    variables = [made(xp.asarray(numpy.full(number % 5, rank + number, "f4"))) for number in range(60)]
    check_on_all_ranks(
        problems_of(xp, [v.value for v in variables], [numpy.full(number % 5, number, "f4") for number in range(60)])
    )


def test_rows_are_written(xp):
    """By indices that lie on the host, and on the device."""
    variable = made(xp.asarray(numpy.zeros((4, 2), "f4")))
    for where in (numpy.array([1, 3]), xp.asarray(numpy.array([1, 3]))):
        rows = mpidist.IndexedSlices(xp.asarray(numpy.ones((2, 2), "f4")), where)
        variable.scatter_add(rows)
    expected = numpy.zeros((4, 2), "f4")
    expected[[1, 3]] = 2
    check_on_all_ranks(problem_of(xp, variable.value, expected))


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c16", "i4", "u1"])
def test_rows_that_are_named_twice_are_changed_twice(xp, dtype):
    """In their order, of which the last one sets the row; with the rows of all ranks."""
    rank, size = place()
    where, values = numpy.array([2, 0, 2]), numpy.array([[3, 1], [2, 1], [5, 1]]).astype(dtype)
    expected = {  # of rows of 4 each, by one rank; how an element of row 2, and one of row 0, is changed
        "scatter_add": (12, 6),
        "scatter_sub": (-4, 2),
        "scatter_mul": (60, 8),
        "scatter_div": (4 / 3 / 5, 2),
        "scatter_max": (5, 4),
        "scatter_min": (3, 2),
        "scatter_update": (5, 2),
    }
    if dtype == "c16":  # numbers without an order
        del expected["scatter_max"], expected["scatter_min"]
    if numpy.dtype(dtype).kind in "iu":
        del expected["scatter_div"]
    problems = []
    for name, (twice, once) in expected.items():
        with strategy().scope():
            variable = mpidist.Variable(xp.full((3, 2), 4, dtype), aggregation="ONLY_FIRST_REPLICA")
        rows = mpidist.IndexedSlices(xp.asarray(values), where)
        strategy().run(lambda variable=variable, name=name, rows=rows: getattr(variable, name)(rows))
        found = host(variable.value)
        wanted = numpy.array([once, 4, twice]).astype("i8" if dtype == "u1" else dtype).astype(dtype)
        is_right = numpy.allclose(found[:, 0], wanted, rtol=2e-3 if dtype == "f2" else 1e-6)
        problems.append("" if is_right else f"{name}: {found[:, 0]} in place of {wanted}")
    check_on_all_ranks("; ".join(filter(None, problems)))


@pytest.mark.parametrize("count", [1, 40, 3000])
def test_a_row_that_is_named_often(xp, count):
    rank, size = place()
    with strategy().scope():
        variable = mpidist.Variable(xp.zeros((2, 3), "f4"), aggregation="SUM")
    rows = mpidist.IndexedSlices(xp.ones((count, 3), "f4"), xp.asarray(numpy.arange(count) % 7 // 6))
    strategy().run(lambda: variable.scatter_add(rows))
    expected = numpy.repeat([[float(size * (count - count // 7))], [float(size * (count // 7))]], 3, axis=1)
    check_on_all_ranks(problem_of(xp, variable.value, expected.astype("f4")))
