"""Collectives of nested values: ranks compare the keys, and equal dicts may be built in any order."""

from __future__ import annotations

import re
from collections import namedtuple

import numpy
import pytest

import mpidist
from mpidist import compression
from mpidist.cross_device_ops import AllReduceCrossDeviceOps
from mpidist.errors import CollectiveMismatchError
from mpidist.testing import run_ranks

Pair = namedtuple("Pair", ["left", "right"])
Point = namedtuple("Point", ["x", "y"])
ONE, TWO = numpy.ones(2), numpy.full(2, 2.0)

#: What ranks 0 and 1 give: as many arrays of the same shapes under other keys.
OTHERS = {
    "keys": ({"a": ONE}, {"b": ONE}),
    "one of several keys": ({"a": ONE, "b": ONE}, {"a": ONE, "c": ONE}),
    "keys within": ({"a": {"b": ONE}}, {"a": {"c": ONE}}),
    "numbers": ({1: ONE, 2: ONE}, {1: ONE, 3: ONE}),
    "tuples": ({("a", 0): ONE}, {("a", 1): ONE}),
    "fields": (Pair(ONE, ONE), Point(ONE, ONE)),
    "kinds of containers": ({"a": ONE, "b": ONE}, [ONE, ONE]),
    "lengths within": ([[ONE], [ONE, ONE]], [[ONE, ONE], [ONE]]),
    "empty ones": ([[], ONE, ONE], [ONE, [], ONE]),
}
#: What has no array at all on rank 0, where the next call of rank 1 would be taken for it.
NOTHING = {"list": ([], [ONE]), "dict": ({}, {"a": ONE}), "lists within": ([[], []], [[], [ONE]])}


def _context():
    return mpidist.get_replica_context()


def _strategy(make=mpidist.MultiWorkerMirroredStrategy, **given):
    strategy = make(**given)
    return lambda fn, value: strategy.run(fn, (value,))


def _own_way(number):
    """Return a strategy that reduces each array in a call of its own."""
    return _strategy(mpidist.MirroredStrategy, cross_device_ops=AllReduceCrossDeviceOps(num_packs=number))


#: Collectives by name.
TOP_LEVEL = {
    "all_reduce": mpidist.all_reduce,
    "all_reduce with a factor": lambda value: mpidist.all_reduce(value, prescale=2.0),
    "all_reduce of None": lambda value: mpidist.all_reduce(value, none_as_zeros=True),
    "broadcast": mpidist.broadcast,
    "all_reduce_init": lambda value: mpidist.all_reduce_init(value)(value),
    "all_reduce_init of None": lambda value: mpidist.all_reduce_init(value, none_as_zeros=True).start(value).wait(),
    "all_gather_init": lambda value: mpidist.all_gather_init(value)(value),
    "gather_init": lambda value: mpidist.gather_init(value)(value),
    "reduce_scatter_init": lambda value: mpidist.reduce_scatter_init(value)(value),
    "broadcast_init": lambda value: mpidist.broadcast_init(value).start(value).wait(),
}
OF_REPLICAS = {
    "all_reduce": lambda value: _context().all_reduce("sum", value),
    "all_reduce_init": lambda value: _context().all_reduce_init("sum", value)(value),
    "all_reduce_init of None": lambda value: _context().all_reduce_init("sum", value, none_as_zeros=True)(value),
    "broadcast": lambda value: _context().broadcast(value),
    "all_gather": lambda value: _context().all_gather(value, 0),
    "gather": lambda value: _context().gather(value),
    "reduce_scatter": lambda value: _context().reduce_scatter("sum", value),
    "all_gather_init": lambda value: _context().all_gather_init(value, 0)(value),
    "gather_init": lambda value: _context().gather_init(value)(value),
    "reduce_scatter_init": lambda value: _context().reduce_scatter_init("sum", value)(value),
    "broadcast_init": lambda value: _context().broadcast_init(value)(value),
    "compressed": lambda value: compression.all_reduce_init("sum", value, compression.Float16())(value),
}


def _refused_between_right_calls(call, others):
    """Call what is right on both ranks, and between such calls what differs, which both refuse."""
    for both in others:
        call(both)
        with pytest.raises(CollectiveMismatchError, match=r"rank \d of 2: ranks differ"):
            call(others[mpidist.rank()])


@pytest.mark.parametrize("others", OTHERS.values(), ids=list(OTHERS))
@pytest.mark.parametrize("name", TOP_LEVEL)
def test_keys_that_differ_between_ranks(name, others):
    run_ranks(2, lambda: _refused_between_right_calls(TOP_LEVEL[name], others))


@pytest.mark.parametrize("name", OF_REPLICAS)
@pytest.mark.parametrize("others", OTHERS.values(), ids=list(OTHERS))
def test_keys_that_differ_between_replicas(name, others):
    def on_rank():
        run = _strategy()
        _refused_between_right_calls(lambda value: run(OF_REPLICAS[name], value), others)

    run_ranks(2, on_rank)


@pytest.mark.parametrize("others", NOTHING.values(), ids=list(NOTHING))
@pytest.mark.parametrize("collectives", [TOP_LEVEL, OF_REPLICAS], ids=["ranks", "replicas"])
def test_no_array_on_one_of_the_ranks(collectives, others):
    def on_rank(call):
        run = _strategy()
        _refused_between_right_calls(lambda value: run(call, value), others)
        return run(call, others[0])

    for call in collectives.values():
        assert run_ranks(2, on_rank, call) == [others[0]] * 2


@pytest.mark.parametrize("is_of_strategy", [False, True])
@pytest.mark.parametrize("none_as_zeros", [False, True])
def test_a_start_with_no_array_waits_for_nobody(is_of_strategy, none_as_zeros):
    def on_rank():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        bind = (
            mpidist.all_reduce_init
            if not is_of_strategy
            else lambda like, **given: strategy.all_reduce_init("sum", like, **given)
        )
        bound, is_first = bind({}, none_as_zeros=none_as_zeros), mpidist.rank() == 0
        started = bound.start({}) if is_first else None
        if is_first:
            mpidist.send(ONE, 1)
        else:
            mpidist.receive(0, timeout_seconds=10)  # which rank 0 has not sent where its start waits for this one
        return (started or bound.start({})).wait()

    assert run_ranks(2, on_rank) == [{}, {}]


#: Reductions of a strategy's lists by name.
OF_LISTS = {
    "batch_reduce_to": lambda extended, values: extended.batch_reduce_to(
        "sum", [(value, "/cpu:0") for value in values]
    ),
    "reduce_arrays": lambda extended, values: extended.reduce_arrays(mpidist.ReduceOp.SUM, values),
    "batch_reduce": lambda extended, values: extended.cross_device_ops.batch_reduce(
        "sum", [(value, "/cpu:0") for value in values]
    ),
}


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("reduced", OF_LISTS.values(), ids=list(OF_LISTS))
@pytest.mark.parametrize("others", list(NOTHING["list"]))
def test_an_empty_list_on_one_of_the_ranks(others, reduced, number):
    def on_rank():
        ops = AllReduceCrossDeviceOps(num_packs=number)
        extended = mpidist.MirroredStrategy(cross_device_ops=ops).extended
        with pytest.raises(
            CollectiveMismatchError, match=r"rank 1 passed 1 tensor to all_reduce\(sum\), rank 0 passed 0"
        ):
            reduced(extended, NOTHING["list"][mpidist.rank()])
        return [each.tolist() for each in reduced(extended, others)]

    assert run_ranks(2, on_rank) == [[(2 * value).tolist() for value in others]] * 2


@pytest.mark.parametrize("others", [([ONE, ONE], [ONE]), (ONE, (ONE, ONE))])
@pytest.mark.parametrize("collectives", [TOP_LEVEL, OF_REPLICAS], ids=["ranks", "replicas"])
def test_lengths_of_lists_that_differ(collectives, others):
    def on_rank(call):
        run = _strategy()
        with pytest.raises(CollectiveMismatchError, match=r"rank \d of 2: (ranks differ|.* must pass as many)"):
            run(call, others[mpidist.rank()])

    for call in collectives.values():
        run_ranks(2, on_rank, call)


@pytest.mark.parametrize("name", ["all_reduce", "all_reduce_init", "all_reduce_init of None"])
@pytest.mark.parametrize("number", [0, 1])
def test_keys_of_replicas_whose_arrays_are_not_fused(name, number):
    def on_rank():
        run = _own_way(number)
        _refused_between_right_calls(lambda value: run(OF_REPLICAS[name], value), OTHERS["one of several keys"])

    run_ranks(2, on_rank)


def test_keys_of_rows():
    def on_rank():
        run = _strategy()
        rows = mpidist.IndexedSlices(numpy.ones((1, 2)), [mpidist.rank()], (3, 2))
        found = run(OF_REPLICAS["all_reduce"], {"a": ONE, "b": rows})
        assert found["b"].to_dense().tolist() == [[1, 1], [1, 1], [0, 0]] and found["a"].tolist() == [2, 2]
        with pytest.raises(CollectiveMismatchError, match=r"\['b'\]|\['c'\]"):
            run(OF_REPLICAS["all_reduce"], {"a": ONE, "bc"[mpidist.rank()]: rows})

    run_ranks(2, on_rank)


def test_the_message_has_both_keys():
    expected = """rank 1 passed "['b']" float64 (2,), rank 0 passed "['a']" float64 (2,)"""
    with pytest.raises(CollectiveMismatchError, match=re.escape(expected)):
        run_ranks(2, lambda: mpidist.all_reduce({"x": ONE, "ab"[mpidist.rank()]: ONE}))
    expected = "leaf 0: ['b'] on rank 1, ['a'] on rank 0"
    with pytest.raises(CollectiveMismatchError, match=re.escape(expected)):
        run_ranks(2, lambda: mpidist.broadcast({"x": ONE, "ab"[mpidist.rank()]: ONE}))


def test_dicts_that_were_built_in_other_orders_are_equal():
    def on_rank():
        built = [("b", ONE), ("a", TWO), ("c", {2: ONE, 1: TWO})]
        value = dict(built if mpidist.rank() else built[::-1])
        for call in (TOP_LEVEL["all_reduce"], TOP_LEVEL["broadcast"], TOP_LEVEL["all_reduce_init"]):
            found = call(value)
            assert list(found) == list(value)
            times = 1 if call is TOP_LEVEL["broadcast"] else 2
            assert found["a"].tolist() == found["c"][1].tolist() == [2 * times] * 2
            assert found["b"].tolist() == found["c"][2].tolist() == [times] * 2

    run_ranks(2, on_rank)


def test_keys_that_cannot_be_sorted():
    for call in (mpidist.all_reduce, mpidist.broadcast, mpidist.all_reduce_init):
        with pytest.raises(TypeError, match="cannot be sorted: 'a', 1 .*; use keys of one type"):
            call({"a": ONE, 1: ONE})
