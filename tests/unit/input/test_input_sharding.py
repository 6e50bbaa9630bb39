"""The split of a global batch, for any number of rows and replicas."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.input import sharding


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_parts_cover_the_rows_exactly_once_and_in_order(rows, replicas):
    parts = [sharding.part(rows, replica, replicas) for replica in range(replicas)]
    assert len(parts) == replicas
    assert [row for part in parts for row in part] == list(range(rows))


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_no_part_has_more_than_its_share(rows, replicas):
    lengths = [len(part) for part in [sharding.part(rows, replica, replicas) for replica in range(replicas)]]
    assert max(lengths) == (rows + replicas - 1) // replicas
    assert lengths == sorted(lengths, reverse=True)


@given(st.integers(0, 50), st.integers(1, 6), st.integers(1, 6))
def test_rotated_sizes_sum_to_the_global_batch(global_batch, workers, per_worker):
    cycles = [sharding.rotated_batch_sizes(global_batch, w, workers, per_worker) for w in range(workers)]
    for step in range(0, workers * per_worker, per_worker):
        assert sum(sum(cycle[step : step + per_worker]) for cycle in cycles) == global_batch
    assert all(sum(cycle) == global_batch for cycle in cycles)


@pytest.mark.parametrize(("rows", "replica", "replicas"), [(-1, 0, 1), (4, 2, 2), (4, -1, 2), (4, 0, 0)])
def test_arguments_out_of_range_are_refused(rows, replica, replicas):
    with pytest.raises(ValueError, match=f"{rows} rows|replica {replica}"):
        sharding.part(rows, replica, replicas)
