"""Placement: who holds what, and which rows a shard has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.experimental import partitioners
from mpidist.parameter_server.placement import Placement, shard_count, shard_offsets


@given(st.integers(1, 9), st.lists(st.integers(0, 1000), max_size=40))
def test_round_robin_counts_creations_whatever_their_size(servers, sizes):
    placement = Placement(servers)
    assert [placement.place(size) for size in sizes] == [number % servers for number in range(len(sizes))]


@given(st.integers(1, 9), st.lists(st.integers(0, 1000), max_size=40))
def test_by_bytes_no_two_servers_differ_by_more_than_the_largest_variable(servers, sizes):
    placement, held = Placement(servers, "bytes"), [0] * servers
    for size in sizes:
        held[placement.place(size)] += size
    assert sum(held) == sum(sizes)
    assert max(held) - min(held) <= max(sizes, default=0)


@given(st.integers(1, 500), st.data())
def test_shards_are_even_and_cover_all_rows(rows, data):
    shards = data.draw(st.integers(1, rows))
    offsets = shard_offsets(rows, shards)
    lengths = [stop - start for start, stop in zip(offsets[:-1], offsets[1:], strict=True)]
    assert (offsets[0], offsets[-1], len(lengths)) == (0, rows, shards)
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1


def test_an_empty_variable_is_one_shard():
    assert shard_offsets(0, 1) == [0, 0]


@pytest.mark.parametrize("rows, shards", [(3, 4), (3, 0), (0, 2)])
def test_rows_that_cannot_be_cut_so(rows, shards):
    with pytest.raises(ValueError, match=f"{rows} rows cannot be cut into {shards} shards"):
        shard_offsets(rows, shards)


@pytest.mark.parametrize("answer", [[2, 2], [1, 3], [2], 2, [2, 1, 1]])
def test_a_partitioner_that_answers_nonsense_is_named(answer):
    with pytest.raises(ValueError, match=r"variable 'w' of shape \(4, 4\).*returned"):
        shard_count(answer, (4, 4), "w")


@given(st.integers(1, 100), st.integers(1, 100), st.integers(1, 1 << 14), st.integers(1, 8))
def test_shards_of_a_largest_size_are_no_larger_but_for_single_rows(rows, columns, limit, itemsize):
    dtype = f"V{itemsize}"
    shards = shard_count(partitioners.MaxSizePartitioner(limit)((rows, columns), dtype), (rows, columns), "w")
    longest = shard_offsets(rows, shards)[1]
    assert longest * columns * itemsize <= max(limit, columns * itemsize)


@pytest.mark.parametrize("servers, rule, message", [(0, "bytes", "at least one ps"), (2, "size", "'round_robin'")])
def test_a_wrong_placement(servers, rule, message):
    with pytest.raises(ValueError, match=message):
        Placement(servers, rule)
