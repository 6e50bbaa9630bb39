"""Fused all-reduce on loopback ranks: values, ownership, and calls that do not match."""

import ml_dtypes
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.collectives.engine import Engine
from mpidist.errors import CollectiveMismatchError, RankFailedError
from mpidist.testing import run_ranks
from mpidist.world import world_communicator

SIZES = [1, 2, 3, 4, 8]


def _tensor(rank, index, shape, dtype):
    """Small whole numbers that differ on every rank, tensor and element: their sums are exact in every dtype used."""
    count = int(numpy.prod(shape, dtype=int))
    return ((numpy.arange(count) + index) % 7 + rank).reshape(shape).astype(dtype)


def _sum(size, index, shape, dtype):
    count = int(numpy.prod(shape, dtype=int))
    total = ((numpy.arange(count) + index) % 7) * size + size * (size - 1) // 2
    return total.reshape(shape).astype(dtype)


MIXED = [
    ((3, 4), "f4"),
    ((), "f4"),
    ((5,), "f8"),
    ((0, 2), "f4"),
    ((2, 2), "i4"),
    ((7,), "f2"),
    ((3,), ml_dtypes.bfloat16),
]
KINDS = st.tuples(st.lists(st.integers(0, 4), max_size=3).map(tuple), st.sampled_from(["f4", "f8", "i8"]))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bytes_per_pack", [0, 1, 64])
def test_a_list_of_many_shapes_and_dtypes_is_summed(size, bytes_per_pack):
    def step():
        communicator = world_communicator()
        fused = Engine(communicator, bytes_per_pack)
        tensors = [_tensor(communicator.rank, i, shape, dtype) for i, (shape, dtype) in enumerate(MIXED)]
        return fused(tensors), tensors

    for rank, (results, tensors) in enumerate(run_ranks(size, step)):
        for i, ((shape, dtype), result) in enumerate(zip(MIXED, results, strict=True)):
            assert result.dtype == numpy.dtype(dtype)
            numpy.testing.assert_array_equal(result, _sum(size, i, shape, dtype))
            numpy.testing.assert_array_equal(tensors[i], _tensor(rank, i, shape, dtype))  # unchanged


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from([2, 3]),
    st.lists(KINDS, max_size=8),
    st.integers(1, 300),
)
def test_any_list_is_summed(size, kinds, bytes_per_pack):
    def step():
        communicator = world_communicator()
        fused = Engine(communicator, bytes_per_pack)
        return fused([_tensor(communicator.rank, i, shape, dtype) for i, (shape, dtype) in enumerate(kinds)])

    for results in run_ranks(size, step):
        for i, ((shape, dtype), result) in enumerate(zip(kinds, results, strict=True)):
            numpy.testing.assert_array_equal(result, _sum(size, i, shape, dtype))


@pytest.mark.parametrize(("op", "expected"), [("mean", 2.0), ("min", 1.0), ("max", 3.0), ("prod", 6.0)])
def test_other_reductions_of_1_2_3(op, expected):
    def step():
        communicator = world_communicator()
        return Engine(communicator)([numpy.full(4, communicator.rank + 1.0, "f4")], op)[0]

    for result in run_ranks(3, step):
        numpy.testing.assert_array_equal(result, numpy.full(4, expected, "f4"))


def test_the_mean_of_integers_is_exact_in_float64():
    def step():
        return Engine(world_communicator())([numpy.array([world_communicator().rank, 1])], "mean")[0]

    for result in run_ranks(2, step):
        assert result.dtype == numpy.float64
        numpy.testing.assert_array_equal(result, [0.5, 1.0])


def test_non_contiguous_tensors_are_packed_in_their_logical_order():
    def step():
        rank = world_communicator().rank
        whole = numpy.arange(24.0).reshape(4, 6) + rank
        return Engine(world_communicator())([whole[::2, 1::2], whole.T])

    base = numpy.arange(24.0).reshape(4, 6)
    for strided, transposed in run_ranks(2, step):
        numpy.testing.assert_array_equal(strided, 2 * base[::2, 1::2] + 1)
        numpy.testing.assert_array_equal(transposed, 2 * base.T + 1)


def test_16_bit_floats_are_rounded_once_at_the_end():
    # 2048 + 1 is not a float16: added one by one in 16 bits, the sum would stay at 2048.
    def step():
        rank = world_communicator().rank
        return Engine(world_communicator())([numpy.array([2048.0 if rank == 0 else 1.0], "f2")])[0]

    for result in run_ranks(4, step):
        assert result[0] == numpy.float16(2051.0)


@pytest.mark.parametrize("size, elements", [(1, 300_000), (2, 300_000), (3, 30_000)])
def test_lists_of_many_short_tensors_are_summed_between_other_calls(size, elements):
    """Some go through the places of long calls in one turn, others through two segments, or in shares."""
    lists = [[(2000,)] * 100, [(5, 3)] * 70, [(3 + index % 5,) for index in range(64)]]

    def steps():
        communicator = world_communicator()
        fused, long = Engine(communicator), numpy.empty(elements)
        for step in range(3):
            for shapes in lists:
                for _ in range(2):
                    tensors = [_tensor(communicator.rank, i + step, shape, "f4") for i, shape in enumerate(shapes)]
                    for i, (result, shape) in enumerate(zip(fused(tensors), shapes, strict=True)):
                        assert result.shape == shape and (result == _sum(size, i + step, shape, "f4")).all()
            long[:] = step
            communicator.all_reduce(long)
            assert (long == step * size).all()

    run_ranks(size, steps)


@pytest.mark.parametrize("other", [((4, 64), "f4"), ((256,), "i4"), ((255,), "f4"), ((256, 1), "f4"), ((), "f4")])
def test_many_short_tensors_are_told_from_others_that_are_as_many(other):
    shape, dtype = other

    def steps():
        communicator = world_communicator()
        fused = Engine(communicator)
        first = [_tensor(communicator.rank, i, (256,), "f4") for i in range(100)]
        second = [*first[:50], _tensor(communicator.rank, 50, shape, dtype), *first[51:]]
        for _ in range(3):
            for tensors in (first, second):
                for i, (result, tensor) in enumerate(zip(fused(tensors), tensors, strict=True)):
                    assert (result.shape, result.dtype) == (tensor.shape, tensor.dtype)
                    assert (result == _sum(2, i, tensor.shape, tensor.dtype)).all()

    run_ranks(2, steps)


def test_results_that_somebody_holds_never_change():
    def steps():
        communicator = world_communicator()
        fused = Engine(communicator)
        held = [fused([numpy.full((2, 3), float(step))])[0][1] for step in range(10)]  # a view of a result
        return held

    for held in run_ranks(2, steps):
        for step, row in enumerate(held):
            numpy.testing.assert_array_equal(row, numpy.full(3, 2.0 * step))


@pytest.mark.parametrize("count", [1, 200], ids=["one", "many short ones"])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_changes_on_a_result_is_in_no_later_one(count, rank):
    def steps():
        communicator = world_communicator()
        fused, found = Engine(communicator), []
        for step in range(5):
            results = fused([numpy.full((3, 2), step + 1.0, "f4") for _ in range(count)])
            found.append([(each.dtype.str, each.flags.writeable, each.tolist()) for each in results])
            if communicator.rank == rank:
                results[0].shape = (-1,)
                results[0].dtype = numpy.int32
                results[-1].flags.writeable = False
        return found

    for found in run_ranks(2, steps):
        for step, results in enumerate(found):
            assert results == [("<f4", True, [[2.0 * (step + 1)] * 2] * 3)] * count


def test_results_that_nobody_holds_are_written_again():
    def steps():
        fused = Engine(world_communicator())
        addresses = set()
        for step in range(10):
            (result,) = fused([numpy.full(1000, float(step))])
            addresses.add(result.__array_interface__["data"][0])
            del result
        return len(addresses)

    assert run_ranks(2, steps) == [1, 1]


def test_two_lists_may_alternate_as_in_a_gan():
    def steps():
        communicator = world_communicator()
        fused = Engine(communicator)
        for step in range(6):
            generator, discriminator = numpy.full((3, 2), float(step)), numpy.full(5, communicator.rank + step)
            numpy.testing.assert_array_equal(fused([generator])[0], 2 * generator)
            if step % 2:
                numpy.testing.assert_array_equal(fused([discriminator, generator])[0], numpy.full(5, 1 + 2 * step))

    run_ranks(2, steps)


def test_a_shape_that_changes_after_100_good_steps_is_named_on_all_ranks():
    def steps():
        communicator = world_communicator()
        fused = Engine(communicator)
        for _ in range(100):
            fused([numpy.ones((4, 3), "f4")], names=["w"])
        shape = (4, 5) if communicator.rank == 1 else (4, 3)
        fused([numpy.ones(shape, "f4")], names=["w"])

    with pytest.raises(CollectiveMismatchError) as caught:
        run_ranks(3, steps)
    assert sorted(caught.value.rank_errors) == [0, 1, 2]
    for error in caught.value.rank_errors.values():
        assert "call 101" in str(error)
        assert "rank 1 passed 'w' float32 (4, 5), ranks 0, 2 passed 'w' float32 (4, 3)" in str(error)


def test_lists_of_equal_bytes_and_different_shapes_do_not_match():
    def step():
        shapes = [(2, 3), (6,)] if world_communicator().rank else [(6,), (2, 3)]
        Engine(world_communicator())([numpy.ones(shape) for shape in shapes])

    expected = r"tensor 0: rank 1 passed float64 \(2, 3\), rank 0 passed float64 \(6,\)"
    with pytest.raises(CollectiveMismatchError, match=expected):
        run_ranks(2, step)


def test_different_names_dtypes_counts_and_reductions_do_not_match():
    def step(kind):
        rank = world_communicator().rank
        fused = Engine(world_communicator())
        one = numpy.ones(3)
        {
            "name": lambda: fused([one], names=["a" if rank else "b"]),
            "dtype": lambda: fused([one.astype("f4") if rank else one]),
            "count": lambda: fused([one, one] if rank else [one]),
            "reduction": lambda: fused([one], "max" if rank else "sum"),
        }[kind]()

    for kind in ("name", "dtype", "count", "reduction"):
        with pytest.raises(CollectiveMismatchError) as caught:
            run_ranks(2, step, kind)
        assert sorted(caught.value.rank_errors) == [0, 1]


@pytest.mark.parametrize(
    ("bytes_per_pack", "algorithm", "said"),
    [
        (
            100,
            None,
            r"rank 1 reduce by shared_memory .* in 1 pack of 1600 bytes, rank 0 by shared_memory .* in 2 packs",
        ),
        (0, "ring", r"rank 1 reduce by shared_memory .* in 1 pack of 1600 bytes, rank 0 by ring in 1 pack"),
    ],
)
def test_packs_and_algorithms_that_differ_do_not_match(bytes_per_pack, algorithm, said):
    def step():
        communicator = world_communicator()
        options = (bytes_per_pack, algorithm) if communicator.rank == 0 else ()
        Engine(communicator, *options)([numpy.ones(100), numpy.ones(100)])

    with pytest.raises(CollectiveMismatchError, match=said):
        run_ranks(2, step)


def test_one_rank_that_skips_one_call_is_found_in_the_next():
    def steps():
        communicator = world_communicator()
        fused = Engine(communicator)
        if communicator.rank != 1:
            fused([numpy.ones(3)], names=["generator"])
        fused([numpy.ones(5)], names=["discriminator"])

    with pytest.raises(CollectiveMismatchError, match="rank 1 passed 'discriminator'.*ranks 0, 2 passed 'generator'"):
        run_ranks(3, steps)


def test_one_rank_that_skips_the_last_call_is_named_by_the_others():
    def steps():
        communicator = world_communicator()
        fused = Engine(communicator)
        for _ in range(3 if communicator.rank == 1 else 4):
            fused([numpy.ones(3)])

    with pytest.raises(RankFailedError, match=r"rank 1 .*left .* after 3 collective calls.*call 4"):
        run_ranks(3, steps)


def test_the_communicator_works_on_after_a_mismatch_that_was_caught():
    def steps():
        fused = Engine(world_communicator())
        with pytest.raises(CollectiveMismatchError):
            fused([numpy.ones(2 + world_communicator().rank)])
        return fused([numpy.ones(2)])[0].tolist()

    assert run_ranks(2, steps) == [[2.0, 2.0], [2.0, 2.0]]


def test_names_must_be_as_many_as_tensors():
    with pytest.raises(ValueError, match="2 tensors and 1 names"):
        Engine(world_communicator())([numpy.ones(1), numpy.ones(1)], names=["a"])
