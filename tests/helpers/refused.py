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
#: What stands for the whole number 0, and right.
ZEROS = {"int64": numpy.int64(0), "uint8": numpy.uint8(0), "array": numpy.array(0)}
#: What stands for no whole number.
NO_NUMBERS = {
    "float": 0.0,
    "float64": numpy.float64(0),
    "nan": float("nan"),
    "truth": False,
    "bool_": numpy.False_,
    "text": "0",
    "nothing": None,
    "list": [0],
    "vector": numpy.array([0]),
}
_ROWS = numpy.arange(6.0).reshape(6, 1)
#: Calls with the number of a rank or of an axis, by their argument.
NUMBERED = {
    "broadcast: root": lambda strategy, number: mpidist.broadcast(_ROWS, number),
    "broadcast_init: root": lambda strategy, number: mpidist.broadcast_init(_ROWS, number)(_ROWS),
    "gather: root": lambda strategy, number: mpidist.gather(_ROWS, number),
    "gather: axis": lambda strategy, number: mpidist.gather(_ROWS, axis=number),
    "gather_init: root": lambda strategy, number: mpidist.gather_init(_ROWS, number)(_ROWS),
    "gather_init: axis": lambda strategy, number: mpidist.gather_init(_ROWS, axis=number)(_ROWS),
    "all_gather: axis": lambda strategy, number: mpidist.all_gather(_ROWS, number),
    "all_gather_init: axis": lambda strategy, number: mpidist.all_gather_init(_ROWS, number)(_ROWS),
    "broadcast_object: root_rank": lambda strategy, number: mpidist.broadcast_object(_ROWS, number),
    "strategy.broadcast: root": lambda strategy, number: strategy.broadcast(_ROWS, number),
    "strategy.all_gather: axis": lambda strategy, number: strategy.gather(_ROWS, number),
    "strategy.reduce: axis": lambda strategy, number: strategy.reduce("sum", _ROWS, axis=(number,)),
}
#: Those that take the number of a peer, on all ranks; 0 is this rank itself on one of them.
OF_PEERS = {
    "send: to": lambda strategy, number: mpidist.send(_ROWS, number),
    "send_init: to": lambda strategy, number: mpidist.send_init(_ROWS, number),
    "receive: source": lambda strategy, number: mpidist.receive(number),
    "receive_init: source": lambda strategy, number: mpidist.receive_init(_ROWS, number),
}


def number_problem(call, number):
    """Return what is wrong with how a call of `NUMBERED` or `OF_PEERS` refuses what is no whole number."""
    argument = call.partition(".")[2] or call
    argument = argument.replace("_init", "")
    return problem(
        {**NUMBERED, **OF_PEERS}[call],
        lambda: number,
        f"{argument} must be a whole number, got {number!r} ({type(number).__name__}); pass an int",
    )


def gradient_buffers(strategy, value):
    """Ask for gradient buffers of an array's dtype and shape, where ranks share memory."""
    GradientBuffers(world_communicator(), [("v", value.dtype, value.shape)])


def problem(call, make, expected=None):
    """Return what is wrong with how this rank's call refuses the array; empty when nothing is.

    `expected` is the message, where it is the same for all calls.
    """
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
    return "" if said == [expected or said[0]] * 2 else f"said {said}, not {expected}"
