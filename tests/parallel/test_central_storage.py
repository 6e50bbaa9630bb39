"""Central storage under a real mpirun: one copy of the memory, in processes that each have their own."""

from __future__ import annotations

import re
from pathlib import Path

import numpy
import pytest

import mpidist
from mpidist.collectives.reductions import update
from mpidist.optimizers import SGD, Adam
from mpidist.variables import IndexedSlices

pytestmark = pytest.mark.mpi

ELEMENTS = 1 << 20


def mapped(array) -> dict[str, int]:
    """Return what the system counts, in bytes, for the piece of this process's memory in which an array lies."""
    address = array.ctypes.data
    for entry in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        start, stop = (int(end, 16) for end in entry.split(" ", 1)[0].split("-"))
        if start <= address < stop:
            return {name: 1024 * int(kib) for name, kib in re.findall(r"^(\w+): +(\d+) kB$", entry, re.MULTILINE)}
    raise AssertionError(f"no piece of memory has address {address:x}")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("least_bytes", [1, 1 << 40], ids=["applied while summed", "applied when summed"])
def test_variable_and_slots_take_the_memory_of_one_copy(least_bytes, monkeypatch):
    monkeypatch.setattr(update, "LEAST_BYTES", least_bytes)
    strategy = mpidist.CentralStorageStrategy()
    size = strategy.num_replicas_in_sync
    with strategy.scope():
        variable = mpidist.Variable(numpy.zeros(ELEMENTS, "float32"))
        optimizer = Adam(0.5)
    strategy.run(lambda: optimizer.apply_gradients([(numpy.ones(ELEMENTS, "float32"), variable)]))
    for array in (variable.value, *optimizer.slots(variable).values()):
        assert numpy.isfinite(array).all()  # which reads all of it, so that it counts for this process too
        strategy.extended.communicator.barrier()
        part = strategy.reduce("SUM", float(mapped(array)["Pss"]), axis=None)
        assert part == pytest.approx(array.nbytes, rel=0.05), f"{size} ranks"
        strategy.extended.communicator.barrier()
    numpy.testing.assert_allclose(variable.value, -0.5, rtol=1e-5)


def test_steps_one_after_the_other_lose_nothing():
    """Each rank reads at once after each step, and finds the value of this step everywhere."""
    strategy = mpidist.CentralStorageStrategy()
    size = strategy.num_replicas_in_sync
    with strategy.scope():
        variables = [mpidist.Variable(numpy.zeros(length)) for length in (3, 70_000, 1)]
        optimizer = SGD(1.0)

    def step():
        optimizer.apply_gradients([(numpy.ones(variable.shape), variable) for variable in variables])
        return [(variable.value.min(), variable.value.max()) for variable in variables]

    for number in range(1, 101):
        assert strategy.run(step) == [(-number * size, -number * size)] * len(variables)


def test_rows_of_a_table():
    strategy = mpidist.CentralStorageStrategy()
    rank, size = strategy.extended.replica_id, strategy.num_replicas_in_sync
    with strategy.scope():
        table, optimizer = mpidist.Variable(numpy.zeros((50, 2))), SGD(1.0, momentum=0.5)

    def step():
        rows = IndexedSlices(numpy.ones((3, 2)), [rank, 49, 49])
        optimizer.apply_gradients([(rows, table)])

    for _ in range(2):
        strategy.run(step)
    # The velocity is minus the sum of gradients, then half of it and that again.
    expected = numpy.zeros((50, 2))
    expected[:size] -= 2.5
    expected[49] -= 2.5 * 2 * size
    numpy.testing.assert_array_equal(table.value, expected)
