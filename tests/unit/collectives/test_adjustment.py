"""Factors of an all-reduce, and arrays that some ranks do not have: closed forms on loopback ranks."""

from __future__ import annotations

import ml_dtypes
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.arrays import as_host
from mpidist.errors import CollectiveMismatchError, UnsupportedDtypeError
from mpidist.testing import run_ranks
from mpidist.testing.device import on_device, pretended_device
from mpidist.world import world_communicator

#: One short array, a short list of one dtype, one of two dtypes, a long list.
SHAPES = {
    "array": [((3,), "f4")],
    "short": [((2, 3), "f4"), ((), "f4"), ((5,), "f4")],
    "mixed": [((2,), "f8"), ((3,), "f4"), ((4,), "c16")],
    "long": [((40, 50), "f4"), ((7,), "f4"), ((0,), "f4")],
    "16 bits": [((3,), "f2"), ((700,), "f2")],
    "bfloat16": [((3,), ml_dtypes.bfloat16)],
}
places = pytest.mark.parametrize("hosts", [["a"] * 3, list("aab")], ids=["one node", "nodes"])
kinds = pytest.mark.parametrize("kind", SHAPES)


def _arrays(kind, value):
    return [numpy.full(shape, value, dtype) for shape, dtype in SHAPES[kind]]


def _check(results, kind, value):
    """Fail unless all results have this value in the dtype of their arrays."""
    for result, expected in zip(results, _arrays(kind, value), strict=True):
        assert result.dtype == expected.dtype and result.shape == expected.shape
        numpy.testing.assert_array_equal(result, expected)


@places
@kinds
@pytest.mark.parametrize(("op", "expected"), [("sum", 6.0), ("mean", 2.0), ("min", 1.0), ("max", 3.0), ("prod", 6.0)])
def test_factors_before_and_after_the_reduction(kind, op, expected, hosts):
    """Halves and quarters are exact, so that results are."""
    if kind == "mixed" and op in ("min", "max"):
        pytest.skip("complex numbers have no order")
    power = 3 if op == "prod" else 1

    def on_rank():
        communicator = world_communicator()
        value = communicator.rank + 1.0
        before = communicator.all_reduce_init(_arrays(kind, 0.0), op, prescale=0.5)
        after = communicator.all_reduce_init(_arrays(kind, 0.0), op, postscale=0.25)
        both = communicator.all_reduce_init(_arrays(kind, 0.0), op, prescale=0.5, postscale=4.0)
        for _ in range(3):
            given = _arrays(kind, value)
            _check(before(given), kind, expected * 0.5**power)
            _check(after(given), kind, expected * 0.25)
            _check(both.start(given).wait(), kind, expected * 0.5**power * 4)
            _check(given, kind, value)

    run_ranks(3, on_rank, hosts=hosts)


@pytest.mark.parametrize("why_no_link", ["", "none is wanted"], ids=["link", "staged"])
@kinds
def test_factors_of_arrays_on_a_device(kind, why_no_link):
    def on_rank():
        communicator = world_communicator()
        like = list(map(on_device, _arrays(kind, 0.0)))
        bound = communicator.all_reduce_init(like, "mean", prescale=0.5, postscale=4.0)
        for _ in range(2):
            given = list(map(on_device, _arrays(kind, communicator.rank + 1.0)))
            _check(map(as_host, bound(given)), kind, 5.0)
            _check(map(as_host, given), kind, communicator.rank + 1.0)

    with pretended_device(why_no_link):
        run_ranks(4, on_rank)


def test_a_factor_before_the_sum_keeps_it_from_overflowing():
    def on_rank():
        communicator = world_communicator()
        huge = numpy.full(5, 3e38, "f4")
        with numpy.errstate(over="ignore"):
            (plain,) = communicator.all_reduce_list([huge])
        (scaled,) = communicator.all_reduce_init([huge], prescale=0.25, postscale=2.0)([huge])
        return bool(numpy.isinf(plain).all()), (scaled == numpy.float32(3e38)).all()

    assert run_ranks(2, on_rank) == [(True, True)] * 2


@places
def test_16_bit_floats_are_multiplied_in_32_bits_in_short_and_in_long_lists(hosts):
    value, factor = numpy.float16(1.001), 0.3
    expected = numpy.float16(numpy.float32(value) * numpy.float32(factor) * 3)

    def on_rank():
        communicator = world_communicator()
        found = []
        for count in (3, 3000):
            given = [numpy.full(count, value, "f2")]
            found += communicator.all_reduce_init(given, prescale=factor)(given)
        return [{*each.tolist()} for each in found]

    assert run_ranks(3, on_rank, hosts=hosts) == [[{float(expected)}, {float(expected)}]] * 3


@pytest.mark.parametrize("as_given", [numpy.float64, numpy.float32, numpy.float16])
def test_numbers_of_numpy_are_multiplied_by_as_pythons_are(as_given):
    """NumPy's product of a float32 array and a float64 number is a float64, and 1/3 of a float16 is a float16."""
    prescale, postscale = as_given(1 / 3), as_given(0.1)
    shapes = [[(3, "f4")], [(3, "f8")], [(3, "f4"), (2, "f8")], [(3000, "f4"), (70, "f4")], [(3, "f2"), (3000, "f2")]]

    def on_rank():
        communicator = world_communicator()
        for shape in shapes:
            values = [numpy.linspace(1, 2 + communicator.rank, length).astype(dtype) for length, dtype in shape]
            for to_kind in (list, lambda given: list(map(on_device, given))):
                given = to_kind(values)
                expected, found = (
                    communicator.all_reduce_init(given, "mean", prescale=before, postscale=after)(given)
                    for before, after in ((float(prescale), float(postscale)), (prescale, postscale))
                )
                for own, other in zip(found, expected, strict=True):
                    numpy.testing.assert_array_equal(as_host(own), as_host(other))

    with pretended_device():
        run_ranks(3, on_rank)


@pytest.mark.parametrize(("dtype", "told"), [("f4", "float32"), ("f2", "float32"), ("c8", "complex64")])
@pytest.mark.parametrize("factor", [1e300, 1e-300])
def test_a_factor_that_is_0_or_infinite_in_the_dtype_of_sums_is_an_error(dtype, told, factor):
    def on_rank():
        communicator = world_communicator()
        for name in ("prescale", "postscale"):
            with pytest.raises(ValueError, match=f"^{name} must be a finite number other than 0 in {told}, in which "):
                communicator.all_reduce_init([numpy.ones(2, dtype)], **{name: factor})
            (found,) = communicator.all_reduce_init([numpy.ones(2)], **{name: factor})([numpy.ones(2)])
            assert found.tolist() == [2 * factor] * 2

    run_ranks(2, on_rank)


def test_the_mean_of_integers_may_be_multiplied_and_their_sum_may_not():
    def on_rank():
        communicator = world_communicator()
        given = [numpy.full(3, communicator.rank + 1)]
        (mean,) = communicator.all_reduce_init(given, "mean", prescale=0.5, postscale=3.0)(given)
        calls = communicator.control.call
        for factors in ({"prescale": 0.5}, {"postscale": 2.0}):
            with pytest.raises(
                UnsupportedDtypeError, match="int64 arrays, whose values would be rounded to whole numbers"
            ):
                communicator.all_reduce_init(given, **factors)
        for factor in (0.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="must be a finite number other than 0"):
                communicator.all_reduce_init([numpy.ones(2)], prescale=factor)
        assert communicator.control.call == calls
        return mean.dtype.name, mean.tolist()

    assert run_ranks(2, on_rank) == [("float64", [2.25] * 3)] * 2


def test_ranks_that_multiply_by_other_factors_are_named():
    def on_rank():
        communicator = world_communicator()
        given = [numpy.ones(3, "f4")]
        bound = communicator.all_reduce_init(given, prescale=0.5 + communicator.rank)
        with pytest.raises(CollectiveMismatchError, match="prescale: 1.5 on rank 1, 0.5 on rank 0"):
            bound(given)

    run_ranks(2, on_rank)


# -- None -------------------------------------------------------------------------------------------------------------


@places
@given(
    kind=st.sampled_from(sorted(SHAPES)),
    op=st.sampled_from(["sum", "mean"]),
    lacks=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=3, max_size=3),
    bound=st.booleans(),
)
def test_what_is_none_counts_as_zeros_and_stays_none_where_all_have_none(hosts, kind, op, lacks, bound):
    """``lacks[rank][array]``; more arrays than a list has do not count."""
    count = len(SHAPES[kind])

    def on_rank():
        communicator = world_communicator()
        rank = communicator.rank
        given = [None if lacks[rank][at] else each for at, each in enumerate(_arrays(kind, 3.0 * (rank + 1)))]
        if bound:
            call = communicator.all_reduce_init(_arrays(kind, 0.0), op, none_as_zeros=True)
            return [call(given), call.start(given).wait()]
        from mpidist.collectives.reductions.adjustment import Adjustment

        return [communicator.all_reduce_list(given, op, Adjustment(none_as_zeros=True)) for _ in range(2)]

    sums = [sum(3.0 * (rank + 1) for rank in range(3) if not lacks[rank][at]) for at in range(count)]
    there = [any(not lacks[rank][at] for rank in range(3)) for at in range(count)]
    for results in run_ranks(3, on_rank, hosts=hosts):
        for found in results:
            for at, each in enumerate(found):
                if not there[at]:
                    assert each is None
                    continue
                expected = _arrays(kind, sums[at] / (3 if op == "mean" else 1))[at]
                assert each.dtype == expected.dtype
                numpy.testing.assert_array_equal(each, expected)


def test_zeros_go_with_factors_and_with_integers():
    def on_rank():
        communicator = world_communicator()
        rank = communicator.rank
        whole = communicator.all_reduce_init([numpy.zeros(2, "i4"), numpy.zeros(1, "i8")], none_as_zeros=True)
        first, second = whole([numpy.full(2, 5, "i4") if rank else None, None])
        like = [numpy.zeros(2, ml_dtypes.bfloat16), numpy.zeros(2, ml_dtypes.bfloat16)]
        scaled = communicator.all_reduce_init(like, "mean", prescale=0.5, postscale=4.0, none_as_zeros=True)
        third, fourth = scaled([None, None if rank else like[0] + 2])
        return first.tolist(), second, third, fourth.astype("f4").tolist()

    assert run_ranks(2, on_rank) == [([5, 5], None, None, [2.0, 2.0])] * 2


def test_zeros_are_for_sums_and_means_and_for_lists_of_one_length():
    def on_rank():
        communicator = world_communicator()
        calls = communicator.control.call
        with pytest.raises(ValueError, match="none_as_zeros is for sums and means, got 'max'"):
            communicator.all_reduce_init([numpy.ones(2)], "max", none_as_zeros=True)
        with pytest.raises(ValueError, match="in the list to which an all-reduce is bound no array may be None"):
            communicator.all_reduce_init([None], none_as_zeros=True)
        bound = communicator.all_reduce_init([numpy.ones(2)], none_as_zeros=True)
        with pytest.raises(ValueError, match="bound to 1 arrays, got 2"):
            bound([None, None])
        assert communicator.control.call == calls
        return bound([numpy.ones(2)])[0].tolist()

    assert run_ranks(2, on_rank) == [[2.0, 2.0]] * 2


def test_a_rank_that_does_not_ask_for_zeros_is_named():
    def on_rank():
        communicator = world_communicator()
        given = [numpy.ones(3, "f4")]
        bound = communicator.all_reduce_init(given, none_as_zeros=communicator.rank == 1)
        with pytest.raises(CollectiveMismatchError, match="rank 1 passed 2 tensors"):
            bound(given)

    run_ranks(2, on_rank)
