"""Arrays that a collective refuses, and the calls that do: every rank raises the same error and goes on in step."""

from __future__ import annotations

import numpy

import mpidist
from mpidist.collectives.engine import Engine
from mpidist.collectives.reductions.gradient_buffers import GradientBuffers
from mpidist.world import world_communicator

#: The dtype of Python's strings, which NumPy has from 2.0 on.
STRINGS = [numpy.dtypes.StringDType()] if numpy.lib.NumpyVersion(numpy.__version__) >= "2.0.0" else []


def masked():
    return numpy.ma.array([1.0, 2.0], mask=[0, 1])


OBJECTS = {
    "objects": lambda: numpy.array([None, "a"], object),
    "records with objects": lambda: numpy.zeros(2, [("a", "f4"), ("b", object)]),
}
if STRINGS:
    OBJECTS["strings"] = lambda: numpy.array(["a", "bc"], STRINGS[0])
NOT_SUMMED = {
    "text": lambda: numpy.array(["a", "bc"]),
    "bytes": lambda: numpy.array([b"a", b"bc"]),
    "times": lambda: numpy.array([1, 2], "M8[s]"),
    "durations": lambda: numpy.array([1, 2], "m8[s]"),
    "records": lambda: numpy.zeros(2, [("a", "f4"), ("b", "i4")]),
    "truth": lambda: numpy.array([True, False]),
}


def _rows(values):
    return mpidist.IndexedSlices(values, numpy.arange(2), (2,))


def _in_replica(name, *args):
    return lambda strategy, value: strategy.run(
        lambda: getattr(mpidist.get_replica_context(), name)(*[value if arg is ... else arg for arg in args])
    )


def _variable(strategy, value):
    with strategy.scope():
        mpidist.Variable(value)


#: Calls that only move values.
MOVES = {
    "gather": lambda strategy, value: strategy.gather(value, 0),
    "all_gather": _in_replica("all_gather", ..., 0),
    "broadcast_to": lambda strategy, value: strategy.extended.broadcast_to(value, "/cpu:0"),
    "variable": _variable,
    "communicator.broadcast": lambda strategy, value: world_communicator().broadcast(value),
    "communicator.all_gather": lambda strategy, value: world_communicator().all_gather(value),
}
#: Calls that reduce them.
SUMS = {
    "reduce": lambda strategy, value: strategy.reduce("sum", value, axis=None),
    "reduce an axis": lambda strategy, value: strategy.reduce("mean", value, axis=0),
    "all_reduce": _in_replica("all_reduce", "sum", ...),
    "all_reduce of rows": lambda strategy, value: _in_replica("all_reduce", "mean", ...)(strategy, _rows(value)),
    "communicator.all_reduce": lambda strategy, value: world_communicator().all_reduce(value),
    "communicator.reduce_scatter": lambda strategy, value: world_communicator().reduce_scatter(value),
    "fused": lambda strategy, value: Engine(world_communicator())([numpy.ones(3), value]),
}


def gradient_buffers(strategy, value):
    """Ask for gradient buffers of an array's dtype and shape, where ranks share memory."""
    GradientBuffers(world_communicator(), [("v", value.dtype, value.shape)])


def problem(call, make):
    """Return what is wrong with how this rank's call refuses the array; empty when nothing is."""
    strategy = mpidist.MultiWorkerMirroredStrategy()
    said = []
    for _ in range(2):
        try:
            call(strategy, make())
            return "not refused"
        except TypeError as error:
            said.append(str(error))
        total = strategy.reduce("sum", numpy.ones(3), axis=None)
        if total.tolist() != [strategy.num_replicas_in_sync] * 3:
            return f"then {total}"
    return "" if said[0] == said[1] else f"said {said}"
