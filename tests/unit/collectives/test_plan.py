"""The fusion plan: every element has one place, in order, dtype by dtype."""

import ml_dtypes
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.collectives.reductions.plan import build
from mpidist.errors import UnsupportedDtypeError

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
SIGNATURES = st.lists(st.tuples(st.just(""), st.sampled_from(["f4", "f8", "i4", "f2"]), SHAPES), max_size=12)


@given(SIGNATURES, st.integers(1, 200))
def test_every_tensor_has_exactly_one_place_of_its_size(signatures, bytes_per_pack):
    plan = build(signatures, "sum", bytes_per_pack)
    places = {}
    for index, bucket in enumerate(plan.buckets):
        assert list(bucket.tensors) == sorted(bucket.tensors)
        for position, start, end in zip(bucket.tensors, bucket.offsets[:-1], bucket.offsets[1:], strict=True):
            assert position not in places
            places[position] = (index, start)
            assert end - start == numpy.prod(signatures[position][2], dtype=int)
    assert sorted(places) == list(range(len(signatures)))


@given(SIGNATURES, st.integers(1, 200))
def test_only_the_last_bucket_of_a_dtype_is_smaller_than_asked(signatures, bytes_per_pack):
    plan = build(signatures, "sum", bytes_per_pack)
    for bucket, following in zip(plan.buckets[:-1], plan.buckets[1:], strict=True):
        same = signatures[bucket.tensors[0]][1] == signatures[following.tensors[0]][1]
        assert bucket.nbytes >= bytes_per_pack or not same
    for bucket in plan.buckets:
        without_last = bucket.offsets[-2] * bucket.dtype.itemsize
        assert without_last < bytes_per_pack


def test_tensors_of_one_dtype_are_fused_across_others():
    plan = build([("", "f4", (2,)), ("", "f8", (3,)), ("", "f4", (4,))], "sum", 1000)
    assert [bucket.tensors for bucket in plan.buckets] == [(0, 2), (1,)]


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
def test_16_bit_floats_are_reduced_in_float32_and_given_back_as_they_were(dtype):
    (bucket,) = build([("", numpy.dtype(dtype), (2,))], "sum", 1000).buckets
    assert bucket.dtype == numpy.float32
    assert bucket.result == numpy.dtype(dtype)


def test_the_mean_of_integers_is_a_float64():
    (bucket,) = build([("", "i4", (2,))], "mean", 1000).buckets
    assert bucket.dtype == bucket.result == numpy.float64


@pytest.mark.parametrize("dtype", ["O", "U3", "M8[s]", "?"])
def test_what_cannot_be_summed_is_an_error(dtype):
    with pytest.raises(UnsupportedDtypeError):
        build([("", numpy.dtype(dtype), (2,))], "sum", 1000)


def test_no_tensors_no_buckets():
    assert build([], "sum", 1000).buckets == ()
