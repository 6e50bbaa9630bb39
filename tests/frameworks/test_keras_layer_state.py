"""Variables that layers change in `call`, on N ranks: their `aggregation` says what becomes of them."""

from __future__ import annotations

import importlib.util

import numpy
import pytest

if importlib.util.find_spec("keras") is None:
    pytest.skip("there is no Keras", allow_module_level=True)

import keras

from tests.frameworks.keras_models import X, Y, assert_alike, compiled, distributed, pair, rank, ranks

pytestmark = pytest.mark.mpi


class Counting(keras.layers.Layer):
    """Counts rows, and sums what it is given, in all kinds of variables."""

    def build(self, shape):
        def add(name, aggregation, dtype="float32", shape=()):
            return self.add_weight(
                shape=shape, initializer="zeros", trainable=False, aggregation=aggregation, dtype=dtype, name=name
            )

        self.rows = add("rows", "sum")
        self.integers = add("integers", "sum", "int32")
        self.totals = add("totals", "sum", shape=shape[1:])
        self.left = add("left", "sum")
        self.mean = add("mean", "mean", shape=shape[1:])
        self.plain = add("plain", "none", shape=shape[1:])
        self.first = add("first", "only_first_replica")
        self.steps = add("steps", "none", "int32")

    def call(self, inputs):
        rows = keras.ops.shape(inputs)[0]
        self.rows.assign_add(keras.ops.cast(rows, "float32"))
        self.integers.assign_add(rows)
        self.totals.assign_add(keras.ops.sum(inputs, axis=0))
        self.left.assign_sub(keras.ops.cast(rows, "float32"))
        self.mean.assign(keras.ops.mean(inputs, axis=0))
        self.plain.assign(0.5 * self.plain + 0.5 * keras.ops.mean(inputs, axis=0))
        self.first.assign(keras.ops.cast(rows, "float32"))
        self.steps.assign_add(1)
        return inputs


def make():
    return keras.Sequential([keras.Input((3,)), Counting(), keras.layers.Dense(1)])


def values(model):
    return {each.name: keras.ops.convert_to_numpy(each) for each in model.layers[0].non_trainable_variables}


#: Of 45 rows: even parts; uneven ones; replicas without rows.
@pytest.mark.parametrize("batch_size", [15, 12, 1])
@pytest.mark.parametrize("calls", ["fit", "all"])
def test_what_layers_count(batch_size, calls):
    def train(model):
        model.fit(X, Y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
        if calls == "all":
            model.evaluate(X[:31], Y[:31], batch_size=batch_size, verbose=0)
            model.predict(X[:17], batch_size=batch_size, verbose=0)
            model.train_on_batch(X[:4], Y[:4])
            model.test_on_batch(X[:5], Y[:5])
        return values(model)

    (_, expected), (many, found) = pair(make, compiled(metrics=()))(train)
    rows = 90 if calls == "fit" else 90 + 31 + 17 + 4 + 5
    assert found["rows"] == found["integers"] == -found["left"] == rows
    last = {("fit", 15): 15, ("fit", 12): 9, ("fit", 1): 1}.get((calls, batch_size), 5)
    assert found.pop("first") == -(-last // ranks())
    del expected["first"]
    for name, value in expected.items():
        numpy.testing.assert_allclose(found[name], value, rtol=2e-5, atol=2e-5, err_msg=name)
    assert_alike(many)


def test_a_sum_that_is_assigned():
    """It is not known what such a value adds: refused by the variable's name."""

    class Assigning(keras.layers.Layer):
        def build(self, shape):
            self.total = self.add_weight(
                shape=(), initializer="zeros", trainable=False, aggregation="sum", name="total"
            )

        def call(self, inputs):
            self.total.assign(self.total + keras.ops.sum(inputs))
            return inputs

    def make():
        return keras.Sequential([keras.Input((3,)), Assigning(name="layer"), keras.layers.Dense(1)])

    model = distributed(make, compiled(metrics=()))
    if ranks() == 1:
        model.fit(X, Y, verbose=0)
        return
    with pytest.raises(NotImplementedError, match=r"layer/total.*assign_add"):
        model.fit(X, Y, verbose=0)
    model.layers[0].total.assign(3.0)  # outside of a step everything is as it was
    assert keras.ops.convert_to_numpy(model.layers[0].total) == 3


@pytest.mark.mpi(min_size=2)
def test_an_integer_that_differs_is_found():
    from mpidist.errors import CollectiveMismatchError

    class Own(keras.layers.Layer):
        def build(self, shape):
            self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype="int32", name="count")

        def call(self, inputs):
            self.count.assign_add(1 + rank())
            return inputs

    model = distributed(lambda: keras.Sequential([keras.Input((3,)), Own(), keras.layers.Dense(1)]), compiled())
    with pytest.raises(CollectiveMismatchError, match="count"):
        model.fit(X, Y, verbose=0)
