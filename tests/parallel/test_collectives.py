"""Collectives besides all-reduce over real MPI ranks: closed forms over uneven sizes, dtypes, roots and operations.

Hypothesis draws the same examples on every rank.  With ``MPIDIST_VIRTUAL_NODES=2`` the same goes by messages.
"""

from __future__ import annotations

import ml_dtypes
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpidist
from mpidist.errors import CollectiveMismatchError
from mpidist.world import world_communicator

pytestmark = pytest.mark.mpi

#: Row counts on both sides of what a call slot has room for, and of a piece of an outbox, in rows of 16 bytes or more.
ROWS = st.sampled_from([0, 1, 7, 1000, 17_000, 40_000])
DTYPES = st.sampled_from(["f2", ml_dtypes.bfloat16, "f4", "f8", "i1", "i8", "?", "c16", ">f4", "U3", "f4,i8"])
SIZE = world_communicator().size
few = settings(max_examples=12)


@pytest.fixture
def communicator():
    return world_communicator()


def _check_on_all_ranks(communicator, ok):
    """Fail on all ranks together, so that they stay in step."""
    assert communicator.exchange(b"1" if ok else b"0") == [b"1"] * communicator.size


def _full(shape, rank, dtype):
    dtype, count = numpy.dtype(dtype), int(numpy.prod(shape))
    values = (numpy.arange(count) * 3 + 7 * rank) % 100
    if dtype.names:
        found = numpy.zeros(count, dtype)
        for name in dtype.names:
            found[name] = values
        return found.reshape(shape)
    return (values % 2 if dtype.kind == "b" else values).astype(dtype).reshape(shape)


def _same(first, second):
    return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()


def per_rank(strategy):
    return st.lists(strategy, min_size=SIZE, max_size=SIZE)


@few
@given(lengths=per_rank(ROWS), dtype=DTYPES, axis=st.integers(0, 1), root=st.integers(0, SIZE - 1))
def test_arrays_are_joined_on_all_ranks_and_on_one(lengths, dtype, axis, root):
    communicator = world_communicator()
    parts = [_full((length, 2) if axis == 0 else (2, length), rank, dtype) for rank, length in enumerate(lengths)]
    expected = numpy.concatenate(parts, axis=axis).astype(dtype)
    joined = communicator.all_gather(parts[communicator.rank], axis)
    again = communicator.all_gather_init(parts[0], axis).start(parts[communicator.rank]).wait()
    on_root = communicator.gather(parts[communicator.rank], root, axis)
    right = _same(joined, expected) and _same(again, expected) and not numpy.shares_memory(joined, again)
    right &= _same(on_root, expected) if communicator.rank == root else on_root is None
    _check_on_all_ranks(communicator, right)


@few
@given(
    rows=ROWS,
    dtype=st.sampled_from(["f2", "f4", "f8", "i4"]),
    op=st.sampled_from(["sum", "mean", "min", "max", "prod"]),
)
def test_each_rank_gets_its_rows_of_the_reduced_array(rows, dtype, op):
    communicator = world_communicator()
    # ones and twos, of which at most three are multiplied or added up wrongly by no rounding
    stack = [((numpy.arange(rows * 3) + rank) % 2 + 1).reshape(rows, 3) for rank in range(SIZE)]
    reduced = {"sum": sum(stack), "mean": sum(stack) / SIZE, "min": numpy.min(stack, 0), "max": numpy.max(stack, 0)}
    whole = reduced[op] if op in reduced else numpy.prod(numpy.array(stack), 0)
    given_dtype = numpy.dtype("f8" if op == "mean" and dtype == "i4" else dtype)
    first, last = (each * rows // SIZE for each in (communicator.rank, communicator.rank + 1))
    share = communicator.reduce_scatter(stack[communicator.rank].astype(dtype), op)
    right = share.dtype == given_dtype and share.shape == (last - first, 3)
    right = right and numpy.allclose(share.astype("f8"), whole[first:last], rtol=1e-3)
    _check_on_all_ranks(communicator, right)


@few
@given(shape=st.sampled_from([(), (0, 2), (5,), (300, 400), (1000, 700)]), dtype=DTYPES, root=st.integers(0, SIZE - 1))
def test_every_rank_gets_the_array_of_the_root(shape, dtype, root):
    communicator = world_communicator()
    expected, given = _full(shape, root, dtype), _full(shape, communicator.rank, dtype)
    copy = communicator.broadcast_copy(given, root)
    communicator.broadcast(given, root)
    _check_on_all_ranks(communicator, _same(copy, expected) and _same(given, expected))


@few
@given(table=per_rank(per_rank(ROWS)), dtype=DTYPES)
def test_rows_go_from_every_rank_to_every_rank(table, dtype):
    communicator = world_communicator()
    rank = communicator.rank
    given = numpy.concatenate([_full((rows, 2), rank + 10 * other, dtype) for other, rows in enumerate(table[rank])])
    found, splits = communicator.all_to_all(given.astype(dtype), table[rank])
    rows = [_full((table[giver][rank], 2), giver + 10 * rank, dtype) for giver in range(SIZE)]
    right = splits == [table[giver][rank] for giver in range(SIZE)]
    _check_on_all_ranks(communicator, right and _same(found, numpy.concatenate(rows).astype(dtype)))


@pytest.mark.mpi(min_size=2)
@few
@given(shape=st.sampled_from([(), (0, 2), (5,), (300, 400), (1000, 700)]), dtype=DTYPES)
def test_a_ring_of_messages(shape, dtype):
    communicator = world_communicator()
    rank, before = communicator.rank, (communicator.rank - 1) % SIZE
    sending = communicator.send_init(_full(shape, rank, dtype), (rank + 1) % SIZE).start(_full(shape, rank, dtype))
    joined = communicator.all_gather(numpy.array([rank]))  # a collective in between
    found = communicator.receive(before)
    sending.wait()
    right = _same(found, _full(shape, before, dtype)) and joined.tolist() == list(range(SIZE))
    _check_on_all_ranks(communicator, right)


@few
@given(
    lacks=per_rank(st.lists(st.booleans(), min_size=3, max_size=3)),
    long=st.booleans(),
    op=st.sampled_from(["sum", "mean"]),
)
def test_factors_and_none_as_zeros(lacks, long, op):
    communicator = world_communicator()
    shapes = [(3,), (200_000,) if long else (4,), ()]
    like = [numpy.zeros(shape, "f4") for shape in shapes]
    bound = communicator.all_reduce_init(like, op, prescale=0.5, postscale=4.0, none_as_zeros=True)
    rank = communicator.rank
    given = [None if lacks[rank][at] else numpy.full(shape, rank + 1.0, "f4") for at, shape in enumerate(shapes)]
    right = True
    for results in (bound(given), bound.start(given).wait()):
        for at, result in enumerate(results):
            values = [other + 1.0 for other in range(SIZE) if not lacks[other][at]]
            expected = 2.0 * sum(values) / (SIZE if op == "mean" else 1)
            right &= (result is None) if not values else numpy.allclose(result, expected, rtol=1e-6)
    _check_on_all_ranks(communicator, right)


def test_all_kinds_in_turn_at_lengths_that_change(communicator):
    rank, wrong = communicator.rank, 0
    for step in range(30):
        count, root = (5, 9000, 150_000, 40_000, 300_000)[step % 5], step % SIZE
        joined = communicator.all_gather(numpy.full(count + rank, step + rank, "f4"))
        wrong += not (joined[-1] == step + SIZE - 1 and len(joined) == SIZE * count + SIZE * (SIZE - 1) // 2)
        total = numpy.full(count, rank + 1.0)
        communicator.all_reduce(total)
        wrong += not (total == SIZE * (SIZE + 1) / 2).all()
        shared = numpy.full(count, float(rank + step))
        communicator.broadcast(shared, root)
        wrong += not (shared == root + step).all()
        share = communicator.reduce_scatter(numpy.full(count, rank + 1.0))
        wrong += not (share == SIZE * (SIZE + 1) / 2).all()
        communicator.barrier()
        rows, _ = communicator.all_to_all(numpy.repeat(numpy.arange(SIZE), count))
        wrong += not (rows == rank).all()
        (short,) = communicator.all_reduce_list([numpy.full(7, rank + step)])
        wrong += not (short == SIZE * step + SIZE * (SIZE - 1) // 2).all()
    _check_on_all_ranks(communicator, wrong == 0)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_differ_are_named_and_go_on(communicator):
    rank = communicator.rank
    with pytest.raises(CollectiveMismatchError, match=r"broadcast\(root=0\).*broadcast\(root=1\)|root=1.*root=0"):
        communicator.broadcast(numpy.ones(3), min(rank, 1))
    with pytest.raises(CollectiveMismatchError, match=r"all_gather\(axis=0\)"):
        communicator.all_gather(numpy.ones((2, 3 + (rank == 1))))
    _check_on_all_ranks(communicator, communicator.all_gather(numpy.array([rank])).tolist() == list(range(SIZE)))


def test_the_same_at_top_level_and_in_a_replica(communicator):
    rank = communicator.rank
    strategy = mpidist.MultiWorkerMirroredStrategy()

    def step():
        context = mpidist.get_replica_context()
        context.barrier()
        return [
            context.all_gather(numpy.full(2, rank), 0).tolist(),
            context.broadcast(rank, SIZE - 1),
            float(context.all_reduce("MAX", numpy.float64(rank))),
        ]

    outside = [
        mpidist.all_gather(numpy.full(2, rank)).tolist(),
        mpidist.broadcast(rank, SIZE - 1),
        float(mpidist.all_reduce(float(rank), "max")),
    ]
    expected = [[each for each in range(SIZE) for _ in range(2)], SIZE - 1, SIZE - 1.0]
    _check_on_all_ranks(communicator, strategy.run(step) == expected and outside == expected)


def test_arrays_of_megabytes_are_moved_by_messages_as_short_ones_are_through_memory(communicator):
    rank, size, count = communicator.rank, communicator.size, (1 << 18) + 3
    values = numpy.arange(count, dtype="f4")
    root = size - 1
    found = numpy.copy(values) if rank == root else numpy.zeros(count, "f4")
    communicator.broadcast(found, root)
    assert (found == values).all()
    rows = count + rank  # uneven
    joined = communicator.all_gather(numpy.arange(rows, dtype="f4") + rank)
    expected = numpy.concatenate([numpy.arange(count + each, dtype="f4") + each for each in range(size)])
    assert (joined == expected).all()
    gathered = communicator.gather(numpy.full((2, rows), rank, "f4"), root, 1)
    if rank == root:
        assert (gathered == numpy.repeat(numpy.arange(size), count + numpy.arange(size))).all()
    splits = [count + rank + other for other in range(size)]
    got, lengths = communicator.all_to_all(numpy.repeat(numpy.arange(size) * 10 + rank, splits), splits)
    assert lengths == [count + other + rank for other in range(size)]
    assert (got == numpy.repeat(rank * 10 + numpy.arange(size), lengths)).all()


@pytest.mark.parametrize("algorithm", [None, "native", "ring"])
@pytest.mark.parametrize("rows", [3, 5000])
@pytest.mark.parametrize("dtype", ["f2", "f4", ">f4", "i8"])
def test_values_that_lie_between_the_multiples_of_their_size(communicator, dtype, rows, algorithm):
    """As in packed records; MPI for Python knows no dtypes of them."""
    dtype = numpy.dtype(dtype)
    unaligned = numpy.zeros(rows * dtype.itemsize + 1, numpy.uint8)[1:].view(dtype)
    unaligned[...] = communicator.rank + 1
    total = SIZE * (SIZE + 1) / 2
    (found,) = communicator.engine(algorithm=algorithm)([unaligned])
    assert found.dtype == dtype and (found == total).all()
    communicator.all_reduce(unaligned, algorithm=algorithm)
    assert not unaligned.flags.aligned and (unaligned == total).all()
