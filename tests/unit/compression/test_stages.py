"""Stages of compression: error bounds as closed forms, overflow, and what is not finite."""

import ml_dtypes
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.compression import BFloat16, Compression, Float16, TopK


def decoded(stage, values):
    values = numpy.asarray(values)
    nbytes = stage.code_bytes(values.size, values.dtype)
    code, found = numpy.full(nbytes, 255, "u1"), numpy.full_like(values, 7)
    given_values = values.copy()
    stage.encode(values, code)
    stage.decode(code, found)
    numpy.testing.assert_array_equal(values, given_values)
    total = numpy.ones_like(values)
    with numpy.errstate(over="ignore"):
        stage.add(code, total)
        numpy.testing.assert_array_equal(total, 1 + found)
    return found


def bound_of(stage, values):
    """Return the greatest error of each value, as the documentation of the stages has it."""
    sizes = numpy.abs(values.astype("f8"))
    if isinstance(stage, Float16):
        return numpy.maximum(sizes * 2.0**-11, sizes.max() * 2.0**-39)
    return numpy.maximum(sizes * 2.0**-7.99, 2.0**-134)


#: Largest values from the least normal float32 to the greatest, and what lies far below them.
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([Float16(), BFloat16()]),
    st.sampled_from(["f4", "f8"]),
    st.integers(-110, 127),
    st.integers(0, 60),
    st.integers(1, 40000),
    st.integers(0, 99),
)
def test_errors_are_within_their_bounds(stage, dtype, exponent, spread, count, seed):
    rng = numpy.random.default_rng(seed)
    values = rng.uniform(-1, 1, count) * 2.0 ** (exponent - rng.uniform(0, spread, count))
    values = values.astype(dtype)
    found = decoded(stage, values).astype("f8")
    assert (numpy.abs(found - values) <= bound_of(stage, values)).all()


@pytest.mark.parametrize("stage", [Float16(), BFloat16()])
@pytest.mark.parametrize(("dtype", "largest"), [("f4", 3.4028235e38), ("f8", 1.7976931348623157e308), ("f8", 1e-300)])
def test_no_value_overflows(stage, dtype, largest):
    values = numpy.array([largest, -largest, largest / 4, 0.0], dtype)
    found = decoded(stage, values)
    numpy.testing.assert_allclose(found[:3] / values[:3], 1, rtol=2.0**-8)
    assert numpy.isfinite(found).all() and found[3] == 0


def test_what_float16_itself_would_lose_is_kept():
    values = numpy.array([1e-9, -3e-9, 65536.0 * 2**-40], "f4")
    assert (values.astype("f2") == 0).any()
    numpy.testing.assert_allclose(decoded(Float16(), values), values, rtol=2.0**-11)


@pytest.mark.parametrize("stage", [Float16(), BFloat16(), TopK(0.5), TopK(0.5, values=Float16())])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_what_is_not_finite_stays_what_it_is(stage, dtype):
    values = numpy.array([numpy.inf, -numpy.inf, numpy.nan, 2.0, 1.0, 0.5, 0.25, 0.125], dtype)
    numpy.testing.assert_array_equal(decoded(stage, values)[:4], values[:4])


@pytest.mark.parametrize("stage", [Float16(), BFloat16(), TopK(0.3)])
@pytest.mark.parametrize("value", [0.0, numpy.nan, numpy.inf])
def test_values_that_are_all_alike(stage, value):
    found = decoded(stage, numpy.full(10, value, "f4"))
    sent = 3 if isinstance(stage, TopK) else 10
    is_same = numpy.isnan(found) if numpy.isnan(value) else found == value
    assert is_same.sum() == (10 if value == 0 else sent)


def test_bfloat16_rounds_as_ml_dtypes_does():
    patterns = numpy.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype="u4")
    values = patterns.view("f4")
    values = values[~(numpy.abs(values) >= 2.0**126)]  # all that is not scaled; NaNs of all payloads among it
    values = numpy.concatenate([values, numpy.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF], "u4").view("f4")])
    assert numpy.isnan(values).sum() > 100
    with numpy.errstate(invalid="ignore"):  # ml_dtypes says so of NaNs
        expected = values.astype(ml_dtypes.bfloat16).astype("f4")
    numpy.testing.assert_array_equal(decoded(BFloat16(), values), expected)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3000), st.sampled_from([0.001, 0.1, 0.5, 1.0]), st.integers(0, 99))
def test_top_k_sends_the_largest_as_they_are(count, ratio, seed):
    values = numpy.random.default_rng(seed).permutation(count) - count / 3 - 0.1  # no two of one magnitude
    sent = max(1, round(count * ratio))
    expected = numpy.zeros(count)
    places = sorted(range(count), key=lambda place: -abs(values[place]))[:sent]
    expected[places] = values[places]
    numpy.testing.assert_array_equal(decoded(TopK(ratio), values), expected)
    halves = decoded(TopK(ratio, values=Float16()), values)
    assert (numpy.abs(halves - expected) <= bound_of(Float16(), expected)).all()


def test_codes_are_as_short_as_they_say():
    single = numpy.dtype("f4")
    assert Float16().code_bytes(1000, single) == BFloat16().code_bytes(1000, single) == 2008
    assert TopK(0.01).code_bytes(1000, single) == 10 * (4 + 4)
    assert TopK(0.01, values=Float16()).code_bytes(1000, numpy.dtype("f8")) == 10 * 4 + 8 + 20


@pytest.mark.parametrize("ratio", [0, -1, 1.5, float("nan")])
def test_a_ratio_that_is_none_is_refused(ratio):
    with pytest.raises(ValueError, match="ratio must be above 0"):
        TopK(ratio)


def test_a_class_in_place_of_a_stage_is_refused():
    with pytest.raises(TypeError, match="values must be a Compression"):
        TopK(0.1, values=Float16)


def test_too_many_values_for_positions_of_32_bits():
    with pytest.raises(ValueError, match="positions of 32 bits"):
        TopK(0.1).code_bytes((1 << 32) + 1, numpy.dtype("f4"))


def test_a_stage_shows_its_settings():
    assert repr(TopK(0.5, values=Float16())) == (
        "TopK(error_feedback=True, ratio=0.5, values=Float16(error_feedback=False))"
    )


def test_a_base_class_is_no_stage():
    with pytest.raises(TypeError, match="abstract"):
        Compression()
