"""What stands for values while NCCL reduces them: NumPy's reductions of it give NumPy's reductions of the values."""

from __future__ import annotations

from contextlib import ExitStack

import numpy
import pytest

from mpidist.device.nccl_values import standing_in

NAN, INF = numpy.nan, numpy.inf


def reduced(ranks, op):
    """Return what each rank has after NCCL's reduction of what stands for its values; the first makes it for all."""
    given = [numpy.array(each) for each in ranks]
    with ExitStack() as stack:
        stood = [stack.enter_context(standing_in(each, op)) for each in given]
        assert len({each.dtype for each in stood}) == 1
        total = NCCL[op](numpy.stack(stood), axis=0, dtype=stood[0].dtype)
        for each in stood:
            each[...] = total
    return given, stood[0].dtype


NCCL = {
    "sum": numpy.add.reduce,
    "prod": numpy.multiply.reduce,
    "min": numpy.minimum.reduce,
    "max": numpy.maximum.reduce,
}


def bits_of(dtype):
    return f"u{numpy.dtype(dtype).itemsize}"


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_extremes_of_floats_of_any_bits(size, op, dtype):
    """NaN of any bits and sign, infinities, subnormals among them."""
    bits, generator = numpy.iinfo(bits_of(dtype)), numpy.random.default_rng(size)
    raw = generator.integers(0, bits.max, (size, 20_000), dtype=bits_of(dtype), endpoint=True)
    tiny = generator.integers(0, 1 << 20, (size, 10_000), dtype=bits_of(dtype))
    tiny |= generator.integers(0, 2, tiny.shape, dtype=bits_of(dtype)) << numpy.array(bits.bits - 1, bits_of(dtype))
    ranks = numpy.concatenate([raw, tiny], axis=1).view(dtype)
    with numpy.errstate(invalid="ignore"):
        expected = NCCL[op](ranks, axis=0)
    assert (size == 1 or numpy.isnan(expected).any()) and (abs(expected) < numpy.finfo(dtype).tiny).any()
    found, kind = reduced(ranks, op)
    assert kind == f"i{kind.itemsize}"
    is_nan, is_zero = numpy.isnan(expected), expected == 0
    for each in found:
        assert each.dtype == dtype and each.tobytes() == found[0].tobytes()
        assert (numpy.isnan(each) == is_nan).all() and (each[is_zero] == 0).all()
        same = each.view(bits_of(dtype)) == expected.view(bits_of(dtype))
        assert same[~is_nan & ~is_zero].all()


PAIRS = [  # two values; the least, the greatest
    (-0.0, 0.0, -0.0, 0.0),
    (1.0, -1.0, -1.0, 1.0),
    (INF, -INF, -INF, INF),
    (INF, 3.4e38, 3.4e38, INF),
    (-INF, -3.4e38, -INF, -3.4e38),
    (NAN, 1.0, NAN, NAN),
    (-NAN, INF, NAN, NAN),
    (-INF, NAN, NAN, NAN),
    (NAN, -NAN, NAN, NAN),
    (1e-45, 0.0, 0.0, 1e-45),
    (-1e-45, -0.0, -1e-45, -0.0),
    (-1e-45, 1e-45, -1e-45, 1e-45),
    (-2.0, -3.0, -3.0, -2.0),
]


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_extremes_of_two(pair, dtype):
    for one, other in (pair[:2], pair[1::-1]):
        for op, expected in zip(("min", "max"), numpy.array(pair[2:], dtype), strict=True):
            for found in reduced(numpy.array([[one], [other]], dtype), op)[0]:
                numpy.testing.assert_array_equal(found, [expected])
                assert numpy.isnan(expected) or numpy.signbit(found[0]) == numpy.signbit(expected)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_one_rank_keeps_all_bits(dtype):
    values = numpy.array([-NAN, -INF, -1.5, -1e-45, -0.0, 0.0, 1e-45, 2.5, INF, NAN], dtype)
    for op in ("min", "max"):
        assert reduced([values], op)[0][0].tobytes() == values.tobytes()


@pytest.mark.parametrize("dtype", ["i2", "u2"])
@pytest.mark.parametrize("op", ["sum", "prod", "min", "max"])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_integers_of_16_bits_wrap_as_numpys(size, op, dtype):
    bounds = numpy.iinfo(dtype)
    ranks = numpy.random.default_rng(size).integers(bounds.min, bounds.max, (size, 30_000), dtype, endpoint=True)
    ranks[:, 0], ranks[:, 1] = bounds.max, bounds.min
    whole = {"sum": sum, "min": min, "max": max}.get(op)
    columns = [[int(each) for each in column] for column in ranks[:, :2000].T]
    exact = [numpy.prod(numpy.array(each, object)) if whole is None else whole(each) for each in columns]
    found, kind = reduced(ranks, op)
    assert kind == f"{dtype[0]}4"
    for each in found:
        assert each.dtype == dtype
        assert (each == NCCL[op](ranks, axis=0, dtype=dtype)).all()
        assert [int(value) % (1 << 16) for value in each[:2000]] == [value % (1 << 16) for value in exact]


@pytest.mark.parametrize(("dtype", "op"), [("f4", "sum"), ("f8", "prod"), ("c8", "sum"), ("i1", "max"), ("?", "min")])
def test_others_stand_for_themselves(dtype, op):
    values = numpy.ones(3, dtype)
    with standing_in(values, op) as found:
        assert found is values


@pytest.mark.parametrize("dtype", ["f4", "f8", "i2"])
def test_no_values(dtype):
    assert reduced(numpy.zeros((2, 0), dtype), "max")[0][1].shape == (0,)
