"""What user functions return in other libraries' arrays: computed later (JAX), or needing a gradient (PyTorch)."""

from __future__ import annotations

import sys
import types
import warnings

import numpy
import pytest

import mpidist
from mpidist import arrays
from mpidist.testing import run_ranks
from mpidist.variables import snapshots


class Later:
    """An array that is computed when it is looked at."""

    def __init__(self, compute, shape=(), dtype="float32"):
        self.compute, self.shape, self.dtype = compute, shape, numpy.dtype(dtype)

    def __array__(self, dtype=None, copy=None):
        return numpy.asarray(self.compute(), self.dtype)

    def __float__(self):
        return float(self.compute())


class Tensor:
    """A tensor as PyTorch's, which refuses to become an array while it needs a gradient."""

    def __init__(self, array, requires_grad=True):
        self.array, self.requires_grad = numpy.asarray(array), requires_grad
        self.shape, self.dtype = self.array.shape, self.array.dtype

    def detach(self):
        return Tensor(self.array, requires_grad=False)

    def __array__(self, dtype=None, copy=None):
        if self.requires_grad:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad")
        return numpy.asarray(self.array, dtype)

    def __float__(self):
        if self.requires_grad:
            warnings.warn("Converting a tensor with requires_grad=True to a scalar", UserWarning, stacklevel=2)
        return float(self.array)

    def __len__(self):
        return len(self.array)


X = numpy.arange(1, 9, dtype="f4")


def trained(value_and_grad_fn, predict_fn=None, late=None, monkeypatch=None):
    """Train w = 0 by the gradient -1 on 4 steps of 2 rows; the predictions of step s are s x."""
    if late is not None:
        monkeypatch.setitem(snapshots.LATE_READERS, "reads_late", late)
        monkeypatch.setitem(sys.modules, "reads_late", types.ModuleType("reads_late"))
    with mpidist.MirroredStrategy().scope():
        w = mpidist.Variable(numpy.zeros((), "f4"), name="w")
    trainer = mpidist.Trainer(value_and_grad_fn, w, mpidist.optimizers.SGD(1.0), metrics=["mse"], predict_fn=predict_fn)
    history = trainer.fit(X, numpy.zeros(8, "f4"), batch_size=2, shuffle=False, verbose=0).history
    return history["loss"], history["mse"], float(w.value), trainer


def _values(step):
    return (step * X[2 * step : 2 * step + 2]) ** 2


EXPECTED_MSE = float(numpy.mean([_values(step) for step in range(4)]))  # of the parameters before each update


def later_aux(w, x, y):
    return (Later(lambda: w), Later(lambda: w * x, x.shape)), Later(lambda: -numpy.ones_like(w))


def later_plain(w, x, y):
    return Later(lambda: w), Later(lambda: -numpy.ones_like(w))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("late", [None, False, True], ids=["not known", "snapshots", "copies"])
@pytest.mark.parametrize("has_predict_fn", [False, True])
def test_what_is_computed_later_is_computed_before_the_update(size, late, has_predict_fn, monkeypatch):
    """Of arrays that alias the parameters."""
    functions = (later_plain, lambda w, x: Later(lambda: w * x, x.shape)) if has_predict_fn else (later_aux,)
    for loss, mse, w, _ in run_ranks(size, trained, *functions, *[None] * (2 - len(functions)), late, monkeypatch):
        assert (loss, mse, w) == ([1.5], [EXPECTED_MSE], 4.0)


@pytest.mark.parametrize("size", [1, 2])
def test_tensors_that_need_a_gradient(size):
    def function(w, x, y):
        return (Tensor(w), Tensor(w * x)), Tensor(-numpy.ones_like(w))

    def fn():
        loss, mse, w, trainer = trained(function, lambda w, x: Tensor(w * x))
        return loss, mse, w, trainer.predict(X).tolist(), trainer.evaluate(X, numpy.zeros(8, "f4"), 8)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for found in run_ranks(size, fn):
            assert found == ([1.5], [EXPECTED_MSE], 4.0, (4 * X).tolist(), [4.0, float(numpy.mean((4 * X) ** 2))])


def test_tensors_wherever_arrays_are_taken():
    def fn():
        strategy = mpidist.MirroredStrategy()
        one = Tensor(numpy.ones(2, "f4"))
        with strategy.scope():
            v, optimizer = mpidist.Variable(one), mpidist.optimizers.SGD(1.0)
            metric = mpidist.metrics.Mean("m")
        v.assign_add(one)
        v.scatter_add(mpidist.IndexedSlices(Tensor(numpy.ones(1, "f4")), numpy.array([0])))
        strategy.run(lambda: optimizer.apply_gradients([(one, v)]))
        metric.update_state(one)
        context_sum = strategy.run(lambda: mpidist.get_replica_context().all_reduce("SUM", one))
        batches = [batch.tolist() for batch in strategy.experimental_distribute_dataset([one, one])]
        found = v.value.tolist(), metric.result(), strategy.reduce("SUM", one, axis=None).tolist()
        return *found, strategy.gather(one, axis=0).tolist(), context_sum.tolist(), batches

    expected = [1.0, 0.0], 1.0, [2.0, 2.0], [1.0] * 4, [2.0, 2.0], [[1.0], [1.0]]
    assert run_ranks(2, fn) == [expected, expected]


def test_nested_predictions_are_arrays_too():
    class Spy(mpidist.metrics.Metric):
        def __init__(self):
            super().__init__("spy")
            self.add_sums("count")

        def update_state(self, y_true, y_pred, sample_weight=None):
            assert type(y_pred["a"]) is numpy.ndarray and y_pred["b"] == [1.0, None]
            self.sums["count"] += 1

        def compute(self, sums):
            return float(sums["count"])

    def function(w, x, y):
        return (Later(lambda: w), {"a": Later(lambda: w * x, x.shape), "b": [1.0, None]}), -numpy.ones_like(w)

    w = mpidist.Variable(numpy.zeros((), "f4"))
    trainer = mpidist.Trainer(function, w, mpidist.optimizers.SGD(1.0), metrics=[Spy()])
    assert trainer.fit(X, X, batch_size=4, verbose=0).history["spy"] == [2.0]


def test_the_trainer_hands_out_what_value_is(monkeypatch):
    monkeypatch.setitem(snapshots.LATE_READERS, "reads_late", False)
    monkeypatch.setitem(sys.modules, "reads_late", types.ModuleType("reads_late"))
    w, seen = mpidist.Variable(numpy.zeros((), "f4")), []

    def function(value, x):
        seen.append((value, value is w.value))
        return 0.0, -numpy.ones_like(value)

    trainer = mpidist.Trainer(function, w, mpidist.optimizers.SGD(1.0))
    trainer.fit(X, batch_size=2, validation_data=X, verbose=0)
    assert [(float(value), same) for value, same in seen] == [(n, True) for n in (0, 1, 2, 3, 4, 4, 4, 4)]


def test_what_a_function_writes_to_its_copies_is_an_error(monkeypatch):
    monkeypatch.setitem(snapshots.LATE_READERS, "writes_late", True)
    monkeypatch.setitem(sys.modules, "writes_late", types.ModuleType("writes_late"))
    w, mean = mpidist.Variable(numpy.zeros(3)), mpidist.Variable(numpy.full(2, numpy.nan), name="mean", trainable=False)

    def function(parameters, x, writes=True):
        assert all(each.flags.writeable for each in parameters)
        if writes:
            parameters[1][:] = 1  # as PyTorch's batch normalization does
        return 0.0, [numpy.ones(3), None]

    trainer = mpidist.Trainer(lambda *args: function(*args, writes=False), [w, mean], mpidist.optimizers.SGD(1.0))
    trainer.fit(X, batch_size=8, verbose=0)
    trainer = mpidist.Trainer(function, [w, mean], mpidist.optimizers.SGD(1.0))
    with pytest.raises(ValueError, match="rank 0 of 1: value_and_grad_fn wrote to its copy .* 'mean', .* `assign`"):
        trainer.fit(X, batch_size=8, verbose=0)
    assert w.value.tolist() == [-1.0] * 3 and numpy.isnan(mean.value).all()


def test_a_variable_that_is_assigned_in_the_function_is_no_error(monkeypatch):
    monkeypatch.setitem(snapshots.LATE_READERS, "writes_late", True)
    monkeypatch.setitem(sys.modules, "writes_late", types.ModuleType("writes_late"))
    w, mean = mpidist.Variable(0.0), mpidist.Variable(0.0, name="mean", trainable=False)

    def function(parameters, x):
        mean.assign(float(x.mean()))
        return 0.0, [numpy.float32(1), None]

    mpidist.Trainer(function, [w, mean], mpidist.optimizers.SGD(1.0)).fit(X, batch_size=8, verbose=0)
    assert float(mean.value) == 4.5


def test_a_known_array_is_not_foreign():
    assert not any(map(arrays.is_foreign, (numpy.zeros(2), 1.0, None, [numpy.zeros(2)])))
    assert all(map(arrays.is_foreign, (Tensor(1.0), Later(lambda: 1), mpidist.Variable(1.0))))
