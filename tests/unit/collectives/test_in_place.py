"""Lists reduced in place: values as closed forms, on one node and on several, and what is refused."""

import ml_dtypes
import numpy
import pytest

from mpidist.collectives.reductions.in_place import bind_in_place
from mpidist.errors import CollectiveMismatchError, UnsupportedDtypeError
from mpidist.testing import run_ranks
from mpidist.world import world_communicator

SHAPES = [(3, 4), (), (5,), (0, 2), (2, 2, 2)]
LONG = [(700, 3), (1,), (), (2111,)]
MIXED = [("f4", (3, 4)), ("f8", (600,)), ("f2", (7,)), ("c8", (2,)), (ml_dtypes.bfloat16, (4, 1)), ("f4", (900,))]

LISTS = {
    "short": [("f4", shape) for shape in SHAPES],
    "long": [("f8", shape) for shape in LONG],
    "16 bits": [("f2", shape) for shape in LONG],
    "mixed": MIXED,
    "one scalar of 16 bits": [("f2", ())],
    "one matrix": [("f4", (2, 3))],
    "one matrix of 16 bits": [("f2", (2, 3))],
    "empty": [],
    "no elements": [("f4", (0,)), ("f4", (0, 3))],
}


def values(rank, dtype, shape):
    """Whole numbers, whose sums are exact in every dtype."""
    count = int(numpy.prod(shape, dtype=int))
    return ((numpy.arange(count) % 5) * 4 + 4 * rank).reshape(shape).astype(dtype)


def signatures(kinds):
    return [(f"w{number}", numpy.dtype(dtype), shape) for number, (dtype, shape) in enumerate(kinds)]


def placed(size):
    return [["localhost"] * size, [f"n{rank // 2}" for rank in range(size)], [f"n{rank}" for rank in range(size)]]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("nodes", [0, 1, 2])
@pytest.mark.parametrize("kinds", LISTS.values(), ids=LISTS)
def test_sums_and_means_lie_where_the_values_lay(size, nodes, kinds):
    def step():
        communicator = world_communicator()
        found = []
        for op in ("sum", "mean"):
            bound = bind_in_place(communicator, signatures(kinds), op)
            for turn in range(3):
                arrays = [values(communicator.rank + turn, *kind) for kind in kinds]
                held = list(arrays)
                assert all(map(lambda a, b: a is b, bound(arrays), held))
                found.append((op, turn, arrays))
        return found

    for results in run_ranks(size, step, hosts=placed(size)[nodes]):
        for op, turn, arrays in results:
            for array, (dtype, shape) in zip(arrays, kinds, strict=True):
                total = sum(values(rank + turn, "f8", shape) for rank in range(size))
                if op == "mean":
                    total = total / size
                assert array.dtype == numpy.dtype(dtype) and array.shape == shape
                numpy.testing.assert_allclose(array.astype("c16").real, total, rtol=4e-2 if size == 3 else 0)


@pytest.mark.parametrize("op, expected", [("max", 3), ("min", 1), ("prod", 6)])
def test_other_operations(op, expected):
    def step():
        communicator = world_communicator()
        array = numpy.full((2, 3), communicator.rank + 1)
        bind_in_place(communicator, [("", array.dtype, array.shape)], op)([array])
        return (array == expected).all()

    assert all(run_ranks(3, step))


def test_all_ranks_have_the_same_bits():
    def step():
        communicator = world_communicator()
        arrays = [numpy.random.default_rng(communicator.rank).normal(size=shape).astype("f4") for shape in LONG]
        bind_in_place(communicator, [("", each.dtype, each.shape) for each in arrays], "mean")(arrays)
        return b"".join(each.tobytes() for each in arrays)

    for hosts in placed(3):
        assert len({*run_ranks(3, step, hosts=hosts)}) == 1


def test_a_call_may_be_started_and_waited_for():
    def step():
        communicator = world_communicator()
        arrays = [numpy.full(4, 1.0 + communicator.rank)]
        bound = bind_in_place(communicator, [("", arrays[0].dtype, (4,))])
        handle = bound.start(arrays)
        assert (arrays[0] == 1.0 + communicator.rank).all()
        handle.wait()
        return (arrays[0] == 3).all()

    assert all(run_ranks(2, step))


@pytest.mark.parametrize("other", [("w0", "f4", (5,)), ("w0", "f8", (4,)), ("bias", "f4", (4,))])
def test_ranks_that_differ_are_named_with_the_tensor(other):
    def step():
        communicator = world_communicator()
        name, dtype, shape = other if communicator.rank == 1 else ("w0", "f4", (4,))
        with pytest.raises(CollectiveMismatchError, match="rank 1"):
            bind_in_place(communicator, [(name, numpy.dtype(dtype), shape)])([numpy.zeros(shape, dtype)])
        array = numpy.ones(2)
        bind_in_place(communicator, [("", array.dtype, (2,))])([array])
        return (array == 2).all()

    assert all(run_ranks(2, step))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("given", [numpy.zeros((3, 2), "f4"), numpy.zeros((2, 3), "f8"), numpy.zeros((3, 2), "f4").T])
def test_arrays_of_another_kind_are_refused_before_anything_moves(size, given):
    def step():
        communicator = world_communicator()
        bound = bind_in_place(communicator, [("", numpy.dtype("f4"), (2, 3))])
        with pytest.raises(ValueError, match="bound to other arrays|C-contiguous"):
            bound([given.copy(order="K")])
        array = numpy.ones((2, 3), "f4")
        bound([array])
        return (array == size).all()

    assert all(run_ranks(size, step))


@pytest.mark.parametrize(
    "given, text",
    [
        ([("f4", (2, 3)), ("f4", (4, 1))], r"expected float32\[4\] as number 1, got float32\[4, 1\]"),
        ([("f4", (2, 3)), ("f8", (4,))], r"expected float32\[4\] as number 1, got float64\[4\]"),
        ([("f4", (2, 3))], "expected 2 arrays, got 1"),
    ],
)
def test_what_was_expected_is_said_of_the_first_array_that_differs(given, text):
    def step():
        bound = bind_in_place(world_communicator(), signatures([("f4", (2, 3)), ("f4", (4,))]))
        with pytest.raises(ValueError, match=rf"rank \d.*w0 float32\[2, 3\] and 1 more.*{text}"):
            bound([numpy.zeros(shape, dtype) for dtype, shape in given])

    run_ranks(2, step)


def test_a_mean_of_integers_has_no_place():
    with pytest.raises(UnsupportedDtypeError, match="mean of int64 arrays is float64"):
        run_ranks(1, lambda: bind_in_place(world_communicator(), [("", numpy.dtype("i8"), (2,))], "mean"))


@pytest.mark.parametrize("size", [1, 2])
def test_what_cannot_be_written_is_refused_before_anything_moves(size):
    def step():
        communicator = world_communicator()
        for elements in (5, 90_000):
            bound = bind_in_place(communicator, signatures([("f4", (elements,))] * 2), "sum")
            one, fixed = numpy.ones(elements, "f4"), numpy.ones(elements, "f4")
            fixed.flags.writeable = False
            calls = communicator.control.call
            with pytest.raises(ValueError, match="read-only"):
                bound([one, fixed])
            assert communicator.control.call == calls
            bound([one, one.copy()])
            assert (one == size).all()
        return True

    assert run_ranks(size, step) == [True] * size


def test_short_arrays_may_share_memory_since_all_values_are_read_before_a_result_is_written():
    def step():
        whole = numpy.arange(5.0)
        bind_in_place(world_communicator(), signatures([("f8", (4,))] * 2), "sum")([whole[:4], whole[1:]])
        return whole.tolist()

    assert run_ranks(2, step) == [[0.0, 2.0, 4.0, 6.0, 8.0]] * 2


def test_long_arrays_that_share_memory_are_refused_or_they_were_reduced_twice():
    def step():
        communicator = world_communicator()
        bound = bind_in_place(communicator, signatures([("f4", (90_000,))] * 2), "sum")
        whole = numpy.ones(180_000, "f4")
        for pair in ([whole[:90_000]] * 2, [whole[:90_000], whole[1:90_001]]):
            with pytest.raises(ValueError, match="share memory"):
                bound(pair)
        bound([whole[90_000:], whole[:90_000]])  # neighbours
        return bool((whole == 2).all())

    assert run_ranks(2, step) == [True, True]
