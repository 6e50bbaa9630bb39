"""`ReplicaContext.all_reduce_init`: bound once, called or started every step, past nobody's own reduction."""

from __future__ import annotations

import numpy
import pytest

import mpidist
from mpidist import nest
from mpidist.cross_device_ops import AllReduceCrossDeviceOps
from mpidist.errors import CollectiveMismatchError
from mpidist.testing import run_ranks
from mpidist.variables import IndexedSlices


def _in_replica(fn, strategy=None):
    strategy = strategy or mpidist.MultiWorkerMirroredStrategy()
    return strategy.run(lambda: fn(mpidist.get_replica_context()))


VALUES = {
    "array": lambda value: numpy.full((2, 3), value, "f4"),
    "number": lambda value: numpy.float64(value),
    "list": lambda value: [numpy.full(4, value, "f4"), numpy.full((), value, "f8")],
    "nest": lambda value: {"b": (numpy.full(2, value), [numpy.full(1, 2 * value)]), "a": numpy.full(3, value, "f2")},
    "long": lambda value: [numpy.full((700, 900), value, "f4"), numpy.full(3, value, "f4")],
    "nothing": lambda value: [],
}


def _flat(value):
    return [(each.dtype.name, each.tolist()) for each in nest.flatten(value)]


@pytest.mark.parametrize("op", ["sum", "MEAN"])
@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("size", [1, 3])
def test_it_gives_the_sum_or_the_mean_of_all_replicas_in_the_structure_of_the_value(kind, op, size):
    make = VALUES[kind]
    total = size * (size + 1) / 2 / (size if op == "MEAN" else 1)

    def on_rank():
        def step(context):
            bound = context.all_reduce_init(op, make(0.0))
            value = make(context.replica_id_in_sync_group + 1.0)
            called, waited = bound(value), bound.start(value).wait()
            assert type(called) is type(waited) and _flat(called) == _flat(waited)
            return _flat(called)

        return _in_replica(step)

    expected = [(each.dtype.name, each.tolist()) for each in nest.flatten(make(total))]
    assert run_ranks(size, on_rank) == [expected] * size


def test_results_are_the_callers_and_do_not_change_later():
    def on_rank():
        def step(context):
            bound = context.all_reduce_init("sum", [numpy.zeros(5), numpy.zeros(70_000)])
            kept = [bound([numpy.full(5, float(k)), numpy.full(70_000, float(k))]) for k in range(6)]
            return [(set(a.tolist()), set(b.tolist())) for a, b in kept]

        return _in_replica(step)

    assert run_ranks(2, on_rank) == [[({2.0 * k}, {2.0 * k}) for k in range(6)]] * 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([numpy.zeros(3), numpy.zeros(5)], r"bound to float64\[4\] as array 1, got float64\[5\]"),
        ([numpy.zeros(3), numpy.zeros(4, "f4")], r"bound to float64\[4\] as array 1, got float32\[4\]"),
        ([numpy.zeros(3)], r"bound to 2 arrays as \[0, 1\], got \[0\]"),
        ({"a": numpy.zeros(3), "b": numpy.zeros(4)}, r"bound to 2 arrays as \[0, 1\], got \{'a': 0, 'b': 1\}"),
    ],
)
@pytest.mark.parametrize("starts", [False, True])
def test_other_values_are_refused_before_any_communication(value, text, starts):
    def on_rank():
        def step(context):
            bound = context.all_reduce_init("sum", [numpy.zeros(3), numpy.zeros(4)])
            with pytest.raises(ValueError, match=text):
                bound.start(value) if starts else bound(value)
            return bound([numpy.ones(3), numpy.ones(4)])[1].tolist()

        return _in_replica(step)

    assert run_ranks(2, on_rank) == [[2.0] * 4] * 2


def test_rows_cannot_be_bound():
    def on_rank():
        with pytest.raises(TypeError, match="IndexedSlices"):
            _in_replica(lambda context: context.all_reduce_init("sum", IndexedSlices(numpy.ones((1, 2)), [0], (3, 2))))

    run_ranks(2, on_rank)


def test_outside_of_a_replica_nothing_is_bound():
    def on_rank():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        context = strategy.run(mpidist.get_replica_context)
        with strategy.scope(), pytest.raises(RuntimeError):
            context.all_reduce_init("sum", numpy.zeros(3))

    run_ranks(2, on_rank)


def test_replicas_that_bind_other_shapes_are_named_at_the_first_call():
    def on_rank():
        def step(context):
            bound = context.all_reduce_init("sum", numpy.zeros(3 + context.replica_id_in_sync_group))
            with pytest.raises(CollectiveMismatchError, match=r"\(4,\)"):
                bound(numpy.zeros(3 + context.replica_id_in_sync_group))

        _in_replica(step)

    run_ranks(2, on_rank)


class Doubling(AllReduceCrossDeviceOps):
    """A user's own way."""

    def batch_reduce_implementation(self, reduce_op, pairs, options):
        return [2 * each for each in super().batch_reduce_implementation(reduce_op, pairs, options)]

    def reduce_implementation(self, reduce_op, value, destinations, options):
        return 2 * super().reduce_implementation(reduce_op, value, destinations, options)


def test_a_users_own_reduction_is_never_gone_round():
    def on_rank():
        def step(context):
            one, two = numpy.ones(2), [numpy.ones(1), numpy.ones(3)]
            return [
                context.all_reduce_init("sum", one)(one).tolist(),
                [each.tolist() for each in context.all_reduce_init("sum", two).start(two).wait()],
            ]

        return _in_replica(step, mpidist.MirroredStrategy(cross_device_ops=Doubling()))

    assert run_ranks(2, on_rank) == [[[4.0] * 2, [[4.0], [4.0] * 3]]] * 2
