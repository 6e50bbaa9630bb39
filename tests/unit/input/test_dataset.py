"""Data sets: which rows come in which order, the same for every replica."""

from __future__ import annotations

from collections import namedtuple

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.input import ArraySpec, Dataset, DistributedDataset


class CountingRows(numpy.ndarray):
    """Rows that count how many of them were taken."""

    taken = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        CountingRows.taken += len(found)
        return found


@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 9), st.integers(0, 3), st.booleans())
def test_any_number_of_replicas_sees_the_global_batches(rows, batch, replicas, seed, drop):
    dataset = Dataset.from_arrays(numpy.arange(rows)).shuffle(seed=seed).batch(batch, drop_remainder=drop)
    whole = DistributedDataset(dataset, 0, 1)
    split = [DistributedDataset(dataset, r, replicas) for r in range(replicas)]
    for _ in range(2):
        parts = zip(*split, strict=True)
        for expected, found in zip(whole, parts, strict=True):
            assert numpy.concatenate(found).tolist() == expected.tolist()


@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 5))
def test_batches_of_repetitions_are_cut_from_one_long_row_of_rows(rows, batch, count):
    repeated = Dataset.from_arrays(numpy.arange(rows)).repeat(count)
    batches = [b.tolist() for b in repeated.batch(batch)]
    assert sum(batches, []) == list(range(rows)) * count
    assert {len(b) for b in batches[:-1]} <= {batch}
    assert len(repeated.batch(batch)) == len(batches)
    assert len(repeated) == rows * count


def test_every_epoch_has_all_rows_in_an_order_of_its_own():
    distributed = DistributedDataset(Dataset.from_arrays(numpy.arange(100)).shuffle(seed=1).batch(10), 0, 1)
    first, second = (numpy.concatenate(list(distributed)).tolist() for _ in range(2))
    assert first != second
    assert sorted(first) == sorted(second) == list(range(100))


def test_repetitions_after_a_shuffle_differ_and_seeds_differ():
    def order(seed):
        return numpy.concatenate(list(Dataset.from_arrays(numpy.arange(50)).shuffle(50, seed).repeat(2).batch(10)))

    assert order(0)[:50].tolist() != order(0)[50:].tolist()
    assert order(0).tolist() != order(1).tolist()
    assert order(None).tolist() == order(0).tolist()


def test_a_data_set_without_end_has_no_length():
    endless = Dataset.from_arrays(numpy.arange(3)).repeat().batch(2)
    with pytest.raises(TypeError, match="repeats forever"):
        len(endless)
    parts = iter(DistributedDataset(endless, 0, 1))
    assert [next(parts).tolist() for _ in range(4)] == [[0, 1], [2, 0], [1, 2], [0, 1]]
    assert list(Dataset.from_arrays(numpy.arange(0)).repeat().batch(2)) == []


def test_only_this_replicas_rows_are_taken():
    rows = numpy.zeros((1000, 3)).view(CountingRows)
    CountingRows.taken = 0
    parts = list(DistributedDataset(Dataset.from_arrays(rows).shuffle(seed=0).batch(100), 1, 4))
    assert sum(map(len, parts)) == CountingRows.taken == 250


def test_parts_are_copies():
    rows = numpy.zeros(4)
    for part in DistributedDataset(Dataset.from_arrays(rows).batch(4), 0, 2):
        part += 1
    assert rows.tolist() == [0] * 4


def test_rows_of_objects_are_given_one_by_one():
    dataset = Dataset.from_arrays((numpy.array(["a", "bc", None], object), numpy.arange(3)))
    assert list(dataset) == [("a", 0), ("bc", 1), (None, 2)]
    assert [batch.tolist() for batch in dataset.filter(lambda text, _: text).map(lambda _, n: n).batch(3)] == [[0, 1]]


def test_structures_keep_their_type():
    pair = namedtuple("pair", "x y")
    dataset = Dataset.from_arrays({"p": pair([1, 2, 3], numpy.zeros((3, 2))), "n": (numpy.ones(3, "int8"),)}).batch(2)
    first = next(iter(dataset))
    assert isinstance(first["p"], pair)
    assert first["p"].x.tolist() == [1, 2]
    assert dataset.element_spec["n"] == (ArraySpec((None,), numpy.dtype("int8")),)


def test_from_tensors_is_one_element():
    dataset = Dataset.from_tensors(([1.0], [2.0]))
    assert len(dataset) == 1
    assert [(x.tolist(), y.tolist()) for x, y in dataset] == [([1.0], [2.0])]
    assert [x.shape for x, _ in dataset.repeat(5).batch(2)] == [(2, 1), (2, 1), (1, 1)]


@pytest.mark.parametrize("arrays", [(), 3.0, (numpy.zeros(3), numpy.zeros(4)), {"x": numpy.zeros(3), "y": 1}])
def test_arrays_without_a_common_first_dimension_are_refused(arrays):
    with pytest.raises(ValueError, match="common first dimension"):
        Dataset.from_arrays(arrays)


def test_batches_are_elements_too():
    batches = Dataset.from_arrays(numpy.arange(6)).batch(2)
    assert sorted(b.tolist() for b in batches.shuffle(seed=0)) == [[0, 1], [2, 3], [4, 5]]
    assert [b.tolist() for b in batches.batch(2)] == [[[0, 1], [2, 3]], [[4, 5]]]
    assert [b.tolist() for b in batches.skip(1).take(1).repeat(2)] == [[2, 3], [2, 3]]
    with pytest.raises(ValueError, match="elements of one batch must have one shape"):
        list(Dataset.from_arrays(numpy.arange(5)).batch(2).batch(3))


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_has_rows(size):
    with pytest.raises(ValueError, match=f"batch_size must be 1 or more, got {size}"):
        Dataset.from_arrays(numpy.arange(4)).batch(size)


@given(st.integers(0, 12), st.integers(1, 4), st.integers(1, 4))
def test_position_restores_on_another_number_of_replicas(taken, before, after):
    dataset = Dataset.from_arrays(numpy.arange(23)).shuffle(seed=3).batch(5)
    whole = DistributedDataset(dataset, 0, 1)
    expected = [part.tolist() for _ in range(4) for part in whole]
    first = DistributedDataset(dataset, 0, before)
    seen = 0
    while seen < taken:
        for _ in first:
            seen += 1
            if seen == taken:
                break
    resumed = [DistributedDataset(dataset, r, after) for r in range(after)]
    for one in resumed:
        one.restore(first.state())
    parts = [numpy.concatenate(step).tolist() for _ in range(2) for step in zip(*resumed, strict=True)]
    assert parts == expected[taken : taken + len(parts)]
    assert len(parts) >= 5


def test_a_loop_that_was_left_early_is_followed_by_the_next_epoch():
    distributed = DistributedDataset(Dataset.from_arrays(numpy.arange(6)).batch(2), 0, 1)
    for _ in distributed:
        break
    assert distributed.state() == {"feed": "global batches", "epoch": 0, "rows": 2, "of": ["6 rows of int64[]"]}
    assert len(list(distributed)) == 3
    assert (distributed.state()["epoch"], distributed.state()["rows"]) == (2, 0)
    assert distributed.epoch == 2


@pytest.mark.parametrize("columns", [(), (2,)])
@pytest.mark.parametrize("make", [
    lambda data: data.repeat(2),
    lambda data: data.cache(),
    lambda data: data.map(lambda row: row),
])  # fmt: skip
def test_masks_stay_where_rows_are_joined(make, columns):
    """On one rank a batch crosses the repetition; on four each has a row of it."""
    rows = numpy.ma.arange(10).reshape(5, 2) if columns else numpy.ma.arange(5)
    rows[4] = numpy.ma.masked
    for ranks in (1, 4):
        batches = [
            batch
            for rank in range(ranks)
            for batch in DistributedDataset(make(Dataset.from_arrays(rows)).batch(4), rank, ranks)
        ]
        masked = sum(numpy.ma.getmaskarray(batch).sum() for batch in batches)
        of_all = sum(len(batch) for batch in batches)
        # the dtype of a number that is masked is lost by NumPy
        assert {batch.dtype for batch in batches if not numpy.ma.getmaskarray(batch).all()} == {rows.dtype}
        assert masked * 5 == of_all * (columns or (1,))[0]


@pytest.mark.parametrize("kind", [numpy.ma.MaskedArray, numpy.matrix])
def test_arrays_of_a_subclass_come_out_as_they_went_in(kind):
    rows = numpy.ma.array(numpy.arange(12.0).reshape(6, 2), mask=numpy.eye(6, 2)).view(kind)
    batches = list(DistributedDataset(Dataset.from_arrays(rows).batch(2), 0, 1))
    assert [type(batch) for batch in batches] == [kind] * 3
    if kind is numpy.ma.MaskedArray:
        assert [batch.mask.sum() for batch in batches] == [2, 0, 0]
