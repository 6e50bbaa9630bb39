"""Collectives over real MPI ranks: values as closed forms, and the same bits everywhere, MPI's own included."""

import math
from itertools import product

import ml_dtypes
import numpy
import pytest

from mpidist.collectives.engine import Engine
from mpidist.collectives.ways.selection import AUTOMATIC, eligible
from mpidist.runtime.board import StatusBoard
from mpidist.schedules.table import names
from mpidist.transports.mpi import MpiTransport
from mpidist.world import world_communicator
from tests.helpers import reference

pytestmark = pytest.mark.mpi

#: All that may be chosen, and the rest of the table.
ALGORITHMS = ("auto", *AUTOMATIC, *(name for name in names("all_reduce") if name not in AUTOMATIC))


@pytest.fixture
def communicator():
    return world_communicator()


def _algorithms(communicator):
    """All that these ranks have: MPI's own needs MPI, those through memory need one node, or several."""
    needs = ("native", "shared_memory", "two_level")
    usable = eligible(communicator.facts()) if communicator.size > 1 else ("shared_memory", "two_level")
    return [name for name in ALGORITHMS if name not in needs or name in usable]


def _check_on_all_ranks(communicator, ok):
    """Fail on all ranks together, so that they stay in step."""
    answers = communicator.exchange(b"1" if ok else b"0")
    assert answers == [b"1"] * communicator.size


@pytest.mark.parametrize("count", [0, 1, 2, 7, 1000, 100_003])
@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "i8"])
def test_all_reduce_by_every_algorithm(communicator, count, dtype):
    size, rank = communicator.size, communicator.rank
    expected = ((numpy.arange(count) % 5) * size + size * (size - 1) // 2).astype(dtype)
    for algorithm in _algorithms(communicator):
        buffer = (numpy.arange(count) % 5 + rank).astype(dtype)
        communicator.all_reduce(buffer, algorithm=algorithm)
        _check_on_all_ranks(communicator, numpy.array_equal(buffer, expected))


REDUCTIONS = {"min": lambda size: 1, "max": lambda size: size, "prod": math.factorial}


@pytest.mark.parametrize(("op", "closed_form"), REDUCTIONS.items(), ids=REDUCTIONS)
def test_other_reductions(communicator, op, closed_form):
    for algorithm in _algorithms(communicator):
        buffer = numpy.full(50, communicator.rank + 1.0)
        communicator.all_reduce(buffer, op, algorithm=algorithm)
        _check_on_all_ranks(communicator, (buffer == closed_form(communicator.size)).all())


GRID = list(product(["f2", "f4", "f8", ml_dtypes.bfloat16, "i1", "u2", "i4", "i8"], ["sum", "min", "max", "prod"]))


@pytest.mark.parametrize(("dtype", "op"), [*GRID, ("c8", "sum"), ("c8", "prod")])
def test_every_algorithm_does_what_the_reference_does(communicator, op, dtype):
    for count in (1, 9, 100_003):
        whole = (numpy.arange(count) % 2 + 1 + (communicator.rank == 1)).astype(dtype)  # sums and products are exact
        expected = whole.copy()
        reference.all_reduce(communicator, expected, op)
        for algorithm in _algorithms(communicator):
            buffer = whole.copy()
            communicator.all_reduce(buffer, op, algorithm=algorithm)
            _check_on_all_ranks(communicator, buffer.tobytes() == expected.tobytes())


@pytest.mark.parametrize("count", [1, 3, 9, 1000, 100_003])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", ml_dtypes.bfloat16], ids=str)
def test_shared_memory_adds_as_the_reference_does(communicator, count, dtype):
    if "shared_memory" not in _algorithms(communicator):
        pytest.skip("the ranks are on several nodes")
    buffer = numpy.random.default_rng(communicator.rank).normal(size=count).astype(dtype)
    expected = buffer.copy()
    reference.all_reduce(communicator, expected)
    communicator.all_reduce(buffer, algorithm="shared_memory")
    _check_on_all_ranks(communicator, buffer.tobytes() == expected.tobytes())


@pytest.mark.parametrize("dtype", ["?", ">f8", ">i4", "u1"])
def test_truth_values_and_foreign_byte_orders(communicator, dtype):
    for algorithm in _algorithms(communicator):
        buffer = numpy.full(10, communicator.rank == 0, dtype)
        communicator.all_reduce(buffer, "max", algorithm=algorithm)
        _check_on_all_ranks(communicator, buffer.dtype == numpy.dtype(dtype) and (buffer == 1).all())


@pytest.mark.parametrize("count", [3, 1000, 60_000])
def test_all_ranks_get_the_same_bits_by_every_algorithm(communicator, count):
    for algorithm in _algorithms(communicator):
        for dtype in ("f4", "f8"):
            buffer = numpy.random.default_rng(communicator.rank).normal(size=count).astype(dtype)
            communicator.all_reduce(buffer, algorithm=algorithm)
            assert len(set(communicator.exchange(buffer.tobytes()))) == 1, algorithm


@pytest.mark.parametrize("dtype", ["f2", ml_dtypes.bfloat16])
def test_16_bit_floats_are_rounded_once(communicator, dtype):
    # 1 + size - 1 terms of a half unit in the last place: added in 16 bits, every one of them would be lost.
    half_unit = float(ml_dtypes.finfo(dtype).eps) / 2
    expected = numpy.array(1 + (communicator.size - 1) * half_unit, "f4").astype(dtype)
    for algorithm in _algorithms(communicator):
        buffer = numpy.full(5, 1.0 if communicator.rank == 0 else half_unit, dtype)
        communicator.all_reduce(buffer, algorithm=algorithm)
        _check_on_all_ranks(communicator, (buffer == expected).all())


def test_many_small_calls_in_a_row_keep_their_values_apart(communicator):
    size, rank = communicator.size, communicator.rank
    wrong = 0
    for step in range(300):
        buffer = numpy.array([step * rank, step], "i8")
        communicator.all_reduce(buffer)
        wrong += not numpy.array_equal(buffer, [step * size * (size - 1) // 2, step * size])
    _check_on_all_ranks(communicator, wrong == 0)


def test_large_and_small_calls_may_alternate(communicator):
    size = communicator.size
    wrong = 0
    for step in range(20):
        small, large = numpy.full(3, float(step)), numpy.full(50_000, float(step))
        communicator.all_reduce(small)
        communicator.all_reduce(large)
        wrong += not ((small == step * size).all() and (large == step * size).all())
    _check_on_all_ranks(communicator, wrong == 0)


@pytest.mark.parametrize("bytes_per_pack", [0, 1000])
def test_fused_lists(communicator, bytes_per_pack):
    size, rank = communicator.size, communicator.rank
    shapes = [(64, 10), (10,), (), (0, 3), (300, 200), (7, 5, 3)]
    fused = Engine(communicator, bytes_per_pack)
    for step in range(5):
        results = fused([numpy.full(shape, rank + step, "f4") for shape in shapes])
        right = [(result == size * step + size * (size - 1) // 2).all() for result in results]
        _check_on_all_ranks(communicator, all(right))


def test_gather_scatter_and_broadcast(communicator):
    size, rank = communicator.size, communicator.rank
    joined = communicator.all_gather(numpy.full((rank, 2), rank))
    expected = numpy.concatenate([numpy.full((other, 2), other) for other in range(size)])
    share = communicator.reduce_scatter(numpy.arange(10.0))
    shared = numpy.full((3, 3), float(rank))
    communicator.broadcast(shared, root=size - 1)
    right = (
        numpy.array_equal(joined, expected)
        and numpy.array_equal(share, size * numpy.arange(10.0)[rank * 10 // size : (rank + 1) * 10 // size])
        and (shared == size - 1).all()
    )
    _check_on_all_ranks(communicator, right)


@pytest.mark.mpi(min_size=2)
def test_messages_longer_than_a_chunk(communicator):
    transport = communicator.transport
    pieces = MpiTransport(transport._comm, transport.control, transport.world_ranks, chunk_bytes=100)
    watch = transport.control.watch("pieces")
    ring = numpy.full(1001, transport.rank, "u1")
    after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    received = numpy.empty(1001, "u1")
    pieces.wait([pieces.receive(received, before), pieces.send(ring, after)], watch)
    summed = numpy.full(333, 1.0)
    pieces.wait([pieces.native["all_reduce"](summed, "sum")], watch)
    _check_on_all_ranks(communicator, (received == before).all() and (summed == transport.size).all())


@pytest.mark.mpi(min_size=2)
def test_ranks_of_a_node_share_one_board_and_its_memory_has_no_name(communicator):
    assert isinstance(communicator.control.board, StatusBoard)
    assert communicator.control.board_ranks == tuple(range(communicator.size))
    with open("/proc/self/maps") as maps:
        names = [
            line.rstrip("\n").rpartition("/")[2] for line in maps
        ]  # a folder may have our name: MPI's files are in it
    ours = [name for name in names if "mpidist" in name]
    _check_on_all_ranks(communicator, bool(ours) and {*ours} == {"memfd:mpidist (deleted)"})
