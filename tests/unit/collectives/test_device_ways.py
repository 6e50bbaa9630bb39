"""Arrays in device memory on a transport for the host's: by the device's own collectives, or staged."""

import re
import threading
from dataclasses import asdict

import numpy
import pytest

from mpidist.arrays import as_host, is_device
from mpidist.collectives.engine import Engine
from mpidist.collectives.group import GroupCommunicator
from mpidist.collectives.reductions.adjustment import Adjustment
from mpidist.collectives.reductions.in_place import bind_in_place
from mpidist.collectives.ways import device_ways
from mpidist.device import nccl
from mpidist.device.cards import Card
from mpidist.errors import CollectiveMismatchError, MissingDependencyError, UnsupportedDtypeError
from mpidist.testing import run_ranks
from mpidist.testing.device import DeviceArray, PretendedLink, PretendedMemory, on_device, pretended_device
from mpidist.world import world_communicator

WHY = "the device has none"
SHAPES = [(2, 3), (), (0, 4), (1000,), (7, 1, 5)]


@pytest.fixture(params=["linked", "staged"])
def device(request, monkeypatch):
    monkeypatch.setattr(device_ways, "_PIECE_BYTES", 1 << 10)  # so that short lists have several pieces
    with pretended_device("" if request.param == "linked" else WHY):
        yield request.param


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "prod"])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i4", "u1"])
def test_a_list(device, size, op, dtype):
    expected = {
        "sum": size * (size + 1) / 2,
        "mean": (size + 1) / 2,
        "min": 1,
        "max": size,
        "prod": numpy.prod(numpy.arange(1, size + 1)),
    }[op]

    def step():
        communicator = world_communicator()
        fused = Engine(communicator)
        given = [on_device(numpy.full(shape, communicator.rank + 1, dtype)) for shape in SHAPES]
        first = fused(given, op)
        second = fused(given, op)
        return [*first, *second], [as_host(each) for each in given], communicator.rank

    for results, given, rank in run_ranks(size, step):
        for result, shape in zip(results, [*SHAPES, *SHAPES], strict=True):
            assert isinstance(result, DeviceArray)
            assert result.dtype == (numpy.float64 if op == "mean" and dtype[0] in "iu" else numpy.dtype(dtype))
            numpy.testing.assert_array_equal(as_host(result), numpy.full(shape, expected))
        for each in given:
            numpy.testing.assert_array_equal(each, rank + 1)


def test_the_device_reduces_what_it_can_and_the_host_the_rest():
    def step():
        communicator = world_communicator()
        lists = [numpy.ones(9), numpy.full(5, 1 + 2j)]
        (real,), (whole,) = [Engine(communicator)([on_device(each)]) for each in lists]
        (link,) = communicator.devices.links()
        return link.calls, as_host(real).tolist(), as_host(whole).tolist()

    with pretended_device(""):
        assert run_ranks(2, step) == [(["reduce"], [2.0] * 9, [2 + 4j] * 5)] * 2


@pytest.mark.parametrize("algorithm", ["staged", "ring", "native"])
def test_a_way_of_the_host_that_was_asked_for_stages(algorithm):
    def step():
        communicator = world_communicator()
        (result,) = Engine(communicator, algorithm=algorithm)([on_device(numpy.ones(3))])
        return as_host(result).tolist(), communicator.devices.links()

    if algorithm == "native":  # threads have none
        with pretended_device(""), pytest.raises(ValueError, match="native"):
            run_ranks(2, step)
    else:
        with pretended_device(""):
            assert run_ranks(2, step) == [([2.0] * 3, [])] * 2


def test_nccl_that_cannot_be_used_is_the_same_error_on_all_ranks_and_says_why():
    def step():
        with pytest.raises(MissingDependencyError, match=f"NCCL was asked for, and {WHY}"):
            Engine(world_communicator(), algorithm="nccl")([on_device(numpy.ones(3))])

    with pretended_device(WHY):
        run_ranks(3, step)


@pytest.mark.parametrize("name", ["all_reduce", "none_as_zeros", "in_place", "broadcast"])
def test_what_is_started_comes_behind_the_stream_in_which_it_was_started(device, monkeypatch, name):
    streams, entered = threading.local(), []
    monkeypatch.setattr(PretendedMemory, "enter", lambda memory, tensors: entered.append(streams.current))

    def step():
        communicator, array = world_communicator(), on_device(numpy.ones(3))
        bound, given = {
            "all_reduce": lambda: (communicator.all_reduce_init([array]), [array]),
            "none_as_zeros": lambda: (communicator.all_reduce_init([array] * 2, none_as_zeros=True), [array, None]),
            "in_place": lambda: (bind_in_place(communicator, [("", array.dtype, (3,))], kind=array), [array]),
            "broadcast": lambda: (communicator.broadcast_init(array), array),
        }[name]()
        streams.current = "of the start"
        handle = bound.start(given)
        streams.current = "of the wait"
        handle.wait()

    run_ranks(2, step)
    assert sorted(set(entered)) == ["of the start", "of the wait"]
    assert entered.count("of the start") == 2


def test_the_devices_collectives_end_when_they_are_closed():
    def step():
        communicator = world_communicator()
        Engine(communicator)([on_device(numpy.ones(3))])
        (link,) = communicator.devices.links()
        communicator.devices.close()
        return link.is_closed, communicator.devices.links()

    with pretended_device(""):
        assert run_ranks(2, step) == [(True, [])] * 2


def test_those_of_groups_end_with_the_world_before_its_own():
    closed = {0: [], 1: [], 2: []}

    def step():
        whole, array = world_communicator(), on_device(numpy.ones(3))
        Engine(whole)([array])
        groups = [GroupCommunicator(whole, range(3)), GroupCommunicator(whole, [whole.rank])]
        for group in groups:
            group.all_reduce_here(array)
        for place, ranks in enumerate([whole, *groups]):
            for link in ranks.devices.links():
                link.close = lambda in_order, place=place: closed[whole.rank].append((place, in_order))
        whole.devices.close()

    with pretended_device(""):
        run_ranks(3, step)
    assert closed == dict.fromkeys(range(3), [(1, True), (0, True)])  # a group of one rank has none


@pytest.mark.parametrize("algorithm", ["nccl", "staged"])
def test_arrays_of_the_host_take_the_hosts_ways_whatever_is_asked_for_those_of_devices(algorithm):
    def step():
        (result,) = Engine(world_communicator(), algorithm=algorithm)([numpy.ones(3)])
        return result.tolist()

    assert run_ranks(2, step) == [[2.0] * 3] * 2


def test_ranks_whose_arrays_lie_in_other_memory_are_told(device):
    def step():
        communicator = world_communicator()
        array = numpy.ones(3) if communicator.rank else on_device(numpy.ones(3))
        with pytest.raises(CollectiveMismatchError, match="kinds of arrays must be alike"):
            Engine(communicator)([array])
        (result,) = Engine(communicator)([on_device(numpy.ones(3))])
        return as_host(result).tolist()

    assert run_ranks(2, step) == [[2.0] * 3] * 2


@pytest.mark.parametrize("count", [1, 2, 80])
@pytest.mark.parametrize("options", [{}, {"none_as_zeros": True}, {"prescale": 1.0}], ids=str)
def test_later_lists_of_a_bound_all_reduce_may_lie_in_memory_otherwise(device, count, options):
    def step():
        values = numpy.arange(6.0).reshape(2, 3)
        apart = on_device(numpy.arange(12.0).reshape(2, 6))[:, ::2]
        bound = world_communicator().all_reduce_init([on_device(values)] * count, **options)
        lists = [on_device(values.T).T], [apart], [on_device(values)]
        return [as_host(bound(each * count)[-1]).tolist() for each in lists]

    once = numpy.arange(6.0).reshape(2, 3)
    assert run_ranks(2, step) == [[(2 * each).tolist() for each in (once, 2 * once, once)]] * 2


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_in_place(device, size, op):
    expected = {"sum": size * (size + 1) / 2, "mean": (size + 1) / 2, "max": size}[op]

    def step():
        communicator = world_communicator()
        given = [
            on_device(numpy.full(shape, communicator.rank + 1, dtype)) for shape in SHAPES for dtype in ("f4", "f2")
        ]
        signatures = [("", each.dtype, each.shape) for each in given]
        bound = bind_in_place(communicator, signatures, op, kind=given[0])
        for _ in range(2):
            for each in given:
                each[...] = communicator.rank + 1.0
            bound(given)
        return [as_host(each) for each in given]

    for results in run_ranks(size, step):
        for result in results:
            numpy.testing.assert_array_equal(result, expected)


def test_in_place_refuses_arrays_that_share_memory(device):
    def step():
        array = on_device(numpy.ones(4))
        signature = ("", array.dtype, (2,))
        bind_in_place(world_communicator(), [signature] * 2, kind=array)([array[:2], array[1:3]])

    with pytest.raises(ValueError, match="share memory"):
        run_ranks(2, step)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_collectives_of_one_array(device, size):
    total = size * (size + 1) / 2

    def step():
        communicator = world_communicator()
        rank = communicator.rank
        summed = on_device(numpy.full(300, rank + 1.0))
        shared = on_device(numpy.full(2, rank))
        communicator.all_reduce(summed)
        communicator.broadcast(shared, root=size - 1)
        copied = communicator.broadcast_copy(on_device(numpy.full(3, rank)), root=0)
        joined = communicator.all_gather(on_device(numpy.full((rank, 2), rank)))
        gathered = communicator.gather(on_device(numpy.full((1, rank + 1), rank)), root=0, axis=1)
        share = communicator.reduce_scatter(on_device(numpy.arange(2.0 * size)))
        rows, splits = communicator.all_to_all(on_device(numpy.full((size, 2), rank)))
        kinds = {type(each) for each in (summed, shared, copied, joined, share, rows)}
        assert kinds == {DeviceArray}
        assert (gathered is None) == (rank > 0)
        found = [summed, shared, copied, joined, share, rows, *([gathered] if rank == 0 else [])]
        return [as_host(each) for each in found], splits

    columns = [rank for rank in range(size) for _ in range(rank + 1)]
    for rank, (found, splits) in enumerate(run_ranks(size, step)):
        summed, shared, copied, joined, share, rows, *gathered = found
        numpy.testing.assert_array_equal(summed, numpy.full(300, total))
        numpy.testing.assert_array_equal(shared, [size - 1] * 2)
        numpy.testing.assert_array_equal(copied, [0] * 3)
        numpy.testing.assert_array_equal(joined, [[other] * 2 for other in range(size) for _ in range(other)] or joined)
        numpy.testing.assert_array_equal(share, size * numpy.arange(2.0 * rank, 2.0 * rank + 2))
        numpy.testing.assert_array_equal(rows, [[other] * 2 for other in range(size)])
        assert splits == [1] * size
        assert all(numpy.array_equal(each, [columns]) for each in gathered)


def test_factors_and_arrays_that_some_ranks_do_not_have(device):
    def step():
        communicator = world_communicator()
        found = communicator.all_reduce_list([on_device(numpy.full(3, 4.0))], "sum", Adjustment(0.5, 4.0))
        given = [on_device(numpy.full(3, 4.0)), on_device(numpy.ones(2)) if communicator.rank else None, None]
        filled = communicator.all_reduce_list(given, "sum", Adjustment(none_as_zeros=True))
        return as_host(found[0]).tolist(), [None if each is None else as_host(each).tolist() for each in filled]

    assert run_ranks(2, step) == [([16.0] * 3, [[8.0] * 3, [1.0] * 2, None])] * 2


def test_groups_of_ranks(device):
    def step():
        whole = world_communicator()
        members = [whole.rank & ~1, whole.rank | 1]
        group = GroupCommunicator(whole, members)
        given = on_device(numpy.full((2, whole.rank + 1), whole.rank + 1.0))
        found = [
            group.all_reduce_here(given[:, 0]),
            group.all_gather_here(given, 1)[0],
            group.broadcast_here(given, 1)[0],
        ]
        theirs = group.broadcast_here(given[0] if group.rank == 0 else None, 0)
        assert is_device(theirs) == (group.rank == 0)
        return [as_host(each).tolist() for each in [*found, theirs]]

    def expected(one, two):
        return [[[one + two] * 2, [one] * int(one) + [two] * int(two), [two] * int(two), [one] * int(one)]] * 2

    assert run_ranks(4, step) == expected(1.0, 2.0) + expected(3.0, 4.0)


@pytest.mark.parametrize("verb", ["all_reduce_here", "all_gather_here"])
def test_ranks_of_a_group_whose_arrays_lie_in_other_memory_are_told(device, verb):
    def step():
        whole = world_communicator()
        group = GroupCommunicator(whole, [whole.rank & ~1, whole.rank | 1])
        given = on_device(numpy.ones(3)) if whole.rank else numpy.ones(3)  # in the first group alone they differ
        options = [0] if verb == "all_gather_here" else []
        if whole.rank < 2:
            with pytest.raises(CollectiveMismatchError, match="device memory: .*pretended on rank 1"):
                getattr(group, verb)(given, *options)
        else:
            assert is_device(getattr(group, verb)(given, *options))

    run_ranks(4, step)


def test_a_mixture_in_one_list_is_refused(device):
    def step():
        Engine(world_communicator())([numpy.ones(3), on_device(numpy.ones(3))])

    with pytest.raises(
        UnsupportedDtypeError, match=r"one kind of arrays, got numpy \(tensor 0\), pretended \(tensor 1\)"
    ):
        run_ranks(2, step)


def test_a_pretended_link_is_used_for_large_lists_too():
    def step():
        communicator = world_communicator()
        values = numpy.arange(300000, dtype="f4")
        (result,) = Engine(communicator)([on_device(values)])
        (link,) = communicator.devices.links()
        assert isinstance(link, PretendedLink)
        return bool((as_host(result) == 2 * values).all())

    with pretended_device(""):
        assert run_ranks(2, step) == [True, True]


# -- whether ranks can use NCCL together -------------------------------------------------------------------------------


def _fact(machine="a", bus_id="0000:01:00.0", **changes):
    card = asdict(Card(machine, bus_id, 0, "H100"))
    return {"why": "", "version": 23203, "card": card, "problem": "it is not allowed"} | changes


def test_ranks_with_gpus_of_their_own_can():
    assert nccl.why_not([_fact(), _fact(bus_id="0000:02:00.0"), _fact(machine="b")]) is None


def test_ranks_that_share_a_gpu_can_if_nccl_allows_it():
    assert nccl.why_not([_fact(problem="")] * 3) is None


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ([_fact(), _fact()], r"ranks 0, 1 have one GPU, H100 0000:01:00.0: it is not allowed"),
        ([_fact(machine="b"), _fact(problem=""), _fact()], r"ranks 1, 2 have one GPU"),
        ([_fact(), _fact(machine="b", why="no libnccl.so.2")], r"rank 1: no libnccl\.so\.2"),
        ([_fact(), _fact("b", version=22809)], r"different versions.*2\.28\.9 on rank 1, 2\.32\.3 on rank 0"),
    ],
)
def test_others_are_told_why_not(facts, why):
    assert re.search(why, nccl.why_not(facts))
