"""Gradients that are some rows: the same as the array with zeros in the other rows, on any number of replicas."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpidist
from mpidist import optimizers
from mpidist.testing import run_ranks
from mpidist.variables import IndexedSlices, Variable

FAMILIES = {
    "sgd": lambda: optimizers.SGD(0.1),
    "decayed": lambda: optimizers.SGD(0.1, weight_decay=0.1),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "ftrl": lambda: optimizers.Ftrl(0.1, l1_regularization_strength=0.1),
    "adam": lambda: optimizers.Adam(0.1),
    "rmsprop": lambda: optimizers.RMSprop(0.1, momentum=0.5, centered=True),
    "lars": lambda: optimizers.LARS(0.1),
    "lamb": lambda: optimizers.LAMB(0.1),
    "clipped": lambda: optimizers.SGD(0.1, clipvalue=0.5),
    "global": lambda: optimizers.Adam(0.1, global_clipnorm=0.5),
}


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=15, deadline=None)
@given(st.lists(st.lists(st.integers(0, 4), max_size=6), min_size=1, max_size=4))
def test_rows_are_the_array_with_zeros(family, steps):
    random = numpy.random.default_rng(4)
    start = random.normal(size=(5, 2))
    found, expected = [Variable(start), Variable(start)], []
    first, second = FAMILIES[family](), FAMILIES[family]()
    for indices in steps:
        rows = IndexedSlices(random.normal(size=(len(indices), 2)), numpy.array(indices, int), (5, 2))
        first.apply_gradients([(rows, found[0])])
        second.apply_gradients([(rows.to_dense(), found[1])])
    numpy.testing.assert_allclose(found[0].value, found[1].value, rtol=1e-13)
    expected = list(second.slots(found[1]).values())
    for slot, other in zip(first.slots(found[0]).values(), expected, strict=True):
        numpy.testing.assert_allclose(slot, other, rtol=1e-12)


@pytest.mark.parametrize("family", ["sgd", "adagrad"])
def test_rows_without_a_gradient_are_not_touched(family):
    optimizer, v = FAMILIES[family](), Variable(numpy.ones((1000, 2), "float32"))
    slots = list(optimizer.slots(v).values())
    for array in (v.storage, *slots):
        array[::2] = numpy.nan  # whoever reads these gets warnings or NaNs elsewhere
    optimizer.apply_gradients([(IndexedSlices(numpy.ones((2, 2), "float32"), numpy.array([7, 7])), v)])
    changed = numpy.flatnonzero((v.value[1::2] != 1).any(axis=1)) * 2 + 1
    assert changed.tolist() == [7]
    assert numpy.isnan(v.value[::2]).all()


@pytest.mark.parametrize("family", ["sgd", "adam", "global"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_rows_of_all_replicas_are_summed(family, size):
    random = numpy.random.default_rng(5)
    indices = random.integers(0, 6, (2, 3, 4))
    values = random.normal(size=(2, 3, 4, 2))

    def train():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        with strategy.scope():
            v, w = Variable(numpy.ones((6, 2))), Variable(numpy.ones(3))
        optimizer = FAMILIES[family]()
        mine = [part for part in range(3) if part % size == strategy.extended.replica_id]
        for step in range(2):
            taken = indices[step][mine].reshape(-1), values[step][mine].reshape(-1, 2)
            rows = IndexedSlices(taken[1], taken[0])
            dense = numpy.full(3, float(len(mine)))
            strategy.run(lambda r=rows, d=dense: optimizer.apply_gradients([(r, v), (d, w)]))
        return v.value.copy(), w.value.copy()

    v, w, optimizer = Variable(numpy.ones((6, 2))), Variable(numpy.ones(3)), FAMILIES[family]()
    for step in range(2):
        dense = numpy.zeros((6, 2))
        numpy.add.at(dense, indices[step].reshape(-1), values[step].reshape(-1, 2))
        optimizer.apply_gradients([(dense, v), (numpy.full(3, 3.0), w)])
    results = run_ranks(size, train)
    for found_v, found_w in results:
        assert found_v.tobytes() == results[0][0].tobytes()
        numpy.testing.assert_allclose(found_v, v.value, rtol=1e-12)
        numpy.testing.assert_allclose(found_w, w.value, rtol=1e-12)


def test_replicas_without_any_row_take_part():
    def train():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        with strategy.scope():
            v = Variable(numpy.ones((3, 1), "float32"))
        count = strategy.extended.replica_id  # replica 0 has none
        rows = IndexedSlices(numpy.ones((count, 1), "float32"), numpy.zeros(count, int))
        strategy.run(lambda: optimizers.SGD(1.0).apply_gradients([(rows, v)]))
        return v.value[:, 0].tolist()

    assert run_ranks(3, train) == [[-2.0, 1.0, 1.0]] * 3


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            IndexedSlices(numpy.ones((1, 3)), numpy.array([0])),
            r"gradient for variable 'table\w*' does not fit: .*\(3,\)",
        ),
        (IndexedSlices(numpy.ones((1, 2)), numpy.array([5])), "does not fit: row numbers from 5 to 5 are outside"),
        (IndexedSlices(numpy.ones((1, 2)), numpy.array([0]), (9, 2)), r"does not fit: .*shape \(9, 2\)"),
    ],
)
def test_rows_of_something_else_are_refused(rows, message):
    v = Variable(numpy.zeros((5, 2)), name="table")
    with pytest.raises(ValueError, match=message):
        optimizers.SGD(1.0).apply_gradients([(rows, v)])
    assert not v.value.any()
