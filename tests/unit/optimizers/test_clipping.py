"""Clipping, after the sum over the replicas: closed forms, and the same on any number of replicas."""

from __future__ import annotations

import ml_dtypes
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpidist
from mpidist import optimizers
from mpidist.optimizers.slices import SLICE_ELEMENTS
from mpidist.testing import run_ranks
from mpidist.variables import IndexedSlices, Variable


def applied(gradients, **options):
    """Return what a step of plain descent takes the gradients for."""
    variables = [Variable(numpy.zeros_like(gradient)) for gradient in gradients]
    optimizers.SGD(1.0, **options).apply_gradients(zip(gradients, variables, strict=True))
    return [-v.value for v in variables]


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=8), st.floats(0.01, 50))
def test_by_value(values, limit):
    (found,) = applied([numpy.array(values)], clipvalue=limit)
    assert found.tolist() == numpy.clip(values, -limit, limit).tolist()


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=8), st.floats(0.01, 50))
def test_by_norms(values, limit):
    gradients = [numpy.array(values), numpy.array(values[:1])]
    for gradient, found in zip(gradients, applied(gradients, clipnorm=limit), strict=True):
        norm = numpy.sqrt((gradient**2).sum())
        numpy.testing.assert_allclose(found, gradient * (limit / norm if norm > limit else 1), rtol=1e-12)
    norm = numpy.sqrt(sum((gradient**2).sum() for gradient in gradients))
    for gradient, found in zip(gradients, applied(gradients, global_clipnorm=limit), strict=True):
        numpy.testing.assert_allclose(found, gradient * (limit / norm if norm > limit else 1), rtol=1e-12)


def test_norms_do_not_overflow_and_do_not_stop_at_a_slice():
    (found,) = applied([numpy.full(2 * SLICE_ELEMENTS + 1, 1e30, "float32")], clipnorm=1.0)
    numpy.testing.assert_allclose(found, (2 * SLICE_ELEMENTS + 1) ** -0.5, rtol=1e-6)
    (found,) = applied([numpy.full(4, 60000, "float16")], clipnorm=1.0)
    assert found.tolist() == [0.5] * 4
    (found,) = applied([numpy.full(4, 1e30, ml_dtypes.bfloat16)], clipnorm=1.0)
    assert found.tolist() == [0.5] * 4


@pytest.mark.parametrize("bad", [numpy.inf, numpy.nan])
def test_a_norm_that_is_not_finite_hides_nothing(bad):
    for found in applied([numpy.array([bad, 1.0]), numpy.ones(2)], global_clipnorm=1.0):
        assert numpy.isnan(found).all()


def test_rows_count_once_in_the_norm():
    v = Variable(numpy.zeros((4, 1)))
    rows = IndexedSlices(numpy.array([[1.0], [3.0], [2.0]]), numpy.array([2, 0, 2]))
    optimizers.SGD(1.0, clipnorm=1.0).apply_gradients([(rows, v)])
    numpy.testing.assert_allclose(v.value[:, 0], -numpy.array([3, 0, 3, 0]) / numpy.sqrt(18))


@pytest.mark.parametrize("option", ["clipnorm", "global_clipnorm", "clipvalue"])
@pytest.mark.parametrize("size", [2, 3])
def test_the_sum_is_clipped_not_its_parts(option, size):
    def update():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        with strategy.scope():
            v = Variable(numpy.zeros(1))
        optimizer = optimizers.SGD(1.0, **{option: 1.0})
        # the parts are beyond the limit, their sum is not
        part = numpy.array([10.0 if strategy.extended.replica_id else -10.0 * (size - 1) + 0.5])
        strategy.run(lambda: optimizer.apply_gradients([(part, v)]))
        return v.value.tolist()

    assert run_ranks(size, update) == [[-0.5]] * size


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"Only one of `clipnorm`, `clipvalue` and `global_clipnorm` can be set.*2.0"):
        optimizers.SGD(0.1, clipnorm=1.0, clipvalue=2.0)
    with pytest.raises(ValueError, match="clipvalue must be positive, or None for no clipping; got 0"):
        optimizers.SGD(0.1, clipvalue=0)
