"""Gathers, broadcasts, reduce-scatters and all_to_all of arrays in device memory: by a link, and staged."""

import itertools
import threading

import ml_dtypes
import numpy
import pytest

from mpidist import arrays
from mpidist.arrays import as_host
from mpidist.errors import CollectiveMismatchError, MissingDependencyError, RankFailedError
from mpidist.testing import run_ranks
from mpidist.testing.device import DeviceArray, PretendedLink, PretendedMemory, on_device, pretended_device
from mpidist.world import world_communicator

WHY = "the device has none"
DTYPES = ["bool", "int8", "uint16", "int64", "float16", ml_dtypes.bfloat16, "float32", "complex64", "M8[s]", "S3"]
OPERATIONS = ["sum", "mean", "min", "max", "prod"]
SIZES = [1, 2, 3, 4, 8]
REDUCED = [
    *itertools.product(OPERATIONS, ["int8", "int32", "float16", ml_dtypes.bfloat16, "float64"]),
    *itertools.product(["min", "max"], ["bool"]),
]


@pytest.fixture(params=["linked", "staged"])
def way(request):
    with pretended_device("" if request.param == "linked" else WHY):
        yield request.param


def values(shape, rank, dtype="f4"):
    """Return other values on each rank, of any dtype."""
    bits = (numpy.arange(int(numpy.prod(shape))).reshape(shape) * 3 + rank) % 7
    if numpy.dtype(dtype).kind in "SM":
        return bits.astype("S3" if numpy.dtype(dtype).kind == "S" else "i8").astype(dtype)
    return (bits % 2 if numpy.dtype(dtype) == bool else bits).astype(dtype)


def calls_of(communicator):
    """Return the names of the calls of the link, if there is one."""
    return [name for link in communicator.devices.links() if isinstance(link, PretendedLink) for name in link.calls]


def check(found, expected):
    assert isinstance(found, DeviceArray)
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert as_host(found).tobytes() == numpy.ascontiguousarray(expected).tobytes()


def made(way, size, *names):
    """Return the calls of a link that are to be made: none where arrays are staged, or on one rank."""
    return list(names) if way == "linked" and size > 1 else []


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_broadcast(way, size, dtype):
    root = size - 1

    def step():
        communicator = world_communicator()
        for shape in [(), (5,), (3, 700), (0, 2), (3, 0)]:
            given = on_device(values(shape, communicator.rank, dtype))
            for _ in range(2):
                check(communicator.broadcast_copy(given, root), values(shape, root, dtype))
            check(given, values(shape, communicator.rank, dtype))
            communicator.broadcast(given, root)
            check(given, values(shape, root, dtype))
        return calls_of(communicator)

    assert run_ranks(size, step) == [made(way, size, *["from_root"] * 9)] * size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("lengths", ["even", "uneven", "only the last"])
@pytest.mark.parametrize("dtype", ["bool", "float16", ml_dtypes.bfloat16, "complex128"], ids=str)
def test_arrays_are_joined(way, size, axis, lengths, dtype):
    counts = {"even": [2] * size, "uneven": list(range(size)), "only the last": [0] * (size - 1) + [300]}[lengths]
    shapes = [tuple(count if index == axis else 2 for index in range(3)) for count in counts]
    parts = [values(shape, rank, dtype) for rank, shape in enumerate(shapes)]

    def step():
        communicator = world_communicator()
        rank = communicator.rank
        given, whole = on_device(parts[rank]), numpy.concatenate(parts, axis)
        check(communicator.all_gather(given, axis), whole)
        check(communicator.all_gather(given, axis), whole)
        gathered = communicator.gather(given, size - 1, axis)
        check(given, parts[rank])
        if rank == size - 1:
            check(gathered, whole)
        else:
            assert gathered is None
        return calls_of(communicator)

    assert run_ranks(size, step) == [made(way, size, "gather", "gather", "exchange")] * size


def test_what_is_not_contiguous_is_joined_and_dealt_out_by_its_values(way):
    def step():
        communicator = world_communicator()
        rank = communicator.rank
        given = on_device(values((4, 6), rank)).T[::2]
        parts = [values((4, 6), each).T[::2] for each in range(3)]
        check(communicator.all_gather(given, 1), numpy.concatenate(parts, 1))
        root = communicator.gather(given, 0)
        assert root is None or as_host(root).tolist() == numpy.concatenate(parts).tolist()
        rows, _ = communicator.all_to_all(given)
        check(rows, numpy.concatenate([part[rank : rank + 1] for part in parts]))
        check(communicator.broadcast_copy(given, 1), parts[1])
        check(communicator.reduce_scatter(given), sum(parts)[rank : rank + 1])

    run_ranks(3, step)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("op", "dtype"), REDUCED, ids=str)
def test_rows_of_the_reduced_array(way, size, op, dtype):
    fn = {"sum": numpy.sum, "mean": numpy.mean, "min": numpy.min, "max": numpy.max, "prod": numpy.prod}[op]
    result = "f8" if op == "mean" and dtype in ("int8", "int32") else dtype

    def step():
        communicator = world_communicator()
        rank = communicator.rank
        for rows in (0, 1, size, 2 * size + 1, 600):
            stack = numpy.stack([(numpy.arange(rows * 2).reshape(rows, 2) + each) % 2 for each in range(size)])
            given = on_device(stack[rank].astype(dtype))
            first, last = rank * rows // size, (rank + 1) * rows // size
            found = communicator.reduce_scatter(given, op)
            expected = fn(stack, axis=0)[first:last]
            assert found.dtype == numpy.dtype(result) and found.shape == (last - first, 2)
            rtol = 1e-2 if numpy.dtype(dtype).itemsize == 2 else 1e-12
            numpy.testing.assert_allclose(as_host(found).astype("f8"), expected, rtol=rtol)
            check(given, stack[rank].astype(dtype))
        return calls_of(communicator)

    assert run_ranks(size, step) == [made(way, size, *["reduce_parts"] * 4)] * size


def test_what_a_link_does_not_reduce_is_staged():
    """Among collectives that go by the link."""

    def step():
        communicator = world_communicator()
        complex_rows = on_device(numpy.full((2, 3), 1 + 2j))
        for _ in range(2):
            check(communicator.reduce_scatter(complex_rows), numpy.full((1, 3), 2 + 4j))
            check(communicator.all_gather(complex_rows), numpy.full((4, 3), 1 + 2j))
        return calls_of(communicator)

    with pretended_device(""):
        assert run_ranks(2, step) == [["gather"] * 2] * 2


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_go_from_every_rank_to_every_rank(way, size, dtype):
    # none at all from some, and many from one
    table = [[(giver + to) % size * (1 if giver else 90) for to in range(size)] for giver in range(size)]
    pieces = [[values((table[giver][to], 2), giver + 3 * to, dtype) for to in range(size)] for giver in range(size)]

    def step():
        communicator = world_communicator()
        rank = communicator.rank
        given = on_device(numpy.concatenate(pieces[rank]))
        for _ in range(2):
            found, splits = communicator.all_to_all(given, table[rank])
            assert splits == [table[giver][rank] for giver in range(size)]
            check(found, numpy.concatenate([pieces[giver][rank] for giver in range(size)]))
        found, splits = communicator.all_to_all(on_device(values((2 * size, 0), rank, dtype)))
        assert splits == [2] * size and found.shape == (2 * size, 0)
        return calls_of(communicator)

    assert run_ranks(size, step) == [made(way, size, *["exchange"] * 3)] * size


def test_bound_and_started(way):
    def step():
        communicator = world_communicator()
        rank, like = communicator.rank, on_device(numpy.zeros((4, 2), "f4"))
        bound = {
            "gather": communicator.all_gather_init(like),
            "broadcast": communicator.broadcast_init(like, 1),
            "reduce": communicator.reduce_scatter_init(like),
            "deal": communicator.all_to_all_init(like, [1, 3]),
        }
        for turn in range(3):
            given = on_device(values((4, 2), rank + turn))
            theirs = [values((4, 2), each + turn) for each in range(2)]
            handles = {name: each.start(given) for name, each in bound.items()}
            check(handles["gather"].wait(), numpy.concatenate(theirs))
            check(handles["broadcast"].wait(), theirs[1])
            check(handles["reduce"].wait(), sum(theirs)[2 * rank : 2 * rank + 2])
            found, splits = handles["deal"].wait()
            part = slice(1, 4) if rank else slice(0, 1)
            check(found, numpy.concatenate([each[part] for each in theirs]))
            assert splits == [[1, 1], [3, 3]][rank]

    run_ranks(2, step)


def test_results_are_the_callers(way):
    def step():
        communicator = world_communicator()
        kept = []
        for turn in range(4):
            given = on_device(numpy.full((2, 3), turn))
            results = [
                communicator.all_gather(given),
                communicator.broadcast_copy(given, 0),
                communicator.reduce_scatter(given),
                communicator.all_to_all(given)[0],
            ]
            for each in [given, *(old for _, olds in kept for old in olds)]:
                each[...] = -1
            assert [as_host(each).max() for each in results] == [turn, turn, 2 * turn, turn]
            kept.append((turn, results))

    run_ranks(2, step)


def test_ranks_whose_arrays_differ_are_told_before_anything_is_begun(way):
    def step():
        communicator = world_communicator()
        rank = communicator.rank
        communicator.all_gather(on_device(numpy.ones(2)))
        before = calls_of(communicator)
        with pytest.raises(CollectiveMismatchError):
            communicator.all_gather(on_device(numpy.ones((2, 2 + rank))))
        with pytest.raises(CollectiveMismatchError):
            communicator.broadcast_copy(on_device(numpy.ones(2, "f8" if rank else "f4")))
        assert calls_of(communicator) == before
        check(communicator.all_gather(on_device(numpy.ones(2))), numpy.ones(4))

    run_ranks(2, step)


VERBS = {
    "all_gather": lambda ranks, array: ranks.all_gather(array),
    "gather": lambda ranks, array: ranks.gather(array),
    "broadcast": lambda ranks, array: ranks.broadcast(array),
    "broadcast_copy": lambda ranks, array: ranks.broadcast_copy(array),
    "reduce_scatter": lambda ranks, array: ranks.reduce_scatter(array),
    "all_to_all": lambda ranks, array: ranks.all_to_all(array),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("count", [2, 100_000])
def test_ranks_whose_arrays_lie_in_other_memory_are_told(way, verb, count):
    """They would wait for each other: those of the host know of no link."""

    def step():
        communicator = world_communicator()
        array = numpy.ones(count)
        for _ in range(2):
            for first in (0, 1):
                given = on_device(array) if (communicator.rank == first) else array
                with pytest.raises(CollectiveMismatchError, match=f"device memory: .*pretended on rank {first}"):
                    VERBS[verb](communicator, given)
            VERBS[verb](communicator, on_device(array))
            VERBS[verb](communicator, array)

    run_ranks(2, step)


@pytest.mark.parametrize("verb", VERBS)
def test_where_there_is_a_link_nothing_is_copied_to_the_host(monkeypatch, verb):
    """From the first call on, in which ranks learn of it."""
    copies = []
    read = PretendedMemory.read
    monkeypatch.setattr(PretendedMemory, "read", lambda self, *given: [copies.append(given), read(self, *given)][1])

    def step():
        for _ in range(3):
            VERBS[verb](world_communicator(), on_device(numpy.ones(6)))

    with pretended_device(""):
        run_ranks(2, step)
    assert not copies


@pytest.mark.parametrize("verb", ["all_gather", "broadcast_copy", "reduce_scatter", "all_to_all"])
def test_a_rank_without_room_for_its_result_ends_the_call_on_all(way, monkeypatch, verb):
    empty, full = arrays.empty, set()

    def empty_if_there_is_room(shape, dtype, like):
        if threading.get_ident() in full:
            raise MemoryError("the device is full")
        return empty(shape, dtype, like)

    monkeypatch.setattr(arrays, "empty", empty_if_there_is_room)

    def step():
        communicator, given = world_communicator(), on_device(numpy.ones(300))
        VERBS[verb](communicator, given)
        communicator.barrier()
        if communicator.rank == 1:
            full.add(threading.get_ident())
            with pytest.raises(MemoryError, match="the device is full"):
                VERBS[verb](communicator, given)
        else:
            with pytest.raises(RankFailedError):
                for _ in range(2):  # what is only begun ends with the next call
                    VERBS[verb](communicator, given)

    run_ranks(3, step)


@pytest.mark.parametrize(("algorithm", "calls"), [("auto", ["gather"]), ("staged", []), ("nccl", ["gather"])])
def test_the_setting_says_which_way_is_taken(monkeypatch, algorithm, calls):
    monkeypatch.setenv("MPIDIST_ALGORITHM", algorithm)

    def step():
        communicator = world_communicator()
        check(communicator.all_gather(on_device(numpy.ones(2))), numpy.ones(4))
        return calls_of(communicator)

    with pretended_device(""):
        assert run_ranks(2, step) == [calls] * 2


def test_nccl_that_cannot_be_used_is_an_error_on_all_ranks(monkeypatch):
    monkeypatch.setenv("MPIDIST_ALGORITHM", "nccl")

    def step():
        with pytest.raises(MissingDependencyError, match=f"NCCL was asked for, and {WHY}"):
            world_communicator().broadcast_copy(on_device(numpy.ones(2)))

    with pretended_device(WHY):
        run_ranks(3, step)


MISUSES = {
    "other roots": (lambda link, rank, array, watch: link.from_root(array, rank, watch), "different calls"),
    "other lengths": (lambda link, rank, array, watch: link.from_root(array[: 4 - rank], 0, watch), "different calls"),
    "other bounds": (lambda link, rank, array, watch: link.gather(array, [0, 1 + rank, 4], watch), "different calls"),
    "a part is missing": (lambda link, rank, array, watch: link.gather(array, [0, 1, 3], watch), "are not the array"),
    "too long": (
        lambda link, rank, array, watch: link.exchange({1 - rank: array}, {1 - rank: array[:3]}, watch),
        "ranks sent .*32.* bytes, .*24.* were expected",
    ),
    "another order": (
        lambda link, rank, array, watch: link.exchange({}, {}, watch) if rank else link.from_root(array, 0, watch),
        "different calls",
    ),
}


@pytest.mark.parametrize(("misuse", "match"), MISUSES.values(), ids=MISUSES)
def test_a_pretended_link_fails_where_nccl_would_hang_or_move_other_bytes(misuse, match):
    def step():
        transport, watch = world_communicator().transport, world_communicator().control.watch("a test")
        link = PretendedLink(transport)
        with pytest.raises(AssertionError, match=match):
            misuse(link, transport.rank, on_device(numpy.zeros(4)), watch)

    run_ranks(2, step)
