"""Arrays in device memory: every collective works on them, and nothing copies them to the host unasked."""

import numpy
import pytest

from mpidist.arrays import as_host
from mpidist.collectives.engine import Engine
from mpidist.errors import UnsupportedDtypeError
from mpidist.testing import run_ranks
from mpidist.testing.device import DeviceArray, on_device, pretended_device
from mpidist.world import world_communicator

BOTH = frozenset({"host", "device"})


@pytest.fixture(autouse=True)
def device():
    with pretended_device():
        yield


def _on_ranks(size, step):
    return run_ranks(size, step, memory=BOTH)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("op", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", ["f4", "f2", "i4"])
def test_fused_lists_stay_on_the_device(size, op, dtype):
    expected = {"sum": size * (size + 1) / 2, "mean": (size + 1) / 2, "max": size}[op]

    def step():
        communicator = world_communicator()
        tensors = [on_device(numpy.full(shape, communicator.rank + 1, dtype)) for shape in [(2, 3), (4,), (1,)]]
        return Engine(communicator)(tensors, op)

    for results in _on_ranks(size, step):
        for result, shape in zip(results, [(2, 3), (4,), (1,)], strict=True):
            assert isinstance(result, DeviceArray)
            assert result.dtype == (numpy.float64 if (op, dtype) == ("mean", "i4") else numpy.dtype(dtype))
            numpy.testing.assert_array_equal(as_host(result), numpy.full(shape, expected))


def test_a_bound_list_takes_device_arrays_however_they_lie():
    def step():
        communicator = world_communicator()
        values = numpy.arange(20000.0).reshape(100, 200)
        bound = Engine(communicator).bind([on_device(values.T.copy())])
        (result,) = bound([on_device(values).T])
        return isinstance(result, DeviceArray) and (as_host(result) == 2 * values.T).all()

    assert _on_ranks(2, step) == [True, True]


def test_every_collective_of_the_communicator():
    def step():
        communicator = world_communicator()
        summed, shared = on_device(numpy.full(5, communicator.rank + 1.0)), on_device(numpy.full(2, communicator.rank))
        communicator.all_reduce(summed)
        communicator.broadcast(shared, root=1)
        joined = communicator.all_gather(on_device(numpy.full((communicator.rank, 2), communicator.rank)))
        share = communicator.reduce_scatter(on_device(numpy.arange(4.0)))
        return [as_host(array).tolist() for array in (summed, shared, joined, share)]

    assert _on_ranks(2, step) == [
        [[3.0] * 5, [1, 1], [[1, 1]], [0.0, 2.0]],
        [[3.0] * 5, [1, 1], [[1, 1]], [4.0, 6.0]],
    ]


def test_host_and_device_arrays_of_one_shape_do_not_share_a_plan():
    def step():
        fused = Engine(world_communicator())
        host, device = numpy.ones(3), on_device(numpy.ones(3))
        return [type(fused([array])[0]) for array in (host, device, host, device)]

    assert _on_ranks(2, step) == [[numpy.ndarray, DeviceArray] * 2] * 2


def test_a_list_of_both_kinds_is_refused_before_any_communication():
    def step():
        communicator = world_communicator()
        with pytest.raises(
            UnsupportedDtypeError, match=r"one kind of arrays, got numpy \(tensor 0\), pretended \(tensor 1\)"
        ):
            Engine(communicator)([numpy.ones(3), on_device(numpy.ones(3))])
        return communicator.control.call

    assert _on_ranks(2, step) == [0, 0]
