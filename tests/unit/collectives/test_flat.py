"""`Engine.flat`: the results of a call, as they lie in the buckets."""

import numpy
import pytest

import mpidist
from mpidist.collectives.engine import Engine
from mpidist.testing import run_ranks


def _tensors(kind, rank):
    if kind == "short":
        return [numpy.full(5, rank + n, "f4") for n in range(70)]
    if kind == "transposed":
        return [numpy.arange(6.0).reshape(2, 3).T + rank, numpy.full(4, 1.0 + rank)]
    if kind == "half":
        return [numpy.full(3, rank + 0.5, "f2"), numpy.full((), rank, "f2")]
    return [numpy.full(3, rank, "f4"), numpy.full((2, 2), rank, "f8"), numpy.full(1, 7 + rank, "f4")]


@pytest.mark.parametrize("kind", ["short", "transposed", "half", "mixed"])
def test_it_is_the_sum_of_the_list_in_its_order(kind):
    def run():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        communicator = strategy.extended.communicator
        fused, tensors = Engine(communicator), _tensors(kind, communicator.rank)
        found = [None] * len(tensors)
        for _ in range(2):  # the second by the way of lists met before
            for packed in fused.flat(tensors, "sum", [str(n) for n in range(len(tensors))]):
                for position, start, stop in zip(packed.tensors, packed.offsets[:-1], packed.offsets[1:], strict=True):
                    found[position] = packed.values[start:stop].tolist(), packed.values.dtype
        return found

    for found in run_ranks(3, run):
        summands = zip(*[_tensors(kind, rank) for rank in range(3)], strict=True)
        expected = [(first + second + third).reshape(-1) for first, second, third in summands]
        assert found == [(each.tolist(), each.dtype) for each in expected]


def test_gradients_in_shared_buffers_are_summed_where_they_are():
    def run():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        with strategy.scope():
            variables = [mpidist.Variable(numpy.zeros(3, "f4")), mpidist.Variable(numpy.zeros((), "f4"))]
        buffers = strategy.extended.gradient_buffers(variables)
        for buffer in buffers:
            buffer[...] = strategy.extended.replica_id + 1
        packed = Engine(strategy.extended.communicator).flat(buffers)
        return [(each.tensors, each.offsets, each.values.tolist()) for each in packed]

    assert run_ranks(2, run) == [[((0,), (0, 3), [3.0] * 3), ((1,), (0, 1), [3.0])]] * 2
