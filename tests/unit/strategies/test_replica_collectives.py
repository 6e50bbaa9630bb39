"""The collectives of a replica context and of a strategy, and those at top level: closed forms on loopback ranks."""

from __future__ import annotations

import numpy
import pytest

import mpidist
from mpidist.cross_device_ops import AllReduceCrossDeviceOps
from mpidist.errors import CollectiveMismatchError, UnsupportedDtypeError
from mpidist.testing import run_ranks

STRATEGIES = [mpidist.MultiWorkerMirroredStrategy, mpidist.MirroredStrategy, mpidist.CentralStorageStrategy]


def _in_replica(fn, strategy=None):
    strategy = strategy or mpidist.MultiWorkerMirroredStrategy()
    return strategy.run(lambda: fn(mpidist.get_replica_context()))


def _on_replicas(size, fn, make=mpidist.MultiWorkerMirroredStrategy):
    return run_ranks(size, lambda: _in_replica(fn, make()))


def _lists(value):
    """Return arrays and numbers of a structure as Python has them."""
    if isinstance(value, dict):
        return {key: _lists(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_lists(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value


@pytest.mark.parametrize("size", [1, 3])
def test_broadcast_of_a_structure_from_a_root(size):
    root = size - 1

    def step(context):
        rank = context.replica_id_in_sync_group
        value = {"a": numpy.full((2, 2), rank), "b": [float(rank), numpy.full(700, rank, "f4")]}
        bound = context.broadcast_init(value, root)
        found = context.broadcast(value, root)
        assert type(found["b"][0]) is numpy.float64
        assert _lists(bound(value)) == _lists(bound.start(value).wait()) == _lists(found)
        return _lists(found)

    assert _on_replicas(size, step) == [{"a": [[root] * 2] * 2, "b": [float(root), [root] * 700]}] * size


@pytest.mark.parametrize("make", STRATEGIES)
def test_every_strategy_has_them(make):
    def step(context):
        rank, size = context.replica_id_in_sync_group, context.num_replicas_in_sync
        context.barrier()
        shared = context.broadcast(numpy.full(2, rank), 1)
        rows = context.reduce_scatter("PRODUCT", numpy.arange(1, 5) * (rank + 1))
        joined = context.gather(numpy.full(rank + 1, rank), root=1)
        traded, splits = context.all_to_all(numpy.arange(3) + 10 * rank, [2, 1] if rank else [1, 2])
        if rank:
            context.send(numpy.arange(2.0), 0)
            got = None
        else:
            got = context.receive(1, numpy.zeros(2)).tolist()
        assert size == 2
        return _lists([shared, rows, joined, traded, splits, got])

    expected = [
        [[1, 1], [2, 8], None, [0, 10, 11], [1, 2], [0.0, 1.0]],
        [[1, 1], [18, 32], [0, 1, 1], [1, 2, 12], [2, 1], None],
    ]
    assert _on_replicas(2, step, make) == expected


def test_bound_ones_are_called_and_started():
    def step(context):
        rank, size = context.replica_id_in_sync_group, context.num_replicas_in_sync
        gather = context.all_gather_init({"a": numpy.zeros((1, 2))}, axis=0)
        scatter = context.reduce_scatter_init("MAX", numpy.zeros(size))
        root = context.gather_init(numpy.zeros(1), root=2)
        trade = context.all_to_all_init(numpy.zeros(size))
        send, receive = (
            context.send_init(numpy.zeros(1), (rank + 1) % 3),
            context.receive_init(numpy.zeros(1), (rank + 2) % 3),
        )
        sending = send.start(numpy.array([float(rank)]))
        started = [
            gather.start({"a": numpy.full((rank, 2), rank, "f8")}),
            scatter.start(numpy.arange(3.0) * rank),
            root.start(numpy.array([float(rank)])),
            trade.start(numpy.full(3, float(rank))),
        ]
        got = receive().tolist()
        sending.wait()
        return _lists([handle.wait() for handle in started]), got

    found = _on_replicas(3, step)
    for rank, (results, got) in enumerate(found):
        assert results[0] == {"a": [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]}
        assert results[1] == [2.0 * rank]
        assert results[2] == ([0.0, 1.0, 2.0] if rank == 2 else None)
        assert results[3] == [[0.0, 1.0, 2.0], [1, 1, 1]]
        assert got == [float((rank + 2) % 3)]


def test_a_bound_one_refuses_another_structure():
    def step(context):
        bound = context.broadcast_init({"a": numpy.zeros(2)})
        for call in (bound, bound.start):
            with pytest.raises(ValueError, match=r"bound to arrays as \{'a': 0\}, got \{'b': 0\}"):
                call({"b": numpy.zeros(2)})
            with pytest.raises(ValueError, match=r"bound to float64\[2\] \(ndarray\), got float64\[3\]"):
                call({"a": numpy.zeros(3)})

    _on_replicas(2, step)


def test_across_replicas_there_are_broadcast_and_barrier():
    def on_rank():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        rank = strategy.extended.replica_id
        context = strategy.run(mpidist.get_replica_context)
        strategy.barrier()
        found = strategy.broadcast({"a": numpy.full(2, rank), "b": rank}, root=1)
        with strategy.scope(), pytest.raises(RuntimeError):
            context.broadcast(numpy.zeros(2))

        def inside():
            for call in (strategy.barrier, lambda: strategy.broadcast(numpy.zeros(2))):
                with pytest.raises(RuntimeError):
                    call()

        strategy.run(inside)
        return _lists(found)

    assert run_ranks(2, on_rank) == [{"a": [1, 1], "b": 1}] * 2


@pytest.mark.parametrize(
    ("op", "expected"), [("SUM", 6.0), ("mean", 2.0), ("MIN", 1.0), ("max", 3.0), ("product", 6.0)]
)
def test_every_operation_of_all_reduce_and_of_reduce(op, expected):
    def on_rank():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        value = strategy.extended.replica_id + 1.0

        def step():
            context = mpidist.get_replica_context()
            bound = context.all_reduce_init(op, [numpy.zeros(2), numpy.zeros(())])
            return [
                context.all_reduce(op, numpy.full(2, value)),
                *context.all_reduce(op, [numpy.full(2, value, "f4"), numpy.full(700, value)]),
                *bound([numpy.full(2, value), numpy.full((), value)]),
            ]

        results = [*strategy.run(step), strategy.reduce(op, value, axis=None)]
        return {number for each in results for number in numpy.atleast_1d(each).tolist()}

    assert run_ranks(3, on_rank) == [{expected}] * 3


def test_what_has_no_meaning_with_other_operations_is_refused():
    def on_rank():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        rows = mpidist.IndexedSlices(numpy.ones((1, 2)), [0], (3, 2))
        with pytest.raises(ValueError, match="reduce over an axis is for SUM and MEAN, got MAX"):
            strategy.reduce("MAX", numpy.ones(3), axis=0)
        with pytest.raises(ValueError, match="IndexedSlices have sums and means, got MIN"):
            _in_replica(lambda context: context.all_reduce("MIN", rows), strategy)
        with pytest.raises(UnsupportedDtypeError):
            _in_replica(lambda context: context.all_reduce("MAX", numpy.ones(2, "c8")), strategy)

    on_rank()


@pytest.mark.parametrize(
    "axes_of",
    [lambda: (0, -1), lambda: [numpy.int64(1), 0], lambda: {0, 1}, lambda: iter((0, 1)), lambda: numpy.arange(2)],
    ids=["tuple", "list", "set", "iterator", "array"],
)
def test_axes_may_be_in_any_collection(axes_of):
    def step():
        return mpidist.MultiWorkerMirroredStrategy().reduce("sum", numpy.arange(6.0).reshape(2, 3), axis=axes_of())

    assert run_ranks(2, step) == [2 * sum(range(6))] * 2


# -- factors and None -------------------------------------------------------------------------------------------------


class Doubling(AllReduceCrossDeviceOps):
    """A user's own way."""

    def batch_reduce_implementation(self, reduce_op, pairs, options):
        return [2 * each for each in super().batch_reduce_implementation(reduce_op, pairs, options)]

    def reduce_implementation(self, reduce_op, value, destinations, options):
        return 2 * super().reduce_implementation(reduce_op, value, destinations, options)


@pytest.mark.parametrize("ops", [None, Doubling], ids=["bound", "a user's own"])
@pytest.mark.parametrize("size", [1, 2])
def test_factors_and_none_as_zeros(size, ops):
    factor = 1 if ops is None else 2

    def step(context):
        rank = context.replica_id_in_sync_group
        like = {"a": numpy.zeros(2, "f4"), "b": [numpy.zeros((), "f8"), numpy.zeros(700, "f4")]}
        bound = context.all_reduce_init("SUM", like, prescale=0.5, postscale=4.0, none_as_zeros=True)
        last = rank == context.num_replicas_in_sync - 1
        value = {"a": numpy.full(2, 3.0, "f4") if last else None, "b": [None, numpy.ones(700, "f4")]}
        with pytest.raises(ValueError, match=r"bound to float32\[2\] as array 0, got float32\[3\]"):
            bound({**value, "a": numpy.zeros(3, "f4")})
        called, waited = bound(value), bound.start(value).wait()
        assert _lists(called) == _lists(waited) and called["a"].dtype == numpy.float32
        return _lists(called)

    expected = {"a": [6.0 * factor] * 2, "b": [None, [2.0 * size * factor] * 700]}
    make = lambda: mpidist.MirroredStrategy(cross_device_ops=ops and ops())  # noqa: E731
    assert _on_replicas(size, step, make) == [expected] * size


def test_without_asking_none_is_refused():
    def step(context):
        bound = context.all_reduce_init("SUM", [numpy.zeros(2)])
        with pytest.raises(TypeError, match="got None in place of an array"):
            bound([None])

    _on_replicas(2, step)


# -- at top level -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_collectives_without_a_strategy(size):
    total = size * (size + 1) / 2

    def on_rank():
        from mpidist.world import world_communicator

        rank = world_communicator().rank
        value = rank + 1.0
        assert mpidist.all_reduce(value) == total and mpidist.all_reduce(value, "MAX") == size
        found = mpidist.all_reduce({"a": numpy.full(2, value), "b": value}, mpidist.ReduceOp.MEAN, postscale=2.0)
        assert found["a"].tolist() == [2 * total / size] * 2 and found["b"] == 2 * total / size
        assert type(found["b"]) is numpy.float64
        lacking = [numpy.full(2, value) if rank == 0 else None, None]
        assert _lists(mpidist.all_reduce(lacking, none_as_zeros=True)) == [[1.0, 1.0], None]
        assert mpidist.all_gather([rank] * (rank + 1)).tolist() == [
            each for each in range(size) for _ in range(each + 1)
        ]
        assert _lists(mpidist.gather([rank], size - 1)) == (list(range(size)) if rank == size - 1 else None)
        assert mpidist.reduce_scatter(numpy.arange(2.0 * size), "sum").tolist() == [
            size * 2.0 * rank,
            size * (2.0 * rank + 1),
        ]
        assert _lists(mpidist.broadcast({"a": [rank], "b": rank}, size - 1)) == {"a": [size - 1], "b": size - 1}
        rows, splits = mpidist.all_to_all(numpy.full(size, rank))
        assert rows.tolist() == list(range(size)) and splits == [1] * size
        if size == 2:
            mpidist.send(numpy.ones(3), 1) if rank == 0 else None
            assert rank == 0 or mpidist.receive(0).tolist() == [1.0] * 3
        with pytest.raises(TypeError, match="got None in place of an array"):
            mpidist.all_reduce([None])
        with pytest.raises(ValueError, match="is not a valid ReduceOp"):
            mpidist.all_reduce(1.0, "least")
        return True

    assert run_ranks(size, on_rank) == [True] * size


def test_lists_of_other_lengths_are_a_mismatch_also_with_none_in_them():
    def on_rank():
        from mpidist.world import world_communicator

        with pytest.raises(CollectiveMismatchError, match=r"lists of \[1, 2\] arrays, by rank"):
            mpidist.all_reduce([None] * (1 + world_communicator().rank), none_as_zeros=True)
        return float(mpidist.all_reduce(1.0))

    assert run_ranks(2, on_rank) == [2.0, 2.0]


# -- bound at top level, and by a strategy ----------------------------------------------------------------------------


def test_bound_ones_at_top_level():
    """Each twice: called, and started together with the others."""

    def main():
        rank = mpidist.rank()
        cases = [
            (
                mpidist.all_reduce_init({"a": numpy.zeros(2), "b": 0.0}, "max"),
                {"a": numpy.full(2, float(rank)), "b": -1.0 * rank},
            ),
            (mpidist.all_gather_init(numpy.zeros(1)), numpy.full(rank, float(rank))),
            (mpidist.gather_init([numpy.zeros((1, 1))], root=1, axis=1), [numpy.full((1, 1), float(rank))]),
            (mpidist.reduce_scatter_init(numpy.zeros(3), "mean"), numpy.arange(3.0) * rank),
            (mpidist.broadcast_init((numpy.zeros(1), 0.0), root=2), (numpy.full(1, float(rank)), 0.5 * rank)),
        ]
        called = [_lists(bound(value)) for bound, value in cases]
        started = [bound.start(value) for bound, value in cases]
        assert [_lists(each.wait()) for each in started] == called
        sending = mpidist.send_init(numpy.zeros(1), (rank + 1) % 3).start(numpy.full(1, float(rank)))
        got = mpidist.receive_init(numpy.zeros(1), (rank + 2) % 3)().tolist()
        sending.wait()
        return called, got

    for rank, (called, got) in enumerate(run_ranks(3, main)):
        assert called[0] == {"a": [2.0, 2.0], "b": 0.0}
        assert called[1] == [1.0, 2.0, 2.0]
        assert called[2] == ([[[0.0, 1.0, 2.0]]] if rank == 1 else [None])
        assert called[3] == [float(rank)]
        assert called[4] == [[2.0], 1.0]
        assert got == [float((rank + 2) % 3)]


def test_a_bound_all_reduce_at_top_level_takes_what_the_unbound_one_takes():
    def main():
        rank = mpidist.rank()
        bound = mpidist.all_reduce_init(
            [numpy.zeros(1), numpy.zeros(1)], prescale=2.0, postscale=0.5, none_as_zeros=True
        )
        found = bound([numpy.full(1, rank + 1.0), None])
        with pytest.raises(ValueError, match=r"bound to float64\[1\] as array 0, got float64\[2\]"):
            bound([numpy.zeros(2), numpy.zeros(1)])
        with pytest.raises(TypeError, match="None in place of an array"):
            mpidist.all_reduce_init(None)
        assert mpidist.all_reduce_init({})({}) == {}
        return _lists(found)

    assert run_ranks(2, main) == [[[3.0], None]] * 2


@pytest.mark.parametrize("make", STRATEGIES)
def test_bound_ones_of_a_strategy_are_for_code_outside_of_run(make):
    def main():
        strategy = make()
        rank = strategy.extended.replica_id
        total = strategy.all_reduce_init("SUM", [numpy.zeros(2)])
        found = [
            total([numpy.full(2, rank + 1.0)]),
            strategy.all_gather_init(numpy.zeros(1), axis=0).start(numpy.full(1, float(rank))).wait(),
            strategy.broadcast_init({"a": numpy.zeros(1)}, root=1)({"a": numpy.full(1, float(rank))}),
            strategy.reduce_scatter_init("MAX", numpy.zeros(2))(numpy.arange(2.0) * rank),
        ]
        for name, given in (("all_reduce_init", ("SUM", numpy.zeros(1))), ("broadcast_init", (numpy.zeros(1),))):
            with pytest.raises(RuntimeError, match="cross-replica context"):
                strategy.run(getattr(strategy, name), args=given)
        return _lists(found)

    assert run_ranks(2, main) == [[[[3.0, 3.0]], [0.0, 1.0], {"a": [1.0]}, [float(rank)]] for rank in range(2)]


@pytest.mark.parametrize("of", ["top level", "strategy", "replica"])
def test_an_all_to_all_that_is_bound_to_splits(of):
    """Rank r gives one row to rank 0 and two to rank 1; a call with splits of its own gives all to rank 0."""

    def main():
        strategy = mpidist.MultiWorkerMirroredStrategy()

        def trade():
            where = {"top level": mpidist, "strategy": strategy, "replica": mpidist.get_replica_context()}[of]
            bound = where.all_to_all_init(numpy.zeros(3), [1, 2])
            rows = numpy.arange(3.0) + 10 * mpidist.rank()
            results = [bound(rows), bound.start(rows).wait(), bound((rows, [3, 0]))]
            with pytest.raises(ValueError, match=r"splits of 3 rows, \[1, 2\], for an array of 4 rows"):
                bound(numpy.zeros(4))
            with pytest.raises(ValueError, match="on 2 ranks got 3 splits"):
                where.all_to_all_init(numpy.zeros(3), [1, 1, 1])
            return _lists(results)

        return strategy.run(trade) if of == "replica" else trade()

    first = [[0.0, 10.0], [1, 1]]
    second = [[1.0, 2.0, 11.0, 12.0], [2, 2]]
    everything = [[0.0, 1.0, 2.0, 10.0, 11.0, 12.0], [3, 3]]
    assert run_ranks(2, main) == [[first, first, everything], [second, second, [[], [0, 0]]]]
