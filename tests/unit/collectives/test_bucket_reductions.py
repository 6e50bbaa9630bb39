"""Every way to reduce tensors through the memory of a node, on the same lists: values, bits, shares, many calls."""

from itertools import product

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.collectives.ways.pieces import Pieces, owned
from mpidist.collectives.ways.selection import Way
from mpidist.testing import run_ranks
from mpidist.world import world_communicator
from tests.helpers.grid import grid

WAYS = [Way("shared_memory", 1 << 20), Way("shared_memory", 256)]
IDS = [f"{name}-{size}" for name, size in WAYS]

#: Algorithm, ranks, elements.  300 000 are many turns.
IN_PLACE = grid(
    [
        *product(["shared_memory"], [2, 3, 4, 8], [1, 9, 1000, 20_000]),
        *product(["shared_memory"], [2], [300_000]),
    ],
    list(product(["shared_memory"], [3, 4, 8], [300_000])),
)


def _offsets(lengths):
    return (0, *numpy.cumsum(lengths).tolist())


def _reduce(way, lengths, values_of, op="sum", scale=None, calls=1, flat=True, transform=None):
    """Reduce ``values_of(rank, call)``, cut into tensors of these lengths; return this rank's results."""
    communicator, offsets = world_communicator(), _offsets(lengths)
    pieces, results = Pieces(offsets), []
    target = Pieces((0, offsets[-1])) if flat else pieces
    dtype = values_of(0, 0).dtype
    reduction = communicator.reduction(way, pieces, target, (dtype, dtype, dtype), op, scale)
    for call in range(calls):
        values = values_of(communicator.rank, call)
        sources = [values[a:b].copy() for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
        out = numpy.full(offsets[-1], -1, dtype)
        targets = [out] if flat else [out[a:b] for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
        with communicator.control.turnstile:
            watch = communicator.begin(communicator.call("test", [("", dtype, values.shape)]))
            change = None if transform is None else lambda start, values, out=out: transform(out, start, values)
            reduction.run(watch, sources, targets, change)
        assert all((source == values[a : a + len(source)]).all() for source, a in zip(sources, offsets, strict=False))
        results.append(out)
    return results


@pytest.mark.parametrize("way", WAYS, ids=IDS)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("flat", [True, False], ids=["one result", "a result a tensor"])
def test_sums_of_lists_of_tensors(way, size, flat):
    lengths = [1, 700, 3, 0, 64, 2000, 5, 5, 5]

    def values(rank, call):
        return (numpy.arange(sum(lengths)) % 11).astype("f4") * (call + 1) + rank

    for results in run_ranks(size, lambda: _reduce(way, lengths, values, calls=3, flat=flat)):
        for call, result in enumerate(results):
            expected = (numpy.arange(sum(lengths)) % 11) * (call + 1) * size + size * (size - 1) // 2
            numpy.testing.assert_array_equal(result, expected)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(WAYS),
    st.sampled_from([2, 3]),
    st.lists(st.integers(0, 300), min_size=1, max_size=8).filter(any),
    st.sampled_from(["sum", "max"]),
)
def test_random_lists_have_the_bits_of_a_sum_in_rank_order(way, size, lengths, op):
    def values(rank, call):
        return numpy.random.default_rng([rank, call]).normal(size=sum(lengths)).astype("f4")

    expected = values(0, 0)
    for rank in range(1, size):
        expected = (expected + values(rank, 0)) if op == "sum" else numpy.maximum(expected, values(rank, 0))
    for (result,) in run_ranks(size, lambda: _reduce(way, lengths, values, op)):
        assert result.tobytes() == expected.tobytes()


@pytest.mark.parametrize("way", WAYS, ids=IDS)
@pytest.mark.parametrize("size", [2, 3])
def test_every_element_is_transformed_on_one_rank_before_all_have_it(way, size):
    lengths, seen = [300, 700, 24], [[] for _ in range(size)]

    def run():
        mine = seen[world_communicator().rank]

        def transform(out, start, values):
            mine.append((start, start + len(values)))
            values *= 10
            out[start : start + len(values)] = values

        return _reduce(way, lengths, lambda rank, call: numpy.full(1024, rank + 1.0), flat=False, transform=transform)

    for (result,) in run_ranks(size, run):
        numpy.testing.assert_array_equal(result, numpy.full(1024, 10.0 * size * (size + 1) / 2))
    covered = sorted(span for spans in seen for span in spans)
    assert [start for start, _ in covered] == [0, *[stop for _, stop in covered[:-1]]]
    assert covered[-1][1] == 1024
    assert all(spans == sorted(spans) for spans in seen)


def test_the_spans_of_a_rank_are_its_shares_of_the_segments():
    def run():
        communicator, pieces = world_communicator(), Pieces((0, 5000))
        dtypes = (numpy.dtype("f4"),) * 3
        found = [communicator.reduction(way, pieces, pieces, dtypes, "sum").owned for way in WAYS]
        lengths = [min(way.segment_bytes, communicator.segments.room) // 4 for way in WAYS]
        return found == [owned(5000, 2 * length, communicator.rank, 2) for length in lengths]

    assert run_ranks(2, run) == [True, True]


@pytest.mark.parametrize("algorithm, size, elements", IN_PLACE)
def test_an_array_is_reduced_in_place(algorithm, size, elements):
    def run():
        communicator = world_communicator()
        own = numpy.arange(elements, dtype="f8") + 10**6 * communicator.rank
        communicator.all_reduce(own, algorithm=algorithm)
        return own

    expected = size * numpy.arange(elements) + 10**6 * size * (size - 1) // 2
    for found in run_ranks(size, run):
        numpy.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("way", WAYS, ids=IDS)
def test_a_mean_is_scaled(way):
    for (result,) in run_ranks(
        4, lambda: _reduce(way, [300], lambda rank, call: numpy.full(300, float(rank)), "sum", 0.25)
    ):
        numpy.testing.assert_array_equal(result, numpy.full(300, 1.5))
