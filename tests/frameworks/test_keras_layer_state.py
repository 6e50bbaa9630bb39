"""Variables that layers change in `call`, on N ranks: their `aggregation` says what becomes of them."""

from __future__ import annotations

import importlib.util

import numpy
import pytest

if importlib.util.find_spec("keras") is None:
    pytest.skip("there is no Keras", allow_module_level=True)

import keras

from tests.frameworks.keras_models import BACKEND, X, Y, assert_alike, compiled, distributed, pair, rank, ranks

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
        self.moving = add("moving", "mean", shape=shape[1:])
        self.first = add("first", "only_first_replica")
        self.steps = add("steps", "only_first_replica", "int32")

    def call(self, inputs):
        rows = keras.ops.shape(inputs)[0]
        self.rows.assign_add(keras.ops.cast(rows, "float32"))
        self.integers.assign_add(rows)
        self.totals.assign_add(keras.ops.sum(inputs, axis=0))
        self.left.assign_sub(keras.ops.cast(rows, "float32"))
        self.mean.assign(keras.ops.mean(inputs, axis=0))
        self.moving.assign(0.5 * self.moving + 0.5 * keras.ops.mean(inputs, axis=0))
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


def test_what_layers_count_beside_one_that_is_frozen_and_trained_again():
    """Without a new compilation: the variables of the model change their places, and get back to earlier ones."""
    first = keras.layers.Dense(3)
    model = distributed(
        lambda: keras.Sequential([keras.Input((3,)), first, Counting(), keras.layers.Dense(1)]), compiled(metrics=())
    )
    for is_trained in (True, False, True):
        first.trainable = is_trained
        model.evaluate(X[:31], Y[:31], verbose=0)
        model.test_on_batch(X[:5], Y[:5])
        model.predict(X[:17], verbose=0)
    assert keras.ops.convert_to_numpy(model.layers[1].rows) == 3 * (31 + 5 + 17)
    assert keras.ops.convert_to_numpy(model.layers[1].integers) == 3 * (31 + 5 + 17)


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


CHANGES = {
    "assign_add": lambda variable, value: variable.assign_add(value),
    "assign": lambda variable, value: variable.assign(variable + value),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("change, settings, method", [
    ("assign_add", {}, lambda model: model.fit(X, Y, verbose=0)),
    ("assign", {"dtype": "int32"}, lambda model: model.predict(X, verbose=0)),
    ("assign", {"dtype": "int32", "aggregation": "mean"}, lambda model: model.fit(X, Y, verbose=0)),
])  # fmt: skip
def test_what_nobody_knows_to_be_an_average(change, settings, method):
    """Keras' own example, `ComputeSum`, has no aggregation; what Keras' layers keep is known."""

    class Keeping(keras.layers.BatchNormalization):
        def build(self, shape):
            super().build(shape)
            self.kept = self.add_weight(shape=(), initializer="zeros", trainable=False, name="kept", **settings)

        def call(self, inputs, training=None):
            if self.is_kept:
                CHANGES[change](self.kept, keras.ops.cast(keras.ops.sum(inputs), self.kept.dtype))
            return super().call(inputs, training=training)

    Keeping.is_kept = False
    model = distributed(
        lambda: keras.Sequential([keras.Input((3,)), Keeping(name="layer"), keras.layers.Dense(1)]), compiled()
    )
    model.fit(X, Y, verbose=0)
    Keeping.is_kept = True
    model.compile("sgd", "mse")
    assert model.predict_on_batch(X).shape == (45, 1)  # of all rows, on each rank
    with pytest.raises(NotImplementedError, match=r"layer/kept', which has aggregation=.*mean.*sum.*only_first"):
        method(model)


@pytest.mark.skipif(BACKEND != "torch", reason="of PyTorch")
@pytest.mark.mpi(min_size=2)
def test_buffers_of_a_module_of_pytorch():
    """Rank 0's to begin with; a step that changes them is refused."""
    import torch

    def make():
        norm = torch.nn.BatchNorm1d(3)
        norm.running_mean += rank()
        return keras.Sequential([keras.Input((3,)), keras.layers.TorchModuleWrapper(norm), keras.layers.Dense(1)])

    model = distributed(make, compiled())
    assert model.layers[0].module.running_mean.tolist() == [0, 0, 0]
    assert model.predict(X, verbose=0).shape == (45, 1)
    with pytest.raises(NotImplementedError, match=r"num_batches_tracked.*keras.layers.BatchNormalization"):
        model.fit(X, Y, verbose=0)
