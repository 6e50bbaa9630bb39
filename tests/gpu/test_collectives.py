"""The collectives besides all-reduce, of arrays on a GPU: closed forms over uneven sizes, dtypes and roots."""

from __future__ import annotations

import numpy
import pytest

import mpidist
from tests.gpu.library import check_on_all_ranks, host, place, problem_of, problems_of, strategy

pytestmark = [pytest.mark.mpi, pytest.mark.gpu]

DTYPES = ["float16", "float32", "float64", "int8", "int64", "bool", "complex64"]


def values(shape, rank, dtype="f4"):
    found = (numpy.arange(int(numpy.prod(shape))).reshape(shape) * 3 + 7 * rank) % 100
    return (found % 2 if numpy.dtype(dtype) == bool else found).astype(dtype)


def replica():
    return mpidist.get_replica_context()


def inside(fn):
    return strategy().run(fn)


BROADCASTS = {
    "top level": lambda value, root: mpidist.broadcast(value, root),
    "strategy": lambda value, root: strategy().broadcast(value, root),
    "replica": lambda value, root: inside(lambda: replica().broadcast(value, root)),
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_broadcast(xp, dtype):
    rank, size = place()
    problems = []
    for shape in [(), (0, 2), (5,), (300, 40), (900, 700)]:
        given = xp.asarray(values(shape, rank, dtype))
        for call in BROADCASTS.values():
            for root in {0, size - 1}:
                problems.append(problem_of(xp, call(given, root), values(shape, root, dtype)))
        problems.append(problem_of(xp, given, values(shape, rank, dtype)))
    check_on_all_ranks("".join(problems))


@pytest.mark.parametrize("lengths", ["even", "uneven", "empty"])
@pytest.mark.parametrize("axis", [0, 1])
def test_arrays_are_joined(xp, axis, lengths):
    rank, size = place()
    problems = []
    for dtype in ("float32", "bool", "int64"):
        for scale in (1, 7000):
            rows = {
                "even": [2] * size,
                "uneven": [each + 1 for each in range(size)],
                "empty": [0] * (size - 1) + [3],
            }[lengths]
            shapes = [(scale * count, 3) if axis == 0 else (3, scale * count) for count in rows]
            parts = [values(shape, each, dtype) for each, shape in enumerate(shapes)]
            given, whole = xp.asarray(parts[rank]), numpy.concatenate(parts, axis)
            found = [
                mpidist.all_gather(given, axis),
                strategy().gather(given, axis),
                inside(lambda given=given: replica().all_gather(given, axis)),
            ]
            problems.append(problems_of(xp, found, [whole] * 3))
            for root in {0, size - 1}:
                joined = mpidist.gather(given, root, axis)
                is_right = joined is None if rank != root else not problem_of(xp, joined, whole)
                problems.append("" if is_right else f"gather on {root}")
    check_on_all_ranks("".join(problems))


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "product"])
def test_rows_of_the_reduced_array(xp, op):
    rank, size = place()
    problems = []
    for rows in (0, 1, 5, 2 * size, 30_000):
        stack = numpy.stack([(numpy.arange(rows * 3).reshape(rows, 3) + each) % 2 + 1.0 for each in range(size)])
        fn = {"sum": numpy.sum, "mean": numpy.mean, "min": numpy.min, "max": numpy.max, "product": numpy.prod}[op]
        first, last = rank * rows // size, (rank + 1) * rows // size
        given = xp.asarray(stack[rank].astype("f4"))
        found = [
            mpidist.reduce_scatter(given, op),
            inside(lambda given=given: replica().reduce_scatter(op, given)),
        ]
        problems.append(problems_of(xp, found, [fn(stack, axis=0)[first:last].astype("f4")] * 2, rtol=1e-6))
    check_on_all_ranks("".join(problems))


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        *[(dtype, op) for dtype in ("int16", "uint16") for op in ("sum", "product", "min", "max")],
        *[(dtype, op) for dtype in ("float16", "float32", "float64") for op in ("min", "max")],
    ],
)
def test_rows_of_what_nccl_reduces_by_something_else(xp, ways, dtype, op):
    """Even and uneven parts; integers that wrap, floats some of which are not finite."""
    rank, size = place()
    problems = []
    for rows in (size, 2 * size + 1, 3000):
        generator = numpy.random.default_rng(rows)
        if dtype[0] == "f":
            stack = generator.choice(
                [numpy.nan, -numpy.nan, numpy.inf, -numpy.inf, -2, -1e-40, 0, 1e-40], (size, rows, 3)
            )
            stack = stack.astype(dtype)
        else:
            bounds = numpy.iinfo(dtype)
            stack = generator.integers(bounds.min, bounds.max, (size, rows, 3), dtype, endpoint=True)
        fn = {"sum": numpy.add, "product": numpy.multiply, "min": numpy.minimum, "max": numpy.maximum}[op]
        expected = fn.reduce(stack, axis=0, dtype=dtype)[rank * rows // size : (rank + 1) * rows // size]
        problems.append(problem_of(xp, mpidist.reduce_scatter(xp.asarray(stack[rank]), op), expected))
    check_on_all_ranks("".join(problems) + ways.problem("reduce_parts"))


def test_rows_go_from_every_rank_to_every_rank(xp):
    rank, size = place()
    problems = []
    for scale in (1, 5000):
        # none at all from the last rank to the first
        table = [[scale * ((giver + other) % size) for other in range(size)] for giver in range(size)]
        pieces = [[values((table[giver][to], 2), giver + 10 * to) for to in range(size)] for giver in range(size)]
        given = xp.asarray(numpy.concatenate(pieces[rank]))
        expected = numpy.concatenate([pieces[giver][rank] for giver in range(size)])
        for call in (mpidist.all_to_all, lambda *args: inside(lambda: replica().all_to_all(*args))):
            found, splits = call(given, table[rank])
            problems.append(problem_of(xp, found, expected))
            problems.append("" if splits == [table[giver][rank] for giver in range(size)] else str(splits))
    found, _ = mpidist.all_to_all(xp.asarray(numpy.arange(size) + 10 * rank))
    problems.append(problem_of(xp, found, numpy.arange(size) * 10 + rank))
    check_on_all_ranks("".join(problems))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 5, 700_000])
def test_a_ring_of_messages(xp, count, dtype):
    """Through the host, from and to what lies on the card."""
    rank, size = place()
    left, right = (rank - 1) % size, (rank + 1) % size
    given, expected = xp.asarray(values((count,), rank, dtype)), values((count,), left, dtype)
    problems = []
    for like in (given, host(given)):
        if rank == 0:
            mpidist.send(given, right)
            found = mpidist.receive(left, like=like)
        else:
            found = mpidist.receive(left, like=like)
            mpidist.send(given, right)
        problems.append(problem_of(xp if like is given else numpy, found, expected))
    check_on_all_ranks("".join(problems))


def test_sparse_rows_are_summed(xp):
    """The slices of all ranks, one after another."""
    rank, size = place()
    rows = xp.asarray(values((3, 2), rank))
    slices = mpidist.IndexedSlices(rows, xp.asarray(numpy.array([0, rank % 5, 4])), (5, 2))
    found = inside(lambda: replica().all_reduce("SUM", slices))
    dense, expected = numpy.zeros((5, 2), "f4"), numpy.zeros((5, 2), "f4")
    for each in range(size):
        numpy.add.at(expected, [0, each % 5, 4], values((3, 2), each))
    numpy.add.at(dense, host(found.indices), host(found.values))
    check_on_all_ranks(numpy.array_equal(dense, expected) or f"{dense} in place of {expected}")


def test_all_kinds_in_turn(xp):
    rank, size = place()
    problems = []
    for step in range(10):
        count, root = (5, 9000, 150_000, 40_000, 300_000)[step % 5], step % size
        total = xp.asarray(numpy.full(count, rank + 1.0))
        found = [
            mpidist.all_gather(xp.asarray(numpy.full(count + rank, step + rank, "f4")))[-1:],
            mpidist.broadcast(xp.asarray(numpy.full(count, float(rank + step))), root),
            mpidist.all_reduce(total),
            *mpidist.all_reduce([xp.asarray(numpy.full(7, rank + step))]),
            mpidist.all_to_all(xp.asarray(numpy.repeat(numpy.arange(size), count)))[0],
        ]
        mpidist.barrier()
        expected = [
            numpy.full(1, step + size - 1, "f4"),
            numpy.full(count, float(root + step)),
            numpy.full(count, size * (size + 1) / 2),
            numpy.full(7, size * step + size * (size - 1) // 2),
            numpy.full(count * size, rank),
        ]
        problems.append(problems_of(xp, found, expected))
    check_on_all_ranks("".join(problems))
