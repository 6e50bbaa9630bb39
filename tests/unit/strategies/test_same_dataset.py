"""Data sets that differ between ranks are refused where they are distributed, on all ranks, with what differs."""

from __future__ import annotations

import numpy
import pytest

from mpidist.errors import CollectiveMismatchError
from mpidist.input import Dataset
from mpidist.strategies.mirrored import MirroredStrategy
from mpidist.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from mpidist.testing import run_ranks

ROWS = numpy.arange(60.0).reshape(20, 3)


def distribute(size, dataset_fn, **options):
    """Distribute what ``dataset_fn(rank)`` returns on every rank; return the first parts."""

    def fn():
        strategy = MultiWorkerMirroredStrategy()
        return next(iter(strategy.experimental_distribute_dataset(dataset_fn(strategy.extended.replica_id))))

    return run_ranks(size, fn, **options)


def labelled(x, y, **more):
    return Dataset.from_arrays({"x": x, "y": y, **more})


#: Data sets by rank where rank 1 has another one, and what is said about it.
DIFFERENT = {
    "rows": (
        lambda other: Dataset.from_arrays(ROWS[: 20 - other]).batch(4),
        r"tensor 0: rank 1 passed 'array' float64 \(19, 3\), ranks 0, 2 passed 'array' float64 \(20, 3\)",
    ),
    "dtype": (
        lambda other: labelled(ROWS, ROWS.astype("f4" if other else "f8")).batch(4),
        r"rank 1 passed 'array y' float32 \(20, 3\)",
    ),
    "structure": (
        lambda other: labelled(ROWS, ROWS, **({"z": ROWS} if other else {})).batch(4),
        r"rank 1 passed 3 tensors .*'array z'",
    ),
    "batch": (lambda other: Dataset.from_arrays(ROWS).batch(4 + other), "batch size: 5 on rank 1, 4 on ranks 0, 2"),
    "no batch": (
        lambda other: Dataset.from_arrays(ROWS) if other else Dataset.from_arrays(ROWS).batch(4),
        "batch size: None on rank 1, 4 on ranks 0, 2",
    ),
    "remainder": (
        lambda other: Dataset.from_arrays(ROWS).batch(4, drop_remainder=bool(other)),
        "drop_remainder: True on rank 1, False on ranks 0, 2",
    ),
    "seed": (
        lambda other: Dataset.from_arrays(ROWS).shuffle(seed=other).batch(4),
        r"order of the rows: shuffle\(seed=1\) on rank 1, shuffle\(seed=0\) on ranks 0, 2",
    ),
    "repeat": (
        lambda other: Dataset.from_arrays(ROWS).repeat(2 + other).batch(4),
        r"order of the rows: repeat\(3\) on rank 1, repeat\(2\) on ranks 0, 2",
    ),
    "data": (
        lambda other: labelled(ROWS, ROWS + other).batch(4),
        "checksum of the data in array y: 0x[0-9a-f]{8} on rank 1, 0x[0-9a-f]{8} on ranks 0, 2",
    ),
    "kind": (
        lambda other: [ROWS] if other else Dataset.from_arrays(ROWS).batch(4),
        "rank 1 passed 0 tensors to experimental_distribute_dataset",
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_data_set_that_differs_is_refused_on_all_ranks(name):
    dataset_fn, expected = DIFFERENT[name]
    with pytest.raises(CollectiveMismatchError, match=expected) as raised:
        distribute(3, lambda rank: dataset_fn(int(rank == 1)))
    assert set(raised.value.rank_errors) == {0, 1, 2}
    assert "Every rank must make the same data set" in str(raised.value)


def test_arrays_drawn_without_a_seed_are_refused():
    with pytest.raises(CollectiveMismatchError, match="checksum of the data in array: ") as raised:
        distribute(2, lambda rank: Dataset.from_arrays(numpy.random.default_rng().normal(size=(500, 7))).batch(8))
    assert "seed" in str(raised.value)


def test_ranks_on_other_nodes_are_compared():
    with pytest.raises(CollectiveMismatchError, match="batch size: 5 on rank 1"):
        distribute(2, lambda rank: Dataset.from_arrays(ROWS).batch(4 + rank), hosts=["a", "b"])


@pytest.mark.parametrize(
    "make",
    [
        lambda: Dataset.from_arrays(ROWS).shuffle().batch(4),
        lambda: Dataset.from_arrays((ROWS, numpy.array([None, 1] * 10))).batch(4),
        lambda: Dataset.from_arrays(numpy.zeros((0, 3))).repeat(2).batch(4, drop_remainder=False),
    ],
    ids=["shuffle without seed", "python objects", "no rows"],
)
def test_the_same_data_set_passes(make):
    def fn():
        return len(list(MirroredStrategy().experimental_distribute_dataset(make())))

    assert run_ranks(2, fn) == [len(make())] * 2


def test_the_order_of_the_keys_of_a_dict_does_not_matter():
    parts = distribute(2, lambda rank: Dataset.from_arrays({k: ROWS for k in ["xy", "yx"][rank]}).batch(4))
    assert [part["x"].tolist() for part in parts] == [ROWS[:2].tolist(), ROWS[2:4].tolist()]


@pytest.mark.parametrize("value", [7, ROWS])
def test_what_is_no_data_set_is_refused(value):
    with pytest.raises(TypeError, match="must be a mpidist.data.Dataset or an iterable of batches, got .*: make one"):
        distribute(2, lambda rank: value)
