"""Gradients in device memory for variables on servers: they are copied to the host on the way."""

from __future__ import annotations

import numpy
import pytest

import mpidist
from mpidist.testing.device import on_device, pretended_device
from tests.unit.parameter_server.jobs import one_worker

GRADIENT = numpy.array([3.0, 4.0])


def trained(steps, **options):
    """Return a vector and a table, zeros at first, after steps by a worker with gradients on the device."""

    def work(strategy):
        with strategy.scope():
            vector, table = (mpidist.Variable(numpy.zeros(shape)) for shape in ((2,), (4, 2)))
            optimizer = mpidist.optimizers.SGD(0.5, **options)
        for step in steps:
            optimizer.apply_gradients(step(vector, table))
        return vector.numpy().tolist(), table.numpy().tolist()

    with pretended_device():
        return one_worker(work)


def dense(vector, table):
    return [(on_device(GRADIENT), vector), (on_device(numpy.ones((4, 2))), table)]


def one(vector, table):
    return [(on_device(GRADIENT), vector)]


@pytest.mark.parametrize("put", [numpy.array, lambda numbers: on_device(numpy.array(numbers))], ids=["host", "device"])
def test_rows(put):
    def step(vector, table):
        values = on_device(numpy.array([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]]))
        return [(on_device(GRADIENT), vector), (mpidist.IndexedSlices(values, put([2, 0, 2]), (4, 2)), table)]

    vector, table = trained([step])
    assert vector == [-1.5, -2]
    assert table == [[-5, -10], [0, 0], [-50.5, -101], [0, 0]]


def test_a_list_and_a_single_one():
    assert trained([dense, one]) == ([-3, -4], [[-0.5, -0.5]] * 4)


def test_clipped():
    vector, _ = trained([one], global_clipnorm=1.0)
    assert vector == pytest.approx([-0.3, -0.4])


def test_the_mean_of_two_micro_batches():
    def less(vector, table):
        return [(on_device(-GRADIENT / 2), vector)]

    vector, _ = trained([one, less], gradient_accumulation_steps=2)
    assert vector == [-0.375, -0.5]
